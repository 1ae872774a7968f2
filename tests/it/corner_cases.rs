//! The corner cases of the RC transport, each by name. Expected values come from the protocol: PSNs and opcodes of the
//! ladder, statuses of the completions, times from the retry formula.

use uroce::counters::DropReason;
use uroce::time::Duration;
use uroce::types::{AckTimeout, Msn, PathMtu};
use uroce::verbs::{
    AsyncEvent, FailureKind, Operation, Payload, QpState, QpTransition, SendFlags, SendWr, Verbs, WcStatus,
};
use uroce::wire::{Aeth, Body, NakCode, Packet, RequestOp, Response, ResponseOp, Syndrome};
use uroce_tests::pair::{Fate, Options, Pair, Side};

const ACK_TIMEOUT: Duration = Duration::from_nanos(4096 << 14);

fn statuses(done: &[uroce::verbs::WorkCompletion]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn is_ack(packet: &Packet<'_>) -> bool {
    matches!(&packet.body, Body::Response(Response { op: ResponseOp::Acknowledge(_), .. }))
}

fn is_request(packet: &Packet<'_>) -> bool {
    matches!(packet.body, Body::Request(_))
}

fn ack() -> Aeth {
    Aeth { syndrome: Syndrome::ACK, msn: Msn::from_wire(1) }
}

fn nak(code: NakCode) -> ResponseOp {
    ResponseOp::Acknowledge(Aeth { syndrome: Syndrome::Nak(code), msn: Msn::from_wire(0) })
}

#[test]
fn ghost_ack_is_dropped_and_changes_nothing() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 100);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    // PSN 100 is acknowledged. Its ACK comes again, so does one from long before and one from ahead.
    for psn in [100, 99, 0, 0xFF_FFFF, 101, 5_000_000] {
        p.forge(psn, ResponseOp::Acknowledge(ack()), &[]);
    }
    assert_eq!(p.a.endpoint.counters().dropped(DropReason::GhostAck), 6);
    p.a.send(2, Operation::Write(there), 0, 100);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(2, WcStatus::Success)]);
}

#[test]
fn bad_response_length_fails_the_read_with_status_7() {
    for (op, len) in [
        (ResponseOp::ReadFirst(ack()), 1020),
        (ResponseOp::ReadOnly(ack()), 1024),
        (ResponseOp::ReadMiddle, 1020),
        (ResponseOp::ReadFirst(ack()), 2048),
    ] {
        let mut p = Pair::new(&Options::default());
        let there = p.b.remote(0);
        p.a.send(1, Operation::Read(there), 0, 3000);
        p.a.send(2, Operation::Write(there), 0, 8);
        p.take_sent(Side::A);
        p.forge(100, op, &vec![0; len]);
        assert_eq!(
            statuses(&p.a.completions()),
            [(1, WcStatus::BadResponse), (2, WcStatus::WorkRequestFlushed)],
            "{op:?} {len}"
        );
        assert_eq!(p.a.endpoint.query_qp(p.a.qp).unwrap().state, QpState::Err);
    }
}

#[test]
fn unexpected_opcode_fails_the_request_with_status_7() {
    // READ data for a WRITE, an atomic result for a READ, READ data for an atomic.
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    p.forge(100, ResponseOp::ReadOnly(ack()), &[0; 8]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::BadResponse)]);

    let mut p = Pair::new(&Options::default());
    p.a.send(1, Operation::Read(there), 0, 8);
    p.take_sent(Side::A);
    p.forge(100, ResponseOp::AtomicAcknowledge(ack(), 1), &[]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::BadResponse)]);

    let mut p = Pair::new(&Options::default());
    p.a.send(1, Operation::FetchAdd { remote: there, add: 1 }, 0, 8);
    p.take_sent(Side::A);
    p.forge(100, ResponseOp::ReadOnly(ack()), &[0; 8]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::BadResponse)]);
}

