//! Superframes through UDP sockets, on the loopback interface.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::net::UdpSocket;

use super::testing::open_ipv6;
use super::*;
use crate::device::sys::set_int;
use crate::device::testing::loopback_address as address;
use crate::wire::{recover_id, seal};

const T0: Instant = Instant::ZERO;
const SECOND: Option<Duration> = Some(Duration::from_secs(1));

fn with(segments_max: usize) -> UdpDevice {
    UdpDevice::open_with(address(), UdpOptions { segments_max, ..UdpOptions::default() }).unwrap()
}

fn flow(from: &UdpDevice, dst: IpAddr) -> Flow {
    let src = from.address;
    Flow { src, dst, src_port: Flow::PORT, traffic_class: 0, hop_limit: HOPS, flow_label: 0, vlan: None }
}

/// A burst to send: `len` bytes in segments of `segment`.
type Wanted = (Flow, usize, usize);

/// Writes a burst as an endpoint does: every segment with the ICRC of its own identification.
fn write(room: TxRoom<'_>, (flow, len, segment): Wanted) -> TxBurst {
    let bytes = &mut room.buf[..len];
    for (index, bytes) in bytes.chunks_mut(segment).enumerate() {
        let end = bytes.len() - 4;
        bytes.iter_mut().zip(index..).for_each(|(byte, value)| *byte = value.to_le_bytes()[0]);
        seal(&flow, IpFields { id: room.ids.id(index), flags_fragment: DONT_FRAGMENT }, bytes, end);
    }
    TxBurst { flow, len, segment, segments: len.div_ceil(segment) }
}

/// Sends `bursts`; returns what the rooms offered: segments and ids.
fn send(device: &mut UdpDevice, bursts: &[Wanted]) -> Vec<(usize, IdRule)> {
    let (mut left, mut rooms) = (bursts.iter(), Vec::new());
    let taken = device.transmit(T0, usize::MAX, &mut |room| {
        let wanted = left.next()?;
        rooms.push((room.segments_max, room.ids));
        Some(write(room, *wanted))
    });
    assert_eq!(taken.unwrap(), bursts.len());
    rooms
}

/// A received burst: flow, bytes a segment, length, and the identification that each segment's ICRC was made for.
type Got = (Flow, usize, usize, Vec<u16>);

/// Receives until there are `segments` segments.
fn receive(device: &mut UdpDevice, segments: usize) -> Vec<Got> {
    let mut got: Vec<Got> = Vec::new();
    for _ in 0..100 {
        device.wait(SECOND).unwrap();
        device
            .receive(T0, usize::MAX, &mut |b| {
                assert_eq!(b.ids, RxIds::Hidden);
                let ids = b.bytes.chunks(b.segment).map(|s| recover_id(&b.flow, s).expect("an ICRC that is wrong"));
                got.push((b.flow, b.segment, b.bytes.len(), ids.collect()));
            })
            .unwrap();
        if got.iter().map(|g| g.3.len()).sum::<usize>() >= segments {
            break;
        }
    }
    got
}

fn index(segments: u16) -> Vec<u16> {
    (0..segments).collect()
}

#[test]
fn a_superframe_arrives_whole_with_its_marks_and_a_shorter_last_segment() {
    let (mut a, mut b) = (with(64), with(64));
    assert_eq!((a.capabilities().segments_max, with(5).capabilities().segments_max), (64, 5));
    // Expedited forwarding, ECT(1).
    let f = Flow { traffic_class: 0xB9, hop_limit: 9, ..flow(&a, b.address) };
    let plain = flow(&a, b.address);
    let rooms = send(&mut a, &[(f, 3 * 1040 + 99, 1040), (plain, 200, 200), (plain, 64 * 80, 80)]);
    assert_eq!(rooms, [(64, IdRule::Index); 3]);
    let got = receive(&mut b, 4 + 1 + 64);
    // The numbers start again with each burst, and one packet alone has 0.
    let expected = [(f, 1040, 3 * 1040 + 99, index(4)), (plain, 200, 200, vec![0]), (plain, 80, 64 * 80, index(64))];
    assert_eq!(got, expected);
    assert_eq!((a.lost(), b.lost(), a.cut_up()), (DeviceLosses::default(), DeviceLosses::default(), 0));
}

