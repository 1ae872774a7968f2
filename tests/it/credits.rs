//! Receiver not ready: end-to-end credits (IBTA Vol 1 9.7.7.2), the RNR timer that adapts, the end of patience, and the
//! READs that wait for a place.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use uroce::device::Verdict;
use uroce::device::impair::ImpairModel;
use uroce::rng::Rng;
use uroce::time::Duration;
use uroce::types::{Imm, RnrTimer};
use uroce::verbs::{FailureKind, Operation, QpOptions, QpState, Verbs, WcOpcode, WcStatus};
use uroce::wire::{Body, Syndrome};

use crate::duo::{Duo, Setup};

const A: usize = 0;
const B: usize = 1;
const NOT_USED: u8 = 31;

fn with_credits() -> QpOptions {
    QpOptions { credits: true, ..QpOptions::default() }
}

/// Both advertise credits; B has `receives` posted, and A knows.
fn told(receives: usize) -> Duo {
    let mut duo = Duo::new(&Setup { options: [with_credits(); 2], ..Setup::default() });
    for _ in 0..=receives {
        duo.recv(B, 0, 4096);
    }
    duo.post(A, Operation::Send, 0, 8);
    duo.settle();
    duo.completions(A);
    duo.completions(B);
    duo
}

type Log<T> = Arc<Mutex<Vec<T>>>;

/// Notes the credit code of every positive answer, and whether each request asks for one.
fn listen(duo: &mut Duo) -> (Log<u8>, Log<bool>) {
    let seen = (Arc::new(Mutex::new(Vec::new())), Arc::new(Mutex::new(Vec::new())));
    let (codes, asks) = (Arc::clone(&seen.0), Arc::clone(&seen.1));
    duo.listen_to(move |_, packet| {
        match packet.body {
            Body::Response(response) => {
                if let Some(Syndrome::Ack { credits }) = response.op.aeth().map(|a| a.syndrome) {
                    codes.lock().unwrap().push(credits);
                }
            }
            _ => asks.lock().unwrap().push(packet.ack_req),
        }
        None
    });
    seen
}

#[test]
fn by_default_and_on_an_srq_no_credits_are_advertised() {
    for (options, srq) in [(QpOptions::default(), false), (with_credits(), true)] {
        let mut duo = Duo::new(&Setup { options: [options; 2], srq, ..Setup::default() });
        let (codes, _) = listen(&mut duo);
        let there = duo.remote(B, 0);
        for operation in
            [Operation::Write(there), Operation::Read(there), Operation::FetchAdd { remote: there, add: 1 }]
        {
            duo.post(A, operation, 0, 8);
        }
        duo.settle();
        assert!(duo.completions(A).iter().all(|c| c.status == WcStatus::Success));
        // An ACK, READ data, the result of an atomic.
        assert_eq!(*codes.lock().unwrap(), [NOT_USED; 3]);
    }
}

#[test]
fn every_positive_answer_says_how_many_receives_wait() {
    let mut duo = Duo::new(&Setup { options: [with_credits(); 2], ..Setup::default() });
    let (codes, _) = listen(&mut duo);
    for _ in 0..7 {
        duo.recv(B, 0, 4096);
    }
    let there = duo.remote(B, 0);
    for operation in [Operation::Write(there), Operation::Read(there), Operation::FetchAdd { remote: there, add: 1 }] {
        duo.post(A, operation, 0, 8);
        duo.settle();
    }
    for _ in 0..7 {
        duo.post(A, Operation::Send, 0, 8);
        duo.settle();
    }
    // 7 receives have no code of their own: 6 has, 5. Then 6, 5 (told as 4), 4, 3, 2, 1 and none.
    assert_eq!(*codes.lock().unwrap(), [5, 5, 5, 5, 4, 4, 3, 2, 1, 0]);
}

