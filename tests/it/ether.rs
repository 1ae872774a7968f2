//! Raw Ethernet devices on real interfaces: two network namespaces joined by a veth pair.
//!
//! Needs root (`cap_net_admin`, `cap_net_raw`, `cap_sys_admin`), `ip` and `ping`; without them the tests fail and say so.

mod groups;
mod large;
mod marks;
mod rc;
mod ring;
mod superframes;
mod tap;
mod xdp;

use std::collections::HashSet;
use std::net::{IpAddr, UdpSocket};
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use uroce::burst::{Medium, RxIds, TxBurst};
use uroce::device::af_packet::{AfPacket, AfPacketConfig};
use uroce::device::netlink::{InterfaceFacts, Netlink};
use uroce::device::pnet::PnetDevice;
use uroce::device::udp::UdpDevice;
use uroce::device::{Device, DeviceError, enter_netns};
use uroce::time::Instant;
use uroce::types::{MacAddr, PathMtu};
use uroce::wire::{Flow, IpFields, VlanTag, write_outer};

const OWN_MAC: MacAddr = MacAddr([2, 0x77, 0, 0, 0, 9]);

/// Two namespaces, `a` and `b`, with the two ends of a veth pair, both called `v0`: 10.77.0.1/24 and fd77::1/64 in `a`, .2
/// and ::2 in `b`. Gone when dropped.
struct Lab {
    a: String,
    b: String,
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|e| panic!("these tests need `{program}`: {e}"));
    assert!(
        output.status.success(),
        "`{program} {}` failed (these tests need root and network namespaces): {}",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr)
    );
}

fn ip(line: &str) {
    run("ip", &line.split_whitespace().collect::<Vec<_>>());
}

