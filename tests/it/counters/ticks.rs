//! One situation a test; in each, every counter of both sides is compared, so that nothing ticks that should not.
//!
//! Packets and bytes are compared in the first test and left out of the others, where they would only be arithmetic.

use uroce::burst::{IdRule, Medium, RxBurst, RxIds, TxRoom};
use uroce::counters::Counters;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Gid, PathMtu, QKey};
use uroce::verbs::{
    AccessFlags, AddressVector, AltPath, AsyncEvent, Operation, PathMigState, Payload, QpAttr, QpOptions, QpState,
    QpTransition, QpType, RecvWr, Remote, SendFlags, SendWr, Sge, SourcePortCheck, UdDestination, Verbs,
};
use uroce::wire::{Body, IpFields, ResponseOp};
use uroce_tests::pair::{Fate, Options, Pair, QKEY, Side};

const TRAFFIC: [&str; 4] = ["sent_pkts", "rcvd_pkts", "sent_bytes", "rcvd_bytes"];

type Ticks = Vec<(&'static str, u64)>;

fn all(p: &mut Pair, side: Side) -> Counters {
    p.node(side).endpoint.counters()
}

/// What is not zero, in the table's order; the QP's own counters must say the same, what belongs to the port aside.
fn ticks(p: &mut Pair, side: Side, traffic: bool) -> Ticks {
    let port = all(p, side);
    let node = p.node(side);
    let qp = node.endpoint.qp_counters(node.qp).expect("the QP lives");
    for ((row, port), qp) in port.rows().zip(qp.values()) {
        let of_port = row.scope == uroce::counters::Scope::Port;
        assert_eq!(qp, if of_port { 0 } else { port }, "{} of the QP", row.name);
    }
    let wanted = |name| traffic || !TRAFFIC.contains(&name);
    port.rows().filter(|(row, n)| *n > 0 && wanted(row.name)).map(|(row, n)| (row.name, n)).collect()
}

fn of_a(p: &mut Pair) -> Ticks {
    ticks(p, Side::A, false)
}

fn of_b(p: &mut Pair) -> Ticks {
    ticks(p, Side::B, false)
}

fn pair(o: Options) -> Pair {
    Pair::new(&o)
}

fn small() -> Options {
    Options { mtu: PathMtu::B256, ..Options::default() }
}

/// Loses the first packet for which `which` holds.
fn lose_first(p: &mut Pair, which: impl Fn(Side, &uroce::wire::Packet<'_>) -> bool) {
    let mut lost = false;
    p.run(|side, packet| {
        let this = !lost && which(side, packet);
        lost |= this;
        if this { Fate::Drop } else { Fate::Deliver }
    });
}

/// A packet made by hand: BTH, what follows it, and a right ICRC.
struct Raw {
    opcode: u8,
    pkey: u16,
    qpn: u32,
    psn: u32,
    rest: Vec<u8>,
}

impl Raw {
    fn new(p: &mut Pair, to: Side, opcode: u8, psn: u32, rest: &[u8]) -> Self {
        Self { opcode, pkey: 0xFFFF, qpn: p.node(to).qpn.get(), psn, rest: rest.to_vec() }
    }

    fn bytes(&self, p: &mut Pair, to: Side) -> Vec<u8> {
        let mut bytes = vec![self.opcode, 0x40];
        bytes.extend(self.pkey.to_be_bytes());
        bytes.extend(self.qpn.to_be_bytes());
        bytes.extend(self.psn.to_be_bytes());
        bytes.extend(&self.rest);
        let end = bytes.len();
        bytes.extend([0; 4]);
        let flow = p.flow_from(to.other());
        uroce::wire::seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, end);
        bytes
    }

    fn arrives(&self, p: &mut Pair, to: Side) {
        let bytes = self.bytes(p, to);
        p.deliver(to, &bytes);
    }
}

/// RETH.
fn reth(remote: Remote, length: u32) -> Vec<u8> {
    [&remote.addr.to_be_bytes()[..], &remote.rkey.get().to_be_bytes(), &length.to_be_bytes()].concat()
}

/// AETH: positive ACK, MSN 0.
const ACK: [u8; 4] = [0x1F, 0, 0, 0];

#[test]
fn sends_and_acks() {
    let mut p = pair(Options::default());
    p.b.recv(1, 0, 100);
    p.a.send(1, Operation::Send, 0, 10);
    p.settle();
    // BTH 12, payload 10, pad 2, ICRC 4; BTH 12, AETH 4, ICRC 4.
    let a = [("sent_pkts", 1), ("rcvd_pkts", 1), ("sent_bytes", 28), ("rcvd_bytes", 20), ("rdma_sends", 1)];
    assert_eq!(ticks(&mut p, Side::A, true), a);
    let b = [("sent_pkts", 1), ("rcvd_pkts", 1), ("sent_bytes", 20), ("rcvd_bytes", 28), ("rdma_recvs", 1)];
    assert_eq!(ticks(&mut p, Side::B, true), b);
    // On Ethernet the outer headers are written too, and do not count.
    p.a.send(2, Operation::Send, 0, 10);
    let mut buf = [0; 2000];
    let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Ip };
    p.a.endpoint.poll_transmit(p.now, room).unwrap();
    assert_eq!(p.a.endpoint.counters().sent_bytes, 56);
}

