//! The argument `--device`.
//!
//! Owns its grammar: `udp:ADDR`, `packet:IFNAME[,mac=MAC,ip=ADDR…][,vlan=ID][,receive=ring|calls]`,
//! `xdp:IFNAME[,mode=native|generic|auto][,queue=N|queues=N]` with the options of `packet:`,
//! `tap:IFNAME,ip=ADDR…[,mac=MAC][,vlan=ID][,mtu=BYTES][,keep]`, `pnet:IFNAME`, `hw:NAME[/PORT]`, `loop`.
//! Opens nothing.

use core::fmt;
use core::net::IpAddr;
use core::str::FromStr;

use uroce::device::af_packet::{AddressMode, AfPacketConfig, ReceiveBy};
use uroce::device::af_xdp::{AfXdpConfig, QUEUES_MAX, XdpMode, XdpQueues};
use uroce::device::tap::TapConfig;
use uroce::types::MacAddr;
use uroce::wire::VlanTag;

use crate::hardware::HwArg;

/// Longest name of a network interface on Linux (IFNAMSIZ less the NUL).
const INTERFACE_NAME_MAX: usize = 15;

/// Which device an endpoint runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DeviceArg {
    /// A UDP socket on port 4791 of this address: no privilege needed.
    Udp(IpAddr),
    /// Raw Ethernet through AF_PACKET: needs CAP_NET_RAW.
    Packet(PacketArg),
    /// Raw Ethernet through AF_XDP: needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF.
    Xdp(XdpArg),
    /// Behind a TAP interface, with a MAC and addresses of its own: needs CAP_NET_ADMIN, or a TAP that is the user's.
    Tap(TapArg),
    /// Raw Ethernet on this interface through the pnet library: portable, slower.
    Pnet(String),
    /// An RDMA device, through libibverbs.
    Hw(HwArg),
    /// Both ends in this process.
    Loop,
}

/// A `packet:` device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PacketArg {
    /// Its interface.
    pub(crate) interface: String,
    /// A MAC and addresses of its own; `None`: beside the kernel, on the interface's.
    own: Option<(MacAddr, Vec<IpAddr>)>,
    vlan: Option<u16>,
    /// Not for `xdp:`, where packet sockets are the slow path.
    receive: ReceiveBy,
}

impl PacketArg {
    /// As the device takes it.
    pub(crate) fn config(&self) -> AfPacketConfig {
        AfPacketConfig {
            mode: self.addresses(),
            vlan: self.tag(),
            receive: self.receive,
            ..AfPacketConfig::shared(self.interface.as_str())
        }
    }

    fn addresses(&self) -> AddressMode {
        match &self.own {
            None => AddressMode::Shared,
            Some((mac, addresses)) => AddressMode::Own { mac: *mac, addresses: addresses.clone() },
        }
    }

    fn tag(&self) -> Option<VlanTag> {
        self.vlan.map(|id| VlanTag { id, priority: 0 })
    }

    fn parse(text: &str) -> Result<Self, DeviceArgError> {
        let mut receive = ReceiveBy::default();
        let place = Self::parse_with(text, &mut |part| {
            receive = match part {
                "receive=ring" => ReceiveBy::Ring,
                "receive=calls" => ReceiveBy::Calls,
                _ => return Err(DeviceArgError::PacketOption(part.into())),
            };
            Ok(())
        })?;
        Ok(Self { receive, ..place })
    }

    /// `other` is given what is no option of raw Ethernet, and what is a bad one.
    fn parse_with(
        text: &str,
        other: &mut dyn FnMut(&str) -> Result<(), DeviceArgError>,
    ) -> Result<Self, DeviceArgError> {
        let mut parts = text.split(',');
        let interface = interface(parts.next().unwrap_or_default())?;
        let (mut mac, mut addresses, mut vlan) = (None, Vec::new(), None);
        for part in parts {
            match part.split_once('=') {
                Some(("mac", v)) if parse_mac(v).is_some() => mac = parse_mac(v),
                Some(("ip", v)) => addresses.push(address(v)?),
                Some(("vlan", v)) if parse_vlan(v).is_some() => vlan = parse_vlan(v),
                _ => other(part)?,
            }
        }
        let own = match (mac, addresses.is_empty()) {
            (None, true) => None,
            (Some(mac), false) => Some((mac, addresses)),
            _ => return Err(DeviceArgError::HalfOwned),
        };
        Ok(Self { interface, own, vlan, receive: ReceiveBy::default() })
    }
}

