//! Connections over a link that works.

use uroce::rng::Rng;
use uroce_cm::agent::{
    AcceptParams, AddressFilter, CmError, ConnectParams, DisconnectCause, MadAddress, Overflow, Preset,
};
use uroce_cm::comm::{CommState, Path};
use uroce_cm::wire::{
    CaGuid, CommunicationId, IpHeader, Mad, MadKind, Message, RejReason, RejectedMessage, TransactionId,
    TransportService,
};
use uroce_cm::{Agent, CmEvent, Config};

use crate::pair::{A, B, Pair, SERVICE, accept_params, at, connect_params, exact, gid, ms, qpn, tcp};

#[test]
fn a_connection_from_req_to_timewait() {
    let mut pair = Pair::new();
    pair.listen(B);
    let comm = pair.connect(A);
    pair.run_until(at(10));
    assert_eq!(pair.ladder(A), ["REQ", "RTU"]);
    assert_eq!(pair.ladder(B), ["REP"]);
    assert_eq!(pair.told(A), ["Reply"]);
    assert_eq!(pair.told(B), ["ConnectRequest", "Established"]);
    assert_eq!(pair.agents[A].poll_timeout(), None, "an established connection has no timer");
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_until(at(20));
    assert_eq!(pair.ladder(A), ["REQ", "RTU", "DREQ"]);
    assert_eq!(pair.ladder(B), ["REP", "DREP"]);
    assert_eq!(pair.agents[A].communications(), 0);
    assert_eq!((pair.agents[A].in_timewait(), pair.agents[B].in_timewait()), (1, 1));
    pair.run_until(at(200));
    assert_eq!(pair.told(A), ["Reply", "Disconnected", "TimewaitExit"]);
    assert_eq!(pair.told(B), ["ConnectRequest", "Established", "DisconnectRequested", "Disconnected", "TimewaitExit"]);
    // 67.108864 ms, the ACK timeout of the path, after the DREP of each side.
    let waited = |side: usize| {
        let times: Vec<_> = pair.events[side].iter().rev().take(2).map(|(t, _)| *t).collect();
        times[0] - times[1]
    };
    assert_eq!(waited(A).as_nanos(), 67_108_864);
    assert_eq!(waited(B).as_nanos(), 67_108_864);
    assert_eq!((pair.agents[A].in_timewait(), pair.agents[B].in_timewait()), (0, 0));
    assert_eq!(pair.agents[B].counters().received(MadKind::Dreq), 1);
}

#[test]
fn each_side_sends_with_the_psn_that_the_other_named() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(10));
    let (a, b) = (pair.terms[A][0].1, pair.terms[B][0].1);
    let Message::Req(req) = pair.sent[A][0].1.message else { panic!() };
    let Message::Rep(rep) = pair.sent[B][0].1.message else { panic!() };
    assert_eq!((a.rq_psn, b.sq_psn), (req.starting_psn, req.starting_psn));
    assert_eq!((b.rq_psn, a.sq_psn), (rep.starting_psn, rep.starting_psn));
    assert_eq!((a.remote_qpn, b.remote_qpn), (b.local_qpn, a.local_qpn));
    assert_ne!(req.starting_psn, rep.starting_psn);
    assert_eq!((a.path.remote, b.path.remote), (gid(B), gid(A)));
}

#[test]
fn depths_are_negotiated_down_and_swapped_in_events() {
    // The client serves 3 and wants 16; the server serves 8 and wants 5.
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    let params =
        ConnectParams { local_qpn: qpn(0x20), responder_resources: 3, initiator_depth: 16, ..connect_params(A) };
    pair.agents[A].connect(pair.now, &params).unwrap();
    pair.run_until(at(2));
    let CmEvent::ConnectRequest(req) = &pair.events[B][0].1 else { panic!() };
    assert_eq!((req.responder_resources, req.initiator_depth), (16, 3));
    let accept = AcceptParams { responder_resources: 8, initiator_depth: 5, ..accept_params() };
    let comm = req.comm;
    let b = pair.agents[B].accept(pair.now, comm, &accept).unwrap();
    assert_eq!((b.max_dest_rd_atomic, b.max_rd_atomic), (8, 3));
    pair.run_until(at(10));
    let a = pair.terms[A][0].1;
    assert_eq!((a.max_dest_rd_atomic, a.max_rd_atomic), (3, 8));
    let CmEvent::Reply(reply) = &pair.events[A][0].1 else { panic!() };
    assert_eq!((reply.responder_resources, reply.initiator_depth), (3, 8));
}

