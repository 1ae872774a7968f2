//! What the kernel knows of the network: interfaces, routes, neighbours.
//!
//! Owns one routing netlink socket and the few messages of rtnetlink(7) that a raw device needs. Asks, never changes
//! anything. Not for the fast path: a question is a system call.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::io::{self, Read as _};

use socket2::{Domain, Protocol, Socket, Type};

use super::DeviceError;
use super::sys::interfaces;
use crate::time::Duration;
use crate::types::MacAddr;

/// What is known of an interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceFacts {
    /// Name.
    pub name: String,
    /// The kernel's number.
    pub index: u32,
    /// Whether it is up.
    pub up: bool,
    /// Bytes of the largest IP packet.
    pub mtu: usize,
    /// Link address, on Ethernet.
    pub mac: Option<MacAddr>,
    /// Addresses with the length of their prefix, in the kernel's order.
    pub addresses: Vec<(IpAddr, u8)>,
}

impl InterfaceFacts {
    /// The facts of the interface called `name`.
    ///
    /// # Errors
    /// [`DeviceError::NoInterface`], [`DeviceError::Io`].
    pub fn of(name: &str) -> Result<Self, DeviceError> {
        let found = Self::all()?.into_iter().find(|i| i.name == name);
        found.ok_or_else(|| DeviceError::NoInterface { name: name.to_owned() })
    }

    /// All interfaces.
    ///
    /// # Errors
    /// [`DeviceError::Io`].
    pub fn all() -> Result<Vec<Self>, DeviceError> {
        let list = interfaces::list().map_err(|source| DeviceError::Io { action: "listing interfaces", source })?;
        Ok(list
            .into_iter()
            .map(|i| Self { name: i.name, index: i.index, up: i.up, mtu: i.mtu, mac: i.mac, addresses: i.addresses })
            .collect())
    }

    /// The addresses in the order of a GID table: IPv4, link-local IPv6, other IPv6.
    #[must_use]
    pub fn gid_order(&self) -> Vec<IpAddr> {
        let mut out: Vec<IpAddr> = self.addresses.iter().map(|a| a.0).collect();
        out.sort_by_key(|ip| match ip {
            IpAddr::V4(_) => 0,
            IpAddr::V6(v6) if v6.is_unicast_link_local() => 1,
            IpAddr::V6(_) => 2,
        });
        out
    }
}

/// Offloads of an interface that change what a raw device sees and sends; `None` where the driver does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offloads {
    /// Generic receive offload: the kernel may join what arrives.
    pub gro: Option<bool>,
    /// The interface fills in the checksums of what the kernel sends: between two ends of a veth pair nobody does.
    pub tx_checksum: Option<bool>,
}

impl Offloads {
    /// Those of the interface called `name`.
    #[must_use]
    pub fn of(name: &str) -> Self {
        /// `ETHTOOL_GGRO` and `ETHTOOL_GTXCSUM`.
        const QUESTIONS: [u32; 2] = [0x2b, 0x16];
        let [gro, tx_checksum] = QUESTIONS.map(|question| interfaces::ethtool(name, question).ok().map(|v| v != 0));
        Self { gro, tx_checksum }
    }
}

/// Where an XDP program is attached to an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpAttachment {
    /// Nowhere.
    None,
    /// In the driver.
    Driver,
    /// In the kernel, behind the driver ("generic").
    Generic,
    /// In the hardware, or in several places.
    Other,
}

/// What an interface takes as one frame to segment. More is segmented in software before the driver sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentationLimits {
    /// The frame, Ethernet header included, must be shorter than this.
    pub bytes: usize,
    /// Segments of one frame.
    pub segments: usize,
}

/// How a destination is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Route {
    /// Output interface.
    pub interface: u32,
    /// Router, unless the destination is on the link.
    pub gateway: Option<IpAddr>,
    /// The address that the kernel would send from.
    pub source: Option<IpAddr>,
    /// Whether the destination is an address of this machine.
    pub local: bool,
}

