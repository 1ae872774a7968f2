//! Peers that misbehave: everything they send is answered with the right word or dropped, and nothing grows.

use uroce::rng::Rng;
use uroce::types::{PKey, PathMtu};
use uroce_cm::agent::{AddressFilter, CmEvent, ConnectParams, Limits, MadAddress};
use uroce_cm::comm::CommState;
use uroce_cm::wire::{
    Ari, CaGuid, CmTimeout, CommunicationId, Drep, Dreq, Mad, Message, PrivateData, Rej, RejReason, RejectedMessage,
    Rep, Req, Rtu, ServiceId, SidrReq, SidrStatus, TransactionId, TransportService,
};
use uroce_cm::{Agent, Config, RetryPolicy};

use crate::pair::{A, B, Pair, SERVICE, accept_params, at, connect_params, exact, gid, ms, qpn};

const FROM: fn() -> MadAddress = || MadAddress { local: gid(B), remote: gid(A) };

/// The REQ that a good client sends.
fn good_req() -> Req {
    let mut client = Agent::new(exact(), Rng::from_u64(11));
    client.connect(at(0), &connect_params(A)).unwrap();
    let Message::Req(req) = Mad::parse(&client.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    req
}

fn server(limits: Limits) -> Agent {
    let mut agent = Agent::new(Config { limits, ..exact() }, Rng::from_u64(12));
    agent.listen(SERVICE, AddressFilter::Any, usize::MAX).unwrap();
    agent
}

fn feed(agent: &mut Agent, message: impl Into<Message>) {
    agent.handle_mad(at(0), FROM(), &Mad::new(TransactionId::new(5), message).emit());
}

fn answer(agent: &mut Agent) -> Option<Message> {
    let mad = agent.poll_mad()?;
    assert_eq!(agent.poll_mad(), None, "one answer");
    let mad = Mad::parse(&mad.bytes).unwrap();
    assert_eq!(mad.header.transaction_id, TransactionId::new(5), "the answer repeats the transaction");
    Some(mad.message)
}

#[test]
fn each_bad_field_of_a_req_has_its_reason() {
    let good = good_req();
    let primary = good.primary;
    let with_path = |change: fn(&mut uroce_cm::wire::PathRecord)| {
        let mut path = primary;
        change(&mut path);
        Req { primary: path, ..good }
    };
    let no_hops = uroce_cm::wire::PathRecord { hop_limit: 0, ..primary };
    let no_gid = uroce_cm::wire::PathRecord { local_gid: uroce::types::Gid::default(), ..primary };
    let cases = [
        (Req { transport: TransportService::Rd, ..good }, RejReason::InvalidTransport, &b""[..]),
        (Req { transport: TransportService::Extended, ..good }, RejReason::InvalidTransport, b""),
        (Req { local_qpn: qpn(1), ..good }, RejReason::NoQp, b""),
        (Req { local_qpn: qpn(0xff_ffff), ..good }, RejReason::NoQp, b""),
        (Req { pkey: PKey::new(0x8001), ..good }, RejReason::Unsupported, b""),
        (Req { path_mtu_code: 0, ..good }, RejReason::InvalidMtu, &[4]),
        (Req { path_mtu_code: 5, ..good }, RejReason::InvalidMtu, &[4]),
        (Req { path_mtu_code: 15, ..good }, RejReason::InvalidMtu, &[4]),
        (with_path(|p| p.hop_limit = 0), RejReason::InvalidHopLimit, &[64]),
        (Req { alternate: no_hops, ..good }, RejReason::InvalidAltHopLimit, &[64]),
        (Req { alternate: no_gid, ..good }, RejReason::InvalidAltGid, b""),
        (with_path(|p| p.local_gid = gid(7)), RejReason::InvalidGid, &gid(B).to_bytes()),
        (with_path(|p| p.remote_gid = gid(7)), RejReason::InvalidGid, &gid(B).to_bytes()),
    ];
    for (req, reason, ari) in cases {
        let mut agent = Agent::new(Config { max_mtu: PathMtu::B2048, ..exact() }, Rng::from_u64(1));
        agent.listen(SERVICE, AddressFilter::Any, 8).unwrap();
        feed(&mut agent, req);
        let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!("{reason}: no REJ") };
        assert_eq!((rej.reason, rej.ari.as_bytes(), rej.message), (reason, ari, RejectedMessage::Req));
        assert_eq!(rej.remote_comm_id, req.local_comm_id);
        assert_eq!((agent.communications(), agent.poll_event()), (0, None));
    }
}

