//! AF_XDP devices on veth pairs, natively and behind the driver.
//!
//! Needs a kernel with AF_XDP in several buffers (Linux 6.6, CONFIG_XDP_SOCKETS); without it the tests fail and say so.

use uroce::device::af_xdp::{AfXdp, AfXdpConfig, XdpMode, XdpQueues, XdpStep, XdpWay};
use uroce::device::netlink::XdpAttachment;

use super::rc::exchange_in;
use super::*;

const NATIVE: XdpWay = XdpWay { native: true, zero_copy: false };
const GENERIC: XdpWay = XdpWay { native: false, zero_copy: false };
const MODES: [(XdpMode, XdpWay); 2] = [(XdpMode::Native, NATIVE), (XdpMode::Generic, GENERIC)];
const PAIRS: [(&str, &str); 2] = [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")];
const MIB: usize = 1 << 20;

/// Opens a device where an earlier one was: another test's child may hold its descriptors between fork and exec.
fn open(ns: &str, config: &AfXdpConfig) -> AfXdp {
    let end = now() + Duration::from_secs(5);
    loop {
        match inside(ns, || AfXdp::open(config)) {
            Err(DeviceError::PortInUse { .. } | DeviceError::NoXdp { .. }) if now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("these tests need AF_XDP (CONFIG_XDP_SOCKETS, Linux 6.6): {error}"),
            Ok(device) => return device,
        }
    }
}

fn shared(ns: &str, mode: XdpMode) -> AfXdp {
    open(ns, &AfXdpConfig { mode, ..AfXdpConfig::shared("v0") })
}

fn jumbo(lab: &Lab) {
    for ns in [&lab.a, &lab.b] {
        ip(&format!("-n {ns} link set v0 mtu 9000"));
    }
}

fn attachment(ns: &str) -> XdpAttachment {
    inside(ns, || {
        let index = InterfaceFacts::of("v0").unwrap().index;
        Netlink::open().unwrap().xdp(index).unwrap()
    })
}

#[test]
fn messages_cross_in_both_modes_and_over_both_ip_versions() {
    let lab = Lab::new();
    jumbo(&lab);
    for (mode, way) in MODES {
        for (x, y) in PAIRS {
            for mtu in [PathMtu::B1024, PathMtu::B4096] {
                let (a, b) = (shared(&lab.a, mode), shared(&lab.b, mode));
                assert_eq!((a.way(), a.capabilities().path_mtu), (way, PathMtu::B4096));
                assert_eq!(a.capabilities().name, format!("xdp:v0 ({way})"));
                exchange_in(Box::new(a), Box::new(b), (address(x), address(y)), MIB, mtu);
            }
        }
    }
}

#[test]
fn with_packet_and_udp_devices_both_ways() {
    let lab = Lab::new();
    jumbo(&lab);
    for (mode, _) in MODES {
        for (x, y) in PAIRS {
            let (x, y) = (address(x), address(y));
            let xdp = || Box::new(shared(&lab.a, mode));
            let packet = || Box::new(patiently(|| lab.open(&lab.b, AfPacketConfig::shared("v0"))));
            let udp = || Box::new(patiently(|| inside(&lab.b, || UdpDevice::open(y))));
            for mtu in [PathMtu::B1024, PathMtu::B4096] {
                exchange_in(xdp(), packet(), (x, y), MIB, mtu);
                exchange_in(packet(), xdp(), (y, x), MIB, mtu);
                exchange_in(xdp(), udp(), (x, y), MIB, mtu);
                exchange_in(udp(), xdp(), (y, x), MIB, mtu);
            }
        }
    }
}

#[test]
fn auto_takes_the_fastest_and_says_what_it_passed_over() {
    let lab = Lab::new();
    let device = shared(&lab.a, XdpMode::Auto);
    assert_eq!(device.way(), NATIVE, "a veth copies");
    let [zero_copy] = device.refused() else { panic!("{:?}", device.refused()) };
    assert_eq!(zero_copy.step, XdpStep::Bind { queue: 0 });
    assert!(zero_copy.to_string().contains("no zero-copy"), "{zero_copy}");
}

#[test]
fn the_filter_ends_with_the_device() {
    let lab = Lab::new();
    for (mode, attached) in [(XdpMode::Native, XdpAttachment::Driver), (XdpMode::Generic, XdpAttachment::Generic)] {
        assert_eq!(attachment(&lab.a), XdpAttachment::None);
        let device = shared(&lab.a, mode);
        assert_eq!(attachment(&lab.a), attached);
        // Two filters cannot be on one interface: the second is told of the first, in each way.
        let own = AfXdpConfig::own("v0", OWN_MAC, vec![address("10.77.0.9")]);
        let error = inside(&lab.a, || AfXdp::open(&own)).map(|_| ()).unwrap_err();
        assert!(matches!(&error, DeviceError::NoXdp { tried, .. } if tried.0.len() == 3), "{error}");
        assert!(error.to_string().contains("another XDP program"), "{error}");
        drop(device);
        let end = now() + Duration::from_secs(5);
        while attachment(&lab.a) != XdpAttachment::None {
            assert!(now() < end, "still attached");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn the_kernel_hears_all_that_is_not_for_us() {
    let lab = Lab::new();
    for (mode, _) in MODES {
        let mut device = shared(&lab.b, mode);
        driven(&mut device, || {
            for line in ["-c 3 -i 0.05 10.77.0.2", "-c 2 -i 0.05 -s 2172 -M do 10.77.0.2", "-c 3 -i 0.05 fd77::2"] {
                ip(&format!("netns exec {} ping -W 3 -n -q {line}", lab.a));
            }
            let there = inside(&lab.b, || UdpSocket::bind("10.77.0.2:4790").unwrap());
            inside(&lab.a, || UdpSocket::bind("10.77.0.1:0").unwrap().send_to(b"hello", "10.77.0.2:4790").unwrap());
            there.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut text = [0; 8];
            assert_eq!(there.recv(&mut text).unwrap(), 5);
        });
        drop(device);
    }
}

#[test]
fn an_own_address_is_resolved_and_answers_ping() {
    let lab = Lab::new();
    for (mode, _) in MODES {
        let own = vec![address("10.77.0.9"), address("fd77::9")];
        let mut b = open(&lab.b, &AfXdpConfig { mode, ..AfXdpConfig::own("v0", OWN_MAC, own) });
        driven(&mut b, || {
            for line in ["-c 3 -i 0.05 10.77.0.9", "-c 3 -i 0.05 fd77::9"] {
                ip(&format!("netns exec {} ping -W 3 -n -q {line}", lab.a));
            }
        });
        assert_eq!(b.neighbor_counters().echoes, 6);
        drop(b);
        for (x, y) in [("10.77.0.8", "10.77.0.9"), ("fd77::8", "fd77::9")] {
            let own = |host, ip| AfXdpConfig {
                mode,
                ..AfXdpConfig::own("v0", MacAddr([2, 0x77, 0, 0, 0, host]), vec![address(ip)])
            };
            let (a, b) = (open(&lab.a, &own(8, x)), open(&lab.b, &own(9, y)));
            exchange_in(Box::new(a), Box::new(b), (address(x), address(y)), MIB, PathMtu::B2048);
        }
    }
}

#[test]
fn tags_stand_in_the_frame() {
    let lab = Lab::new();
    let mac = |host| MacAddr([2, 0x77, 0, 0, 0, host]);
    for (mode, _) in MODES {
        for net in ["10.78.0.", "fd78::"] {
            let ip = |host: u8| address(&format!("{net}{host}"));
            let on = |id, host| AfXdpConfig {
                mode,
                vlan: Some(VlanTag { id, priority: 3 }),
                ..AfXdpConfig::own("v0", mac(host), vec![ip(host)])
            };
            let (mut a, mut b) = (open(&lab.a, &on(7, 1)), open(&lab.b, &on(7, 2)));
            let there = flow(ip(1), ip(2));
            send(&mut a, now(), there, &packet(1));
            assert_eq!(until(&mut a, &mut b, 1)[0].flow.vlan, Some(VlanTag { id: 7, priority: 3 }));
            exchange_in(Box::new(a), Box::new(b), (ip(1), ip(2)), MIB, PathMtu::B2048);
            // With a packet device on the VLAN; and nothing from one that is not.
            let mut b = open(&lab.b, &on(7, 2));
            let beside = |vlan| AfPacketConfig { vlan, ..AfPacketConfig::own("v0", mac(1), vec![ip(1)]) };
            for vlan in [None, Some(VlanTag { id: 8, priority: 0 })] {
                let mut stranger = lab.open(&lab.a, beside(vlan)).unwrap();
                send(&mut stranger, now(), there, &packet(2));
                b.wait(Some(Duration::from_millis(50))).unwrap();
                assert_eq!(take(&mut b), []);
            }
            let a = lab.open(&lab.a, beside(Some(VlanTag { id: 7, priority: 0 }))).unwrap();
            exchange_in(Box::new(a), Box::new(b), (ip(1), ip(2)), MIB, PathMtu::B2048);
        }
    }
}

/// A pair with four queues each way.
fn four_queues() -> Lab {
    let lab = Lab::new();
    let (a, b) = (&lab.a, &lab.b);
    ip(&format!("-n {a} link del v0"));
    let queues = "numtxqueues 4 numrxqueues 4";
    ip(&format!("link add v0 netns {a} mtu 2200 {queues} type veth peer name v0 netns {b} mtu 2200 {queues}"));
    for (ns, host) in [(a, 1), (b, 2)] {
        ip(&format!("-n {ns} addr add 10.77.0.{host}/24 dev v0"));
        ip(&format!("-n {ns} link set v0 up"));
    }
    lab
}

#[test]
fn every_queue_is_heard_with_a_socket_or_without() {
    let lab = four_queues();
    for (queues, sockets) in [(XdpQueues::All, 4), (XdpQueues::First(2), 2), (XdpQueues::One(3), 1)] {
        let mut b = open(&lab.b, &AfXdpConfig { queues, ..AfXdpConfig::shared("v0") });
        assert_eq!((b.queues(), b.way()), (sockets, NATIVE));
        let mut a = patiently(|| inside(&lab.a, || AfPacket::open(AfPacketConfig::shared("v0"))));
        // The kernel spreads flows over the queues by their ports.
        let flows = (0..64).map(|i| Flow { src_port: 0xC000 + i, ..flow(address("10.77.0.1"), address("10.77.0.2")) });
        for f in flows.clone() {
            send(&mut a, now(), f, &packet(1));
        }
        let mut ports: Vec<u16> = until(&mut a, &mut b, 64).iter().map(|got| got.flow.src_port).collect();
        ports.sort_unstable();
        assert_eq!(ports, flows.map(|f| f.src_port).collect::<Vec<_>>());
        assert_eq!(b.lost(), Default::default());
        let counters = b.counters();
        assert!(counters.direct > 0, "{counters:?}");
        assert_eq!(counters.through_kernel >= 8, sockets < 4, "{counters:?} with {sockets} sockets");
    }
    let config = AfXdpConfig { queues: XdpQueues::One(9), ..AfXdpConfig::shared("v0") };
    let error = inside(&lab.b, || AfXdp::open(&config)).map(|_| ()).unwrap_err();
    assert!(matches!(&error, DeviceError::NoXdp { .. }) && error.to_string().contains("no such queue"), "{error}");
}

#[test]
fn a_whole_ring_of_frames_arrives_in_order() {
    let lab = Lab::new();
    jumbo(&lab);
    for (mode, _) in MODES {
        let (mut a, mut b) = (shared(&lab.a, mode), shared(&lab.b, mode));
        let f = flow(address("10.77.0.1"), address("10.77.0.2"));
        send(&mut a, now(), f, &packet(0));
        until(&mut a, &mut b, 1);
        // Slots come back only when the frames before have been sent: three times as many as there are slots.
        let (count, mut next, mut got) = (800u16, 0u16, Vec::new());
        let end = now() + Duration::from_secs(10);
        while got.len() < usize::from(count) && now() < end {
            a.transmit(now(), usize::from(count - next).min(16), &mut |room| {
                let len = [16, 1000, 4000, 8900][usize::from(next) % 4];
                let out = &mut room.buf[room.headroom..];
                let header = write_outer(&f, room.ids.id(0), len, out).unwrap();
                out[header..header + len].fill(next as u8);
                next += 1;
                Some(TxBurst { flow: f, len: header + len, segment: len, segments: 1 })
            })
            .unwrap();
            b.wait(Some(Duration::from_millis(1))).unwrap();
            got.extend(take(&mut b));
        }
        assert_eq!((got.len(), a.lost(), b.lost()), (count.into(), Default::default(), Default::default()));
        let counters = b.counters();
        assert!(counters.direct > 800 && counters.through_kernel < 10, "{counters:?}");
        for (n, got) in got.iter().enumerate() {
            assert_eq!(got.bytes, vec![n as u8; [16, 1000, 4000, 8900][n % 4]], "frame {n}");
        }
    }
}

#[test]
fn busy_polling_is_an_option() {
    let lab = Lab::new();
    let config = AfXdpConfig { busy_poll: Some(20), ..AfXdpConfig::shared("v0") };
    let (a, b) = (open(&lab.a, &config), open(&lab.b, &config));
    exchange_in(Box::new(a), Box::new(b), (address("10.77.0.1"), address("10.77.0.2")), MIB, PathMtu::B2048);
}

#[test]
fn an_interface_that_goes_away_ends_the_device() {
    let lab = Lab::new();
    let mut a = shared(&lab.a, XdpMode::Native);
    ip(&format!("-n {} link del v0", lab.a));
    let f = flow(address("10.77.0.1"), address("10.77.0.2"));
    let end = now() + Duration::from_secs(5);
    loop {
        let sent = a.transmit(now(), 1, &mut |room| {
            let header = write_outer(&f, room.ids.id(0), 16, &mut room.buf[room.headroom..]).unwrap();
            Some(TxBurst { flow: f, len: header + 16, segment: 16, segments: 1 })
        });
        match sent.and_then(|_| a.receive(now(), 1, &mut |_| {})) {
            Err(DeviceError::Io { .. }) => break,
            other => assert!(now() < end, "{other:?}"),
        }
    }
}

/// Set in the process that this test starts as an ordinary user.
const AS_NOBODY: &str = "UROCE_TEST_XDP_AS_NOBODY";

#[test]
fn without_the_capabilities_the_error_names_them() {
    if std::env::var_os(AS_NOBODY).is_some() {
        let error = AfXdp::open(&AfXdpConfig::shared("v0")).map(|_| ()).unwrap_err();
        let DeviceError::MissingCapability { capability, .. } = &error else { panic!("{error}") };
        assert_eq!(*capability, "cap_net_raw,cap_net_admin,cap_bpf");
        return;
    }
    let lab = Lab::new();
    as_nobody(&lab.a, "ether::xdp::without_the_capabilities_the_error_names_them", (AS_NOBODY, "1"));
}
