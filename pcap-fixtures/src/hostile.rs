//! Packets that no well-meaning peer sends, each with an ICRC that is right, so that only a check of its contents
//! stops it.
//!
//! Most repeat a fault that Linux's rxe once had. Each function says what a correct endpoint does; none of the packets
//! may make it panic, read or write outside a region, answer more than once, or change another QP.

use std::net::IpAddr;

use crate::icrc::reference_icrc;

const BTH_LEN: usize = 12;
const RETH_LEN: usize = 16;
const ICRC_LEN: usize = 4;
const UDP_LEN: usize = 8;

/// The addresses and the header fields around a packet. All but `traffic_class` are covered by the ICRC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Source address. Unless both addresses are IPv4, the packet is IPv6, and an IPv4 address is mapped into it.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// UDP destination port.
    pub destination_port: u16,
    /// IPv4 identification.
    pub ipv4_id: u16,
    /// The IPv4 flag of that name.
    pub dont_fragment: bool,
    /// IPv4 type of service or IPv6 traffic class.
    pub traffic_class: u8,
}

impl Flow {
    /// A flow with an ordinary source port, to port 4791, identification 0, "don't fragment" set.
    #[must_use]
    pub fn new(source: IpAddr, destination: IpAddr) -> Self {
        Self {
            source,
            destination,
            source_port: 0xc123,
            destination_port: 4791,
            ipv4_id: 0,
            dont_fragment: true,
            traffic_class: 0,
        }
    }

    /// The IP and UDP headers before `payload_len` bytes.
    fn headers(&self, payload_len: usize) -> Vec<u8> {
        let udp_len = u16::try_from(UDP_LEN + payload_len).expect("hostile packets are short");
        let mut out = Vec::with_capacity(48);
        if let (IpAddr::V4(source), IpAddr::V4(destination)) = (self.source, self.destination) {
            out.extend([0x45, self.traffic_class]);
            out.extend((20 + udp_len).to_be_bytes());
            out.extend(self.ipv4_id.to_be_bytes());
            out.extend([u8::from(self.dont_fragment) << 6, 0, 64, 17, 0, 0]);
            out.extend(source.octets());
            out.extend(destination.octets());
            let checksum = !ones_complement_sum(&out);
            out[10..12].copy_from_slice(&checksum.to_be_bytes());
        } else {
            out.extend((0x6000_0000 | u32::from(self.traffic_class) << 20).to_be_bytes());
            out.extend(udp_len.to_be_bytes());
            out.extend([17, 64]);
            out.extend(in_ipv6(self.source));
            out.extend(in_ipv6(self.destination));
        }
        out.extend(self.source_port.to_be_bytes());
        out.extend(self.destination_port.to_be_bytes());
        out.extend(udp_len.to_be_bytes());
        out.extend([0, 0]);
        out
    }
}

/// What the packets are aimed at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Destination QPN, 24 bits.
    pub dest_qp: u32,
    /// PSN, 24 bits: the one that the responder expects, if the packet shall get past that check.
    pub psn: u32,
    /// P_Key.
    pub p_key: u16,
    /// R_Key of a region that may be read, written and used by atomics.
    pub r_key: u32,
    /// Where that region starts.
    pub va: u64,
    /// Payload bytes of a packet that is not its message's last.
    pub path_mtu: u16,
}

impl Target {
    /// A target with the default P_Key, path MTU 256, and region 0 at 0x1000.
    #[must_use]
    pub fn new(dest_qp: u32, psn: u32) -> Self {
        Self { dest_qp, psn, p_key: 0xffff, r_key: 0, va: 0x1000, path_mtu: 256 }
    }

    /// A BTH with this opcode and pad count, with AckReq set.
    fn bth(&self, opcode: u8, pad: u8) -> Vec<u8> {
        let mut out = vec![opcode, pad << 4];
        out.extend(self.p_key.to_be_bytes());
        out.extend((self.dest_qp & 0x00ff_ffff).to_be_bytes());
        out.extend((self.psn & 0x00ff_ffff | 0x8000_0000).to_be_bytes());
        out
    }