#[test]
fn beyond_its_credits_a_requester_asks_with_one_message_and_sends_no_second() {
    let mut duo = told(4);
    let (_, asks) = listen(&mut duo);
    // The message beyond has three packets: only its first is to be refused.
    for len in [8, 8, 8, 8, 3000, 8, 8] {
        duo.post(A, Operation::Send, 0, len);
    }
    duo.world.run_until(duo.world.now() + Duration::from_millis(5));
    assert_eq!(duo.completions(A).len(), 4);
    let (refused, dropped) = (duo.count(B, "send_rnr_err"), duo.count(B, "drop_ahead_of_sequence"));
    assert!(refused > 10, "the one that asks goes again and again: {refused}");
    assert_eq!(dropped, 0, "nothing went behind it");
    assert_eq!(asks.lock().unwrap().len() as u64, 4 + refused);
    assert!(asks.lock().unwrap().iter().all(|ask| *ask), "each wants an answer");
    for _ in 0..3 {
        duo.recv(B, 0, 4096);
    }
    duo.settle();
    assert_eq!(duo.completions(A).len(), 3);
    assert_eq!(duo.completions(B).len(), 7);
    assert_eq!((duo.state(A), duo.state(B)), (QpState::Rts, QpState::Rts));
}

#[test]
fn without_credits_the_same_messages_all_go_at_once() {
    let mut duo = Duo::new(&Setup::default());
    for _ in 0..3 {
        duo.post(A, Operation::Send, 0, 8);
    }
    duo.world.run_until(duo.world.now() + Duration::from_micros(10));
    assert_eq!((duo.count(B, "send_rnr_err"), duo.count(B, "drop_ahead_of_sequence")), (1, 2));
}

#[test]
fn what_takes_no_receive_is_not_held_back() {
    let mut duo = told(0);
    let there = duo.remote(B, 0);
    for operation in [Operation::Write(there), Operation::Read(there), Operation::FetchAdd { remote: there, add: 1 }] {
        duo.post(A, operation, 0, 8);
    }
    duo.settle();
    assert_eq!(duo.completions(A).len(), 3);
    assert_eq!(duo.count(B, "send_rnr_err"), 0);
}

/// An ACK given again, with credits that came since, opens the way without a repeat.
#[test]
fn an_unasked_acknowledgement_brings_credits() {
    let mut duo = told(0);
    let node = duo.ends[B].node;
    duo.world.keep_sent(node);
    let there = duo.remote(B, 0);
    duo.post(A, Operation::Write(there), 0, 8);
    duo.settle();
    let last = duo.world.take_sent(node).pop().unwrap();
    let packet = uroce::wire::Packet::parse(&last.bytes).unwrap();
    let Body::Response(mut response) = packet.body else { panic!("B answers") };
    let Some(aeth) = response.op.aeth() else { panic!("B acknowledges") };
    assert_eq!(aeth.syndrome, Syndrome::Ack { credits: 0 });
    let ip = uroce::wire::IpFields { id: last.id, flags_fragment: 0x4000 };
    let (to, before) = (duo.ends[A].node, duo.count(A, "drop_ghost_ack"));
    duo.world.keep_sent(to);
    let mut in_flight = |duo: &mut Duo, credits| {
        let syndrome = Syndrome::Ack { credits };
        response.op = uroce::wire::ResponseOp::Acknowledge(uroce::wire::Aeth { syndrome, ..aeth });
        let again = uroce::wire::Packet { body: Body::Response(response), ..packet };
        let bytes = crate::duo::sealed(&again, &last.flow, ip);
        duo.world.inject(to, last.flow, uroce::burst::RxIds::Known(ip), &bytes);
        duo.world.take_sent(to).len()
    };
    duo.world.take_sent(to);
    for _ in 0..6 {
        duo.recv(B, 0, 4096);
        duo.post(A, Operation::Send, 0, 8);
    }
    assert_eq!(duo.world.take_sent(to).len(), 1, "one asks");
    assert_eq!(in_flight(&mut duo, 2), 2, "two, and one that asks for more");
    assert_eq!(in_flight(&mut duo, 0), 0, "what was promised stays");
    assert_eq!(in_flight(&mut duo, NOT_USED), 3, "and without credits, all");
    duo.settle();
    assert_eq!(duo.completions(A).len(), 7);
    assert_eq!(duo.completions(B).len(), 6);
    assert_eq!(duo.count(A, "drop_ghost_ack"), before + 1, "the one without credits says nothing new");
    assert_eq!(duo.count(B, "send_rnr_err"), 0);
}

