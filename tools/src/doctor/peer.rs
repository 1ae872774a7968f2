//! A peer: every step between here and its answer.
//!
//! Owns the order of the questions: route, own address, neighbour, port 4791, path MTU, and last the connection manager,
//! which is asked for the service and whose offer is refused. Later questions tell more only where earlier ones went well.

use core::net::{IpAddr, SocketAddr};
use std::time::Duration;

use uroce::device::netlink::{InterfaceFacts, Netlink};
use uroce::device::probe::{EchoProbe, ProbeAnswer};
use uroce::types::PathMtu;
use uroce::verbs::{QpCapabilities, QpInit, QpType};
use uroce_cm::id::{IdError, IdOptions};
use uroce_cm::wire::{PortSpace, RejReason};
use uroce_cm::{ConnParam, EventKind, IdEvent, RetryPolicy};

use super::{Check, Level, Report};
use crate::conn::Connections;
use crate::device_arg::DeviceArg;
use crate::exit::Failure;
use crate::node::{self, Handle, Node};
use crate::why;

/// The service that is asked for when none is named: rping's. Any answer will do then.
const SOME_PORT: u16 = 7174;
/// How long an echo may take, and how often each size is asked for.
const ECHO_PATIENCE: Duration = Duration::from_millis(700);
const ECHO_TRIES: usize = 2;
/// The kernel needs three seconds to give a neighbour up.
const NEIGHBOR_PATIENCE: Duration = Duration::from_millis(3_400);
/// How long connection management may take to say anything.
const CM_PATIENCE: Duration = Duration::from_secs(20);
/// A person waits: gives up after about 4 s.
const RETRY: RetryPolicy = RetryPolicy {
    initial: Duration::from_millis(250),
    factor_percent: 200,
    cap: Duration::from_secs(2),
    retries: 3,
    jitter_percent: 10,
};
/// Headers and ICRC of the longest packet of a message: BTH 12, RETH 16, immediate 4, ICRC 4.
const ROCE_OVERHEAD: usize = 36;

/// Makes all checks.
pub(super) fn look(text: &str, device: Option<&DeviceArg>, report: &mut Report<'_>) -> Result<(), Failure> {
    let (host, port) = split(text)?;
    let peer = node::resolve(host)?;
    let Some(way) = route(peer, report)? else { return Ok(()) };
    let device = match device {
        Some(DeviceArg::Loop | DeviceArg::Hw(_)) => {
            return Err(Failure::Usage("a peer is asked from a udp:, packet:, tap: or pnet: device".into()));
        }
        Some(device) => device.clone(),
        None => node::device_towards(host)?,
    };
    // Where the device has addresses of its own, the kernel's own stands in for the questions to the path.
    let from = match &device {
        DeviceArg::Udp(address) => Some(*address),
        _ => way.source,
    };
    let reached = neighbour_and_port(peer, from, &way, report)?;
    if reached {
        path_mtu(peer, from, &way, report)?;
    }
    let service = SocketAddr::new(peer, port.unwrap_or(SOME_PORT));
    match Node::open(&device) {
        Ok(mut node) => ask_service(node.verbs(), service, port.is_some(), reached, report),
        Err(failure) => {
            let found = format!("{device} cannot be opened: {failure}");
            report.add(Check::of(Level::Lack, "own endpoint", found, "ask from another address with --device"))
        }
    }
}

/// `HOST`, `HOST:PORT`, `[HOST]` or `[HOST]:PORT`.
fn split(text: &str) -> Result<(&str, Option<u16>), Failure> {
    let bad = || Failure::Usage(format!("`{text}` is no peer; write ADDR, NAME, ADDR:PORT or [IPV6]:PORT"));
    let number = |port: &str| port.parse::<u16>().map_err(|_| bad());
    if let Some(rest) = text.strip_prefix('[') {
        let (host, rest) = rest.split_once(']').ok_or_else(bad)?;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(number(port)?))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(bad()),
        };
    }
    match text.split_once(':') {
        // More than one colon: an IPv6 address.
        Some((_, rest)) if rest.contains(':') => Ok((text, None)),
        Some((host, port)) => Ok((host, Some(number(port)?))),
        None => Ok((text, None)),
    }
}

