//! Alternate paths: agreed on with the connection, or offered later.

use uroce::types::{AckTimeout, Gid, Qpn};
use uroce_cm::agent::{AcceptParams, CmError, ConnectParams, Failover, MadAddress};
use uroce_cm::comm::{CommState, Path};
use uroce_cm::wire::{AprStatus, Lap, Mad, MadKind, Message, TransactionId};
use uroce_cm::{CmEvent, CommId, Config, RetryPolicy};

use crate::pair::{A, B, Fault, Pair, accept_params, at, connect_params, exact, gid, ms};

fn other_gid(side: usize) -> Gid {
    Gid::from(std::net::Ipv4Addr::new(10, 9, 0, u8::try_from(side).unwrap() + 1))
}

/// From A to B over the other network.
fn other_path() -> Path {
    Path { flow_label: 0x1234, ack_timeout: AckTimeout::new(15).unwrap(), ..Path::new(other_gid(A), other_gid(B)) }
}

fn mirrored(path: Path) -> Path {
    Path { local: path.remote, remote: path.local, ..path }
}

/// An established pair.
fn established(a: Config, b: Config) -> (Pair, CommId, CommId) {
    let mut pair = Pair::with(1, a, b);
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(10));
    let (a, b) = pair.comms();
    (pair, a, b)
}

#[test]
fn an_offer_is_taken_and_both_sides_have_the_path() {
    let (mut pair, a, b) = established(exact(), exact());
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"please").unwrap();
    pair.run_for(ms(5));
    assert_eq!(pair.ladder(A), ["REQ", "RTU", "LAP"]);
    assert_eq!(pair.ladder(B), ["REP", "APR"]);
    let Some(CmEvent::PathOffered(offer)) =
        pair.events[B].iter().map(|e| &e.1).find(|e| matches!(e, CmEvent::PathOffered(_)))
    else {
        panic!()
    };
    assert_eq!(
        (offer.comm, offer.path, &offer.private_data.as_bytes()[..6]),
        (b, mirrored(other_path()), &b"please"[..])
    );
    let Some((_, CmEvent::PathAnswered(answer))) = pair.events[A].last() else { panic!() };
    assert_eq!((answer.comm, answer.status, answer.path), (a, AprStatus::Success, other_path()));
    // The two transactions differ from that of the REQ, and the answer repeats that of the offer.
    let [lap, apr] = [(A, MadKind::Lap), (B, MadKind::Apr)].map(|(side, kind)| {
        pair.sent[side].iter().find(|m| m.1.message.kind() == kind).unwrap().1.header.transaction_id
    });
    assert_eq!(lap, apr);
    assert_ne!(lap, pair.sent[A][0].1.header.transaction_id);
    // Once the QPs have migrated, so do the messages: a DREQ over the other network ends the connection.
    for (side, comm, path) in [(A, a, other_path()), (B, b, mirrored(other_path()))] {
        assert_eq!(pair.agents[side].migrated(comm), Ok(path));
        assert!(matches!(pair.agents[side].migrated(comm), Err(CmError::WrongState(_))), "once");
    }
    pair.agents[A].disconnect(pair.now, a, b"").unwrap();
    let dreq = pair.agents[A].poll_mad().unwrap();
    assert_eq!(dreq.to, MadAddress { local: other_gid(A), remote: other_gid(B) });
    pair.agents[B].handle_mad(pair.now, MadAddress { local: other_gid(B), remote: other_gid(A) }, &dreq.bytes);
    assert!(matches!(pair.agents[B].poll_event(), Some(CmEvent::DisconnectRequested { .. })));
}

#[test]
fn a_lost_offer_and_a_lost_answer_come_again() {
    for lost in [(A, MadKind::Lap), (B, MadKind::Apr)] {
        let (mut pair, a, _) = established(exact(), exact());
        pair.fault(lost.0, lost.1, 1, Fault::Drop);
        pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
        pair.run_for(ms(3000));
        assert_eq!(pair.told(A).iter().filter(|e| **e == "PathAnswered").count(), 1);
        assert_eq!(pair.told(B).iter().filter(|e| **e == "PathOffered").count(), 1, "the consumer hears once");
        assert_eq!(pair.sent_of(A, MadKind::Lap).len(), 2);
    }
}

#[test]
fn silence_leaves_the_connection_as_it_was() {
    let (mut pair, a, _) =
        established(Config { retry: RetryPolicy { retries: 1, ..exact().retry }, ..exact() }, exact());
    pair.rates.loss = 1.0;
    let begin = pair.now;
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
    assert_eq!(
        pair.agents[A].offer_alternate(pair.now, a, &other_path(), b""),
        Err(CmError::WrongState(CommState::Established)),
        "one at a time"
    );
    pair.run_for(ms(10_000));
    let (when, CmEvent::PathUnanswered { comm, tries, elapsed }) = pair.events[A].last().unwrap() else { panic!() };
    assert_eq!((*comm, *tries, *elapsed), (a, 2, *when - begin));
    assert_eq!((pair.agents[A].state(a), pair.agents[A].poll_timeout()), (Some(CommState::Established), None));
    pair.rates.loss = 0.0;
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
    pair.run_for(ms(10));
    assert_eq!(pair.told(A).last(), Some(&"PathAnswered"));
}