/// A netlink socket.
#[derive(Debug)]
pub struct Netlink {
    socket: Socket,
    sequence: u32,
    buf: Box<[u8; REPLY_MAX]>,
}

/// One route or neighbour takes a few hundred bytes.
const REPLY_MAX: usize = 8192;
/// The kernel answers inside the call that asks; the limit is for a kernel that does not.
const ANSWER_WITHIN: Duration = Duration::from_millis(200);
/// Answers to older questions that are skipped.
const STALE_MAX: usize = 8;
const HEADER: usize = 16;
const ROUTE_BODY: usize = 12;
const NEIGHBOR_BODY: usize = 12;
const LINK_BODY: usize = 16;
const IFLA_GSO_MAX_SEGS: u16 = 40;
const IFLA_GSO_MAX_SIZE: u16 = 41;
const IFLA_GSO_IPV4_MAX_SIZE: u16 = 63;
/// Both limits where a kernel does not tell.
const SIZE_USUAL: u32 = 65_536;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NDA_DST: u16 = 1;
const USABLE: u16 = libc::NUD_REACHABLE | libc::NUD_STALE | libc::NUD_DELAY | libc::NUD_PROBE | libc::NUD_PERMANENT;

impl Netlink {
    /// Opens the socket; needs no privilege. It belongs to the calling thread's network namespace.
    ///
    /// # Errors
    /// The system's answer.
    pub fn open() -> io::Result<Self> {
        let protocol = Protocol::from(libc::NETLINK_ROUTE);
        let socket = Socket::new(Domain::from(libc::AF_NETLINK), Type::RAW, Some(protocol))?;
        socket.set_read_timeout(Some(ANSWER_WITHIN))?;
        Ok(Self { socket, sequence: 0, buf: Box::new([0; REPLY_MAX]) })
    }

    /// The route to `destination`, if it must leave by interface `via` (0: by any) then that one.
    ///
    /// # Errors
    /// The system's answer: `NetworkUnreachable` and the like when there is none.
    pub fn route(&mut self, destination: IpAddr, via: u32) -> io::Result<Route> {
        let (family, address) = family(destination);
        let bits = u8::try_from(address.as_slice().len() * 8).unwrap_or(0);
        let mut body = [0; ROUTE_BODY];
        body[0] = family;
        body[1] = bits;
        let oif = via.to_ne_bytes();
        let attributes: &[(u16, &[u8])] = &[(libc::RTA_DST, address.as_slice()), (libc::RTA_OIF, &oif)];
        let attributes = if via == 0 { &attributes[..1] } else { attributes };
        let reply = self.ask(libc::RTM_GETROUTE, &body, attributes)?;
        let attribute = |kind| find(reply, ROUTE_BODY, kind);
        let interface = attribute(libc::RTA_OIF).and_then(|b| b.first_chunk::<4>()).map(|b| u32::from_ne_bytes(*b));
        Ok(Route {
            interface: interface.unwrap_or(0),
            gateway: attribute(libc::RTA_GATEWAY).and_then(ip).or_else(|| {
                // RTA_VIA: a family of 16 bits and an address of that family (an IPv4 route through an IPv6 router).
                attribute(RTA_VIA).and_then(|b| b.get(2..)).and_then(ip)
            }),
            source: attribute(libc::RTA_PREFSRC).and_then(ip),
            local: reply.get(7).is_some_and(|&kind| kind == libc::RTN_LOCAL),
        })
    }

    /// The MAC of a neighbour on interface `index`, if the kernel's table has a usable one.
    ///
    /// # Errors
    /// The system's answer; that there is none is not an error.
    pub fn neighbor(&mut self, neighbor: IpAddr, index: u32) -> io::Result<Option<MacAddr>> {
        let (family, address) = family(neighbor);
        let mut body = [0; NEIGHBOR_BODY];
        body[0] = family;
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        let reply = match self.ask(libc::RTM_GETNEIGH, &body, &[(NDA_DST, address.as_slice())]) {
            Err(e) if e.raw_os_error() == Some(libc::ENOENT) => return Ok(None),
            reply => reply?,
        };
        let state = reply.get(8..10).map_or(0, |b| u16::from_ne_bytes([b[0], b[1]]));
        let mac = find(reply, NEIGHBOR_BODY, libc::NDA_LLADDR).and_then(|b| <[u8; 6]>::try_from(b).ok()).map(MacAddr);
        Ok(mac.filter(|_| state & USABLE != 0))
    }

