//! From a frame to the BTH: Ethernet, VLAN, IP with options and extension headers, UDP; and ICMP errors about RoCEv2.
//!
//! Owns the slow and thorough reading of outer headers. Never looks behind the UDP header.

use core::net::IpAddr;

use etherparse::{Icmpv4Type, Icmpv6Type, LaxNetSlice, LaxSlicedPacket, TransportSlice, icmpv4, icmpv6};
use etherparse::{LaxLinkExtSlice, LinkSlice};
use uroce::types::MacAddr;
use uroce::wire::{Flow, IpFields, VlanTag};

use super::source::Link;

/// Bit of [`IpFields::flags_fragment`]: do not fragment.
const DF: u16 = 0x4000;
/// Bit of [`IpFields::flags_fragment`]: more fragments follow.
const MF: u16 = 0x2000;

/// What a frame is to RoCEv2.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outer<'a> {
    /// A packet of RoCEv2.
    Roce(Envelope<'a>),
    /// An ICMP error that quotes a packet of RoCEv2.
    IcmpError(IcmpError),
    /// To UDP port 4791, but in a way that RoCEv2 does not allow or that hides the packet.
    Broken {
        /// Source and destination address.
        ends: (IpAddr, IpAddr),
        /// What is wrong.
        why: &'static str,
    },
    /// To UDP port 4791, and the capture holds only its beginning: nothing is wrong with the packet.
    Cut {
        /// Source and destination address.
        ends: (IpAddr, IpAddr),
    },
    /// Anything else.
    Other,
}

/// The headers around a RoCEv2 packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope<'a> {
    /// Addresses, ports and marks.
    pub flow: Flow,
    /// Identification and flags of IPv4; zero on IPv6.
    pub ids: IpFields,
    /// Source and destination on Ethernet.
    pub macs: Option<(MacAddr, MacAddr)>,
    /// Bytes of IPv4 options or IPv6 extension headers. RoCEv2 allows none, and the ICRC has no rule for them.
    pub extra: usize,
    /// UDP checksum as it stands.
    pub udp_checksum: u16,
    /// BTH to ICRC.
    pub bytes: &'a [u8],
}

/// An ICMP error about a packet to port 4791: what a host without a RoCEv2 endpoint answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IcmpError {
    /// Who complains.
    pub from: IpAddr,
    /// To whom.
    pub to: IpAddr,
    /// What about.
    pub what: String,
    /// Where the quoted packet came from and went.
    pub about: (IpAddr, IpAddr),
}

/// Reads the outer headers of `bytes`. Never fails: what cannot be read is [`Outer::Other`] or [`Outer::Broken`].
pub(super) fn read(link: Link, bytes: &[u8]) -> Outer<'_> {
    let sliced = match link {
        Link::Ethernet => LaxSlicedPacket::from_ethernet(bytes).ok(),
        Link::RawIp => LaxSlicedPacket::from_ip(bytes).ok(),
    };
    sliced.map_or(Outer::Other, |packet| of_packet(&packet))
}

fn of_packet<'a>(packet: &LaxSlicedPacket<'a>) -> Outer<'a> {
    let Some(ip) = packet.net.as_ref().and_then(Ip::of) else { return Outer::Other };
    match &packet.transport {
        Some(TransportSlice::Udp(udp)) if udp.destination_port() == Flow::PORT => {
            if ip.cut {
                return Outer::Cut { ends: (ip.src, ip.dst) };
            }
            let why = if ip.fragmented {
                Some("an IP fragment")
            } else if usize::from(udp.length()) != udp.payload().len() + 8 {
                Some("its UDP length does not fit its IP length")
            } else {
                None
            };
            if let Some(why) = why {
                return Outer::Broken { ends: (ip.src, ip.dst), why };
            }
            Outer::Roce(Envelope {
                flow: Flow {
                    src: ip.src,
                    dst: ip.dst,
                    src_port: udp.source_port(),
                    traffic_class: ip.traffic_class,
                    hop_limit: ip.hop_limit,
                    flow_label: ip.flow_label,
                    vlan: vlan(packet),
                },
                ids: ip.ids,
                macs: macs(packet),
                extra: ip.extra,
                udp_checksum: udp.checksum(),
                bytes: udp.payload(),
            })
        }
        Some(TransportSlice::Icmpv4(icmp)) => {
            icmp_error(&ip, v4_error(&icmp.icmp_type()), icmp.payload()).map_or(Outer::Other, Outer::IcmpError)
        }
        Some(TransportSlice::Icmpv6(icmp)) => {
            icmp_error(&ip, v6_error(&icmp.icmp_type()), icmp.payload()).map_or(Outer::Other, Outer::IcmpError)
        }
        // The first fragment of a datagram holds the ports; the reader does not look into fragments.
        None if ip.fragmented && ip.udp_to_roce() => Outer::Broken { ends: (ip.src, ip.dst), why: "an IP fragment" },
        _ => Outer::Other,
    }
}