#[test]
fn a_slow_consumer_is_covered_by_mra_and_then_answered_for() {
    let (mut pair, a, _) = established(exact(), exact());
    pair.answers[B] = false;
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
    pair.run_for(ms(600));
    let Message::Mra(mra) = pair.sent[B].last().unwrap().1.message else { panic!("{:?}", pair.ladder(B)) };
    assert_eq!(mra.message, uroce_cm::wire::MraedMessage::Lap);
    pair.run_for(ms(60_000));
    assert_eq!(pair.sent_of(A, MadKind::Lap).len(), 1, "the client waits");
    pair.run_for(ms(70_000));
    let Some((_, CmEvent::PathAnswered(answer))) = pair.events[A].last() else { panic!("{:?}", pair.told(A)) };
    assert_eq!(answer.status, AprStatus::Rejected);
}

#[test]
fn only_the_active_side_offers_and_each_bad_field_has_its_status() {
    let (mut pair, a, b) = established(exact(), exact());
    assert_eq!(pair.agents[B].offer_alternate(pair.now, b, &other_path(), b""), Err(CmError::NotActive));
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
    let Message::Lap(good) = Mad::parse(&pair.agents[A].poll_mad().unwrap().bytes).unwrap().message else { panic!() };
    let ask = |pair: &mut Pair, to: usize, lap: Lap| {
        let from = MadAddress { local: gid(to), remote: gid(1 - to) };
        pair.agents[to].handle_mad(pair.now, from, &Mad::new(TransactionId::new(77), lap).emit());
        let Message::Apr(apr) = Mad::parse(&pair.agents[to].poll_mad().unwrap().bytes).unwrap().message else {
            panic!()
        };
        assert_eq!((apr.remote_comm_id, apr.local_comm_id), (lap.local_comm_id, lap.remote_comm_id));
        apr.status
    };
    let current = Lap { local_gid: gid(A), remote_gid: gid(B), flow_label: 0, ..good };
    let unknown = uroce_cm::wire::CommunicationId::new(good.remote_comm_id.get() ^ 1);
    let cases = [
        (Lap { remote_comm_id: unknown, ..good }, AprStatus::InvalidCommId),
        (Lap { local_comm_id: unknown, ..good }, AprStatus::InvalidCommId),
        (Lap { remote_qpn: Qpn::from_wire(5), ..good }, AprStatus::InvalidQpn),
        (Lap { hop_limit: 0, ..good }, AprStatus::InvalidHopLimit),
        (Lap { local_gid: Gid::default(), ..good }, AprStatus::InvalidGid),
        (Lap { remote_gid: Gid::default(), ..good }, AprStatus::InvalidGid),
        (current, AprStatus::IsCurrent),
    ];
    for (lap, status) in cases {
        assert_eq!(ask(&mut pair, B, lap), status);
        assert_eq!(pair.agents[B].poll_event(), None);
    }
    // The other way round: the side that asked for the connection takes no offers.
    let reversed = Lap { local_comm_id: good.remote_comm_id, remote_comm_id: good.local_comm_id, ..good };
    assert_eq!(ask(&mut pair, A, reversed), AprStatus::Unsupported);
    assert_eq!(pair.agents[B].state(b), Some(CommState::Established));
}

#[test]
fn an_answer_to_another_offer_is_none() {
    let (mut pair, a, _) = established(exact(), exact());
    pair.agents[A].offer_alternate(pair.now, a, &other_path(), b"").unwrap();
    let lap = pair.agents[A].poll_mad().unwrap();
    let Mad { message: Message::Lap(good), header } = Mad::parse(&lap.bytes).unwrap() else { panic!() };
    let apr = |transaction, status| {
        let apr = uroce_cm::wire::Apr {
            local_comm_id: good.remote_comm_id,
            remote_comm_id: good.local_comm_id,
            status,
            info: uroce_cm::wire::Ari::new(b"why"),
            private_data: uroce_cm::wire::PrivateData::EMPTY,
        };
        Mad::new(transaction, apr).emit()
    };
    let from = MadAddress { local: gid(A), remote: gid(B) };
    pair.agents[A].handle_mad(pair.now, from, &apr(TransactionId::new(1), AprStatus::Success));
    assert_eq!(pair.agents[A].poll_event(), None);
    for code in [1u8, 2, 3, 4, 5, 8, 13, 200] {
        pair.agents[A].handle_mad(pair.now, from, &apr(header.transaction_id, AprStatus::from_code(code)));
        let Some(CmEvent::PathAnswered(answer)) = pair.agents[A].poll_event() else { break };
        assert_eq!((answer.status.code(), answer.info.as_bytes()), (1, &b"why"[..]), "the first answer counts");
        assert!(pair.agents[A].migrated(a).is_err(), "a path that was refused is none");
    }
    assert_eq!(pair.agents[A].state(a), Some(CommState::Established));
}

#[test]
fn an_alternate_path_in_req_and_rep() {
    for (failover, agreed) in [(Failover::Accepted, true), (Failover::Unsupported, false), (Failover::Refused, false)] {
        let mut pair = Pair::new();
        pair.listen(B);
        pair.answers = [false; 2];
        let params = ConnectParams { alternate: Some(other_path()), ..connect_params(A) };
        pair.agents[A].connect(pair.now, &params).unwrap();
        pair.run_until(at(2));
        let CmEvent::ConnectRequest(request) = pair.events[B][0].1.clone() else { panic!() };
        assert_eq!(request.alternate, Some(mirrored(other_path())));
        let terms =
            pair.agents[B].accept(pair.now, request.comm, &AcceptParams { failover, ..accept_params() }).unwrap();
        assert_eq!(terms.alternate, agreed.then(|| mirrored(other_path())));
        pair.run_until(at(4));
        let CmEvent::Reply(reply) = &pair.events[A][0].1 else { panic!() };
        assert_eq!(reply.terms.alternate, agreed.then(other_path));
    }
}
