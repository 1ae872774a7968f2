//! The messages against the captures of rdma_rxe and against arbitrary bytes.

use uroce_cm::wire::{Ari, IpHeader, Mad, MadError, MadKind, Message, Redirect, RejInfo, RejReason};
use uroce_fixtures::{CmMessage, Fixture, Frame};

/// The MAD of a frame that carries one: UD SEND_ONLY to QP1, 256 bytes between DETH and ICRC.
fn mad_of(frame: &Frame) -> Option<&[u8]> {
    let packet = frame.udp_payload()?;
    let to_qp1 = packet[0] == 0x64 && packet[5..8] == [0, 0, 1];
    to_qp1.then(|| &packet[20..packet.len() - 4])
}

fn trimmed(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
    &bytes[..end]
}

#[test]
fn every_captured_mad_is_made_again_byte_for_byte() {
    let mut seen = [0u64; 11];
    for fixture in uroce_fixtures::all() {
        for frame in fixture.frames().unwrap() {
            let Some(bytes) = mad_of(&frame) else { continue };
            let mad = Mad::parse(bytes).unwrap_or_else(|e| panic!("{} frame {}: {e}", fixture.name, frame.index));
            assert_eq!(mad.emit()[..], *bytes, "{} frame {}", fixture.name, frame.index);
            seen[mad.message.kind().index()] += 1;
        }
    }
    for kind in MadKind::ALL {
        let name = format!("CM_{}", kind.name());
        let expected: u64 = uroce_fixtures::all().iter().filter_map(|f| f.opcode_counts.get(&name)).sum();
        assert_eq!(seen[kind.index()], expected, "{kind}");
    }
    assert!(seen[MadKind::Req.index()] > 20);
}

