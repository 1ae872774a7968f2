//! Every packet that rxe sent in the captures, through the wire module and back; and the hostile packets.

use std::collections::BTreeMap;
use std::net::IpAddr;

use etherparse::{NetSlice, SlicedPacket, TransportSlice};
use uroce::rng::Rng;
use uroce::types::Qpn;
use uroce::wire::{
    Body, DONT_FRAGMENT, IpFields, Opcode, Outer, Packet, ParseError, check, parse_ethernet, recover_id, seal,
    segment_len, write_ethernet, write_outer,
};
use uroce_fixtures::{Fixture, all, hostile};

/// How many frames the captures hold.
const FRAMES: usize = 3298;

/// Calls `f` with each frame of each capture; returns how many there were.
fn for_each_frame(mut f: impl FnMut(&Fixture, &[u8])) -> usize {
    let mut count = 0;
    for fixture in all() {
        for frame in fixture.frames().unwrap() {
            f(fixture, &frame.bytes);
            count += 1;
        }
    }
    count
}

/// The whole frame, made from nothing but parsed values.
fn emit(outer: &Outer<'_>, packet: &Packet<'_>) -> Vec<u8> {
    let payload = packet.payload();
    let len = segment_len(packet.header_len(), payload.len());
    let mut out = vec![0xEE; 18 + 48 + len];
    let is_ipv4 = outer.flow.dst.is_ipv4();
    let mut at = write_ethernet(outer.dst_mac, outer.src_mac, outer.flow.vlan, is_ipv4, &mut out).unwrap();
    at += write_outer(&outer.flow, outer.ip.id, len, &mut out[at..]).unwrap();
    out.truncate(at + len);
    let segment = &mut out[at..];
    let headers = packet.write_headers(payload.len(), segment).unwrap();
    segment[headers..headers + payload.len()].copy_from_slice(payload);
    seal(&outer.flow, outer.ip, segment, headers + payload.len());
    out
}

#[test]
fn every_captured_frame_is_made_again_byte_for_byte() {
    let count = for_each_frame(|fixture, frame| {
        let outer = parse_ethernet(frame).unwrap();
        assert!(check(&outer.flow, outer.ip, outer.payload), "{}: ICRC", fixture.name);
        let packet = Packet::parse(outer.payload).unwrap_or_else(|error| panic!("{}: {error}", fixture.name));
        assert_eq!(packet.opcode(), outer.payload[0]);
        assert_eq!(emit(&outer, &packet), frame, "{}: {packet:?}", fixture.name);
    });
    assert_eq!(count, FRAMES);
}

#[test]
fn opcodes_are_counted_as_in_the_index() {
    for fixture in all() {
        let mut seen = BTreeMap::<String, u64>::new();
        for frame in fixture.frames().unwrap() {
            let outer = parse_ethernet(&frame.bytes).unwrap();
            let packet = Packet::parse(outer.payload).unwrap();
            if !(matches!(packet.body, Body::Datagram(_)) && packet.dest_qp == Qpn::GSI) {
                *seen.entry(Opcode::new(packet.opcode()).name().into()).or_default() += 1;
            }
        }
        // The index splits acknowledgements by reason, and MADs by attribute.
        let mut expected = BTreeMap::<String, u64>::new();
        for (kind, count) in fixture.opcode_counts.iter().filter(|(kind, _)| !kind.starts_with("CM_")) {
            let opcode = kind.split(':').next().unwrap();
            *expected.entry(opcode.into()).or_default() += count;
        }
        assert_eq!(seen, expected, "{}", fixture.name);
    }
}

#[test]
fn a_second_parser_reads_the_outer_headers_alike() {
    for_each_frame(|fixture, frame| {
        let outer = parse_ethernet(frame).unwrap();
        let sliced = SlicedPacket::from_ethernet(frame).unwrap();
        match sliced.net {
            Some(NetSlice::Ipv4(ip)) => {
                let header = ip.header();
                assert_eq!(IpAddr::from(header.source_addr()), outer.flow.src);
                assert_eq!(IpAddr::from(header.destination_addr()), outer.flow.dst);
                assert_eq!((header.identification(), header.ttl()), (outer.ip.id, outer.flow.hop_limit));
                assert!(header.dont_fragment() && outer.ip.flags_fragment == DONT_FRAGMENT);
                assert_eq!(header.slice()[1], outer.flow.traffic_class);
            }
            Some(NetSlice::Ipv6(ip)) => {
                let header = ip.header();
                assert_eq!(IpAddr::from(header.source_addr()), outer.flow.src);
                assert_eq!(IpAddr::from(header.destination_addr()), outer.flow.dst);
                assert_eq!(header.traffic_class(), outer.flow.traffic_class);
                assert_eq!(header.flow_label().value(), outer.flow.flow_label);
                assert_eq!(header.hop_limit(), outer.flow.hop_limit);
            }
            _ => panic!("{}: no IP", fixture.name),
        }
        let Some(TransportSlice::Udp(udp)) = sliced.transport else { panic!("{}: no UDP", fixture.name) };
        assert_eq!((udp.source_port(), udp.destination_port()), (outer.flow.src_port, 4791));
        assert_eq!(udp.payload(), outer.payload);
    });
}