#[test]
fn a_mark_of_congestion_covers_the_superframe() {
    let (mut a, mut b) = (with(64), with(64));
    let f = Flow { traffic_class: 3, ..flow(&a, b.address) };
    send(&mut a, &[(f, 500, 100)]);
    let mut marked = Vec::new();
    b.wait(SECOND).unwrap();
    b.receive(T0, 9, &mut |burst| marked.push((burst.congestion_experienced(), burst.bytes.len()))).unwrap();
    assert_eq!(marked, [(true, 500)]);
}

#[test]
fn ipv6_has_superframes_too_and_the_longest_are_not_cut_up() {
    let mut d = open_ipv6(UdpOptions::default());
    let address = d.address;
    let f = Flow { traffic_class: 2, hop_limit: 3, ..flow(&d, address) };
    let longest = SUPERFRAME_MAX;
    send(&mut d, &[(f, 2 * 300 + 40, 300), (f, longest, 1040), (f, longest, 4128)]);
    let got: Vec<_> = receive(&mut d, 3 + 63 + 16).into_iter().map(|g| (g.0, g.1, g.2, g.3.len())).collect();
    assert_eq!(got, [(f, 300, 640, 3), (f, 1040, longest, 63), (f, 4128, longest, 16)]);
    assert_eq!(d.lost(), DeviceLosses::default());
}

#[test]
fn the_longest_are_not_cut_up_over_ipv4() {
    let (mut a, mut b) = (with(64), with(64));
    let f = flow(&a, b.address);
    send(&mut a, &[(f, SUPERFRAME_MAX, 1040), (f, SUPERFRAME_MAX, 4128)]);
    let got = receive(&mut b, 63 + 16);
    assert_eq!(got, [(f, 1040, SUPERFRAME_MAX, index(63)), (f, 4128, SUPERFRAME_MAX, index(16))]);
}

#[test]
fn who_does_not_receive_superframes_gets_their_packets() {
    let (mut a, mut b) = (with(64), with(1));
    assert_eq!(b.capabilities().segments_max, 1);
    let f = flow(&a, b.address);
    send(&mut a, &[(f, 2 * 1040 + 99, 1040)]);
    assert_eq!(receive(&mut b, 3), [(f, 1040, 1040, vec![0]), (f, 1040, 1040, vec![1]), (f, 99, 99, vec![2])]);
    // The other way: packets one by one, of which a superframe could be made, come as they are or as one.
    let f = flow(&b, a.address);
    assert_eq!(send(&mut b, &[(f, 1040, 1040); 3]), [(1, IdRule::Zero); 3]);
    let ids: Vec<u16> = receive(&mut a, 3).into_iter().flat_map(|g| g.3).collect();
    assert_eq!(ids, [0; 3]);
}

#[test]
fn more_than_a_call_moves_passes_and_budgets_count_bursts() {
    let (mut a, mut b) = (with(64), with(64));
    let f = flow(&a, b.address);
    // More bytes than go in one call, and then more bursts.
    for (bursts, segment, segments) in [(5, 4096, 15), (100, 40, 5)] {
        let taken = a.transmit(T0, bursts, &mut |room| Some(write(room, (f, segment * segments, segment))));
        assert_eq!(taken.unwrap(), bursts);
        let mut first = 0;
        assert_eq!(b.receive(T0, 3, &mut |_| first += 1).unwrap(), 3);
        assert_eq!(first, 3);
        assert_eq!(receive(&mut b, segments * (bursts - 3)).len(), bursts - 3);
        assert_eq!(b.receive(T0, 1, &mut |_| ()).unwrap(), 0);
    }
}