#[test]
fn a_rep_that_asks_for_more_than_was_offered_is_refused() {
    let mut agent = Agent::new(Config { max_responder_resources: 4, ..exact() }, Rng::from_u64(1));
    let address = MadAddress { local: gid(A), remote: gid(B) };
    agent.connect(at(0), &connect_params(A)).unwrap();
    let Message::Req(req) = Mad::parse(&agent.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    let rep = Rep {
        local_comm_id: CommunicationId::new(9),
        remote_comm_id: req.local_comm_id,
        local_qkey: uroce::types::QKey::default(),
        local_qpn: qpn(0x30),
        local_eecn: 0,
        vendor_id: [0; 3],
        starting_psn: uroce::types::Psn::ZERO,
        responder_resources: 4,
        initiator_depth: 5,
        target_ack_delay: 0,
        failover_accepted: 0,
        flow_control: false,
        rnr_retry_count: 7,
        srq: false,
        reserved: 0,
        ca_guid: CaGuid::new(77),
        private_data: PrivateData::EMPTY,
    };
    agent.handle_mad(at(1), address, &Mad::new(TransactionId::new(5), rep).emit());
    let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!() };
    assert_eq!(rej.reason, RejReason::InsufficientResponderResources);
    assert_eq!((rej.ari.as_bytes(), rej.message), (&[4u8][..], RejectedMessage::Rep));
    assert!(matches!(agent.poll_event(), Some(CmEvent::Rejected(_))));
    // Once it is over, the REP is for nobody: reason 6, so that the server stops repeating it.
    agent.handle_mad(at(2), address, &Mad::new(TransactionId::new(5), rep).emit());
    let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!() };
    assert_eq!(rej.reason, RejReason::InvalidCommId);
    // With room for five, the peer that wants more than the REQ offered is served.
    let mut agent = Agent::new(Config { max_responder_resources: 5, ..exact() }, Rng::from_u64(1));
    agent.connect(at(0), &connect_params(A)).unwrap();
    let Message::Req(req) = Mad::parse(&agent.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    assert!(req.responder_resources < 5);
    let rep = Rep { remote_comm_id: req.local_comm_id, ..rep };
    agent.handle_mad(at(1), address, &Mad::new(TransactionId::new(5), rep).emit());
    let Some(CmEvent::Reply(reply)) = agent.poll_event() else { panic!() };
    assert_eq!(reply.terms.max_dest_rd_atomic, 5);
}

#[test]
fn a_dreq_for_nobody_is_answered() {
    let mut agent = server(Limits::default());
    let (theirs, ours) = (CommunicationId::new(1), CommunicationId::new(2));
    feed(
        &mut agent,
        Dreq {
            local_comm_id: theirs,
            remote_comm_id: ours,
            remote_qpn: qpn(3),
            reserved: 0,
            private_data: PrivateData::EMPTY,
        },
    );
    let Some(Message::Drep(drep)) = answer(&mut agent) else { panic!() };
    assert_eq!((drep.local_comm_id, drep.remote_comm_id), (ours, theirs));
}

#[test]
fn services_that_are_not_offered_say_so() {
    let mut agent = server(Limits::default());
    let sidr = SidrReq {
        request_id: 0x55,
        pkey: PKey::DEFAULT,
        reserved: 0,
        service_id: ServiceId::new(0x99),
        private_data: PrivateData::EMPTY,
    };
    feed(&mut agent, sidr);
    let Some(Message::SidrRep(rep)) = answer(&mut agent) else { panic!() };
    assert_eq!((rep.request_id, rep.status, rep.service_id), (0x55, SidrStatus::Unsupported, ServiceId::new(0x99)));
}

#[test]
fn ten_thousand_half_open_connections_are_bounded() {
    let mut agent = server(Limits::default());
    let good = good_req();
    for n in 0..10_000u32 {
        let req = Req {
            local_comm_id: CommunicationId::new(n + 1),
            local_qpn: qpn(n + 16),
            ca_guid: CaGuid::new(u64::from(n) << 20),
            ..good
        };
        feed(&mut agent, req);
        let refused = matches!(answer(&mut agent), Some(Message::Rej(r)) if r.reason == RejReason::NoResources);
        assert_eq!(refused, n >= 2048);
    }
    assert_eq!((agent.half_open(), agent.communications()), (2048, 2048));
    assert_eq!(agent.counters().overflows, 10_000 - 2048);
    // Refused by the consumer, they are gone.
    while let Some(event) = agent.poll_event() {
        let CmEvent::ConnectRequest(r) = event else { panic!() };
        agent.reject(r.comm, RejReason::ConsumerDefined, b"", b"").unwrap();
    }
    assert_eq!((agent.half_open(), agent.communications()), (0, 0));
}

