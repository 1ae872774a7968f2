//! GIDs and MAC addresses.

use core::fmt;
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// A global identifier: on RoCEv2 an IPv6 address, or an IPv4 address mapped as `::ffff:a.b.c.d`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, PartialOrd, Ord)]
pub struct Gid([u8; 16]);

impl Gid {
    /// A GID from its 16 wire bytes.
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// The 16 wire bytes.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 16] {
        self.0
    }

    /// The address that RoCEv2 puts into the IP header for this GID.
    #[must_use]
    pub fn ip(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    /// Whether all bytes are zero.
    #[must_use]
    pub fn is_unspecified(self) -> bool {
        self.0 == [0; 16]
    }

    /// The default GID of an interface: fe80::/64 with the EUI-64 of its MAC.
    #[must_use]
    pub const fn link_local(mac: MacAddr) -> Self {
        let m = mac.0;
        Self([0xfe, 0x80, 0, 0, 0, 0, 0, 0, m[0] ^ 2, m[1], m[2], 0xff, 0xfe, m[3], m[4], m[5]])
    }
}

impl From<IpAddr> for Gid {
    fn from(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(v4) => Self(v4.to_ipv6_mapped().octets()),
            IpAddr::V6(v6) => Self(v6.octets()),
        }
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(ip: Ipv4Addr) -> Self {
        IpAddr::V4(ip).into()
    }
}

impl From<Ipv6Addr> for Gid {
    fn from(ip: Ipv6Addr) -> Self {
        IpAddr::V6(ip).into()
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

/// An Ethernet address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct MacAddr(pub [u8; 6]);

impl MacAddr {
    /// ff:ff:ff:ff:ff:ff.
    pub const BROADCAST: Self = Self([0xff; 6]);

    /// The group address that carries an IP multicast address: 01:00:5e and 23 bits, or 33:33 and 32 bits
    /// (RFC 1112, RFC 2464). `None` when `ip` is not multicast.
    #[must_use]
    pub fn for_multicast(ip: IpAddr) -> Option<Self> {
        match ip {
            IpAddr::V4(v4) if v4.is_multicast() => {
                let o = v4.octets();
                Some(Self([0x01, 0x00, 0x5e, o[1] & 0x7f, o[2], o[3]]))
            }
            IpAddr::V6(v6) if v6.is_multicast() => {
                let o = v6.octets();
                Some(Self([0x33, 0x33, o[12], o[13], o[14], o[15]]))
            }
            _ => None,
        }
    }

    /// Whether the group bit is set.
    #[must_use]
    pub const fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }
}

impl fmt::Display for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let m = self.0;
        write!(f, "{:02x}:{:02x}:{:02x}:{:02x}:{:02x}:{:02x}", m[0], m[1], m[2], m[3], m[4], m[5])
    }
}

impl fmt::Debug for MacAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MacAddr({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv4_is_mapped_and_comes_back() {
        let gid = Gid::from(Ipv4Addr::new(10, 77, 0, 2));
        assert_eq!(gid.to_string(), "::ffff:10.77.0.2");
        assert_eq!(gid.ip(), IpAddr::V4(Ipv4Addr::new(10, 77, 0, 2)));
    }

    #[test]
    fn default_gid_of_the_capture_lab() {
        // The lab's guest 2 has this MAC and this link-local GID (captures, INDEX).
        let gid = Gid::link_local(MacAddr([0x02, 0x77, 0, 0, 0, 2]));
        assert_eq!(gid.ip(), "fe80::77:ff:fe00:2".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn multicast_macs() {
        assert_eq!(MacAddr::for_multicast("239.135.7.9".parse().unwrap()).unwrap().to_string(), "01:00:5e:07:07:09");
        assert_eq!(MacAddr::for_multicast("ff0e::1:2".parse().unwrap()).unwrap().to_string(), "33:33:00:01:00:02");
        assert!(MacAddr::for_multicast("10.0.0.1".parse().unwrap()).is_none());
    }
}
