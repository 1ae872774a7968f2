//! Connections kept warm and orderly ends, over real endpoints in a simulated world.

#[path = "../front/net.rs"]
#[allow(dead_code, reason = "what other tests need of it")]
mod net;

use std::net::SocketAddr;

use uroce::rng::Rng;
use uroce::time::{Duration, Instant};
use uroce::types::{AckTimeout, RnrTimer};
use uroce::verbs::{
    AccessFlags, CqHandle, InitAttr, Operation, Payload, QpCapabilities, QpHandle, QpInit, QpState, QpTransition,
    QpType, RecvWr, SendFlags, SendWr, Verbs, WcStatus, WorkCompletion,
};
use uroce_cm::id::IdOptions;
use uroce_cm::pool::{PoolQp, PooledConnection};
use uroce_cm::{
    ConnParam, Drain, DrainEnd, EventKind, IdHandle, PoolConfig, PoolDriver, RdmaCm, ReconnectPolicy,
    drain_and_disconnect,
};

use net::{A, B, Net, PORT, ip};

fn ms(v: u64) -> Duration {
    Duration::from_millis(v)
}

fn secs(v: u64) -> Duration {
    Duration::from_secs(v)
}

fn rc_qp(verbs: &mut dyn Verbs) -> (QpHandle, CqHandle) {
    let (pd, cq) = (verbs.alloc_pd().unwrap(), verbs.create_cq(64).unwrap());
    let init = QpInit {
        pd,
        qp_type: QpType::Rc,
        send_cq: cq,
        recv_cq: cq,
        srq: None,
        caps: QpCapabilities::default(),
        signal_all: true,
        qpn: None,
    };
    let qp = verbs.create_qp(init).unwrap();
    (qp, cq)
}

/// A pool on side A; side B accepts whatever comes.
struct Stage {
    net: Net,
    pool: PoolDriver,
    /// Connections of the server that live.
    served: Vec<(IdHandle, QpHandle)>,
}

impl Stage {
    fn new(config: PoolConfig) -> Self {
        let mut net = Net::new();
        net.tick = ms(1);
        let pd = net.on(A, |_, _, verbs| verbs.alloc_pd().unwrap());
        let qp = PoolQp { pd, caps: QpCapabilities::default(), cq_depth: 64 };
        let peer = SocketAddr::new(ip(B), PORT);
        // 4 ms, so that a peer that is gone shows soon.
        let options = IdOptions { ack_timeout: AckTimeout::new(10).unwrap(), ..IdOptions::default() };
        let pool = PoolDriver::new(config, qp, peer, Rng::from_u64(5)).with_options(None, options);
        Self { net, pool, served: Vec::new() }
    }

    fn run_for(&mut self, d: Duration) {
        let end = self.net.now() + d;
        while self.net.now() < end {
            self.step();
        }
    }

    fn step(&mut self) {
        let tick = self.net.tick;
        self.net.run_for(tick);
        for event in std::mem::take(&mut self.net.events[A]) {
            let Self { net, pool, .. } = self;
            let mine = net.on(A, |cm, now, verbs| pool.on_event(now, cm, verbs, &event));
            // What it closed itself may still be spoken of.
            assert!(mine || matches!(event.kind, EventKind::TimewaitExit | EventKind::Disconnected), "{event:?}");
        }
        for event in std::mem::take(&mut self.net.events[B]) {
            let id = event.id;
            match event.kind {
                EventKind::ConnectRequest => {
                    let qp = self.net.on(B, |cm, now, verbs| {
                        let (qp, _) = rc_qp(verbs);
                        cm.attach_qp(verbs, id, qp).unwrap();
                        cm.accept(now, verbs, id, &ConnParam::default()).unwrap();
                        qp
                    });
                    self.served.push((id, qp));
                }
                EventKind::Disconnected => {
                    self.net.on(B, |cm, now, verbs| {
                        // The QP may have been taken away by the test.
                        let _ = cm.disconnect(now, verbs, id);
                    });
                    self.served.retain(|(other, _)| *other != id);
                }
                _ => {}
            }
        }
        let Self { net, pool, .. } = self;
        net.on(A, |cm, now, verbs| pool.poll(now, cm, verbs));
    }