#[test]
fn an_acknowledge_never_completes_a_read_or_an_atomic() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 3000);
    p.take_sent(Side::A);
    for psn in 100..103 {
        p.forge(psn, ResponseOp::Acknowledge(ack()), &[]);
    }
    assert_eq!(p.a.completions(), []);
    let mut p = Pair::new(&Options::default());
    p.a.send(1, Operation::FetchAdd { remote: there, add: 1 }, 0, 8);
    p.take_sent(Side::A);
    p.forge(100, ResponseOp::Acknowledge(ack()), &[]);
    assert_eq!(p.a.completions(), []);
}

#[test]
fn implied_nak_repeats_the_read_within_the_limit() {
    let mut p = Pair::new(&Options::default());
    p.b.region.write(0, b"read me!").unwrap();
    let (from, to) = (p.b.remote(0), p.b.remote(4096));
    p.a.send(1, Operation::Read(from), 512, 8);
    p.a.send(2, Operation::Write(to), 0, 8);
    let mut lost = false;
    p.run(|side, packet| {
        let read_data = matches!(&packet.body, Body::Response(r) if matches!(r.op, ResponseOp::ReadOnly(_)));
        if side == Side::B && read_data && !lost {
            lost = true;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert_eq!(
        p.ladder(),
        [
            "A RC_READ_REQUEST 100",
            "A RC_WRITE_ONLY 101",
            "B RC_READ_RESP_ONLY 100",
            "B ACK 101",
            // The ACK of 101 says that the answer to 100 was lost.
            "A RC_READ_REQUEST 100",
            "A RC_WRITE_ONLY 101",
            "B RC_READ_RESP_ONLY 100",
            "B ACK 101",
        ]
    );
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
    assert_eq!(p.a.region.to_vec()[512..520], *b"read me!");
    assert_eq!(p.a.endpoint.counters().implied_nak_seq_err, 1);
    assert_eq!(p.b.endpoint.counters().duplicate_request, 2);
}

#[test]
fn implied_nak_beyond_the_limit_ends_with_status_12() {
    let mut p = Pair::new(&Options { retry: 2, ..Options::default() });
    let (from, to) = (p.b.remote(0), p.b.remote(4096));
    p.a.send(1, Operation::Read(from), 512, 8);
    p.a.send(2, Operation::Write(to), 0, 8);
    let mut answers = 0;
    p.run_for(Duration::from_secs(10), |side, packet| {
        if side == Side::B && !is_ack(packet) {
            answers += 1;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert_eq!(answers, 3, "the first try and two retries");
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RetryExceeded), (2, WcStatus::WorkRequestFlushed)]);
}

#[test]
fn ack_timeout_within_the_limit_recovers() {
    for lost in 1..=7 {
        let mut p = Pair::new(&Options::default());
        let there = p.b.remote(0);
        let start = p.now;
        p.a.send(1, Operation::Write(there), 0, 8);
        let mut n = 0;
        p.run_for(Duration::from_secs(10), |side, _| {
            n += u32::from(side == Side::A);
            if side == Side::A && n <= lost { Fate::Drop } else { Fate::Deliver }
        });
        assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
        let timeouts = p.a.endpoint.counters().local_ack_timeout_err;
        assert_eq!((timeouts, n), (lost.into(), lost + 1));
        assert!(p.now.saturating_since(start) >= ACK_TIMEOUT * lost);
    }
}

/// retry_cnt retries, each after one local ACK timeout: (retry_cnt + 1) timeouts in all, for every count and code.
#[test]
fn ack_timeout_beyond_the_limit_follows_the_formula() {
    for retry in 0..=7u8 {
        for code in [1, 5, 10, 14, 18, 22, 31] {
            let mut p = Pair::new(&Options { retry, timeout: code, ..Options::default() });
            let there = p.b.remote(0);
            let start = p.now;
            p.a.send(1, Operation::Write(there), 0, 3000);
            p.a.send(2, Operation::Send, 0, 8);
            p.run_for(Duration::from_secs(1 << 20), |_, _| Fate::Drop);
            assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RetryExceeded), (2, WcStatus::WorkRequestFlushed)]);
            let one = AckTimeout::new(code).unwrap().duration().unwrap();
            let error = p.a.endpoint.query_qp(p.a.qp).unwrap().last_error.unwrap();
            assert_eq!(error.kind, FailureKind::NoAnswer);
            assert_eq!(error.tries, u32::from(retry) + 1);
            assert_eq!(error.elapsed, one * (u32::from(retry) + 1), "retry {retry} timeout {code}");
            assert_eq!(p.now.saturating_since(start), error.elapsed);
            assert_eq!(p.a.endpoint.counters().retry_exceeded_err, 1);
        }
    }
}

