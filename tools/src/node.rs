//! From a `--device` to a running endpoint.
//!
//! Owns which device each argument opens, and which device a program takes that was told none. Never knows what runs
//! on it.

use core::net::{IpAddr, Ipv4Addr};
use std::net::{ToSocketAddrs, UdpSocket};

use uroce::device::Device;
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::af_xdp::AfXdp;
use uroce::device::impair::{ImpairModel, Impaired};
use uroce::device::loopback::Switch;
use uroce::device::pnet::PnetDevice;
use uroce::device::tap::{TapConfig, TapDevice};
use uroce::device::udp::{UdpDevice, UdpOptions};
use uroce::engine::{Engine, PollPolicy};
use uroce::host::{self, Host};
use uroce::inspect::Inspector;
use uroce::types::Gid;
use uroce::verbs::{GidEntry, WaitVerbs};
use uroce::wire::Flow;

use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::hardware::{self, Hardware};
use crate::observe;
use crate::pages;
use crate::report::remark;
use crate::wrap;

/// Opens the device. Nothing is sent.
fn open_device(device: &DeviceArg) -> Result<Box<dyn Device>, Failure> {
    wrap::wrap(match device {
        DeviceArg::Udp(address) => {
            let usual = UdpOptions::default();
            let segments_max = wrap::segments_max().unwrap_or(usual.segments_max);
            Box::new(UdpDevice::open_with(*address, UdpOptions { segments_max, ..usual })?)
        }
        DeviceArg::Packet(packet) => {
            let usual = packet.config();
            let segments_max = wrap::segments_max().unwrap_or(usual.segments_max);
            Box::new(AfPacket::open(AfPacketConfig { segments_max, ..usual })?)
        }
        DeviceArg::Xdp(xdp) => Box::new(AfXdp::open(&xdp.config())?),
        DeviceArg::Tap(tap) => {
            let usual = tap.config();
            let segments_max = wrap::segments_max().unwrap_or(usual.segments_max);
            Box::new(TapDevice::open(TapConfig { segments_max, ..usual })?)
        }
        DeviceArg::Pnet(name) => Box::new(PnetDevice::open(name)?),
        // A switch of its own: nobody else is on it.
        DeviceArg::Loop => Box::new(Switch::new().port(&[Ipv4Addr::LOCALHOST.into()])),
        DeviceArg::Hw(_) => return Err(software_only(device)),
    })
}

fn software_only(device: &DeviceArg) -> Failure {
    Failure::Usage(format!("{device} is hardware; this command needs an endpoint of uroce's own"))
}

/// An engine that is not driven, for questions alone.
pub(crate) fn idle_engine(device: &DeviceArg) -> Result<Engine<Box<dyn Device>>, Failure> {
    Ok(Engine::open(open_device(device)?)?)
}

/// An endpoint as commands use it.
pub(crate) trait Endpoint: WaitVerbs {
    /// Whether it is RDMA hardware, whose connections the kernel makes.
    #[cfg(feature = "hw")]
    fn is_hardware(&self) -> bool;

    /// What waits do while nothing is due. Hardware waits as its driver does.
    fn set_poll_policy(&mut self, policy: PollPolicy);
}

impl Endpoint for host::Handle {
    #[cfg(feature = "hw")]
    fn is_hardware(&self) -> bool {
        false
    }

    fn set_poll_policy(&mut self, policy: PollPolicy) {
        Self::set_poll_policy(self, policy);
    }
}

/// The verbs of an endpoint, whichever device it is on.
pub(crate) type Handle = dyn Endpoint;

/// An endpoint on a device, driven by whoever waits, or hardware, which drives itself.
pub(crate) struct Node(Kind);

enum Kind {
    Software {
        /// Lets others look at it. Goes first, as it uses the host.
        _inspector: Option<Inspector>,
        /// Keeps the engine alive, and knows why the device failed.
        host: Host,
        handle: host::Handle,
    },
    Hardware {
        device: Box<Hardware>,
        name: DeviceArg,
    },
}

impl Node {
    /// Opens `device`.
    pub(crate) fn open(device: &DeviceArg) -> Result<Self, Failure> {
        if let DeviceArg::Hw(arg) = device {
            return Ok(Self(Kind::Hardware { device: Box::new(hardware::open(arg)?), name: device.clone() }));
        }
        Ok(Self::on(Engine::open(open_device(device)?)?))
    }

    /// Opens `device` behind a wrapper that drops packets that it sends with probability `loss`.
    pub(crate) fn open_lossy(device: &DeviceArg, loss: f64, seed: u64) -> Result<Self, Failure> {
        let model = ImpairModel::lossy(loss);
        Ok(Self::on(Engine::open(Impaired::new(open_device(device)?, model, ImpairModel::NONE, seed))?))
    }

    /// Two endpoints on a switch in this process, and the address of the second. Wrappers go around the first.
    pub(crate) fn pair() -> Result<(Self, Self, IpAddr), Failure> {
        let switch = Switch::new();
        let [near, far] = [1, 2].map(|host| IpAddr::from([127, 0, 0, host]));
        let first = Engine::open(wrap::wrap(Box::new(switch.port(&[near])))?)?;
        Ok((Self::on(first), Self::on(Engine::open(switch.port(&[far]))?), far))
    }

