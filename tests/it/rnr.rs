//! A peer without a receive: what an RNR NAK does to a requester and a responder. Expected values come from the protocol:
//! PSNs and opcodes of the ladder, statuses of the completions, times from the RNR timer codes.

use uroce::time::Duration;
use uroce::types::{Imm, Msn, PathMtu, RnrTimer};
use uroce::verbs::{Operation, QpState, Verbs, WcStatus};
use uroce::wire::{Aeth, Body, NakCode, Packet, ResponseOp, Syndrome};
use uroce_tests::pair::{Fate, Options, Pair, Side};

fn statuses(done: &[uroce::verbs::WorkCompletion]) -> Vec<(u64, WcStatus)> {
    done.iter().map(|c| (c.wr_id, c.status)).collect()
}

fn nak(code: NakCode) -> ResponseOp {
    ResponseOp::Acknowledge(Aeth { syndrome: Syndrome::Nak(code), msn: Msn::from_wire(0) })
}

#[test]
fn rnr_within_the_limit_waits_the_time_that_the_nak_says() {
    for code in 0..32u8 {
        let mut p = Pair::new(&Options { min_rnr: code, rnr_retry: 3, ..Options::default() });
        let start = p.now;
        p.a.send(1, Operation::Send, 0, 8);
        p.settle();
        while p.a.endpoint.counters().rcvd_rnr_err < 3 {
            assert!(p.next_timer());
            p.settle();
        }
        p.b.recv(9, 0, 100);
        let mut done = Vec::new();
        while done.is_empty() && p.next_timer() {
            p.settle();
            done = statuses(&p.a.completions());
        }
        assert_eq!(done, [(1, WcStatus::Success)], "code {code}");
        assert_eq!(p.now.saturating_since(start), RnrTimer::new(code).unwrap().duration() * 3);
        assert_eq!(p.b.endpoint.counters().send_rnr_err, 3);
    }
}

#[test]
fn rnr_beyond_the_limit_ends_with_status_13() {
    for limit in 0..=6u8 {
        let mut p = Pair::new(&Options { rnr_retry: limit, ..Options::default() });
        p.a.send(1, Operation::Send, 0, 8);
        p.a.send(2, Operation::Send, 0, 8);
        p.run_for(Duration::from_secs(100), |_, _| Fate::Deliver);
        let want = [(1, WcStatus::RnrRetryExceeded), (2, WcStatus::WorkRequestFlushed)];
        assert_eq!(statuses(&p.a.completions()), want);
        assert_eq!(p.a.endpoint.counters().rcvd_rnr_err, u64::from(limit) + 1);
    }
}

#[test]
fn rnr_retry_7_never_gives_up() {
    let mut p = Pair::new(&Options { rnr_retry: 7, min_rnr: 1, ..Options::default() });
    p.a.send(1, Operation::Send, 0, 8);
    p.run_for(Duration::from_millis(50), |_, _| Fate::Deliver);
    assert!(p.a.endpoint.counters().rcvd_rnr_err > 1000);
    p.b.recv(9, 0, 100);
    p.run_for(Duration::from_millis(1), |_, _| Fate::Deliver);
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
}

#[test]
fn a_write_with_immediate_is_refused_only_at_its_last_packet() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::WriteImm(there, Imm::new(1)), 0, 600);
    p.settle();
    assert_eq!(p.ladder().last().unwrap(), "B RNR 102");
    p.b.recv(5, 4096, 0);
    assert!(p.next_timer());
    p.settle();
    assert_eq!(p.ladder()[p.ladder().len() - 2..], ["A RC_WRITE_LAST_IMM 102", "B ACK 102"]);
    assert_eq!(p.b.completions()[0].byte_len, 600);
}

/// Packets in flight behind a refused one draw a NAK from some responders; obeying it would burn the retries.
#[test]
fn a_nak_behind_an_rnr_nak_changes_nothing() {
    let mut p = Pair::new(&Options { retry: 1, ..Options::default() });
    p.a.send(1, Operation::Send, 0, 8);
    p.a.send(2, Operation::Send, 0, 8);
    p.take_sent(Side::A);
    let timer = RnrTimer::new(12).unwrap();
    let rnr = ResponseOp::Acknowledge(Aeth { syndrome: Syndrome::RnrNak(timer), msn: Msn::from_wire(0) });
    p.forge(100, rnr, &[]);
    for _ in 0..5 {
        p.forge(100, nak(NakCode::PsnSequenceError), &[]);
    }
    assert_eq!(p.take_sent(Side::A), Vec::<Vec<u8>>::new(), "no early resend");
    let info = p.a.endpoint.query_qp(p.a.qp).unwrap();
    assert_eq!((info.state, info.queues.retries_used), (QpState::Rts, 0));
    let start = p.now;
    assert!(p.next_timer());
    assert_eq!(p.now.saturating_since(start), timer.duration());
    assert_eq!(p.take_sent(Side::A).len(), 2);
}

#[test]
fn packets_behind_an_rnr_nak_are_dropped_in_silence_here() {
    let mut p = Pair::new(&Options::default());
    for wr_id in 1..=4 {
        p.a.send(wr_id, Operation::Send, 0, 8);
    }
    p.settle();
    assert_eq!(p.ladder().iter().filter(|l| l.starts_with('B')).collect::<Vec<_>>(), ["B RNR 100"]);
}

