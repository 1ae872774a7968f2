//! Outer headers: Ethernet, IPv4 or IPv6, UDP.
//!
//! Owns the fixed-offset fast path in both directions. Never walks options, extension headers or fragments: RoCEv2 has
//! none (IBTA annex A17), so they are refused by name.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use thiserror::Error;

use super::flow::{Flow, IpFields, VlanTag};
use super::icrc::{DONT_FRAGMENT, is_ipv4, mapped};
use crate::types::{MacAddr, Qpn};

/// EtherType of IPv4.
const ETHERTYPE_IPV4: u16 = 0x0800;
/// EtherType of IPv6.
const ETHERTYPE_IPV6: u16 = 0x86DD;
/// EtherType of an 802.1Q tag.
const ETHERTYPE_VLAN: u16 = 0x8100;
/// EtherType of an 802.1ad tag.
const ETHERTYPE_SERVICE_VLAN: u16 = 0x88A8;
/// Protocol number of UDP.
const UDP: u8 = 17;
const UDP_LEN: usize = 8;
const IPV4_LEN: usize = 20;
const IPV6_LEN: usize = 40;

/// Why a frame is no RoCEv2 frame. Many of these only mean that the frame is for someone else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Error)]
pub enum OuterError {
    /// It ends within a header.
    #[error("ends within a header")]
    TooShort,
    /// More than one VLAN tag, or a service tag.
    #[error("more than one VLAN tag")]
    DoubleTagged,
    /// VLAN 4095 is reserved.
    #[error("VLAN {0}")]
    BadVlan(u16),
    /// Neither IPv4 nor IPv6; the EtherType.
    #[error("EtherType {0:#06x}")]
    NotIp(u16),
    /// The version nibble is not that of the EtherType, or is neither 4 nor 6.
    #[error("IP version {0}")]
    BadVersion(u8),
    /// The IPv4 header has options, or its length is below 5 words; the IHL.
    #[error("IPv4 header of {0} words")]
    Options(u8),
    /// The IPv4 packet is a fragment.
    #[error("a fragment")]
    Fragment,
    /// The IPv4 header checksum is wrong.
    #[error("IPv4 header checksum")]
    BadChecksum,
    /// Protocol or next header is not UDP.
    #[error("IP protocol {0}")]
    NotUdp(u8),
    /// The UDP destination port is not 4791.
    #[error("UDP port {0}")]
    NotRoce(u16),
    /// The lengths of IP, UDP and what is there contradict each other.
    #[error("lengths contradict each other")]
    BadLength,
}

/// An Ethernet frame taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outer<'a> {
    /// Destination.
    pub dst_mac: MacAddr,
    /// Source.
    pub src_mac: MacAddr,
    /// Addresses, ports and marks, VLAN among them.
    pub flow: Flow,
    /// IPv4 fields that the ICRC covers; zero on IPv6.
    pub ip: IpFields,
    /// UDP payload: BTH to ICRC, or several such segments.
    pub payload: &'a [u8],
}

/// An IP packet taken apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OuterIp<'a> {
    /// Addresses, ports and marks; no VLAN.
    pub flow: Flow,
    /// IPv4 fields that the ICRC covers; zero on IPv6.
    pub ip: IpFields,
    /// UDP payload: BTH to ICRC, or several such segments.
    pub payload: &'a [u8],
}

