//! Superframes of the AF_PACKET device: whole at its like, datagrams at a socket of the kernel, and, where the kernel segments
//! them, packets that are right byte for byte.

use std::io::Read as _;

use socket2::{Domain, Protocol, Socket, Type};
use uroce::wire::{DONT_FRAGMENT, check, parse_ethernet, seal};
use uroce_fixtures::reference_icrc;

use super::rc::exchange;
use super::*;

const NETS: [&str; 2] = ["10.77.0.", "fd77::"];
const SEGMENT: usize = 1040;
/// The last segment is shorter.
const LEN: usize = 19 * SEGMENT + 64;
const SEGMENTS: usize = 20;

fn pair(net: &str, x: u8, y: u8) -> Flow {
    flow(address(&format!("{net}{x}")), address(&format!("{net}{y}")))
}

/// Sends one superframe of [`LEN`] bytes, each segment with the ICRC of its identification; returns the first of these.
fn send_large(device: &mut AfPacket, flow: Flow) -> u16 {
    let mut first = None;
    let taken = device.transmit(now(), 1, &mut |room| {
        assert!(room.segments_max >= SEGMENTS);
        first = Some(room.ids.id(0));
        let out = &mut room.buf[room.headroom..];
        let header = write_outer(&flow, room.ids.id(0), LEN, out).unwrap();
        for (index, bytes) in out[header..header + LEN].chunks_mut(SEGMENT).enumerate() {
            bytes.copy_from_slice(&content(index)[..bytes.len()]);
            let end = bytes.len() - 4;
            seal(&flow, IpFields { id: room.ids.id(index), flags_fragment: DONT_FRAGMENT }, bytes, end);
        }
        Some(TxBurst { flow, len: header + LEN, segment: SEGMENT, segments: SEGMENTS })
    });
    assert_eq!(taken.unwrap(), 1);
    first.unwrap()
}

/// Bytes of segment `index`, up to its ICRC.
fn content(index: usize) -> Vec<u8> {
    (0..SEGMENT).map(|i| (i * 7 + index * 31) as u8).collect()
}

fn assert_segments(got: &Got, first: u16) {
    let RxIds::Known(ip) = got.ids else { panic!("a raw device sees the header") };
    assert_eq!(ip.id, if got.flow.dst.is_ipv4() { first } else { 0 });
    for (index, segment) in got.bytes.chunks(SEGMENT).enumerate() {
        assert_eq!(segment[..segment.len() - 4], content(index)[..segment.len() - 4]);
        assert!(check(&got.flow, IpFields { id: ip.id.wrapping_add(index as u16), ..ip }, segment), "ICRC of {index}");
    }
}

#[test]
fn one_crosses_a_veth_pair_whole() {
    let lab = Lab::new();
    let (mut a, mut b) = (lab.shared(&lab.a), lab.shared(&lab.b));
    for net in NETS {
        let f = pair(net, 1, 2);
        // The first waits until the neighbour is known. Afterwards the ids go on behind the twenty that it used.
        let first = send_large(&mut a, f);
        let got = until(&mut a, &mut b, 1);
        assert_eq!((got[0].segment, got[0].bytes.len(), got[0].flow), (SEGMENT, LEN, f));
        assert_segments(&got[0], first);
        let single = send(&mut a, now(), f, &packet(1));
        assert_eq!(single, first + SEGMENTS as u16);
        assert_eq!(until(&mut a, &mut b, 1)[0].bytes, packet(1));
        let next = send_large(&mut a, f);
        assert_segments(&until(&mut a, &mut b, 1)[0], next);
    }
    assert_eq!((a.superframe_counters().sent, a.superframe_counters().refused), (4, None));
    assert_eq!((a.lost(), b.lost()), Default::default());
}

#[test]
fn superframes_and_packets_of_a_burst_keep_their_order() {
    let lab = Lab::new();
    let (mut a, mut b) = (lab.shared(&lab.a), lab.shared(&lab.b));
    let f = pair(NETS[0], 1, 2);
    send(&mut a, now(), f, &packet(0));
    until(&mut a, &mut b, 1);
    let mut next = 0..40u8;
    a.transmit(now(), 40, &mut |room| {
        let n = next.next()?;
        let segments = if n % 3 == 0 { 4 } else { 1 };
        let out = &mut room.buf[room.headroom..];
        let header = write_outer(&f, room.ids.id(0), 64 * segments, out).unwrap();
        out[header..header + 64 * segments].fill(n);
        Some(TxBurst { flow: f, len: header + 64 * segments, segment: 64, segments })
    })
    .unwrap();
    let order: Vec<u8> = until(&mut a, &mut b, 40).iter().map(|g| g.bytes[0]).collect();
    assert_eq!(order, (0..40).collect::<Vec<u8>>());
    assert_eq!(a.superframe_counters().sent, 14);
}