    fn state(&mut self, conn: &PooledConnection) -> QpState {
        self.net.on(A, |_, _, verbs| verbs.query_qp(conn.qp).unwrap().state)
    }

    fn checkin(&mut self, conn: &PooledConnection) -> bool {
        self.pool.checkin(self.net.now(), conn.key)
    }
}

fn config() -> PoolConfig {
    PoolConfig { min_warm: 2, max: 3, probe_after: Some(secs(5)), ..PoolConfig::default() }
}

#[test]
fn warm_connections_are_ready_to_send() {
    let mut s = Stage::new(config());
    s.net.listen(ip(B));
    s.run_for(ms(20));
    assert_eq!((s.pool.stats().idle, s.served.len()), (2, 2));
    let conn = s.pool.checkout().unwrap();
    assert_eq!(s.state(&conn), QpState::Rts);
    // Another is made ready in its place, and no more than the maximum.
    s.run_for(ms(20));
    assert_eq!((s.pool.stats().idle, s.pool.stats().lent, s.served.len()), (2, 1, 3));
    assert!(s.checkin(&conn) && !s.checkin(&conn));
    assert_eq!(s.pool.checkout().unwrap(), conn);
}

#[test]
fn probes_find_a_dead_connection_and_it_is_replaced() {
    let mut s = Stage::new(config());
    s.net.listen(ip(B));
    s.run_for(ms(20));
    let (_, dead) = s.served[0];
    // The server's QP fails, and nobody says so.
    s.net.on(B, |_, _, verbs| verbs.modify_qp(dead, QpTransition::Err.into()).unwrap());
    s.run_for(secs(8));
    let stats = s.pool.stats();
    assert_eq!((stats.idle, stats.probing, stats.probe_failures, stats.connected), (2, 0, 1, 3));
    for _ in 0..2 {
        let conn = s.pool.checkout().unwrap();
        assert_eq!(s.state(&conn), QpState::Rts);
        let peers = s.net.on(A, |_, _, verbs| verbs.query_qp(conn.qp).unwrap().attr.dest_qpn);
        let dead = s.net.on(B, |_, _, verbs| verbs.query_qp(dead).unwrap().qpn);
        assert_ne!(peers, Some(dead));
    }
}

#[test]
fn a_server_that_comes_late_is_found() {
    let reconnect = ReconnectPolicy { initial: ms(100), cap: ms(400), ..ReconnectPolicy::default() };
    let mut s = Stage::new(PoolConfig { min_warm: 1, reconnect, ..config() });
    s.run_for(secs(2));
    // Nobody listens: REJ 8, again and again, but less and less often.
    let failures = s.pool.stats().connect_failures;
    assert!((5..=15).contains(&failures), "{failures}");
    s.net.listen(ip(B));
    s.run_for(ms(450));
    assert_eq!((s.pool.stats().idle, s.served.len()), (1, 1));
}

#[test]
fn a_peer_that_disconnects_is_followed_and_a_lent_connection_is_not_taken_back() {
    let mut s = Stage::new(PoolConfig { min_warm: 1, ..config() });
    s.net.listen(ip(B));
    s.run_for(ms(20));
    let conn = s.pool.checkout().unwrap();
    let (id, _) = s.served[0];
    s.net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, id).unwrap());
    s.run_for(ms(20));
    assert!(!s.checkin(&conn));
    assert_eq!((s.pool.stats().lent, s.pool.stats().idle), (0, 1));
}