/// Everything but the kind.
impl fmt::Display for PacketArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.interface)?;
        if let Some((mac, addresses)) = &self.own {
            write!(f, ",mac={mac}")?;
            addresses.iter().try_for_each(|a| write!(f, ",ip={a}"))?;
        }
        self.vlan.map_or(Ok(()), |id| write!(f, ",vlan={id}"))?;
        f.write_str(if self.receive == ReceiveBy::Calls { ",receive=calls" } else { "" })
    }
}

/// An `xdp:` device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct XdpArg {
    /// What it shares with a `packet:` device.
    pub(crate) place: PacketArg,
    mode: XdpMode,
    queues: XdpQueues,
}

impl XdpArg {
    /// As the device takes it.
    pub(crate) fn config(&self) -> AfXdpConfig {
        AfXdpConfig {
            addresses: self.place.addresses(),
            vlan: self.place.tag(),
            mode: self.mode,
            queues: self.queues,
            ..AfXdpConfig::shared(self.place.interface.as_str())
        }
    }

    fn parse(text: &str) -> Result<Self, DeviceArgError> {
        let (mut mode, mut queues) = (XdpMode::Auto, XdpQueues::All);
        let place = PacketArg::parse_with(text, &mut |part| {
            let bad = || DeviceArgError::XdpOption(part.into());
            match part.split_once('=') {
                Some(("mode", "auto")) => mode = XdpMode::Auto,
                Some(("mode", "native")) => mode = XdpMode::Native,
                Some(("mode", "generic")) => mode = XdpMode::Generic,
                Some(("queue", v)) => queues = XdpQueues::One(v.parse().ok().filter(|q| *q < 4096).ok_or_else(bad)?),
                Some(("queues", v)) => {
                    let count = v.parse().ok().filter(|count| (1..=QUEUES_MAX).contains(count));
                    queues = XdpQueues::First(count.ok_or_else(bad)?);
                }
                _ => return Err(bad()),
            }
            Ok(())
        })?;
        Ok(Self { place, mode, queues })
    }
}

/// Everything but the kind.
impl fmt::Display for XdpArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.place)?;
        f.write_str(match self.mode {
            XdpMode::Auto => "",
            XdpMode::Native => ",mode=native",
            XdpMode::Generic => ",mode=generic",
        })?;
        match self.queues {
            XdpQueues::All => Ok(()),
            XdpQueues::One(queue) => write!(f, ",queue={queue}"),
            XdpQueues::First(count) => write!(f, ",queues={count}"),
        }
    }
}

/// A `tap:` device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TapArg {
    /// Its interface.
    pub(crate) interface: String,
    /// `None`: one that follows from the first address.
    mac: Option<MacAddr>,
    /// At least one.
    addresses: Vec<IpAddr>,
    vlan: Option<u16>,
    mtu: Option<u16>,
    keep: bool,
}

impl TapArg {
    /// As the device takes it.
    pub(crate) fn config(&self) -> TapConfig {
        let mac = self.mac.unwrap_or_else(|| self.addresses.first().map_or_else(MacAddr::default, own_mac));
        TapConfig {
            vlan: self.vlan.map(|id| VlanTag { id, priority: 0 }),
            mtu: self.mtu.map(usize::from),
            persistent: self.keep,
            ..TapConfig::new(self.interface.as_str(), mac, self.addresses.clone())
        }
    }

    fn parse(text: &str) -> Result<Self, DeviceArgError> {
        let mut parts = text.split(',');
        let interface = interface(parts.next().unwrap_or_default())?;
        let mut tap = Self { interface, mac: None, addresses: Vec::new(), vlan: None, mtu: None, keep: false };
        for part in parts {
            let bad = || DeviceArgError::TapOption(part.into());
            match part.split_once('=') {
                Some(("mac", v)) => tap.mac = Some(parse_mac(v).ok_or_else(bad)?),
                Some(("ip", v)) => tap.addresses.push(address(v)?),
                Some(("vlan", v)) => tap.vlan = Some(parse_vlan(v).ok_or_else(bad)?),
                Some(("mtu", v)) => tap.mtu = Some(v.parse().map_err(|_| bad())?),
                None if part == "keep" => tap.keep = true,
                _ => return Err(bad()),
            }
        }
        if tap.addresses.is_empty() { Err(DeviceArgError::NoTapAddress) } else { Ok(tap) }
    }
}

/// A MAC that is nobody's, made of the end of an address: 02:75 and four bytes.
fn own_mac(address: &IpAddr) -> MacAddr {
    let [.., a, b, c, d] = match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    };
    MacAddr([2, 0x75, a, b, c, d])
}

