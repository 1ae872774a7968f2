//! Refusals: every reason arrives with what it adds, and a peer that restarts gets back in.

use uroce::rng::Rng;
use uroce::types::{Gid, PKey, PathMtu, QKey, Qpn};
use uroce_cm::agent::{CmEvent, ConnectParams, MadAddress};
use uroce_cm::comm::CommState;
use uroce_cm::wire::{CaGuid, MadKind, Redirect, RejInfo, RejReason};
use uroce_cm::{Agent, Config};

use crate::pair::{A, B, Pair, connect_params, exact, gid, ms, qpn};

#[test]
fn every_reason_reaches_the_other_side_with_its_information() {
    let redirect = Redirect {
        gid: gid(7),
        traffic_class: 1,
        service_level: 2,
        flow_label: 3,
        lid: 4,
        pkey: PKey::DEFAULT,
        qpn: Qpn::GSI,
        qkey: QKey::GSI,
    };
    for reason in RejReason::ALL {
        let info = match reason {
            RejReason::CmRedirect => RejInfo::CmRedirect(redirect),
            RejReason::PortRedirect => RejInfo::PortRedirect { gid: gid(7), lid: 9 },
            RejReason::InvalidMtu => RejInfo::Mtu(PathMtu::B512),
            RejReason::InvalidGid | RejReason::InvalidAltGid => RejInfo::Gid(gid(3)),
            RejReason::InsufficientResponderResources => RejInfo::ResponderResources(2),
            _ => RejInfo::None,
        };
        let mut pair = Pair::new();
        pair.listen(B);
        pair.answers[B] = false;
        let comm = pair.connect(A);
        pair.run_for(ms(2));
        let CmEvent::ConnectRequest(request) = pair.events[B][0].1.clone() else { panic!() };
        pair.agents[B].reject(request.comm, *reason, info.to_ari().as_bytes(), b"because").unwrap();
        pair.run_for(ms(3));
        let CmEvent::Rejected(rejection) = &pair.events[A][0].1 else { panic!("{reason}") };
        assert_eq!((rejection.comm, rejection.reason, rejection.info()), (comm, *reason, info));
        assert_eq!(&rejection.private_data.as_bytes()[..8], b"because\0");
        // Only a stale connection keeps the QP waiting.
        assert_eq!(rejection.timewait, *reason == RejReason::StaleConnection);
        assert_eq!(pair.agents[B].communications(), 0);
    }
}

/// B's peer dies and comes back with the same GUID, address and QP number (bug of SPDK, #450: refused for ever).
#[test]
fn a_peer_that_restarts_with_the_same_qp_gets_back_in() {
    for died_in in [CommState::Established, CommState::RepSent, CommState::ReqRcvd] {
        let config = || Config { ca_guid: Some(CaGuid::new(0xA)), ..exact() };
        let mut pair = Pair::with(1, config(), exact());
        pair.listen(B);
        pair.answers[B] = died_in != CommState::ReqRcvd;
        pair.answers[A] = died_in == CommState::Established;
        pair.connect_from(A, qpn(0x20), b"");
        pair.run_for(ms(10));
        pair.agents[A] = Agent::new(config(), Rng::from_u64(99));
        pair.answers = [true; 2];
        let mut tries = 0;
        let established = loop {
            tries += 1;
            assert!(tries < 10, "{died_in:?}: refused for ever: {:?}", pair.ladder(B));
            // Its own TIMEWAIT after a REJ 10 must be over before it may ask again.
            let params = ConnectParams { local_qpn: qpn(0x20), ..connect_params(A) };
            let Ok(comm) = pair.agents[A].connect(pair.now, &params) else {
                pair.run_for(ms(20));
                continue;
            };
            pair.run_for(ms(50));
            if pair.agents[A].state(comm) == Some(CommState::Established) {
                break comm;
            }
        };
        let rejections: Vec<RejReason> = pair.events[A]
            .iter()
            .filter_map(|(_, e)| if let CmEvent::Rejected(r) = e { Some(r.reason) } else { None })
            .collect();
        let expected = if died_in == CommState::ReqRcvd { vec![] } else { vec![RejReason::StaleConnection] };
        assert_eq!(rejections[..expected.len()], expected, "{died_in:?}");
        // The old connection was ended with a DREQ, and is gone: one connection is left.
        assert_eq!(pair.sent_of(B, MadKind::Dreq).is_empty(), died_in == CommState::ReqRcvd);
        pair.run_for(ms(1000));
        assert_eq!([A, B].map(|side| pair.agents[side].communications()), [1, 1]);
        assert_eq!(pair.agents[A].state(established), Some(CommState::Established));
        assert_eq!((pair.agents[B].in_timewait(), pair.agents[B].half_open()), (0, 0));
    }
}