#[test]
fn a_pool_leaves_nothing_behind() {
    let mut s = Stage::new(PoolConfig { idle_timeout: ms(500), min_warm: 0, ..config() });
    s.net.listen(ip(B));
    s.run_for(ms(1));
    let node = s.net.nodes[A];
    let before = s.net.world.endpoint(node).object_counts();
    for _ in 0..20 {
        let mut lent = Vec::new();
        while lent.len() < 3 {
            lent.extend(s.pool.checkout());
            s.step();
        }
        let last = lent.pop().unwrap();
        for conn in lent {
            assert!(s.checkin(&conn));
        }
        s.pool.discard(s.net.now(), last.key);
        s.run_for(ms(1500));
        assert_eq!(s.pool.stats().idle + s.pool.stats().lent, 0);
        // All but the address handle of the peer, which QP1 keeps.
        assert_eq!(s.net.world.endpoint(node).object_counts()[..5], before[..5]);
    }
    assert_eq!((s.pool.stats().connected, s.pool.stats().idle_closed, s.served.len()), (60, 40, 0));
    assert_eq!(s.net.cms[A].agent().communications(), 0);
}

#[test]
fn what_fails_at_once_and_may_be_tried_at_once_does_not_hold_up_the_program() {
    let mut net = Net::new();
    let pd = net.on(A, |_, _, verbs| verbs.alloc_pd().unwrap());
    let caps = QpCapabilities { max_send_wr: u32::MAX, ..QpCapabilities::default() };
    let reconnect = ReconnectPolicy { initial: Duration::ZERO, ..ReconnectPolicy::default() };
    let config = PoolConfig { reconnect, ..config() };
    let mut pool =
        PoolDriver::new(config, PoolQp { pd, caps, cq_depth: 64 }, SocketAddr::new(ip(B), PORT), Rng::from_u64(5));
    net.on(A, |cm, now, verbs| pool.poll(now, cm, verbs));
    assert!((1..=256).contains(&pool.stats().connect_failures) && pool.take_error().is_some());
    assert_eq!(pool.poll_timeout(), Some(Instant::ZERO), "there is more to do");
}

/// A connection whose client has `sends` SENDs posted and whose server has `receives` receives.
fn busy(net: &mut Net, sends: usize, receives: usize) -> (IdHandle, QpHandle, CqHandle) {
    // Short RNR waits, so that what can be sent is soon done.
    let options = IdOptions { min_rnr_timer: RnrTimer::new(10).unwrap(), ..IdOptions::default() };
    let listener = net.listen(ip(B));
    net.on(B, |cm, _, _| cm.set_options(listener, options).unwrap());
    let id = net.resolved(ip(B));
    let (qp, cq) = net.on(A, |cm, now, verbs| {
        let (qp, cq) = rc_qp(verbs);
        cm.attach_qp(verbs, id, qp).unwrap();
        cm.connect(now, verbs, id, &ConnParam::default()).unwrap();
        (qp, cq)
    });
    let request = net.wait(B, EventKind::ConnectRequest);
    net.on(B, |cm, now, verbs| {
        let (qp, _) = rc_qp(verbs);
        cm.attach_qp(verbs, request.id, qp).unwrap();
        for wr_id in 0..receives as u64 {
            verbs.post_recv(qp, &[RecvWr { wr_id, sges: &[] }]).unwrap();
        }
        cm.accept(now, verbs, request.id, &ConnParam::default()).unwrap();
    });
    net.wait(A, EventKind::Established);
    net.on(A, |_, _, verbs| {
        for wr_id in 0..sends as u64 {
            let wr = SendWr {
                wr_id,
                operation: Operation::Send,
                payload: Payload::Sges(&[]),
                flags: SendFlags::SIGNALED,
                destination: None,
            };
            verbs.post_send(qp, &[wr]).unwrap();
        }
    });
    (id, qp, cq)
}

fn end_of(net: &mut Net, drain: &mut Drain) -> (DrainEnd, Instant) {
    loop {
        if let Some(end) = net.on(A, |cm, now, verbs| drain.poll(now, cm, verbs).unwrap()) {
            return (end, net.now());
        }
        net.run_for(ms(1));
    }
}