/// How the kernel reaches the peer.
struct Way {
    interface: InterfaceFacts,
    /// The router, or the peer.
    next_hop: IpAddr,
    source: Option<IpAddr>,
    local: bool,
}

fn route(peer: IpAddr, report: &mut Report<'_>) -> Result<Option<Way>, Failure> {
    let found = Netlink::open().and_then(|mut netlink| netlink.route(peer, 0));
    let route = match found {
        Ok(route) => route,
        Err(error) => {
            let fix = "`ip route add` one, or check the address";
            report.add(Check::of(Level::Fail, "route", format!("no route to {peer}: {error}"), fix))?;
            return Ok(None);
        }
    };
    let interface = InterfaceFacts::all()?.into_iter().find(|i| i.index == route.interface);
    let Some(interface) = interface else {
        let fix = format!("see `ip route get {peer}`");
        report.add(Check::of(Level::Fail, "route", format!("{peer} leaves by no interface of this machine"), fix))?;
        return Ok(None);
    };
    let via = route.gateway.map_or(String::new(), |gateway| format!(" via {gateway}"));
    let source = route.source.map_or(String::new(), |source| format!(" from {source}"));
    report.add(Check::ok("route", format!("{peer}{via} by {}{source}", interface.name)))?;
    let next_hop = route.gateway.unwrap_or(peer);
    Ok(Some(Way { interface, next_hop, source: route.source, local: route.local }))
}

/// Whether packets get as far as the peer, for all that is known.
fn neighbour_and_port(peer: IpAddr, from: Option<IpAddr>, way: &Way, report: &mut Report<'_>) -> Result<bool, Failure> {
    let Some(from) = from else {
        let fix = "give it one with `ip addr add`, or choose --device";
        let found = format!("{} has no address to ask from", way.interface.name);
        report.add(Check::of(Level::Warn, "neighbour", found, fix))?;
        return Ok(true);
    };
    let answer = why::ask_port(from, peer, NEIGHBOR_PATIENCE);
    if way.local || way.interface.mac.is_none() {
        report
            .add(Check::ok("neighbour", "none needed: the peer is on this machine, or on a link without neighbours"))?;
    } else {
        let mac = Netlink::open().and_then(|mut n| n.neighbor(way.next_hop, way.interface.index)).ok().flatten();
        report.add(match mac {
            Some(mac) => Check::ok("neighbour", format!("{} is {mac}", way.next_hop)),
            None => Check::of(
                Level::Fail,
                "neighbour",
                format!("nobody on {} answers for {} (ARP or neighbour discovery)", way.interface.name, way.next_hop),
                "check that the peer is up, on this link and VLAN, and has that address",
            ),
        })?;
        if mac.is_none() {
            return Ok(false);
        }
    }
    let silent = "no ICMP error from UDP port 4791: it is open, or something drops in silence";
    let check = match answer {
        Ok(ProbeAnswer::Silent | ProbeAnswer::Answered(_)) => Check::ok("port 4791", silent),
        Ok(ProbeAnswer::PortClosed) => Check::of(
            Level::Fail,
            "port 4791",
            format!("{peer} says that nobody has UDP port 4791 (ICMP port unreachable)"),
            "start the RoCEv2 endpoint there, and check that it is on this address",
        ),
        Ok(ProbeAnswer::NoHost) => Check::of(
            Level::Fail,
            "port 4791",
            format!("a router says that it cannot reach {peer} (ICMP host unreachable)"),
            "check that the peer is up and has that address",
        ),
        Ok(ProbeAnswer::NoRoute) => Check::of(
            Level::Fail,
            "port 4791",
            "a router or firewall refuses the way (ICMP)",
            format!("allow UDP 4791 to {peer}"),
        ),
        Ok(ProbeAnswer::TooBig) => Check::of(
            Level::Fail,
            "port 4791",
            "a packet of connection management (336 bytes) does not fit the path",
            "raise the MTU on the way",
        ),
        Err(error) => Check::of(Level::Warn, "port 4791", format!("not asked: {error}"), "ask from another --device"),
    };
    let reached = check.level != Level::Fail;
    report.add(check)?;
    Ok(reached)
}