#[test]
fn a_qp_that_is_gone_leaves_its_counts_to_the_port() {
    let mut p = pair(Options::default());
    p.b.recv(1, 0, 100);
    p.a.send(1, Operation::Send, 0, 10);
    p.settle();
    let before = all(&mut p, Side::B);
    p.b.endpoint.destroy_qp(p.b.qp).unwrap();
    assert_eq!(p.b.endpoint.qp_counters(p.b.qp), None);
    assert_eq!(all(&mut p, Side::B), before);
}

#[test]
fn each_operation_counts_as_its_own() {
    let mut p = pair(Options { access: AccessFlags::ALL | AccessFlags::FLUSH_GLOBAL, ..small() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 600);
    p.a.send(2, Operation::Read(there), 0, 600);
    p.a.send(3, Operation::FetchAdd { remote: there, add: 1 }, 0, 8);
    p.a.send(4, Operation::CompareSwap { remote: there, compare: 0, swap: 1 }, 0, 8);
    p.a.send(5, Operation::AtomicWrite(there), 0, 8);
    let (placement, scope) = (uroce::verbs::FlushPlacement::Global, uroce::verbs::FlushScope::Range);
    let operation = Operation::Flush { remote: there, length: 600, placement, scope };
    let (payload, flags) = (Payload::Sges(&[]), SendFlags::SIGNALED);
    p.a.endpoint.post_send(p.a.qp, &[SendWr { wr_id: 6, operation, payload, flags, destination: None }]).unwrap();
    p.settle();
    assert_eq!(of_a(&mut p), [("rdma_sends", 6)]);
    let b = [
        ("rdma_recvs", 6),
        ("rx_write_requests", 1),
        ("rx_read_requests", 1),
        ("rx_atomic_requests", 3),
        ("rx_flush_requests", 1),
    ];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn two_messages_in_one_go_share_an_ack() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    for wr_id in 0..3 {
        p.a.send(wr_id, Operation::Write(there), 0, 8);
    }
    p.settle();
    assert_eq!(p.ladder().last().unwrap(), "B ACK 102");
    assert_eq!(p.log.len(), 4);
    assert_eq!(of_a(&mut p), [("rdma_sends", 3)]);
    assert_eq!(of_b(&mut p), [("ack_deferred", 2), ("rdma_recvs", 3), ("rx_write_requests", 3)]);
}

#[test]
fn a_lost_packet_makes_one_nak() {
    let mut p = pair(small());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 600);
    lose_first(&mut p, |side, packet| side == Side::A && packet.psn.get() == 101);
    // Lost: 101. Ahead: 102. Sent again: 101 and 102.
    let a = [("rcvd_seq_err", 1), ("completer_retry_err", 1), ("retransmitted_pkts", 2), ("rdma_sends", 1)];
    assert_eq!(of_a(&mut p), a);
    let b = [("out_of_seq_request", 1), ("sent_seq_err", 1), ("rdma_recvs", 1), ("rx_write_requests", 1)];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn behind_a_gap_packets_fall_in_silence() {
    let mut p = pair(small());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 1000);
    lose_first(&mut p, |side, packet| side == Side::A && packet.psn.get() == 101);
    // Ahead: 102, which draws the NAK, and 103.
    let b = [
        ("out_of_seq_request", 2),
        ("sent_seq_err", 1),
        ("rdma_recvs", 1),
        ("rx_write_requests", 1),
        ("drop_ahead_of_sequence", 1),
    ];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn a_lost_ack_makes_a_duplicate() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    lose_first(&mut p, |side, _| side == Side::B);
    p.next_timer();
    p.settle();
    let a = [("completer_retry_err", 1), ("local_ack_timeout_err", 1), ("retransmitted_pkts", 1), ("rdma_sends", 1)];
    assert_eq!(of_a(&mut p), a);
    assert_eq!(of_b(&mut p), [("duplicate_request", 1), ("rdma_recvs", 1), ("rx_write_requests", 1)]);
}

