//! The captures are what the index says. The decoding here is the test's own: a few offsets, nothing shared.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use uroce_fixtures::{CmMessage, Direction, Fixture, Frame, NODE_1_MAC, NODE_2_MAC, all, by_name, reference_icrc};

const OPERATIONS: [&str; 30] = [
    "SEND_FIRST",
    "SEND_MIDDLE",
    "SEND_LAST",
    "SEND_LAST_IMM",
    "SEND_ONLY",
    "SEND_ONLY_IMM",
    "WRITE_FIRST",
    "WRITE_MIDDLE",
    "WRITE_LAST",
    "WRITE_LAST_IMM",
    "WRITE_ONLY",
    "WRITE_ONLY_IMM",
    "READ_REQUEST",
    "READ_RESP_FIRST",
    "READ_RESP_MIDDLE",
    "READ_RESP_LAST",
    "READ_RESP_ONLY",
    "ACK",
    "ATOMIC_ACK",
    "CMP_SWAP",
    "FETCH_ADD",
    "reserved",
    "SEND_LAST_INV",
    "SEND_ONLY_INV",
    "reserved",
    "reserved",
    "reserved",
    "reserved",
    "FLUSH",
    "ATOMIC_WRITE",
];
const CM_MESSAGES: [&str; 9] = ["REQ", "MRA", "REJ", "REP", "RTU", "DREQ", "DREP", "SIDR_REQ", "SIDR_REP"];
const NAKS: [&str; 5] = ["PSN_SEQ", "INV_REQ", "REM_ACCESS", "REM_OP", "INV_RD_REQ"];

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn bth(frame: &Frame) -> &[u8] {
    frame.udp_payload().unwrap()
}

fn dest_qp(frame: &Frame) -> u64 {
    number(&bth(frame)[5..8])
}

/// The MAD of a UD packet to QP1.
fn mad(frame: &Frame) -> Option<&[u8]> {
    (bth(frame)[0] == 0x64 && dest_qp(frame) == 1).then(|| &bth(frame)[20..276])
}

/// What the index calls this packet.
fn kind(frame: &Frame) -> String {
    if let Some(mad) = mad(frame) {
        assert_eq!(mad[..4], [1, 7, 2, 3], "a MAD of the CM");
        return format!("CM_{}", CM_MESSAGES[usize::try_from(number(&mad[16..18])).unwrap() - 0x10]);
    }
    let opcode = bth(frame)[0];
    let transport = match opcode >> 5 {
        0 => "RC",
        1 => "UC",
        3 => "UD",
        other => panic!("transport {other} in a capture"),
    };
    let name = format!("{transport}_{}", OPERATIONS[usize::from(opcode & 31)]);
    let syndrome = if [0x0d, 0x0f, 0x10, 0x11, 0x12].contains(&opcode) { bth(frame)[12] } else { 0 };
    match syndrome >> 5 {
        0 => name,
        1 => format!("{name}:RNR_NAK"),
        3 => format!("{name}:NAK_{}", NAKS[usize::from(syndrome & 31)]),
        other => panic!("AETH {other} in a capture"),
    }
}

fn node(frame: &Frame) -> u8 {
    match frame.direction().unwrap() {
        Direction::Node1ToNode2 => 1,
        Direction::Node2ToNode1 => 2,
    }
}

fn frames(fixture: &Fixture) -> Vec<Frame> {
    fixture.frames().unwrap().collect()
}

#[test]
fn every_capture_opens_and_has_the_stated_size() {
    assert_eq!(all().len(), 59);
    for fixture in all() {
        let frames = fixture.frames().unwrap();
        assert_eq!(u64::try_from(frames.len()).unwrap(), fixture.packets, "{}", fixture.name);
        assert_eq!(std::fs::metadata(fixture.path()).unwrap().len(), fixture.bytes, "{}", fixture.name);
        assert!(frames.as_slice().is_sorted_by_key(|frame| frame.timestamp), "{}", fixture.name);
        assert!(frames.enumerate().all(|(at, frame)| frame.index == at), "{}", fixture.name);
        assert!(fixture.log_path().is_file(), "{}", fixture.name);
    }
    assert_eq!(all().iter().map(|fixture| fixture.packets).sum::<u64>(), 3298);
}

