//! Outer headers as the wrappers need them: made for a record, shortened for a truncated packet.
//!
//! Owns a few bytes of IP and UDP that are off the fast path. Never parses what came from a peer.

use crate::wire::{Flow, IpFields};

/// Longest IP and UDP header.
pub(super) const OUTER_MAX: usize = 48;
/// Bytes of an IPv4 header without options, of an IPv6 header, and of a UDP header.
const IPV4: usize = 20;
const IPV6: usize = 40;
const UDP: usize = 8;

/// Writes the headers before a packet of `len` bytes (BTH to ICRC) of `flow`; returns their length.
pub(super) fn write(flow: &Flow, ids: IpFields, len: usize, out: &mut [u8; OUTER_MAX]) -> usize {
    use core::net::IpAddr::V4;
    let udp_len = len + UDP;
    let ip_len = match (flow.src, flow.dst) {
        (V4(src), V4(dst)) => {
            out[0] = 0x45;
            out[1] = flow.traffic_class;
            out[2..4].copy_from_slice(&wire_len(udp_len + IPV4));
            out[4..6].copy_from_slice(&ids.id.to_be_bytes());
            out[6..8].copy_from_slice(&ids.flags_fragment.to_be_bytes());
            out[8..10].copy_from_slice(&[flow.hop_limit, 17]);
            out[10..12].fill(0);
            out[12..16].copy_from_slice(&src.octets());
            out[16..20].copy_from_slice(&dst.octets());
            let sum = checksum(&out[..IPV4]);
            out[10..12].copy_from_slice(&sum.to_be_bytes());
            IPV4
        }
        (src, dst) => {
            let class = u32::from(flow.traffic_class) << 20;
            out[0..4].copy_from_slice(&(6 << 28 | class | (flow.flow_label & 0xF_FFFF)).to_be_bytes());
            out[4..6].copy_from_slice(&wire_len(udp_len));
            out[6..8].copy_from_slice(&[17, flow.hop_limit]);
            out[8..24].copy_from_slice(&v6(src));
            out[24..40].copy_from_slice(&v6(dst));
            IPV6
        }
    };
    let udp = &mut out[ip_len..ip_len + UDP];
    udp[0..2].copy_from_slice(&flow.src_port.to_be_bytes());
    udp[2..4].copy_from_slice(&Flow::PORT.to_be_bytes());
    udp[4..6].copy_from_slice(&wire_len(udp_len));
    udp[6..8].fill(0);
    ip_len + UDP
}

fn v6(address: core::net::IpAddr) -> [u8; 16] {
    match address {
        core::net::IpAddr::V4(a) => a.to_ipv6_mapped().octets(),
        core::net::IpAddr::V6(a) => a.octets(),
    }
}

/// Lengths beyond 65,535 do not occur in a packet; a superframe's would be clamped.
fn wire_len(len: usize) -> [u8; 2] {
    u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes()
}

/// The Internet checksum.
fn checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.chunks_exact(2).map(|c| u32::from(u16::from_be_bytes([c[0], c[1]]))).sum();
    while sum > 0xFFFF {
        sum = (sum & 0xFFFF) + (sum >> 16);
    }
    #[allow(clippy::cast_possible_truncation)] // Folded to 16 bits above.
    let folded = sum as u16;
    !folded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(text: &str) -> Vec<u8> {
        (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
    }

    fn flow(src: &str, dst: &str) -> Flow {
        Flow {
            src: src.parse().unwrap(),
            dst: dst.parse().unwrap(),
            src_port: 0xC123,
            traffic_class: 2,
            hop_limit: 64,
            flow_label: 0,
            vlan: None,
        }
    }

    #[test]
    fn ipv4_as_in_the_icrc_vectors() {
        // Vector V1: SEND Only of 3 bytes, BTH to ICRC 20 bytes.
        let expected = hex("45020030123440004011a483c0000201c0000202c12312b7001c0000");
        let mut out = [0; OUTER_MAX];
        let ids = IpFields { id: 0x1234, flags_fragment: 0x4000 };
        let len = write(&flow("192.0.2.1", "192.0.2.2"), ids, 20, &mut out);
        assert_eq!(out[..len], expected[..]);
    }

    #[test]
    fn ipv6_as_in_the_icrc_vectors() {
        // Vector V3: WRITE Only of 4 bytes, BTH to ICRC 36 bytes.
        let expected = hex(concat!(
            "66a70bbd002c114020010db800000000000000000000000120010db8000000000000000000000002",
            "c77712b7002c0000"
        ));
        let mut out = [0; OUTER_MAX];
        let ids = IpFields { id: 0, flags_fragment: 0 };
        let v6 =
            Flow { src_port: 0xC777, traffic_class: 0x6a, flow_label: 0x70bbd, ..flow("2001:db8::1", "2001:db8::2") };
        let len = write(&v6, ids, 36, &mut out);
        assert_eq!(out[..len], expected[..]);
    }
}
