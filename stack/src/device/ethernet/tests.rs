//! The port alone: frames in and out as bytes, time as a number.

use proptest::prelude::*;

use super::*;
use crate::burst::TxBurst;
use crate::time::Duration;
use crate::wire::write_outer;

const US: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

fn ip(s: &str) -> IpAddr {
    s.parse().unwrap()
}

fn at(millis: u64) -> Instant {
    Instant::ZERO + Duration::from_millis(millis)
}

fn port(vlan: Option<VlanTag>) -> EthernetPort {
    framed(vlan, Framing::Plain)
}

fn framed(vlan: Option<VlanTag>, framing: Framing) -> EthernetPort {
    EthernetPort::new(PortConfig {
        name: "test".to_owned(),
        interface: "test".to_owned(),
        mtu: 1500,
        mac: US,
        addresses: vec![ip("10.0.0.1"), ip("fd00::1")],
        vlan,
        icrc: IcrcMode::Check,
        answers: true,
        routes: Routes::OnLink,
        framing,
    })
    .unwrap()
}

fn flow(src: &str, dst: &str) -> Flow {
    let (src, dst) = (ip(src), ip(dst));
    Flow { src, dst, src_port: 0xC000, traffic_class: 0, hop_limit: 64, flow_label: 0, vlan: None }
}

/// What the endpoint writes: a packet of 32 bytes `fill`.
fn place(port: &mut EthernetPort, now: Instant, flow: Flow, fill: u8) -> Option<Vec<u8>> {
    let mut slot = vec![0; port.slot_len()];
    let room = port.room(&mut slot);
    let out = &mut room.buf[room.headroom..];
    let header = write_outer(&flow, room.ids.id(0), 32, out).unwrap();
    out[header..header + 32].fill(fill);
    match port.place(now, &TxBurst { flow, len: header + 32, segment: 32, segments: 1 }, &mut slot) {
        Placed::Send(range) => Some(slot[range].to_vec()),
        Placed::Gone => None,
    }
}

/// A frame of `flow` to us with a payload of 32 bytes.
fn frame(flow: Flow, to: MacAddr, len: usize) -> Vec<u8> {
    let mut f = vec![0; HEADROOM + 48 + len];
    let ethernet = write_ethernet(to, PEER, flow.vlan, flow.dst.is_ipv4(), &mut f).unwrap();
    let header = write_outer(&flow, 7, len, &mut f[ethernet..]).unwrap();
    f.truncate(ethernet + header + len);
    f
}

/// Segment sizes of what reaches the endpoint.
fn accept(port: &mut EthernetPort, frame: &[u8], tag: Option<u16>, segment: Option<u16>) -> Option<(Flow, usize)> {
    let mut got = None;
    let handed = port.accept(at(0), frame, tag, segment, &mut |b| got = Some((b.flow, b.segment)));
    assert_eq!(handed, got.is_some());
    got
}

/// "10.0.0.`host` is at `mac`", to us.
fn arp_reply(mac: MacAddr, host: u8) -> Vec<u8> {
    let mut f = [&US.0[..], &mac.0, &[8, 6, 0, 1, 8, 0, 6, 4, 0, 2], &mac.0, &[10, 0, 0, host], &US.0].concat();
    f.extend([10, 0, 0, 1]);
    f
}

fn next(port: &mut EthernetPort) -> Option<Vec<u8>> {
    port.next_frame().map(|f| f.0)
}

#[test]
fn bursts_wait_for_the_answer_and_leave_in_their_order() {
    let mut p = port(None);
    let f = flow("10.0.0.1", "10.0.0.2");
    assert_eq!(place(&mut p, at(0), f, 1), None);
    assert_eq!(place(&mut p, at(0), f, 2), None);
    assert_eq!(place(&mut p, at(0), flow("10.0.0.1", "10.0.0.3"), 3), None);
    // Two questions, one for each.
    assert_eq!(next(&mut p).unwrap()[38..42], [10, 0, 0, 2]);
    assert_eq!(next(&mut p).unwrap()[38..42], [10, 0, 0, 3]);
    assert_eq!(next(&mut p), None);
    assert_eq!(accept(&mut p, &arp_reply(PEER, 2), None, None), None);
    for fill in [1, 2] {
        let (frame, burst) = p.next_frame().unwrap();
        assert!(burst);
        assert_eq!((&frame[..6], &frame[6..12], &frame[12..14]), (&PEER.0[..], &US.0[..], &[8, 0][..]));
        assert_eq!((frame.len(), frame[frame.len() - 1]), (14 + 28 + 32, fill));
    }
    assert_eq!(next(&mut p), None);
    // From now on at once, with rising ids.
    assert_eq!(place(&mut p, at(1), f, 4).unwrap()[18..20], [0, 4]);
    assert_eq!(place(&mut p, at(1), f, 5).unwrap()[18..20], [0, 5]);
    assert_eq!(p.losses(), DeviceLosses::default());
}