/// Takes an Ethernet frame (without FCS) apart. Padding after the IP packet is cut off.
///
/// # Errors
///
/// [`OuterError`] says what RoCEv2 does not allow, or that the frame is another protocol's.
pub fn parse_ethernet(frame: &[u8]) -> Result<Outer<'_>, OuterError> {
    let (mac, rest) = frame.split_first_chunk::<14>().ok_or(OuterError::TooShort)?;
    let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, type_hi, type_lo] = *mac;
    let mut ethertype = u16::from_be_bytes([type_hi, type_lo]);
    let (vlan, ip) = match ethertype {
        ETHERTYPE_VLAN => {
            let (&[tag_hi, tag_lo, type_hi, type_lo], rest) =
                rest.split_first_chunk::<4>().ok_or(OuterError::TooShort)?;
            ethertype = u16::from_be_bytes([type_hi, type_lo]);
            (Some(VlanTag { id: u16::from_be_bytes([tag_hi & 0x0F, tag_lo]), priority: tag_hi >> 5 }), rest)
        }
        _ => (None, rest),
    };
    let version = match ethertype {
        ETHERTYPE_IPV4 => 4,
        ETHERTYPE_IPV6 => 6,
        ETHERTYPE_VLAN | ETHERTYPE_SERVICE_VLAN => return Err(OuterError::DoubleTagged),
        other => return Err(OuterError::NotIp(other)),
    };
    if let Some(VlanTag { id: 0xFFF, .. }) = vlan {
        return Err(OuterError::BadVlan(0xFFF));
    }
    match ip.first() {
        Some(first) if first >> 4 == version => {}
        Some(first) => return Err(OuterError::BadVersion(first >> 4)),
        None => return Err(OuterError::TooShort),
    }
    let OuterIp { flow, ip, payload } = parse_ip(ip)?;
    Ok(Outer {
        dst_mac: MacAddr([d0, d1, d2, d3, d4, d5]),
        src_mac: MacAddr([s0, s1, s2, s3, s4, s5]),
        flow: Flow { vlan, ..flow },
        ip,
        payload,
    })
}

/// Takes an IPv4 or IPv6 packet apart. Bytes after it are cut off.
///
/// # Errors
///
/// As [`parse_ethernet`].
pub fn parse_ip(packet: &[u8]) -> Result<OuterIp<'_>, OuterError> {
    match packet.first() {
        Some(first) if first >> 4 == 4 => parse_ipv4(packet),
        Some(first) if first >> 4 == 6 => parse_ipv6(packet),
        Some(first) => Err(OuterError::BadVersion(first >> 4)),
        None => Err(OuterError::TooShort),
    }
}

fn parse_ipv4(packet: &[u8]) -> Result<OuterIp<'_>, OuterError> {
    let (header, _) = packet.split_first_chunk::<IPV4_LEN>().ok_or(OuterError::TooShort)?;
    let [first, tos, len_hi, len_lo, id_hi, id_lo, frag_hi, frag_lo, ttl, protocol, _, _, addresses @ ..] = *header;
    let [s0, s1, s2, s3, d0, d1, d2, d3] = addresses;
    if first & 0x0F != 5 {
        return Err(OuterError::Options(first & 0x0F));
    }
    let flags_fragment = u16::from_be_bytes([frag_hi, frag_lo]);
    if flags_fragment & 0x3FFF != 0 {
        return Err(OuterError::Fragment);
    }
    if protocol != UDP {
        return Err(OuterError::NotUdp(protocol));
    }
    let total = usize::from(u16::from_be_bytes([len_hi, len_lo]));
    let datagram = packet.get(IPV4_LEN..total).ok_or(OuterError::BadLength)?;
    let (src_port, payload) = parse_udp(datagram)?;
    if ones_complement_sum(header) != 0xFFFF {
        return Err(OuterError::BadChecksum);
    }
    Ok(OuterIp {
        flow: Flow {
            src: IpAddr::V4(Ipv4Addr::new(s0, s1, s2, s3)),
            dst: IpAddr::V4(Ipv4Addr::new(d0, d1, d2, d3)),
            src_port,
            traffic_class: tos,
            hop_limit: ttl,
            flow_label: 0,
            vlan: None,
        },
        ip: IpFields { id: u16::from_be_bytes([id_hi, id_lo]), flags_fragment },
        payload,
    })
}

