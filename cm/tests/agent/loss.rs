//! Connections over a link that loses, doubles and reorders.

use uroce::time::Duration;
use uroce_cm::agent::{CmEvent, DisconnectCause};
use uroce_cm::comm::CommState;
use uroce_cm::wire::{CmTimeout, Mad, MadKind, Message, MraedMessage, RejReason, RejectedMessage};
use uroce_cm::{Config, RetryPolicy};

use crate::pair::{A, B, Fault, Pair, Rates, at, exact, ms};

/// One connection, one disconnect by the client.
fn whole_life(pair: &mut Pair) {
    pair.listen(B);
    let comm = pair.connect(A);
    pair.run_for(Duration::from_secs(20));
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_for(Duration::from_secs(20));
}

fn told_once(pair: &Pair) {
    assert_eq!(pair.told(A), ["Reply", "Disconnected", "TimewaitExit"]);
    assert_eq!(pair.told(B), ["ConnectRequest", "Established", "DisconnectRequested", "Disconnected", "TimewaitExit"]);
    for agent in &pair.agents {
        assert_eq!((agent.communications(), agent.in_timewait(), agent.half_open()), (0, 0, 0));
        assert_eq!(agent.poll_timeout(), None);
    }
}

const MESSAGES: [(usize, MadKind); 5] =
    [(A, MadKind::Req), (B, MadKind::Rep), (A, MadKind::Rtu), (A, MadKind::Dreq), (B, MadKind::Drep)];

#[test]
fn each_message_lost_once() {
    for (side, kind) in MESSAGES {
        let mut pair = Pair::new();
        pair.fault(side, kind, 1, Fault::Drop);
        whole_life(&mut pair);
        told_once(&pair);
        assert_eq!(pair.sent_of(side, kind).len(), 2, "{kind} was sent again");
    }
}

#[test]
fn each_message_doubled_once() {
    for (side, kind) in MESSAGES {
        let mut pair = Pair::new();
        pair.fault(side, kind, 1, Fault::Duplicate);
        whole_life(&mut pair);
        told_once(&pair);
    }
}

#[test]
fn each_message_overtaken_by_its_repetition() {
    for (side, kind) in MESSAGES {
        let mut pair = Pair::new();
        pair.fault(side, kind, 1, Fault::Delay(ms(3000)));
        whole_life(&mut pair);
        told_once(&pair);
    }
}

#[test]
fn a_hostile_link_ends_in_one_connection_or_a_clear_word() {
    for seed in 0..200 {
        let mut pair = Pair::with(seed, Config::default(), Config::default());
        pair.rates = Rates { loss: 0.3, duplicate: 0.3, reorder: 0.3 };
        pair.listen(B);
        pair.connect(A);
        pair.run_for(Duration::from_secs(200));
        let count = |side: usize, name: &str| pair.told(side).iter().filter(|e| **e == name).count();
        // 16 tries at 30 % loss each way do not all fail: the client is connected, once.
        assert_eq!((count(A, "Reply"), count(B, "ConnectRequest"), count(B, "Established")), (1, 1, 1), "seed {seed}");
        let (a, b) = pair.comms();
        assert_eq!(pair.agents[A].state(a), Some(CommState::Established), "seed {seed}");
        assert_eq!(pair.agents[B].state(b), Some(CommState::Established), "seed {seed}");
        pair.agents[A].disconnect(pair.now, a, b"").unwrap();
        pair.run_for(Duration::from_secs(200));
        assert_eq!((count2(&pair, A), count2(&pair, B)), (1, 1), "seed {seed}");
        for agent in &pair.agents {
            assert_eq!((agent.communications(), agent.in_timewait()), (0, 0), "seed {seed}");
        }
    }
}

fn count2(pair: &Pair, side: usize) -> usize {
    pair.told(side).iter().filter(|e| **e == "Disconnected").count()
}

#[test]
fn a_lost_rep_is_repeated_when_the_req_comes_again() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.fault(B, MadKind::Rep, 1, Fault::Drop);
    pair.connect(A);
    pair.run_until(at(300));
    // The client is patient for 250 ms; the server would be for 1074.
    assert_eq!(pair.sent_of(A, MadKind::Req), [at(0), at(250)]);
    assert_eq!(pair.sent_of(B, MadKind::Rep), [at(1), at(251)]);
    assert_eq!(pair.sent_of(A, MadKind::Rtu), [at(252)]);
    assert_eq!(pair.agents[B].counters().duplicates, 1);
}

