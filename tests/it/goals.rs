//! Goals with figures: sequence numbers all the way round, packets of dead connections, every retry code, and
//! duplicates by the million. Each test states its figure; expected values come from the protocol.

use uroce::counters::DropReason;
use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid, PathMtu, Psn, Qpn, RnrTimer};
use uroce::verbs::{
    AccessFlags, AddressVector, AsyncEvent, CqHandle, FailureKind, InitAttr, Operation, Payload, QpCapabilities,
    QpHandle, QpInit, QpState, QpTransition, QpType, RecvWr, RtrAttr, RtsAttr, SendFlags, SendWr, Verbs, WcStatus,
    WorkCompletion,
};
use uroce_tests::pair::{Fate, Options, Pair, Side};

fn statuses(done: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn pattern(len: usize, salt: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    Rng::from_u64(salt).fill(&mut bytes);
    bytes
}

/// Every kind of message from every first PSN around both places where modular numbers are special (0 and 2^23), with
/// packets of both directions lost, repeated and late.
#[test]
fn psns_wrap_anywhere_under_loss() {
    const PIECE: u32 = 1500;
    for start in (0xFF_FFF0..=0xFF_FFFFu32).chain(0x7F_FFF0..=0x80_000F) {
        let mut rng = Rng::from_u64(u64::from(start));
        let options = Options { psn_a: start, psn_b: start ^ 0x80_0000, mtu: PathMtu::B256, ..Options::default() };
        let mut p = Pair::new(&options);
        let bytes = pattern(PIECE as usize, u64::from(start));
        p.a.region.write(0, &bytes).unwrap();
        p.b.recv(1, 10_000, PIECE);
        p.b.region.write(50_000, &7u64.to_ne_bytes()).unwrap();
        let (written, counter) = (p.b.remote(0), p.b.remote(50_000));
        p.a.send(1, Operation::Write(written), 0, PIECE);
        p.a.send(2, Operation::Read(written), 30_000, PIECE);
        p.a.send(3, Operation::FetchAdd { remote: counter, add: 3 }, 40_000, 8);
        p.a.send(4, Operation::Send, 0, PIECE);
        p.a.send(5, Operation::CompareSwap { remote: counter, compare: 10, swap: 99 }, 40_008, 8);
        p.run_for(Duration::from_secs(60), |_, _| match rng.within(0..=9) {
            0 => Fate::Drop,
            1 => Fate::Duplicate,
            2 => Fate::Late,
            _ => Fate::Deliver,
        });
        let done = statuses(&p.a.completions());
        assert_eq!(done, [1, 2, 3, 4, 5].map(|i| (i, WcStatus::Success)), "first PSN {start:#x}");
        let (a, b) = (p.a.region.to_vec(), p.b.region.to_vec());
        assert_eq!((&b[..1500], &a[30_000..31_500], &b[10_000..11_500]), (&bytes[..], &bytes[..], &bytes[..]));
        assert_eq!((&a[40_000..40_008], &a[40_008..40_016]), (&7u64.to_ne_bytes()[..], &10u64.to_ne_bytes()[..]));
        assert_eq!(b[50_000..50_008], 99u64.to_ne_bytes(), "each atomic once");
        assert_eq!(p.b.completions().len(), 1);
    }
}

/// Three times round the circle of 2^24 PSNs on one connection, a packet in about 5,000 lost in each direction.
#[test]
fn three_wraps_of_the_psn_with_loss() {
    const MESSAGE: u32 = 1 << 20;
    const PACKETS: u32 = MESSAGE / 256;
    const MESSAGES: u32 = 3 * (1 << 24) / PACKETS + 1;
    let mut rng = Rng::from_u64(3);
    let options =
        Options { mtu: PathMtu::B256, psn_a: 0xFF_0000, region: MESSAGE as usize + 4096, ..Options::default() };
    let mut p = Pair::new(&options);
    let mut lost = 0u32;
    let there = p.b.remote(0);
    for message in 0..MESSAGES {
        let stamp = u64::from(message).to_le_bytes();
        p.a.region.write(0, &stamp).unwrap();
        p.a.region.write(MESSAGE as usize - 8, &stamp).unwrap();
        p.a.send(u64::from(message), Operation::Write(there), 0, MESSAGE);
        let mut done = Vec::new();
        while done.is_empty() {
            p.stream_copies(|_, _| {
                let lose = rng.next_u32() < u32::MAX / 5_000;
                lost += u32::from(lose);
                usize::from(!lose)
            });
            done = p.a.completions();
            // Nothing moves by itself any more: a last packet or its ACK was lost, and the timer must find out.
            assert!(!done.is_empty() || p.next_timer());
        }
        assert_eq!(statuses(&done), [(u64::from(message), WcStatus::Success)]);
        let mut word = [0; 8];
        for at in [0, MESSAGE as usize - 8] {
            p.b.region.read(at, &mut word).unwrap();
            assert_eq!(word, stamp);
        }
    }
    let next = p.a.endpoint.query_qp(p.a.qp).unwrap().queues.sq_psn;
    assert_eq!(next, Psn::from_wire(0xFF_0000).plus((MESSAGES * PACKETS) & 0xFF_FFFF));
    assert!(lost > 5_000, "{lost} lost");
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Rts);
}