fn parse_ipv6(packet: &[u8]) -> Result<OuterIp<'_>, OuterError> {
    let (header, rest) = packet.split_first_chunk::<IPV6_LEN>().ok_or(OuterError::TooShort)?;
    let [b0, b1, b2, b3, len_hi, len_lo, next_header, hop_limit, addresses @ ..] = header;
    let (src, dst) = addresses.split_first_chunk::<16>().ok_or(OuterError::TooShort)?;
    let (dst, _) = dst.split_first_chunk::<16>().ok_or(OuterError::TooShort)?;
    if *next_header != UDP {
        return Err(OuterError::NotUdp(*next_header));
    }
    let len = usize::from(u16::from_be_bytes([*len_hi, *len_lo]));
    let datagram = rest.get(..len).ok_or(OuterError::BadLength)?;
    let (src_port, payload) = parse_udp(datagram)?;
    Ok(OuterIp {
        flow: Flow {
            src: IpAddr::V6(Ipv6Addr::from(*src)),
            dst: IpAddr::V6(Ipv6Addr::from(*dst)),
            src_port,
            traffic_class: b0 << 4 | b1 >> 4,
            hop_limit: *hop_limit,
            flow_label: u32::from_be_bytes([0, b1 & 0x0F, *b2, *b3]),
            vlan: None,
        },
        ip: IpFields { id: 0, flags_fragment: 0 },
        payload,
    })
}

/// Source port and payload of a datagram that must be exactly as long as its header says. The checksum is not looked
/// at: it is 0 from most senders, and the ICRC covers more.
fn parse_udp(datagram: &[u8]) -> Result<(u16, &[u8]), OuterError> {
    let (header, payload) = datagram.split_first_chunk::<UDP_LEN>().ok_or(OuterError::BadLength)?;
    let [src_hi, src_lo, dst_hi, dst_lo, len_hi, len_lo, _, _] = *header;
    let dst_port = u16::from_be_bytes([dst_hi, dst_lo]);
    if dst_port != Flow::PORT {
        return Err(OuterError::NotRoce(dst_port));
    }
    if usize::from(u16::from_be_bytes([len_hi, len_lo])) != datagram.len() {
        return Err(OuterError::BadLength);
    }
    Ok((u16::from_be_bytes([src_hi, src_lo]), payload))
}

/// Writes an Ethernet header, with the VLAN tag if there is one, to the front of `out`. Returns 14 or 18; `None` if
/// `out` is too short or the tag is out of range.
#[must_use]
pub fn write_ethernet(
    dst: MacAddr,
    src: MacAddr,
    vlan: Option<VlanTag>,
    is_ipv4: bool,
    out: &mut [u8],
) -> Option<usize> {
    let [type_hi, type_lo] = if is_ipv4 { ETHERTYPE_IPV4 } else { ETHERTYPE_IPV6 }.to_be_bytes();
    let len = if vlan.is_some() { 18 } else { 14 };
    let (macs, rest) = out.get_mut(..len)?.split_first_chunk_mut::<12>()?;
    macs[..6].copy_from_slice(&dst.0);
    macs[6..].copy_from_slice(&src.0);
    match vlan {
        None => rest.copy_from_slice(&[type_hi, type_lo]),
        Some(VlanTag { id, priority }) if id < 0xFFF && priority < 8 => {
            let [tag_hi, tag_lo] = (u16::from(priority) << 13 | id).to_be_bytes();
            let [vlan_hi, vlan_lo] = ETHERTYPE_VLAN.to_be_bytes();
            rest.copy_from_slice(&[vlan_hi, vlan_lo, tag_hi, tag_lo, type_hi, type_lo]);
        }
        Some(_) => return None,
    }
    Some(len)
}

