//! Which packets share a burst, and that each of them is what it would be alone.
//!
//! The rule (docs/adr/0022): packets of one flow and one length, of which the last may be shorter. So a SEND is one run; a
//! WRITE's First, longer by its RETH, takes one more packet with it, and the rest is a run.

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::time::Instant;
use uroce::types::{Gid, PathMtu, Rkey};
use uroce::verbs::{
    AccessFlags, AddressVector, MwBind, MwType, Operation, Payload, QpType, SendFlags, SendWr, UdDestination, Verbs,
    WcStatus, WorkCompletion,
};
use uroce::wire::{self, IpFields, Packet};
use uroce_tests::pair::{Options, Pair, QKEY, Side};

const MTU: usize = 256;

fn pair(qp_type: QpType) -> Pair {
    Pair::new(&Options { qp_type, mtu: PathMtu::B256, ..Options::default() })
}

/// A burst as it left.
struct Sent {
    bytes: Vec<u8>,
    segment: usize,
    first_id: u16,
}

impl Sent {
    fn packets(&self) -> impl Iterator<Item = Packet<'_>> {
        self.bytes.chunks(self.segment).map(|p| Packet::parse(p).unwrap())
    }

    /// Opcodes and payload bytes.
    fn shape(&self) -> Vec<(u8, usize)> {
        self.packets().map(|p| (p.opcode(), p.payload().len())).collect()
    }
}

/// Everything that `side` has to send, at most `segments_max` packets a burst, in a room of `len` bytes. Checks of each
/// packet that its ICRC is the one of its own IP packet, whose identification is one above the packet before.
fn sent(p: &mut Pair, side: Side, segments_max: usize, len: usize) -> Vec<Sent> {
    let (now, mut next_id, mut all) = (p.now, 0xFFFE, Vec::new());
    let mut buf = vec![0; len];
    loop {
        let ids = IdRule::From(next_id);
        let room = TxRoom { buf: &mut buf, headroom: 10, segments_max, ids, medium: Medium::Ip };
        let Some(burst) = p.node(side).endpoint.poll_transmit(now, room) else { return all };
        let frame = &buf[10..10 + burst.len];
        let outer = wire::parse_ip(frame).unwrap();
        assert_eq!((outer.flow.src, outer.flow.dst), (burst.flow.src, burst.flow.dst));
        assert_eq!(outer.ip.id, next_id);
        assert_eq!(outer.payload.len().div_ceil(burst.segment), burst.segments);
        assert!(burst.segments <= segments_max);
        for (index, segment) in outer.payload.chunks(burst.segment).enumerate() {
            let ip = IpFields { id: next_id.wrapping_add(u16::try_from(index).unwrap()), flags_fragment: 0x4000 };
            assert!(wire::check(&burst.flow, ip, segment), "packet {index} of a burst of {}", burst.segments);
        }
        all.push(Sent { bytes: outer.payload.to_vec(), segment: burst.segment, first_id: next_id });
        next_id = next_id.wrapping_add(u16::try_from(burst.segments).unwrap());
    }
}

/// Hands a burst to `side` as one superframe.
fn hand(p: &mut Pair, side: Side, sent: &Sent) {
    let (now, flow) = (p.now, p.flow_from(side.other()));
    let ids = RxIds::Known(IpFields { id: sent.first_id, flags_fragment: 0x4000 });
    let burst = RxBurst { flow, bytes: &sent.bytes, segment: sent.segment, ids, at: now };
    p.node(side).endpoint.handle_burst(now, burst);
}

fn statuses(completions: &[WorkCompletion]) -> Vec<(u64, WcStatus)> {
    completions.iter().map(|c| (c.wr_id, c.status)).collect()
}