#[test]
fn uc_connects_without_depths() {
    let mut pair = Pair::new();
    pair.listen(B);
    let params = ConnectParams { transport: TransportService::Uc, ..connect_params(A) };
    pair.agents[A].connect(pair.now, &params).unwrap();
    pair.run_until(at(10));
    let (a, b) = (pair.terms[A][0].1, pair.terms[B][0].1);
    assert_eq!((a.transport, b.transport), (TransportService::Uc, TransportService::Uc));
    assert_eq!((a.max_rd_atomic, a.max_dest_rd_atomic, b.max_rd_atomic, b.max_dest_rd_atomic), (0, 0, 0, 0));
    let rd = ConnectParams { transport: TransportService::Rd, ..params };
    assert_eq!(pair.agents[A].connect(pair.now, &rd), Err(CmError::Transport(TransportService::Rd)));
}

#[test]
fn private_data_travel_in_every_message_up_to_their_room() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers = [false; 2];
    let comm = pair.connect_from(A, qpn(0x20), &[0x11; 92]);
    pair.run_until(at(2));
    let CmEvent::ConnectRequest(req) = pair.events[B][0].1.clone() else { panic!() };
    assert_eq!(req.user_data(), [0x11; 92]);
    let accept = |data| AcceptParams { private_data: data, ..accept_params() };
    assert!(matches!(pair.agents[B].accept(pair.now, req.comm, &accept(&[0; 197])), Err(CmError::PrivateData(_))));
    pair.agents[B].accept(pair.now, req.comm, &accept(&[0x22; 196])).unwrap();
    pair.run_until(at(4));
    let CmEvent::Reply(reply) = pair.events[A][0].1.clone() else { panic!() };
    assert_eq!(reply.private_data.as_bytes(), &[0x22; 196]);
    assert!(matches!(pair.agents[A].confirm(comm, &[0; 225]), Err(CmError::PrivateData(_))));
    pair.agents[A].confirm(comm, &[0x33; 224]).unwrap();
    pair.run_until(at(6));
    let CmEvent::Established { private_data, .. } = &pair.events[B][1].1 else { panic!() };
    assert_eq!(private_data.as_bytes(), &[0x33; 224]);
    assert!(matches!(pair.agents[A].disconnect(pair.now, comm, &[0; 221]), Err(CmError::PrivateData(_))));
    pair.agents[A].disconnect(pair.now, comm, &[0x44; 220]).unwrap();
    pair.run_until(at(8));
    let CmEvent::DisconnectRequested { private_data, .. } = &pair.events[B][2].1 else { panic!() };
    assert_eq!(private_data.as_bytes(), &[0x44; 220]);
    let long = ConnectParams { private_data: &[0; 93], ..connect_params(A) };
    assert!(matches!(pair.agents[A].connect(pair.now, &long), Err(CmError::PrivateData(_))));
}

#[test]
fn a_refusal_carries_reason_and_private_data() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    let comm = pair.connect(A);
    pair.run_until(at(2));
    let CmEvent::ConnectRequest(req) = pair.events[B][0].1.clone() else { panic!() };
    let reason = RejReason::ConsumerDefined;
    assert!(matches!(pair.agents[B].reject(req.comm, reason, b"", &[0; 149]), Err(CmError::PrivateData(_))));
    pair.agents[B].reject(req.comm, reason, b"ari", b"no thanks").unwrap();
    pair.run_until(at(300));
    let CmEvent::Rejected(rejection) = &pair.events[A][0].1 else { panic!() };
    assert_eq!((rejection.comm, rejection.message, rejection.reason), (comm, RejectedMessage::Req, reason));
    assert_eq!(rejection.ari.as_bytes(), b"ari");
    assert_eq!(rejection.private_data.as_bytes()[..9], *b"no thanks");
    assert!(!rejection.timewait);
    assert_eq!(pair.ladder(A), ["REQ"], "a refused REQ is not repeated");
    assert_eq!((pair.agents[A].communications(), pair.agents[B].communications()), (0, 0));
    // The QP is free at once.
    pair.connect_from(A, qpn(0x101), b"");
}