    /// The same with a RETH.
    fn bth_reth(&self, opcode: u8, pad: u8, va: u64, len: u32) -> Vec<u8> {
        let mut out = self.bth(opcode, pad);
        out.extend(va.to_be_bytes());
        out.extend(self.r_key.to_be_bytes());
        out.extend(len.to_be_bytes());
        out
    }
}

/// A packet that must do no harm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostileFrame {
    /// Names the packet within its group.
    pub name: String,
    /// The UDP payload: BTH to ICRC.
    pub bytes: Vec<u8>,
    /// The whole packet from the IP header on; ends with `bytes`.
    pub ip_packet: Vec<u8>,
    /// What is wrong with it.
    pub why: &'static str,
}

impl HostileFrame {
    /// The packet as an Ethernet frame between these MAC addresses.
    #[must_use]
    pub fn ethernet(&self, source: [u8; 6], destination: [u8; 6]) -> Vec<u8> {
        let ether_type = if self.ip_packet[0] >> 4 == 4 { [0x08, 0x00] } else { [0x86, 0xdd] };
        [&destination[..], &source[..], &ether_type[..], &self.ip_packet[..]].concat()
    }

    /// `head` cut or filled up with zeros to `len` bytes of UDP payload, of which the last four are the ICRC if there
    /// are as many.
    fn new(flow: &Flow, name: String, head: &[u8], len: usize, why: &'static str) -> Self {
        let mut ip_packet = flow.headers(len);
        let start = ip_packet.len();
        ip_packet.extend(head.iter().copied().chain(std::iter::repeat(0)).take(len));
        if len >= ICRC_LEN {
            let icrc = reference_icrc(&ip_packet);
            let end = ip_packet.len();
            ip_packet[end - ICRC_LEN..].copy_from_slice(&icrc);
        }
        Self { name, bytes: ip_packet[start..].to_vec(), ip_packet, why }
    }

    /// `head` and the ICRC.
    fn whole(flow: &Flow, name: String, head: &[u8], why: &'static str) -> Self {
        Self::new(flow, name, head, head.len() + ICRC_LEN, why)
    }
}

/// The packet that crashed rxe with no QP in existence: a UDP datagram of 48 bytes with opcode 0xff to the multicast
/// QPN. The length of the unknown opcode's headers was taken as 0 and a subtraction wrapped. It must be dropped.
#[must_use]
pub fn rxe_opcode_ff(flow: &Flow) -> HostileFrame {
    let target = Target::new(0x00ff_ffff, 0);
    let why = "opcode 0xff has no headers to measure";
    HostileFrame::new(flow, "opcode 0xff".into(), &target.bth(0xff, 0), 48 - UDP_LEN, why)
}

/// All 256 opcodes with all UDP payload lengths from 0 to 128, 33,024 packets: a BTH and then zeros.
///
/// Not all are wrong: some are whole packets of a known opcode. Each must be parsed or refused by name.
pub fn opcode_grid(flow: &Flow, target: &Target) -> impl Iterator<Item = HostileFrame> + use<> {
    let (flow, target) = (*flow, *target);
    (0..=u8::MAX).flat_map(move |opcode| {
        let head = target.bth(opcode, 0);
        (0..=128).map(move |len| {
            let name = format!("opcode 0x{opcode:02x}, {len} bytes");
            HostileFrame::new(&flow, name, &head, len, "any opcode may come with any length")
        })
    })
}

