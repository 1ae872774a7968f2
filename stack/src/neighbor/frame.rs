//! Frames that we send, whole and untagged.

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, Icmpv4Packet,
    Icmpv4Repr, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr, NdiscNeighborFlags,
    NdiscRepr,
};

use super::solicited_node;
use crate::types::MacAddr;

const ALL_NODES: Ipv6Addr = Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1);
/// Neighbour discovery is valid only with this hop limit.
const ON_LINK: u8 = 255;
const HOPS: u8 = 64;

/// Who has `hop`? To everybody, or to the one who had it.
pub(super) fn arp_request(mac: MacAddr, source: Ipv4Addr, to: Option<MacAddr>, hop: Ipv4Addr) -> Vec<u8> {
    arp(ArpOperation::Request, mac, source, to.unwrap_or(MacAddr::BROADCAST), MacAddr::default(), hop)
}

pub(super) fn arp_reply(mac: MacAddr, source: Ipv4Addr, to: MacAddr, target: Ipv4Addr) -> Vec<u8> {
    arp(ArpOperation::Reply, mac, source, to, to, target)
}

pub(super) fn arp_announce(mac: MacAddr, ip: Ipv4Addr) -> Vec<u8> {
    arp(ArpOperation::Request, mac, ip, MacAddr::BROADCAST, MacAddr::default(), ip)
}

pub(super) fn solicit(mac: MacAddr, source: Ipv6Addr, to: Option<MacAddr>, hop: Ipv6Addr) -> Vec<u8> {
    let group = solicited_node(hop);
    let (to, dst) = to.map_or_else(|| (group_mac(group), group), |to| (to, hop));
    let lladdr = Some(EthernetAddress(mac.0).into());
    icmp6(mac, to, source, dst, ON_LINK, &Icmpv6Repr::Ndisc(NdiscRepr::NeighborSolicit { target_addr: hop, lladdr }))
}

/// Answers one who asked.
pub(super) fn advert(mac: MacAddr, target: Ipv6Addr, to: MacAddr, dst: Ipv6Addr) -> Vec<u8> {
    let flags = NdiscNeighborFlags::SOLICITED | NdiscNeighborFlags::OVERRIDE;
    icmp6(mac, to, target, dst, ON_LINK, &advertisement(mac, target, flags))
}

/// Tells everybody.
pub(super) fn advert_to_all(mac: MacAddr, target: Ipv6Addr) -> Vec<u8> {
    let body = advertisement(mac, target, NdiscNeighborFlags::OVERRIDE);
    icmp6(mac, group_mac(ALL_NODES), target, ALL_NODES, ON_LINK, &body)
}

/// The reply to an echo request; anything else stays as it is.
pub(super) fn echo4(mac: MacAddr, to: MacAddr, src: Ipv4Addr, dst: Ipv4Addr, request: &Icmpv4Repr<'_>) -> Vec<u8> {
    let icmp = match *request {
        Icmpv4Repr::EchoRequest { ident, seq_no, data } => Icmpv4Repr::EchoReply { ident, seq_no, data },
        other => other,
    };
    let caps = ChecksumCapabilities::default();
    let ip = Ipv4Repr {
        src_addr: src,
        dst_addr: dst,
        next_header: IpProtocol::Icmp,
        payload_len: icmp.buffer_len(),
        hop_limit: HOPS,
    };
    ethernet(mac, to, EthernetProtocol::Ipv4, ip.buffer_len() + icmp.buffer_len(), |bytes| {
        let mut packet = Ipv4Packet::new_unchecked(bytes);
        ip.emit(&mut packet, &caps);
        icmp.emit(&mut Icmpv4Packet::new_unchecked(packet.payload_mut()), &caps);
    })
}

/// As [`echo4`].
pub(super) fn echo6(mac: MacAddr, to: MacAddr, src: Ipv6Addr, dst: Ipv6Addr, request: &Icmpv6Repr<'_>) -> Vec<u8> {
    let icmp = match *request {
        Icmpv6Repr::EchoRequest { ident, seq_no, data } => Icmpv6Repr::EchoReply { ident, seq_no, data },
        other => other,
    };
    icmp6(mac, to, src, dst, HOPS, &icmp)
}

fn advertisement(mac: MacAddr, target: Ipv6Addr, flags: NdiscNeighborFlags) -> Icmpv6Repr<'static> {
    let lladdr = Some(EthernetAddress(mac.0).into());
    Icmpv6Repr::Ndisc(NdiscRepr::NeighborAdvert { flags, target_addr: target, lladdr })
}

fn group_mac(group: Ipv6Addr) -> MacAddr {
    MacAddr::for_multicast(group.into()).unwrap_or(MacAddr::BROADCAST)
}

fn arp(
    operation: ArpOperation,
    mac: MacAddr,
    source: Ipv4Addr,
    to: MacAddr,
    target_mac: MacAddr,
    target: Ipv4Addr,
) -> Vec<u8> {
    let arp = ArpRepr::EthernetIpv4 {
        operation,
        source_hardware_addr: EthernetAddress(mac.0),
        source_protocol_addr: source,
        target_hardware_addr: EthernetAddress(target_mac.0),
        target_protocol_addr: target,
    };
    ethernet(mac, to, EthernetProtocol::Arp, arp.buffer_len(), |bytes| {
        arp.emit(&mut ArpPacket::new_unchecked(bytes));
    })
}

fn icmp6(mac: MacAddr, to: MacAddr, src: Ipv6Addr, dst: Ipv6Addr, hop_limit: u8, icmp: &Icmpv6Repr<'_>) -> Vec<u8> {
    let ip = Ipv6Repr {
        src_addr: src,
        dst_addr: dst,
        next_header: IpProtocol::Icmpv6,
        payload_len: icmp.buffer_len(),
        hop_limit,
    };
    ethernet(mac, to, EthernetProtocol::Ipv6, ip.buffer_len() + icmp.buffer_len(), |bytes| {
        let mut packet = Ipv6Packet::new_unchecked(bytes);
        ip.emit(&mut packet);
        let mut body = Icmpv6Packet::new_unchecked(packet.payload_mut());
        icmp.emit(&src, &dst, &mut body, &ChecksumCapabilities::default());
    })
}

fn ethernet(
    mac: MacAddr,
    to: MacAddr,
    ethertype: EthernetProtocol,
    len: usize,
    payload: impl FnOnce(&mut [u8]),
) -> Vec<u8> {
    let header = EthernetRepr { src_addr: EthernetAddress(mac.0), dst_addr: EthernetAddress(to.0), ethertype };
    let mut bytes = vec![0; header.buffer_len() + len];
    let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
    header.emit(&mut frame);
    payload(frame.payload_mut());
    bytes
}