#[test]
fn a_restarted_peer_that_draws_the_same_id_is_not_taken_for_a_repeat() {
    let config = || Config { ca_guid: Some(CaGuid::new(0xA)), ..exact() };
    let mut pair = Pair::with(1, config(), exact());
    pair.listen(B);
    let ids = uroce_cm::agent::Preset {
        comm_id: uroce_cm::wire::CommunicationId::new(5),
        transaction: uroce_cm::wire::TransactionId::new(5),
    };
    pair.agents[A].preset(ids);
    pair.connect_from(A, qpn(0x20), b"");
    pair.run_for(ms(10));
    for local_qpn in [0x20, 0x21] {
        pair.agents[A] = Agent::new(config(), Rng::from_u64(99));
        pair.agents[A].preset(uroce_cm::agent::Preset { transaction: uroce_cm::wire::TransactionId::new(6), ..ids });
        let comm = pair.connect_from(A, qpn(local_qpn), b"");
        pair.run_for(ms(3));
        // The same QP is stale; another one is another connection.
        let expected = if local_qpn == 0x20 { "Rejected" } else { "Reply" };
        assert_eq!(pair.told(A).last(), Some(&expected));
        let _ = comm;
        pair.run_for(ms(500));
    }
}

#[test]
fn timewait_is_capped_whatever_the_peer_names() {
    // An ACK timeout of code 31 is 2.4 hours.
    let mut pair = Pair::new();
    pair.listen(B);
    let mut path = uroce_cm::comm::Path::new(gid(A), gid(B));
    path.ack_timeout = uroce::types::AckTimeout::new(31).unwrap();
    let comm = pair.agents[A].connect(pair.now, &ConnectParams { path, ..connect_params(A) }).unwrap();
    pair.run_for(ms(10));
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_for(ms(10));
    assert_eq!([A, B].map(|side| pair.agents[side].in_timewait()), [1, 1]);
    pair.run_for(ms(20_000));
    assert_eq!([A, B].map(|side| pair.agents[side].in_timewait()), [0, 0]);
}

#[test]
fn a_stranger_cannot_reject_or_find_by_a_guid_that_he_knows() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    pair.connect(A);
    pair.run_for(ms(2));
    let uroce_cm::wire::Message::Req(req) = pair.sent[A][0].1.message else { panic!() };
    let rej = uroce_cm::wire::Rej {
        local_comm_id: req.local_comm_id,
        remote_comm_id: uroce_cm::wire::CommunicationId::NONE,
        message: uroce_cm::wire::RejectedMessage::Other,
        reason: RejReason::Timeout,
        ari: RejInfo::CaGuid(req.ca_guid).to_ari(),
        private_data: uroce_cm::wire::PrivateData::EMPTY,
    };
    let mad = uroce_cm::wire::Mad::new(uroce_cm::wire::TransactionId::new(1), rej).emit();
    let stranger: Gid = gid(9);
    pair.agents[B].handle_mad(pair.now, MadAddress { local: gid(B), remote: stranger }, &mad);
    assert_eq!(pair.agents[B].communications(), 1);
    pair.agents[B].handle_mad(pair.now, MadAddress { local: gid(B), remote: gid(A) }, &mad);
    assert_eq!(pair.agents[B].communications(), 0);
}