/// What both versions of IP say.
struct Ip<'a> {
    src: IpAddr,
    dst: IpAddr,
    traffic_class: u8,
    hop_limit: u8,
    flow_label: u32,
    ids: IpFields,
    extra: usize,
    fragmented: bool,
    cut: bool,
    payload: &'a [u8],
}

impl<'a> Ip<'a> {
    fn of(net: &LaxNetSlice<'a>) -> Option<Self> {
        match net {
            LaxNetSlice::Ipv4(ip) => {
                let header = ip.header();
                let flags = if header.dont_fragment() { DF } else { 0 } | if header.more_fragments() { MF } else { 0 };
                let offset = header.fragments_offset().value();
                Some(Self {
                    src: header.source_addr().into(),
                    dst: header.destination_addr().into(),
                    traffic_class: header.dcp().value() << 2 | header.ecn().value(),
                    hop_limit: header.ttl(),
                    flow_label: 0,
                    ids: IpFields { id: header.identification(), flags_fragment: flags | offset },
                    extra: header.options().len(),
                    fragmented: ip.is_payload_fragmented(),
                    cut: ip.payload().incomplete,
                    payload: ip.payload().payload,
                })
            }
            LaxNetSlice::Ipv6(ip) => {
                let header = ip.header();
                Some(Self {
                    src: header.source_addr().into(),
                    dst: header.destination_addr().into(),
                    traffic_class: header.traffic_class(),
                    hop_limit: header.hop_limit(),
                    flow_label: header.flow_label().value(),
                    ids: IpFields { id: 0, flags_fragment: 0 },
                    extra: ip.extensions().slice().len(),
                    fragmented: ip.is_payload_fragmented(),
                    cut: ip.payload().incomplete,
                    payload: ip.payload().payload,
                })
            }
            LaxNetSlice::Arp(_) => None,
        }
    }

    fn udp_to_roce(&self) -> bool {
        matches!(self.payload, [_, _, hi, lo, ..] if u16::from_be_bytes([*hi, *lo]) == Flow::PORT)
    }
}

fn vlan(packet: &LaxSlicedPacket<'_>) -> Option<VlanTag> {
    packet.link_exts.iter().find_map(|ext| match ext {
        LaxLinkExtSlice::Vlan(tag) => {
            Some(VlanTag { id: tag.vlan_identifier().value(), priority: tag.priority_code_point().value() })
        }
        LaxLinkExtSlice::Macsec(_) => None,
    })
}

fn macs(packet: &LaxSlicedPacket<'_>) -> Option<(MacAddr, MacAddr)> {
    match &packet.link {
        Some(LinkSlice::Ethernet2(eth)) => Some((MacAddr(eth.source()), MacAddr(eth.destination()))),
        _ => None,
    }
}

/// The error, if the quoted packet went to port 4791.
fn icmp_error(ip: &Ip<'_>, what: Option<String>, quoted: &[u8]) -> Option<IcmpError> {
    let what = what?;
    // An error quotes the beginning of the packet, so its lengths may pass what is there.
    let inner = LaxSlicedPacket::from_ip(quoted).ok()?;
    let about = Ip::of(inner.net.as_ref()?)?;
    about.udp_to_roce().then_some(IcmpError { from: ip.src, to: ip.dst, what, about: (about.src, about.dst) })
}

fn v4_error(kind: &Icmpv4Type) -> Option<String> {
    use icmpv4::DestUnreachableHeader as Unreachable;
    match kind {
        Icmpv4Type::DestinationUnreachable(why) => Some(match why {
            Unreachable::Port => "port unreachable: no RoCEv2 endpoint listens there".into(),
            Unreachable::Host => "host unreachable".into(),
            Unreachable::Network => "network unreachable".into(),
            Unreachable::FragmentationNeeded { next_hop_mtu } => {
                format!("packet too big: the next hop's MTU is {next_hop_mtu}")
            }
            other => format!("destination unreachable (code {})", other.code_u8()),
        }),
        Icmpv4Type::TimeExceeded(_) => Some("TTL exceeded on the way".into()),
        Icmpv4Type::ParameterProblem(_) => Some("parameter problem".into()),
        _ => None,
    }
}