#[test]
fn a_repeat_that_is_not_remembered() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    // Before anything was executed there is nothing that an ACK could name.
    Raw::new(&mut p, Side::B, 0x0A, 99, &[reth(there, 4), vec![0; 4]].concat()).arrives(&mut p, Side::B);
    assert_eq!(of_b(&mut p), [("duplicate_request", 1), ("drop_forgotten_duplicate", 1)]);
    assert_eq!(p.take_sent(Side::B).len(), 0);
}

#[test]
fn a_lost_read_response_is_an_implied_nak() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 512, 8);
    p.a.send(2, Operation::Write(there), 0, 8);
    lose_first(&mut p, |side, packet| {
        side == Side::B && matches!(&packet.body, Body::Response(r) if matches!(r.op, ResponseOp::ReadOnly(_)))
    });
    let a = [("completer_retry_err", 1), ("implied_nak_seq_err", 1), ("retransmitted_pkts", 2), ("rdma_sends", 2)];
    assert_eq!(of_a(&mut p), a);
    let b = [("duplicate_request", 2), ("rdma_recvs", 2), ("rx_write_requests", 1), ("rx_read_requests", 1)];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn no_receive_makes_an_rnr_nak() {
    let mut p = pair(Options::default());
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    p.b.recv(1, 0, 100);
    p.next_timer();
    p.settle();
    assert_eq!(p.a.completions().len(), 1);
    assert_eq!(of_a(&mut p), [("rcvd_rnr_err", 1), ("retransmitted_pkts", 1), ("rdma_sends", 1)]);
    assert_eq!(of_b(&mut p), [("send_rnr_err", 1), ("out_of_buffer", 1), ("rdma_recvs", 1)]);
}

#[test]
fn rnr_retries_are_used_up() {
    let mut p = pair(Options { rnr_retry: 2, ..Options::default() });
    p.a.send(1, Operation::Send, 0, 8);
    p.run_for(Duration::from_secs(10), |_, _| Fate::Deliver);
    let a = [
        ("rcvd_rnr_err", 3),
        ("retry_rnr_exceeded_err", 1),
        ("retransmitted_pkts", 2),
        ("rdma_sends", 1),
        ("req_cqe_error", 1),
    ];
    assert_eq!(of_a(&mut p), a);
    assert_eq!(of_b(&mut p), [("send_rnr_err", 3), ("out_of_buffer", 3)]);
}