#[test]
fn a_socket_of_the_kernel_gets_datagrams() {
    let lab = Lab::new();
    let mut a = lab.shared(&lab.a);
    for net in NETS {
        let f = pair(net, 1, 2);
        let socket = inside(&lab.b, || UdpSocket::bind((f.dst, 4791)).unwrap());
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        send_large(&mut a, f);
        driven(&mut a, || {
            let mut buf = [0; 2000];
            for index in 0..SEGMENTS {
                let len = socket.recv(&mut buf).unwrap();
                assert_eq!(len, if index == SEGMENTS - 1 { 64 } else { SEGMENT });
                assert_eq!(buf[..len - 4], content(index)[..len - 4]);
            }
        });
    }
    assert_eq!(a.lost(), Default::default());
}

/// Everything that arrives in namespace `ns` at one kind of frame, as bytes.
fn plain_socket(ns: &str, ethertype: u16) -> Socket {
    let protocol = Protocol::from(i32::from(ethertype.to_be()));
    let socket = inside(ns, || Socket::new(Domain::PACKET, Type::RAW, Some(protocol)).unwrap());
    socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    socket
}

/// The next frame from `src`.
fn next_frame(mut socket: &Socket, src: IpAddr) -> Vec<u8> {
    let mut frame = vec![0; 70_000];
    loop {
        let len = match socket.read(&mut frame) {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => continue,
            len => len.expect("a frame within five seconds"),
        };
        if parse_ethernet(&frame[..len]).is_ok_and(|p| p.flow.src == src) {
            frame.truncate(len);
            return frame;
        }
    }
}

/// The Internet checksum of a UDP datagram with its pseudo-header (RFC 768, RFC 8200 section 8.1): 0xFFFF where it is right.
fn udp_sum(addresses: &[u8], datagram: &[u8]) -> u64 {
    let odd =
        |bytes: &[u8]| bytes.chunks(2).map(|p| u64::from(p[0]) << 8 | p.get(1).map_or(0, |&b| b.into())).sum::<u64>();
    let mut sum = 17 + datagram.len() as u64 + odd(addresses) + odd(datagram);
    while sum > 0xFFFF {
        sum = (sum >> 16) + (sum & 0xFFFF);
    }
    sum
}

/// Sends superframes through an interface that takes none that long, and looks at every frame that comes out of it.
fn segmented(lab: &Lab, mut a: AfPacket, macs: (MacAddr, MacAddr), f: Flow, answering: Option<AfPacket>) {
    ip(&format!("-n {} link set v0 gso_max_size 4000", lab.a));
    let socket = plain_socket(&lab.b, if f.dst.is_ipv4() { 0x0800 } else { 0x86dd });
    let first = send_large(&mut a, f);
    if let Some(mut b) = answering {
        // Its answer to the question.
        let got = until(&mut a, &mut b, SEGMENTS);
        assert!(got.iter().all(|g| g.flow == f));
    }
    let frames: Vec<Vec<u8>> = driven(&mut a, || (0..SEGMENTS).map(|_| next_frame(&socket, f.src)).collect());
    for (index, frame) in frames.iter().enumerate() {
        let parsed = parse_ethernet(frame).unwrap();
        assert_eq!((parsed.dst_mac, parsed.src_mac), macs);
        // A plain socket is not told of the tag.
        assert_eq!(parsed.flow, Flow { vlan: None, ..f });
        let len = if index == SEGMENTS - 1 { 64 } else { SEGMENT };
        let (ip_len, addresses) = if f.dst.is_ipv4() { (20, 12..20) } else { (40, 8..40) };
        let packet = &frame[14..];
        assert_eq!(packet.len(), ip_len + 8 + len);
        if f.dst.is_ipv4() {
            let (id, total) = (first.wrapping_add(index as u16), (ip_len + 8 + len) as u16);
            let fields = [&total.to_be_bytes()[..], &id.to_be_bytes(), &[0x40, 0]].concat();
            assert_eq!((packet[0], &packet[2..8]), (0x45, &fields[..]));
        } else {
            assert_eq!(packet[4..6], ((8 + len) as u16).to_be_bytes());
        }
        let udp = &packet[ip_len..];
        assert_eq!(udp[4..6], ((8 + len) as u16).to_be_bytes());
        // Between the ends of a veth pair a checksum may be left to nobody: then it is the sum over the pseudo-header.
        let whole = udp_sum(&packet[addresses.clone()], udp);
        let pseudo = udp_sum(&packet[addresses], &vec![0; udp.len()]);
        let found = u64::from(u16::from_be_bytes([udp[6], udp[7]]));
        assert!(whole == 0xFFFF || found == pseudo, "checksum {found:#x} of segment {index}");
        let (bytes, icrc) = udp[8..].split_at(len - 4);
        assert_eq!(bytes, &content(index)[..len - 4]);
        assert_eq!(icrc, reference_icrc(packet), "ICRC of segment {index}");
    }
    assert_eq!((a.lost(), a.superframe_counters().sent), (Default::default(), 1));
}

