//! The header that rdma_cm puts before the private data of REQ and SIDR_REQ (annex A11 of IBTA Vol 1): 36 bytes that
//! carry the IP addresses and the source port.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// IP addresses and source port of a REQ or SIDR_REQ. The destination port is in the service id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpHeader {
    /// Port of the sender.
    pub source_port: u16,
    /// Address of the sender.
    pub source: IpAddr,
    /// Address that is asked for; the same family as `source`.
    pub destination: IpAddr,
}

/// Why the first bytes of private data are no IP CM header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IpHeaderError {
    /// Fewer than 36 bytes.
    #[error("{0} bytes are too short for an IP CM header of 36")]
    Short(usize),
    /// A protocol version other than 0.0.
    #[error("IP CM protocol version byte {0:#04x} is not 0")]
    Version(u8),
    /// An IP version other than 4 and 6.
    #[error("IP version {0} is neither 4 nor 6")]
    IpVersion(u8),
    /// Source and destination are not of one family.
    #[error("source and destination address are not of one family")]
    MixedFamilies,
}

impl IpHeader {
    /// Bytes of the header.
    pub const LEN: usize = 36;

    /// Reads the header at the beginning of `data`.
    ///
    /// # Errors
    /// [`IpHeaderError`] says which field is wrong.
    pub fn parse(data: &[u8]) -> Result<Self, IpHeaderError> {
        let Some(header) = data.first_chunk::<36>() else { return Err(IpHeaderError::Short(data.len())) };
        let [version, ip, port_high, port_low, addresses @ ..] = header;
        if *version != 0 {
            return Err(IpHeaderError::Version(*version));
        }
        let source: [u8; 16] = core::array::from_fn(|i| addresses[i]);
        let destination: [u8; 16] = core::array::from_fn(|i| addresses[i + 16]);
        let address: fn([u8; 16]) -> IpAddr = match ip >> 4 {
            4 => |[.., a, b, c, d]| IpAddr::V4(Ipv4Addr::new(a, b, c, d)),
            6 => |all| IpAddr::V6(Ipv6Addr::from(all)),
            other => return Err(IpHeaderError::IpVersion(other)),
        };
        Ok(Self {
            source_port: u16::from_be_bytes([*port_high, *port_low]),
            source: address(source),
            destination: address(destination),
        })
    }

    /// The 36 bytes.
    ///
    /// # Errors
    /// [`IpHeaderError::MixedFamilies`].
    pub fn emit(&self) -> Result<[u8; Self::LEN], IpHeaderError> {
        let (version, source, destination) = match (self.source, self.destination) {
            (IpAddr::V4(s), IpAddr::V4(d)) => (4u8, v4_field(s), v4_field(d)),
            (IpAddr::V6(s), IpAddr::V6(d)) => (6, s.octets(), d.octets()),
            _ => return Err(IpHeaderError::MixedFamilies),
        };
        let mut out = [0; Self::LEN];
        let port = self.source_port.to_be_bytes();
        let bytes = [0, version << 4].into_iter().chain(port).chain(source).chain(destination);
        for (to, from) in out.iter_mut().zip(bytes) {
            *to = from;
        }
        Ok(out)
    }
}

/// An IPv4 address in the last four of 16 bytes.
fn v4_field(ip: Ipv4Addr) -> [u8; 16] {
    let [a, b, c, d] = ip.octets();
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_of_each_family() {
        let v4 = IpHeader {
            source_port: 33372,
            source: "10.77.0.1".parse().unwrap(),
            destination: "10.77.0.2".parse().unwrap(),
        };
        let bytes = v4.emit().unwrap();
        assert_eq!(bytes[..4], [0, 0x40, 0x82, 0x5c]);
        assert_eq!(bytes[4..20], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 10, 77, 0, 1]);
        assert_eq!(IpHeader::parse(&bytes), Ok(v4));
        let v6 = IpHeader { source: "fd77::1".parse().unwrap(), destination: "fd77::2".parse().unwrap(), ..v4 };
        assert_eq!(IpHeader::parse(&v6.emit().unwrap()), Ok(v6));
        let mixed = IpHeader { source: v6.source, ..v4 };
        assert_eq!(mixed.emit(), Err(IpHeaderError::MixedFamilies));
    }

    #[test]
    fn other_versions_are_refused() {
        assert_eq!(IpHeader::parse(&[0; 35]), Err(IpHeaderError::Short(35)));
        assert_eq!(IpHeader::parse(&[0; 36]), Err(IpHeaderError::IpVersion(0)));
        assert_eq!(IpHeader::parse(&[0x10; 36]), Err(IpHeaderError::Version(0x10)));
    }
}
