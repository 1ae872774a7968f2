//! Tests of the wire as a whole: the grid of all opcodes, lengths and pads, and random bytes.

use super::*;
use crate::types::{PKey, Psn, Qpn};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

const FLOW: Flow = Flow {
    src: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
    dst: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
    src_port: 0xC123,
    traffic_class: 0,
    hop_limit: 64,
    flow_label: 0,
    vlan: None,
};
const IP: IpFields = IpFields { id: 0x1234, flags_fragment: DONT_FRAGMENT };

/// Payloads that an opcode may have, written down from IBTA Vol 1 chapter 9 apart from the table that is tested. How
/// long a First, Middle or Last has to be is for the responder to check.
#[derive(Clone, Copy, PartialEq)]
enum Allowed {
    Nothing,
    Any,
}

/// Bytes of BTH and extended headers, and the payload, of the opcodes that are served.
fn specification(opcode: u8) -> Option<(usize, Allowed)> {
    Some(match opcode {
        0x00 | 0x01 | 0x20 | 0x21 | 0x07 | 0x27 | 0x0E => (12, Allowed::Any),
        0x02 | 0x22 | 0x08 | 0x28 => (12, Allowed::Any),
        0x03 | 0x23 | 0x09 | 0x29 | 0x16 | 0x0F => (16, Allowed::Any),
        0x04 | 0x24 => (12, Allowed::Any),
        0x05 | 0x25 | 0x17 | 0x10 => (16, Allowed::Any),
        0x06 | 0x26 => (28, Allowed::Any),
        0x0A | 0x2A => (28, Allowed::Any),
        0x0B | 0x2B => (32, Allowed::Any),
        0x0C => (28, Allowed::Nothing),
        0x0D => (16, Allowed::Any),
        0x11 => (16, Allowed::Nothing),
        0x12 => (24, Allowed::Nothing),
        0x13 | 0x14 => (40, Allowed::Nothing),
        0x1C => (32, Allowed::Nothing),
        // That it must be 8 bytes, the responder says.
        0x1D => (28, Allowed::Any),
        0x64 => (20, Allowed::Any),
        0x65 => (24, Allowed::Any),
        0x81 => (28, Allowed::Nothing),
        _ => return None,
    })
}

fn is_allowed(opcode: u8, pad: usize, len: usize) -> bool {
    let Some((headers, allowed)) = specification(opcode) else { return false };
    let Some(padded) = len.checked_sub(headers + 4) else { return false };
    let Some(payload) = padded.checked_sub(pad) else { return false };
    padded % 4 == 0
        && match allowed {
            Allowed::Nothing => payload == 0,
            Allowed::Any => true,
        }
}

/// A sealed segment of `len` bytes: content that differs at each byte, the pad of zeros, and of what the wire reserves
/// only the bits that a [`Packet`] keeps.
fn segment(opcode: u8, pad: u8, len: usize, salt: u8) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(29).wrapping_add(salt)).collect();
    let mut set = |at: usize, value: u8| {
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
    };
    set(0, opcode);
    set(1, salt & 0xC0 | pad << 4);
    match opcode {
        0x64 | 0x65 => set(16, 0),
        0x81 => (12..28).for_each(|at| set(at, 0)),
        0x1C => {
            (12..15).for_each(|at| set(at, 0));
            set(15, salt & 0x3F);
        }
        _ => {}
    }
    let payload_end = len.saturating_sub(4 + usize::from(pad));
    seal(&FLOW, IP, &mut bytes, payload_end);
    bytes
}

/// Makes the packet again from what was parsed.
fn emit(packet: &Packet<'_>) -> Vec<u8> {
    let payload = packet.payload();
    let mut bytes = vec![0xEE; segment_len(packet.header_len(), payload.len())];
    let headers = packet.write_headers(payload.len(), &mut bytes).expect("what was parsed can be written");
    assert_eq!(headers, packet.header_len());
    bytes[headers..headers + payload.len()].copy_from_slice(payload);
    seal(&FLOW, IP, &mut bytes, headers + payload.len());
    bytes
}

#[test]
fn the_grid_parses_exactly_what_is_allowed_and_is_made_again() {
    let mut parsed = 0;
    for opcode in 0..=u8::MAX {
        for len in 0..=128usize {
            for pad in 0..=3u8 {
                let bytes = segment(opcode, pad, len, opcode.wrapping_add(pad << 6));
                let allowed = is_allowed(opcode, usize::from(pad), len);
                match Packet::parse(&bytes) {
                    Ok(packet) => {
                        assert!(allowed, "opcode {opcode:#04x}, {len} bytes, pad {pad}: {packet:?}");
                        assert_eq!(packet.opcode(), opcode);
                        assert_eq!(emit(&packet), bytes, "opcode {opcode:#04x}, {len} bytes, pad {pad}");
                        parsed += 1;
                    }
                    Err(error) => {
                        assert!(!allowed, "opcode {opcode:#04x}, {len} bytes, pad {pad}: {error}");
                        assert_named(error, opcode, len);
                    }
                }
            }
        }
    }
    assert!(parsed > 2000, "{parsed}");
}

/// An opcode that is not served is refused for that, and a short packet for being short.
fn assert_named(error: ParseError, opcode: u8, len: usize) {
    let refused = matches!(opcode, 0x40..=0x55 | 0xA0..=0xB4 | 0xB6 | 0xB7 | 0xBC | 0xBD);
    match error {
        ParseError::TooShort { have, need } => assert!(have == len && len < need),
        ParseError::Unsupported(which) => assert!(refused && which.get() == opcode),
        ParseError::UnknownOpcode(which) => {
            assert!(!refused && which == opcode && specification(opcode).is_none());
        }
        ParseError::BadPad { .. } | ParseError::BadLength { .. } => assert!(specification(opcode).is_some()),
        ParseError::BadTransportVersion(_) => panic!("{error}"),
    }
}