/// The largest path MTU whose packets come back whole, asked for by ICMP echo with "don't fragment".
fn path_mtu(peer: IpAddr, from: Option<IpAddr>, way: &Way, report: &mut Report<'_>) -> Result<(), Failure> {
    let Some(most) = PathMtu::for_interface(way.interface.mtu) else {
        let found = format!("{} has an MTU of {}", way.interface.name, way.interface.mtu);
        return report.add(Check::of(Level::Fail, "path MTU", found, "raise it: RoCEv2 needs 336 at the least"));
    };
    let mut probe = match EchoProbe::open(from, peer) {
        Ok(probe) => probe,
        Err(error) => {
            let fix = "run as root, or `sysctl net.ipv4.ping_group_range=\"0 2147483647\"`";
            return report.add(Check::of(Level::Warn, "path MTU", format!("not asked: no ping socket: {error}"), fix));
        }
    };
    let ip = if peer.is_ipv6() { 48 } else { 28 };
    let sizes = [PathMtu::B4096, PathMtu::B2048, PathMtu::B1024, PathMtu::B512, PathMtu::B256];
    let mut larger = None;
    for size in sizes.into_iter().filter(|size| *size <= most) {
        let packet = (ip + size.bytes() + ROCE_OVERHEAD).min(way.interface.mtu);
        if echoes(&mut probe, packet)? {
            return report.add(verdict(size, larger));
        }
        larger.get_or_insert(size);
    }
    report.add(Check::of(
        Level::Warn,
        "path MTU",
        format!("{peer} answers no ping of any size: only the interface's is known, {}", most.bytes()),
        "let ICMP echo pass, or try a smaller path MTU if short messages arrive and long ones do not",
    ))
}

fn verdict(fits: PathMtu, larger: Option<PathMtu>) -> Check {
    let Some(larger) = larger else {
        return Check::ok("path MTU", format!("{} fits, the most that the interface carries", fits.bytes()));
    };
    Check::of(
        Level::Fail,
        "path MTU",
        format!(
            "{} does not fit the path, {} does: the interface promises more than a link on the way",
            larger.bytes(),
            fits.bytes()
        ),
        format!("raise the MTU on the way, lower it on the interface, or connect with a path MTU of {}", fits.bytes()),
    )
}

fn echoes(probe: &mut EchoProbe, packet: usize) -> Result<bool, Failure> {
    for _ in 0..ECHO_TRIES {
        match probe.ask(packet, ECHO_PATIENCE)? {
            ProbeAnswer::Answered(_) => return Ok(true),
            ProbeAnswer::TooBig => return Ok(false),
            _ => {}
        }
    }
    Ok(false)
}

/// Asks for a connection to the service, and refuses it should the peer agree.
fn ask_service(
    v: &mut Handle,
    service: SocketAddr,
    named: bool,
    reached: bool,
    report: &mut Report<'_>,
) -> Result<(), Failure> {
    let mut connections = Connections::with_retry(v, RETRY)?;
    let id = connections.front().create_id(PortSpace::Tcp)?;
    connections.front().set_options(id, IdOptions::default())?;
    connections.front().resolve_addr(v, id, None, service)?;
    let mut asked = false;
    loop {
        let Some(event) = connections.event(v, Some(CM_PATIENCE))? else {
            return report.add(Check::of(Level::Warn, "service", "connection management says nothing", "try again"));
        };
        match event.kind {
            EventKind::AddrResolved => connections.front().resolve_route(v, id)?,
            EventKind::RouteResolved if !asked => {
                asked = true;
                connect(v, &mut connections, id)?;
            }
            EventKind::ConnectResponse => {
                report.add(Check::ok("GID type", "RoCE v2: the peer's connection manager answers over UDP"))?;
                let text = b"uroce doctor only asks";
                connections.front().reject(v.now(), id, text)?;
                connections.linger(v, Duration::from_millis(100))?;
                let found = format!("the service on port {} accepts (QP {})", service.port(), event.param.qp_num);
                return report.add(Check::ok("service", found));
            }
            _ => return refused(&event, service, named, reached, report),
        }
    }
}