/// Writes IP and UDP header for `udp_payload` bytes (one segment, or all of a superframe) to the front of `out`: no
/// options, "don't fragment", identification `id` (IPv4), UDP checksum 0. Returns 28 or 48.
///
/// `None` if `out` is too short, the length does not fit 16 bits, or the addresses are of two families.
#[must_use]
pub fn write_outer(flow: &Flow, id: u16, udp_payload: usize, out: &mut [u8]) -> Option<usize> {
    if flow.src.is_ipv4() != flow.dst.is_ipv4() {
        return None;
    }
    let udp_len = u16::try_from(udp_payload.checked_add(UDP_LEN)?).ok()?;
    let udp = if is_ipv4(flow) {
        let total = u16::try_from(usize::from(udp_len) + IPV4_LEN).ok()?;
        let (header, udp) = out.split_first_chunk_mut::<IPV4_LEN>()?;
        *header = ipv4_header(flow, id, total)?;
        udp
    } else {
        let (header, udp) = out.split_first_chunk_mut::<IPV6_LEN>()?;
        *header = ipv6_header(flow, udp_len);
        udp
    };
    let header = udp.first_chunk_mut::<UDP_LEN>()?;
    let [src_hi, src_lo] = flow.src_port.to_be_bytes();
    let [dst_hi, dst_lo] = Flow::PORT.to_be_bytes();
    let [len_hi, len_lo] = udp_len.to_be_bytes();
    *header = [src_hi, src_lo, dst_hi, dst_lo, len_hi, len_lo, 0, 0];
    Some(flow.header_len())
}

fn ipv4_header(flow: &Flow, id: u16, total: u16) -> Option<[u8; IPV4_LEN]> {
    let (IpAddr::V4(src), IpAddr::V4(dst)) = (flow.src, flow.dst) else { return None };
    let mut header = [0; IPV4_LEN];
    header[0] = 0x45;
    header[1] = flow.traffic_class;
    header[2..4].copy_from_slice(&total.to_be_bytes());
    header[4..6].copy_from_slice(&id.to_be_bytes());
    header[6..8].copy_from_slice(&DONT_FRAGMENT.to_be_bytes());
    header[8] = flow.hop_limit;
    header[9] = UDP;
    header[12..16].copy_from_slice(&src.octets());
    header[16..20].copy_from_slice(&dst.octets());
    let checksum = !ones_complement_sum(&header);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    Some(header)
}

fn ipv6_header(flow: &Flow, udp_len: u16) -> [u8; IPV6_LEN] {
    let first = 6 << 28 | u32::from(flow.traffic_class) << 20 | (flow.flow_label & 0xF_FFFF);
    let mut header = [0; IPV6_LEN];
    header[0..4].copy_from_slice(&first.to_be_bytes());
    header[4..6].copy_from_slice(&udp_len.to_be_bytes());
    header[6] = UDP;
    header[7] = flow.hop_limit;
    header[8..24].copy_from_slice(&mapped(flow.src).octets());
    header[24..40].copy_from_slice(&mapped(flow.dst).octets());
    header
}

/// The Internet checksum before its inversion (RFC 1071).
fn ones_complement_sum(header: &[u8; IPV4_LEN]) -> u16 {
    let (words, _) = header.as_chunks::<2>();
    let sum: u32 = words.iter().map(|word| u32::from(u16::from_be_bytes(*word))).sum();
    let folded = (sum & 0xFFFF) + (sum >> 16);
    let folded = (folded & 0xFFFF) + (folded >> 16);
    #[allow(clippy::cast_possible_truncation)] // Ten words: folded twice it fits.
    let sum = folded as u16;
    sum
}

/// UDP source port of a connected QP (IBTA annex A17): a function of the flow label, or of the two QPNs where that
/// is 0. Symmetric, so that both directions of a connection use one port. 0xC000 to 0xFFFF.
#[must_use]
pub fn udp_source_port(flow_label: u32, local: Qpn, remote: Qpn) -> u16 {
    let mut label = flow_label & 0xF_FFFF;
    if label == 0 {
        let mut v = u64::from(local.get()) * u64::from(remote.get());
        v ^= v >> 20;
        v ^= v >> 40;
        #[allow(clippy::cast_possible_truncation)] // 20 bits.
        let hashed = (v & 0xF_FFFF) as u32;
        label = hashed;
    }
    #[allow(clippy::cast_possible_truncation)] // 14 bits.
    let low = ((label & 0x3FFF) ^ (label >> 14)) as u16;
    0xC000 | low
}

