//! Connections between equals: both ask, and the REQs cross.

use uroce::types::Qpn;
use uroce_cm::agent::{AcceptParams, CmError, ConnectParams};
use uroce_cm::comm::CommState;
use uroce_cm::wire::{CaGuid, MadKind, RejReason};
use uroce_cm::{CmEvent, CommId, Config};

use crate::pair::{A, B, Fault, Pair, SERVICE, accept_params, at, connect_params, exact, gid, ms, qpn};

fn with_guid(guid: u64) -> Config {
    Config { ca_guid: Some(CaGuid::new(guid)), ..exact() }
}

fn meet(pair: &mut Pair, side: usize, local_qpn: Qpn) -> CommId {
    let params = ConnectParams { peer_to_peer: true, local_qpn, ..connect_params(side) };
    pair.agents[side].connect(pair.now, &params).unwrap()
}

/// A's side is established and B's is, in the communications that their own REQs began.
fn assert_met(pair: &Pair, a: CommId, b: CommId) {
    assert_eq!(pair.agents[A].state(a), Some(CommState::Established), "{:?}", pair.ladder(A));
    assert_eq!(pair.agents[B].state(b), Some(CommState::Established), "{:?}", pair.ladder(B));
    assert_eq!([A, B].map(|side| pair.agents[side].communications()), [1, 1]);
    let (ours, theirs) = (pair.terms[A][0].1, pair.terms[B][0].1);
    assert_eq!((ours.local_qpn, ours.remote_qpn), (theirs.remote_qpn, theirs.local_qpn));
    assert_eq!((ours.rq_psn, ours.sq_psn), (theirs.sq_psn, theirs.rq_psn));
}

/// The consumers answer with the QP that they asked with.
fn run(pair: &mut Pair, qpns: [Qpn; 2], d: u64) {
    pair.answers = [false; 2];
    let end = pair.now + ms(d);
    while pair.now < end {
        pair.run_for(ms(1));
        for side in [A, B] {
            let fresh: Vec<CmEvent> =
                pair.events[side].iter().filter(|(at, _)| *at + ms(1) > pair.now).map(|e| e.1.clone()).collect();
            for event in fresh {
                match event {
                    CmEvent::ConnectRequest(r) if pair.agents[side].state(r.comm) == Some(CommState::ReqRcvd) => {
                        assert_eq!(r.listener, None);
                        let params = AcceptParams { local_qpn: qpns[side], ..accept_params() };
                        let terms = pair.agents[side].accept(pair.now, r.comm, &params).unwrap();
                        pair.terms[side].push((r.comm, terms));
                    }
                    CmEvent::Reply(r) if pair.agents[side].state(r.comm) == Some(CommState::RepRcvd) => {
                        pair.agents[side].confirm(r.comm, b"").unwrap();
                    }
                    _ => {}
                }
            }
        }
    }
}

#[test]
fn the_greater_guid_is_active() {
    for (guids, active) in [([9, 5], A), ([5, 9], B)] {
        let mut pair = Pair::with(1, with_guid(guids[0]), with_guid(guids[1]));
        let qpns = [qpn(0x20), qpn(0x30)];
        let comms = [meet(&mut pair, A, qpns[A]), meet(&mut pair, B, qpns[B])];
        run(&mut pair, qpns, 50);
        assert_met(&pair, comms[A], comms[B]);
        assert_eq!(pair.ladder(active), ["REQ", "RTU"]);
        assert_eq!(pair.ladder(1 - active), ["REQ", "REP"]);
    }
}

#[test]
fn with_equal_guids_the_greater_qpn_is() {
    let mut pair = Pair::with(1, with_guid(7), with_guid(7));
    let qpns = [qpn(0x20), qpn(0x30)];
    let comms = [meet(&mut pair, A, qpns[A]), meet(&mut pair, B, qpns[B])];
    run(&mut pair, qpns, 50);
    assert_met(&pair, comms[A], comms[B]);
    assert_eq!(pair.ladder(B), ["REQ", "RTU"]);
}