    /// Whether an XDP program is attached to interface `index`.
    ///
    /// # Errors
    /// The system's answer.
    pub fn xdp(&mut self, index: u32) -> io::Result<XdpAttachment> {
        let mut body = [0; LINK_BODY];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        let reply = self.ask(libc::RTM_GETLINK, &body, &[])?;
        // The attribute holds others, as a nest; bit 15 of its kind may say so.
        let nest = find(reply, LINK_BODY, IFLA_XDP).or_else(|| find(reply, LINK_BODY, IFLA_XDP | 0x8000));
        let attached = nest.and_then(|nest| find(nest, 0, IFLA_XDP_ATTACHED)).and_then(|b| b.first().copied());
        Ok(match attached {
            None | Some(0) => XdpAttachment::None,
            Some(1) => XdpAttachment::Driver,
            Some(2) => XdpAttachment::Generic,
            Some(_) => XdpAttachment::Other,
        })
    }

    /// What interface `index` takes as one frame to segment: bytes, of which it wants to have fewer, and segments.
    ///
    /// # Errors
    /// The system's answer.
    pub fn segmentation(&mut self, index: u32) -> io::Result<SegmentationLimits> {
        let mut body = [0; LINK_BODY];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        let reply = self.ask(libc::RTM_GETLINK, &body, &[])?;
        let number =
            |kind| find(reply, LINK_BODY, kind).and_then(|b| b.first_chunk::<4>()).map(|b| u32::from_ne_bytes(*b));
        let [both, v4] = [IFLA_GSO_MAX_SIZE, IFLA_GSO_IPV4_MAX_SIZE].map(|kind| number(kind).unwrap_or(SIZE_USUAL));
        let [bytes, segments] = [both.min(v4), number(IFLA_GSO_MAX_SEGS).unwrap_or(SIZE_USUAL)]
            .map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        Ok(SegmentationLimits { bytes, segments })
    }

    /// Sends a request and returns the body of its answer.
    fn ask(&mut self, kind: u16, body: &[u8], attributes: &[(u16, &[u8])]) -> io::Result<&[u8]> {
        self.sequence = self.sequence.wrapping_add(1);
        let mut message = Vec::with_capacity(128);
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(&kind.to_ne_bytes());
        message.extend_from_slice(&NLM_F_REQUEST.to_ne_bytes());
        message.extend_from_slice(&self.sequence.to_ne_bytes());
        message.extend_from_slice(&[0; 4]);
        message.extend_from_slice(body);
        for (kind, value) in attributes {
            let len = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
            message.extend_from_slice(&len.to_ne_bytes());
            message.extend_from_slice(&kind.to_ne_bytes());
            message.extend_from_slice(value);
            message.resize(message.len().next_multiple_of(4), 0);
        }
        let len = u32::try_from(message.len()).unwrap_or(u32::MAX);
        message[..4].copy_from_slice(&len.to_ne_bytes());
        self.socket.send(&message)?;
        for _ in 0..STALE_MAX {
            let got = (&self.socket).read(&mut self.buf[..])?;
            let Some((header, _)) = self.buf[..got].split_first_chunk::<HEADER>() else { continue };
            let word = |at: usize| u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
            if word(8) != self.sequence {
                continue;
            }
            let end = usize::try_from(word(0)).unwrap_or(0).min(got);
            let kind = u16::from_ne_bytes([header[4], header[5]]);
            let body = self.buf.get(HEADER..end).ok_or(io::ErrorKind::InvalidData)?;
            if kind == NLMSG_ERROR {
                let code = body.first_chunk::<4>().map_or(0, |b| i32::from_ne_bytes(*b));
                return Err(io::Error::from_raw_os_error(code.saturating_neg()));
            }
            return Ok(body);
        }
        Err(io::ErrorKind::TimedOut.into())
    }
}