#[test]
fn silence_uses_up_the_retries() {
    let mut p = pair(Options { retry: 3, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.a.send(2, Operation::Write(there), 0, 8);
    p.run_for(Duration::from_secs(10), |_, _| Fate::Drop);
    let a = [
        ("retry_exceeded_err", 1),
        ("completer_retry_err", 3),
        ("local_ack_timeout_err", 4),
        ("retransmitted_pkts", 6),
        ("rdma_sends", 2),
        ("req_cqe_error", 2),
        ("req_cqe_flush_error", 1),
    ];
    assert_eq!(of_a(&mut p), a);
    assert_eq!(of_b(&mut p), []);
}

#[test]
fn a_wrong_key_is_an_access_error_on_both_sides() {
    let mut p = pair(Options::default());
    let there = Remote { rkey: uroce::types::Rkey::new(!p.b.mr.rkey.get()), ..p.b.remote(0) };
    p.a.send(1, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(of_a(&mut p), [("rdma_sends", 1), ("req_remote_access_errors", 1), ("req_cqe_error", 1)]);
    assert_eq!(of_b(&mut p), [("sent_access_err", 1)]);
}

#[test]
fn a_message_too_long_for_its_receive() {
    let mut p = pair(Options::default());
    p.b.recv(1, 0, 7);
    p.b.recv(2, 0, 100);
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    assert_eq!(of_a(&mut p), [("rdma_sends", 1), ("req_remote_invalid_request", 1), ("req_cqe_error", 1)]);
    let b =
        [("sent_invalid_err", 1), ("resp_local_length_error", 1), ("resp_cqe_error", 2), ("resp_cqe_flush_error", 1)];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn a_receive_without_memory_is_an_operational_error() {
    let mut p = pair(Options::default());
    let sges = [Sge { addr: p.b.mr.iova + (1 << 20), length: 100, lkey: p.b.mr.lkey }];
    p.b.endpoint.post_recv(p.b.qp, &[RecvWr { wr_id: 1, sges: &sges }]).unwrap();
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    assert_eq!(of_a(&mut p), [("rdma_sends", 1), ("req_remote_operational_err", 1), ("req_cqe_error", 1)]);
    assert_eq!(of_b(&mut p), [("sent_operational_err", 1), ("resp_cqe_error", 1)]);
}

#[test]
fn a_full_cq_is_counted() {
    let mut p = pair(Options { cq_depth: 1, ..Options::default() });
    for wr_id in 0..2 {
        p.b.recv(wr_id, 0, 100);
        p.a.send(wr_id, Operation::Send, 0, 8);
        p.settle();
        p.a.completions();
    }
    // The second receive found the CQ full: that message is not acknowledged.
    assert_eq!(p.b.endpoint.counters().named("cq_overruns"), Some(1));
    assert_eq!(p.b.endpoint.qp_counters(p.b.qp).unwrap().cq_overruns, 1);
}

#[test]
fn a_packet_that_does_not_fit_the_device() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 1000);
    let mut buf = [0; 100];
    let room = TxRoom { buf: &mut buf, headroom: 0, segments_max: 1, ids: IdRule::Zero, medium: Medium::Udp };
    assert!(p.a.endpoint.poll_transmit(p.now, room).is_none());
    assert_eq!(of_a(&mut p), [("send_err", 1), ("req_cqe_error", 1)]);
}

#[test]
fn marks_and_notifications() {
    let mut p = pair(Options::default());
    let ack = Raw::new(&mut p, Side::B, 0x11, 0, &ACK).bytes(&mut p, Side::B);
    let (flow, ids) = (p.flow_from(Side::A), RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 }));
    // Both ECN bits set: a switch on the way was congested.
    let flow = uroce::wire::Flow { traffic_class: 3, ..flow };
    p.b.endpoint.handle_burst(p.now, RxBurst { flow, bytes: &ack, segment: ack.len(), ids, at: p.now });
    Raw::new(&mut p, Side::B, 0x81, 0, &[0; 16]).arrives(&mut p, Side::B);
    let b = [("np_ecn_marked_roce_packets", 1), ("rp_cnp_ignored", 1), ("drop_ghost_ack", 1)];
    assert_eq!(of_b(&mut p), b);
}