#[test]
fn an_active_side_can_refuse_the_rep() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[A] = false;
    let comm = pair.connect(A);
    pair.run_until(at(3));
    pair.agents[A].reject(comm, RejReason::ConsumerDefined, b"", b"changed my mind").unwrap();
    pair.run_until(at(10));
    let CmEvent::Rejected(rejection) = &pair.events[B][1].1 else { panic!("{:?}", pair.told(B)) };
    assert_eq!((rejection.message, rejection.reason), (RejectedMessage::Rep, RejReason::ConsumerDefined));
    assert_eq!((pair.agents[A].communications(), pair.agents[B].communications()), (0, 0));
}

#[test]
fn nobody_listens() {
    let mut pair = Pair::new();
    pair.connect(A);
    pair.run_until(at(10));
    let CmEvent::Rejected(rejection) = &pair.events[A][0].1 else { panic!() };
    assert_eq!(rejection.reason, RejReason::InvalidServiceId);
    let Message::Rej(rej) = pair.sent[B][0].1.message else { panic!() };
    assert_eq!((rej.local_comm_id.get(), rej.message.code()), (0, 0));
    assert_eq!(pair.agents[B].communications(), 0);
}

#[test]
fn listeners_are_told_apart_by_port_and_address() {
    let mut agent = Agent::new(exact(), Rng::from_u64(1));
    let one = "10.0.0.2".parse().unwrap();
    let first = agent.listen(tcp(7174), AddressFilter::Only(one), 1).unwrap();
    let in_use = Err(CmError::AddressInUse(tcp(7174)));
    assert_eq!(agent.listen(tcp(7174), AddressFilter::Only(one), 1), in_use);
    assert_eq!(agent.listen(tcp(7174), AddressFilter::AnyV4, 1), in_use);
    assert_eq!(agent.listen(tcp(7174), AddressFilter::Any, 1), in_use);
    agent.listen(tcp(7174), AddressFilter::Only("10.0.0.3".parse().unwrap()), 1).unwrap();
    agent.listen(tcp(7174), AddressFilter::AnyV6, 1).unwrap();
    agent.listen(tcp(7175), AddressFilter::AnyV4, 1).unwrap();
    agent.unlisten(first).unwrap();
    assert_eq!(agent.unlisten(first), Err(CmError::InvalidHandle));
    agent.listen(tcp(7174), AddressFilter::Only(one), 1).unwrap();
}

#[test]
fn a_req_for_another_address_finds_no_listener() {
    let mut pair = Pair::new();
    pair.agents[B].listen(tcp(7174), AddressFilter::Only("10.0.0.2".parse().unwrap()), 8).unwrap();
    let header = |last: u8| IpHeader {
        source_port: 4000,
        source: "10.0.0.1".parse().unwrap(),
        destination: std::net::Ipv4Addr::new(10, 0, 0, last).into(),
    };
    let mut ask = |local: u32, data: &[u8]| {
        let params =
            ConnectParams { service_id: tcp(7174), local_qpn: qpn(local), private_data: data, ..connect_params(A) };
        pair.agents[A].connect(pair.now, &params).unwrap();
        pair.run_for(ms(10));
        pair.events[A].last().unwrap().1.clone()
    };
    let CmEvent::Rejected(r) = ask(0x20, &header(9).emit().unwrap()) else { panic!() };
    assert_eq!(r.reason, RejReason::InvalidServiceId);
    // No IP header at all: the consumer would not understand it.
    let CmEvent::Rejected(r) = ask(0x21, b"\x01") else { panic!() };
    assert_eq!(r.reason, RejReason::ConsumerDefined);
    let mut data = header(2).emit().unwrap().to_vec();
    data.extend(b"hello");
    assert!(matches!(ask(0x22, &data), CmEvent::Reply(_)));
    let CmEvent::ConnectRequest(req) = &pair.events[B][0].1 else { panic!() };
    assert_eq!(req.ip, Some(header(2)));
    assert_eq!((req.user_data().len(), &req.user_data()[..5]), (56, &b"hello"[..]));
}