/// Packets that end before their headers, their pad bytes and the ICRC do, for pad counts 0 to 3. In rxe the payload
/// length came out negative. All must be dropped.
#[must_use]
pub fn short_with_pad(flow: &Flow, target: &Target) -> Vec<HostileFrame> {
    /// Name, opcode, length of BTH and extended headers.
    const KINDS: [(&str, u8, usize); 11] = [
        ("RC_SEND_ONLY", 0x04, BTH_LEN),
        ("RC_SEND_ONLY_IMM", 0x05, BTH_LEN + 4),
        ("RC_WRITE_ONLY", 0x0a, BTH_LEN + RETH_LEN),
        ("RC_READ_REQUEST", 0x0c, BTH_LEN + RETH_LEN),
        ("RC_READ_RESP_ONLY", 0x10, BTH_LEN + 4),
        ("RC_ACK", 0x11, BTH_LEN + 4),
        ("RC_ATOMIC_ACK", 0x12, BTH_LEN + 4 + 8),
        ("RC_FETCH_ADD", 0x14, BTH_LEN + 28),
        ("RC_SEND_ONLY_INV", 0x17, BTH_LEN + 4),
        ("UC_SEND_ONLY", 0x24, BTH_LEN),
        ("UD_SEND_ONLY", 0x64, BTH_LEN + 8),
    ];
    let mut out = Vec::new();
    for (kind, opcode, headers) in KINDS {
        for pad in 0..=3 {
            let head = target.bth(opcode, pad);
            for len in 0..headers + usize::from(pad) + ICRC_LEN {
                let name = format!("{kind}, pad {pad}, {len} bytes");
                out.push(HostileFrame::new(flow, name, &head, len, "ends before its headers, pad and ICRC"));
            }
        }
    }
    out
}

/// ATOMIC WRITE (opcode 0x1d) with a payload of other than 8 bytes, 0 to 16, properly padded. rxe wrote 8 bytes all
/// the same. Refused with NAK invalid request, or dropped where the operation is not supported at all.
#[must_use]
pub fn atomic_write_lengths(flow: &Flow, target: &Target) -> Vec<HostileFrame> {
    let lengths = (0..=16_u8).filter(|&len| len != 8);
    let frame = |len: u8| {
        let pad = len.wrapping_neg() & 3;
        let mut head = target.bth_reth(0x1d, pad, target.va, 8);
        head.extend((0..len).map(|at| 0xa0 | at));
        head.extend(std::iter::repeat_n(0, usize::from(pad)));
        HostileFrame::whole(flow, format!("ATOMIC_WRITE of {len} bytes"), &head, "ATOMIC WRITE is 8 bytes long")
    };
    lengths.map(frame).collect()
}

/// READ, WRITE and atomic requests whose range wraps around the address space or is longer than a message can be
/// (2^31 bytes). rxe's check of the range overflowed. Refused with NAK remote access error, or NAK invalid request
/// for the length; nothing is read or written. Each is a first request with the PSN of `target`.
#[must_use]
pub fn wrapping_ranges(flow: &Flow, target: &Target) -> Vec<HostileFrame> {
    const LONGEST: u32 = 1 << 31;
    let ranges = [
        (u64::MAX, 1, "the end wraps to 0"),
        (u64::MAX, 2, "the end wraps to 1"),
        (u64::MAX - 7, 16, "half lies before the wrap and half behind it"),
        (u64::MAX, u32::MAX, "the longest length at the highest address"),
        (0, u32::MAX, "longer than a message can be"),
        (target.va, u32::MAX, "longer than a message can be, from the start of the region"),
        (target.va, LONGEST + 1, "one byte longer than a message can be"),
        (u64::MAX - u64::from(LONGEST) + 1, LONGEST, "the end is exactly 2^64"),
        (target.va.wrapping_sub(u64::from(LONGEST) - 8), LONGEST, "the end lies inside the region, the start does not"),
    ];
    let mut out = Vec::new();
    for (va, len, why) in ranges {
        let read = target.bth_reth(0x0c, 0, va, len);
        out.push(HostileFrame::whole(flow, format!("READ of {len} bytes at 0x{va:x}"), &read, why));
        out.push(write(flow, target, va, len, why));
    }
    for va in [u64::MAX, u64::MAX - 6] {
        let mut head = target.bth(0x14, 0);
        head.extend(va.to_be_bytes());
        head.extend(target.r_key.to_be_bytes());
        head.extend([0; 16]);
        let name = format!("FETCH_ADD at 0x{va:x}");
        out.push(HostileFrame::whole(flow, name, &head, "not aligned, and the end of the 8 bytes wraps"));
    }
    out
}