/// UDP source port of the datagrams of a UD QP, as rxe spreads them: a multiplicative hash of the QPN. QP1 has 55410.
#[must_use]
pub fn datagram_source_port(qpn: Qpn) -> u16 {
    #[allow(clippy::cast_possible_truncation)] // 14 bits.
    let hash = (qpn.get().wrapping_mul(0x61C8_8647) >> 18) as u16;
    0xC000 + hash
}

#[cfg(test)]
mod tests {
    use super::*;
    use uroce_fixtures::vectors::{V1_IPV4_SEND_ONLY, V3_IPV6_WRITE_ONLY, VECTORS};

    const A: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
    const B: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

    fn framed(vlan: Option<VlanTag>, packet: &[u8]) -> Vec<u8> {
        let mut frame = vec![0; 18];
        let len = write_ethernet(A, B, vlan, packet[0] >> 4 == 4, &mut frame).unwrap();
        frame.truncate(len);
        frame.extend(packet);
        frame
    }

    #[test]
    fn fields_of_the_vectors() {
        let v1 = parse_ip(V1_IPV4_SEND_ONLY).unwrap();
        assert_eq!(v1.flow.src, "192.0.2.1".parse::<IpAddr>().unwrap());
        assert_eq!(v1.flow.dst, "192.0.2.2".parse::<IpAddr>().unwrap());
        assert_eq!((v1.flow.src_port, v1.flow.traffic_class, v1.flow.hop_limit), (0xC123, 2, 64));
        assert_eq!(v1.ip, IpFields { id: 0x1234, flags_fragment: 0x4000 });
        assert_eq!(v1.payload.len(), 20);
        let v3 = parse_ip(V3_IPV6_WRITE_ONLY).unwrap();
        assert_eq!(v3.flow.src, "2001:db8::1".parse::<IpAddr>().unwrap());
        assert_eq!((v3.flow.flow_label, v3.flow.traffic_class, v3.flow.hop_limit), (0x7_0BBD, 0x6A, 64));
        assert_eq!(v3.payload.len(), 36);
    }

    #[test]
    fn what_is_parsed_is_written_again() {
        for (name, packet) in VECTORS {
            let outer = parse_ip(packet).unwrap();
            let mut out = [0; 48];
            let len = write_outer(&outer.flow, outer.ip.id, outer.payload.len(), &mut out).unwrap();
            assert_eq!(out[..len], packet[..len], "{name}");
            for vlan in [None, Some(VlanTag { id: 42, priority: 3 })] {
                let frame = framed(vlan, packet);
                let back = parse_ethernet(&frame).unwrap();
                assert_eq!((back.dst_mac, back.src_mac), (A, B));
                assert_eq!(back.flow, Flow { vlan, ..outer.flow });
                assert_eq!((back.ip, back.payload), (outer.ip, outer.payload));
            }
        }
    }

    #[test]
    fn ethernet_padding_is_cut() {
        let mut frame = framed(None, V1_IPV4_SEND_ONLY);
        frame.extend([0xEE; 9]);
        assert_eq!(parse_ethernet(&frame).unwrap().payload, &V1_IPV4_SEND_ONLY[28..]);
    }

    #[test]
    fn every_cut_is_refused() {
        for (_, packet) in VECTORS {
            let frame = framed(None, packet);
            for len in 0..frame.len() {
                assert!(parse_ethernet(&frame[..len]).is_err(), "{len}");
            }
        }
    }

    /// V1 with byte `at` set and the checksum made right again.
    fn v1_with(at: usize, value: u8) -> Vec<u8> {
        let mut packet = V1_IPV4_SEND_ONLY.to_vec();
        packet[at] = value;
        packet[10..12].fill(0);
        let sum = !ones_complement_sum(packet.first_chunk().unwrap());
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet
    }