#[test]
fn a_lost_rtu_is_made_up_for_by_data() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.fault(A, MadKind::Rtu, 1, Fault::Drop);
    pair.connect(A);
    pair.run_until(at(10));
    let (_, b) = pair.comms();
    assert_eq!(pair.agents[B].state(b), Some(CommState::RepSent));
    pair.agents[B].establish(b).unwrap();
    pair.run_until(at(5000));
    assert_eq!(pair.told(B), ["ConnectRequest", "Established"]);
    assert_eq!(pair.sent_of(B, MadKind::Rep).len(), 1, "nothing is repeated after that");
    // Once more does nothing.
    pair.agents[B].establish(b).unwrap();
    pair.run_for(ms(1));
    assert_eq!(pair.told(B), ["ConnectRequest", "Established"]);
}

#[test]
fn a_lost_rtu_without_data_is_repeated_when_the_rep_comes_again() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.fault(A, MadKind::Rtu, 1, Fault::Drop);
    pair.connect(A);
    pair.run_until(at(3000));
    // The REQ said that the client answers within code 18: 1073.741824 ms.
    let patience = CmTimeout::new(18).unwrap().duration();
    assert_eq!(pair.sent_of(B, MadKind::Rep), [at(1), at(1) + patience]);
    assert_eq!(pair.sent_of(A, MadKind::Rtu), [at(2), at(2) + patience]);
    assert_eq!(pair.told(B), ["ConnectRequest", "Established"]);
}

#[test]
fn the_schedule_of_a_req_is_exact_and_true_to_its_fields() {
    let policy = RetryPolicy { initial: ms(100), factor_percent: 200, cap: ms(1000), retries: 5, jitter_percent: 0 };
    let mut pair = Pair::with(1, Config { retry: policy, ..exact() }, exact());
    for nth in 1..=10 {
        pair.fault(A, MadKind::Req, nth, Fault::Drop);
    }
    let comm = pair.connect(A);
    pair.run_until(at(60_000));
    let times = pair.sent_of(A, MadKind::Req);
    assert_eq!(times, [at(0), at(100), at(300), at(700), at(1500), at(2500)]);
    assert_eq!(
        pair.events[A],
        [(at(3500), CmEvent::Unreachable { comm, message: MadKind::Req, tries: 6, elapsed: ms(3500) })]
    );
    let Message::Req(req) = pair.sent[A][0].1.message else { panic!() };
    // 2^14 x 4.096 us = 67.1 ms is the longest code within 100 ms.
    assert_eq!((req.remote_response_timeout.code(), req.max_cm_retries), (14, 5));
    // Giving up is told: reason 4, found by our GUID.
    let (_, Mad { message: Message::Rej(rej), .. }) = pair.sent[A].last().unwrap() else { panic!() };
    assert_eq!((rej.reason, rej.message), (RejReason::Timeout, RejectedMessage::Other));
    assert_eq!(rej.local_comm_id, req.local_comm_id);
    assert_eq!(rej.ari.ca_guid(), Some(pair.agents[A].ca_guid()));
}

#[test]
fn jitter_spreads_repeats_but_never_shortens_them() {
    let mut pair = Pair::with(7, Config::default(), Config::default());
    for nth in 1..=16 {
        pair.fault(A, MadKind::Req, nth, Fault::Drop);
    }
    pair.connect(A);
    pair.run_until(at(100_000));
    let times = pair.sent_of(A, MadKind::Req);
    assert_eq!(times.len(), 16);
    let policy = RetryPolicy::default();
    for (n, pair_of) in (1..).zip(times.windows(2)) {
        let (waited, least) = (pair_of[1] - pair_of[0], policy.interval(n));
        assert!(waited >= least && waited <= least * 11 / 10, "interval {n}: {waited:?}");
    }
}

