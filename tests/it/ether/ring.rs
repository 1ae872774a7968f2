//! The AF_PACKET device that receives from a ring, beside one that receives by calls: neither changes what arrives.

use uroce::device::af_packet::ReceiveBy::{self, Calls, Ring};

use super::rc::exchange;
use super::*;

const WAYS: [ReceiveBy; 2] = [Calls, Ring];

fn open(lab: &Lab, ns: &str, receive: ReceiveBy) -> AfPacket {
    let device = patiently(|| lab.open(ns, AfPacketConfig { receive, ..AfPacketConfig::shared("v0") }));
    assert_eq!(device.receives_by(), receive);
    device
}

fn pair(net: &str) -> Flow {
    flow(address(&format!("{net}1")), address(&format!("{net}2")))
}

/// Sends bursts of these segments and bytes each; every byte is the burst's number.
fn send_all(a: &mut AfPacket, f: Flow, from: u16, shapes: &[(usize, usize)]) {
    let mut next = (from..).zip(shapes);
    let taken = a.transmit(now(), shapes.len(), &mut |room| {
        let (n, &(segments, segment)) = next.next()?;
        let out = &mut room.buf[room.headroom..];
        let header = write_outer(&f, room.ids.id(0), segments * segment, out).unwrap();
        out[header..header + segments * segment].as_chunks_mut::<2>().0.fill(n.to_be_bytes());
        Some(TxBurst { flow: f, len: header + segments * segment, segment, segments })
    });
    assert_eq!(taken.unwrap(), shapes.len());
}

fn number(got: &Got) -> u16 {
    let number = got.bytes.first_chunk().map(|n| u16::from_be_bytes(*n)).unwrap();
    assert!(got.bytes.as_chunks::<2>().0.iter().all(|n| *n == number.to_be_bytes()), "torn: {number}");
    number
}

#[test]
fn short_frames_long_ones_and_superframes_keep_their_order_for_many_rounds() {
    // The slots hold the first, second and fourth.
    let shapes = [(1, 64), (1, 2100), (20, 1040), (3, 64), (30, 2048), (64, 128), (1, 18)];
    let lab = Lab::new();
    for receive in WAYS {
        for net in ["10.77.0.", "fd77::"] {
            let (mut a, mut b) = (open(&lab, &lab.a, Calls), open(&lab, &lab.b, receive));
            send_all(&mut a, pair(net), 0, &shapes[..1]);
            until(&mut a, &mut b, 1);
            for round in 0..250 {
                let first = round * shapes.len() as u16;
                send_all(&mut a, pair(net), first, &shapes);
                let got = until(&mut a, &mut b, shapes.len());
                for ((n, &(segments, segment)), got) in (first..).zip(&shapes).zip(&got) {
                    assert_eq!((number(got), got.segment, got.bytes.len()), (n, segment, segments * segment));
                }
            }
            assert_eq!((a.lost(), b.lost()), Default::default());
        }
    }
}

#[test]
fn a_ring_that_overflows_keeps_the_first_frames_and_goes_on() {
    let lab = Lab::new();
    let (mut a, mut b) = (open(&lab, &lab.a, Calls), open(&lab, &lab.b, Ring));
    let f = pair("10.77.0.");
    send_all(&mut a, f, 0, &[(1, 64)]);
    until(&mut a, &mut b, 1);
    let mut lost = b.lost().receive;
    for _ in 0..3 {
        send_all(&mut a, f, 0, &[(1, 64); 800]);
        let mut got = take(&mut b);
        // The last may still be under way.
        while let more @ [_, ..] = &mut take(&mut b)[..] {
            got.extend(more.iter_mut().map(|g| Got { bytes: std::mem::take(&mut g.bytes), ..*g }));
        }
        let numbers: Vec<u16> = got.iter().map(number).collect();
        assert!((256..800).contains(&numbers.len()), "{}", numbers.len());
        lost += 800 - numbers.len() as u64;
        assert_eq!(b.lost().receive, lost);
        assert!(numbers.is_sorted() && numbers[..256].iter().copied().eq(0..256), "{numbers:?}");
        send_all(&mut a, f, 900, &[(1, 64), (20, 1040)]);
        let after: Vec<u16> = until(&mut a, &mut b, 2).iter().map(number).collect();
        assert_eq!(after, [900, 901]);
    }
}

#[test]
fn an_empty_ring_is_known_to_be_empty() {
    let lab = Lab::new();
    for receive in WAYS {
        let (mut a, mut b) = (open(&lab, &lab.a, Calls), open(&lab, &lab.b, receive));
        for n in 0..3 {
            send_all(&mut a, pair("10.77.0."), n, &[(1, 64)]);
            b.wait(Some(Duration::from_secs(5))).unwrap();
            assert!(!b.is_idle(), "a frame waits");
            assert_eq!(number(&until(&mut a, &mut b, 1)[0]), n);
            assert_eq!(b.is_idle(), receive == Ring);
            // Now and then a look is a real one, for the socket's errors.
            assert!((0..5000).any(|_| !b.is_idle()));
            take(&mut b);
        }
    }
}

#[test]
fn an_interface_that_was_down_is_heard_again() {
    let lab = Lab::new();
    for receive in WAYS {
        let (mut a, mut b) = (open(&lab, &lab.a, Calls), open(&lab, &lab.b, receive));
        for n in 0..3 {
            send_all(&mut a, pair("10.77.0."), n, &[(1, 64)]);
            assert_eq!(number(&until(&mut a, &mut b, 1)[0]), n);
            for state in ["down", "up"] {
                ip(&format!("-n {} link set v0 {state}", lab.b));
                b.wait(Some(Duration::from_millis(1))).unwrap();
                assert_eq!(take(&mut b), []);
            }
        }
    }
}

#[test]
fn messages_and_tags_cross_either_way() {
    let lab = Lab::new();
    for (at_a, at_b) in [(Calls, Ring), (Ring, Calls), (Ring, Ring), (Calls, Calls)] {
        for net in ["10.77.0.", "fd77::"] {
            let f = pair(net);
            exchange(Box::new(open(&lab, &lab.a, at_a)), Box::new(open(&lab, &lab.b, at_b)), f.src, f.dst);
        }
        let on = |host: u8, receive| AfPacketConfig {
            vlan: Some(VlanTag { id: 7, priority: 3 }),
            receive,
            ..AfPacketConfig::own("v0", MacAddr([2, 0x77, 0, 0, 0, host]), vec![IpAddr::from([10, 78, 0, host])])
        };
        let (a, b) = (lab.open(&lab.a, on(1, at_a)).unwrap(), lab.open(&lab.b, on(2, at_b)).unwrap());
        exchange(Box::new(a), Box::new(b), IpAddr::from([10, 78, 0, 1]), IpAddr::from([10, 78, 0, 2]));
    }
}
