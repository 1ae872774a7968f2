//! Many connections one after the other, and many at once: they leave no object and no memory behind. A program of its
//! own, as it replaces the allocator.

mod front;
mod memory;
#[path = "../front/net.rs"]
#[allow(dead_code, reason = "what other tests need of it")]
mod net;
#[path = "../agent/pair.rs"]
#[allow(dead_code, reason = "what other tests need of it")]
mod pair;

use uroce::rng::Rng;
use uroce::time::Instant;
use uroce::types::{AckTimeout, Gid};
use uroce_cm::agent::{AcceptParams, AddressFilter, ConnectParams, Limits, MadAddress};
use uroce_cm::comm::Path;
use uroce_cm::wire::{CaGuid, CommunicationId, Mad, Message, Req, TransactionId};
use uroce_cm::{Agent, CmEvent, Config};

use memory::held;
use pair::{A, B, Pair, SERVICE, accept_params, connect_params, exact, gid, ms, qpn};

/// Connects and disconnects, one QP number for each of `at_once`, and forgets what the test itself writes down.
fn cycle(pair: &mut Pair, at_once: u32) {
    let comms: Vec<_> = (0..at_once).map(|n| pair.connect_from(A, qpn(0x1_0000 + n), b"")).collect();
    pair.run_for(ms(3));
    for comm in comms {
        pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    }
    // TIMEWAIT lasts 67 ms.
    pair.run_for(ms(80));
    for side in [A, B] {
        let ended = pair.told(side).iter().filter(|e| **e == "TimewaitExit").count();
        assert_eq!(ended, at_once as usize);
        pair.sent[side].clear();
        pair.events[side].clear();
        pair.terms[side].clear();
    }
    // The QPs of connections that are over may be used again.
    pair.next_qpn = 0x100;
}

#[test]
fn a_hundred_thousand_connections_leave_nothing() {
    let mut pair = Pair::new();
    pair.listen(B);
    for _ in 0..1000 {
        cycle(&mut pair, 1);
    }
    let before = held();
    for _ in 0..100_000 {
        cycle(&mut pair, 1);
    }
    let grown = held() - before;
    assert!(grown < 64 << 10, "{grown} bytes more than before");
    pair.run_for(ms(1000));
    assert_nothing_left(&mut pair);
}

#[test]
fn a_thousand_connections_at_once_leave_nothing() {
    let limits = Limits { outgoing: 4096, ..exact().limits };
    let config = Config { limits, ..exact() };
    let mut pair = Pair::with(1, config, config);
    pair.agents[B].listen(SERVICE, AddressFilter::Any, 1000).unwrap();
    for _ in 0..3 {
        cycle(&mut pair, 1000);
    }
    let before = held();
    for _ in 0..20 {
        cycle(&mut pair, 1000);
    }
    let grown = held() - before;
    assert!(grown < 64 << 10, "{grown} bytes more than before");
    assert_nothing_left(&mut pair);
}

/// What waits after 65,536 connections fits 4 MiB a side.
#[test]
fn a_full_timewait_is_small() {
    let config = Config { timewait_cap: ms(3_600_000), ..exact() };
    let mut pair = Pair::with(1, config, config);
    pair.listen(B);
    let mut path = Path::new(gid(A), gid(B));
    path.ack_timeout = AckTimeout::new(31).unwrap();
    let park = |pair: &mut Pair, count: usize| {
        for _ in 0..count / 64 {
            let comms: Vec<_> = (0..64)
                .map(|_| {
                    let params = ConnectParams { path, local_qpn: pair.fresh_qpn(), ..connect_params(A) };
                    pair.agents[A].connect(pair.now, &params).unwrap()
                })
                .collect();
            pair.run_for(ms(3));
            for comm in comms {
                pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
            }
            pair.run_for(ms(3));
            for side in [A, B] {
                pair.sent[side].clear();
                pair.events[side].clear();
                pair.terms[side].clear();
            }
        }
    };
    park(&mut pair, 64);
    let before = held();
    park(&mut pair, 65_536 - 64);
    assert_eq!([A, B].map(|side| pair.agents[side].in_timewait()), [65_536; 2]);
    let grown = held() - before;
    assert!(grown <= 2 * (4 << 20), "{grown} bytes for both sides");
    // One more takes the place of the oldest.
    park(&mut pair, 64);
    assert_eq!([A, B].map(|side| pair.agents[side].in_timewait()), [65_536; 2]);
    assert_eq!(pair.agents[A].counters().timewait_evicted, 64);
}

/// As many half-open connections as there may be fit 2 MiB, asked by nobody's consumer and accepted alike.
#[test]
fn full_half_open_tables_are_small() {
    let mut client = Agent::new(exact(), Rng::from_u64(11));
    client.connect(Instant::ZERO, &connect_params(A)).unwrap();
    let Message::Req(good) = Mad::parse(&client.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    let mut server = Agent::new(exact(), Rng::from_u64(12));
    server.listen(SERVICE, AddressFilter::Any, usize::MAX).unwrap();
    let before = held();
    for n in 0..10_000u32 {
        let source = Gid::from(std::net::Ipv4Addr::from(0x0a01_0000 + n));
        let mut primary = good.primary;
        primary.local_gid = source;
        let (local_comm_id, local_qpn) = (CommunicationId::new(n + 1), qpn(n + 16));
        let req = Req { local_comm_id, local_qpn, ca_guid: CaGuid::new(u64::from(n) << 20), primary, ..good };
        let from = MadAddress { local: gid(B), remote: source };
        server.handle_mad(Instant::ZERO, from, &Mad::new(TransactionId::new(n.into()), req).emit());
        while server.poll_mad().is_some() {}
    }
    assert_eq!(server.half_open(), 2048);
    let asked = held() - before;
    assert!(asked <= 2 << 20, "{asked} bytes with the requests unanswered");
    let mut local = 0x10_0000;
    while let Some(CmEvent::ConnectRequest(request)) = server.poll_event() {
        local += 1;
        let params = AcceptParams { local_qpn: qpn(local), ..accept_params() };
        server.accept(Instant::ZERO, request.comm, &params).unwrap();
        while server.poll_mad().is_some() {}
    }
    assert_eq!(server.half_open(), 2048);
    let accepted = held() - before;
    assert!(accepted <= 2 << 20, "{accepted} bytes with the replies out");
}

fn assert_nothing_left(pair: &mut Pair) {
    for side in [A, B] {
        let agent = &mut pair.agents[side];
        let left = (agent.communications(), agent.half_open(), agent.in_timewait(), agent.service_exchanges());
        assert_eq!(left, (0, 0, 0, 0));
        assert_eq!((agent.poll_mad(), agent.poll_event(), agent.poll_timeout()), (None, None, None));
    }
}