/// 4,000 messages of every kind both ways, a tenth of all packets lost, receives posted in fits and starts, often none:
/// everything completes, in order, with its bytes.
#[test]
fn credits_never_hold_a_connection_up() {
    for seed in 0..4 {
        let setup = Setup { options: [with_credits(); 2], retry: 7, timeout: 6, ..Setup::default() };
        let mut duo = Duo::new(&setup);
        let mut rng = Rng::from_u64(seed);
        let (a, b) = (duo.ends[A].node, duo.ends[B].node);
        duo.world.set_path(a, b, ImpairModel::lossy(0.1).with_delay(Duration::from_micros(20)));
        let (mut posted, mut done, mut receives) = ([0; 2], [0; 2], [0i32; 2]);
        let mut wanted: [VecDeque<u32>; 2] = [VecDeque::new(), VecDeque::new()];
        let target = 500;
        let mut idle_rounds = 0;
        while done.iter().any(|d| *d < target) {
            for side in [A, B] {
                let peer = 1 - side;
                while posted[side] < target && posted[side] - done[side] < 40 {
                    let there = duo.remote(peer, 0);
                    let len = [0, 8, 1500, 5000][rng.within(0..=3) as usize];
                    let n = posted[side];
                    let operation = match rng.within(0..=5) {
                        0 => Operation::Write(there),
                        1 => Operation::Read(there),
                        2 | 3 => Operation::SendImm(Imm::new(n)),
                        _ => Operation::WriteImm(there, Imm::new(n)),
                    };
                    if matches!(operation, Operation::SendImm(_) | Operation::WriteImm(..)) {
                        wanted[peer].push_back(n);
                    }
                    duo.post(side, operation, 0, len);
                    posted[side] += 1;
                }
                if rng.chance(0.3) {
                    for _ in 0..rng.within(0..=12) {
                        if receives[side] < 40 {
                            duo.recv(side, 0, 5000);
                            receives[side] += 1;
                        }
                    }
                }
            }
            duo.world.run_until(duo.world.now() + Duration::from_micros(200));
            let before = done;
            for side in [A, B] {
                for wc in duo.completions(side) {
                    assert_eq!(wc.status, WcStatus::Success, "seed {seed}");
                    match wc.opcode {
                        WcOpcode::Recv | WcOpcode::RecvRdmaWithImm => {
                            receives[side] -= 1;
                            let want = wanted[side].pop_front().unwrap();
                            assert_eq!(wc.data, uroce::verbs::WcData::Imm(Imm::new(want)));
                        }
                        _ => done[side] += 1,
                    }
                }
            }
            idle_rounds = if done == before { idle_rounds + 1 } else { 0 };
            assert!(idle_rounds < 20_000, "seed {seed}: stuck at {done:?} of {posted:?}, receives {receives:?}");
        }
        duo.world.set_path(a, b, ImpairModel::NONE);
        duo.settle();
        assert!(wanted.iter().all(VecDeque::is_empty));
    }
}

/// The RNR timers that B advertises for the message that A sends now, a receive being posted after `refusals`.
fn advertised(duo: &mut Duo, refusals: usize) -> Vec<Duration> {
    let timers = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&timers);
    duo.listen_to(move |_, packet| {
        if let Body::Response(response) = packet.body
            && let Some(Syndrome::RnrNak(timer)) = response.op.aeth().map(|a| a.syndrome)
        {
            log.lock().unwrap().push(timer.duration());
        }
        None::<Verdict>
    });
    duo.post(A, Operation::Send, 0, 8);
    while timers.lock().unwrap().len() < refusals {
        duo.world.step();
    }
    duo.recv(B, 0, 4096);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
    timers.lock().unwrap().clone()
}