    fn on<D: Device + 'static>(mut engine: Engine<D>) -> Self {
        if let Some(segments) = wrap::segments_max() {
            engine.endpoint_mut().set_segments_max(segments);
        }
        pages::remark_if_refused();
        let host = Host::new(engine);
        let handle = host.handle();
        Self(Kind::Software { _inspector: observe::serve(&host), host, handle })
    }

    /// Starts the thread that answers peers while the program does something else. Hardware answers by itself.
    pub(crate) fn attend(&mut self) -> Result<(), Failure> {
        match &mut self.0 {
            Kind::Software { host, .. } => Ok(host.spawn_progress()?),
            Kind::Hardware { .. } => Ok(()),
        }
    }

    /// The verbs.
    pub(crate) fn verbs(&mut self) -> &mut Handle {
        match &mut self.0 {
            Kind::Software { handle, .. } => handle,
            Kind::Hardware { device, .. } => &mut **device,
        }
    }

    /// The verbs of an endpoint in software, with what they offer beyond [`WaitVerbs`].
    pub(crate) fn software(&mut self) -> Result<&mut host::Handle, Failure> {
        match &mut self.0 {
            Kind::Software { handle, .. } => Ok(handle),
            Kind::Hardware { name, .. } => Err(software_only(name)),
        }
    }
}

/// The verbs say only that the device is gone; here is why.
impl Drop for Node {
    fn drop(&mut self) {
        if let Kind::Software { host, .. } = &self.0
            && let Some(error) = host.take_error()
        {
            remark(format_args!("the device failed: {error}"));
        }
    }
}

/// The entry of the GID table that was asked for, or else the first IPv4 one, or else the first of any kind: on uroce's own
/// devices entry 0, on hardware, whose tables begin with link-local and RoCE v1 entries, another.
pub(crate) fn gid(gids: &[GidEntry], wanted: Option<u8>) -> Result<(u8, Gid), Failure> {
    let usable: Vec<(u8, Gid)> =
        (0..=u8::MAX).zip(gids).filter(|(_, entry)| entry.is_usable()).map(|(i, entry)| (i, entry.gid)).collect();
    let found = match wanted {
        Some(index) => usable.iter().find(|(i, _)| *i == index),
        None => usable.iter().find(|(_, gid)| gid.ip().is_ipv4()).or(usable.first()),
    };
    found.copied().ok_or_else(|| match wanted {
        Some(index) => {
            let n = gids.len();
            Failure::Usage(format!("the device has {n} GIDs; index {index} is not there, or not of RoCE v2"))
        }
        None => Failure::Environment("the device has no GID of RoCE v2; its interface needs an address".into()),
    })
}

/// The addresses of `host`, a name or an address.
pub(crate) fn resolve(host: &str) -> Result<IpAddr, Failure> {
    // A link-local address may carry its interface.
    let resolved = (host, Flow::PORT).to_socket_addrs();
    let mut addresses = resolved.map_err(|e| Failure::Usage(format!("{host} is no address and no known name: {e}")))?;
    addresses.next().map(|a| a.ip()).ok_or_else(|| Failure::Usage(format!("{host} has no address")))
}

/// The `udp:` device from which `host` is reached.
pub(crate) fn device_towards(host: &str) -> Result<DeviceArg, Failure> {
    let peer = resolve(host)?;
    let any: IpAddr =
        if peer.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { core::net::Ipv6Addr::UNSPECIFIED.into() };
    // Connecting a UDP socket sends nothing: it asks the routing table.
    let local = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((peer, Flow::PORT))?;
        socket.local_addr()
    });
    let local = local.map_err(|e| Failure::Environment(format!("no route to {peer}: {e}; `ip route` shows them")))?;
    Ok(DeviceArg::Udp(beside(local.ip(), peer)))
}

/// `local`, or its neighbour on the loopback network when the peer is there already.
fn beside(local: IpAddr, peer: IpAddr) -> IpAddr {
    match (local, peer) {
        (IpAddr::V4(l), IpAddr::V4(p)) if l == p && l.is_loopback() => {
            let other = if l == Ipv4Addr::new(127, 0, 0, 2) { 1 } else { 2 };
            Ipv4Addr::new(127, 0, 0, other).into()
        }
        _ => local,
    }
}

#[cfg(test)]
mod tests {
    use uroce::verbs::GidType;

    use super::*;

    #[test]
    fn a_client_on_loopback_takes_another_address_than_its_server() {
        let towards = |host| device_towards(host).unwrap().to_string();
        assert_eq!(towards("127.0.0.1"), "udp:127.0.0.2");
        assert_eq!(towards("127.0.0.2"), "udp:127.0.0.1");
    }

    #[test]
    fn a_gid_is_chosen_as_asked_or_ipv4_first() {
        let entry = |ip: &str, gid_type| GidEntry { gid: ip.parse::<IpAddr>().unwrap().into(), gid_type };
        let v6 = entry("fe80::1", GidType::RoceV2);
        let gids = [v6, entry("10.77.0.1", GidType::RoceV1), entry("10.77.0.1", GidType::RoceV2)];
        let index = |gids: &[GidEntry], wanted| gid(gids, wanted).map(|(index, _)| index);
        assert_eq!(index(&gids, None).unwrap(), 2);
        assert_eq!(index(&gids[..1], None).unwrap(), 0);
        assert_eq!(index(&gids, Some(0)).unwrap(), 0);
        assert_eq!(index(&gids, Some(1)).unwrap_err().code(), 2, "RoCE v1");
        let told = index(&gids, Some(3)).unwrap_err().to_string();
        assert_eq!(told, "the device has 3 GIDs; index 3 is not there, or not of RoCE v2");
        assert_eq!(index(&[], None).unwrap_err().code(), 4);
    }

    #[test]
    fn a_name_that_is_none_is_wrong_usage() {
        assert_eq!(resolve("no such host").unwrap_err().code(), 2);
    }
}