    #[test]
    fn what_roce_does_not_allow_is_named() {
        let of = |at, value| parse_ip(&v1_with(at, value)).unwrap_err();
        assert_eq!(of(0, 0x46), OuterError::Options(6));
        assert_eq!(of(0, 0x44), OuterError::Options(4));
        assert_eq!(of(0, 0x55), OuterError::BadVersion(5));
        assert_eq!(of(6, 0x60), OuterError::Fragment);
        assert_eq!(of(7, 0x01), OuterError::Fragment);
        assert_eq!(of(9, 6), OuterError::NotUdp(6));
        assert_eq!(of(23, 0xB8), OuterError::NotRoce(0x12B8));
        assert_eq!(of(3, 0x2F), OuterError::BadLength);
        assert_eq!(of(3, 0x31), OuterError::BadLength);
        assert_eq!(of(3, 0x10), OuterError::BadLength);
        assert_eq!(of(25, 0x1B), OuterError::BadLength);
        let mut bad_sum = V1_IPV4_SEND_ONLY.to_vec();
        bad_sum[1] ^= 1;
        assert_eq!(parse_ip(&bad_sum), Err(OuterError::BadChecksum));
        let mut extension = V3_IPV6_WRITE_ONLY.to_vec();
        extension[6] = 44;
        assert_eq!(parse_ip(&extension), Err(OuterError::NotUdp(44)));
    }

    #[test]
    fn tags_and_other_protocols_are_named() {
        let tag = Some(VlanTag { id: 42, priority: 0 });
        let frame = framed(tag, V1_IPV4_SEND_ONLY);
        let double = [&frame[..12], &[0x81, 0, 0, 7], &frame[12..]].concat();
        assert_eq!(parse_ethernet(&double), Err(OuterError::DoubleTagged));
        let service = [&frame[..12], &[0x88, 0xA8, 0, 7], &frame[12..]].concat();
        assert_eq!(parse_ethernet(&service), Err(OuterError::DoubleTagged));
        let mut arp = frame.clone();
        arp[16..18].copy_from_slice(&[8, 6]);
        assert_eq!(parse_ethernet(&arp), Err(OuterError::NotIp(0x0806)));
        let mut other_version = frame.clone();
        other_version[16..18].copy_from_slice(&[0x86, 0xDD]);
        assert_eq!(parse_ethernet(&other_version), Err(OuterError::BadVersion(4)));
        let mut reserved = frame.clone();
        reserved[14..16].fill(0xFF);
        assert_eq!(parse_ethernet(&reserved), Err(OuterError::BadVlan(0xFFF)));
    }

    #[test]
    fn what_cannot_be_written_is_refused() {
        let flow = parse_ip(V1_IPV4_SEND_ONLY).unwrap().flow;
        assert_eq!(write_outer(&flow, 0, 100, &mut [0; 27]), None);
        assert_eq!(write_outer(&flow, 0, 65_507, &mut [0; 28]), Some(28));
        assert_eq!(write_outer(&flow, 0, 65_508, &mut [0; 28]), None);
        assert_eq!(write_outer(&flow, 0, usize::MAX, &mut [0; 28]), None);
        let mixed = Flow { dst: IpAddr::V6(Ipv6Addr::LOCALHOST), ..flow };
        assert_eq!(write_outer(&mixed, 0, 100, &mut [0; 48]), None);
        assert_eq!(write_ethernet(A, B, None, true, &mut [0; 13]), None);
        assert_eq!(write_ethernet(A, B, Some(VlanTag { id: 4095, priority: 0 }), true, &mut [0; 18]), None);
        assert_eq!(write_ethernet(A, B, Some(VlanTag { id: 1, priority: 8 }), true, &mut [0; 18]), None);
    }

    #[test]
    fn source_ports_are_those_of_linux() {
        let qpn = |v| Qpn::new(v).unwrap();
        assert_eq!(udp_source_port(0, qpn(0x20), qpn(0x21)), 50208);
        assert_eq!(udp_source_port(0, qpn(0x21), qpn(0x20)), 50208);
        assert_eq!(udp_source_port(0x7_0BBD, qpn(0x20), qpn(0x21)), 52129);
        assert_eq!(datagram_source_port(Qpn::GSI), 55410);
        assert!(udp_source_port(0, qpn(0xFF_FFFF), qpn(0xFF_FFFF)) >= 0xC000);
    }
}