#[test]
fn source_ports_and_groups_have_superframes() {
    let options = UdpOptions { source_ports: 1, ..UdpOptions::default() };
    let (mut a, mut b) = (UdpDevice::open_with(address(), options).unwrap(), with(64));
    let group: IpAddr = Ipv4Addr::new(239, 7, 9, 77).into();
    b.set_membership(group, true).unwrap();
    let f = Flow { src_port: a.source_ports()[0], ..flow(&a, b.address) };
    let to_group = flow(&a, group);
    send(&mut a, &[(f, 450, 100)]);
    assert_eq!(receive(&mut b, 5), [(f, 100, 450, index(5))]);
    send(&mut a, &[(to_group, 450, 100)]);
    assert_eq!(receive(&mut b, 5), [(to_group, 100, 450, index(5))]);
}

#[test]
fn bursts_of_a_wrong_shape_are_lost_and_counted() {
    let (mut a, mut b) = (with(8), with(64));
    let f = flow(&a, b.address);
    let shape = |len, segment, segments| TxBurst { flow: f, len, segment, segments };
    let bad = [
        shape(900, 100, 9),
        shape(300, 100, 2),
        shape(300, 100, 4),
        shape(300, 0, 3),
        shape(0, 100, 0),
        shape(2 * DATAGRAM_MAX + 2, DATAGRAM_MAX + 1, 2),
        shape(DATAGRAM_MAX + 1, DATAGRAM_MAX + 1, 1),
    ];
    let mut all = bad.into_iter().map(Some).chain([None]);
    a.transmit(T0, usize::MAX, &mut |room| match all.next()? {
        Some(burst) => Some(burst),
        None => Some(write(room, (f, 800, 100))),
    })
    .unwrap();
    assert_eq!(a.lost().transmit, bad.len() as u64);
    assert_eq!(receive(&mut b, 8), [(f, 100, 800, index(8))]);
    // A segment longer than the interface carries would be lost on the way.
    a.capabilities.mtu = 1000;
    send(&mut a, &[(f, 2 * 973, 973), (f, 2 * 972, 972)]);
    assert_eq!(receive(&mut b, 2), [(f, 972, 2 * 972, index(2))]);
}

#[test]
fn an_error_in_the_middle_of_a_batch_costs_one_burst() {
    let (mut a, mut b) = (with(64), with(64));
    let good = flow(&a, b.address);
    // A broadcast needs a permission that the socket does not have.
    let bad = Flow { dst: Ipv4Addr::BROADCAST.into(), ..good };
    send(&mut a, &[(good, 300, 100), (bad, 300, 100), (good, 200, 200), (bad, 60, 60), (good, 500, 100)]);
    assert_eq!(a.lost().transmit, 2);
    let got = receive(&mut b, 3 + 1 + 5);
    assert_eq!(got, [(good, 100, 300, index(3)), (good, 200, 200, vec![0]), (good, 100, 500, index(5))]);
    // What failed had nothing to do with segments.
    assert_eq!((a.segments_max(), a.cut_up()), (64, 0));
}

#[test]
fn what_fits_the_room_of_the_receiver_is_not_lost() {
    for (segments, size) in [(15, 4112), (62, 1040), (64, 272), (1, 4112), (1, 1040)] {
        let (mut a, mut b) = (with(64), with(if segments > 1 { 64 } else { 1 }));
        // What an ordinary user has where nobody raised the limits.
        b.sockets[0].socket.set_recv_buffer_size(212_992).unwrap();
        let room = b.receive_room().unwrap();
        assert!((150_000..=212_992).contains(&room), "{room}");
        let f = flow(&a, b.address);
        let bursts = room / (segments * size);
        send(&mut a, &vec![(f, segments * size, size); bursts]);
        assert_eq!(receive(&mut b, segments * bursts).iter().map(|g| g.3.len()).sum::<usize>(), segments * bursts);
    }
}