/// Every packet of A's arrives with the mark; B tells A once in the interval, and never that an ACK was marked.
#[test]
fn marks_are_told_to_the_sender() {
    let mut p = pair(small());
    let options = QpOptions { cnp_interval: Some(Duration::from_micros(50)), ..QpOptions::default() };
    for side in [Side::A, Side::B] {
        let node = p.node(side);
        node.endpoint.set_qp_options(node.qp, options).unwrap();
    }
    let there = p.b.remote(0);
    let mut notices = Vec::new();
    for _ in 0..3 {
        p.a.send(1, Operation::Write(there), 0, 1000);
        for side in [Side::A, Side::B] {
            for bytes in p.take_sent(side) {
                if bytes[0] == 0x81 {
                    notices.push(bytes.clone());
                }
                let flow = uroce::wire::Flow { traffic_class: 3, ..p.flow_from(side) };
                let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
                let burst = RxBurst { flow, bytes: &bytes, segment: bytes.len(), ids, at: p.now };
                let now = p.now;
                p.node(side.other()).endpoint.handle_burst(now, burst);
            }
        }
        p.now = p.now + Duration::from_micros(30);
    }
    // 0 us and 60 us; at 30 us it is too early. BECN, the default P_Key, A's number, PSN 0, 16 zero bytes (annex A17).
    let mut want = vec![0x81, 0, 0xFF, 0xFF, 0x40];
    want.extend(&p.a.qpn.get().to_be_bytes()[1..]);
    want.extend([0; 4 + 16]);
    assert_eq!(notices.iter().map(|n| &n[..28]).collect::<Vec<_>>(), [&want[..]; 2]);
    assert_eq!(p.a.completions().len(), 3);
    let (done, marked) = ("rdma_recvs", "np_ecn_marked_roce_packets");
    assert_eq!(of_b(&mut p), [(done, 3), ("rx_write_requests", 3), (marked, 12), ("np_cnp_sent", 2)]);
    // Three ACKs and the two notifications were marked too.
    assert_eq!(of_a(&mut p), [("rdma_sends", 3), (marked, 5), ("rp_cnp_ignored", 2)]);
}

/// What is owed to the peer that was is not told to the next one.
#[test]
fn a_qp_that_is_reset_owes_nobody_a_notification() {
    let mut p = pair(small());
    let options = QpOptions { cnp_interval: Some(Duration::from_micros(50)), ..QpOptions::default() };
    p.b.endpoint.set_qp_options(p.b.qp, options).unwrap();
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    let sent = p.take_sent(Side::A);
    let flow = uroce::wire::Flow { traffic_class: 3, ..p.flow_from(Side::A) };
    let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
    let burst = RxBurst { flow, bytes: &sent[0], segment: sent[0].len(), ids, at: p.now };
    p.b.endpoint.handle_burst(p.now, burst);
    let (qp, was) = (p.b.qp, p.b.endpoint.query_qp(p.b.qp).unwrap().attr);
    let none = QpAttr::default();
    let init = QpAttr { access: was.access, pkey_index: was.pkey_index, port: was.port, ..none };
    let (max_dest_rd_atomic, min_rnr_timer) = (was.max_dest_rd_atomic, was.min_rnr_timer);
    let (path_mtu, dest_qpn, rq_psn) = (was.path_mtu, was.dest_qpn, was.rq_psn);
    let rtr = QpAttr { av: was.av, path_mtu, dest_qpn, rq_psn, max_dest_rd_atomic, min_rnr_timer, ..none };
    for (state, attr) in [(QpState::Reset, none), (QpState::Init, init), (QpState::Rtr, rtr)] {
        p.b.endpoint.modify_qp(qp, QpAttr { state: Some(state), ..attr }).unwrap();
    }
    assert_eq!(p.take_sent(Side::B), Vec::<Vec<u8>>::new());
}

#[test]
fn a_device_that_fails_takes_the_link_down() {
    let mut p = pair(Options::default());
    assert!(p.a.endpoint.query_port().active);
    p.a.endpoint.link_down();
    p.a.endpoint.link_down();
    assert!(!p.a.endpoint.query_port().active);
    assert_eq!(of_a(&mut p), [("link_downed", 1)]);
}