/// A QP of B's with the number that its last one had, connected to A's old number from PSN `psn` on.
fn reconnect_b(p: &mut Pair, psn: u32) {
    let (pd, cq) = (p.b.pd, p.b.cq);
    let caps = QpCapabilities::default();
    let qp_type = QpType::Rc;
    let qpn = Some(p.b.qpn);
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn };
    p.b.qp = p.b.endpoint.create_qp(init).unwrap();
    let rtr = RtrAttr {
        av: AddressVector::new(Gid::from(core::net::Ipv4Addr::new(10, 0, 0, 1)), 0),
        path_mtu: PathMtu::B256,
        dest_qpn: p.a.qpn,
        rq_psn: Psn::new(psn).unwrap(),
        max_dest_rd_atomic: 16,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    let access = InitAttr::connected(AccessFlags::ALL);
    for step in
        [QpTransition::Init(access), QpTransition::Rtr(rtr), QpTransition::Rts(RtsAttr::usual(Psn::new(psn).unwrap()))]
    {
        p.b.endpoint.modify_qp(p.b.qp, step.into()).unwrap();
    }
}

/// All packets of an old connection, 100,000 of them, come again: while its QP number is free, and when another
/// connection of the same two has it. None is accepted.
#[test]
fn ghosts_of_a_dead_connection_touch_nothing() {
    const GHOSTS: usize = 100_000;
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let (written, counter) = (p.b.remote(0), p.b.remote(50_000));
    for round in 0..8 {
        p.b.recv(round, 10_000, 1000);
        p.a.send(1, Operation::Write(written), 0, 5000);
        p.a.send(2, Operation::Read(written), 20_000, 5000);
        p.a.send(3, Operation::FetchAdd { remote: counter, add: 1 }, 40_000, 8);
        p.a.send(4, Operation::Send, 0, 1000);
        p.settle();
    }
    assert!(p.a.completions().iter().all(|c| c.status == WcStatus::Success));
    let old: Vec<Vec<u8>> = p.log.drain(..).filter(|(side, _)| *side == Side::A).map(|(_, bytes)| bytes).collect();
    p.b.completions();
    p.b.endpoint.destroy_qp(p.b.qp).unwrap();
    let fresh = pattern(1 << 16, 9);
    p.b.region.write(0, &fresh).unwrap();

    let before = p.b.endpoint.counters().dropped(DropReason::UnknownQp);
    for ghost in old.iter().cycle().take(GHOSTS) {
        p.deliver(Side::B, ghost);
    }
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::UnknownQp) - before, GHOSTS as u64);
    assert!(p.take_sent(Side::B).is_empty(), "nobody is told anything");

    // The old packets now lie behind the PSN expected (repeats of what was never sent), or ahead of it (a gap).
    for psn in [0x40_0000, 0xC0_0000] {
        reconnect_b(&mut p, psn);
        for wr_id in 0..16 {
            p.b.recv(wr_id, 10_000, 256);
        }
        for ghost in old.iter().cycle().take(GHOSTS) {
            p.deliver(Side::B, ghost);
            // The answers that a gap or a repeat draws are few and are the connection's own affair.
            p.take_sent(Side::B);
        }
        p.log.clear();
        let info = p.b.endpoint.query_qp(p.b.qp).unwrap();
        assert_eq!(
            (info.state, info.queues.rq_psn, info.queues.receives_posted),
            (QpState::Rts, Psn::new(psn).unwrap(), 16)
        );
        assert_eq!(p.b.completions(), []);
        assert_eq!(p.b.region.to_vec(), fresh, "not one byte of the new memory changed");
        p.b.endpoint.destroy_qp(p.b.qp).unwrap();
    }
}