/// A listener of one address is not reached through another by a peer that names it: what is bound to the inside of a
/// machine with two sides stays there.
#[test]
fn a_req_that_came_to_another_address_than_it_names_finds_no_listener() {
    let inside: std::net::IpAddr = "10.0.0.2".parse().unwrap();
    let header = IpHeader { source_port: 4000, source: "10.0.0.1".parse().unwrap(), destination: inside };
    let data = header.emit().unwrap();
    let ask = |filter, to| {
        let mut server = Agent::new(exact(), Rng::from_u64(2));
        server.listen(tcp(7174), filter, 8).unwrap();
        let mut client = Agent::new(exact(), Rng::from_u64(1));
        let path = Path::new(gid(A), to);
        let params = ConnectParams { path, service_id: tcp(7174), private_data: &data, ..connect_params(A) };
        client.connect(at(0), &params).unwrap();
        let address = MadAddress { local: to, remote: gid(A) };
        server.handle_mad(at(1), address, &client.poll_mad().unwrap().bytes);
        let answer = server.poll_mad().map(|mad| Mad::parse(&mad.bytes).unwrap().message);
        match answer {
            Some(Message::Rej(rej)) => Some(rej.reason),
            None => None,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(AddressFilter::Only(inside), gid(B)), None, "the consumer is asked");
    assert_eq!(ask(AddressFilter::Only(inside), gid(8)), Some(RejReason::InvalidServiceId));
    assert_eq!(ask(AddressFilter::Any, gid(8)), None, "who serves all addresses serves this");
}

#[test]
fn simultaneous_reqs_with_the_same_ids_are_two_connections() {
    let mut pair = Pair::new();
    pair.listen(A);
    pair.listen(B);
    let preset = Preset { comm_id: CommunicationId::new(0x77), transaction: TransactionId::new(0x77) };
    for side in [A, B] {
        pair.agents[side].preset(preset);
        pair.connect(side);
    }
    pair.run_until(at(10));
    for side in [A, B] {
        assert_eq!(pair.told(side), ["ConnectRequest", "Reply", "Established"]);
        assert_eq!(pair.agents[side].communications(), 2);
    }
}

#[test]
fn both_sides_disconnect_at_once() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(10));
    let (a, b) = pair.comms();
    pair.agents[A].disconnect(pair.now, a, b"").unwrap();
    pair.agents[B].disconnect(pair.now, b, b"").unwrap();
    pair.run_until(at(20));
    let agreed = |side: usize| {
        let causes = pair.events[side].iter().filter_map(|(_, e)| match e {
            CmEvent::Disconnected { cause, .. } => Some(*cause),
            _ => None,
        });
        causes.collect::<Vec<_>>()
    };
    assert_eq!((agreed(A), agreed(B)), (vec![DisconnectCause::Agreed], vec![DisconnectCause::Agreed]));
    assert_eq!((pair.agents[A].in_timewait(), pair.agents[B].in_timewait()), (1, 1));
}

#[test]
fn a_qp_in_timewait_is_not_reused() {
    let mut pair = Pair::new();
    pair.listen(B);
    let comm = pair.connect_from(A, qpn(0x20), b"");
    pair.run_until(at(10));
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_until(at(13));
    assert_eq!(pair.agents[A].in_timewait(), 1);
    let again = ConnectParams { local_qpn: qpn(0x20), ..connect_params(A) };
    assert_eq!(pair.agents[A].connect(pair.now, &again), Err(CmError::QpBusy(qpn(0x20))));
    pair.run_until(at(100));
    assert!(pair.told(A).contains(&"TimewaitExit"));
    pair.agents[A].connect(pair.now, &again).unwrap();
    pair.run_until(at(110));
    assert_eq!(pair.told(A).last(), Some(&"Reply"));
}