#[test]
fn a_peer_that_gave_up_is_found_by_its_guid() {
    // The server's consumer takes its time; the client gives up before it has heard anything.
    let impatient = Config { retry: RetryPolicy { initial: ms(50), retries: 0, ..exact().retry }, ..exact() };
    let mut pair = Pair::with(1, impatient, exact());
    pair.listen(B);
    pair.answers[B] = false;
    pair.fault(B, MadKind::Mra, 1, Fault::Drop);
    pair.connect(A);
    pair.run_until(at(100));
    assert_eq!(pair.told(A), ["Unreachable"]);
    let CmEvent::Rejected(rejection) = &pair.events[B][1].1 else { panic!("{:?}", pair.told(B)) };
    assert_eq!(rejection.reason, RejReason::Timeout);
    assert_eq!(pair.agents[B].communications(), 0);
}

#[test]
fn a_rep_that_nobody_answers_is_given_up() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.connect(A);
    pair.run_until(at(1));
    pair.rates.loss = 1.0;
    pair.run_until(at(200_000));
    let CmEvent::Unreachable { message, tries, .. } = pair.events[B][1].1 else { panic!("{:?}", pair.told(B)) };
    assert_eq!((message, tries), (MadKind::Rep, 16));
    assert_eq!(pair.agents[B].half_open(), 0);
}

#[test]
fn a_slow_consumer_is_covered_by_mra() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    let a = pair.connect(A);
    pair.run_until(at(60));
    assert_eq!(pair.ladder(B).len(), 0);
    // Halfway through the 134 ms that the client's REQ promises, an MRA asks for 68.7 s.
    pair.run_until(at(70));
    assert_eq!(pair.ladder(B), ["MRA"]);
    let Message::Mra(mra) = pair.sent[B][0].1.message else { panic!() };
    assert_eq!((mra.message, mra.service_timeout.code()), (MraedMessage::Req, 24));
    assert_eq!(pair.agents[A].state(a), Some(CommState::MraReqRcvd));
    pair.run_until(at(60_000));
    assert_eq!(pair.sent_of(A, MadKind::Req).len(), 1, "the client waits");
    let CmEvent::ConnectRequest(req) = pair.events[B][0].1.clone() else { panic!() };
    assert_eq!(pair.agents[B].state(req.comm), Some(CommState::MraReqSent));
    pair.accept(B, req.comm);
    pair.run_until(at(60_010));
    assert_eq!(pair.agents[A].state(a), Some(CommState::Established));
}

#[test]
fn an_mra_that_is_lost_comes_again_with_the_next_repeat() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[B] = false;
    pair.fault(B, MadKind::Mra, 1, Fault::Drop);
    let a = pair.connect(A);
    pair.run_until(at(1000));
    assert_eq!((pair.ladder(A), pair.ladder(B)), (vec!["REQ", "REQ"], vec!["MRA", "MRA"]));
    assert_eq!(pair.agents[A].state(a), Some(CommState::MraReqRcvd));
}

#[test]
fn a_consumer_that_never_answers_is_answered_for() {
    // A request, then a reply, that nobody looks at: 120 s, and not for ever.
    for idle in [B, A] {
        let mut pair = Pair::new();
        pair.listen(B);
        pair.answers[idle] = false;
        pair.connect(A);
        pair.run_until(at(119_000));
        assert_eq!(pair.agents[idle].communications(), 1);
        pair.run_until(at(125_000));
        let (_, CmEvent::Rejected(rejection)) = pair.events[idle].last().unwrap() else { panic!() };
        assert_eq!((rejection.reason, rejection.timewait), (RejReason::Timeout, false));
        let other = 1 - idle;
        assert!(pair.told(other).contains(&"Rejected"), "{:?}", pair.told(other));
        assert_eq!([A, B].map(|side| pair.agents[side].communications()), [0, 0]);
        assert_eq!([A, B].map(|side| pair.agents[side].poll_timeout()), [None, None]);
    }
}

#[test]
fn many_short_mras_have_a_limit_too() {
    // The server asks for a little more time, again and again.
    let client = Config { mra_max: 3, retry: RetryPolicy { retries: 2, ..exact().retry }, ..exact() };
    let server = Config { service_timeout: uroce_cm::wire::CmTimeout::new(14).unwrap(), ..exact() };
    let mut pair = Pair::with(1, client, server);
    pair.listen(B);
    pair.answers[B] = false;
    pair.connect(A);
    pair.run_until(at(60_000));
    let (_, CmEvent::Unreachable { tries, elapsed, .. }) = pair.events[A][0] else { panic!() };
    assert!(tries == 3 && elapsed < ms(5000), "{elapsed:?}");
    assert!(pair.sent_of(B, MadKind::Mra).len() > 3);
}

