//! Endpoints behind TAP interfaces: the kernel, a bridge and other endpoints are their peers.

use std::process::Stdio;

use uroce::burst::IdRule;
use uroce::device::tap::{TapConfig, TapDevice};

use super::rc::exchange_of;
use super::*;

const MAC: MacAddr = MacAddr([2, 0x75, 0, 0, 0, 9]);
const OTHER: MacAddr = MacAddr([2, 0x75, 0, 0, 0, 8]);
/// Bytes of the longest message.
const MIB: usize = 1 << 20;

/// A TAP called `name` in namespace a with an MTU of 9000 and the addresses 10.88.0.`host` and fd88::`host` behind it.
fn tap(lab: &Lab, name: &str, mac: MacAddr, host: u8) -> TapDevice {
    tap_of(lab, name, mac, host, usize::MAX)
}

fn tap_of(lab: &Lab, name: &str, mac: MacAddr, host: u8, segments_max: usize) -> TapDevice {
    // The one before is gone with its last descriptor, which another test's child may hold for a moment.
    let end = now() + Duration::from_secs(5);
    while inside(&lab.a, || InterfaceFacts::of(name)).is_ok() && now() < end {
        std::thread::sleep(Duration::from_millis(5));
    }
    let addresses = ["10.88.0.", "fd88::"].map(|net| address(&format!("{net}{host}"))).to_vec();
    let config = TapConfig { mtu: Some(9000), segments_max, ..TapConfig::new(name, mac, addresses) };
    inside(&lab.a, || TapDevice::open(config)).unwrap()
}

/// Gives the kernel's end 10.88.0.1 and fd88::1.
fn kernel_end(lab: &Lab, name: &str) {
    ip(&format!("-n {} addr add 10.88.0.1/24 dev {name}", lab.a));
    ip(&format!("-n {} addr add fd88::1/64 dev {name} nodad", lab.a));
}

/// Joins `names` in namespace a, and v0 if it is among them.
fn bridge(lab: &Lab, names: &[&str]) {
    ip(&format!("-n {} link add br0 mtu 9000 type bridge mcast_snooping 0", lab.a));
    for name in names {
        ip(&format!("-n {} link set {name} master br0", lab.a));
    }
    ip(&format!("-n {} link set br0 up", lab.a));
}

/// Sends `bytes` as one superframe of `segment` bytes each; returns the first id.
fn send_super(device: &mut dyn Device, flow: Flow, segment: usize, bytes: &[u8]) -> u16 {
    let mut first = 0;
    let taken = device.transmit(now(), 1, &mut |room| {
        assert_eq!(room.medium, Medium::Ip);
        assert!(matches!(room.ids, IdRule::From(_)) && room.segments_max >= bytes.len().div_ceil(segment));
        first = room.ids.id(0);
        let out = &mut room.buf[room.headroom..];
        let header = write_outer(&flow, first, bytes.len(), out).unwrap();
        out[header..header + bytes.len()].copy_from_slice(bytes);
        let segments = bytes.len().div_ceil(segment);
        Some(TxBurst { flow, len: header + bytes.len(), segment, segments })
    });
    assert_eq!(taken.unwrap(), 1);
    first
}

fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 % 251) as u8).collect()
}