const RTA_VIA: u16 = 18;

/// The value of the first attribute of this kind after a body of `fixed` bytes.
fn find(reply: &[u8], fixed: usize, kind: u16) -> Option<&[u8]> {
    let mut rest = reply.get(fixed..)?;
    while let Some((head, _)) = rest.split_first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([head[0], head[1]]));
        let value = rest.get(4..len)?;
        if u16::from_ne_bytes([head[2], head[3]]) == kind {
            return Some(value);
        }
        rest = rest.get(len.next_multiple_of(4)..)?;
    }
    None
}

fn ip(bytes: &[u8]) -> Option<IpAddr> {
    if let Ok(v4) = <[u8; 4]>::try_from(bytes) {
        return Some(Ipv4Addr::from(v4).into());
    }
    <[u8; 16]>::try_from(bytes).ok().map(|v6| Ipv6Addr::from(v6).into())
}

enum Octets {
    V4([u8; 4]),
    V6([u8; 16]),
}

impl Octets {
    fn as_slice(&self) -> &[u8] {
        match self {
            Self::V4(o) => o,
            Self::V6(o) => o,
        }
    }
}

fn family(address: IpAddr) -> (u8, Octets) {
    // The two families are 2 and 10.
    let (family, octets) = match address {
        IpAddr::V4(v4) => (libc::AF_INET, Octets::V4(v4.octets())),
        IpAddr::V6(v6) => (libc::AF_INET6, Octets::V6(v6.octets())),
    };
    (u8::try_from(family).unwrap_or(0), octets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loopback_is_known_and_routed() {
        let lo = InterfaceFacts::of("lo").unwrap();
        assert!(lo.mac.is_none());
        assert!(lo.addresses.contains(&("127.0.0.1".parse().unwrap(), 8)));
        let mut netlink = Netlink::open().unwrap();
        let route = netlink.route("127.0.0.1".parse().unwrap(), 0).unwrap();
        assert_eq!((route.interface, route.local, route.gateway), (lo.index, true, None));
        assert_eq!(route.source, Some("127.0.0.1".parse().unwrap()));
        assert_eq!(netlink.segmentation(lo.index).unwrap(), SegmentationLimits { bytes: 65_536, segments: 65_535 });
        assert_eq!(netlink.neighbor("192.0.2.1".parse().unwrap(), lo.index).unwrap(), None);
        assert_eq!(netlink.neighbor("2001:db8::1".parse().unwrap(), lo.index).unwrap(), None);
    }

    #[test]
    fn an_unknown_interface_is_named() {
        let error = InterfaceFacts::of("nosuch0").unwrap_err();
        assert!(matches!(error, DeviceError::NoInterface { name } if name == "nosuch0"));
    }

    #[test]
    fn gid_order() {
        let facts = InterfaceFacts {
            name: "x".to_owned(),
            index: 1,
            up: true,
            mtu: 1500,
            mac: None,
            addresses: ["fd00::1", "fe80::1", "10.0.0.1", "10.0.0.2"].map(|a| (a.parse().unwrap(), 64)).to_vec(),
        };
        let expected: Vec<IpAddr> = ["10.0.0.1", "10.0.0.2", "fe80::1", "fd00::1"].map(|a| a.parse().unwrap()).to_vec();
        assert_eq!(facts.gid_order(), expected);
    }

    #[test]
    fn broken_attributes_end_the_search() {
        assert_eq!(find(&[0, 0, 0, 0], 0, 1), None);
        assert_eq!(find(&[200, 0, 1, 0], 0, 1), None);
        assert_eq!(find(&[5, 0, 1, 0, 9], 0, 1), Some(&[9][..]));
        assert_eq!(find(&[1], 4, 1), None);
    }
}
