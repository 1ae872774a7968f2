//! What an address vector says of marks and priorities, read off the wire: DSCP and ECN of both IP versions, the VLAN
//! priority of a service level; and that a congestion mark that arrives is counted.

use uroce::device::udp::UdpDevice;
use uroce::verbs::{AddressVector, Operation, Remote, WcOpcode};

use super::rc::{Side, run};
use super::*;

/// DSCP 26 (what RoCE networks customarily use) and ECT(0).
const MARKED: u8 = 0x6A;
/// The same with the congestion mark, as a switch leaves it.
const CONGESTED: u8 = 0x6B;

/// A WRITE of A to B, A's packets marked `class` and with service level `level`.
fn write(a: &mut Side, b: &mut Side, x: IpAddr, y: IpAddr, class: u8, level: u8) {
    let ((ia, ga), (ib, gb)) = (a.gid(x), b.gid(y));
    let (qa, qb) = (a.qpn, b.qpn);
    let along = AddressVector { traffic_class: class, service_level: level, ..AddressVector::new(gb, ia) };
    a.connect_along(along, qb, PathMtu::B1024);
    b.connect_along(AddressVector::new(ga, ib), qa, PathMtu::B1024);
    let remote = Remote { addr: b.half(true).addr, rkey: b.mr.rkey };
    a.post(Operation::Write(remote), false);
    run(a, b, &[WcOpcode::RdmaWrite], &[]);
}

#[test]
fn traffic_class_and_service_level_are_on_the_wire() {
    let lab = Lab::new();
    for (x, y) in [("10.78.0.1", "10.78.0.2"), ("fd78::1", "fd78::2")] {
        let (x, y) = (address(x), address(y));
        let on = |host: u8, ip| AfPacketConfig {
            vlan: Some(VlanTag { id: 7, priority: 1 }),
            ..AfPacketConfig::own("v0", MacAddr([2, 0x77, 0, 0, 0, host]), vec![ip])
        };
        // Each hears what the device beside it hears.
        let mut by_a = lab.open(&lab.a, on(1, x)).unwrap();
        let mut by_b = lab.open(&lab.b, on(2, y)).unwrap();
        let mut a = Side::new(Box::new(lab.open(&lab.a, on(1, x)).unwrap()));
        let mut b = Side::new(Box::new(lab.open(&lab.b, on(2, y)).unwrap()));
        write(&mut a, &mut b, x, y, MARKED, 5);
        let requests = take(&mut by_b);
        let packets: usize = requests.iter().map(|got| got.bytes.len().div_ceil(got.segment)).sum();
        assert!(packets > 100, "the packets of 200,000 bytes: {packets}");
        for got in &requests {
            assert_eq!((got.flow.src, got.flow.traffic_class), (x, MARKED));
            assert_eq!(got.flow.vlan, Some(VlanTag { id: 7, priority: 5 }));
        }
        // B's answers have its own marks: none, and the device's priority.
        for got in take(&mut by_a) {
            assert_eq!((got.flow.src, got.flow.traffic_class), (y, 0));
            assert_eq!(got.flow.vlan, Some(VlanTag { id: 7, priority: 1 }));
        }
        assert_eq!(b.engine.endpoint().counters().np_ecn_marked_roce_packets, 0);
    }
}

#[test]
fn congestion_marks_are_sent_and_counted_by_every_device() {
    let lab = Lab::new();
    for (x, y) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let (x, y) = (address(x), address(y));
        let packet =
            |ns: &str| -> Box<dyn Device> { Box::new(patiently(|| lab.open(ns, AfPacketConfig::shared("v0")))) };
        let udp = |ns: &str, ip| -> Box<dyn Device> { Box::new(patiently(|| inside(ns, || UdpDevice::open(ip)))) };
        for kind in 0..3 {
            let (a, b) = match kind {
                0 => (packet(&lab.a), packet(&lab.b)),
                1 => (udp(&lab.a, x), packet(&lab.b)),
                _ => (packet(&lab.a), udp(&lab.b, y)),
            };
            let (mut a, mut b) = (Side::new(a), Side::new(b));
            write(&mut a, &mut b, x, y, CONGESTED, 0);
            let c = b.engine.endpoint().counters();
            assert!(c.rcvd_pkts > 100);
            assert_eq!(c.np_ecn_marked_roce_packets, c.rcvd_pkts, "{kind}: every one");
            let c = a.engine.endpoint().counters();
            assert_eq!(c.np_ecn_marked_roce_packets, 0, "answers have B's marks");
        }
    }
}
