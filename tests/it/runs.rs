//! Runs: packets inside a message that leave or arrive together are what they would be one by one.
//!
//! Two pairs of the same seed do the same work. One is handed each superframe whole, the other packet by packet, where there
//! are no runs; after each, both must look alike in everything: memory, completions, counters, and all that they say.

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{Imm, PathMtu, Psn};
use uroce::verbs::{
    MemoryRegion, Operation, Payload, QpOptions, QpType, RecvWr, SendFlags, SendWr, Sge, SourcePortCheck, Verbs,
};
use uroce::wire::{self, Flow, IpFields};
use uroce_tests::pair::{Options, Pair, Side};

const MTU: usize = 256;
const SIDES: [Side; 2] = [Side::A, Side::B];

/// A burst under way.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sent {
    segments: Vec<Vec<u8>>,
    id: u16,
}

/// What `side` has to send, identifications from `id` on.
fn sent(p: &mut Pair, side: Side, segments_max: usize, id: u16) -> Vec<Sent> {
    let (now, mut id, mut all, mut buf) = (p.now, id, Vec::new(), vec![0; 9000]);
    loop {
        let room = TxRoom { buf: &mut buf, headroom: 0, segments_max, ids: IdRule::From(id), medium: Medium::Ip };
        let Some(burst) = p.node(side).endpoint.poll_transmit(now, room) else { return all };
        let segments: Vec<_> = buf[28..burst.len].chunks(burst.segment).map(Vec::from).collect();
        id = id.wrapping_add(u16::try_from(segments.len()).unwrap());
        all.push(Sent { segments, id: id.wrapping_sub(u16::try_from(burst.segments).unwrap()) });
    }
}

fn hand(p: &mut Pair, side: Side, flow: Flow, segments: &[Vec<u8>], id: u16) {
    let ids = RxIds::Known(IpFields { id, flags_fragment: 0x4000 });
    let burst = RxBurst { flow, bytes: &segments.concat(), segment: segments[0].len(), ids, at: p.now };
    let now = p.now;
    p.node(side).endpoint.handle_burst(now, burst);
}

/// Something that happens to a burst on its way. Its packets keep their lengths; all but the first kind have right ICRCs.
fn mishap(sent: &mut Sent, flow: &Flow, rng: &mut Rng) {
    let count = sent.segments.len() as u64;
    let at = (rng.next_u64() % count) as usize;
    let whole = sent.segments[0].len();
    let kind = rng.next_u32() % 13;
    match kind {
        0 => {
            let bit = rng.next_u64() as usize % (sent.segments[at].len() * 8);
            sent.segments[at][bit / 8] ^= 1 << (bit % 8);
            return;
        }
        1 if count > 1 => drop(sent.segments.remove(at)),
        2 => sent.segments[at][8] ^= 0x80,                          // AckReq
        3 => sent.segments[at][1] ^= 0x80,                          // SE
        4 => sent.segments[at][4] ^= 0xC0,                          // FECN and BECN
        5 => sent.segments[at][11] ^= 1 + rng.next_u32() as u8 % 7, // PSN
        6 => sent.segments[at][3] ^= 1,                             // P_Key
        7 => sent.segments[at][7] ^= 1,                             // destination
        8 => sent.segments[at][1] ^= 0x10,                          // pad
        // SEND or WRITE, Middle or another.
        9 => sent.segments[at][0] = sent.segments[at][0] & 0xE0 | [0, 1, 2, 6, 7, 8, 0x0E][rng.next_u32() as usize % 7],
        // It goes on inside, where it should end.
        10 => {
            let inside = sent.segments.iter().rposition(|s| wire::is_inside(s) && s.len() == whole).unwrap_or(0);
            let mut more = sent.segments[inside].clone();
            more[11] = more[11].wrapping_add(1);
            sent.segments.truncate(inside + 1);
            sent.segments.push(more);
        }
        11 if at > 0 && sent.segments[at].len() == whole => sent.segments.swap(0, at),
        _ if sent.segments[at].len() == whole && count < 20 => {
            let again = sent.segments[at].clone();
            sent.segments.insert(at, again);
        }
        _ => {}
    }
    for (segment, step) in sent.segments.iter_mut().zip(0..) {
        let (end, ip) = (segment.len() - 4, IpFields { id: sent.id.wrapping_add(step), flags_fragment: 0x4000 });
        wire::seal(flow, ip, segment, end);
    }
}