#[test]
fn a_send_is_one_run_with_a_shorter_last() {
    let mut p = pair(QpType::Rc);
    let text: Vec<u8> = (0..1124_u32).map(|i| (i % 251) as u8).collect();
    p.a.region.write(0, &text).unwrap();
    p.b.recv(1, 0, 2000);
    p.a.send(1, Operation::Send, 0, 1124);
    let bursts = sent(&mut p, Side::A, 16, 9000);
    // SEND First, Middle, Middle, Middle, Last with 100 bytes.
    assert_eq!(
        bursts.iter().map(Sent::shape).collect::<Vec<_>>(),
        [[(0, MTU), (1, MTU), (1, MTU), (1, MTU), (2, 100)]]
    );
    let psns: Vec<u32> = bursts[0].packets().map(|p| p.psn.get()).collect();
    assert_eq!(psns, [100, 101, 102, 103, 104]);
    hand(&mut p, Side::B, &bursts[0]);
    assert_eq!(p.b.completions()[0].byte_len, 1124);
    assert_eq!(p.b.region.to_vec()[..1124], text);
    // One ACK, for the last.
    let acks = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(acks.iter().map(|s| s.packets().map(|p| p.psn.get()).collect::<Vec<_>>()).collect::<Vec<_>>(), [[104]]);
    hand(&mut p, Side::A, &acks[0]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
}

#[test]
fn a_write_is_its_first_with_one_more_and_then_a_run() {
    let mut p = pair(QpType::Rc);
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 4 * 256);
    p.a.send(2, Operation::Write(there), 0, 2 * 256 + 1);
    let shapes: Vec<_> = sent(&mut p, Side::A, 16, 9000).iter().map(Sent::shape).collect();
    // A First is longer by its RETH: what follows it is a shorter last segment, and the next one begins a burst.
    assert_eq!(
        shapes,
        [[(6, MTU), (7, MTU)], [(7, MTU), (8, MTU)], [(6, MTU), (7, MTU)]]
            .map(Vec::from)
            .into_iter()
            .chain([vec![(8, 1)]])
            .collect::<Vec<_>>()
    );
}

#[test]
fn messages_of_one_length_share_a_burst_and_their_acknowledgement() {
    let mut p = pair(QpType::Rc);
    let there = p.b.remote(0);
    for wr_id in 0..10 {
        p.a.send(wr_id, Operation::Write(there), 0, 64);
    }
    let bursts = sent(&mut p, Side::A, 16, 9000);
    assert_eq!(bursts.iter().map(Sent::shape).collect::<Vec<_>>(), [vec![(0x0A, 64); 10]]);
    hand(&mut p, Side::B, &bursts[0]);
    let acks = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(acks.iter().map(Sent::shape).collect::<Vec<_>>(), [[(0x11, 0)]]);
    hand(&mut p, Side::A, &acks[0]);
    assert_eq!(p.a.completions().len(), 10);
}

#[test]
fn read_answers_run_from_one_to_the_next_where_their_lengths_allow() {
    let mut p = pair(QpType::Rc);
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 4 * 256);
    p.a.send(2, Operation::Read(there), 2000, 3 * 256 - 4);
    let requests = sent(&mut p, Side::A, 16, 9000);
    assert_eq!(requests.iter().map(Sent::shape).collect::<Vec<_>>(), [[(0x0C, 0), (0x0C, 0)]]);
    hand(&mut p, Side::B, &requests[0]);
    let answers = sent(&mut p, Side::B, 16, 9000);
    // First and Last have an AETH and Middle has none: a Middle is a shorter last segment, a Last goes with the next First.
    let shapes: Vec<_> = answers.iter().map(Sent::shape).collect();
    assert_eq!(
        shapes,
        [
            vec![(0x0D, MTU), (0x0E, MTU)],
            vec![(0x0E, MTU)],
            vec![(0x0F, MTU), (0x0D, MTU), (0x0E, MTU)],
            vec![(0x0F, MTU - 4)]
        ]
    );
    for burst in &answers {
        hand(&mut p, Side::A, burst);
    }
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

#[test]
fn a_burst_has_as_many_packets_as_the_device_and_the_length_of_an_ip_packet_allow() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B4096, region: 1 << 18, ..Options::default() });
    p.a.send(1, Operation::Send, 0, 20 * 4096);
    let lens: Vec<_> = sent(&mut p, Side::A, 64, 80_000).iter().map(|s| s.packets().count()).collect();
    // 28 bytes of IP and UDP, then 4112 a packet: 15 in 65,535 bytes.
    assert_eq!(lens, [15, 5]);
    p.a.send(2, Operation::Send, 0, 10 * 4096);
    let lens: Vec<_> = sent(&mut p, Side::A, 4, 80_000).iter().map(|s| s.packets().count()).collect();
    assert_eq!(lens, [4, 4, 2]);
    // The room ends before the third.
    p.a.send(3, Operation::Send, 0, 4 * 4096);
    let lens: Vec<_> = sent(&mut p, Side::A, 64, 10 + 28 + 3 * 4112 - 1).iter().map(|s| s.packets().count()).collect();
    assert_eq!(lens, [2, 2]);
}