#[test]
fn events_that_nobody_takes_are_bounded() {
    // A peer that asks and gives up, for ever, against a consumer that is asleep.
    let mut agent = server(Limits { events: 100, ..Limits::default() });
    let good = good_req();
    for n in 0..1000u32 {
        let req = Req { local_comm_id: CommunicationId::new(n + 1), local_qpn: qpn(n + 16), ..good };
        feed(&mut agent, req);
        feed(
            &mut agent,
            Rej {
                local_comm_id: req.local_comm_id,
                remote_comm_id: CommunicationId::NONE,
                message: RejectedMessage::Other,
                reason: RejReason::Timeout,
                ari: Ari::new(&req.ca_guid.get().to_be_bytes()),
                private_data: PrivateData::EMPTY,
            },
        );
        while agent.poll_mad().is_some() {}
    }
    assert_eq!(agent.communications(), 0);
    let events = std::iter::from_fn(|| agent.poll_event()).count();
    assert_eq!(events, 100);
}

#[test]
fn answers_that_nobody_sends_are_bounded() {
    let mut agent = server(Limits { outgoing: 10, ..Limits::default() });
    for n in 0..1000 {
        feed(
            &mut agent,
            Dreq {
                local_comm_id: CommunicationId::new(n),
                remote_comm_id: CommunicationId::new(n),
                remote_qpn: qpn(3),
                reserved: 0,
                private_data: PrivateData::EMPTY,
            },
        );
    }
    assert_eq!(std::iter::from_fn(|| agent.poll_mad()).count(), 10);
    assert_eq!(agent.counters().outgoing_dropped, 990);
}

#[test]
fn timewait_is_bounded() {
    let config = Config { limits: Limits { timewait: 3, ..Limits::default() }, ..exact() };
    let mut pair = Pair::with(1, config, exact());
    pair.listen(B);
    for _ in 0..5 {
        let comm = pair.connect(A);
        pair.run_for(ms(4));
        pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
        pair.run_for(ms(3));
    }
    assert_eq!((pair.agents[A].in_timewait(), pair.agents[A].counters().timewait_evicted), (3, 2));
    assert_eq!(pair.told(A).iter().filter(|e| **e == "TimewaitExit").count(), 2);
}

#[test]
fn many_timers_at_once_are_handled_in_portions() {
    let limits = Limits { comms: 20_000, outgoing: 20_000, ..Limits::default() };
    let retry = RetryPolicy { retries: 0, ..exact().retry };
    let mut agent = Agent::new(Config { limits, retry, ..exact() }, Rng::from_u64(1));
    for n in 0..20_000 {
        let params = ConnectParams { local_qpn: qpn(n + 16), ..connect_params(A) };
        agent.connect(at(0), &params).unwrap();
    }
    assert!(agent.connect(at(0), &connect_params(A)).is_err());
    while agent.poll_mad().is_some() {}
    let mut calls = 0;
    while agent.poll_timeout().is_some_and(|due| due <= at(1000)) {
        agent.handle_timeout(at(1000));
        let in_one_call = std::iter::from_fn(|| agent.poll_event()).count();
        assert!(in_one_call <= 256, "{in_one_call}");
        calls += 1;
    }
    assert_eq!((calls, agent.communications()), (20_000usize.div_ceil(256), 0));
}