fn text() -> Vec<u8> {
    (0..1u32 << 15).map(|i| (i * 7 + (i >> 8)) as u8).collect()
}

/// Posts what A has to do.
fn post(p: &mut Pair, kind: usize, lengths: &[u32], parts: u32) {
    for node in [&p.a, &p.b] {
        node.region.write(0, &text()).unwrap();
    }
    for (wr_id, &length) in (0..).zip(lengths) {
        let there = p.b.remote(1 << 15);
        let operation = match kind {
            0 => Operation::Write(there),
            1 => Operation::Send,
            2 => Operation::WriteImm(there, Imm::new(7)),
            _ => Operation::Read(p.b.remote(100)),
        };
        let sges = elements(p.a.mr, if kind == 3 { 1 << 15 } else { 0 }, length, parts);
        let payload = Payload::Sges(&sges);
        let wr = SendWr { wr_id, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    }
}

/// Posts a receive for a message of `length` bytes, in `parts` elements.
fn post_receive(p: &mut Pair, wr_id: u64, length: u32, parts: u32) {
    let sges = elements(p.b.mr, 1 << 15, length, parts);
    p.b.endpoint.post_recv(p.b.qp, &[RecvWr { wr_id, sges: &sges }]).unwrap();
}

/// `length` bytes of a region from `at` on, in `parts` elements.
fn elements(mr: MemoryRegion, at: u64, length: u32, parts: u32) -> Vec<Sge> {
    let part = length.div_ceil(parts).max(1);
    let ends = (0..parts).map(|i| (i * part, part.min(length.saturating_sub(i * part))));
    ends.map(|(from, length)| Sge { addr: mr.iova + at + u64::from(from), length, lkey: mr.lkey }).collect()
}

fn alike(whole: &mut Pair, apart: &mut Pair, what: &str) {
    let now = whole.now;
    for side in SIDES {
        let (left, right) = (whole.node(side), apart.node(side));
        assert_eq!(left.completions(), right.completions(), "{what}, {side:?}");
        assert_eq!(left.endpoint.counters(), right.endpoint.counters(), "{what}, {side:?}");
        assert_eq!(left.endpoint.qp_counters(left.qp), right.endpoint.qp_counters(right.qp), "{what}, {side:?}");
        assert_eq!(left.endpoint.poll_timeout(), right.endpoint.poll_timeout(), "{what}, {side:?}");
        let info = |n: &uroce_tests::pair::Node| {
            let q = n.endpoint.query_qp(n.qp).unwrap();
            (q.state, q.queues, q.last_error, format!("{:?}", n.endpoint.report_qps(now, 0, 4)))
        };
        assert_eq!(info(left), info(right), "{what}, {side:?}");
        assert!(left.region.to_vec() == right.region.to_vec(), "{what}, {side:?}: memory");
    }
}

/// What is done in one exchange.
struct Work {
    kind: usize,
    qp_type: QpType,
    lengths: Vec<u32>,
    parts: u32,
    /// Receives that are posted at once; the others come late, so that the peer has no credits left or is told to wait.
    receives: usize,
}

/// A pair and the same again, about to do the work of `seed`.
fn twins(seed: u64, rng: &mut Rng) -> ([Pair; 2], Work) {
    let kind = (seed % 4) as usize;
    let qp_type = if kind < 3 && rng.chance(0.3) { QpType::Uc } else { QpType::Rc };
    let psn_a = Psn::from_wire(if rng.chance(0.2) { 0xFF_FFF0 } else { rng.next_u32() }).get();
    let max_in_flight = [None, Some(5000), Some(700)][(seed % 7).min(2) as usize];
    let options = Options { qp_type, psn_a, max_in_flight, mtu: PathMtu::B256, seed, ..Options::default() };
    let lengths = (0..6).map(|i| rng.next_u32() % [9000, 30][i % 2] * [1, 256][i % 2]).collect();
    let (parts, receives) = (1 + rng.next_u32() % 3, rng.next_u32() as usize % 7);
    let work = Work { kind, qp_type, lengths, parts, receives };
    let qp_options = QpOptions {
        credits: rng.chance(0.5),
        source_port_check: if rng.chance(0.5) { SourcePortCheck::First } else { SourcePortCheck::Any },
        cnp_interval: rng.chance(0.5).then_some(Duration::from_micros(50)),
        max_in_flight,
        ..QpOptions::default()
    };
    let pairs = [(); 2].map(|()| {
        let mut p = Pair::new(&options);
        for node in [&mut p.a, &mut p.b] {
            node.endpoint.set_qp_options(node.qp, qp_options).unwrap();
        }
        post(&mut p, kind, &work.lengths, parts);
        post_receives(&mut p, &work, 0..receives);
        p
    });
    (pairs, work)
}

fn post_receives(p: &mut Pair, work: &Work, which: core::ops::Range<usize>) {
    for (wr_id, length) in (0..).zip(&work.lengths).take(which.end).skip(which.start) {
        post_receive(p, wr_id, *length, work.parts);
    }
}

/// One exchange, on a good wire or a bad one; returns how many packets were handed over in superframes.
fn exchange(seed: u64) -> usize {
    let mut rng = Rng::from_u64(seed);
    let ([mut whole, mut apart], work) = twins(seed, &mut rng);
    let (mut handed, mut id, bad) = (0, (rng.next_u32() >> 8) as u16, rng.chance(0.7));
    for round in 0..300 {
        if round == 15 {
            [&mut whole, &mut apart].into_iter().for_each(|p| post_receives(p, &work, work.receives..6));
        }
        let mut quiet = true;
        for side in SIDES {
            let bursts = sent(&mut whole, side, 16, id);
            assert_eq!(bursts, sent(&mut apart, side, 16, id), "seed {seed}, round {round}: {side:?} says the same");
            quiet &= bursts.is_empty();
            let mut flow = whole.flow_from(side);
            for mut burst in bursts {
                if bad && rng.chance(0.25) {
                    mishap(&mut burst, &flow, &mut rng);
                }
                flow.traffic_class = if bad && rng.chance(0.1) { 3 } else { 0 };
                handed += burst.segments.len();
                id = id.wrapping_add(burst.segments.len() as u16);
                hand(&mut whole, side.other(), flow, &burst.segments, burst.id);
                for (segment, step) in burst.segments.into_iter().zip(0..) {
                    hand(&mut apart, side.other(), flow, &[segment], burst.id.wrapping_add(step));
                }
                alike(&mut whole, &mut apart, &format!("seed {seed}, round {round}"));
                let later = whole.now + Duration::from_micros(3);
                (whole.now, apart.now) = (later, later);
            }
        }
        if quiet {
            let acted = [whole.next_timer(), apart.next_timer()];
            assert_eq!(acted[0], acted[1], "seed {seed}, round {round}");
        }
    }
    if !bad && work.qp_type == QpType::Rc {
        let (at, from) = if work.kind == 3 { (&whole.a, 100) } else { (&whole.b, 0) };
        let last = *work.lengths.last().unwrap() as usize;
        assert!(at.region.to_vec()[1 << 15..][..last] == text()[from..][..last], "seed {seed}");
    }
    handed
}

#[test]
fn a_superframe_ends_where_its_packets_one_by_one_do() {
    let handed: usize = (0..600).map(exchange).sum();
    assert!(handed > 50_000, "{handed} packets are too few to say anything");
}

/// A sender whose elements are shorter than a packet has no runs: it must say the same, bit for bit, as one whose message is
/// one element. So PSNs, AckReq, the window and the ICRCs are the same.
#[test]
fn a_message_in_pieces_leaves_as_one_in_one_piece() {
    for (seed, qp_type) in (0..40).zip([QpType::Rc, QpType::Uc].into_iter().cycle()) {
        for kind in 0..3 {
            let max_in_flight = [None, Some(5000), Some(700)][seed as usize % 3];
            let caps = uroce::verbs::QpCapabilities { max_send_sge: 32, max_recv_sge: 32, ..Default::default() };
            let psn_a = (0xFF_FFE8 + seed as u32) & Psn::MASK;
            let options =
                Options { qp_type, psn_a, max_in_flight, mtu: PathMtu::B256, seed, caps, ..Options::default() };
            let lengths = [32 * 200 - seed as u32, 1000 + 31 * seed as u32, 6000];
            let [one, many] = [1, 32].map(|parts| {
                let mut p = Pair::new(&options);
                let credits = seed % 4 < 2;
                let qp_options = QpOptions { credits, max_in_flight, ..QpOptions::default() };
                for node in [&mut p.a, &mut p.b] {
                    node.endpoint.set_qp_options(node.qp, qp_options).unwrap();
                }
                post(&mut p, kind, &lengths, parts);
                post_receive(&mut p, 0, lengths[0], parts);
                p
            });
            let (mut one, mut many) = (one, many);
            for round in 0..200 {
                for (p, parts) in [(&mut one, 1), (&mut many, 32)] {
                    if round % 10 == 9 {
                        p.next_timer();
                    }
                    if round == 20 {
                        (1..3).for_each(|i| post_receive(p, i, lengths[i as usize], parts));
                    }
                }
                for side in SIDES {
                    let bursts = sent(&mut one, side, 16, 0xFFF0);
                    assert_eq!(bursts, sent(&mut many, side, 16, 0xFFF0), "{seed}, {kind}, {round}, {side:?}");
                    for (burst, index) in bursts.into_iter().zip(0..) {
                        let is_lost = qp_type == QpType::Rc && (index + round) % 5 == seed as usize % 9;
                        for p in [&mut one, &mut many] {
                            let flow = p.flow_from(side);
                            if !is_lost {
                                hand(p, side.other(), flow, &burst.segments, burst.id);
                            }
                            p.now = p.now + Duration::from_micros(3);
                        }
                    }
                    alike(&mut one, &mut many, &format!("seed {seed}, {kind}, round {round}"));
                }
            }
            assert_eq!(one.a.endpoint.query_qp(one.a.qp).unwrap().queues.sends_outstanding, 0);
            let moved = |p: &Pair| p.b.region.to_vec()[1 << 15..][..MTU * 20].to_vec();
            assert_eq!(moved(&one), moved(&many));
        }
    }
}

/// A sender may leave the identification constant, and a UDP socket hides it.
#[test]
fn runs_are_right_whatever_the_identifications_are() {
    for hidden in [false, true] {
        let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
        p.b.region.write(0, &[7; 4000]).unwrap();
        post(&mut p, 0, &[4000], 1);
        let flow = p.flow_from(Side::A);
        for mut burst in sent(&mut p, Side::A, 16, 99) {
            for (segment, step) in burst.segments.iter_mut().zip(0..) {
                let (end, id) = (segment.len() - 4, if hidden { step } else { 99 });
                wire::seal(&flow, IpFields { id, flags_fragment: 0x4000 }, segment, end);
            }
            let ids = if hidden { RxIds::Hidden } else { RxIds::Known(IpFields { id: 99, flags_fragment: 0x4000 }) };
            let bytes = burst.segments.concat();
            let arrived = RxBurst { flow, bytes: &bytes, segment: burst.segments[0].len(), ids, at: p.now };
            p.b.endpoint.handle_burst(p.now, arrived);
        }
        assert_eq!(p.b.endpoint.counters().rx_write_requests, 1, "hidden: {hidden}");
        assert_eq!(p.b.region.to_vec()[1 << 15..][..4000], p.a.region.to_vec()[..4000]);
    }
}