#[test]
fn superframes_can_be_turned_off() {
    let mut p = pair(QpType::Rc);
    p.a.endpoint.set_segments_max(1);
    p.a.send(1, Operation::Send, 0, 3 * 256);
    let lens: Vec<_> = sent(&mut p, Side::A, 16, 9000).iter().map(|s| s.packets().count()).collect();
    assert_eq!(lens, [1, 1, 1]);
}

#[test]
fn a_message_that_cannot_be_sent_ends_the_burst_before_it_and_fails_behind_it() {
    let mut p = pair(QpType::Rc);
    let there = p.b.remote(0);
    let gone = p.a.endpoint.register(p.a.pd, &p.a.region.clone(), uroce::verbs::AccessFlags::ALL, None).unwrap();
    p.a.send(1, Operation::Write(there), 0, 64);
    let sge = [uroce::verbs::Sge { addr: gone.iova, length: 64, lkey: gone.lkey }];
    let (payload, flags) = (Payload::Sges(&sge), SendFlags::SIGNALED);
    let wr = SendWr { wr_id: 2, operation: Operation::Write(there), payload, flags, destination: None };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    p.a.send(3, Operation::Write(there), 0, 64);
    p.a.endpoint.deregister(gone.handle).unwrap();
    let bursts = sent(&mut p, Side::A, 16, 9000);
    assert_eq!(bursts.iter().map(Sent::shape).collect::<Vec<_>>(), [[(0x0A, 64)]]);
    assert_eq!(statuses(&p.a.completions()), []);
    hand(&mut p, Side::B, &bursts[0]);
    let acks = sent(&mut p, Side::B, 16, 9000);
    hand(&mut p, Side::A, &acks[0]);
    let ends = [(1, WcStatus::Success), (2, WcStatus::LocalProtection), (3, WcStatus::WorkRequestFlushed)];
    assert_eq!(statuses(&p.a.completions()), ends);
}

#[test]
fn one_bad_packet_of_a_superframe_is_lost_and_the_rest_is_not() {
    let mut p = pair(QpType::Rc);
    p.b.recv(1, 0, 2000);
    p.a.region.write(0, &[7; 4 * 256]).unwrap();
    p.a.send(1, Operation::Send, 0, 4 * 256);
    let mut bursts = sent(&mut p, Side::A, 16, 9000);
    let third = bursts[0].segment * 2 + 20;
    bursts[0].bytes[third] ^= 1;
    hand(&mut p, Side::B, &bursts[0]);
    // Two in place, the third dropped, the fourth out of sequence: NAK for 102.
    assert_eq!(p.b.region.to_vec()[..1024], [vec![7; 512], vec![0; 512]].concat());
    let naks = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(naks.iter().map(|s| s.packets().map(|p| p.psn.get()).collect::<Vec<_>>()).collect::<Vec<_>>(), [[102]]);
    for nak in &naks {
        hand(&mut p, Side::A, nak);
    }
    let again = sent(&mut p, Side::A, 16, 9000);
    assert_eq!(again.iter().map(Sent::shape).collect::<Vec<_>>(), [[(1, MTU), (2, MTU)]]);
    hand(&mut p, Side::B, &again[0]);
    assert_eq!(p.b.region.to_vec()[..1024], [7; 1024]);
    assert_eq!(statuses(&p.b.completions()), [(1, WcStatus::Success)]);
}