#[test]
fn a_neighbour_that_moves_is_followed_at_once() {
    let mut p = port(None);
    let f = flow("10.0.0.1", "10.0.0.2");
    place(&mut p, at(0), f, 1);
    accept(&mut p, &arp_reply(PEER, 2), None, None);
    assert_eq!(place(&mut p, at(1), f, 2).unwrap()[..6], PEER.0);
    let moved = MacAddr([2, 0, 0, 0, 0, 9]);
    accept(&mut p, &arp_reply(moved, 2), None, None);
    assert_eq!(place(&mut p, at(2), f, 3).unwrap()[..6], moved.0);
}

#[test]
fn what_waits_is_bounded() {
    let mut p = port(None);
    for host in 2..=u8::MAX {
        for _ in 0..5 {
            place(&mut p, at(0), flow("10.0.0.1", &format!("10.0.0.{host}")), 0);
        }
    }
    assert_eq!(p.held.len(), HELD_MAX);
    assert_eq!(p.losses().transmit, 5 * 254 - HELD_MAX as u64);
    let mut q = port(None);
    for _ in 0..HELD_PER_HOP_MAX + 5 {
        place(&mut q, at(0), flow("10.0.0.1", "10.0.0.2"), 0);
    }
    assert_eq!((q.held.len(), q.losses().transmit), (HELD_PER_HOP_MAX, 5));
    for _ in 0..LOOPED_MAX + 3 {
        place(&mut q, at(0), flow("10.0.0.1", "10.0.0.1"), 0);
    }
    assert_eq!((q.looped.len(), q.losses().transmit), (LOOPED_MAX, 8));
}

#[test]
fn a_message_and_its_acknowledgement_wait_whole_and_beyond_that_the_end_is_kept() {
    let f = flow("10.0.0.1", "10.0.0.2");
    let waited = |bursts: usize| {
        let mut p = port(None);
        for i in 0..bursts {
            assert_eq!(place(&mut p, at(0), f, i as u8), None);
        }
        next(&mut p).expect("the question");
        accept(&mut p, &arp_reply(PEER, 2), None, None);
        let sent: Vec<u8> = core::iter::from_fn(|| next(&mut p)).map(|frame| *frame.last().unwrap()).collect();
        (sent, p.losses().transmit)
    };
    // 64 KiB at a path MTU of 1024, behind an acknowledgement.
    assert_eq!(waited(65), ((0..65).collect(), 0));
    let (sent, lost) = waited(HELD_PER_HOP_MAX + 3);
    assert_eq!((sent.len(), lost), (HELD_PER_HOP_MAX, 3));
    assert_eq!((sent.first(), sent.last()), (Some(&3), Some(&2)), "the oldest are gone, the newest are there");
}

#[test]
fn multicast_leaves_without_a_question() {
    let mut p = port(None);
    let sent = place(&mut p, at(0), flow("fd00::1", "ff0e::1:2"), 1).unwrap();
    assert_eq!((&sent[..6], &sent[12..14]), (&[0x33, 0x33, 0, 1, 0, 2][..], &[0x86, 0xdd][..]));
    assert_eq!(next(&mut p), None);
}

