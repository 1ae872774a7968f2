//! What a received frame says, checked as its protocol demands. Anything else is nothing.

use core::net::{Ipv4Addr, Ipv6Addr};

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetFrame, EthernetProtocol, Icmpv4Message, Icmpv4Packet, Icmpv4Repr,
    Icmpv6Message, Icmpv6Packet, Icmpv6Repr, IpProtocol, Ipv4Packet, Ipv4Repr, Ipv6Packet, Ipv6Repr,
    NdiscNeighborFlags, NdiscRepr, RawHardwareAddress,
};

use super::solicited_node;
use crate::types::MacAddr;

/// A frame that matters.
#[derive(Debug)]
pub(super) enum Heard<'a> {
    Arp { request: bool, mac: MacAddr, sender: Ipv4Addr, target: Ipv4Addr },
    Solicit { mac: MacAddr, src: Ipv6Addr, target: Ipv6Addr },
    Advert { target: Ipv6Addr, mac: MacAddr, solicited: bool, replaces: bool },
    Echo4 { mac: MacAddr, src: Ipv4Addr, dst: Ipv4Addr, icmp: Icmpv4Repr<'a> },
    Echo6 { mac: MacAddr, src: Ipv6Addr, dst: Ipv6Addr, icmp: Icmpv6Repr<'a> },
}

/// The destination MAC of `frame` and what it says. `None` for all that is none of our business or broken.
pub(super) fn parse(frame: &[u8]) -> Option<(MacAddr, Heard<'_>)> {
    let frame = EthernetFrame::new_checked(frame).ok()?;
    let from = MacAddr(frame.src_addr().0);
    if from.is_multicast() {
        return None;
    }
    let heard = match frame.ethertype() {
        EthernetProtocol::Arp => arp(frame.payload()),
        EthernetProtocol::Ipv4 => ipv4(from, frame.payload()),
        EthernetProtocol::Ipv6 => ipv6(from, frame.payload()),
        EthernetProtocol::Unknown(_) => None,
    }?;
    Some((MacAddr(frame.dst_addr().0), heard))
}

fn arp(bytes: &[u8]) -> Option<Heard<'static>> {
    let packet = ArpPacket::new_checked(bytes).ok()?;
    let ArpRepr::EthernetIpv4 { operation, source_hardware_addr, source_protocol_addr, target_protocol_addr, .. } =
        ArpRepr::parse(&packet).ok()?
    else {
        return None;
    };
    let request = match operation {
        ArpOperation::Request => true,
        ArpOperation::Reply => false,
        ArpOperation::Unknown(_) => return None,
    };
    let mac = MacAddr(source_hardware_addr.0);
    Some(Heard::Arp { request, mac, sender: source_protocol_addr, target: target_protocol_addr })
}

fn ipv4(mac: MacAddr, bytes: &[u8]) -> Option<Heard<'_>> {
    let packet = Ipv4Packet::new_checked(bytes).ok()?;
    // Also refuses fragments.
    let ip = Ipv4Repr::parse(&packet, &ChecksumCapabilities::default()).ok()?;
    let from_host = !(ip.src_addr.is_unspecified() || ip.src_addr.is_multicast() || ip.src_addr.is_broadcast());
    if ip.next_header != IpProtocol::Icmp || !from_host {
        return None;
    }
    let icmp = Icmpv4Packet::new_checked(packet.payload()).ok()?;
    if icmp.msg_type() != Icmpv4Message::EchoRequest {
        return None;
    }
    let icmp = Icmpv4Repr::parse(&icmp, &ChecksumCapabilities::default()).ok()?;
    Some(Heard::Echo4 { mac, src: ip.src_addr, dst: ip.dst_addr, icmp })
}

fn ipv6(mac: MacAddr, bytes: &[u8]) -> Option<Heard<'_>> {
    let packet = Ipv6Packet::new_checked(bytes).ok()?;
    let ip = Ipv6Repr::parse(&packet).ok()?;
    if ip.next_header != IpProtocol::Icmpv6 || ip.src_addr.is_multicast() {
        return None;
    }
    let icmp = Icmpv6Packet::new_checked(packet.payload()).ok()?;
    let kind = icmp.msg_type();
    let known =
        matches!(kind, Icmpv6Message::EchoRequest | Icmpv6Message::NeighborSolicit | Icmpv6Message::NeighborAdvert);
    if !known {
        return None;
    }
    match Icmpv6Repr::parse(&ip.src_addr, &ip.dst_addr, &icmp, &ChecksumCapabilities::default()).ok()? {
        icmp @ Icmpv6Repr::EchoRequest { .. } if !ip.src_addr.is_unspecified() => {
            Some(Heard::Echo6 { mac, src: ip.src_addr, dst: ip.dst_addr, icmp })
        }
        // 255 proves that no router passed the packet on: the sender is on this link (RFC 4861 7.1).
        Icmpv6Repr::Ndisc(ndisc) if ip.hop_limit == 255 => neighbor(mac, ip.src_addr, ip.dst_addr, ndisc),
        _ => None,
    }
}

fn neighbor(from: MacAddr, src: Ipv6Addr, dst: Ipv6Addr, ndisc: NdiscRepr<'_>) -> Option<Heard<'static>> {
    match ndisc {
        NdiscRepr::NeighborSolicit { target_addr: target, lladdr } => {
            let detection = src.is_unspecified();
            let lawful = !detection || (dst == solicited_node(target) && lladdr.is_none());
            if target.is_multicast() || !lawful {
                return None;
            }
            Some(Heard::Solicit { mac: lladdr.map_or(Some(from), ethernet)?, src, target })
        }
        NdiscRepr::NeighborAdvert { flags, target_addr: target, lladdr } => {
            let solicited = flags.contains(NdiscNeighborFlags::SOLICITED);
            if target.is_multicast() || (solicited && dst.is_multicast()) {
                return None;
            }
            let replaces = flags.contains(NdiscNeighborFlags::OVERRIDE);
            // A unicast solicitation may be answered without the option: then the frame tells.
            Some(Heard::Advert { target, mac: lladdr.map_or(Some(from), ethernet)?, solicited, replaces })
        }
        _ => None,
    }
}

fn ethernet(raw: RawHardwareAddress) -> Option<MacAddr> {
    raw.as_bytes().first_chunk::<6>().map(|m| MacAddr(*m))
}