#[test]
fn what_the_kernel_segments_is_right_byte_for_byte() {
    for net in NETS {
        let lab = Lab::new();
        let mac = |ns: &str| inside(ns, || InterfaceFacts::of("v0").unwrap().mac.unwrap());
        let macs = (mac(&lab.b), mac(&lab.a));
        let a = lab.shared(&lab.a);
        segmented(&lab, a, macs, pair(net, 1, 2), None);
    }
}

#[test]
fn in_a_vlan_too() {
    for net in NETS {
        let lab = Lab::new();
        let tag = VlanTag { id: 7, priority: 3 };
        let on = |host: u8| AfPacketConfig {
            vlan: Some(tag),
            ..AfPacketConfig::own("v0", MacAddr([2, 0x77, 0, 0, 0, host]), vec![address(&format!("{net}{host}"))])
        };
        let f = Flow { vlan: Some(tag), ..pair(net, 5, 6) };
        let macs = (MacAddr([2, 0x77, 0, 0, 0, 6]), MacAddr([2, 0x77, 0, 0, 0, 5]));
        // Whole, where nothing segments it.
        let (mut a, mut b) = (lab.open(&lab.a, on(5)).unwrap(), lab.open(&lab.b, on(6)).unwrap());
        let first = send_large(&mut a, f);
        let got = until(&mut a, &mut b, 1);
        assert_eq!((got[0].segment, got[0].flow), (SEGMENT, f));
        assert_segments(&got[0], first);
        drop(a);
        let a = lab.open(&lab.a, on(5)).unwrap();
        segmented(&lab, a, macs, f, Some(b));
    }
}

#[test]
fn the_limits_of_the_interface_and_of_the_configuration_hold() {
    let lab = Lab::new();
    let room = |a: &mut AfPacket| {
        let mut seen = None;
        a.transmit(now(), 1, &mut |room| {
            seen = Some((room.buf.len() - room.headroom, room.segments_max));
            None
        })
        .unwrap();
        seen.unwrap()
    };
    let (bytes, segments) = room(&mut lab.shared(&lab.a));
    // The frame, with its Ethernet header, is shorter than the interface's 65,536 bytes.
    assert!(segments == 64 && (65_000..65_536 - 18).contains(&bytes), "{bytes}");
    let with = |segments_max| AfPacketConfig { segments_max, ..AfPacketConfig::shared("v0") };
    for (asked, got) in [(0, 1), (1, 1), (7, 7), (1000, uroce::device::af_packet::SEGMENTS_LIMIT)] {
        let mut a = patiently(|| lab.open(&lab.a, with(asked)));
        assert_eq!((room(&mut a).1, a.capabilities().segments_max), (got, got));
    }
    ip(&format!("-n {} link set v0 gso_max_size 4000 gso_max_segs 9", lab.a));
    let (bytes, segments) = room(&mut patiently(|| lab.open(&lab.a, with(64))));
    assert!(segments == 9 && bytes < 4000 - 18, "{bytes}");
    // And where that is less than a packet, a packet still fits.
    ip(&format!("-n {} link set v0 gso_max_size 1000", lab.a));
    assert_eq!(room(&mut patiently(|| lab.open(&lab.a, with(64)))).0, 2200);
}

#[test]
fn connections_with_and_without_them_on_either_side() {
    let lab = Lab::new();
    let open = |ns: &str, segments_max| -> Box<dyn Device> {
        Box::new(patiently(|| lab.open(ns, AfPacketConfig { segments_max, ..AfPacketConfig::shared("v0") })))
    };
    for net in NETS {
        let f = pair(net, 1, 2);
        for (at_a, at_b) in [(64, 64), (64, 1), (1, 64), (3, 128), (1, 1)] {
            exchange(open(&lab.a, at_a), open(&lab.b, at_b), f.src, f.dst);
        }
    }
}

#[test]
fn an_own_address_hears_superframes_whole_and_itself() {
    let lab = Lab::new();
    let own = AfPacketConfig::own("v0", OWN_MAC, vec![address("10.77.0.9")]);
    let (mut a, mut b) = (lab.shared(&lab.a), lab.open(&lab.b, own).unwrap());
    let f = pair(NETS[0], 1, 9);
    let first = send_large(&mut a, f);
    assert_segments(&until(&mut a, &mut b, 1)[0], first);
    let own = pair(NETS[0], 9, 9);
    let first = send_large(&mut b, own);
    let got = take(&mut b);
    assert_eq!((got.len(), got[0].segment, got[0].flow), (1, SEGMENT, own));
    assert_segments(&got[0], first);
    assert_eq!(b.superframe_counters().sent, 0);
}