#[test]
fn whoever_comes_first_waits_for_the_other() {
    // The first REQ finds nobody (REJ 8). That is no refusal between equals: it is asked again.
    for (first, guids) in [(A, [9, 5]), (A, [5, 9]), (B, [9, 5]), (B, [5, 9])] {
        let mut pair = Pair::with(1, with_guid(guids[0]), with_guid(guids[1]));
        let qpns = [qpn(0x20), qpn(0x30)];
        let early = meet(&mut pair, first, qpns[first]);
        run(&mut pair, qpns, 100);
        assert_eq!(pair.sent_of(1 - first, MadKind::Rej).len(), 1);
        assert_eq!(pair.agents[first].state(early), Some(CommState::ReqSent));
        let late = meet(&mut pair, 1 - first, qpns[1 - first]);
        run(&mut pair, qpns, 100);
        let comms = if first == A { [early, late] } else { [late, early] };
        // Not a second later, though the first one's next repeat is due at 250 ms.
        assert_met(&pair, comms[A], comms[B]);
    }
}

#[test]
fn any_message_of_the_meeting_may_get_lost() {
    for side in [A, B] {
        for kind in [MadKind::Req, MadKind::Rep, MadKind::Rtu] {
            let mut pair = Pair::with(1, with_guid(9), with_guid(5));
            pair.fault(side, kind, 1, Fault::Drop);
            let qpns = [qpn(0x20), qpn(0x30)];
            let comms = [meet(&mut pair, A, qpns[A]), meet(&mut pair, B, qpns[B])];
            run(&mut pair, qpns, 5000);
            assert_met(&pair, comms[A], comms[B]);
        }
    }
}

#[test]
fn an_equal_may_answer_with_another_qp_than_it_asked_with() {
    let mut pair = Pair::with(1, with_guid(9), with_guid(5));
    let (asked, answered) = (qpn(0x30), qpn(0x31));
    let comms = [meet(&mut pair, A, qpn(0x20)), meet(&mut pair, B, asked)];
    run(&mut pair, [qpn(0x20), answered], 50);
    assert_met(&pair, comms[A], comms[B]);
    // The first is free for another connection, and both are once this one has gone.
    let elsewhere =
        ConnectParams { local_qpn: asked, path: uroce_cm::comm::Path::new(gid(B), gid(7)), ..connect_params(B) };
    let other = pair.agents[B].connect(pair.now, &elsewhere).unwrap();
    pair.agents[B].abandon(pair.now, other);
    pair.agents[B].disconnect(pair.now, comms[B], b"").unwrap();
    pair.answers = [true; 2];
    pair.run_for(ms(2000));
    assert_eq!((pair.agents[B].communications(), pair.agents[B].in_timewait()), (0, 0));
    for local_qpn in [asked, answered] {
        assert!(pair.agents[B].connect(pair.now, &ConnectParams { local_qpn, ..elsewhere }).is_ok());
    }
}

#[test]
fn a_meeting_that_never_comes_about_is_given_up() {
    let mut pair = Pair::new();
    let comm = meet(&mut pair, A, qpn(0x20));
    pair.run_until(at(100_000));
    assert_eq!((pair.told(A), pair.agents[A].state(comm)), (vec!["Unreachable"], None));
    // Another refusal than "nobody listens" is one.
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    meet(&mut pair, A, qpn(0x20));
    pair.run_until(at(3));
    let CmEvent::ConnectRequest(request) = pair.events[B][0].1.clone() else { panic!() };
    pair.agents[B].reject(request.comm, RejReason::ConsumerDefined, b"", b"").unwrap();
    pair.run_until(at(10));
    assert_eq!(pair.told(A), ["Rejected"]);
}

#[test]
fn one_meeting_a_peer_and_service() {
    let mut pair = Pair::new();
    meet(&mut pair, A, qpn(0x20));
    let second = ConnectParams { peer_to_peer: true, local_qpn: qpn(0x21), ..connect_params(A) };
    assert_eq!(pair.agents[A].connect(pair.now, &second), Err(CmError::RendezvousTaken(SERVICE)));
    let elsewhere = ConnectParams { path: uroce_cm::comm::Path::new(gid(A), gid(7)), ..second };
    assert!(pair.agents[A].connect(pair.now, &elsewhere).is_ok());
}