#[test]
fn a_peer_that_reuses_its_qp_too_soon_is_stale() {
    // Client and its successor share GUID and QPN (the successor knows nothing of the old connection).
    let guid = Some(CaGuid::new(0x0200_0000_0000_0001));
    let client = Config { ca_guid: guid, ..exact() };
    let mut pair = Pair::with(5, client, exact());
    pair.listen(B);
    pair.connect_from(A, qpn(0x20), b"");
    pair.run_until(at(10));
    pair.agents[A] = Agent::new(client, Rng::from_u64(99));
    pair.connect_from(A, qpn(0x20), b"");
    pair.run_until(at(12));
    // The newcomer is refused with reason 10, the old connection disconnected.
    assert_eq!(pair.ladder(B), ["REP", "DREQ", "REJ"]);
    let Message::Rej(rej) = pair.sent[B][2].1.message else { panic!() };
    assert_eq!(rej.reason, RejReason::StaleConnection);
    pair.run_until(at(14));
    let CmEvent::Rejected(rejection) = &pair.events[A][1].1 else { panic!("{:?}", pair.told(A)) };
    assert!(rejection.timewait, "the QP of a stale refusal waits");
    // The successor answers the DREQ of a connection that it does not know.
    assert!(pair.ladder(A).contains(&"DREP"));
    pair.run_until(at(200));
    assert!(pair.told(B).contains(&"Disconnected"));
    pair.connect_from(A, qpn(0x20), b"");
    pair.run_for(ms(10));
    assert_eq!(pair.told(A).last(), Some(&"Reply"));
}

#[test]
fn a_rep_from_a_qp_of_a_live_connection_is_stale() {
    // The server restarts with its GUID and hands out a QP that the client still has a connection to.
    let server = Config { ca_guid: Some(CaGuid::new(0x0200_0000_0000_0002)), ..exact() };
    let mut pair = Pair::with(6, exact(), server);
    pair.listen(B);
    let old = pair.connect(A);
    pair.run_until(at(10));
    let theirs = pair.terms[A][0].1.remote_qpn;
    pair.agents[B] = Agent::new(server, Rng::from_u64(98));
    pair.listen(B);
    pair.answers[B] = false;
    let new = pair.connect(A);
    pair.run_until(at(12));
    let Some((_, CmEvent::ConnectRequest(req))) = pair.events[B].last().cloned() else { panic!() };
    let params = AcceptParams { local_qpn: theirs, ..accept_params() };
    pair.agents[B].accept(pair.now, req.comm, &params).unwrap();
    let before = pair.sent[A].len();
    pair.run_until(at(14));
    // The REP is refused with reason 10; the old connection, which the server has forgotten, is disconnected.
    let sent: Vec<Message> = pair.sent[A][before..].iter().map(|(_, mad)| mad.message).collect();
    let [Message::Dreq(dreq), Message::Rej(rej)] = sent[..] else { panic!("{:?}", pair.ladder(A)) };
    assert_eq!((rej.reason, rej.message), (RejReason::StaleConnection, RejectedMessage::Rep));
    assert_eq!(dreq.remote_qpn, theirs);
    assert_eq!((pair.agents[A].state(old), pair.agents[A].state(new)), (Some(CommState::DreqSent), None));
    let Some((_, CmEvent::Rejected(rejection))) = pair.events[A].last() else { panic!("{:?}", pair.told(A)) };
    assert_eq!((rejection.comm, rejection.message), (new, RejectedMessage::Rep));
    // The server answers for the connection it has forgotten.
    pair.run_until(at(20));
    assert_eq!(pair.agents[A].state(old), None);
    assert!(pair.told(A).contains(&"Disconnected"));
}