/// Runs `f` on a thread inside namespace `ns`. What it opens there stays there.
fn inside<T: Send>(ns: &str, f: impl FnOnce() -> T + Send) -> T {
    let path = PathBuf::from("/run/netns").join(ns);
    std::thread::scope(|s| {
        let thread = s.spawn(|| {
            enter_netns(&path).expect("entering a network namespace needs root");
            f()
        });
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Lab {
    fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let n = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = |side| format!("uroce-{}-{n}{side}", std::process::id());
        let lab = Self { a: name('a'), b: name('b') };
        let (a, b) = (&lab.a, &lab.b);
        for ns in [a, b] {
            ip(&format!("netns add {ns}"));
            // Addresses are usable at once.
            inside(ns, || std::fs::write("/proc/sys/net/ipv6/conf/default/accept_dad", "0").unwrap());
            ip(&format!("-n {ns} link set lo up"));
        }
        ip(&format!("link add v0 netns {a} mtu 2200 type veth peer name v0 netns {b} mtu 2200"));
        for (ns, host) in [(a, 1), (b, 2)] {
            ip(&format!("-n {ns} addr add 10.77.0.{host}/24 dev v0"));
            ip(&format!("-n {ns} addr add fd77::{host}/64 dev v0 nodad"));
            ip(&format!("-n {ns} link set v0 up"));
        }
        // The link-local address comes with the carrier, a little later.
        for ns in [a, b] {
            let addresses = || inside(ns, || InterfaceFacts::of("v0").unwrap().addresses.len());
            let end = now() + Duration::from_secs(60);
            while addresses() < 3 {
                assert!(now() < end, "no link-local address came up; is IPv6 off?");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        lab
    }

    fn shared(&self, ns: &str) -> AfPacket {
        self.open(ns, AfPacketConfig::shared("v0")).unwrap()
    }

    fn open(&self, ns: &str, config: AfPacketConfig) -> Result<AfPacket, DeviceError> {
        assert!([&self.a, &self.b].iter().any(|n| *n == ns));
        inside(ns, || AfPacket::open(config))
    }
}

/// Opens a device whose port, or TAP, an earlier one had: another test's child may hold its descriptors between fork and exec.
fn patiently<D>(open: impl Fn() -> Result<D, DeviceError>) -> D {
    let end = now() + Duration::from_secs(5);
    loop {
        match open() {
            Err(DeviceError::PortInUse { .. } | DeviceError::TapInUse { .. }) if now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            other => return other.unwrap(),
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        for ns in [&self.a, &self.b] {
            let _ = Command::new("ip").args(["netns", "del", ns]).output();
        }
    }
}

fn address(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn now() -> Instant {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    Instant::ZERO + START.get_or_init(std::time::Instant::now).elapsed()
}

fn flow(src: IpAddr, dst: IpAddr) -> Flow {
    Flow { src, dst, src_port: 0xC077, traffic_class: 0x68, hop_limit: 64, flow_label: 0, vlan: None }
}

/// Sends one packet (BTH to ICRC) as an endpoint would; returns the IPv4 identification.
fn send(device: &mut dyn Device, at: Instant, flow: Flow, packet: &[u8]) -> u16 {
    let mut id = None;
    let taken = device.transmit(at, 1, &mut |room| {
        assert_eq!(room.medium, Medium::Ip);
        id = Some(room.ids.id(0));
        let out = &mut room.buf[room.headroom..];
        let header = write_outer(&flow, room.ids.id(0), packet.len(), out).unwrap();
        out[header..header + packet.len()].copy_from_slice(packet);
        Some(TxBurst { flow, len: header + packet.len(), segment: packet.len(), segments: 1 })
    });
    assert_eq!(taken.unwrap(), 1);
    id.unwrap()
}

#[derive(Debug, PartialEq)]
struct Got {
    flow: Flow,
    ids: RxIds,
    segment: usize,
    bytes: Vec<u8>,
}

/// What waits at `device`.
fn take(device: &mut dyn Device) -> Vec<Got> {
    let mut got = Vec::new();
    let count = device.receive(now(), usize::MAX, &mut |b| {
        got.push(Got { flow: b.flow, ids: b.ids, segment: b.segment, bytes: b.bytes.to_vec() });
    });
    assert_eq!(count.unwrap(), got.len());
    got
}

/// Drives both until `to` received `count` bursts, at most five seconds.
fn until(from: &mut dyn Device, to: &mut dyn Device, count: usize) -> Vec<Got> {
    let end = now() + Duration::from_secs(5);
    let mut got = Vec::new();
    while got.len() < count && now() < end {
        to.wait(Some(Duration::from_millis(1))).unwrap();
        got.extend(take(to));
        assert_eq!(take(from), [], "nothing comes back");
        from.transmit(now(), 1, &mut |_| None).unwrap();
    }
    assert_eq!(got.len(), count, "sender lost {:?}, receiver lost {:?}", from.lost(), to.lost());
    got
}

/// Drives `device` on a thread while `f` runs.
fn driven<T>(device: &mut dyn Device, f: impl FnOnce() -> T) -> T {
    let stop = AtomicBool::new(false);
    let guard = StopOnDrop(&stop);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                device.wait(Some(Duration::from_millis(2))).unwrap();
                take(device);
            }
        });
        let value = f();
        drop(guard);
        value
    })
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn packet(n: u8) -> Vec<u8> {
    (0..64).map(|i| i ^ n).collect()
}

#[test]
fn shared_addresses_carry_packets_in_the_order_of_the_gid_table() {
    let lab = Lab::new();
    let (mut a, mut b) = (lab.shared(&lab.a), lab.shared(&lab.b));
    let (from, to) = (a.capabilities().addresses.clone(), b.capabilities().addresses.clone());
    assert_eq!(a.capabilities().path_mtu, PathMtu::B2048);
    assert_eq!((to[0], to[2]), (address("10.77.0.2"), address("fd77::2")));
    let mac = b.capabilities().mac.unwrap();
    assert_eq!(to[1], uroce::types::Gid::link_local(mac).ip());
    for i in 0..3 {
        let f = flow(from[i], to[i]);
        let sent: Vec<u16> = (0..3).map(|n| send(&mut a, now(), f, &packet(n))).collect();
        assert_eq!(sent, [sent[0], sent[0] + 1, sent[0] + 2], "ids rise");
        for (n, got) in until(&mut a, &mut b, 3).into_iter().enumerate() {
            let fields = if f.dst.is_ipv4() {
                IpFields { id: sent[n], flags_fragment: 0x4000 }
            } else {
                IpFields { id: 0, flags_fragment: 0 }
            };
            let bytes = packet(n as u8);
            assert_eq!(got, Got { flow: f, ids: RxIds::Known(fields), segment: 64, bytes });
        }
    }
    assert_eq!((a.lost(), b.lost()), Default::default());
}

#[test]
fn a_whole_batch_of_full_packets_arrives_in_order() {
    let lab = Lab::new();
    let (mut a, mut b) = (lab.shared(&lab.a), lab.shared(&lab.b));
    let f = flow(address("10.77.0.1"), address("10.77.0.2"));
    send(&mut a, now(), f, &packet(0));
    until(&mut a, &mut b, 1);
    let count = 500;
    let mut next = 0u16;
    let len = a.capabilities().mtu - 28;
    while next < count {
        let left = usize::from(count - next);
        a.transmit(now(), left, &mut |room| {
            let out = &mut room.buf[room.headroom..];
            let header = write_outer(&f, room.ids.id(0), len, out).unwrap();
            out[header..header + len].fill(next as u8);
            next += 1;
            Some(TxBurst { flow: f, len: header + len, segment: len, segments: 1 })
        })
        .unwrap();
    }
    let got = until(&mut a, &mut b, count.into());
    for (n, got) in got.iter().enumerate() {
        assert!(got.bytes.len() == 2200 - 28 && got.bytes.iter().all(|&v| v == n as u8), "packet {n}");
    }
}

/// Sends 1,000 bytes from a kernel UDP socket to be segmented into 300 each (SOL_UDP 17, UDP_SEGMENT 103). Every Debian has
/// perl, and no safe Rust sets this option.
const SUPERFRAME: &str = r#"
    socket(S, PF_INET, SOCK_DGRAM, 0) or die $!;
    setsockopt(S, 17, 103, pack("i", 300)) or die $!;
    defined(send(S, join("", map { chr(64 + $_ / 100) } 0 .. 999), 0, pack_sockaddr_in(4791, inet_aton("10.77.0.2")))) or die $!;
"#;

#[test]
fn a_superframe_that_veth_hands_over_whole_is_a_burst() {
    let lab = Lab::new();
    let mut b = lab.shared(&lab.b);
    run("ip", &["netns", "exec", &lab.a, "perl", "-MSocket", "-e", SUPERFRAME]);
    b.wait(Some(Duration::from_secs(1))).unwrap();
    let got = take(&mut b);
    assert_eq!((got.len(), got[0].segment, got[0].bytes.len()), (1, 300, 1000));
    assert_eq!((got[0].bytes[0], got[0].bytes[999]), (64, 73));
    assert_eq!(b.lost(), Default::default());
}

#[test]
fn the_kernel_does_not_refuse_our_peers() {
    let lab = Lab::new();
    let refused = || {
        inside(&lab.a, || {
            let socket = UdpSocket::bind("10.77.0.1:0").unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
            socket.connect("10.77.0.2:4791").unwrap();
            socket.send(&packet(1)).unwrap();
            socket.recv(&mut [0; 64]).unwrap_err().kind() == std::io::ErrorKind::ConnectionRefused
        })
    };
    assert!(refused(), "without a device the kernel answers port unreachable");
    let mut b = lab.shared(&lab.b);
    assert!(!refused());
    assert_eq!(take(&mut b).len(), 1, "and the device has the packet");
}

#[test]
fn an_own_address_answers_ping_and_arp_and_ndp() {
    let lab = Lab::new();
    let own = vec![address("10.77.0.9"), address("fe80::9"), address("fd77::9")];
    let mut b = lab.open(&lab.b, AfPacketConfig::own("v0", OWN_MAC, own)).unwrap();
    driven(&mut b, || {
        for line in [
            "-c 3 -i 0.05 10.77.0.9",
            "-c 2 -i 0.05 -s 2172 -M do 10.77.0.9",
            "-c 3 -i 0.05 fd77::9",
            "-c 1 fe80::9%v0",
        ] {
            let command = format!("netns exec {} ping -W 3 -n -q {line}", lab.a);
            ip(&command);
        }
    });
    assert_eq!(b.neighbor_counters().echoes, 9);
    assert!(b.neighbor_counters().answers >= 3);
    // And the kernel of the peer has learnt its MAC.
    let learnt = inside(&lab.a, || {
        let index = InterfaceFacts::of("v0").unwrap().index;
        Netlink::open().unwrap().neighbor(address("10.77.0.9"), index).unwrap()
    });
    assert_eq!(learnt, Some(OWN_MAC));
}

#[test]
fn an_own_address_and_a_shared_one_talk_both_ways() {
    let lab = Lab::new();
    let own = vec![address("10.77.0.9"), address("fd77::9")];
    let (mut a, mut b) = (lab.shared(&lab.a), lab.open(&lab.b, AfPacketConfig::own("v0", OWN_MAC, own)).unwrap());
    assert_eq!(b.capabilities().mac, Some(OWN_MAC));
    for (x, y) in [("10.77.0.1", "10.77.0.9"), ("fd77::1", "fd77::9")] {
        let there = flow(address(x), address(y));
        send(&mut a, now(), there, &packet(1));
        assert_eq!(until(&mut a, &mut b, 1)[0].flow, there);
        let back = flow(address(y), address(x));
        send(&mut b, now(), back, &packet(2));
        assert_eq!(until(&mut b, &mut a, 1)[0].flow, back);
    }
}

#[test]
fn vlan_tags_go_out_and_come_in() {
    let lab = Lab::new();
    let on = |id, priority, host: u8| AfPacketConfig {
        vlan: Some(VlanTag { id, priority }),
        ..AfPacketConfig::own("v0", MacAddr([2, 0x77, 0, 0, 0, host]), vec![IpAddr::from([10, 78, 0, host])])
    };
    let mut a = lab.open(&lab.a, on(7, 3, 1)).unwrap();
    let mut b = lab.open(&lab.b, on(7, 0, 2)).unwrap();
    // On the same interface, with the same MAC and address: none of them hears VLAN 7.
    let mut untagged = lab.open(&lab.b, AfPacketConfig { vlan: None, ..on(7, 0, 2) }).unwrap();
    let mut other = lab.open(&lab.b, on(8, 0, 2)).unwrap();
    let there = flow(address("10.78.0.1"), address("10.78.0.2"));
    send(&mut a, now(), there, &packet(1));
    // The ARP question and its answer were tagged too.
    let got = until(&mut a, &mut b, 1);
    assert_eq!(got[0].flow, Flow { vlan: Some(VlanTag { id: 7, priority: 3 }), ..there });
    let back = flow(address("10.78.0.2"), address("10.78.0.1"));
    send(&mut b, now(), back, &packet(2));
    assert_eq!(until(&mut b, &mut a, 1)[0].flow.vlan, Some(VlanTag { id: 7, priority: 0 }));
    // A flow's own tag goes before the device's.
    send(&mut a, now(), Flow { vlan: Some(VlanTag { id: 7, priority: 5 }), ..there }, &packet(3));
    assert_eq!(until(&mut a, &mut b, 1)[0].flow.vlan, Some(VlanTag { id: 7, priority: 5 }));
    assert_eq!((take(&mut untagged), take(&mut other)), (vec![], vec![]));
    // VLAN 0 states a priority alone: in a VLAN it takes the device's id, outside of one no tag at all.
    let alone = Flow { vlan: Some(VlanTag { id: 0, priority: 6 }), ..there };
    send(&mut a, now(), alone, &packet(4));
    assert_eq!(until(&mut a, &mut b, 1)[0].flow.vlan, Some(VlanTag { id: 7, priority: 6 }));
    let mut plain = lab.open(&lab.a, AfPacketConfig { vlan: None, ..on(7, 0, 1) }).unwrap();
    send(&mut plain, now(), alone, &packet(5));
    assert_eq!(until(&mut plain, &mut untagged, 1)[0].flow.vlan, None);
    assert_eq!(take(&mut b), []);
}

#[test]
fn a_route_through_a_gateway_is_taken() {
    let lab = Lab::new();
    ip(&format!("-n {} route add 192.0.2.0/24 via 10.77.0.2", lab.a));
    let mut a = lab.shared(&lab.a);
    let gateway_mac = inside(&lab.b, || InterfaceFacts::of("v0").unwrap().mac.unwrap());
    let far = address("192.0.2.9");
    let mut b = lab.open(&lab.b, AfPacketConfig::own("v0", gateway_mac, vec![far])).unwrap();
    let f = flow(address("10.77.0.1"), far);
    send(&mut a, now(), f, &packet(1));
    // The kernel of b answers for the gateway's address, and b has the gateway's MAC.
    assert_eq!(until(&mut a, &mut b, 1)[0].flow, f);
    let route = inside(&lab.a, || Netlink::open().unwrap().route(far, 0).unwrap());
    assert_eq!((route.gateway, route.source), (Some(address("10.77.0.2")), Some(address("10.77.0.1"))));
}

#[test]
fn a_silent_neighbour_costs_the_packets_that_waited_and_no_more() {
    let lab = Lab::new();
    let mut a = lab.shared(&lab.a);
    let f = flow(address("10.77.0.1"), address("10.77.0.200"));
    let start = now();
    for _ in 0..300 {
        send(&mut a, start, f, &packet(1));
    }
    assert_eq!(a.lost().transmit, 300 - 256, "256 wait for one next hop");
    let mut due = start;
    while let Some(next) = a.poll_timeout() {
        due = next;
        a.transmit(due, 1, &mut |_| None).unwrap();
    }
    assert_eq!(due - start, Duration::from_secs(3), "three questions, a second apart");
    assert_eq!(a.lost().transmit, 300);
    assert_eq!(a.neighbor_counters().solicits, 3);
    send(&mut a, due, f, &packet(0));
    assert_eq!(a.lost().transmit, 301, "unreachable: lost at once");
}

#[test]
fn what_we_send_to_ourselves_comes_back() {
    let lab = Lab::new();
    let mut a = lab.shared(&lab.a);
    for ours in a.capabilities().addresses.clone() {
        let f = flow(ours, ours);
        send(&mut a, now(), f, &packet(1));
        assert_eq!(a.poll_timeout(), Some(Instant::ZERO));
        let got = take(&mut a);
        assert_eq!((got.len(), got[0].flow, &got[0].bytes), (1, f, &packet(1)));
    }
    // What is not ours to send is lost.
    send(&mut a, now(), flow(address("10.77.0.3"), address("10.77.0.2")), &packet(1));
    assert_eq!(a.lost().transmit, 1);
}

#[test]
fn pnet_talks_to_af_packet() {
    let lab = Lab::new();
    let mut a = inside(&lab.a, || PnetDevice::open("v0")).unwrap();
    let mut b = lab.shared(&lab.b);
    assert_eq!(a.capabilities().name, "pnet:v0");
    assert!(inside(&lab.a, || matches!(PnetDevice::open("v0"), Err(DeviceError::PortInUse { .. }))));
    for (x, y) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        let there = flow(address(x), address(y));
        let id = send(&mut a, now(), there, &packet(1));
        let got = until(&mut a, &mut b, 1);
        assert_eq!(got[0].flow, there);
        if there.dst.is_ipv4() {
            assert_eq!(got[0].ids, RxIds::Known(IpFields { id, flags_fragment: 0x4000 }));
        }
        let back = flow(address(y), address(x));
        send(&mut b, now(), back, &packet(2));
        assert_eq!(until(&mut b, &mut a, 1)[0].bytes, packet(2));
    }
}

/// An ICMP message, true or forged, makes the kernel believe in a small path MTU. A packet cannot be made shorter, so it is
/// sent all the same.
#[test]
fn a_udp_device_believes_in_no_learned_path_mtu() {
    let lab = Lab::new();
    for (from, to) in [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")] {
        // What the kernel makes of the message: the route to this peer carries less (IPv6 never less than 1280).
        let learned = format!("-n {} route replace {to} dev v0 mtu 1280", lab.a);
        ip(&if from.contains(':') { learned.replace("-n", "-6 -n") } else { learned });
        let (src, dst) = (address(from), address(to));
        let mut a = inside(&lab.a, || UdpDevice::open(src).unwrap());
        let mut b = inside(&lab.b, || UdpDevice::open(dst).unwrap());
        let flow = Flow { src_port: a.source_ports().first().copied().unwrap_or(0xC077), ..flow(src, dst) };
        let packet = vec![0x5a; 2000];
        let end = now() + Duration::from_secs(5);
        let mut came = Vec::new();
        while came.is_empty() && now() < end {
            let mut once = Some(());
            a.transmit(now(), 1, &mut |room| {
                once.take()?;
                room.buf[room.headroom..room.headroom + packet.len()].copy_from_slice(&packet);
                let len = packet.len();
                Some(TxBurst { flow, len: room.headroom + len, segment: len, segments: 1 })
            })
            .unwrap();
            b.wait(Some(Duration::from_millis(50))).unwrap();
            came = take(&mut b);
        }
        assert_eq!(came.first().map(|got| got.bytes.len()), Some(2000), "{from}: lost {:?}", a.lost());
    }
}

#[test]
fn what_cannot_be_opened_says_why() {
    let lab = Lab::new();
    let open = |name: &str| lab.open(&lab.a, AfPacketConfig::shared(name)).map(|_| ()).unwrap_err();
    assert!(matches!(open("nosuch0"), DeviceError::NoInterface { name } if name == "nosuch0"));
    assert!(matches!(open("lo"), DeviceError::NotEthernet { name } if name == "lo"));
    let first = lab.shared(&lab.a);
    let ours: HashSet<IpAddr> = first.capabilities().addresses.iter().copied().collect();
    assert!(matches!(open("v0"), DeviceError::PortInUse { address } if ours.contains(&address)));
    drop(first);
    // Free again, as soon as no other test's child is between its fork and its exec with our descriptors.
    let end = now() + Duration::from_secs(5);
    while let Err(error) = lab.open(&lab.a, AfPacketConfig::shared("v0")) {
        assert!(matches!(error, DeviceError::PortInUse { .. }) && now() < end, "{error}");
        std::thread::sleep(Duration::from_millis(5));
    }
    ip(&format!("-n {} link set v0 mtu 300", lab.a));
    assert!(matches!(open("v0"), DeviceError::MtuTooSmall { mtu: 300, .. }));
    ip(&format!("-n {} link set v0 down", lab.a));
    assert!(matches!(open("v0"), DeviceError::InterfaceDown { name } if name == "v0"));
    ip(&format!("-n {} link set v0 up", lab.a));
    ip(&format!("-n {} addr flush dev v0", lab.a));
    assert!(matches!(open("v0"), DeviceError::NoAddress { name } if name == "v0"));
}

/// Set in the process that this test starts as an ordinary user.
const AS_NOBODY: &str = "UROCE_TEST_AS_NOBODY";

#[test]
fn without_the_capability_the_error_names_it() {
    if let Some(interface) = std::env::var_os(AS_NOBODY) {
        let name = interface.into_string().unwrap();
        let error = AfPacket::open(AfPacketConfig::shared(name)).map(|_| ()).unwrap_err();
        assert!(matches!(&error, DeviceError::MissingCapability { capability: "cap_net_raw", .. }), "{error}");
        return;
    }
    let lab = Lab::new();
    as_nobody(&lab.a, "ether::without_the_capability_the_error_names_it", (AS_NOBODY, "v0"));
}

/// Runs `test` again inside `ns` as an ordinary user, who has `variable` in his environment.
fn as_nobody(ns: &str, test: &str, variable: (&str, &str)) {
    // A copy, since an ordinary user may not be able to reach where the test was built.
    let place = tempfile::tempdir().unwrap();
    std::fs::set_permissions(place.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let copy = place.path().join("it");
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["--exact", test]).env(variable.0, variable.1).current_dir("/").uid(65534).gid(65534);
    let output = inside(ns, || {
        // Another test's child may hold the copy open for writing between its fork and its exec.
        let end = now() + Duration::from_secs(5);
        loop {
            match command.output() {
                Err(e) if e.kind() == std::io::ErrorKind::ExecutableFileBusy && now() < end => {
                    std::thread::sleep(Duration::from_millis(5));
                }
                output => return output.expect("running as another user needs root"),
            }
        }
    });
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}