#[test]
fn a_timeout_of_0_waits_for_ever() {
    let mut p = Pair::new(&Options { timeout: 0, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.run(|_, _| Fate::Drop);
    assert_eq!(p.a.endpoint.poll_timeout(), None);
    assert_eq!(p.a.completions(), []);
}

#[test]
fn psn_nak_within_the_limit_goes_back_to_the_gap() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.region.write(0, &[7; 1024]).unwrap();
    p.a.send(1, Operation::Write(there), 0, 1024);
    let mut dropped = false;
    p.run(|_, packet| {
        if packet.psn.get() == 101 && is_request(packet) && !dropped {
            dropped = true;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert_eq!(
        p.ladder(),
        [
            "A RC_WRITE_FIRST 100",
            "A RC_WRITE_MIDDLE 101",
            "A RC_WRITE_MIDDLE 102",
            "A RC_WRITE_LAST 103",
            // 102 draws the NAK; 103 is dropped in silence.
            "B NAK(PsnSequenceError) 101",
            // The resume goes on with Middle, without a new RETH.
            "A RC_WRITE_MIDDLE 101",
            "A RC_WRITE_MIDDLE 102",
            "A RC_WRITE_LAST 103",
            "B ACK 103",
        ]
    );
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(p.b.region.to_vec()[..1024], [7; 1024]);
    assert_eq!(p.b.endpoint.counters().dropped(DropReason::AheadOfSequence), 1);
}

#[test]
fn psn_nak_beyond_the_limit_ends_with_status_12() {
    let mut p = Pair::new(&Options { retry: 3, mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 512);
    p.take_sent(Side::A);
    // The peer asks for 100 again and again. Between two NAKs the timer must run: one NAK a gap.
    let mut naks = 0;
    while p.a.endpoint.query_qp(p.a.qp).unwrap().state == QpState::Rts && naks < 20 {
        p.forge(100, nak(NakCode::PsnSequenceError), &[]);
        naks += 1;
        p.take_sent(Side::A);
        p.next_timer();
        p.take_sent(Side::A);
    }
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RetryExceeded)]);
    let error = p.a.endpoint.query_qp(p.a.qp).unwrap().last_error.unwrap();
    assert_eq!(error.tries, 4);
}

#[test]
fn bad_rkey_fails_both_sides() {
    for op in [0, 1, 2, 3] {
        let mut p = Pair::new(&Options::default());
        let mut there = p.b.remote(0);
        there.rkey = uroce::types::Rkey::new(there.rkey.get() ^ 0x0100_0000);
        let operation = match op {
            0 => Operation::Write(there),
            1 => Operation::Read(there),
            2 => Operation::FetchAdd { remote: there, add: 1 },
            _ => Operation::CompareSwap { remote: there, compare: 0, swap: 1 },
        };
        let good = p.b.remote(0);
        p.b.recv(77, 0, 8);
        p.a.send(1, Operation::Write(good), 0, 8);
        p.a.send(2, operation, 0, 8);
        p.a.send(3, Operation::Write(good), 0, 8);
        p.settle();
        assert_eq!(
            statuses(&p.a.completions()),
            [(1, WcStatus::Success), (2, WcStatus::RemoteAccess), (3, WcStatus::WorkRequestFlushed)]
        );
        assert_eq!(statuses(&p.b.completions()), [(77, WcStatus::WorkRequestFlushed)]);
        assert_eq!(p.b.endpoint.poll_event(), Some(AsyncEvent::QpAccessError(p.b.qp)));
        assert_eq!(p.b.endpoint.counters().sent_access_err, 1);
    }
}

#[test]
fn a_receive_with_a_bad_element_is_a_remote_operation_error() {
    let mut p = Pair::new(&Options::default());
    let mut sge = p.b.sge(0, 100);
    sge.lkey = uroce::types::Lkey::new(sge.lkey.get() ^ 1);
    p.b.endpoint.post_recv(p.b.qp, &[uroce::verbs::RecvWr { wr_id: 7, sges: &[sge] }]).unwrap();
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RemoteOperation)]);
    assert_eq!(statuses(&p.b.completions()), [(7, WcStatus::LocalProtection)]);
}