#[test]
fn the_hidden_id_is_recovered() {
    let count = for_each_frame(|fixture, frame| {
        let outer = parse_ethernet(frame).unwrap();
        assert_eq!(recover_id(&outer.flow, outer.payload), Some(outer.ip.id), "{}", fixture.name);
    });
    assert_eq!(count, FRAMES);
}

/// Copies of each packet that get eight random bytes somewhere.
const CORRUPTED_COPIES: usize = 100;

#[test]
fn corrupted_packets_are_refused() {
    let mut rng = Rng::from_u64(1);
    let (mut copies, mut ipv4_copies, mut passed_check, mut passed_recovery) = (0u64, 0u64, 0u64, 0u64);
    for_each_frame(|_, frame| {
        let outer = parse_ethernet(frame).unwrap();
        let mut bytes = outer.payload.to_vec();
        for _ in 0..CORRUPTED_COPIES {
            // Byte 4 is masked: it may change.
            let at = usize::try_from(rng.within(5..=u64::try_from(bytes.len() - 8).unwrap())).unwrap();
            bytes.copy_from_slice(outer.payload);
            rng.fill(&mut bytes[at..at + 8]);
            if bytes == outer.payload {
                continue;
            }
            copies += 1;
            passed_check += u64::from(check(&outer.flow, outer.ip, &bytes));
            let recovered = recover_id(&outer.flow, &bytes);
            if outer.flow.dst.is_ipv4() {
                ipv4_copies += 1;
                passed_recovery += u64::from(recovered.is_some());
            } else {
                assert_eq!(recovered.is_some(), check(&outer.flow, IpFields { id: 0, flags_fragment: 0 }, &bytes));
            }
        }
    });
    // 32 bits: one in 4 billion. 16 bits: one in 65,536, and the seed fixes how many that is here.
    assert_eq!(passed_check, 0, "of {copies}");
    let expected = ipv4_copies.div_ceil(65_536);
    assert!(passed_recovery <= 4 * expected, "{passed_recovery} of {ipv4_copies}, about {expected} expected");
}

#[test]
fn hostile_packets_are_parsed_or_named() {
    let [source, destination]: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()];
    let flow = hostile::Flow::new(source, destination);
    let target = hostile::Target::new(0x11, 0x1234);
    let parse = |frame: &hostile::HostileFrame| -> Result<u8, ParseError> {
        let ethernet = frame.ethernet([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        let outer = parse_ethernet(&ethernet).unwrap_or_else(|error| panic!("{}: {error}", frame.name));
        assert_eq!(outer.payload, frame.bytes);
        assert_eq!(check(&outer.flow, outer.ip, outer.payload), frame.bytes.len() >= 4, "{}", frame.name);
        let packet = Packet::parse(outer.payload)?;
        assert_eq!(emit(&outer, &packet), ethernet, "{}", frame.name);
        Ok(packet.opcode())
    };
    assert_eq!(parse(&hostile::rxe_opcode_ff(&flow)), Err(ParseError::UnknownOpcode(0xFF)));
    let parsed = hostile::opcode_grid(&flow, &target).filter(|frame| parse(frame).is_ok()).count();
    assert!(parsed > 0);
    for frame in hostile::short_with_pad(&flow, &target) {
        let error = parse(&frame).expect_err(&frame.name);
        assert!(matches!(error, ParseError::TooShort { .. } | ParseError::BadPad { .. }), "{}: {error}", frame.name);
    }
    for frame in hostile::atomic_write_lengths(&flow, &target) {
        assert_eq!(parse(&frame), Ok(0x1D), "{}", frame.name);
    }
    for frame in hostile::wrapping_ranges(&flow, &target) {
        assert!(parse(&frame).is_ok(), "{}", frame.name);
    }
}