#[test]
fn strangers_do_not_touch_a_connection() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(10));
    let (_, b) = pair.comms();
    let Message::Rep(rep) = pair.sent[B][0].1.message else { panic!() };
    let (theirs, ours) = (rep.remote_comm_id, rep.local_comm_id);
    let forged: [Message; 3] = [
        Dreq {
            local_comm_id: theirs,
            remote_comm_id: ours,
            remote_qpn: rep.local_qpn,
            reserved: 0,
            private_data: PrivateData::EMPTY,
        }
        .into(),
        Drep { local_comm_id: theirs, remote_comm_id: ours, private_data: PrivateData::EMPTY }.into(),
        Rej {
            local_comm_id: theirs,
            remote_comm_id: ours,
            message: RejectedMessage::Rep,
            reason: RejReason::StaleConnection,
            ari: Ari::EMPTY,
            private_data: PrivateData::EMPTY,
        }
        .into(),
    ];
    for message in forged {
        let from = MadAddress { remote: gid(9), ..FROM() };
        pair.agents[B].handle_mad(pair.now, from, &Mad::new(TransactionId::new(5), message).emit());
        assert_eq!(pair.agents[B].state(b), Some(CommState::Established));
    }
    assert_eq!(pair.agents[B].counters().strangers, 3);
    // From the right address, with a wrong QPN or id, it is not for this connection either.
    let wrong = Dreq {
        local_comm_id: theirs,
        remote_comm_id: ours,
        remote_qpn: qpn(0x7777),
        reserved: 0,
        private_data: PrivateData::EMPTY,
    };
    pair.agents[B].handle_mad(pair.now, FROM(), &Mad::new(TransactionId::new(5), wrong).emit());
    let wrong = Rtu { local_comm_id: CommunicationId::new(1), remote_comm_id: ours, private_data: PrivateData::EMPTY };
    pair.agents[B].handle_mad(pair.now, FROM(), &Mad::new(TransactionId::new(5), wrong).emit());
    assert_eq!(pair.agents[B].state(b), Some(CommState::Established));
}

/// 32 random bits are soon guessed when a thousand connections wait to be hit, and source addresses and GUIDs are no
/// secrets: a refusal ends a connection only if it names both ids, as REQ and REP have told them.
#[test]
fn a_refusal_that_names_one_id_ends_no_connection() {
    for (side, reason) in [(A, RejReason::ConsumerDefined), (B, RejReason::ConsumerDefined), (B, RejReason::Timeout)] {
        let mut pair = Pair::new();
        pair.listen(B);
        pair.connect(A);
        pair.run_until(at(10));
        let (a, b) = pair.comms();
        let Message::Rep(rep) = pair.sent[B][0].1.message else { panic!() };
        let (ids, comm) = if side == A {
            ((rep.local_comm_id, rep.remote_comm_id), a)
        } else {
            ((rep.remote_comm_id, rep.local_comm_id), b)
        };
        let guid = Ari::new(&pair.agents[1 - side].ca_guid().get().to_be_bytes());
        let (local_comm_id, remote_comm_id) = match reason {
            // Only who has not heard of us yet, and gives up, is found by its GUID.
            RejReason::Timeout => (ids.0, CommunicationId::NONE),
            _ => (CommunicationId::NONE, ids.1),
        };
        let message = RejectedMessage::Other;
        let forged =
            Rej { local_comm_id, remote_comm_id, message, reason, ari: guid, private_data: PrivateData::EMPTY };
        let from = MadAddress { local: gid(side), remote: gid(1 - side) };
        let arrive = |pair: &mut Pair, rej| {
            pair.agents[side].handle_mad(pair.now, from, &Mad::new(TransactionId::new(5), rej).emit());
        };
        arrive(&mut pair, forged);
        assert_eq!(pair.agents[side].state(comm), Some(CommState::Established), "{side} {reason}");
        assert_eq!(pair.agents[side].counters().unmatched, 1);
        // With both it does.
        arrive(&mut pair, Rej { local_comm_id: ids.0, remote_comm_id: ids.1, ..forged });
        assert_eq!((pair.agents[side].state(comm), pair.agents[side].in_timewait()), (None, 1), "{side} {reason}");
    }
}