#[test]
fn a_send_longer_than_its_receive_is_an_invalid_request() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    p.b.recv(7, 0, 300);
    p.a.send(1, Operation::Send, 0, 301);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RemoteInvalidRequest)]);
    assert_eq!(statuses(&p.b.completions()), [(7, WcStatus::LocalLength)]);
}

#[test]
fn a_bad_local_element_completes_with_status_4_behind_those_before_it() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.a.send(2, Operation::Write(there), 1 << 16, 8);
    p.a.send(3, Operation::Write(there), 0, 8);
    p.settle();
    assert_eq!(
        statuses(&p.a.completions()),
        [(1, WcStatus::Success), (2, WcStatus::LocalProtection), (3, WcStatus::WorkRequestFlushed)]
    );
}

#[test]
fn partial_read_retry_asks_for_the_rest_only() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let bytes: Vec<u8> = (0..1200u32).map(|i| u8::try_from(i % 253).unwrap()).collect();
    p.b.region.write(0, &bytes).unwrap();
    let from = p.b.remote(0);
    p.a.send(1, Operation::Read(from), 0, 1200);
    let mut dropped = false;
    let mut asked = Vec::new();
    p.run_for(Duration::from_secs(1), |side, packet| {
        if let Body::Request(r) = &packet.body
            && let RequestOp::Read(reth) = r.op
        {
            asked.push((packet.psn.get(), reth.addr, reth.length));
        }
        if side == Side::B && packet.psn.get() == 102 && !dropped {
            dropped = true;
            return Fate::Drop;
        }
        Fate::Deliver
    });
    assert_eq!(asked, [(100, from.addr, 1200), (102, from.addr + 512, 688)]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(p.a.region.to_vec()[..1200], bytes[..]);
    assert_eq!(
        p.ladder()[6..],
        ["A RC_READ_REQUEST 102", "B RC_READ_RESP_FIRST 102", "B RC_READ_RESP_MIDDLE 103", "B RC_READ_RESP_LAST 104",]
    );
}

/// Linux's rxe goes on with Middle … Last after a partial repeat.
#[test]
fn a_partial_read_answered_with_middle_is_accepted() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 768);
    p.take_sent(Side::A);
    p.forge(100, ResponseOp::ReadFirst(ack()), &[1; 256]);
    p.next_timer();
    p.take_sent(Side::A);
    p.forge(101, ResponseOp::ReadMiddle, &[2; 256]);
    p.forge(102, ResponseOp::ReadLast(ack()), &[3; 256]);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    let got = p.a.region.to_vec();
    assert_eq!((got[0], got[256], got[767]), (1, 2, 3));
}

#[test]
fn partial_write_retry_goes_on_inside_the_message() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.region.write(0, &[9; 2000]).unwrap();
    p.a.send(1, Operation::Write(there), 0, 2000);
    let mut n = 0;
    p.run_for(Duration::from_secs(1), |side, packet| {
        // The tail is lost the first time: only the timer can tell.
        n += u32::from(side == Side::A && packet.psn.get() >= 105);
        if side == Side::A && packet.psn.get() >= 105 && n <= 3 { Fate::Drop } else { Fate::Deliver }
    });
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(p.b.region.to_vec()[..2000], [9; 2000]);
    assert_eq!(p.b.endpoint.counters().rx_write_requests, 1);
}