fn parse_vlan(text: &str) -> Option<u16> {
    text.parse().ok().filter(|id| (1..4095).contains(id))
}

fn parse_mac(text: &str) -> Option<MacAddr> {
    let mut bytes = [0; 6];
    let mut parts = text.split(':');
    for byte in &mut bytes {
        *byte = parts.next().filter(|p| p.len() == 2).and_then(|p| u8::from_str_radix(p, 16).ok())?;
    }
    let mac = MacAddr(bytes);
    (parts.next().is_none() && !mac.is_multicast()).then_some(mac)
}

/// Why a `--device` is not one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DeviceArgError {
    /// Neither of the kinds.
    #[error(
        "`{0}` is no device; write udp:ADDR, packet:IFNAME, xdp:IFNAME, tap:IFNAME,ip=ADDR, pnet:IFNAME, hw:NAME or loop"
    )]
    Kind(String),
    /// `udp:` with something that is no address.
    #[error("`{0}` is no IP address; write for example udp:127.0.0.1 or udp:::1")]
    Address(String),
    /// An address that no one can own.
    #[error("{0} is not the address of one endpoint; write the address of one of this machine's interfaces")]
    NotUnicast(IpAddr),
    /// Something else behind a comma.
    #[error(
        "`{0}` is no option of packet:; write mac=02:00:00:00:00:01, ip=ADDR, vlan=1 to 4094, receive=ring or receive=calls"
    )]
    PacketOption(String),
    /// The same, of AF_XDP.
    #[error(
        "`{0}` is no option of xdp:; write mode=native, mode=generic, queue=0 to 4095, queues=1 to {QUEUES_MAX}, \
         mac=02:00:00:00:00:01, ip=ADDR or vlan=1 to 4094"
    )]
    XdpOption(String),
    /// The same, of a TAP.
    #[error("`{0}` is no option of tap:; write ip=ADDR, mac=02:00:00:00:00:01, vlan=1 to 4094, mtu=BYTES or keep")]
    TapOption(String),
    /// Behind a TAP there is nobody yet.
    #[error("an endpoint behind a TAP needs an address of its own; write tap:IFNAME,ip=ADDR")]
    NoTapAddress,
    /// A MAC without an address, or the other way round.
    #[error("an endpoint of its own needs both mac= and ip=")]
    HalfOwned,
    /// An interface name that Linux would not take.
    #[error("`{0}` is no interface name; `ip link` lists them")]
    Interface(String),
    /// Not of the form NAME or NAME/PORT.
    #[error("`{0}` is no RDMA device; write for example hw:rxe0 or hw:mlx5_0/2; `rdma link` lists them")]
    Hardware(String),
}

impl FromStr for DeviceArg {
    type Err = DeviceArgError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "loop" {
            return Ok(Self::Loop);
        }
        match text.split_once(':') {
            Some(("udp", address)) => udp(address),
            Some(("packet", rest)) => PacketArg::parse(rest).map(Self::Packet),
            Some(("xdp", rest)) => XdpArg::parse(rest).map(Self::Xdp),
            Some(("tap", rest)) => TapArg::parse(rest).map(Self::Tap),
            Some(("pnet", name)) => interface(name).map(Self::Pnet),
            Some(("hw", name)) => hardware(name).map(Self::Hw),
            _ => Err(DeviceArgError::Kind(text.into())),
        }
    }
}

fn udp(text: &str) -> Result<DeviceArg, DeviceArgError> {
    address(text).map(DeviceArg::Udp)
}

/// The address of one endpoint.
fn address(text: &str) -> Result<IpAddr, DeviceArgError> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let address: IpAddr = bare.parse().map_err(|_| DeviceArgError::Address(text.into()))?;
    if address.is_unspecified() || address.is_multicast() {
        return Err(DeviceArgError::NotUnicast(address));
    }
    Ok(address)
}