fn completions(net: &mut Net, cq: CqHandle, qp: QpHandle) -> [usize; 2] {
    let mut out = [WorkCompletion::blank(qp); 64];
    let n = net.on(A, |_, _, verbs| verbs.poll_cq(cq, &mut out).unwrap());
    let with = |status| out[..n].iter().filter(|c| c.status == status).count();
    [with(WcStatus::Success), with(WcStatus::WorkRequestFlushed)]
}

#[test]
fn a_drain_waits_for_all_sends_and_then_disconnects() {
    let mut net = Net::new();
    let (id, qp, cq) = busy(&mut net, 10, 10);
    let mut drain = drain_and_disconnect(id, qp, net.now() + secs(5));
    assert_eq!(net.on(A, |cm, now, verbs| drain.poll(now, cm, verbs).unwrap()), None);
    let (end, at) = end_of(&mut net, &mut drain);
    assert_eq!((end, drain.poll_timeout()), (DrainEnd::Drained, None));
    assert!(at < Instant::ZERO + secs(1));
    net.wait(B, EventKind::Disconnected);
    assert_eq!(completions(&mut net, cq, qp), [10, 0]);
    assert_eq!(end_of(&mut net, &mut drain).0, DrainEnd::Drained, "the end stays what it was");
}

#[test]
fn at_the_deadline_the_rest_is_flushed() {
    let mut net = Net::new();
    // The server has receives for three of ten.
    let (id, qp, cq) = busy(&mut net, 10, 3);
    let deadline = net.now() + ms(300);
    let mut drain = drain_and_disconnect(id, qp, deadline);
    let (end, at) = end_of(&mut net, &mut drain);
    assert_eq!(end, DrainEnd::DeadlinePassed { flushed: 7 });
    assert!(at >= deadline && at < deadline + ms(5));
    net.wait(B, EventKind::Disconnected);
    assert_eq!(completions(&mut net, cq, qp), [3, 7]);
}

#[test]
fn a_qp_that_failed_is_not_waited_for() {
    let mut net = Net::new();
    let (id, qp, cq) = busy(&mut net, 10, 3);
    net.run_for(ms(5));
    net.on(A, |_, _, verbs| verbs.modify_qp(qp, QpTransition::Err.into()).unwrap());
    let mut drain = drain_and_disconnect(id, qp, net.now() + secs(5));
    assert_eq!(end_of(&mut net, &mut drain).0, DrainEnd::Failed);
    assert_eq!(completions(&mut net, cq, qp), [3, 7]);
    net.wait(B, EventKind::Disconnected);
}

#[test]
fn a_peer_that_parts_first_ends_the_drain() {
    let mut net = Net::new();
    let (id, qp, _) = busy(&mut net, 10, 3);
    let peer = net.wait(B, EventKind::Established).id;
    let mut drain = drain_and_disconnect(id, qp, net.now() + secs(5));
    assert_eq!(net.on(A, |cm, now, verbs| drain.poll(now, cm, verbs).unwrap()), None);
    net.on(B, |cm, now, verbs| cm.disconnect(now, verbs, peer).unwrap());
    // All is over, TIMEWAIT too, before the program looks again.
    net.wait(A, EventKind::TimewaitExit);
    assert_eq!(end_of(&mut net, &mut drain).0, DrainEnd::Failed);
    assert_eq!(drain.poll_timeout(), None);
}

#[test]
fn many_qps_move_at_once_each_with_its_own_result() {
    let mut net = Net::new();
    net.on(A, |_, _, verbs| {
        let qps: Vec<QpHandle> = (0..3).map(|_| rc_qp(verbs).0).collect();
        verbs.destroy_qp(qps[1]).unwrap();
        let init = InitAttr::connected(AccessFlags::REMOTE_WRITE);
        let list: Vec<_> = qps.iter().map(|qp| (*qp, init.into())).collect();
        let results = verbs.modify_many(&list);
        assert!(results[0].is_ok() && results[2].is_ok());
        assert_eq!(results[1], Err(uroce::verbs::VerbsError::InvalidHandle));
        assert_eq!(verbs.query_qp(qps[2]).unwrap().state, QpState::Init);
    });
}