#[test]
fn packets_for_nobody() {
    let mut p = pair(Options::default());
    p.deliver(Side::B, &[0; 3]);
    let mut bytes = Raw::new(&mut p, Side::B, 0x11, 0, &ACK).bytes(&mut p, Side::B);
    bytes[14] ^= 1;
    p.deliver(Side::B, &bytes);
    let mut stranger = Raw::new(&mut p, Side::B, 0x11, 0, &ACK);
    stranger.qpn ^= 1;
    stranger.arrives(&mut p, Side::B);
    // From nobody; and to a group, but for one QP.
    let real = p.flow_from(Side::A);
    let nobody = uroce::wire::Flow { src: "239.0.0.1".parse().unwrap(), ..real };
    let group = uroce::wire::Flow { dst: "239.0.0.1".parse().unwrap(), ..real };
    for flow in [nobody, group] {
        let mut bytes = Raw::new(&mut p, Side::B, 0x11, 0, &ACK).bytes(&mut p, Side::B);
        let (end, ip) = (bytes.len() - 4, IpFields { id: 0, flags_fragment: 0x4000 });
        uroce::wire::seal(&flow, ip, &mut bytes, end);
        let burst = RxBurst { flow, bytes: &bytes, segment: bytes.len(), ids: RxIds::Known(ip), at: p.now };
        p.b.endpoint.handle_burst(p.now, burst);
    }
    // XRC SEND Only.
    Raw::new(&mut p, Side::B, 0xA4, 0, &[0; 8]).arrives(&mut p, Side::B);
    assert_eq!(p.b.endpoint.counters().rcvd_pkts, 3);
    let qp = p.b.endpoint.qp_counters(p.b.qp).unwrap();
    assert_eq!(qp, &Counters::default());
    let got: Ticks = all(&mut p, Side::B).rows().filter(|(_, n)| *n > 0).map(|(row, n)| (row.name, n)).collect();
    let wanted = [
        ("rcvd_pkts", 3),
        ("rcvd_bytes", 60),
        ("drop_malformed", 1),
        ("drop_icrc_error", 1),
        ("drop_source_address", 1),
        ("drop_unknown_qp", 2),
        ("drop_unsupported", 1),
    ];
    assert_eq!(got, wanted);
}

#[test]
fn numbers_that_are_guessed() {
    let mut p = pair(Options::default());
    let own = p.b.qpn.get();
    for n in 0..200 {
        let mut guess = Raw::new(&mut p, Side::B, 0x11, 0, &ACK);
        guess.qpn = own ^ (n + 1);
        guess.arrives(&mut p, Side::B);
    }
    let from = uroce::types::Gid::from(p.flow_from(Side::A).src);
    assert_eq!(p.b.endpoint.poll_event(), Some(uroce::verbs::AsyncEvent::Probing(from)));
    let busiest = p.b.endpoint.probing_sources();
    assert_eq!((busiest.len(), busiest[0].source, busiest[0].strays, busiest[0].alarmed), (1, from, 200, true));
    let got: Ticks = all(&mut p, Side::B).rows().filter(|(_, n)| *n > 0).map(|(row, n)| (row.name, n)).collect();
    let wanted = [("rcvd_pkts", 200), ("rcvd_bytes", 4000), ("probe_alarms", 1), ("drop_unknown_qp", 200)];
    assert_eq!(got, wanted);
}

#[test]
fn packets_that_a_qp_does_not_take() {
    let mut p = pair(Options::default());
    // UC SEND Only to an RC QP.
    Raw::new(&mut p, Side::B, 0x24, 100, &[]).arrives(&mut p, Side::B);
    Raw { pkey: 0x8001, ..Raw::new(&mut p, Side::B, 0x04, 100, &[]) }.arrives(&mut p, Side::B);
    let bytes = Raw::new(&mut p, Side::B, 0x04, 100, &[]);
    let flow = uroce::wire::Flow { src: "10.0.0.3".parse().unwrap(), ..p.flow_from(Side::A) };
    let mut bytes = bytes.bytes(&mut p, Side::B);
    let end = bytes.len() - 4;
    uroce::wire::seal(&flow, IpFields { id: 0, flags_fragment: 0x4000 }, &mut bytes, end);
    let ids = RxIds::Known(IpFields { id: 0, flags_fragment: 0x4000 });
    p.b.endpoint.handle_burst(p.now, RxBurst { flow, bytes: &bytes, segment: bytes.len(), ids, at: p.now });
    p.b.endpoint.modify_qp(p.b.qp, QpTransition::Err.into()).unwrap();
    Raw::new(&mut p, Side::B, 0x04, 100, &[]).arrives(&mut p, Side::B);
    let b =
        [("drop_qp_state", 1), ("drop_wrong_transport", 1), ("drop_pkey_mismatch", 1), ("drop_address_mismatch", 1)];
    assert_eq!(of_b(&mut p), b);
}

