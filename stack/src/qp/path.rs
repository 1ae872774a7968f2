//! Paths: where a connected QP sends, and whom it hears.
//!
//! Owns the addresses, source ports, partition keys and the MigReq bit of a QP's packets, and the check that a received
//! packet came along one of its paths. Which path is in use is the business of `migrate.rs`. Never answers: a packet that
//! came along no path is dropped, whatever it asks for.

use core::net::IpAddr;

use super::requester::Requester;
use crate::burst::choose_source_port;
use crate::counters::DropReason;
use crate::rng::Rng;
use crate::types::{Gid, PKey, PathMtu, Psn, Qpn};
use crate::verbs::{AddressVector, QpOptions, SourceCheck, SourcePort, SourcePortCheck};
use crate::wire::{self, Flow, VlanTag};

/// The ports that Linux draws RoCEv2's from.
const PORTS: core::ops::RangeInclusive<u64> = 0xC000..=0xFFFF;

/// Where a connected QP sends.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Path {
    /// From us to the peer, for answers.
    pub(crate) flow: Flow,
    /// The same for requests, whose source port may rotate.
    pub(crate) request_flow: Flow,
    pub(crate) dest_qpn: Qpn,
    pub(crate) pkey: PKey,
    pub(crate) mtu: PathMtu,
    /// M bit of every packet.
    pub(crate) mig_req: bool,
    rotating: bool,
    /// The next PSN to send when the source port of requests last changed.
    rotated_at: Option<Psn>,
    /// The source port that the peer's packets must have, once it is known.
    pub(super) pinned: Option<u16>,
}

/// What a path is made of besides its address vector.
#[derive(Clone, Copy, Debug)]
pub(super) struct PathEnds {
    pub(super) qpn: Qpn,
    pub(super) dest_qpn: Qpn,
    pub(super) pkey: PKey,
    pub(super) mtu: PathMtu,
}

impl Path {
    /// The path of `av`. `None` when its GID index or families are wrong.
    pub(super) fn new(av: &AddressVector, ends: &PathEnds, gids: &[Gid], ports: &[u16], rng: &mut Rng) -> Option<Self> {
        let PathEnds { qpn, dest_qpn, pkey, mtu } = *ends;
        let src_port = match av.udp_source_port {
            SourcePort::Formula => choose_source_port(ports, wire::udp_source_port(av.flow_label, qpn, dest_qpn)),
            SourcePort::Fixed(port) => port,
            SourcePort::Random | SourcePort::Rotating => random_port(ports, rng),
        };
        let flow = Flow { src_port, ..flow_for(av, gids)? };
        let rotating = av.udp_source_port == SourcePort::Rotating;
        let (mig_req, rotated_at, pinned) = (true, None, None);
        Some(Self { flow, request_flow: flow, dest_qpn, pkey, mtu, mig_req, rotating, rotated_at, pinned })
    }

    /// Takes another source port for requests, if the policy says so and nothing is in flight.
    #[inline]
    pub(super) fn rotate(&mut self, requester: &Requester, ports: &[u16], rng: &mut Rng) {
        if !self.rotating {
            return;
        }
        let (next, _) = requester.psns();
        if requester.is_drained() && self.rotated_at != Some(next) {
            self.rotated_at = Some(next);
            self.request_flow.src_port = random_port(ports, rng);
        }
    }

    /// Whether a packet of `flow` came along this path.
    #[inline]
    pub(super) fn admits(&self, flow: &Flow, check: SourceCheck) -> bool {
        flow.dst == self.flow.src
            && (flow.src == self.flow.dst
                || match check {
                    SourceCheck::Strict => false,
                    SourceCheck::Subnet { ipv4, ipv6 } => same_subnet(flow.src, self.flow.dst, ipv4, ipv6),
                    SourceCheck::Off => true,
                })
    }