#[test]
fn a_slow_active_consumer_is_covered_by_mra_for_the_rep() {
    let mut pair = Pair::new();
    pair.listen(B);
    pair.answers[A] = false;
    let a = pair.connect(A);
    // Our REQ promised an answer within 1.07 s.
    pair.run_until(at(530));
    assert_eq!(pair.ladder(A), ["REQ"]);
    pair.run_until(at(545));
    assert_eq!(pair.ladder(A), ["REQ", "MRA"]);
    let b = pair.terms[B][0].0;
    assert_eq!(pair.agents[B].state(b), Some(CommState::MraRepRcvd));
    pair.agents[A].confirm(a, b"").unwrap();
    pair.run_until(at(1200));
    assert_eq!(pair.agents[B].state(b), Some(CommState::Established));
}

#[test]
fn mras_for_ever_are_capped() {
    let client = Config { mra_cap: ms(10_000), retry: RetryPolicy { retries: 3, ..exact().retry }, ..exact() };
    let mut pair = Pair::with(1, client, exact());
    pair.listen(B);
    pair.answers[B] = false;
    pair.connect(A);
    pair.run_until(at(120_000));
    let (when, CmEvent::Unreachable { tries, elapsed, .. }) = &pair.events[A][0] else { panic!() };
    assert_eq!(*tries, 4);
    assert_eq!(*elapsed, *when - at(0));
    // 10 s from the first MRA, then the schedule goes on: no MRA of 68 s each.
    assert!(*elapsed < ms(20_000), "{elapsed:?}");
}

#[test]
fn a_dreq_that_nobody_answers_ends_in_timewait() {
    let mut pair = Pair::with(1, Config { retry: RetryPolicy { retries: 2, ..exact().retry }, ..exact() }, exact());
    pair.listen(B);
    let comm = pair.connect(A);
    pair.run_until(at(10));
    pair.rates.loss = 1.0;
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_until(at(60_000));
    let (_, CmEvent::Disconnected { cause, .. }) = pair.events[A][1] else { panic!("{:?}", pair.told(A)) };
    assert_eq!(cause, DisconnectCause::NoAnswer { tries: 3, elapsed: ms(250 + 500 + 1000) });
    assert_eq!(pair.told(A).last(), Some(&"TimewaitExit"));
}

#[test]
fn a_consumer_that_does_not_answer_a_dreq_is_answered_for() {
    let mut pair = Pair::new();
    pair.listen(B);
    let comm = pair.connect(A);
    pair.run_until(at(10));
    pair.answers[B] = false;
    pair.agents[A].disconnect(pair.now, comm, b"").unwrap();
    pair.run_until(at(3000));
    assert_eq!(pair.sent_of(B, MadKind::Drep)[0], at(1011));
    assert!(pair.told(B).contains(&"Disconnected"));
}

#[test]
fn a_dreq_after_a_lost_rep_does_not_leave_both_sides_asking() {
    // The server accepts, its REP is lost, and it changes its mind.
    let mut pair = Pair::new();
    pair.listen(B);
    pair.fault(B, MadKind::Rep, 1, Fault::Drop);
    let a = pair.connect(A);
    pair.run_until(at(2));
    let b = pair.terms[B][0].0;
    pair.agents[B].disconnect(pair.now, b, b"").unwrap();
    // The DREQ names a connection that A does not have yet: DREP at once.
    pair.run_until(at(5));
    assert_eq!(pair.ladder(A), ["REQ", "DREP"]);
    assert_eq!((pair.agents[B].state(b), pair.agents[A].state(a)), (None, Some(CommState::ReqSent)));
    assert_eq!(pair.told(B), ["ConnectRequest", "Disconnected"]);
    // By the time the REQ comes again TIMEWAIT is over: it is a REQ like any other.
    pair.run_until(at(1000));
    assert_eq!(pair.agents[A].state(a), Some(CommState::Established));
}