/// Has the system refuse to segment: datagrams without a checksum cannot be.
fn forbid_segmentation(device: &UdpDevice) {
    set_int(device.sockets[0].socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
}

#[test]
fn what_the_system_does_not_segment_the_device_cuts_up() {
    let (mut a, mut b) = (with(64), with(64));
    let f = flow(&a, b.address);
    forbid_segmentation(&a);
    let rooms = send(&mut a, &[(f, 90, 90), (f, 250, 100), (f, 80, 80), (f, 300, 150), (f, 70, 70)]);
    assert_eq!(rooms, [(64, IdRule::Index); 5]);
    // One by one they carry 0, and their ICRCs say so.
    let got = receive(&mut b, 1 + 3 + 1 + 2 + 1);
    let lengths: Vec<usize> = got.iter().map(|g| g.2).collect();
    assert_eq!(lengths, [90, 100, 100, 50, 80, 150, 150, 70]);
    assert!(got.iter().all(|g| g.0 == f && g.3 == [0]));
    assert_eq!((a.cut_up(), a.lost()), (2, DeviceLosses::default()));
    // From now on nobody need cut up.
    assert_eq!(send(&mut a, &[(f, 90, 90)]), [(1, IdRule::Zero)]);
    assert_eq!(receive(&mut b, 1).len(), 1);
}

#[test]
fn pieces_that_the_system_does_not_take_now_are_sent_later() {
    let (mut a, mut b) = (with(64), with(64));
    let f = flow(&a, b.address);
    let burst = write(
        TxRoom { buf: a.tx.buffer(0), headroom: 0, segments_max: 64, ids: IdRule::Index, medium: Medium::Udp },
        (f, 350, 100),
    );
    assert!(a.queue_burst(burst));
    // As after EINVAL, two pieces, and EAGAIN.
    a.begin_pieces();
    a.advance(1);
    a.advance(1);
    a.queue.retry_at = Some(T0);
    send(&mut a, &[(f, 60, 60)]);
    let lengths: Vec<_> = receive(&mut b, 3).into_iter().map(|g| (g.2, g.3)).collect();
    assert_eq!(lengths, [(100, vec![0]), (50, vec![0]), (60, vec![0])]);
}

#[test]
fn a_wrong_icrc_stays_wrong_when_it_is_renumbered() {
    let (src, dst) = (Ipv4Addr::new(10, 0, 0, 1).into(), Ipv4Addr::new(10, 0, 0, 2).into());
    let v4 = Flow { src, dst, src_port: 4791, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None };
    let v6 = Flow { src: Ipv6Addr::LOCALHOST.into(), dst: Ipv6Addr::LOCALHOST.into(), ..v4 };
    for f in [v4, v6] {
        let mut segment = [7; 60];
        seal(&f, IpFields { id: 9, flags_fragment: DONT_FRAGMENT }, &mut segment, 56);
        let mut spoilt = segment;
        spoilt[59] ^= 0x80;
        renumber(&f, 9, &mut segment);
        renumber(&f, 9, &mut spoilt);
        assert_eq!(recover_id(&f, &segment), Some(0));
        assert_ne!(recover_id(&f, &spoilt), Some(0));
        spoilt[59] ^= 0x80;
        assert_eq!(spoilt, segment);
    }
}

#[test]
fn superframes_of_segments_too_long_for_a_packet_are_dropped_and_counted() {
    let mut b = with(64);
    let raw = UdpSocket::bind((address(), 0)).unwrap();
    let to = SocketAddr::new(b.address, Flow::PORT);
    let segment = |bytes: usize| {
        let size = libc::c_int::try_from(bytes).unwrap();
        set_int(raw.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, size).unwrap();
    };
    segment(DATAGRAM_MAX + 1);
    raw.send_to(&vec![0; 3 * DATAGRAM_MAX], to).unwrap();
    segment(DATAGRAM_MAX);
    raw.send_to(&vec![0; 3 * DATAGRAM_MAX], to).unwrap();
    let mut got = Vec::new();
    b.wait(SECOND).unwrap();
    b.receive(T0, 9, &mut |burst| got.push((burst.segment, burst.bytes.len()))).unwrap();
    assert_eq!((got, b.lost().receive), (vec![(DATAGRAM_MAX, 3 * DATAGRAM_MAX)], 1));
}