    /// What else must be right of a packet that came along this path.
    #[inline]
    pub(super) fn check(&self, flow: &Flow, pkey: PKey, options: &QpOptions) -> Result<(), DropReason> {
        if !pkey.matches(self.pkey) {
            return Err(DropReason::PKeyMismatch);
        }
        let port = match options.source_port_check {
            SourcePortCheck::Any => return Ok(()),
            SourcePortCheck::First => self.pinned,
            SourcePortCheck::Only(port) => Some(port),
        };
        if port.is_none_or(|port| port == flow.src_port) { Ok(()) } else { Err(DropReason::SourcePortMismatch) }
    }
}

/// A random port of those that the device can send from.
pub(crate) fn random_port(ports: &[u16], rng: &mut Rng) -> u16 {
    choose_source_port(ports, u16::try_from(rng.within(PORTS)).unwrap_or(Flow::PORT))
}

fn same_subnet(a: IpAddr, b: IpAddr, ipv4: u8, ipv6: u8) -> bool {
    match (a, b) {
        (IpAddr::V4(a), IpAddr::V4(b)) => {
            let host = 32 - u32::from(ipv4.min(32));
            (u64::from(a.to_bits()) ^ u64::from(b.to_bits())) >> host == 0
        }
        (IpAddr::V6(a), IpAddr::V6(b)) => {
            let host = 128 - u32::from(ipv6.min(128));
            (a.to_bits() ^ b.to_bits()).checked_shr(host).unwrap_or(0) == 0
        }
        _ => false,
    }
}