#[test]
fn packets_along_a_wrong_path() {
    let mut p = pair(Options::default());
    let options = |mig_req, source_port_check| QpOptions { mig_req, source_port_check, ..QpOptions::default() };
    // From another port than the one that B is pinned to.
    p.b.endpoint.set_qp_options(p.b.qp, options(None, SourcePortCheck::Only(1))).unwrap();
    Raw::new(&mut p, Side::B, 0x04, 100, &[]).arrives(&mut p, Side::B);
    p.b.endpoint.set_qp_options(p.b.qp, options(None, SourcePortCheck::Any)).unwrap();
    // B is armed by a packet without the bit, and then asked to migrate along the path that it is on.
    let elsewhere = AddressVector::new(Gid::from("10.0.0.3".parse::<std::net::IpAddr>().unwrap()), 0);
    let rearm = QpAttr {
        alt_path: Some(AltPath::new(elsewhere, AckTimeout::DEFAULT)),
        path_mig_state: Some(PathMigState::Rearm),
        ..QpAttr::to_state(QpState::Rts)
    };
    p.b.endpoint.modify_qp(p.b.qp, rearm).unwrap();
    p.b.recv(1, 0, 8);
    let there = p.b.remote(0);
    for mig_req in [false, true] {
        p.a.endpoint.set_qp_options(p.a.qp, options(Some(mig_req), SourcePortCheck::Any)).unwrap();
        p.a.send(1, Operation::Write(there), 0, 8);
        p.settle();
    }
    let b =
        [("rdma_recvs", 1), ("rx_write_requests", 1), ("drop_source_port_mismatch", 1), ("drop_migration_refused", 1)];
    assert_eq!(of_b(&mut p), b);
    assert_eq!(p.b.endpoint.poll_event(), Some(AsyncEvent::PathMigrationFailed(p.b.qp)));
}

#[test]
fn answers_that_answer_nothing() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    // An ACK while nothing is outstanding.
    Raw::new(&mut p, Side::A, 0x11, 100, &ACK).arrives(&mut p, Side::A);
    p.a.send(1, Operation::Read(there), 0, 8);
    p.take_sent(Side::A);
    // An ACK at the PSN of a READ says nothing.
    Raw::new(&mut p, Side::A, 0x11, 100, &ACK).arrives(&mut p, Side::A);
    let a = [("rdma_sends", 1), ("drop_ghost_ack", 1), ("drop_unexpected_response", 1)];
    assert_eq!(of_a(&mut p), a);
}

fn datagram(p: &mut Pair, bytes: &[u8], qkey: QKey) {
    let there = Gid::from("10.0.0.2".parse::<std::net::IpAddr>().unwrap());
    let ah = p.a.endpoint.create_ah(p.a.pd, AddressVector::new(there, 0)).unwrap();
    let destination = Some(UdDestination { ah, qpn: p.b.qpn, qkey });
    let (payload, flags) = (Payload::Inline(bytes), SendFlags::default());
    let wr = SendWr { wr_id: 1, operation: Operation::Send, payload, flags, destination };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    p.settle();
}

#[test]
fn datagrams_that_are_dropped() {
    let mut p = pair(Options { qp_type: QpType::Ud, ..Options::default() });
    datagram(&mut p, b"no receive", QKEY);
    p.b.recv(1, 0, 44);
    datagram(&mut p, b"no key", QKey::new(1));
    datagram(&mut p, b"fives", QKEY);
    datagram(&mut p, b"four", QKEY);
    assert_eq!(of_a(&mut p), [("rdma_sends", 4)]);
    let b = [
        ("out_of_buffer", 1),
        ("rdma_recvs", 1),
        ("drop_qkey_mismatch", 1),
        ("drop_no_receive_wqe", 1),
        ("drop_receive_too_small", 1),
    ];
    assert_eq!(of_b(&mut p), b);
    // UC: the middle of three is lost, so is the rest of the message; then a WRITE that its QP does not allow.
    let access = AccessFlags::LOCAL_WRITE;
    let mut p = pair(Options { qp_type: QpType::Uc, access, ..small() });
    p.b.recv(1, 0, 1000);
    p.a.send(1, Operation::Send, 0, 600);
    lose_first(&mut p, |_, packet| packet.psn.get() == 101);
    let there = p.b.remote(0);
    p.a.send(2, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(of_b(&mut p), [("drop_uc_sequence", 1), ("drop_refused", 1)]);
}