fn hardware(text: &str) -> Result<HwArg, DeviceArgError> {
    let bad = || DeviceArgError::Hardware(text.into());
    let (name, port) = match text.split_once('/') {
        Some((name, port)) => (name, port.parse().ok().filter(|port| *port > 0).ok_or_else(bad)?),
        None => (text, 1),
    };
    let usable = !name.is_empty() && !name.contains(|c: char| c == '/' || c.is_whitespace() || c.is_control());
    if usable { Ok(HwArg { name: name.into(), port }) } else { Err(bad()) }
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
            Self::Packet(packet) => write!(f, "packet:{packet}"),
            Self::Xdp(xdp) => write!(f, "xdp:{xdp}"),
            Self::Tap(tap) => {
                write!(f, "tap:{}", tap.interface)?;
                tap.mac.map_or(Ok(()), |mac| write!(f, ",mac={mac}"))?;
                tap.addresses.iter().try_for_each(|a| write!(f, ",ip={a}"))?;
                tap.vlan.map_or(Ok(()), |id| write!(f, ",vlan={id}"))?;
                tap.mtu.map_or(Ok(()), |mtu| write!(f, ",mtu={mtu}"))?;
                if tap.keep { f.write_str(",keep") } else { Ok(()) }
            }
            Self::Pnet(name) => write!(f, "pnet:{name}"),
            Self::Hw(HwArg { name, port: 1 }) => write!(f, "hw:{name}"),
            Self::Hw(HwArg { name, port }) => write!(f, "hw:{name}/{port}"),
            Self::Loop => f.write_str("loop"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_is_read_and_written() {
        for text in [
            "udp:127.0.0.1",
            "udp:fd77::2",
            "packet:eth0",
            "packet:eth0,vlan=7",
            "packet:eth0,vlan=7,receive=calls",
            "packet:eth0,mac=02:00:00:00:00:01,ip=10.0.0.5,ip=fd00::5,vlan=7",
            "xdp:eth0",
            "xdp:eth0,mode=native",
            "xdp:eth0,mac=02:00:00:00:00:01,ip=10.0.0.5,vlan=7,mode=generic,queue=3",
            "xdp:eth0,queues=4",
            "tap:tap0,ip=10.0.0.5",
            "tap:tap0,mac=02:00:00:00:00:01,ip=10.0.0.5,ip=fd00::5,vlan=7,mtu=9000,keep",
            "pnet:veth-a",
            "hw:rxe0",
            "hw:mlx5_0/2",
            "loop",
        ] {
            assert_eq!(text.parse::<DeviceArg>().unwrap().to_string(), text);
        }
        let ring: DeviceArg = "packet:eth0,receive=ring".parse().unwrap();
        assert_eq!(ring.to_string(), "packet:eth0", "the usual way");
        assert_eq!("udp:[::1]".parse(), Ok(DeviceArg::Udp("::1".parse().unwrap())));
    }

    #[test]
    fn a_tap_without_a_mac_has_one_of_its_first_address() {
        let mac = |text: &str| match text.parse() {
            Ok(DeviceArg::Tap(tap)) => tap.config().mac.to_string(),
            other => panic!("{other:?}"),
        };
        assert_eq!(mac("tap:tap0,ip=10.0.1.5,ip=fd00::7"), "02:75:0a:00:01:05");
        assert_eq!(mac("tap:tap0,ip=fd00::7"), "02:75:00:00:00:07");
        assert_eq!(mac("tap:tap0,ip=fd00::7,mac=02:00:00:00:00:09"), "02:00:00:00:00:09");
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
        for bad in ["mac=02", "mac=03:00:00:00:00:01", "vlan=0", "vlan=4095", "mtu=9000", ""] {
            assert_eq!(error(&format!("packet:eth0,{bad}")), DeviceArgError::PacketOption(bad.into()));
        }
        assert_eq!(error("packet:eth0,ip=10.0.0.5"), DeviceArgError::HalfOwned);
        for bad in ["mode=fast", "queue=4096", "queue=-1", "queues=0", "queues=17", "mac=02", "vlan=0", "mtu=9000", ""]
        {
            assert_eq!(error(&format!("xdp:eth0,{bad}")), DeviceArgError::XdpOption(bad.into()));
        }
        assert_eq!(error("xdp:eth0,ip=10.0.0.5"), DeviceArgError::HalfOwned);
        assert_eq!(error("xdp:eth0,receive=ring"), DeviceArgError::XdpOption("receive=ring".into()));
        assert_eq!(error("packet:eth0,receive=often"), DeviceArgError::PacketOption("receive=often".into()));
        assert_eq!(error("packet:eth0,mode=native"), DeviceArgError::PacketOption("mode=native".into()));
        for bad in ["mac=02", "vlan=0", "mtu=x", "mtu=70000", "kept", ""] {
            assert_eq!(error(&format!("tap:tap0,ip=10.0.0.5,{bad}")), DeviceArgError::TapOption(bad.into()));
        }
        assert_eq!(error("tap:tap0"), DeviceArgError::NoTapAddress);
        assert_eq!(error("pnet:a b"), DeviceArgError::Interface("a b".into()));
        for bad in ["", "rxe0/0", "rxe0/256", "rxe0/x", "/1", "a b"] {
            assert_eq!(error(&format!("hw:{bad}")), DeviceArgError::Hardware(bad.into()));
        }
    }
}