fn connect(v: &mut Handle, connections: &mut Connections, id: uroce_cm::IdHandle) -> Result<(), Failure> {
    let (pd, cq) = (v.alloc_pd()?, v.create_cq(1)?);
    let caps = QpCapabilities { max_send_wr: 1, max_recv_wr: 1, ..QpCapabilities::default() };
    let (qp_type, srq, qpn) = (QpType::Rc, None, None);
    // It never leaves RESET: only its number is needed.
    let qp = v.create_qp(QpInit { pd, qp_type, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn })?;
    let param = ConnParam { qpn: Some(v.query_qp(qp)?.qpn), ..ConnParam::default() };
    let now = v.now();
    connections.front().connect(now, v, id, &param).map_err(|e: IdError| e.into())
}

/// No connection: what the peer said, or that it said nothing.
fn refused(
    event: &IdEvent,
    service: SocketAddr,
    named: bool,
    reached: bool,
    report: &mut Report<'_>,
) -> Result<(), Failure> {
    let Some(reason) = event.reason() else {
        return report.add(silent(event, reached));
    };
    report.add(Check::ok("GID type", "RoCE v2: the peer's connection manager answers over UDP"))?;
    let port = service.port();
    let found = format!("the peer refuses port {port}: reason {reason}");
    let check = match reason {
        RejReason::InvalidServiceId if !named => {
            Check::ok("peer", format!("it answers (nobody listens on port {port}, which is as good as any)"))
        }
        RejReason::InvalidServiceId => Check::of(
            Level::Fail,
            "service",
            format!("nobody listens on port {port} there (reason 8)"),
            why::advice(reason),
        ),
        // Whoever listens there does not want this one: it is there.
        RejReason::ConsumerDefined => Check::of(
            Level::Warn,
            "service",
            format!("the application on port {port} refuses (reason 28)"),
            why::advice(reason),
        ),
        _ => Check::of(Level::Fail, "service", found, why::advice(reason)),
    };
    report.add(check)
}

/// The peer's connection manager was asked and said nothing, or the device cannot ask it.
fn silent(event: &IdEvent, reached: bool) -> Check {
    let found = match event.attempt {
        Some(a) => format!("its connection manager does not answer: {} tries in {} ms", a.tries, a.elapsed.as_millis()),
        None => format!("it cannot be asked from this device ({}, status {})", event.kind.name(), event.status),
    };
    let fix = if reached {
        "a firewall on the way drops UDP 4791, or who has the port there is no RoCEv2 endpoint with a connection manager on \
         this address, or its GID is RoCE v1: choose a RoCE v2 GID"
    } else {
        "mend what failed above first"
    };
    Check::of(Level::Fail, "peer", found, fix)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peers_are_read_with_and_without_ports() {
        for (text, wanted) in [
            ("10.0.0.1", ("10.0.0.1", None)),
            ("10.0.0.1:7174", ("10.0.0.1", Some(7174))),
            ("host:1", ("host", Some(1))),
            ("fd77::1", ("fd77::1", None)),
            ("[fd77::1]", ("fd77::1", None)),
            ("[fd77::1]:99", ("fd77::1", Some(99))),
        ] {
            assert_eq!(split(text).unwrap(), wanted);
        }
        for text in ["10.0.0.1:x", "[fd77::1", "[fd77::1]x", "host:70000"] {
            assert_eq!(split(text).unwrap_err().code(), 2, "{text}");
        }
    }

    #[test]
    fn a_path_that_carries_less_than_its_interface_fails() {
        assert_eq!(verdict(PathMtu::B1024, None).level, Level::Ok);
        let check = verdict(PathMtu::B512, Some(PathMtu::B1024));
        assert_eq!(check.level, Level::Fail);
        assert!(check.found.starts_with("1024 does not fit the path, 512 does"), "{check:?}");
    }
}