/// The flow of an address vector, its source port 0. `None` when its GID index or families are wrong.
#[must_use]
pub(crate) fn flow_for(av: &AddressVector, gids: &[Gid]) -> Option<Flow> {
    let src = gids.get(usize::from(av.sgid_index))?.ip();
    let dst = av.dgid.ip();
    if src.is_ipv4() != dst.is_ipv4() || av.dgid.is_unspecified() {
        return None;
    }
    let flow_label = match dst {
        IpAddr::V4(_) => 0,
        IpAddr::V6(_) => av.flow_label,
    };
    // A device in a VLAN puts its own id into the tag; one outside sends none.
    let priority = av.service_level & 7;
    Some(Flow {
        src,
        dst,
        src_port: 0,
        traffic_class: av.traffic_class,
        hop_limit: av.hop_limit,
        flow_label,
        vlan: (priority != 0).then_some(VlanTag { id: 0, priority }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STRICT: SourceCheck = SourceCheck::Strict;

    fn path(port: SourcePort, ports: &[u16], seed: u64) -> Path {
        let gids = [Gid::from("10.0.0.1".parse::<IpAddr>().unwrap())];
        let qpn = |n| Qpn::new(n).unwrap();
        let av = AddressVector { udp_source_port: port, ..AddressVector::new(gid("10.0.0.2"), 0) };
        let ends = PathEnds { qpn: qpn(0x20), dest_qpn: qpn(0x21), pkey: PKey::DEFAULT, mtu: PathMtu::B1024 };
        Path::new(&av, &ends, &gids, ports, &mut Rng::from_u64(seed)).unwrap()
    }

    fn gid(ip: &str) -> Gid {
        Gid::from(ip.parse::<IpAddr>().unwrap())
    }

    fn from(src: &str, dst: &str) -> Flow {
        let (src, dst) = (src.parse().unwrap(), dst.parse().unwrap());
        Flow { src, dst, src_port: 50000, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None }
    }

    #[test]
    fn source_ports_follow_their_policy() {
        // The capture's pair of QPNs.
        assert_eq!(path(SourcePort::Formula, &[], 1).flow.src_port, 50208);
        assert_eq!(path(SourcePort::Fixed(4791), &[], 1).flow.src_port, 4791);
        let random: Vec<u16> = (0..64).map(|seed| path(SourcePort::Random, &[], seed).flow.src_port).collect();
        assert!(random.iter().all(|p| *p >= 0xC000));
        assert!(random.iter().any(|p| *p != random[0]));
        // A socket device has the ports that it has.
        assert!((0..64).all(|seed| [7, 9].contains(&path(SourcePort::Random, &[7, 9], seed).flow.src_port)));
        assert_eq!(path(SourcePort::Formula, &[4791], 1).flow.src_port, 4791);
    }

    #[test]
    fn strangers_are_not_admitted() {
        let p = path(SourcePort::Formula, &[], 1);
        let peer = from("10.0.0.2", "10.0.0.1");
        assert!(p.admits(&peer, STRICT));
        for stranger in [from("10.0.0.3", "10.0.0.1"), from("10.0.0.2", "10.0.0.9"), from("fd00::2", "fd00::1")] {
            assert!(!p.admits(&stranger, STRICT), "{stranger:?}");
        }
        let subnet = SourceCheck::Subnet { ipv4: 30, ipv6: 64 };
        assert!(p.admits(&from("10.0.0.3", "10.0.0.1"), subnet));
        assert!(!p.admits(&from("10.0.0.4", "10.0.0.1"), subnet));
        assert!(!p.admits(&from("10.0.0.3", "10.0.0.7"), subnet), "not our address");
        assert!(p.admits(&from("192.0.2.1", "10.0.0.1"), SourceCheck::Off));
        assert!(!p.admits(&from("192.0.2.1", "10.0.0.7"), SourceCheck::Off));
        let whole = SourceCheck::Subnet { ipv4: 0, ipv6: 0 };
        assert!(p.admits(&from("192.0.2.1", "10.0.0.1"), whole));
        assert!(!p.admits(&from("10.0.0.3", "10.0.0.1"), SourceCheck::Subnet { ipv4: 255, ipv6: 255 }));
    }

    #[test]
    fn ipv6_prefixes_have_their_ends() {
        let ip = |s: &str| s.parse::<IpAddr>().unwrap();
        assert!(same_subnet(ip("fd00::1"), ip("fd00::ffff"), 32, 64));
        assert!(!same_subnet(ip("fd00:0:0:1::1"), ip("fd00::1"), 32, 64));
        assert!(same_subnet(ip("fd00::1"), ip("2001:db8::1"), 32, 0));
        assert!(!same_subnet(ip("fd00::1"), ip("fd00::2"), 32, 128));
    }

    #[test]
    fn a_pinned_port_is_the_only_one() {
        let mut p = path(SourcePort::Formula, &[], 1);
        let flow = from("10.0.0.2", "10.0.0.1");
        let options = |source_port_check| QpOptions { source_port_check, ..QpOptions::default() };
        let check = |p: &Path, o| p.check(&flow, PKey::DEFAULT, &options(o));
        assert_eq!(check(&p, SourcePortCheck::Any), Ok(()));
        assert_eq!(check(&p, SourcePortCheck::First), Ok(()), "not learned yet");
        p.pinned = Some(50001);
        assert_eq!(check(&p, SourcePortCheck::First), Err(DropReason::SourcePortMismatch));
        assert_eq!(check(&p, SourcePortCheck::Any), Ok(()));
        assert_eq!(check(&p, SourcePortCheck::Only(50000)), Ok(()));
        assert_eq!(check(&p, SourcePortCheck::Only(50001)), Err(DropReason::SourcePortMismatch));
        let foreign = p.check(&flow, PKey::new(0x8001), &options(SourcePortCheck::Any));
        assert_eq!(foreign, Err(DropReason::PKeyMismatch));
    }

    #[test]
    fn the_service_level_becomes_a_priority() {
        let gids = [gid("10.0.0.1")];
        let av = |service_level| AddressVector { service_level, ..AddressVector::new(gid("10.0.0.2"), 0) };
        assert_eq!(flow_for(&av(0), &gids).unwrap().vlan, None);
        assert_eq!(flow_for(&av(3), &gids).unwrap().vlan, Some(VlanTag { id: 0, priority: 3 }));
        assert_eq!(flow_for(&av(0xB), &gids).unwrap().vlan, Some(VlanTag { id: 0, priority: 3 }), "low three bits");
    }
}