/// The first packet of a WRITE, with the payload that its length calls for: an Only if one packet holds it.
fn write(flow: &Flow, target: &Target, va: u64, len: u32, why: &'static str) -> HostileFrame {
    let first = u32::from(target.path_mtu);
    let (opcode, payload) = if len <= first { (0x0a, len) } else { (0x06, first) };
    let pad = payload.wrapping_neg().to_le_bytes()[0] & 3;
    let mut head = target.bth_reth(opcode, pad, va, len);
    let payload_len = usize::try_from(payload).expect("a path MTU is short");
    head.extend(std::iter::repeat_n(0xee, payload_len));
    head.extend(std::iter::repeat_n(0, usize::from(pad)));
    HostileFrame::whole(flow, format!("WRITE of {len} bytes at 0x{va:x}"), &head, why)
}

/// MADs to QP1 that end early: every attribute of the CM with lengths from 0 to 255 of the 256 bytes that a MAD has.
/// A sibling of rxe computed a negative length. All must be dropped.
#[must_use]
pub fn short_mads(flow: &Flow, psn: u32) -> Vec<HostileFrame> {
    const LENGTHS: [u8; 12] = [0, 1, 4, 23, 24, 25, 28, 32, 64, 128, 252, 255];
    let target = Target::new(1, psn);
    let mut out = Vec::new();
    for attribute in 0x10..=0x1a_u8 {
        // Base version 1, class 7 (communication management) version 2, method Send.
        let mut mad = vec![1, 7, 2, 3];
        mad.extend([0; 12]);
        mad.extend([0, attribute]);
        mad.resize(256, 0);
        for len in LENGTHS {
            let pad = len.wrapping_neg() & 3;
            let mut head = target.bth(0x64, pad);
            head.extend(0x8001_0000_u32.to_be_bytes());
            head.extend([0, 0, 0, 1]);
            head.extend(&mad[..usize::from(len)]);
            head.extend(std::iter::repeat_n(0, usize::from(pad)));
            let name = format!("attribute 0x{attribute:02x}, {len} bytes of MAD");
            out.push(HostileFrame::whole(flow, name, &head, "a MAD has 256 bytes"));
        }
    }
    out
}

/// The sum that IP checksums are the complement of.
fn ones_complement_sum(bytes: &[u8]) -> u16 {
    bytes.chunks_exact(2).fold(0_u16, |sum, pair| {
        let (sum, carry) = sum.overflowing_add(u16::from_be_bytes([pair[0], pair[1]]));
        sum + u16::from(carry)
    })
}