#[test]
fn datagrams_share_a_burst_as_long_as_they_go_the_same_way() {
    let mut p = pair(QpType::Ud);
    p.now = Instant::from_nanos(5);
    let to = |p: &mut Pair, address: &str| {
        let av = AddressVector::new(address.parse::<std::net::IpAddr>().map(Gid::from).unwrap(), 0);
        p.a.endpoint.create_ah(p.a.pd, av).unwrap()
    };
    let (near, far) = (to(&mut p, "10.0.0.2"), to(&mut p, "10.0.0.3"));
    let qpn = p.b.qpn;
    for (wr_id, (ah, len)) in [(near, 64), (near, 64), (near, 10), (near, 64), (far, 64)].into_iter().enumerate() {
        let bytes = vec![u8::try_from(wr_id).unwrap(); len];
        let destination = Some(UdDestination { ah, qpn, qkey: QKEY });
        let (payload, flags) = (Payload::Inline(&bytes), SendFlags::SIGNALED);
        let wr = SendWr { wr_id: wr_id as u64, operation: Operation::Send, payload, flags, destination };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    }
    for wr_id in 0..4 {
        p.b.recv(wr_id, 0, 200);
    }
    let bursts = sent(&mut p, Side::A, 16, 9000);
    let lens = |s: &Sent| s.packets().map(|p| p.payload().len()).collect::<Vec<_>>();
    assert_eq!(bursts.iter().map(lens).collect::<Vec<_>>(), [vec![64, 64, 10], vec![64], vec![64]]);
    assert_eq!(p.a.completions().iter().map(|c| c.wr_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    hand(&mut p, Side::B, &bursts[0]);
    let got: Vec<_> = p.b.completions().iter().map(|c| (c.wr_id, c.byte_len)).collect();
    assert_eq!(got, [(0, 40 + 64), (1, 40 + 64), (2, 40 + 10)]);
}

#[test]
fn a_datagram_that_waits_for_the_next_burst_is_flushed_like_any_other() {
    let mut p = pair(QpType::Ud);
    let av = AddressVector::new("10.0.0.2".parse::<std::net::IpAddr>().map(Gid::from).unwrap(), 0);
    let ah = p.a.endpoint.create_ah(p.a.pd, av).unwrap();
    let destination = Some(UdDestination { ah, qpn: p.b.qpn, qkey: QKEY });
    for (wr_id, len) in [(1, 8), (2, 64), (3, 64)] {
        let bytes = vec![0; len];
        let (payload, flags) = (Payload::Inline(&bytes), SendFlags::SIGNALED);
        let wr = SendWr { wr_id, operation: Operation::Send, payload, flags, destination };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    }
    let mut buf = [0; 9000];
    let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 8, ids: IdRule::Zero, medium: Medium::Udp };
    let burst = p.a.endpoint.poll_transmit(p.now, room).unwrap();
    // The second is longer: it was looked at and stays.
    assert_eq!(burst.segments, 1);
    p.a.endpoint.modify_qp(p.a.qp, uroce::verbs::QpTransition::Err.into()).unwrap();
    let flushed = WcStatus::WorkRequestFlushed;
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, flushed), (3, flushed)]);
}

#[test]
fn bytes_in_flight_stay_below_the_limit_of_the_qp() {
    let mut p = Pair::new(&Options { region: 1 << 17, max_in_flight: Some(10 * 1024), ..Options::default() });
    let there = p.b.remote(0);
    // A message of 30 packets: 10 go, and each quarter of the window asks for an answer.
    p.a.send(1, Operation::Write(there), 0, 30 * 1024);
    let packets: Vec<_> = sent(&mut p, Side::A, 16, 70_000);
    let asks: Vec<_> = packets.iter().flat_map(Sent::packets).map(|p| (p.psn.get(), p.ack_req)).collect();
    assert_eq!(asks.len(), 10);
    assert!(asks.contains(&(101, true)) && asks.last() == Some(&(109, true)), "{asks:?}");
    for burst in &packets {
        hand(&mut p, Side::B, burst);
    }
    // One ACK speaks for all ten, though the first that asked was the second.
    let acks = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(acks.iter().map(|s| s.packets().map(|p| p.psn.get()).collect::<Vec<_>>()).collect::<Vec<_>>(), [[109]]);
    hand(&mut p, Side::A, &acks[0]);
    assert_eq!(sent(&mut p, Side::A, 16, 70_000).iter().map(|s| s.packets().count()).sum::<usize>(), 10);

    // Small messages count by their bytes: as many go as packets may.
    let mut p = Pair::new(&Options { max_in_flight: Some(10 * 1024), ..Options::default() });
    for wr_id in 0..60 {
        p.a.send(wr_id, Operation::Write(p.b.remote(0)), 0, 64);
    }
    assert_eq!(sent(&mut p, Side::A, 64, 70_000).iter().map(|s| s.packets().count()).sum::<usize>(), 60);

    // A READ asks for half of the window at a time.
    let mut p = Pair::new(&Options { region: 1 << 17, max_in_flight: Some(10 * 1024), ..Options::default() });
    p.a.send(1, Operation::Read(p.b.remote(0)), 0, 30 * 1024);
    let requests = sent(&mut p, Side::A, 16, 70_000);
    let asked: Vec<_> = requests.iter().flat_map(Sent::packets).map(|p| p.psn.get()).collect();
    assert_eq!(asked, [100, 105]);
    for burst in &requests {
        hand(&mut p, Side::B, burst);
    }
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
}