#[test]
fn everything_is_tagged_in_a_vlan() {
    let mut p = port(Some(VlanTag { id: 7, priority: 3 }));
    let f = flow("10.0.0.1", "10.0.0.2");
    assert_eq!(place(&mut p, at(0), f, 1), None);
    assert_eq!(next(&mut p).unwrap()[12..18], [0x81, 0, 0x60, 7, 8, 6]);
    accept(&mut p, &arp_reply(PEER, 2), Some(7), None);
    assert_eq!(next(&mut p).unwrap()[12..18], [0x81, 0, 0x60, 7, 8, 0]);
    // An answer whose tag is still in it.
    assert_eq!(place(&mut p, at(0), flow("10.0.0.1", "10.0.0.3"), 1), None);
    let mut tagged = arp_reply(PEER, 3);
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    assert_eq!(next(&mut p).unwrap()[12..18], [0x81, 0, 0x60, 7, 8, 6]);
    accept(&mut p, &tagged, None, None);
    assert_eq!(next(&mut p).unwrap()[12..18], [0x81, 0, 0x60, 7, 8, 0]);
    // In: the tag beside the frame or still in it, ours and no other.
    let back = flow("10.0.0.2", "10.0.0.1");
    let with = |id, priority| Flow { vlan: Some(VlanTag { id, priority }), ..back };
    assert_eq!(accept(&mut p, &frame(back, US, 32), Some(0x2007), None), Some((with(7, 1), 32)));
    assert_eq!(accept(&mut p, &frame(with(7, 1), US, 32), None, None), Some((with(7, 1), 32)));
    assert_eq!(accept(&mut p, &frame(with(8, 1), US, 32), None, None), None);
    assert_eq!(accept(&mut p, &frame(back, US, 32), Some(8), None), None);
    assert_eq!(accept(&mut p, &frame(back, US, 32), None, None), None);
}

#[test]
fn what_is_dropped_in_a_vlan_is_counted_too() {
    let mut p = port(Some(VlanTag { id: 7, priority: 0 }));
    let vlan = Some(VlanTag { id: 7, priority: 3 });
    let mut fragment = frame(Flow { vlan, ..flow("10.0.0.2", "10.0.0.1") }, US, 32);
    fragment[24] |= 0x20;
    assert_eq!(accept(&mut p, &fragment, None, None), None);
    assert_eq!(p.losses().receive, 1);
    // No UDP, though a length stands where its number is in a frame without a tag.
    fragment[27] = 1;
    fragment[20] = 17;
    assert_eq!(accept(&mut p, &fragment, None, None), None);
    assert_eq!(p.losses().receive, 1);
}

#[test]
fn only_what_is_for_us_reaches_the_endpoint() {
    let mut p = port(None);
    let good = flow("10.0.0.2", "10.0.0.1");
    assert_eq!(accept(&mut p, &frame(good, US, 32), None, None), Some((good, 32)));
    assert_eq!(accept(&mut p, &frame(good, PEER, 32), None, None), None, "another's MAC");
    assert_eq!(accept(&mut p, &frame(flow("10.0.0.2", "10.0.0.9"), US, 32), None, None), None, "another's address");
    assert_eq!(accept(&mut p, &frame(good, US, 1000), None, Some(300)), Some((good, 300)), "a superframe");
    assert_eq!(p.losses().receive, 0);
    assert_eq!(accept(&mut p, &frame(good, US, 4000), None, None), None, "a superframe without a size");
    let mut fragment = frame(good, US, 32);
    fragment[20] |= 0x20;
    assert_eq!(accept(&mut p, &fragment, None, None), None);
    assert_eq!(accept(&mut p, &frame(good, US, 0), None, None), None, "no BTH at all");
    assert_eq!(p.losses().receive, 3);
}

#[test]
fn what_the_interface_or_the_peer_would_refuse_is_lost() {
    let mut p = port(None);
    let f = flow("10.0.0.1", "ff0e::1");
    let mut slot = vec![0; p.slot_len()];
    let foreign = TxBurst { flow: flow("10.0.0.7", "239.0.0.1"), len: 60, segment: 32, segments: 1 };
    let long = TxBurst { flow: f, len: 1501, ..foreign };
    let two = TxBurst { flow: f, segments: 2, ..foreign };
    for burst in [foreign, long, two] {
        assert_eq!(p.place(at(0), &burst, &mut slot), Placed::Gone);
    }
    assert_eq!(p.losses().transmit, 3);
}

/// Writes a superframe of `len` bytes of segments.
fn place_super(port: &mut EthernetPort, flow: Flow, segment: usize, len: usize) -> Option<Vec<u8>> {
    let mut slot = vec![0; port.slot_len()];
    let room = port.room(&mut slot);
    let out = &mut room.buf[room.headroom..];
    let header = write_outer(&flow, room.ids.id(0), len, out).unwrap();
    let burst = TxBurst { flow, len: header + len, segment, segments: len.div_ceil(segment) };
    match port.place(at(1), &burst, &mut slot) {
        Placed::Send(range) => Some(slot[range].to_vec()),
        Placed::Gone => None,
    }
}