fn in_ipv6(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vectors::{V1_IPV4_SEND_ONLY, V3_IPV6_WRITE_ONLY};

    fn v4() -> Flow {
        Flow::new([192, 0, 2, 1].into(), [192, 0, 2, 2].into())
    }

    fn v6() -> Flow {
        let host = |last| IpAddr::from([0x2001, 0xdb8, 0, 0, 0, 0, 0, last]);
        Flow { source_port: 0xc777, ..Flow::new(host(1), host(2)) }
    }

    fn every_group(flow: &Flow) -> Vec<HostileFrame> {
        let target = Target::new(0x11, 0x00ff_fffe);
        let mut all = vec![rxe_opcode_ff(flow)];
        all.extend(short_with_pad(flow, &target));
        all.extend(atomic_write_lengths(flow, &target));
        all.extend(wrapping_ranges(flow, &target));
        all.extend(short_mads(flow, 0));
        all.extend(opcode_grid(flow, &target).step_by(97));
        all
    }

    /// The builder makes V1 to the last bit: addresses, checksum, lengths, ICRC.
    #[test]
    fn builds_a_known_ipv4_packet() {
        let flow = Flow { ipv4_id: 0x1234, traffic_class: 2, ..v4() };
        let mut head = Target::new(0x11, 0x00ff_fffe).bth(0x04, 1);
        head[1] |= 0x40; // MigReq, which V1 has set
        head.extend(b"abc\0");
        assert_eq!(HostileFrame::whole(&flow, String::new(), &head, "").ip_packet, V1_IPV4_SEND_ONLY);
    }

    /// The builder has no flow label; the rest of V3 is equal, and so is its ICRC, which does not cover the label.
    #[test]
    fn builds_a_known_ipv6_packet() {
        let flow = Flow { traffic_class: 0x6a, ..v6() };
        let target = Target { r_key: 0x55, ..Target::new(0x00ab_cdef, 0) };
        let mut head = target.bth_reth(0x0a, 0, 0x1000, 4);
        head[1] |= 0x40;
        head.extend([0xde, 0xad, 0xbe, 0xef]);
        let packet = HostileFrame::whole(&flow, String::new(), &head, "").ip_packet;
        assert_eq!(packet[4..], V3_IPV6_WRITE_ONLY[4..]);
    }

    #[test]
    fn lengths_checksum_and_icrc_of_all_are_right() {
        for flow in [v4(), v6()] {
            for HostileFrame { name, bytes, ip_packet, .. } in every_group(&flow) {
                let ip_len = ip_packet.len() - UDP_LEN - bytes.len();
                assert!(ip_packet.ends_with(&bytes), "{name}");
                assert_eq!(ip_packet[ip_len + 4..ip_len + 6], u16::try_from(8 + bytes.len()).unwrap().to_be_bytes());
                if ip_len == 20 {
                    assert_eq!(ip_packet[2..4], u16::try_from(ip_packet.len()).unwrap().to_be_bytes(), "{name}");
                    assert_eq!(ones_complement_sum(&ip_packet[..20]), 0xffff, "{name}");
                }
                if bytes.len() >= ICRC_LEN {
                    assert_eq!(reference_icrc(&ip_packet), ip_packet[ip_packet.len() - 4..], "{name}");
                }
            }
        }
    }

    #[test]
    fn the_packet_that_crashed_rxe() {
        let frame = rxe_opcode_ff(&v4());
        assert_eq!(frame.ip_packet.len(), 20 + 48);
        assert_eq!(frame.bytes[..8], [0xff, 0, 0xff, 0xff, 0, 0xff, 0xff, 0xff]);
    }

    #[test]
    fn names_are_unique_within_a_group() {
        let target = Target::new(0x11, 0);
        let groups =
            [short_with_pad(&v4(), &target), atomic_write_lengths(&v4(), &target), wrapping_ranges(&v4(), &target)];
        for group in groups {
            let names: std::collections::BTreeSet<_> = group.iter().map(|frame| &frame.name).collect();
            assert_eq!(names.len(), group.len());
        }
    }

    #[test]
    fn the_grid_has_every_opcode_with_every_length() {
        let frames = opcode_grid(&v4(), &Target::new(0x11, 0));
        let seen: std::collections::BTreeSet<_> =
            frames.filter(|frame| !frame.bytes.is_empty()).map(|frame| (frame.bytes[0], frame.bytes.len())).collect();
        // Packets of 1 to 4 bytes are all ICRC, or all BTH: their first byte is no opcode to count.
        assert_eq!(seen.iter().filter(|(_, len)| *len > 4).count(), 256 * 124);
    }

    #[test]
    fn ethernet_frames_name_the_ip_version() {
        let frame = |flow: &Flow| rxe_opcode_ff(flow).ethernet([2, 0, 0, 0, 0, 1], [2, 0, 0, 0, 0, 2]);
        assert_eq!(frame(&v4())[..15], [2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 0x08, 0x00, 0x45]);
        assert_eq!(frame(&v6())[12..15], [0x86, 0xdd, 0x60]);
    }
}