/// retry_cnt 0 to 7 with every local ACK timeout code: the number of tries and the time are the formula's, exactly.
#[test]
fn retries_end_when_the_formula_says() {
    for retry in 0..=7u8 {
        for code in 1..=31u8 {
            let mut p = Pair::new(&Options { retry, timeout: code, ..Options::default() });
            let there = p.b.remote(0);
            p.a.send(1, Operation::Write(there), 0, 8);
            p.run_for(Duration::from_secs(1 << 20), |_, _| Fate::Drop);
            assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RetryExceeded)]);
            let error = p.a.endpoint.query_qp(p.a.qp).unwrap().last_error.unwrap();
            let one = AckTimeout::new(code).unwrap().duration().unwrap();
            let tries = u32::from(retry) + 1;
            assert_eq!((error.kind, error.tries, error.elapsed), (FailureKind::NoAnswer, tries, one * tries));
        }
        // Code 0: no timer at all, whatever the count.
        let mut p = Pair::new(&Options { retry, timeout: 0, ..Options::default() });
        let there = p.b.remote(0);
        p.a.send(1, Operation::Write(there), 0, 8);
        p.run(|_, _| Fate::Drop);
        assert_eq!((p.a.endpoint.poll_timeout(), p.a.completions().len()), (None, 0));
    }
}

/// rnr_retry 0 to 7 with every RNR timer code: the number of RNR NAKs and the time are the formula's, exactly; 7 is
/// for ever.
#[test]
fn rnr_retries_end_when_the_formula_says() {
    for limit in 0..=7u8 {
        for code in 0..=31u8 {
            let mut p = Pair::new(&Options { rnr_retry: limit, min_rnr: code, ..Options::default() });
            let wait = RnrTimer::new(code).unwrap().duration();
            let start = p.now;
            p.a.send(1, Operation::Send, 0, 8);
            if limit == 7 {
                p.run_for(wait * 100, |_, _| Fate::Deliver);
                assert_eq!(p.a.endpoint.counters().rcvd_rnr_err, 101);
                assert_eq!((p.a.completions().len(), p.now.saturating_since(start)), (0, wait * 100));
                continue;
            }
            p.run_for(Duration::from_secs(100), |_, _| Fate::Deliver);
            assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RnrRetryExceeded)]);
            assert_eq!(p.a.endpoint.counters().rcvd_rnr_err, u64::from(limit) + 1);
            let error = p.a.endpoint.query_qp(p.a.qp).unwrap().last_error.unwrap();
            let want = (FailureKind::ReceiverNotReady, u32::from(limit) + 1, wait * u32::from(limit));
            assert_eq!((error.kind, error.tries, error.elapsed), want, "limit {limit} code {code}");
        }
    }
}

/// A million atomics, every packet of the requester arriving 1 to 16 times: each is executed once and each answer is
/// the sum of those before it.
#[test]
fn a_million_atomics_under_duplication_are_each_executed_once() {
    const OPS: u64 = 1_000_000;
    const BATCH: u64 = 64;
    let caps = QpCapabilities { max_send_wr: 256, ..QpCapabilities::default() };
    let mut p = Pair::new(&Options { caps, rd_atomic: 64, ..Options::default() });
    let counter = p.b.remote(0);
    let (mut n, mut sum, mut copies) = (0usize, 0u64, 0u64);
    for first in (0..OPS).step_by(BATCH as usize) {
        for i in 0..BATCH {
            p.a.send(first + i, Operation::FetchAdd { remote: counter, add: first + i }, 8 * i, 8);
        }
        p.stream_copies(|side, _| {
            if side == Side::B {
                return 1;
            }
            // Mostly two or three copies, and every number up to 16.
            n += 1;
            let times = if n.is_multiple_of(32) { 1 + n / 32 % 16 } else { 1 + n % 3 };
            copies += times as u64;
            times
        });
        let done = p.a.completions();
        assert_eq!(done.len() as u64, BATCH);
        for (i, wc) in done.iter().enumerate() {
            let mut before = [0; 8];
            p.a.region.read(8 * i, &mut before).unwrap();
            assert_eq!((wc.status, u64::from_ne_bytes(before)), (WcStatus::Success, sum));
            sum = sum.wrapping_add(first + i as u64);
        }
    }
    assert_eq!(p.b.region.fetch_add(0, 0), Some(sum));
    assert!(copies > 2 * OPS);
    assert!(p.b.endpoint.counters().duplicate_request > OPS / 2);
}