/// No id is forbidden, and one in 2^32 of Linux is 0.
#[test]
fn a_peer_whose_id_is_zero_can_part() {
    let mut agent = server(Limits::default());
    feed(&mut agent, Req { local_comm_id: CommunicationId::new(0), ..good_req() });
    let Some(CmEvent::ConnectRequest(request)) = agent.poll_event() else { panic!() };
    agent.accept(at(0), request.comm, &accept_params()).unwrap();
    let Message::Rep(rep) = Mad::parse(&agent.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    let (local_comm_id, remote_comm_id) = (rep.remote_comm_id, rep.local_comm_id);
    feed(&mut agent, Rtu { local_comm_id, remote_comm_id, private_data: PrivateData::EMPTY });
    assert_eq!(agent.state(request.comm), Some(CommState::Established));
    let private_data = PrivateData::EMPTY;
    feed(&mut agent, Dreq { local_comm_id, remote_comm_id, remote_qpn: rep.local_qpn, reserved: 0, private_data });
    assert_eq!(agent.state(request.comm), Some(CommState::DreqRcvd));
}

#[test]
fn a_stranger_that_names_a_live_qp_disconnects_nobody() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(10));
    let (_, b) = pair.comms();
    let Message::Req(req) = pair.sent[A][0].1.message else { panic!() };
    // GUID and QPN of A, but from elsewhere: whoever saw A's REQ can send that. It is a request like any other.
    let mut primary = req.primary;
    primary.local_gid = gid(9);
    let forged = Req { local_comm_id: CommunicationId::new(77), primary, ..req };
    let from = MadAddress { remote: gid(9), ..FROM() };
    pair.agents[B].handle_mad(pair.now, from, &Mad::new(TransactionId::new(5), forged).emit());
    assert_eq!(answer(&mut pair.agents[B]), None);
    let Some(CmEvent::ConnectRequest(request)) = pair.agents[B].poll_event() else { panic!() };
    assert_ne!(request.comm, b);
    assert_eq!(pair.agents[B].state(b), Some(CommState::Established));
    // Nor can he keep A out: A's next connection with that GUID comes in as if he were not there.
    pair.connect(A);
    pair.run_for(ms(10));
    assert_eq!(pair.agents[B].communications(), 3);
}

#[test]
fn peers_that_claim_to_be_slow_are_reaped_all_the_same() {
    // A response timeout of code 31 is 2.4 hours, times 16 sendings of the REP.
    let mut agent = server(Limits::default());
    let slow = Req { local_response_timeout: CmTimeout::new(31).unwrap(), max_cm_retries: 15, ..good_req() };
    feed(&mut agent, slow);
    let Some(CmEvent::ConnectRequest(request)) = agent.poll_event() else { panic!() };
    agent.accept(at(0), request.comm, &accept_params()).unwrap();
    while let Some(due) = agent.poll_timeout().filter(|due| *due <= at(600_000)) {
        agent.handle_timeout(due);
    }
    assert_eq!((agent.half_open(), agent.communications()), (0, 0));
}

/// Slow loris: ten thousand peers ask, are accepted, never say that they are ready, and ask for time for ever.
#[test]
fn peers_that_ask_for_time_for_ever_are_reaped() {
    const PEERS: u32 = 10_000;
    let limits = Limits { half_open: PEERS as usize, outgoing: 100_000, ..Limits::default() };
    let mut agent = server(limits);
    let good = good_req();
    let mut reps = Vec::new();
    for n in 0..PEERS {
        let source = uroce::types::Gid::from(std::net::Ipv4Addr::from(0x0a01_0000 + n));
        let mut primary = good.primary;
        primary.local_gid = source;
        let from = MadAddress { remote: source, ..FROM() };
        let req = Req { local_comm_id: CommunicationId::new(n + 1), local_qpn: qpn(n + 16), primary, ..good };
        agent.handle_mad(at(0), from, &Mad::new(TransactionId::new(5), req).emit());
        let Some(CmEvent::ConnectRequest(request)) = agent.poll_event() else { panic!() };
        let params = uroce_cm::agent::AcceptParams { local_qpn: qpn(0x10_0000 + n), ..accept_params() };
        agent.accept(at(0), request.comm, &params).unwrap();
        let Message::Rep(rep) = Mad::parse(&agent.poll_mad().unwrap().bytes).unwrap().message else { panic!() };
        reps.push((from, rep));
    }
    assert_eq!(agent.half_open(), PEERS as usize);
    // 120 s for all its MRAs, then 15 repeats: none sooner than the test looks.
    for second in (0..400).step_by(15) {
        let now = at(second * 1000);
        for (from, rep) in &reps {
            let mra = uroce_cm::wire::Mra {
                local_comm_id: rep.remote_comm_id,
                remote_comm_id: rep.local_comm_id,
                message: uroce_cm::wire::MraedMessage::Rep,
                service_timeout: CmTimeout::new(31).unwrap(),
                private_data: PrivateData::EMPTY,
            };
            agent.handle_mad(now, *from, &Mad::new(TransactionId::new(5), mra).emit());
        }
        while let Some(due) = agent.poll_timeout().filter(|due| *due <= now) {
            agent.handle_timeout(due.max(now));
            while agent.poll_mad().is_some() {}
        }
    }
    assert_eq!((agent.half_open(), agent.communications(), agent.poll_timeout()), (0, 0, None));
    let told = std::iter::from_fn(|| agent.poll_event()).filter(|e| matches!(e, CmEvent::Unreachable { .. })).count();
    assert_eq!(told, PEERS as usize, "the consumer hears of each");
}

