//! Superframes of UDP sockets on a wire: what the kernel makes of them, and who understands them.

use uroce::device::udp::{UdpDevice, UdpOptions};
use uroce::wire::{DONT_FRAGMENT, check, recover_id, seal};

use super::rc::exchange;
use super::*;

const ADDRESSES: [(&str, &str); 2] = [("10.77.0.1", "10.77.0.2"), ("fd77::1", "fd77::2")];
/// Expedited forwarding, congestion experienced.
const CLASS: u8 = 0xBB;

fn open(at: &str, segments_max: usize) -> UdpDevice {
    let options = UdpOptions { segments_max, ..UdpOptions::default() };
    patiently(|| UdpDevice::open_with(address(at), options))
}

/// Sends one burst whose segments have the ICRCs of the identifications that the device announces, until `to` receives, in
/// bursts or one by one, as many segments. What is sent before the neighbour is known may be lost.
fn cross(from: &mut UdpDevice, to: &mut dyn Device, flow: Flow, len: usize, segment: usize) -> Vec<Got> {
    let segments = len.div_ceil(segment);
    let mut got = Vec::new();
    let end = now() + Duration::from_secs(5);
    while got.is_empty() && now() < end {
        let mut once = Some(());
        from.transmit(now(), 1, &mut |room| {
            once.take()?;
            assert!(room.segments_max >= segments);
            let bytes = &mut room.buf[room.headroom..][..len];
            for (index, bytes) in bytes.chunks_mut(segment).enumerate() {
                let end = bytes.len() - 4;
                bytes.fill(index as u8);
                seal(&flow, IpFields { id: room.ids.id(index), flags_fragment: DONT_FRAGMENT }, bytes, end);
            }
            Some(TxBurst { flow, len, segment, segments })
        })
        .unwrap();
        to.wait(Some(Duration::from_millis(100))).unwrap();
        got = take(to);
    }
    while got.iter().map(|g| g.bytes.len()).sum::<usize>() < len && now() < end {
        to.wait(Some(Duration::from_millis(5))).unwrap();
        got.extend(take(to));
    }
    assert_eq!(got.iter().map(|g| g.bytes.len()).sum::<usize>(), len, "lost {:?}, {:?}", from.lost(), to.lost());
    got
}

fn udp_flow(src: &str, dst: &str) -> Flow {
    Flow { src_port: Flow::PORT, traffic_class: CLASS, hop_limit: 9, ..flow(address(src), address(dst)) }
}

#[test]
fn one_crosses_a_veth_pair_whole_and_packets_where_it_must_not() {
    let lab = Lab::new();
    for (x, y) in ADDRESSES {
        let f = udp_flow(x, y);
        let mut a = inside(&lab.a, || open(x, 64));
        for (segments_max, bursts) in [(64, 1), (1, 16)] {
            let mut b = inside(&lab.b, || open(y, segments_max));
            let got = cross(&mut a, &mut b, f, 15 * 2064 + 100, 2064);
            assert_eq!(got.len(), bursts);
            assert!(got.iter().all(|g| g.flow == f && g.segment <= 2064));
            let ids: Vec<u16> =
                got.iter().flat_map(|g| g.bytes.chunks(g.segment)).filter_map(|s| recover_id(&f, s)).collect();
            let expected: Vec<u16> = (0..16).map(|i| if f.src.is_ipv4() { i } else { 0 }).collect();
            assert_eq!(ids, expected);
            assert_eq!((a.lost(), b.lost(), a.cut_up()), Default::default());
        }
    }
}

#[test]
fn packets_that_the_kernel_cuts_are_those_that_were_announced() {
    let lab = Lab::new();
    // So that the kernel segments before it hands over.
    ip(&format!("-n {} link set v0 gso_max_segs 2", lab.a));
    for (x, y) in ADDRESSES {
        let f = udp_flow(x, y);
        let (mut a, mut b) =
            (inside(&lab.a, || open(x, 64)), patiently(|| lab.open(&lab.b, AfPacketConfig::shared("v0"))));
        for _ in 0..2 {
            let got = cross(&mut a, &mut b, f, 7 * 1040 + 64, 1040);
            assert_eq!(got.len(), 8, "one frame each");
            for (index, got) in (0..).zip(&got) {
                assert_eq!((got.flow.src, got.flow.traffic_class, got.flow.hop_limit), (f.src, CLASS, 9));
                let RxIds::Known(fields) = got.ids else { panic!("a raw device sees the header") };
                if f.src.is_ipv4() {
                    assert_eq!(fields, IpFields { id: index, flags_fragment: DONT_FRAGMENT });
                }
                assert!(check(&got.flow, fields, &got.bytes));
            }
        }
        assert_eq!((a.lost(), b.lost(), a.cut_up()), Default::default());
    }
}

#[test]
fn connections_with_and_without_them_on_either_side() {
    let lab = Lab::new();
    for (x, y) in ADDRESSES {
        for (at_a, at_b) in [(64, 64), (64, 1), (1, 64), (3, 64), (1, 1)] {
            let (a, b) = (inside(&lab.a, || open(x, at_a)), inside(&lab.b, || open(y, at_b)));
            exchange(Box::new(a), Box::new(b), address(x), address(y));
        }
        for segments_max in [1, 64] {
            let packet = || patiently(|| lab.open(&lab.a, AfPacketConfig::shared("v0")));
            let udp = || inside(&lab.b, || open(y, segments_max));
            exchange(Box::new(packet()), Box::new(udp()), address(x), address(y));
            exchange(Box::new(udp()), Box::new(packet()), address(y), address(x));
        }
    }
}

/// Set in the process that this test starts as an ordinary user.
const AS_NOBODY: &str = "UROCE_TEST_SUPERFRAMES_AS_NOBODY";

#[test]
fn nobody_may_send_and_receive_them() {
    if std::env::var_os(AS_NOBODY).is_some() {
        let (x, y) = ("127.0.7.1", "127.0.7.2");
        let (mut a, mut b) = (open(x, 64), open(y, 64));
        let got = cross(&mut a, &mut b, udp_flow(x, y), 63 * 1000 + 5, 1000);
        assert_eq!((got.len(), got[0].flow, got[0].segment), (1, udp_flow(x, y), 1000));
        assert_eq!((a.lost(), b.lost(), a.cut_up()), Default::default());
        let mut to_b = open("10.77.0.1", 64);
        let mut once = Some(());
        to_b.transmit(now(), 1, &mut |room| {
            once.take()?;
            room.buf[..3000].fill(7);
            Some(TxBurst { flow: udp_flow("10.77.0.1", "10.77.0.2"), len: 3000, segment: 1000, segments: 3 })
        })
        .unwrap();
        assert_eq!(to_b.lost(), Default::default());
        return;
    }
    let lab = Lab::new();
    let mut b = inside(&lab.b, || open("10.77.0.2", 64));
    as_nobody(&lab.a, "ether::superframes::nobody_may_send_and_receive_them", (AS_NOBODY, "1"));
    b.wait(Some(Duration::from_secs(1))).unwrap();
    let got = take(&mut b);
    assert_eq!((got.len(), got[0].segment, got[0].bytes.len()), (1, 1000, 3000));
    assert_eq!(got[0].flow, udp_flow("10.77.0.1", "10.77.0.2"));
}