#[test]
fn a_superframe_stands_behind_its_virtio_header_and_takes_an_id_a_segment() {
    for vlan in [None, Some(VlanTag { id: 7, priority: 0 })] {
        let mut p = framed(vlan, Framing::Vnet { segments_max: 64 });
        let f = flow("10.0.0.1", "10.0.0.2");
        let ethernet = if vlan.is_some() { 18 } else { 14 };
        // The first waits for an answer; the question has a header of zeroes.
        assert_eq!(place_super(&mut p, f, 1000, 5500), None);
        let question = next(&mut p).unwrap();
        assert_eq!((&question[..10], &question[10 + ethernet - 2..10 + ethernet]), (&[0; 10][..], &[8, 6][..]));
        accept(&mut p, &arp_reply(PEER, 2), vlan.map(|v| v.id), None);
        let waited = next(&mut p).unwrap();
        let second = place_super(&mut p, f, 1000, 2000).unwrap();
        let packet = place(&mut p, at(1), f, 9).unwrap();
        for (bytes, id, kind, size) in [(waited, 1, 5, 1000), (second, 7, 5, 1000), (packet, 9, 0, 0)] {
            assert_eq!((bytes[1], u16::from_ne_bytes([bytes[4], bytes[5]])), (kind, size));
            assert_eq!(bytes[10..16], PEER.0);
            let ip = 10 + ethernet;
            assert_eq!((bytes[ip], &bytes[ip + 4..ip + 6]), (0x45, &[0, id][..]), "ids go up by the segments");
        }
        assert_eq!(p.losses(), DeviceLosses::default());
    }
}

#[test]
fn a_superframe_to_ourselves_comes_back_as_one() {
    let mut p = framed(None, Framing::Vnet { segments_max: 64 });
    assert_eq!(place_super(&mut p, flow("fd00::1", "fd00::1"), 1000, 5500), None);
    let mut got = Vec::new();
    p.receive_looped(at(1), 9, &mut |b| got.push((b.segment, b.bytes.len())));
    assert_eq!(got, [(1000, 5500)]);
    assert_eq!(p.looped_bytes, 0);
}

#[test]
fn a_superframe_that_is_none_is_lost() {
    let mut p = framed(None, Framing::Vnet { segments_max: 4 });
    let f = flow("10.0.0.1", "239.0.0.1");
    assert!(place_super(&mut p, f, 1472, 4 * 1472).is_some());
    assert_eq!(place_super(&mut p, f, 1000, 5000), None, "a segment too many");
    assert_eq!(place_super(&mut p, f, 1473, 3000), None, "a segment longer than the interface carries");
    let mut slot = vec![0; p.slot_len()];
    for segment in [0, 900, 2000] {
        let burst = TxBurst { flow: f, len: 28 + 2000, segment, segments: 2 };
        assert_eq!(p.place(at(1), &burst, &mut slot), Placed::Gone, "{segment} is not half of 2000, about");
    }
    assert_eq!(p.losses().transmit, 5);
}

#[test]
fn the_bytes_that_wait_are_bounded() {
    let mut p = framed(None, Framing::Vnet { segments_max: 64 });
    let each = 64_000;
    let room = WAITING_BYTES_MAX / (each + 28 + HEADROOM);
    for host in 0..200 {
        let f = flow("10.0.0.1", &format!("10.0.1.{host}"));
        assert_eq!(place_super(&mut p, f, 1000, each), None);
    }
    assert_eq!((p.held.len(), p.losses().transmit), (room, 200 - room as u64));
    assert!(p.held_bytes <= WAITING_BYTES_MAX);
    accept(&mut p, &arp_reply(PEER, 9), None, None);
    assert_eq!(place_super(&mut p, flow("10.0.0.1", "10.0.0.1"), 1000, each), None, "what is looped counts apart");
    assert_eq!(p.looped.len(), 1);
}

proptest! {
    #[test]
    fn no_frame_breaks_it(
        mut bytes in prop::collection::vec(any::<u8>(), 0..120),
        start in 0usize..4,
        tag in prop::option::of(any::<u16>()),
        segment in prop::option::of(any::<u16>()),
    ) {
        let seeds = [vec![], arp_reply(PEER, 2), frame(flow("10.0.0.2", "10.0.0.1"), US, 32), frame(flow("fd00::2", "fd00::1"), US, 32)];
        let keep = bytes.len().min(seeds[start].len()) / 2;
        bytes[..keep].copy_from_slice(&seeds[start][..keep]);
        let mut p = port(None);
        p.accept(at(0), &bytes, tag, segment, &mut |b| assert!(b.segment > 0 && b.segment <= b.bytes.len()));
        prop_assert!(p.held.is_empty());
    }
}