/// Each short timer left a second entry for the long one behind it, for ever.
#[test]
fn timers_do_not_pile_up_while_a_peer_is_never_ready() {
    let mut p = Pair::new(&Options { rnr_retry: 7, min_rnr: 1, timeout: 10, ..Options::default() });
    p.a.send(1, Operation::Send, 0, 8);
    p.run_for(Duration::from_millis(100), |_, _| Fate::Deliver);
    assert!(p.a.endpoint.counters().rcvd_rnr_err > 1000);
    assert_eq!(p.a.endpoint.pending_timers(), 1);
}

/// A window of packets that a peer without a receive drops costs the QPs beside it: after an RNR NAK two packets ask again.
#[test]
fn after_an_rnr_nak_two_packets_ask_again_and_an_ack_opens_the_window() {
    let mut p = Pair::new(&Options { mtu: PathMtu::B256, min_rnr: 1, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Send, 0, 1024);
    p.a.send(2, Operation::Write(there), 0, 1024);
    p.settle();
    for _ in 0..3 {
        let before = p.ladder().len();
        assert!(p.next_timer());
        p.settle();
        let again = ["A RC_SEND_FIRST 100", "A RC_SEND_MIDDLE 101", "B RNR 100"];
        assert_eq!(p.ladder()[before..], again, "the second is dropped in silence");
    }
    p.b.recv(9, 4096, 1024);
    let before = p.ladder().len();
    assert!(p.next_timer());
    p.settle();
    let ladder = p.ladder()[before..].to_vec();
    assert_eq!(ladder[..2], ["A RC_SEND_FIRST 100", "A RC_SEND_MIDDLE 101"]);
    let rest: Vec<_> = ladder[2..].iter().filter(|l| l.starts_with('A')).collect();
    let want = ["SEND_MIDDLE 102", "SEND_LAST 103", "WRITE_FIRST 104", "WRITE_MIDDLE 105", "WRITE_MIDDLE 106"];
    assert_eq!(rest[..5], want.map(|l| format!("A RC_{l}")).iter().collect::<Vec<_>>());
    assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success), (2, WcStatus::Success)]);
}

/// Four SENDs, refused; then B has receives and A has asked again: the two packets that did.
fn asked_again() -> (Pair, Vec<Vec<u8>>) {
    let mut p = Pair::new(&Options { min_rnr: 1, ..Options::default() });
    for wr_id in 1..=4 {
        p.a.send(wr_id, Operation::Send, 0, 8);
    }
    p.settle();
    for wr_id in 1..=4 {
        p.b.recv(wr_id, 4096, 8);
    }
    assert!(p.next_timer());
    let sent = p.take_sent(Side::A);
    assert_eq!(p.ladder()[p.ladder().len() - 2..], ["A RC_SEND_ONLY 100", "A RC_SEND_ONLY 101"]);
    (p, sent)
}

/// Two ask again, not one: the answer to the second covers the first, so that a lost ACK does not cost an ACK timeout.
#[test]
fn an_ack_lost_after_asking_again_is_covered_by_the_next() {
    let (mut p, sent) = asked_again();
    p.deliver(Side::B, &sent[0]);
    assert_eq!(p.take_sent(Side::B).len(), 1, "ACK 100, which is lost");
    p.deliver(Side::B, &sent[1]);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [1, 2, 3, 4].map(|i| (i, WcStatus::Success)));
    assert_eq!(p.a.endpoint.counters().local_ack_timeout_err, 0);
}

/// Some responders (Linux's rxe) answer a gap behind an RNR NAK. Then the loss of the first shows by the second.
#[test]
fn a_nak_after_asking_again_is_obeyed_at_once() {
    let (mut p, _) = asked_again();
    p.forge(100, nak(NakCode::PsnSequenceError), &[]);
    p.settle();
    assert_eq!(statuses(&p.a.completions()), [1, 2, 3, 4].map(|i| (i, WcStatus::Success)));
    assert_eq!(p.a.endpoint.counters().local_ack_timeout_err, 0);
}

/// An RNR NAK is an answer: the path works and the peer lives. Losses between RNR NAKs, however many come together, are not
/// the silence that the retry count is for.
#[test]
fn a_peer_that_answers_with_rnr_naks_is_not_given_up_as_silent() {
    for retry in [1, 7] {
        let mut p = Pair::new(&Options { min_rnr: 1, retry, ..Options::default() });
        p.a.send(1, Operation::Send, 0, 8);
        p.settle();
        for round in 1..=20 {
            // The next time that it asks is lost as often as the count allows, and then it is refused again.
            let mut left = retry;
            while left > 0 {
                assert!(p.next_timer());
                p.run(|_, packet: &Packet<'_>| {
                    let lost = left > 0 && matches!(packet.body, Body::Request(_));
                    left -= u8::from(lost);
                    if lost { Fate::Drop } else { Fate::Deliver }
                });
            }
            assert!(p.next_timer());
            p.settle();
            assert_eq!(p.a.endpoint.query_qp(p.a.qp).unwrap().state, QpState::Rts, "round {round}");
            assert_eq!(p.a.endpoint.counters().rcvd_rnr_err, 1 + round);
            assert_eq!(p.a.endpoint.counters().local_ack_timeout_err, round * u64::from(retry));
        }
        p.b.recv(9, 4096, 8);
        assert!(p.next_timer());
        p.settle();
        assert_eq!(statuses(&p.a.completions()), [(1, WcStatus::Success)]);
    }
}