/// A plain ACK must never name the PSN of a READ or atomic: some requesters take it for its success, without data.
#[test]
fn a_duplicate_after_a_read_is_acknowledged_at_the_last_write() {
    for atomic in [false, true] {
        let mut p = Pair::new(&Options::default());
        let there = p.b.remote(0);
        p.a.send(1, Operation::Write(there), 0, 8);
        let second = if atomic { Operation::FetchAdd { remote: there, add: 1 } } else { Operation::Read(there) };
        p.a.send(2, second, 64, 8);
        let sent = p.take_sent(Side::A);
        for segment in &sent {
            p.deliver(Side::B, segment);
        }
        // Both answers are lost; both requests come again.
        p.take_sent(Side::B);
        p.log.clear();
        for segment in &sent {
            p.deliver(Side::B, segment);
        }
        p.take_sent(Side::B);
        let answer = if atomic { "B RC_ATOMIC_ACK 101" } else { "B RC_READ_RESP_ONLY 101" };
        assert_eq!(p.ladder(), ["B ACK 100", answer]);
    }
}

#[test]
fn a_duplicate_atomic_returns_the_stored_result_and_is_not_executed_again() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::FetchAdd { remote: there, add: 5 }, 64, 8);
    let sent = p.take_sent(Side::A);
    for _ in 0..16 {
        p.deliver(Side::B, &sent[0]);
    }
    p.settle();
    assert_eq!(p.b.region.fetch_add(0, 0), Some(5));
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    assert_eq!(p.a.region.to_vec()[64..72], 0u64.to_ne_bytes());
    assert_eq!(p.b.endpoint.counters().rx_atomic_requests, 1);
}

#[test]
fn a_duplicate_send_makes_no_second_completion() {
    let mut p = Pair::new(&Options::default());
    p.b.recv(1, 0, 100);
    p.b.recv(2, 0, 100);
    p.a.send(1, Operation::Send, 0, 8);
    p.run(|_, packet| if is_request(packet) { Fate::Duplicate } else { Fate::Deliver });
    assert_eq!(p.b.completions().len(), 1);
    assert_eq!(p.b.endpoint.counters().duplicate_request, 1);
}

#[test]
fn psn_wrap_in_the_middle_of_every_kind_of_message() {
    for start in [0xFF_FFFD, 0xFF_FFFE, 0xFF_FFFF, 0x7F_FFFE, 0x7F_FFFF] {
        let mut p = Pair::new(&Options { psn_a: start, mtu: PathMtu::B256, ..Options::default() });
        let bytes: Vec<u8> = (0..2000u32).map(|i| u8::try_from(i % 249).unwrap()).collect();
        p.a.region.write(0, &bytes).unwrap();
        p.b.recv(1, 10_000, 2000);
        let there = p.b.remote(0);
        p.a.send(1, Operation::Write(there), 0, 2000);
        p.a.send(2, Operation::Read(there), 30_000, 2000);
        p.a.send(3, Operation::Send, 0, 2000);
        p.a.send(4, Operation::FetchAdd { remote: p.b.remote(50_000), add: 3 }, 40_000, 8);
        let mut n = 0;
        p.run_for(Duration::from_secs(5), |_, _| {
            n += 1;
            if n % 5 == 0 { Fate::Drop } else { Fate::Deliver }
        });
        let done = statuses(&p.a.completions());
        assert_eq!(done, [1, 2, 3, 4].map(|i| (i, WcStatus::Success)), "start {start:#x}");
        assert_eq!(p.a.region.to_vec()[30_000..32_000], bytes[..]);
        assert_eq!(p.b.region.to_vec()[10_000..12_000], bytes[..]);
        assert_eq!(p.b.region.fetch_add(50_000, 0), Some(3));
    }
}

#[test]
fn zero_length_messages_of_every_kind_need_no_valid_key() {
    let mut p = Pair::new(&Options::default());
    let nowhere = uroce::verbs::Remote { addr: u64::MAX, rkey: uroce::types::Rkey::new(0) };
    p.b.recv(1, 0, 0);
    p.b.recv(2, 0, 0);
    p.b.recv(3, 0, 0);
    let imm = uroce::types::Imm::new(1);
    let all = [
        Operation::Send,
        Operation::SendImm(imm),
        Operation::Write(nowhere),
        Operation::WriteImm(nowhere, imm),
        Operation::Read(nowhere),
    ];
    for (i, operation) in all.into_iter().enumerate() {
        let payload = Payload::Sges(&[]);
        let wr = SendWr { wr_id: i as u64, operation, payload, flags: SendFlags::SIGNALED, destination: None };
        p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    }
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [0, 1, 2, 3, 4].map(|i| (i, WcStatus::Success)));
    assert_eq!(p.b.completions().len(), 3);
}