#[test]
fn reserved_bits_of_the_bth_survive() {
    for bits in 0..=u8::MAX {
        let mut bytes = segment(0x04, 0, 20, 0);
        bytes[4] = bits;
        bytes[8] = bits;
        seal(&FLOW, IP, &mut bytes, 16);
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!((packet.fecn, packet.becn, packet.ack_req), (bits & 0x80 != 0, bits & 0x40 != 0, bits & 0x80 != 0));
        assert_eq!(packet.reserved, (bits & 0x3F, bits & 0x7F));
        assert_eq!(emit(&packet), bytes);
    }
}

#[test]
fn what_a_datagram_a_flush_and_a_cnp_reserve_is_ignored() {
    for (opcode, reserved) in [(0x64, 16..17), (0x81, 12..28), (0x1C, 12..15)] {
        let zero = segment(opcode, 0, if opcode == 0x1C { 36 } else { 32 }, 0x11);
        let mut set = zero.clone();
        set[reserved].fill(0xFF);
        assert_eq!(Packet::parse(&set), Packet::parse(&zero));
    }
}

#[test]
fn a_new_packet_has_m_set_and_nothing_reserved() {
    let qpn = Qpn::new(0xAB_CDEF).unwrap();
    let op = RequestOp::Send(Place::Only, SendTail::None);
    let body = Body::Request(Request { service: Service::Rc, op, payload: &[] });
    let packet = Packet::new(qpn, PKey::DEFAULT, Psn::from_wire(0x12_3456), body);
    let mut out = [0xEE; 12];
    assert_eq!(packet.write_headers(3, &mut out), Some(12));
    assert_eq!(out, [0x04, 0x50, 0xFF, 0xFF, 0, 0xAB, 0xCD, 0xEF, 0, 0x12, 0x34, 0x56]);
    assert_eq!(segment_len(12, 3), 20);
    assert_eq!(segment_len(12, 0), 16);
}

#[test]
fn fuzz_parse_any_bytes() {
    bolero::check!().for_each(|bytes: &[u8]| {
        if let Ok(packet) = Packet::parse(bytes) {
            assert_eq!(packet.opcode(), bytes[0]);
            let again = emit(&packet);
            assert_eq!(again.len(), bytes.len());
            assert_eq!(Packet::parse(&again), Ok(packet));
        }
    });
}

/// Random bytes seldom begin a packet: the fuzzer chooses among packets that nearly are.
#[test]
fn fuzz_parse_nearly_right() {
    let served: Vec<u8> = (0..=u8::MAX).filter(|&opcode| specification(opcode).is_some()).collect();
    bolero::check!().with_type::<(u8, u8, Vec<u8>)>().for_each(|(choice, flags, rest)| {
        let mut bytes = vec![served[usize::from(*choice) % served.len()], flags & 0xF0];
        bytes.extend(rest);
        bytes.resize(bytes.len().next_multiple_of(4).max(64), 0);
        if let Ok(packet) = Packet::parse(&bytes) {
            assert_eq!(Packet::parse(&emit(&packet)), Ok(packet));
        }
    });
}

#[test]
fn fuzz_parse_ethernet_any_bytes() {
    bolero::check!().for_each(|bytes: &[u8]| {
        // As they are, and behind the beginning of a frame that leads further in.
        let ipv4 = [&[2; 12], &[0x08, 0x00, 0x45][..], bytes].concat();
        let ipv6 = [&[2; 12], &[0x81, 0x00, 0x20, 0x01, 0x86, 0xDD, 0x60][..], bytes].concat();
        for frame in [bytes, &ipv4, &ipv6] {
            if let Ok(outer) = parse_ethernet(frame) {
                let mut out = [0; 66];
                let is_ipv4 = outer.flow.dst.is_ipv4();
                let eth = write_ethernet(outer.dst_mac, outer.src_mac, outer.flow.vlan, is_ipv4, &mut out).unwrap();
                let ip = write_outer(&outer.flow, outer.ip.id, outer.payload.len(), &mut out[eth..]).unwrap();
                let again = [&out[..eth + ip], outer.payload].concat();
                assert_eq!(parse_ethernet(&again).map(|o| (o.flow, o.payload)), Ok((outer.flow, outer.payload)));
            }
        }
    });
}

#[test]
fn fuzz_recover_id() {
    let v6 = Flow { src: IpAddr::V6(Ipv6Addr::LOCALHOST), dst: IpAddr::V6(Ipv6Addr::LOCALHOST), ..FLOW };
    bolero::check!().with_type::<(u16, Vec<u8>)>().for_each(|(id, bytes)| {
        // Whatever it finds makes the ICRC right, and finds it if it is there.
        let ip = IpFields { id: *id, flags_fragment: DONT_FRAGMENT };
        if let Some(found) = recover_id(&FLOW, bytes) {
            assert!(check(&FLOW, IpFields { id: found, ..ip }, bytes));
        }
        let mut sealed = [&bytes[..], &[0; 4]].concat();
        seal(&FLOW, ip, &mut sealed, bytes.len());
        assert_eq!(recover_id(&FLOW, &sealed), Some(*id));
        seal(&v6, ip, &mut sealed, bytes.len());
        assert_eq!(recover_id(&v6, &sealed), Some(0));
        if let Some(byte) = sealed.first_mut() {
            *byte ^= 0x10;
            assert_eq!(recover_id(&v6, &sealed), None);
        }
    });
}