/// Requests of every kind, each packet arriving 1 to 16 times: one completion, one execution.
#[test]
fn requests_of_every_kind_under_duplication_happen_once() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    for round in 0..2000u64 {
        let bytes = pattern(1000, round);
        p.a.region.write(0, &bytes).unwrap();
        p.b.recv(round, 10_000, 1000);
        p.b.recv(round, 10_000, 0);
        let (written, counter) = (p.b.remote(0), p.b.remote(50_000));
        p.a.send(1, Operation::Send, 0, 1000);
        p.a.send(2, Operation::Write(written), 0, 1000);
        p.a.send(3, Operation::Read(written), 30_000, 1000);
        p.a.send(4, Operation::WriteImm(written, uroce::types::Imm::new(1)), 0, 1000);
        p.a.send(5, Operation::FetchAdd { remote: counter, add: 1 }, 40_000, 8);
        p.a.send(6, Operation::CompareSwap { remote: counter, compare: round + 1, swap: round + 1 }, 40_008, 8);
        let mut n = usize::try_from(round).unwrap();
        p.stream_copies(|side, _| {
            n += 1;
            if side == Side::A { 1 + n % 16 } else { 1 + n % 2 }
        });
        assert_eq!(statuses(&p.a.completions()), [1, 2, 3, 4, 5, 6].map(|i| (i, WcStatus::Success)));
        assert_eq!(p.b.completions().len(), 2);
        let mut came = vec![0; 1000];
        for (region, at) in [(&p.b.region, 10_000), (&p.b.region, 0), (&p.a.region, 30_000)] {
            region.read(at, &mut came).unwrap();
            assert_eq!(came, bytes);
        }
        assert_eq!(p.b.region.fetch_add(50_000, 0), Some(round + 1));
    }
}

/// A second RC QP on `side`, with completion queues of its own, in RTS towards `peer`.
fn neighbour(p: &mut Pair, side: Side, qpn: u32, peer: u32, depth: u32) -> (QpHandle, CqHandle) {
    let ip = core::net::Ipv4Addr::new(10, 0, 0, if side == Side::A { 2 } else { 1 });
    // The harness carries everything in one flow, whose port the ICRC covers.
    let port = p.flow_from(side).src_port;
    let node = p.node(side);
    let cq = node.endpoint.create_cq(depth).unwrap();
    let caps = QpCapabilities::default();
    let (pd, qp_type, qpn) = (node.pd, QpType::Rc, Qpn::new(qpn));
    let init = QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq: None, caps, signal_all: false, qpn };
    let qp = node.endpoint.create_qp(init).unwrap();
    let rtr = RtrAttr {
        av: AddressVector { udp_source_port: port.into(), ..AddressVector::new(Gid::from(ip), 0) },
        path_mtu: PathMtu::B256,
        dest_qpn: Qpn::new(peer).unwrap(),
        rq_psn: Psn::ZERO,
        max_dest_rd_atomic: 16,
        min_rnr_timer: RnrTimer::DEFAULT,
    };
    for step in [
        QpTransition::Init(InitAttr::connected(AccessFlags::ALL)),
        QpTransition::Rtr(rtr),
        QpTransition::Rts(RtsAttr::usual(Psn::ZERO)),
    ] {
        node.endpoint.modify_qp(qp, step.into()).unwrap();
    }
    (qp, cq)
}

/// A QP whose CQ overruns, or whose receive queue stays empty, costs the other QP of the endpoint nothing.
#[test]
fn an_overrun_and_an_empty_queue_leave_the_neighbour_alone() {
    for depth in [2, 64] {
        let mut p = Pair::new(&Options::default());
        let (qp_a, _) = neighbour(&mut p, Side::A, 900, 901, 64);
        let (qp_b, cq_b) = neighbour(&mut p, Side::B, 901, 900, depth);
        let empty = RecvWr { wr_id: 0, sges: &[] };
        // With the short CQ there are receives and they overrun it; with the long one there is none.
        let receives = if depth == 2 { 8 } else { 0 };
        p.b.endpoint.post_recv(qp_b, &vec![empty; receives]).unwrap();
        let payload = Payload::Inline(&[]);
        let flags = SendFlags::SIGNALED;
        let wr = SendWr { wr_id: 1, operation: Operation::Send, payload, flags, destination: None };
        p.a.endpoint.post_send(qp_a, &[wr; 8]).unwrap();
        for round in 0..100 {
            p.b.recv(round, 0, 8);
            p.a.send(round, Operation::Send, 0, 8);
            p.settle();
            assert_eq!(statuses(&p.a.completions()), [(round, WcStatus::Success)]);
            assert_eq!(statuses(&p.b.completions()), [(round, WcStatus::Success)]);
        }
        let events: Vec<_> = std::iter::from_fn(|| p.b.endpoint.poll_event()).collect();
        let state = p.b.endpoint.query_qp(qp_b).unwrap().state;
        let overran = events.iter().filter(|e| **e == AsyncEvent::CqError(cq_b)).count();
        let want = if depth == 2 { (QpState::Err, 1) } else { (QpState::Rts, 0) };
        assert_eq!((state, overran), want, "{events:?}");
        assert!(p.a.endpoint.pending_timers() <= 2, "one timer a QP, however long it waits");
    }
}