#[test]
fn an_acknowledgement_rides_behind_requests_and_is_not_kept_waiting_by_them() {
    let mut p = pair(QpType::Rc);
    let (here, there) = (p.a.remote(0), p.b.remote(0));
    p.a.send(1, Operation::Write(there), 0, 8);
    let ping = sent(&mut p, Side::A, 16, 9000);
    hand(&mut p, Side::B, &ping[0]);
    p.b.send(2, Operation::Write(here), 100, 8);
    // The answer of the program and the ACK of what it answers, in one burst; the ACK is the shorter.
    let pong = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(pong.iter().map(Sent::shape).collect::<Vec<_>>(), [[(0x0A, 8), (0x11, 0)]]);
    hand(&mut p, Side::A, &pong[0]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);

    // Requests that leave no room, burst after burst: the ACK has the second turn.
    let ack = sent(&mut p, Side::A, 16, 9000);
    hand(&mut p, Side::B, &ack[0]);
    p.a.send(3, Operation::Write(there), 0, 8);
    let again = sent(&mut p, Side::A, 16, 9000);
    hand(&mut p, Side::B, &again[0]);
    for wr_id in 4..8 {
        p.b.send(wr_id, Operation::Write(here), 100, 256);
    }
    let opcodes: Vec<_> = sent(&mut p, Side::B, 2, 9000).iter().map(Sent::shape).collect();
    assert_eq!(opcodes, [vec![(0x0A, 256), (0x0A, 256)], vec![(0x11, 0)], vec![(0x0A, 256), (0x0A, 256)]]);
}

#[test]
fn an_acknowledgement_behind_read_data_of_its_burst_speaks_for_all_that_was_executed() {
    let mut p = pair(QpType::Rc);
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, MTU as u32);
    p.a.send(2, Operation::Write(there), 0, 8);
    p.a.send(3, Operation::Write(there), 0, 2 * MTU as u32);
    // READ 100, WRITE 101, and of the last WRITE its First alone, which asks for no answer: 102.
    for request in &sent(&mut p, Side::A, 1, 9000)[..3] {
        hand(&mut p, Side::B, request);
    }
    let answers = sent(&mut p, Side::B, 16, 9000);
    assert_eq!(answers.iter().map(Sent::shape).collect::<Vec<_>>(), [[(0x10, MTU), (0x11, 0)]]);
    assert_eq!(answers[0].packets().map(|p| p.psn.get()).collect::<Vec<_>>(), [100, 102]);
}

#[test]
fn a_local_operation_between_messages_of_a_burst_completes_in_its_turn() {
    let access = AccessFlags::ALL | AccessFlags::MW_BIND;
    for qp_type in [QpType::Rc, QpType::Uc] {
        let mut p = Pair::new(&Options { qp_type, mtu: PathMtu::B256, access, ..Options::default() });
        let there = p.b.remote(0);
        let window = p.a.endpoint.alloc_mw(p.a.pd, MwType::Two).unwrap();
        let rkey = Rkey::new(window.rkey.get() & !0xFF | 9);
        let (mr, addr) = (Some(p.a.mr.handle), p.a.mr.iova);
        let bind = MwBind { mw: window.handle, rkey, mr, addr, length: 8, access: AccessFlags::REMOTE_WRITE };
        p.a.send(1, Operation::Write(there), 0, 64);
        p.a.send_local(2, Operation::BindMw(bind));
        p.a.send(3, Operation::Write(there), 0, 64);
        let bursts = sent(&mut p, Side::A, 16, 9000);
        assert_eq!(bursts.iter().flat_map(Sent::packets).count(), 2);
        for burst in &bursts {
            hand(&mut p, Side::B, burst);
        }
        p.settle();
        let done = [(1, WcStatus::Success), (2, WcStatus::Success), (3, WcStatus::Success)];
        assert_eq!(statuses(&p.a.completions()), done, "{qp_type:?}");
    }
}