#[test]
fn a_full_backlog_refuses_or_keeps_silent() {
    for (overflow, answer) in [(Overflow::Reject, vec!["REJ"; 3]), (Overflow::Drop, vec![])] {
        let server = Config { overflow, ..exact() };
        let mut pair = Pair::with(1, exact(), server);
        pair.agents[B].listen(SERVICE, AddressFilter::Any, 2).unwrap();
        pair.answers[B] = false;
        for _ in 0..5 {
            pair.connect(A);
        }
        pair.run_until(at(5));
        assert_eq!(pair.told(B), ["ConnectRequest"; 2]);
        assert_eq!(pair.ladder(B), answer);
        assert_eq!(pair.agents[B].counters().overflows, 3);
        if overflow == Overflow::Reject {
            let CmEvent::Rejected(r) = &pair.events[A][0].1 else { panic!() };
            assert_eq!(r.reason, RejReason::ConsumerDefined);
        }
        // An answer makes room.
        let CmEvent::ConnectRequest(req) = pair.events[B][0].1.clone() else { panic!() };
        pair.accept(B, req.comm);
        pair.connect(A);
        pair.run_for(ms(5));
        assert_eq!(pair.told(B).iter().filter(|e| **e == "ConnectRequest").count(), 3);
    }
}

#[test]
fn commands_in_the_wrong_state_change_nothing() {
    let mut pair = Pair::new();
    pair.listen(B);
    let comm = pair.connect(A);
    let wrong = |state| Err(CmError::WrongState(state));
    assert_eq!(pair.agents[A].confirm(comm, b""), wrong(CommState::ReqSent));
    assert_eq!(pair.agents[A].disconnect(pair.now, comm, b""), wrong(CommState::ReqSent));
    assert_eq!(pair.agents[A].reject(comm, RejReason::NoQp, b"", b""), wrong(CommState::ReqSent));
    pair.run_until(at(10));
    assert_eq!(pair.agents[A].confirm(comm, b""), wrong(CommState::Established));
    assert_eq!(
        pair.agents[A].accept(pair.now, comm, &accept_params()).unwrap_err(),
        CmError::WrongState(CommState::Established)
    );
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_until(at(20));
    assert_eq!(pair.agents[A].disconnect(pair.now, comm, b""), Err(CmError::InvalidHandle));
}

#[test]
fn one_agent_connects_to_itself() {
    let mut agent = Agent::new(exact(), Rng::from_u64(3));
    agent.listen(SERVICE, AddressFilter::Any, 8).unwrap();
    let now = at(0);
    let here = connect_params(A);
    let path = uroce_cm::comm::Path::new(gid(A), gid(A));
    let active = agent.connect(now, &ConnectParams { path, ..here }).unwrap();
    let mut established = Vec::new();
    for _ in 0..20 {
        while let Some(mad) = agent.poll_mad() {
            agent.handle_mad(now, MadAddress { local: mad.to.remote, remote: mad.to.local }, &mad.bytes);
        }
        match agent.poll_event() {
            Some(CmEvent::ConnectRequest(r)) => drop(agent.accept(now, r.comm, &accept_params()).unwrap()),
            Some(CmEvent::Reply(r)) => agent.confirm(r.comm, b"").unwrap(),
            Some(CmEvent::Established { comm, .. }) => established.push(comm),
            _ => {}
        }
    }
    assert_eq!(established.len(), 1);
    assert_eq!(agent.state(active), Some(CommState::Established));
    assert_eq!(agent.state(established[0]), Some(CommState::Established));
}

#[test]
fn one_seed_gives_one_run() {
    let run = |seed| {
        let mut pair = Pair::with(seed, Config::default(), Config::default());
        pair.rates = crate::pair::Rates { loss: 0.3, duplicate: 0.2, reorder: 0.2 };
        pair.listen(B);
        for _ in 0..5 {
            pair.connect(A);
        }
        pair.run_until(at(5000));
        (pair.sent, pair.events)
    };
    let (first, second) = (run(4), run(4));
    assert!(first == second);
    assert!(first.0 != run(5).0);
}
