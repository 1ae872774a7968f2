//! Multicast datagrams between every kind of device, and what the kernel is told of the groups.

use uroce::device::GROUPS_MAX;
use uroce::device::udp::UdpDevice;
use uroce::engine::Engine;
use uroce::raw::Region;
use uroce::types::{Gid, Psn, QKey, Qpn};
use uroce::verbs::{
    AccessFlags, AddressVector, AsyncEvent, CqHandle, InitAttr, MemoryRegion, Operation, Payload, PdHandle,
    QpCapabilities, QpHandle, QpInit, QpTransition, QpType, RecvWr, SendFlags, SendWr, Sge, UdDestination, Verbs,
    WcOpcode, WcStatus,
};

use super::*;

const KEY: QKey = QKey::new(0x1234);
const V4: &str = "239.77.1.2";
const V6: &str = "ff15::77:1";

struct Member {
    engine: Engine<Box<dyn Device>>,
    pd: PdHandle,
    cq: CqHandle,
    qp: QpHandle,
    region: Region,
    mr: MemoryRegion,
}

impl Member {
    fn new(device: Box<dyn Device>) -> Self {
        let mut engine = Engine::open(device).unwrap();
        let verbs = engine.endpoint_mut();
        let pd = verbs.alloc_pd().unwrap();
        let cq = verbs.create_cq(64).unwrap();
        let (caps, srq) = (QpCapabilities::default(), None);
        let init = QpInit { pd, qp_type: QpType::Ud, send_cq: cq, recv_cq: cq, srq, caps, signal_all: true, qpn: None };
        let qp = verbs.create_qp(init).unwrap();
        for step in [QpTransition::Init(InitAttr::datagram(KEY)), QpTransition::RtrUd, QpTransition::RtsPsn(Psn::ZERO)]
        {
            verbs.modify_qp(qp, step.into()).unwrap();
        }
        let region = Region::alloc(4096).unwrap();
        let mr = verbs.register(pd, &region, AccessFlags::ALL, None).unwrap();
        Self { engine, pd, cq, qp, region, mr }
    }

    fn join(&mut self, group: IpAddr) {
        let qp = self.qp;
        self.engine.endpoint_mut().attach_multicast(qp, Gid::from(group)).unwrap();
        self.engine.apply_memberships().unwrap();
    }

    fn leave(&mut self, group: IpAddr) {
        let qp = self.qp;
        self.engine.endpoint_mut().detach_multicast(qp, Gid::from(group)).unwrap();
        self.engine.apply_memberships().unwrap();
    }

    /// Sends `text` to `group` from the first address of its family.
    fn send(&mut self, group: IpAddr, text: &[u8]) {
        let verbs = self.engine.endpoint_mut();
        let gids = verbs.query_gids();
        let from = gids.iter().rposition(|g| g.gid.ip().is_ipv4() == group.is_ipv4()).unwrap();
        let ah = verbs.create_ah(self.pd, AddressVector::new(Gid::from(group), from as u8)).unwrap();
        let destination = Some(UdDestination { ah, qpn: Qpn::MULTICAST, qkey: KEY });
        let (operation, payload) = (Operation::Send, Payload::Inline(text));
        let flags = SendFlags::SIGNALED;
        verbs.post_send(self.qp, &[SendWr { wr_id: 1, operation, payload, flags, destination }]).unwrap();
    }

    fn recv(&mut self) {
        let sges = [Sge { addr: self.mr.iova, length: 4096, lkey: self.mr.lkey }];
        self.engine.endpoint_mut().post_recv(self.qp, &[RecvWr { wr_id: 2, sges: &sges }]).unwrap();
    }

    /// The datagrams received so far, and how many were sent.
    fn poll(&mut self) -> (Vec<Vec<u8>>, usize) {
        self.engine.poll().unwrap();
        let mut out = [uroce_tests::pair::blank_completion(self.qp); 8];
        let n = self.engine.endpoint_mut().poll_cq(self.cq, &mut out).unwrap();
        let (mut got, mut sent) = (Vec::new(), 0);
        for wc in &out[..n] {
            assert_eq!(wc.status, WcStatus::Success);
            match wc.opcode {
                WcOpcode::Recv => got.push(self.region.to_vec()[40..wc.byte_len as usize].to_vec()),
                _ => sent += 1,
            }
        }
        (got, sent)
    }
}

/// Polls both for `time`, or until `b` has something; returns what both received.
fn both(a: &mut Member, b: &mut Member, time: Duration) -> (Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let end = now() + time;
    let (mut of_a, mut of_b) = (Vec::new(), Vec::new());
    while now() < end && of_b.is_empty() {
        of_a.extend(a.poll().0);
        of_b.extend(b.poll().0);
    }
    (of_a, of_b)
}

const PATIENCE: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_millis(200);