fn v6_error(kind: &Icmpv6Type) -> Option<String> {
    use icmpv6::DestUnreachableCode as Unreachable;
    match kind {
        Icmpv6Type::DestinationUnreachable(why) => Some(match why {
            Unreachable::Port => "port unreachable: no RoCEv2 endpoint listens there".into(),
            Unreachable::Address => "address unreachable".into(),
            Unreachable::NoRoute => "no route".into(),
            other => format!("destination unreachable (code {})", other.code_u8()),
        }),
        Icmpv6Type::PacketTooBig { mtu } => Some(format!("packet too big: the next hop's MTU is {mtu}")),
        Icmpv6Type::TimeExceeded(_) => Some("hop limit exceeded on the way".into()),
        Icmpv6Type::ParameterProblem(_) => Some("parameter problem".into()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use etherparse::PacketBuilder;

    use super::*;

    const A: [u8; 4] = [10, 77, 0, 1];
    const B: [u8; 4] = [10, 77, 0, 2];

    fn udp(to: u16) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4(A, B, 64).udp(50_000, to);
        let mut frame = Vec::new();
        builder.write(&mut frame, &[7; 16]).unwrap();
        frame
    }

    #[test]
    fn a_plain_packet_is_unwrapped() {
        let frame = udp(4791);
        let Outer::Roce(envelope) = read(Link::Ethernet, &frame) else { panic!("not RoCE") };
        assert_eq!(envelope.flow.src, IpAddr::from(A));
        assert_eq!((envelope.flow.src_port, envelope.flow.hop_limit), (50_000, 64));
        assert_eq!((envelope.bytes, envelope.extra), (&[7; 16][..], 0));
        assert_eq!(envelope.macs, Some((MacAddr([2; 6]), MacAddr([4; 6]))));
        // The same packet without its Ethernet header.
        let Outer::Roce(raw) = read(Link::RawIp, &frame[14..]) else { panic!("not RoCE") };
        assert_eq!((raw.flow, raw.macs), (envelope.flow, None));
    }

    #[test]
    fn another_port_is_other() {
        assert_eq!(read(Link::Ethernet, &udp(4790)), Outer::Other);
        assert_eq!(read(Link::Ethernet, &[]), Outer::Other);
    }

    #[test]
    fn a_vlan_tag_is_seen() {
        let builder = PacketBuilder::ethernet2([2; 6], [4; 6]).single_vlan(77u16.try_into().unwrap());
        let mut frame = Vec::new();
        builder.ipv6([1; 16], [2; 16], 3).udp(1, 4791).write(&mut frame, &[7; 16]).unwrap();
        let Outer::Roce(envelope) = read(Link::Ethernet, &frame) else { panic!("not RoCE") };
        assert_eq!(envelope.flow.vlan, Some(VlanTag { id: 77, priority: 0 }));
        assert_eq!(envelope.ids, IpFields { id: 0, flags_fragment: 0 });
    }

    #[test]
    fn a_cut_or_fragmented_packet_is_named() {
        let frame = udp(4791);
        let cut = read(Link::Ethernet, &frame[..frame.len() - 3]);
        assert!(matches!(cut, Outer::Cut { .. }), "{cut:?}");
        let mut first = frame.clone();
        first[20] = 0x20;
        let fragment = read(Link::Ethernet, &first);
        assert!(matches!(fragment, Outer::Broken { why: "an IP fragment", .. }), "{fragment:?}");
    }

    #[test]
    fn an_icmp_error_about_roce_is_told_from_others() {
        for (port, wanted) in [(4791, true), (53, false)] {
            let about = &udp(port)[14..];
            let icmp = PacketBuilder::ethernet2([4; 6], [2; 6])
                .ipv4(B, A, 64)
                .icmpv4(Icmpv4Type::DestinationUnreachable(icmpv4::DestUnreachableHeader::Port));
            let mut frame = Vec::new();
            // Routers quote the IP header and 8 bytes.
            icmp.write(&mut frame, &about[..28]).unwrap();
            match read(Link::Ethernet, &frame) {
                Outer::IcmpError(error) => {
                    assert!(wanted);
                    assert_eq!((error.from, error.about.1), (B.into(), B.into()));
                    assert!(error.what.contains("port unreachable"), "{}", error.what);
                }
                other => assert!(!wanted, "{other:?}"),
            }
        }
    }
}