#[test]
fn a_superframe_reaches_a_socket_of_the_kernel_as_datagrams() {
    let lab = Lab::new();
    let mut t = tap(&lab, "t0", MAC, 9);
    assert_eq!(t.capabilities().segments_max, 64, "this kernel takes superframes");
    kernel_end(&lab, "t0");
    for (from, to) in [("10.88.0.9", "10.88.0.1"), ("fd88::9", "fd88::1")] {
        let socket = inside(&lab.a, || UdpSocket::bind((to, 4791)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        let bytes = pattern(10 * 1016 + 500);
        // It waits for resolution first.
        send_super(&mut t, flow(address(from), address(to)), 1016, &bytes);
        let datagrams = driven(&mut t, || -> Vec<Vec<u8>> {
            let mut buf = [0; 2000];
            (0..11).map(|_| socket.recv(&mut buf).map(|len| buf[..len].to_vec()).unwrap()).collect()
        });
        assert_eq!(datagrams, bytes.chunks(1016).map(<[u8]>::to_vec).collect::<Vec<_>>());
    }
    assert_eq!(t.lost(), Default::default());
}

#[test]
fn a_superframe_of_the_kernel_is_a_burst() {
    let lab = Lab::new();
    let mut t = tap(&lab, "t0", MAC, 9);
    kernel_end(&lab, "t0");
    let script = SUPERFRAME.replace("10.77.0.2", "10.88.0.9");
    let perl = ["netns", "exec", &lab.a, "perl", "-MSocket", "-e", &script];
    let mut child = Command::new("ip").args(perl).stdin(Stdio::null()).spawn().unwrap();
    let (end, mut got) = (now() + Duration::from_secs(10), Vec::new());
    while got.is_empty() && now() < end {
        t.wait(Some(Duration::from_millis(5))).unwrap();
        got.extend(take(&mut t));
    }
    assert!(child.wait().unwrap().success());
    assert_eq!((got.len(), got[0].segment, got[0].bytes.len()), (1, 300, 1000));
    assert_eq!((got[0].bytes[0], got[0].bytes[999]), (64, 73));
}

/// Where a superframe leaves by an interface that takes none, the kernel takes it apart: segment i has identification id + i
/// and its own lengths, on which the ICRC of each segment relies.
#[test]
fn the_kernel_numbers_the_segments_of_a_superframe_from_its_id_on() {
    let lab = Lab::new();
    let mut t = tap(&lab, "t0", MAC, 9);
    bridge(&lab, &["t0", "v0"]);
    // Longer ones are taken apart by the kernel.
    ip(&format!("-n {} link set v0 gso_max_size 4000", lab.a));
    for net in ["10.88.0.", "fd88::"] {
        let [from, to] = ["9", "2"].map(|host| address(&format!("{net}{host}")));
        let own = AfPacketConfig::own("v0", OWN_MAC, vec![to]);
        let mut b = lab.open(&lab.b, own).unwrap();
        let bytes = pattern(19 * 1040 + 40);
        let mut first = send_super(&mut t, flow(from, to), 1040, &bytes);
        let got = until(&mut t, &mut b, 20);
        // And once more, now that the peer is known.
        for round in 0..2 {
            let got = if round == 0 {
                got.iter().map(|g| (g.ids, g.bytes.clone())).collect()
            } else {
                first = send_super(&mut t, flow(from, to), 1040, &bytes);
                until(&mut t, &mut b, 20).into_iter().map(|g| (g.ids, g.bytes)).collect::<Vec<_>>()
            };
            for ((i, (ids, packet)), segment) in (0..).zip(got).zip(bytes.chunks(1040)) {
                let fields = if to.is_ipv4() {
                    IpFields { id: first + i, flags_fragment: 0x4000 }
                } else {
                    IpFields { id: 0, flags_fragment: 0 }
                };
                assert_eq!((ids, &packet[..]), (RxIds::Known(fields), segment));
            }
        }
    }
    assert_eq!(t.lost(), Default::default());
}

#[test]
fn two_bridged_taps_pass_superframes_whole() {
    let lab = Lab::new();
    let (mut t, mut u) = (tap(&lab, "t0", MAC, 9), tap(&lab, "t1", OTHER, 8));
    bridge(&lab, &["t0", "t1"]);
    for net in ["10.88.0.", "fd88::"] {
        let f = flow(address(&format!("{net}9")), address(&format!("{net}8")));
        let bytes = pattern(14 * 4120 + 100);
        let first = send_super(&mut t, f, 4120, &bytes);
        let got = until(&mut t, &mut u, 1).remove(0);
        let (id, flags_fragment) = if f.dst.is_ipv4() { (first, 0x4000) } else { (0, 0) };
        assert_eq!(got, Got { flow: f, ids: RxIds::Known(IpFields { id, flags_fragment }), segment: 4120, bytes });
    }
}

#[test]
fn a_tap_answers_ping_and_arp_and_ndp() {
    let lab = Lab::new();
    let mut t = tap(&lab, "t0", MAC, 9);
    kernel_end(&lab, "t0");
    driven(&mut t, || {
        for line in ["-c 3 -i 0.05 10.88.0.9", "-c 2 -i 0.05 -s 8972 -M do 10.88.0.9", "-c 3 -i 0.05 fd88::9"] {
            ip(&format!("netns exec {} ping -W 3 -n -q {line}", lab.a));
        }
    });
    assert_eq!(t.neighbor_counters().echoes, 8);
}

/// SEND, WRITE and READ of 1 MiB, both ways, with superframes and without.
fn exchanges(peer: impl Fn(IpAddr) -> Box<dyn Device>, taps: impl Fn(usize) -> TapDevice, host: u8) {
    for segments_max in [1, 64] {
        for net in ["10.88.0.", "fd88::"] {
            let (x, y) = (address(&format!("{net}9")), address(&format!("{net}{host}")));
            // A TAP is gone when the device is, so each has a fresh one.
            let t = taps(segments_max);
            exchange_of(Box::new(t), peer(y), x, y, MIB, PathMtu::B4096);
            let t = taps(segments_max);
            exchange_of(peer(y), Box::new(t), y, x, MIB, PathMtu::B4096);
        }
    }
}

#[test]
fn tap_to_a_packet_socket_on_its_kernel_end() {
    let lab = Lab::new();
    let taps = |segments_max| {
        let t = tap_of(&lab, "t0", MAC, 9, segments_max);
        kernel_end(&lab, "t0");
        t
    };
    let peer = |_| -> Box<dyn Device> {
        Box::new(patiently(|| inside(&lab.a, || AfPacket::open(AfPacketConfig::shared("t0")))))
    };
    exchanges(peer, taps, 1);
}

#[test]
fn tap_to_a_udp_socket_on_the_kernels_address() {
    let lab = Lab::new();
    let taps = |segments_max| {
        let t = tap_of(&lab, "t0", MAC, 9, segments_max);
        kernel_end(&lab, "t0");
        // The kernel keeps less than 1 MiB for a neighbour that it does not know yet.
        for net in ["10.88.0.", "fd88::"] {
            ip(&format!("-n {} neigh replace {net}9 lladdr {MAC} dev t0", lab.a));
        }
        t
    };
    let peer = |y| -> Box<dyn Device> { Box::new(patiently(|| inside(&lab.a, || UdpDevice::open(y)))) };
    exchanges(peer, taps, 1);
}

#[test]
fn tap_to_tap_over_a_bridge() {
    let lab = Lab::new();
    ip(&format!("-n {} link add br0 mtu 9000 type bridge mcast_snooping 0", lab.a));
    ip(&format!("-n {} link set br0 up", lab.a));
    let joined = |name: &str, mac, host, segments_max| {
        let t = tap_of(&lab, name, mac, host, segments_max);
        ip(&format!("-n {} link set {name} master br0", lab.a));
        t
    };
    let taps = |segments_max| joined("t0", MAC, 9, segments_max);
    let peer = |_| -> Box<dyn Device> { Box::new(joined("t1", OTHER, 8, 64)) };
    exchanges(peer, taps, 8);
}

#[test]
fn a_tap_that_was_there_stays_and_one_that_was_made_goes_unless_kept() {
    let lab = Lab::new();
    let there = |name: &str| inside(&lab.a, || InterfaceFacts::of(name)).is_ok();
    let own = |name: &str| TapConfig::new(name, MAC, vec![address("10.88.0.9")]);
    let open = |config: TapConfig| inside(&lab.a, || TapDevice::open(config));
    let made = open(own("t0")).unwrap();
    assert_eq!(made.capabilities().name, "tap:t0");
    assert_eq!(made.capabilities().path_mtu, PathMtu::B1024);
    drop(made);
    let end = now() + Duration::from_secs(5);
    while there("t0") {
        assert!(now() < end, "it goes, at the latest with another test's child that holds its descriptor for a moment");
    }
    drop(open(TapConfig { persistent: true, ..own("t1") }).unwrap());
    assert!(there("t1"));
    let again = patiently(|| open(own("t1")));
    let used = open(own("t1")).map(|_| ()).unwrap_err();
    assert!(matches!(used, DeviceError::TapInUse { .. }), "{used}");
    drop(again);
    assert!(there("t1"));
    // With several queues, and down.
    ip(&format!("-n {} tuntap add dev t2 mode tap multi_queue", lab.a));
    let down = open(own("t2")).map(|_| ()).unwrap_err();
    assert!(matches!(down, DeviceError::InterfaceDown { .. }), "{down}");
    ip(&format!("-n {} link set t2 up", lab.a));
    drop(patiently(|| open(own("t2"))));
    assert!(there("t2"));
}

#[test]
fn what_cannot_be_opened_says_why() {
    let lab = Lab::new();
    let open = |config: TapConfig| loop {
        match inside(&lab.a, || TapDevice::open(config.clone())) {
            // What failed a moment ago: another test's child may hold the descriptor.
            Err(DeviceError::TapInUse { .. }) => std::thread::sleep(Duration::from_millis(5)),
            other => break other.map(|_| ()).unwrap_err(),
        }
    };
    // Each has a name of its own: one that was made for a moment may not be gone yet.
    let own = |name: &str| TapConfig::new(name, MAC, vec![address("10.88.0.9")]);
    assert!(matches!(open(own("v0")), DeviceError::NotTap { .. }));
    assert!(matches!(open(own("a-name-too-long-")), DeviceError::NoInterface { .. }));
    assert!(matches!(open(TapConfig { addresses: vec![], ..own("t1") }), DeviceError::NoAddress { .. }));
    assert!(matches!(open(TapConfig { mtu: Some(300), ..own("t2") }), DeviceError::MtuTooSmall { .. }));
    let group = MacAddr([3, 0, 0, 0, 0, 1]);
    assert!(matches!(open(TapConfig { mac: group, ..own("t3") }), DeviceError::NotOurMac { .. }));
    ip(&format!("-n {} tuntap add dev t0 mode tap", lab.a));
    ip(&format!("-n {} link set t0 up", lab.a));
    kernel_end(&lab, "t0");
    let mac = inside(&lab.a, || InterfaceFacts::of("t0")).unwrap().mac.unwrap();
    assert!(matches!(open(TapConfig { mac, ..own("t0") }), DeviceError::MacTaken { .. }));
    let address = address("fd88::1");
    let taken = open(TapConfig { addresses: vec![address], ..own("t0") });
    assert!(matches!(taken, DeviceError::AddressTaken { address: a, .. } if a == address));
}

#[test]
fn in_a_vlan_by_tag_superframes_pass_too() {
    let lab = Lab::new();
    let on = |name: &str, mac, host: u8| TapConfig {
        mtu: Some(9000),
        vlan: Some(VlanTag { id: 7, priority: 0 }),
        ..TapConfig::new(name, mac, vec![IpAddr::from([10, 88, 0, host])])
    };
    let open = |config: TapConfig| inside(&lab.a, || TapDevice::open(config)).unwrap();
    let (mut t, mut u) = (open(on("t0", MAC, 9)), open(on("t1", OTHER, 8)));
    bridge(&lab, &["t0", "t1"]);
    let f = flow(address("10.88.0.9"), address("10.88.0.8"));
    let bytes = pattern(5 * 1040 + 40);
    send_super(&mut t, f, 1040, &bytes);
    let got = until(&mut t, &mut u, 1).remove(0);
    assert_eq!((got.segment, got.bytes, got.flow.vlan.map(|v| v.id)), (1040, bytes, Some(7)));
}