#[test]
fn the_index_and_the_folder_name_the_same_files() {
    let folder = by_name("rping_v4").unwrap().path().parent().unwrap().to_owned();
    let names = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name());
    let present: BTreeSet<_> = names.map(|name| name.into_string().unwrap()).collect();
    let mut stated: BTreeSet<_> =
        all().iter().flat_map(|fixture| [fixture.file.clone(), fixture.log.clone()]).collect();
    stated.extend(["index.toml".into(), "odd".into()]);
    assert_eq!(present, stated);
}

#[test]
fn every_capture_has_the_stated_opcodes() {
    for fixture in all() {
        let mut counts = BTreeMap::new();
        for frame in frames(fixture) {
            *counts.entry(kind(&frame)).or_insert(0) += 1;
        }
        assert_eq!(counts, fixture.opcode_counts, "{}", fixture.name);
    }
}

#[test]
fn every_icrc_is_right() {
    for fixture in all() {
        for frame in frames(fixture) {
            let packet = frame.ip_packet().unwrap();
            let at = (&fixture.name, frame.index);
            assert_eq!(reference_icrc(packet), packet[packet.len() - 4..], "{at:?}");
        }
    }
}

#[test]
fn every_frame_goes_between_the_two_nodes() {
    for fixture in all() {
        let both = fixture.split().unwrap();
        let [there, back] = [Direction::Node1ToNode2, Direction::Node2ToNode1].map(|way| both.get(way));
        assert_eq!(there.len() + back.len(), frames(fixture).len(), "{}", fixture.name);
        assert!(there.iter().all(|frame| frame.bytes[6..12] == NODE_1_MAC), "{}", fixture.name);
        assert!(back.iter().all(|frame| frame.bytes[6..12] == NODE_2_MAC), "{}", fixture.name);
        assert!(there.is_sorted_by_key(|frame| frame.index), "{}", fixture.name);
        assert!(back.is_sorted_by_key(|frame| frame.index), "{}", fixture.name);
    }
}

#[test]
fn every_flow_starts_with_the_stated_psn() {
    /// READ responses, acknowledgements and atomic acknowledgements.
    const ANSWERS: std::ops::RangeInclusive<u8> = 0x0d..=0x12;
    for fixture in all() {
        let mut first = Vec::new();
        for frame in frames(fixture) {
            let flow = (node(&frame), dest_qp(&frame));
            let seen = first.iter().any(|&(node, qp, _)| (node, qp) == flow);
            if flow.1 > 1 && !ANSWERS.contains(&bth(&frame)[0]) && !seen {
                first.push((flow.0, flow.1, number(&bth(&frame)[9..12])));
            }
        }
        let stated = fixture.first_psn.iter();
        let stated: Vec<_> = stated.map(|flow| (flow.node, u64::from(flow.dest_qp), u64::from(flow.psn))).collect();
        assert_eq!(first, stated, "{}", fixture.name);
    }
}

/// `bytes` without trailing zeros.
fn trimmed(bytes: &[u8]) -> Vec<u8> {
    let end = bytes.iter().rposition(|&byte| byte != 0).map_or(0, |last| last + 1);
    bytes[..end].to_vec()
}

fn address(field: &[u8], version: u64) -> IpAddr {
    if version == 4 {
        IpAddr::from(<[u8; 4]>::try_from(&field[12..]).unwrap())
    } else {
        IpAddr::from(<[u8; 16]>::try_from(field).unwrap())
    }
}