#[test]
fn fence_waits_for_the_read() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 8);
    let sge = [p.a.sge(0, 8)];
    let flags = SendFlags { signaled: true, solicited: false, fence: true };
    let wr =
        SendWr { wr_id: 2, operation: Operation::Write(there), payload: Payload::Sges(&sge), flags, destination: None };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    assert_eq!(p.take_sent(Side::A).len(), 1, "only the READ goes");
    let request = p.log[0].1.clone();
    p.deliver(Side::B, &request);
    p.settle();
    assert_eq!(p.ladder(), ["A RC_READ_REQUEST 100", "B RC_READ_RESP_ONLY 100", "A RC_WRITE_ONLY 101", "B ACK 101"]);
}

#[test]
fn no_more_reads_are_outstanding_than_agreed() {
    let mut p = Pair::new(&Options { rd_atomic: 2, ..Options::default() });
    let there = p.b.remote(0);
    for wr_id in 0..10 {
        p.a.send(wr_id, Operation::Read(there), 0, 8);
    }
    assert_eq!(p.take_sent(Side::A).len(), 2);
    // A peer that sends more than it may is told so.
    let mut p = Pair::new(&Options { rd_atomic: 2, ..Options::default() });
    for wr_id in 0..2 {
        p.a.send(wr_id, Operation::Read(there), 0, 8);
    }
    let first = p.take_sent(Side::A);
    p.deliver(Side::B, &first[0]);
    p.deliver(Side::B, &first[1]);
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Rts);
}

#[test]
fn a_region_that_goes_away_in_mid_read_is_an_access_error() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 1000);
    let sent = p.take_sent(Side::A);
    p.deliver(Side::B, &sent[0]);
    p.b.endpoint.deregister(p.b.mr.handle).unwrap();
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::RemoteAccess)]);
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Err);
}

/// Both ends of a refused access can say which key and range it was, and what follows can name it.
#[test]
fn a_refused_access_is_explained_at_both_ends() {
    let mut p = Pair::new(&Options::default());
    let beyond = p.b.remote(p.b.mr.len);
    p.a.send(1, Operation::Write(beyond), 0, 64);
    p.a.send(2, Operation::Send, 0, 8);
    p.settle();
    let [refused, flushed] = p.a.completions().try_into().unwrap();
    assert_eq!([refused.status, flushed.status], [WcStatus::RemoteAccess, WcStatus::WorkRequestFlushed]);
    let what = format!("a WRITE of 64 bytes at {:#x} with rkey {}", beyond.addr, beyond.rkey);
    let info = p.a.endpoint.query_qp(p.a.qp).unwrap();
    let text = refused.explain(Some(&info)).to_string();
    assert!(text.contains(&what) && text.contains("allow remote write"), "{text}");
    let text = flushed.explain(Some(&info)).to_string();
    assert!(text.contains("mend that first failure (check at the peer that rkey"), "{text}");
    let error = p.b.endpoint.query_qp(p.b.qp).unwrap().last_error.unwrap();
    assert_eq!((error.kind, error.status), (FailureKind::RefusedPeer, WcStatus::LocalAccess));
    assert_eq!(error.request.unwrap().to_string(), what);
}

#[test]
fn cq_overrun_is_an_event_and_ends_its_qps() {
    let mut p = Pair::new(&Options { cq_depth: 2, ..Options::default() });
    for wr_id in 0..4 {
        p.b.recv(wr_id, 0, 100);
        p.a.send(wr_id, Operation::Send, 0, 8);
    }
    p.settle();
    let events: Vec<_> = std::iter::from_fn(|| p.b.endpoint.poll_event()).collect();
    assert!(events.contains(&AsyncEvent::CqError(p.b.cq)), "{events:?}");
    assert_eq!(p.b.endpoint.query_qp(p.b.qp).unwrap().state, QpState::Err);
    assert!(p.b.endpoint.counters().cq_overruns > 0);
    // What found no place in the CQ was not acknowledged.
    assert_eq!(p.b.completions().len(), 2);
}