#[test]
fn the_fields_are_those_of_the_index() {
    let mut checked = 0;
    for fixture in uroce_fixtures::all() {
        let frames: Vec<Frame> = fixture.frames().unwrap().collect();
        for fact in &fixture.cm {
            let mad = Mad::parse(mad_of(&frames[fact.frame]).unwrap()).unwrap();
            assert_eq!(mad.header.transaction_id.get(), fact.transaction_id);
            check(fixture, &mad.message, &fact.message);
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked} facts");
}

fn check(fixture: &Fixture, message: &Message, fact: &CmMessage) {
    match (message, fact) {
        (Message::Req(m), CmMessage::Req { .. }) => check_req(m, fact),
        (
            Message::Rep(m),
            CmMessage::Rep {
                local_comm_id,
                remote_comm_id,
                qpn,
                starting_psn,
                responder_resources,
                initiator_depth,
                rnr_retry_count,
                srq,
                private_data,
            },
        ) => {
            assert_eq!((m.local_comm_id.get(), m.remote_comm_id.get()), (*local_comm_id, *remote_comm_id));
            assert_eq!((m.local_qpn.get(), m.starting_psn.get()), (*qpn, *starting_psn));
            assert_eq!((m.responder_resources, m.initiator_depth), (*responder_resources, *initiator_depth));
            assert_eq!((m.rnr_retry_count, m.srq), (*rnr_retry_count, *srq));
            assert_eq!(trimmed(m.private_data.as_bytes()), private_data);
        }
        (Message::Rej(m), CmMessage::Rej { local_comm_id, remote_comm_id, rejected, reason, private_data }) => {
            assert_eq!((m.local_comm_id.get(), m.remote_comm_id.get()), (*local_comm_id, *remote_comm_id));
            assert_eq!((m.message.code(), m.reason.code()), (*rejected, *reason));
            assert_eq!(trimmed(m.private_data.as_bytes()), private_data);
        }
        (Message::SidrReq(m), CmMessage::SidrReq { request_id, service_id }) => {
            assert_eq!((m.request_id, m.service_id.get()), (*request_id, *service_id));
        }
        (Message::SidrRep(m), CmMessage::SidrRep { request_id, status, qpn, service_id, q_key }) => {
            assert_eq!((m.request_id, m.status.code(), m.qpn.get()), (*request_id, *status, *qpn));
            assert_eq!((m.service_id.get(), m.qkey.get()), (*service_id, *q_key));
        }
        (message, fact) => panic!("{}: {message:?} is not {fact:?}", fixture.name),
    }
}

fn check_req(m: &uroce_cm::wire::Req, fact: &CmMessage) {
    let CmMessage::Req {
        local_comm_id,
        service_id,
        qpn,
        starting_psn,
        responder_resources,
        initiator_depth,
        retry_count,
        rnr_retry_count,
        path_mtu,
        source,
        source_port,
        destination,
        private_data,
    } = fact
    else {
        panic!("not a REQ: {fact:?}")
    };
    assert_eq!((m.local_comm_id.get(), m.service_id.get()), (*local_comm_id, *service_id));
    assert_eq!((m.local_qpn.get(), m.starting_psn.get()), (*qpn, *starting_psn));
    assert_eq!((m.responder_resources, m.initiator_depth), (*responder_resources, *initiator_depth));
    assert_eq!((m.retry_count, m.rnr_retry_count), (*retry_count, *rnr_retry_count));
    assert_eq!(m.path_mtu().unwrap().bytes(), usize::from(*path_mtu));
    let header = IpHeader::parse(m.private_data.as_bytes()).unwrap();
    assert_eq!((header.source, header.source_port, header.destination), (*source, *source_port, *destination));
    assert_eq!(trimmed(&m.private_data.as_bytes()[IpHeader::LEN..]), private_data);
    // What rxe fills in on every path (protocol of RoCE: LIDs are permissive, GIDs are the addresses).
    assert_eq!((m.primary.local_lid, m.primary.remote_lid), (0xffff, 0xffff));
    assert_eq!((m.primary.local_gid.ip(), m.primary.remote_gid.ip()), (*source, *destination));
    assert_eq!((m.primary.hop_limit, m.primary.subnet_local, m.primary.ack_timeout), (64, false, 17));
    let (_, port) = m.service_id.port().unwrap();
    assert_eq!(m.primary.flow_label, (u32::from(*source_port) * 31 + u32::from(port)) & 0xfffff);
    assert!(!m.alternate.is_present());
}

/// A header that every kind of message accepts.
fn valid_header(kind: MadKind) -> [u8; 256] {
    let mut bytes = [0; 256];
    bytes[..4].copy_from_slice(&[1, 7, 2, 3]);
    bytes[16..18].copy_from_slice(&kind.attribute().to_be_bytes());
    bytes
}

#[test]
fn a_wrong_header_field_is_named() {
    let good = valid_header(MadKind::Rtu);
    assert!(Mad::parse(&good).is_ok());
    let with = |at: usize, v: u8| {
        let mut bytes = good;
        bytes[at] = v;
        Mad::parse(&bytes).unwrap_err()
    };
    assert_eq!(with(0, 2), MadError::BaseVersion(2));
    assert_eq!(with(1, 4), MadError::Class(4));
    assert_eq!(with(2, 1), MadError::ClassVersion(1));
    assert_eq!(with(3, 0x81), MadError::Method(0x81));
    assert_eq!(with(16, 1), MadError::Attribute(0x0114));
    for len in [0, 1, 24, 255] {
        assert_eq!(Mad::parse(&good[..len]), Err(MadError::Length(len)));
    }
    assert_eq!(Mad::parse(&[0; 257]), Err(MadError::Length(257)));
}

#[test]
fn the_eleven_attribute_ids() {
    let ids: Vec<u16> = (0..=u16::MAX).filter(|id| MadKind::from_attribute(*id).is_some()).collect();
    assert_eq!(ids, (0x0010..=0x001a).collect::<Vec<u16>>());
}

#[test]
fn fuzz_mad_parsing() {
    bolero::check!().with_type::<(u8, Vec<u8>)>().for_each(|(kind, input)| {
        let _ = Mad::parse(input);
        let _ = IpHeader::parse(input);
        // The same bytes behind a right header: what parses is made again, and means the same.
        let mut bytes = valid_header(MadKind::ALL[usize::from(*kind) % 11]);
        for (to, from) in bytes[24..].iter_mut().zip(input) {
            *to = *from;
        }
        let mad = Mad::parse(&bytes).unwrap();
        assert_eq!(Mad::parse(&mad.emit()), Ok(mad));
    });
}

#[test]
fn fuzz_additional_information() {
    bolero::check!().with_type::<(u16, u8, [u8; 72])>().for_each(|(code, len, bytes)| {
        let (reason, ari) = (RejReason::from_code(code % 40), Ari::from_wire(*len, *bytes));
        let info = RejInfo::parse(reason, &ari);
        // What is understood is said again, and means the same.
        if info != RejInfo::Opaque {
            assert_eq!(RejInfo::parse(reason, &info.to_ari()), info);
        }
        if let Some(redirect) = Redirect::parse(&ari) {
            assert_eq!(Redirect::parse(&redirect.to_ari()), Some(redirect));
        }
    });
}