/// The message in the body of a CM MAD, if it is of a kind that the index lists.
fn message(kind: &str, body: &[u8]) -> Option<CmMessage> {
    let u8_at = |at: usize| body[at];
    let u24_at = |at: usize| u32::try_from(number(&body[at..at + 3])).unwrap();
    let u32_at = |at: usize| u32::try_from(number(&body[at..at + 4])).unwrap();
    let u64_at = |at: usize| number(&body[at..at + 8]);
    Some(match kind {
        "CM_REQ" => {
            let ip = &body[140..176];
            let version = u64::from(ip[1] >> 4);
            CmMessage::Req {
                local_comm_id: u32_at(0),
                service_id: u64_at(8),
                qpn: u24_at(32),
                starting_psn: u24_at(44),
                responder_resources: u8_at(35),
                initiator_depth: u8_at(39),
                retry_count: u8_at(47) & 7,
                rnr_retry_count: u8_at(50) & 7,
                path_mtu: 128 << (u8_at(50) >> 4),
                source: address(&ip[4..20], version),
                source_port: u16::try_from(number(&ip[2..4])).unwrap(),
                destination: address(&ip[20..36], version),
                private_data: trimmed(&body[176..232]),
            }
        }
        "CM_REP" => CmMessage::Rep {
            local_comm_id: u32_at(0),
            remote_comm_id: u32_at(4),
            qpn: u24_at(12),
            starting_psn: u24_at(20),
            responder_resources: u8_at(24),
            initiator_depth: u8_at(25),
            rnr_retry_count: u8_at(27) >> 5,
            srq: u8_at(27) & 0x10 != 0,
            private_data: trimmed(&body[36..232]),
        },
        "CM_REJ" => CmMessage::Rej {
            local_comm_id: u32_at(0),
            remote_comm_id: u32_at(4),
            rejected: u8_at(8) >> 6,
            reason: u16::try_from(number(&body[10..12])).unwrap(),
            private_data: trimmed(&body[84..232]),
        },
        "CM_SIDR_REQ" => CmMessage::SidrReq { request_id: u32_at(0), service_id: u64_at(8) },
        "CM_SIDR_REP" => CmMessage::SidrRep {
            request_id: u32_at(0),
            status: u8_at(4),
            qpn: u24_at(8),
            service_id: u64_at(12),
            q_key: u32_at(20),
        },
        _ => return None,
    })
}

#[test]
fn every_cm_message_says_what_is_stated() {
    for fixture in all() {
        let mut stated = fixture.cm.iter();
        for frame in frames(fixture) {
            let Some(mad) = mad(&frame) else { continue };
            let Some(message) = message(&kind(&frame), &mad[24..256]) else {
                continue;
            };
            let fact = stated.next().unwrap();
            let at = (&fixture.name, frame.index);
            assert_eq!((fact.frame, fact.node), (frame.index, node(&frame)), "{at:?}");
            assert_eq!(fact.transaction_id, number(&mad[8..16]), "{at:?}");
            assert_eq!(fact.message, message, "{at:?}");
        }
        assert_eq!(stated.next(), None, "{}", fixture.name);
    }
}

/// The README states these for all captures; code may rely on them.
#[test]
fn what_all_captures_have_in_common() {
    for fixture in all() {
        for frame in frames(fixture) {
            let (ip, bth) = (frame.ip_packet().unwrap(), bth(&frame));
            let (tos, ttl, udp) = match ip[0] >> 4 {
                4 => (u64::from(ip[1]), ip[8], 20),
                _ => (number(&ip[..2]) >> 4 & 0xff, ip[7], 40),
            };
            let at = (&fixture.name, frame.index);
            assert_eq!((tos, ttl), (0, 64), "{at:?}");
            assert_eq!(number(&ip[udp + 2..udp + 4]), 4791, "{at:?}");
            assert_eq!(number(&ip[udp + 6..udp + 8]), 0, "UDP checksum of {at:?}");
            assert_eq!(bth[1] & 0xcf, 0, "SE, MigReq and TVer of {at:?}");
            assert_eq!(bth[2..4], [0xff, 0xff], "P_Key of {at:?}");
            if mad(&frame).is_some() {
                assert_eq!(number(&ip[udp..udp + 2]), 55410, "{at:?}");
                assert_eq!((bth[8] >> 7, number(&bth[12..16])), (1, 0x8001_0000), "{at:?}");
            }
        }
    }
}