#[test]
fn malformed_mads_are_counted_and_dropped() {
    let mut agent = server(Limits::default());
    let good = Mad::new(TransactionId::new(5), good_req()).emit();
    for len in [0, 1, 24, 255] {
        agent.handle_mad(at(0), FROM(), &good[..len]);
    }
    for (byte, value) in [(0, 2), (1, 4), (3, 1), (16, 1), (17, 0x0f), (17, 0x1b)] {
        let mut bad = good;
        bad[byte] = value;
        agent.handle_mad(at(0), FROM(), &bad);
    }
    assert_eq!(agent.counters().malformed, 10);
    assert_eq!((agent.poll_mad(), agent.poll_event(), agent.communications()), (None, None, 0));
}

#[test]
fn another_class_version_is_told_ours() {
    let mut agent = server(Limits::default());
    let good = good_req();
    let mut bytes = Mad::new(TransactionId::new(5), good).emit();
    bytes[2] = 3;
    agent.handle_mad(at(0), FROM(), &bytes);
    let Some(Message::Rej(rej)) = answer(&mut agent) else { panic!() };
    assert_eq!((rej.reason, rej.message), (RejReason::InvalidClassVersion, RejectedMessage::Req));
    assert_eq!((rej.ari.as_bytes(), rej.remote_comm_id), (&[2u8][..], good.local_comm_id));
    let question = SidrReq {
        request_id: 0x55,
        pkey: PKey::DEFAULT,
        reserved: 0,
        service_id: SERVICE,
        private_data: PrivateData::EMPTY,
    };
    let mut bytes = Mad::new(TransactionId::new(5), question).emit();
    bytes[2] = 1;
    agent.handle_mad(at(0), FROM(), &bytes);
    let Some(Message::SidrRep(rep)) = answer(&mut agent) else { panic!() };
    assert_eq!((rep.request_id, rep.status), (0x55, SidrStatus::UnsupportedVersion));
    // Any other message, or one that is wrong in more than its version, is dropped.
    let rtu = Rtu {
        local_comm_id: CommunicationId::new(1),
        remote_comm_id: CommunicationId::new(2),
        private_data: PrivateData::EMPTY,
    };
    let mut bytes = Mad::new(TransactionId::new(5), rtu).emit();
    bytes[2] = 3;
    agent.handle_mad(at(0), FROM(), &bytes);
    bytes[17] = 0x10;
    bytes[3] = 1;
    agent.handle_mad(at(0), FROM(), &bytes);
    assert_eq!((agent.poll_mad(), agent.counters().malformed, agent.communications()), (None, 4, 0));
}

/// Arbitrary changes to the messages of a real exchange, in any order, to both agents, with the consumer answering.
#[test]
fn fuzz_agent() {
    bolero::check!().with_type::<Vec<(u8, u8, u8, u16)>>().for_each(|script| {
        let mut pair = Pair::new();
        pair.listen(A);
        pair.listen(B);
        pair.connect(A);
        pair.run_for(ms(10));
        for (pick, offset, value, wait) in script.iter().take(32) {
            let side = usize::from(pick & 1);
            let history = &pair.sent[1 - side];
            let Some((_, mad)) = history.get(usize::from(pick >> 1) % history.len().max(1)) else { continue };
            let mut bytes = mad.emit();
            bytes[usize::from(*offset)] = *value;
            let from = MadAddress { local: gid(side), remote: gid(1 - side) };
            pair.agents[side].handle_mad(pair.now, from, &bytes);
            pair.run_for(ms(u64::from(*wait % 512)));
        }
        // However it went, both sides come to rest, and what is left is a connection or nothing.
        for side in [A, B] {
            let now = pair.now;
            let comms: Vec<_> = pair.terms[side].iter().map(|(c, _)| *c).collect();
            for comm in comms {
                pair.agents[side].abandon(now, comm);
            }
        }
        pair.run_for(ms(2_000_000));
        for side in [A, B] {
            assert_eq!((pair.agents[side].half_open(), pair.agents[side].in_timewait()), (0, 0));
        }
    });
}

#[test]
fn guids_differ_and_are_locally_administered() {
    let guids: std::collections::BTreeSet<u64> =
        (0..100).map(|seed| Agent::new(exact(), Rng::from_u64(seed)).ca_guid().get()).collect();
    assert_eq!(guids.len(), 100);
    assert!(guids.iter().all(|g| (g >> 56) & 3 == 2));
}
