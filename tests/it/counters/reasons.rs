//! What a QP says it waits for, in each of its situations.

use uroce::endpoint::QpReport;
use uroce::types::PathMtu;
use uroce::verbs::{Operation, Payload, QpOptions, QpTransition, SendFlags, SendWr, Verbs};
use uroce_tests::pair::{Options, Pair, Side};

fn pair(o: Options) -> Pair {
    Pair::new(&Options { mtu: PathMtu::B256, ..o })
}

fn report(p: &mut Pair) -> QpReport {
    let now = p.now;
    p.a.endpoint.report_qps(now, 0, 64).items.remove(0)
}

/// The word, and the text for people.
fn waits(p: &mut Pair) -> (String, String) {
    let qp = report(p);
    (qp.waiting, qp.reason.unwrap_or_default())
}

#[track_caller]
fn assert_waits(p: &mut Pair, word: &str, text: &str) {
    let (waiting, reason) = waits(p);
    assert_eq!((waiting.as_str(), reason.as_str()), (word, text));
}

#[test]
fn nothing_then_its_turn_then_an_ack_then_nothing() {
    let mut p = pair(Options::default());
    assert_waits(&mut p, "nothing", "");
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    assert_waits(&mut p, "turn", "posted and not sent: nobody drives the engine, or the device takes nothing");
    let sent = p.take_sent(Side::A);
    assert_waits(&mut p, "ack", "no ACK of PSN 100 for 0 ms");
    let qp = report(&mut p);
    assert_eq!((qp.sends, qp.in_flight, qp.waits_ns, qp.idle_ns), (1, 1, Some(0), None));
    p.deliver(Side::B, &sent[0]);
    p.settle();
    assert_waits(&mut p, "nothing", "");
    let qp = report(&mut p);
    assert_eq!((qp.sends, qp.in_flight, qp.waits_ns, qp.idle_ns), (0, 0, None, Some(0)));
}

#[test]
fn repeats_are_told() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    p.next_timer();
    p.take_sent(Side::A);
    // 4.096 us x 2^14.
    assert_waits(&mut p, "ack", "no ACK of PSN 100 for 67 ms, retry 1 of 7");
}

#[test]
fn a_response_and_who_stands_behind_it() {
    let mut p = pair(Options { rd_atomic: 1, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 8);
    p.a.send(2, Operation::Read(there), 0, 8);
    p.take_sent(Side::A);
    let text = "no response to the READ or atomic at PSN 100 for 0 ms";
    assert_waits(&mut p, "response", &format!("{text}; the next waits for a place among the outstanding READs"));

    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Read(there), 0, 8);
    let sges = [p.a.sge(0, 8)];
    let (payload, flags) = (Payload::Sges(&sges), SendFlags { fence: true, ..SendFlags::SIGNALED });
    let wr = SendWr { wr_id: 2, operation: Operation::Write(there), payload, flags, destination: None };
    p.a.endpoint.post_send(p.a.qp, &[wr]).unwrap();
    p.take_sent(Side::A);
    assert_waits(&mut p, "response", &format!("{text}; the next waits at a fence"));
}

#[test]
fn a_receiver_that_is_not_ready() {
    let mut p = pair(Options::default());
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    assert_waits(&mut p, "rnr", "no receive posted at the peer for 0 ms: 1 RNR NAKs for PSN 100");
}

#[test]
fn a_full_window() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 65_536);
    p.a.send(2, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    assert_waits(&mut p, "ack", "no ACK of PSN 100 for 0 ms; the window of 256 packets is full");
}

#[test]
fn a_drained_queue() {
    let mut p = pair(Options::default());
    let there = p.b.remote(0);
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Sqd { notify: false }.into()).unwrap();
    p.a.send(1, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    assert_waits(&mut p, "turn", "in SQD: nothing is begun until the QP is in RTS again");
}

#[test]
fn no_credits() {
    let mut p = pair(Options::default());
    p.b.endpoint.set_qp_options(p.b.qp, QpOptions { credits: true, ..QpOptions::default() }).unwrap();
    p.b.recv(1, 0, 100);
    p.a.send(1, Operation::Send, 0, 8);
    p.settle();
    // The answer promised none: one may ask, the next stays.
    p.a.send(2, Operation::Send, 0, 8);
    p.a.send(3, Operation::Send, 0, 8);
    p.take_sent(Side::A);
    let text = "no ACK of PSN 101 for 0 ms; the next waits for the peer to post receives (end-to-end credits)";
    assert_waits(&mut p, "ack", text);
}

#[test]
fn why_it_failed_and_that_it_was_told_to() {
    let mut p = pair(Options { retry: 0, ..Options::default() });
    let there = p.b.remote(0);
    p.a.send(1, Operation::Write(there), 0, 8);
    p.take_sent(Side::A);
    p.next_timer();
    let qp = report(&mut p);
    assert_eq!(qp.state, "ERR");
    assert!(qp.last_error.unwrap().starts_with("no answer for PSN 0x000064 after 1 tries in 67.1"));

    let mut p = pair(Options::default());
    p.a.endpoint.modify_qp(p.a.qp, QpTransition::Err.into()).unwrap();
    let qp = report(&mut p);
    assert_eq!((qp.state.as_str(), qp.last_error), ("ERR", None));
}