#[test]
fn the_advertised_wait_follows_how_long_receives_are_missing() {
    let micros = |codes: &[u64]| codes.iter().map(|m| Duration::from_micros(*m)).collect::<Vec<_>>();
    let options = |rnr_timer_max| QpOptions { rnr_timer_max, ..QpOptions::default() };
    let setup = |max| Setup { min_rnr: 4, options: [QpOptions::default(), options(max)], ..Setup::default() };
    let mut duo = Duo::new(&setup(None));
    assert_eq!(advertised(&mut duo, 4), micros(&[40, 40, 40, 40]), "as the program says");
    let mut duo = Duo::new(&setup(RnrTimer::new(9)));
    assert_eq!(advertised(&mut duo, 5), micros(&[40, 80, 160, 240, 240]), "doubling, up to the longest");
    assert_eq!(advertised(&mut duo, 1), micros(&[240]));
    assert_eq!(advertised(&mut duo, 1), micros(&[160]));
    assert_eq!(advertised(&mut duo, 1), micros(&[120]));
}

#[test]
fn patience_with_a_peer_that_is_not_ready_ends() {
    let most = Duration::from_millis(1);
    let options = QpOptions { max_rnr_wait: Some(most), ..QpOptions::default() };
    // A wait of 80 us each, and for ever as far as the verbs go.
    let mut duo = Duo::new(&Setup { min_rnr: 6, options: [options, QpOptions::default()], ..Setup::default() });
    duo.post(A, Operation::Send, 0, 8);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::RnrRetryExceeded);
    let (node, qp) = (duo.ends[A].node, duo.ends[A].qp);
    let detail = duo.world.endpoint(node).query_qp(qp).unwrap().last_error.unwrap();
    assert_eq!(detail.kind, FailureKind::ReceiverNotReadyTooLong);
    assert!(detail.elapsed >= most && detail.elapsed < most + Duration::from_micros(200), "{detail}");
    assert!(detail.to_string().contains("longer than allowed"), "{detail}");
    assert_eq!(duo.count(A, "retry_rnr_exceeded_err"), 1);
    // A timer longer than all patience is still waited for once.
    let mut duo = Duo::new(&Setup { min_rnr: 18, options: [options, QpOptions::default()], ..Setup::default() });
    duo.post(A, Operation::Send, 0, 8);
    duo.world.run_until(duo.world.now() + Duration::from_millis(2));
    duo.recv(B, 0, 8);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
}

#[test]
fn reads_beyond_the_bound_wait_and_are_served() {
    // Three READs of 100,000 bytes at once, where answers to 150,000 may wait.
    let options = QpOptions { max_read_bytes: 150_000, ..QpOptions::default() };
    let mut duo = Duo::new(&Setup { options: [QpOptions::default(), options], ..Setup::default() });
    let mut bytes = vec![0; 100_000];
    Rng::from_u64(5).fill(&mut bytes);
    duo.ends[B].region.write(0, &bytes).unwrap();
    // A slow device, so that answers wait.
    let node = duo.ends[B].node;
    duo.world.set_device_rate(node, Some(1_000_000_000));
    let there = duo.remote(B, 0);
    for _ in 0..3 {
        duo.post(A, Operation::Read(there), 100_000, 100_000);
    }
    duo.settle();
    let statuses: Vec<_> = duo.completions(A).iter().map(|c| c.status).collect();
    assert_eq!(statuses, [WcStatus::Success; 3]);
    assert_eq!(duo.ends[A].region.to_vec()[100_000..200_000], bytes);
    assert!(duo.count(B, "send_rnr_err") > 0, "one was asked to wait");
    // One that stands alone is served, though it is longer than the bound.
    let tight = QpOptions { max_read_bytes: 1, ..QpOptions::default() };
    let qp = duo.ends[B].qp;
    duo.world.endpoint(node).set_qp_options(qp, tight).unwrap();
    duo.post(A, Operation::Read(there), 100_000, 100_000);
    duo.settle();
    assert_eq!(duo.completions(A)[0].status, WcStatus::Success);
}