/// The tags that a packet decides, recomputed.
#[test]
fn tags_match_the_packets() {
    for fixture in all() {
        let any = |part: &str| fixture.opcode_counts.keys().any(|kind| kind.contains(part));
        for (tag, part) in [
            ("cm", "CM_"),
            ("rc", "RC_"),
            ("uc", "UC_"),
            ("ud", "UD_"),
            ("send", "_SEND_"),
            ("write", "_WRITE_"),
            ("read", "READ_REQUEST"),
            ("imm", "_IMM"),
            ("invalidate", "_INV"),
            ("nak", ":NAK_"),
            ("rnr", ":RNR_NAK"),
            ("rej", "CM_REJ"),
            ("mra", "CM_MRA"),
            ("sidr", "CM_SIDR"),
        ] {
            assert_eq!(fixture.has_tag(tag), any(part), "{tag} of {}", fixture.name);
        }
        let atomic = any("CMP_SWAP") || any("FETCH_ADD");
        assert_eq!(fixture.has_tag("atomic"), atomic, "{}", fixture.name);
        let frames = frames(fixture);
        let version = frames[0].ip_packet().unwrap()[0] >> 4;
        assert_eq!(fixture.has_tag("ipv6"), version == 6, "{}", fixture.name);
        assert_eq!(fixture.has_tag("ipv4"), version == 4, "{}", fixture.name);
    }
}

/// AckReq: on the last packet of an RC request, not on the others, not on answers, not on UC and UD data.
#[test]
fn the_last_packet_of_a_request_asks_for_an_ack() {
    for fixture in all() {
        for frame in frames(fixture).iter().filter(|frame| mad(frame).is_none()) {
            let kind = kind(frame);
            let last = ["_LAST", "_ONLY", "_REQUEST", "_SWAP", "_ADD", "_FLUSH", "ATOMIC_WRITE"]
                .iter()
                .any(|part| kind.contains(part));
            let asks = kind.starts_with("RC_") && last && !kind.contains("READ_RESP");
            assert_eq!(bth(frame)[8] >> 7 == 1, asks, "{} frame {} {kind}", fixture.name, frame.index);
        }
    }
}

/// The payload of an RC packet without pad and ICRC; `headers` is the length of BTH and extended headers.
fn payload(frame: &Frame, headers: usize) -> &[u8] {
    let pad = usize::from(bth(frame)[1] >> 4 & 3);
    &bth(frame)[headers..bth(frame).len() - 4 - pad]
}

fn pattern(start: usize) -> impl Iterator<Item = u8> {
    (0_usize..).map(move |at| u8::try_from((7 * at + start) % 256).unwrap())
}

/// The table of the README, for what the client sends.
#[test]
fn known_payloads_are_as_stated() {
    for fixture in all().iter().filter(|fixture| fixture.has_tag("known-payload")) {
        let sent = fixture.split().unwrap().node_1_to_node_2;
        let of = |opcode| sent.iter().filter(move |frame| bth(frame)[0] == opcode);
        let name = &fixture.name;
        assert_eq!(payload(of(0x04).next().unwrap(), 12), b"hello rxe\0", "{name}");
        let imm = of(0x05).next().unwrap();
        assert_eq!(bth(imm)[12..16], [0xde, 0xad, 0xbe, 0xef], "{name}");
        assert!(payload(imm, 16).iter().copied().eq(pattern(1).take(100)), "{name}");
        let parts = of(0x06).map(|first| payload(first, 28));
        let rest = sent.iter().filter(|frame| [0x07, 0x08].contains(&bth(frame)[0]));
        let whole: Vec<u8> = parts.chain(rest.map(|frame| payload(frame, 12))).flatten().copied().collect();
        assert!(whole.iter().copied().eq(pattern(2).take(5000)), "{name}");
        let imm = of(0x0b).next().unwrap();
        assert_eq!(bth(imm)[28..32], [0xca, 0xfe, 0xf0, 0x0d], "{name}");
        assert!(payload(imm, 32).iter().copied().eq(pattern(3).take(33)), "{name}");
        let swap = of(0x13).next().unwrap();
        assert_eq!(number(&bth(swap)[24..32]), 0xaabb_ccdd_eeff_0011, "{name}");
        assert_eq!(number(&bth(swap)[32..40]), 0x1122_3344_5566_7788, "{name}");
        assert_eq!(number(&bth(of(0x14).next().unwrap())[24..32]), 0x10, "{name}");
    }
    assert_eq!(all().iter().filter(|fixture| fixture.has_tag("known-payload")).count(), 8);
}
