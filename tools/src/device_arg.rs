//! The argument `--device`.
//!
//! Owns its grammar: `udp:ADDR`, `packet:IFNAME`, `pnet:IFNAME`, `loop`. Opens nothing.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

/// Longest name of a network interface on Linux (IFNAMSIZ less the NUL).
const INTERFACE_NAME_MAX: usize = 15;

/// Which device an endpoint runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// A UDP socket on port 4791 of this address: no privilege needed.
    Udp(IpAddr),
    /// Raw Ethernet on this interface through AF_PACKET: needs CAP_NET_RAW.
    Packet(String),
    /// Raw Ethernet on this interface through the pnet library: portable, slower.
    Pnet(String),
    /// Both ends in this process.
    Loop,
}

/// Why a `--device` is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeviceArgError {
    /// Neither of the kinds.
    #[error("`{0}` is no device; write udp:ADDR, packet:IFNAME, pnet:IFNAME or loop")]
    Kind(String),
    /// `udp:` with something that is no address.
    #[error("`{0}` is no IP address; write for example udp:127.0.0.1 or udp:::1")]
    Address(String),
    /// An address that no one can own.
    #[error("{0} is not the address of one endpoint; write the address of one of this machine's interfaces")]
    NotUnicast(IpAddr),
    /// An interface name that Linux would not take.
    #[error("`{0}` is no interface name; `ip link` lists them")]
    Interface(String),
}

impl FromStr for DeviceArg {
    type Err = DeviceArgError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "loop" {
            return Ok(Self::Loop);
        }
        match text.split_once(':') {
            Some(("udp", address)) => udp(address),
            Some(("packet", name)) => interface(name).map(Self::Packet),
            Some(("pnet", name)) => interface(name).map(Self::Pnet),
            _ => Err(DeviceArgError::Kind(text.into())),
        }
    }
}

fn udp(text: &str) -> Result<DeviceArg, DeviceArgError> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let address: IpAddr = bare.parse().map_err(|_| DeviceArgError::Address(text.into()))?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(DeviceArgError::NotUnicast(address));
    }
    Ok(DeviceArg::Udp(address))
}

fn interface(name: &str) -> Result<String, DeviceArgError> {
    let bad = name.is_empty()
        || name.len() > INTERFACE_NAME_MAX
        || name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control());
    if bad { Err(DeviceArgError::Interface(name.into())) } else { Ok(name.into()) }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Udp(address) => write!(f, "udp:{address}"),
            Self::Packet(name) => write!(f, "packet:{name}"),
            Self::Pnet(name) => write!(f, "pnet:{name}"),
            Self::Loop => f.write_str("loop"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_and_written() {
        for text in ["udp:127.0.0.1", "udp:fd77::2", "packet:eth0", "pnet:veth-a", "loop"] {
            assert_eq!(text.parse::<DeviceArg>().unwrap().to_string(), text);
        }
        assert_eq!("udp:[::1]".parse(), Ok(DeviceArg::Udp("::1".parse().unwrap())));
    }

    #[test]
    fn what_is_no_device_is_named() {
        let error = |text: &str| text.parse::<DeviceArg>().unwrap_err();
        assert_eq!(error("eth0"), DeviceArgError::Kind("eth0".into()));
        assert_eq!(error("tcp:1.2.3.4"), DeviceArgError::Kind("tcp:1.2.3.4".into()));
        assert_eq!(error("udp:localhost"), DeviceArgError::Address("localhost".into()));
        assert_eq!(error("udp:0.0.0.0"), DeviceArgError::NotUnicast("0.0.0.0".parse().unwrap()));
        assert_eq!(error("udp:239.1.2.3"), DeviceArgError::NotUnicast("239.1.2.3".parse().unwrap()));
        assert_eq!(error("packet:"), DeviceArgError::Interface(String::new()));
        assert_eq!(error("packet:an-interface-name"), DeviceArgError::Interface("an-interface-name".into()));
        assert_eq!(error("pnet:a b"), DeviceArgError::Interface("a b".into()));
    }
}