#[test]
fn srq_limit_is_an_event_and_an_empty_srq_is_rnr() {
    let mut p = Pair::new(&Options { srq: true, ..Options::default() });
    for wr_id in 0..3 {
        p.b.recv(wr_id, 0, 100);
    }
    let srq = p.b.srq.unwrap();
    p.b.endpoint.arm_srq(srq, 2).unwrap();
    for wr_id in 0..4 {
        p.a.send(wr_id, Operation::Send, 0, 8);
    }
    p.settle();
    let events: Vec<_> = std::iter::from_fn(|| p.b.endpoint.poll_event()).collect();
    assert_eq!(events, [AsyncEvent::SrqLimitReached(srq)]);
    assert_eq!(p.ladder().last().unwrap(), "B RNR 103");
    p.b.recv(9, 0, 100);
    p.next_timer();
    p.settle();
    assert_eq!(p.a.completions().len(), 4);
}

#[test]
fn sqd_lets_what_was_begun_finish_and_holds_the_rest() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    let sent = p.take_sent(Side::A);
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Sqd { notify: true }.into()).unwrap();
    p.a.send(2, Operation::Write(there), 0, 8);
    assert_eq!(p.a.endpoint.poll_event(), None, "one is still in flight");
    p.deliver(Side::B, &sent[0]);
    p.settle();
    assert_eq!(p.a.endpoint.poll_event(), Some(AsyncEvent::SendQueueDrained(p.a.qp)));
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Resume.into()).unwrap();
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [(2, WcStatus::Success)]);
}

#[test]
fn err_flushes_both_queues_in_order_and_what_is_posted_later() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    p.a.recv(1, 0, 8);
    p.a.recv(2, 0, 8);
    p.a.send(3, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    p.a.send(4, Operation::Write(there), 0, 8);
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Err.into()).unwrap();
    let flushed = WcStatus::WorkRequestFlushed;
    assert_eq!(statuses(&p.a.completions()), [(3, flushed), (4, flushed), (1, flushed), (2, flushed)]);
    p.a.send(5, Operation::Write(there), 0, 8);
    p.a.recv(6, 0, 8);
    p.take_sent(Side::A);
    assert_eq!(statuses(&p.a.completions()), [(5, flushed), (6, flushed)]);
}

#[test]
fn unequal_path_mtus_are_an_invalid_request() {
    let mut p = Pair::new(&Options::default());
    let there = p.b.remote(0);
    // A packet of 1024 bytes at a responder whose path MTU is 256.
    let mut small = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    p.a.send(1, Operation::Write(there), 0, 1024);
    let sent = p.take_sent(Side::A);
    small.deliver(Side::B, &sent[0]);
    small.take_sent(Side::B);
    assert_eq!(small.ladder(), ["B NAK(InvalidRequest) 100"]);
}

#[test]
fn the_last_receive_of_an_srq_is_announced_once() {
    let mut p = Pair::new(&Options { srq: true, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    let sent = p.take_sent(Side::A);
    p.b.endpoint.modify_qp(p.b.qp, QpTransition::Err.into()).unwrap();
    for _ in 0..5 {
        // Packets for a QP in ERR wake it.
        p.deliver(Side::B, &sent[0]);
        p.take_sent(Side::B);
        let cq = p.b.cq;
        p.b.endpoint.req_notify(cq, uroce::verbs::Notify::Any).unwrap();
    }
    let events: Vec<_> = std::iter::from_fn(|| p.b.endpoint.poll_event()).collect();
    assert_eq!(events, [AsyncEvent::LastWqeReached(p.b.qp)]);
    // A second QP that fails announces itself too.
    let mut p = Pair::new(&Options { srq: true, ..Options::default() });
    p.b.endpoint.modify_qp(p.b.qp, QpTransition::Err.into()).unwrap();
    assert_eq!(p.b.endpoint.poll_event(), Some(AsyncEvent::LastWqeReached(p.b.qp)));
    p.b.endpoint.modify_qp(p.b.qp, QpTransition::Err.into()).unwrap();
    p.take_sent(Side::B);
    assert_eq!(p.b.endpoint.poll_event(), None);
}