/// The groups that the kernel of `ns` has joined on its interface.
fn joined(ns: &str, group: IpAddr) -> bool {
    let output = Command::new("ip").args(["-n", ns, "maddr", "show", "dev", "v0"]).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split_whitespace().any(|word| word == group.to_string())
}

#[test]
fn datagrams_to_a_group_reach_its_members_over_every_device() {
    let lab = Lab::new();
    for (group, x, y) in [(V4, "10.77.0.1", "10.77.0.2"), (V6, "fd77::1", "fd77::2")] {
        let (group, x, y) = (address(group), address(x), address(y));
        let packet =
            |ns: &str| -> Box<dyn Device> { Box::new(patiently(|| lab.open(ns, AfPacketConfig::shared("v0")))) };
        let udp = |ns: &str, ip| -> Box<dyn Device> { Box::new(patiently(|| inside(ns, || UdpDevice::open(ip)))) };
        let pnet = |ns: &str| -> Box<dyn Device> { Box::new(patiently(|| inside(ns, || PnetDevice::open("v0")))) };
        for kind in 0..5 {
            let (a, b) = match kind {
                0 => (packet(&lab.a), packet(&lab.b)),
                1 => (udp(&lab.a, x), packet(&lab.b)),
                2 => (packet(&lab.a), udp(&lab.b, y)),
                3 => (udp(&lab.a, x), udp(&lab.b, y)),
                _ => (packet(&lab.a), pnet(&lab.b)),
            };
            let (mut a, mut b) = (Member::new(a), Member::new(b));
            b.recv();
            b.recv();
            // Nobody is a member.
            a.send(group, b"early");
            assert_eq!(both(&mut a, &mut b, SILENCE), (vec![], vec![]));
            assert!(!joined(&lab.b, group));
            inside(&lab.b, || b.join(group));
            assert!(joined(&lab.b, group), "the kernel lets the group's MAC through, and tells switches");
            a.send(group, b"hello");
            let (of_a, of_b) = both(&mut a, &mut b, PATIENCE);
            assert_eq!((of_a, of_b), (vec![], vec![b"hello".to_vec()]), "{kind} {group}");
            inside(&lab.b, || b.leave(group));
            assert!(!joined(&lab.b, group));
            a.send(group, b"late");
            assert_eq!(both(&mut a, &mut b, SILENCE), (vec![], vec![]));
            let c = b.engine.endpoint().counters();
            assert_eq!(c.dropped(uroce::counters::DropReason::IcrcError), 0, "{kind} {group}");
        }
    }
}

#[test]
fn a_member_that_sends_to_its_group_has_its_own_datagram() {
    let lab = Lab::new();
    let group = address(V4);
    for kind in 0..2 {
        let device: Box<dyn Device> = match kind {
            0 => Box::new(lab.shared(&lab.a)),
            _ => Box::new(patiently(|| inside(&lab.a, || UdpDevice::open(address("10.77.0.1"))))),
        };
        let mut a = Member::new(device);
        inside(&lab.a, || a.join(group));
        a.recv();
        a.send(group, b"to all");
        let end = now() + PATIENCE;
        let mut got = Vec::new();
        while got.is_empty() && now() < end {
            got.extend(a.poll().0);
        }
        assert_eq!(got, [b"to all".to_vec()], "{kind}");
    }
}

#[test]
fn two_processes_of_one_machine_may_be_in_one_group() {
    let lab = Lab::new();
    let group = address("239.77.1.3");
    ip(&format!("-n {} addr add 10.77.0.3/24 dev v0", lab.b));
    let udp =
        |ns: &str, ip: &str| -> Box<dyn Device> { Box::new(inside(ns, || UdpDevice::open(address(ip)).unwrap())) };
    let mut a = Member::new(udp(&lab.a, "10.77.0.1"));
    let mut others = [Member::new(udp(&lab.b, "10.77.0.2")), Member::new(udp(&lab.b, "10.77.0.3"))];
    for member in &mut others {
        inside(&lab.b, || member.join(group));
        member.recv();
    }
    a.send(group, b"both");
    for member in &mut others {
        assert_eq!(both(&mut a, member, PATIENCE).1, [b"both".to_vec()]);
    }
}

#[test]
fn a_group_too_many_is_an_event_and_the_device_lives() {
    let lab = Lab::new();
    let device: Box<dyn Device> = Box::new(lab.shared(&lab.a));
    let mut a = Member::new(device);
    let qp = a.qp;
    let group = |i: usize| Gid::from(IpAddr::from([239, 77, 2, i as u8]));
    inside(&lab.a, || {
        for i in 0..=GROUPS_MAX {
            a.engine.endpoint_mut().attach_multicast(qp, group(i)).unwrap();
        }
        a.engine.poll().unwrap();
    });
    let event = a.engine.endpoint_mut().poll_event();
    assert_eq!(event, Some(AsyncEvent::MulticastJoinFailed(group(GROUPS_MAX))));
    assert_eq!(a.engine.endpoint_mut().poll_event(), None);
    a.engine.poll().unwrap();
}
