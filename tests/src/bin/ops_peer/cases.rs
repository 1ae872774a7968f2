//! The tests: what each sends, and what must have come of it on both sides.
//!
//! Owns the list and the steps of each test. Never makes a verbs call by itself.

use uroce::types::Psn;
use uroce::verbs::{FlushScope, Operation, Remote, WcData, WcStatus};

use crate::bench::Bench;
use crate::{
    ATOMICS, BIG, COUNTER_AT, DEPTH, FROM_AT, IMM, NEW, OLD, OURS, Outcome, PIECE, PIECES, RECV_AT, REGION, RESULT_AT,
    ROUND_LEN, ROUNDS, ROUNDS_AT, THEIRS, TO_AT, USUAL, WINDOW_AT, WRAP,
};

/// What is set up otherwise than usual.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    pub(crate) prepare: fn(&mut Bench) -> Outcome,
    pub(crate) request: fn(&mut Bench) -> Outcome,
    pub(crate) check: fn(&mut Bench) -> Outcome,
    pub(crate) psn: Psn,
    pub(crate) rnr_retry: u8,
    pub(crate) retry: u8,
    pub(crate) timeout: u8,
    /// The responder posts its receive late; it never listens.
    pub(crate) late: bool,
    pub(crate) deaf: bool,
}

type Step = fn(&mut Bench) -> Outcome;

const fn test(name: &'static str, prepare: Step, request: Step, check: Step) -> Test {
    let (rnr_retry, retry, timeout) = (7, 7, 17);
    Test { name, prepare, request, check, psn: USUAL, rnr_retry, retry, timeout, late: false, deaf: false }
}

pub(crate) const TESTS: &[Test] = &[
    test("send", one_receive, |b| b.does(Operation::Send, FROM_AT, BIG), |b| b.got_send(BIG, WcData::None)),
    test("send-imm", one_receive, |b| b.does(Operation::SendImm(IMM), FROM_AT, 100), |b| b.got_send(100, imm())),
    test("send-0", one_receive, |b| b.does(Operation::Send, FROM_AT, 0), |b| b.got_send(0, WcData::None)),
    test("send-sge32", pieces_receive, |b| b.does_in_pieces(Operation::Send, FROM_AT), got_pieces),
    test("send-inv", one_receive_and_window, send_inv, got_inv),
    test("write", nothing, |b| b.does(Operation::Write(b.at(TO_AT)), FROM_AT, BIG), got_write),
    test("write-imm", one_receive, |b| b.does(Operation::WriteImm(b.at(TO_AT), IMM), FROM_AT, 33), got_write_imm),
    test("write-0", nothing, |b| b.does(Operation::Write(b.keyed(TO_AT, 0x1234)), FROM_AT, 0), untouched),
    test("read", nothing, read_big, untouched),
    test("read-0", nothing, |b| b.does(Operation::Read(b.keyed(FROM_AT, 0x1234)), TO_AT, 0), untouched),
    test("read-sge32", nothing, read_pieces, untouched),
    test("cmp-swap", nothing, compare_swap, |b| b.word_is("the word", COUNTER_AT, NEW)),
    test("fetch-add", nothing, fetch_add, |b| b.word_is("the counter", COUNTER_AT, OLD + 3 * ATOMICS)),
    test("bad-key-write", nothing, |b| b.refused(Operation::Write(b.wrong_key(TO_AT))), untouched),
    test("bad-key-read", nothing, |b| b.refused(Operation::Read(b.wrong_key(FROM_AT))), untouched),
    test("bad-key-atomic", nothing, |b| b.refused(add(b.wrong_key(COUNTER_AT))), untouched),
    test("bad-range-write", nothing, |b| b.refused(Operation::Write(b.at(REGION - 32))), untouched),
    test("bad-range-read", nothing, |b| b.refused(Operation::Read(b.at(REGION - 32))), untouched),
    test("bad-range-atomic", nothing, |b| b.refused(add(b.at(REGION))), untouched),
    test("bad-range-wrap", nothing, range_wraps, untouched),
    test("no-right-write", nothing, |b| b.refused(Operation::Write(b.no_rights(TO_AT))), untouched),
    test("no-right-read", nothing, |b| b.refused(Operation::Read(b.no_rights(FROM_AT))), untouched),
    test("no-right-atomic", nothing, |b| b.refused(add(b.no_rights(COUNTER_AT))), untouched),
    test("too-long", |b| b.post_recv(RECV_AT, 16, false), too_long, got_too_long),
    Test { late: true, ..test("rnr", nothing, |b| b.does(Operation::Send, FROM_AT, BIG), got_late) },
    Test { rnr_retry: 2, ..test("rnr-exhausted", nothing, |b| b.sends_in_vain(WcStatus::RnrRetryExceeded), untouched) },
    Test {
        retry: 2,
        timeout: 12,
        deaf: true,
        ..test("retry-exhausted", nothing, |b| b.sends_in_vain(WcStatus::RetryExceeded), untouched)
    },
    Test { timeout: 14, ..test("rounds", round_receives, rounds, got_rounds) },
    Test { psn: WRAP, ..test("psn-wrap", round_receives, rounds, got_rounds) },
    test("flush", nothing, flush_range, got_write),
    test("flush-region", nothing, |b| b.does(b.flush(b.at(0), 0, FlushScope::Region), 0, 0), nothing),
    test("bad-key-flush", nothing, flush_bad_key, nothing),
    test("atomic-write", nothing, |b| b.does(Operation::AtomicWrite(b.at(COUNTER_AT)), FROM_AT, 8), got_atomic_write),
    test("bad-key-atomic-write", nothing, atomic_write_bad_key, nothing),
];

const fn imm() -> WcData {
    WcData::Imm(IMM)
}

fn add(remote: Remote) -> Operation {
    Operation::FetchAdd { remote, add: 1 }
}

// ---- the requester's steps

fn send_inv(b: &mut Bench) -> Outcome {
    let window = Remote { addr: b.at(WINDOW_AT).addr, rkey: b.peer()?.window };
    b.does(Operation::Write(window), FROM_AT, 64)?;
    b.does(Operation::SendInvalidate(window.rkey), FROM_AT, 20)?;
    b.refused(Operation::Write(window))
}

fn read_big(b: &mut Bench) -> Outcome {
    b.does(Operation::Read(b.at(FROM_AT)), TO_AT, BIG)?;
    b.holds("READ", TO_AT, BIG, FROM_AT, THEIRS)
}

fn read_pieces(b: &mut Bench) -> Outcome {
    b.does_in_pieces(Operation::Read(b.at(FROM_AT)), TO_AT)?;
    (0..PIECES).try_for_each(|i| b.holds("READ", TO_AT + i * 2 * PIECE, PIECE, FROM_AT + i * PIECE, THEIRS))
}

fn compare_swap(b: &mut Bench) -> Outcome {
    let remote = b.at(COUNTER_AT);
    b.does(Operation::CompareSwap { remote, compare: OLD, swap: NEW }, RESULT_AT, 8)?;
    b.word_is("what was there", RESULT_AT, OLD)?;
    b.does(Operation::CompareSwap { remote, compare: OLD, swap: 5 }, RESULT_AT, 8)?;
    b.word_is("what was there then", RESULT_AT, NEW)
}

fn fetch_add(b: &mut Bench) -> Outcome {
    let operation = Operation::FetchAdd { remote: b.at(COUNTER_AT), add: 3 };
    let mut posted = 0;
    for done in 0..ATOMICS {
        while posted < ATOMICS && posted - done < 2 * u64::from(DEPTH) {
            b.post(operation, RESULT_AT, 8)?;
            posted += 1;
        }
        b.completes("FETCH_ADD", WcStatus::Success)?;
    }
    b.word_is("what was there", RESULT_AT, OLD + 3 * (ATOMICS - 1))
}

fn range_wraps(b: &mut Bench) -> Outcome {
    b.refused(Operation::Write(Remote { addr: 0_u64.wrapping_sub(32), ..b.at(0) }))
}

fn too_long(b: &mut Bench) -> Outcome {
    b.post(Operation::Send, FROM_AT, 64)?;
    let wc = b.next_completion()?;
    // IBTA: an invalid request. rxe as responder says operational error.
    match wc.status {
        WcStatus::RemoteInvalidRequest | WcStatus::RemoteOperation => Ok(()),
        status => Err(format!("SEND completed with {status:?}")),
    }
}

fn rounds(b: &mut Bench) -> Outcome {
    let mut posted = 0;
    for done in 0..4 * ROUNDS {
        while posted < ROUNDS && 4 * posted < done + 4 * u32::from(DEPTH) {
            b.post(Operation::Send, ROUNDS_AT + posted * ROUND_LEN, ROUND_LEN)?;
            b.post(Operation::Write(b.at(TO_AT)), FROM_AT, BIG)?;
            b.post(Operation::Read(b.at(FROM_AT)), TO_AT, BIG)?;
            b.post(add(b.at(COUNTER_AT)), RESULT_AT, 8)?;
            posted += 1;
        }
        b.completes("a request", WcStatus::Success)?;
    }
    b.holds("READ", TO_AT, BIG, FROM_AT, THEIRS)?;
    b.word_is("what was there", RESULT_AT, OLD + u64::from(ROUNDS) - 1)
}

fn flush_range(b: &mut Bench) -> Outcome {
    b.does(Operation::Write(b.at(TO_AT)), FROM_AT, BIG)?;
    b.does(b.flush(b.at(TO_AT), BIG, FlushScope::Range), 0, 0)
}

fn flush_bad_key(b: &mut Bench) -> Outcome {
    b.post(b.flush(b.wrong_key(TO_AT), BIG, FlushScope::Range), 0, 0)?;
    b.completes("FLUSH", WcStatus::RemoteAccess)
}

fn atomic_write_bad_key(b: &mut Bench) -> Outcome {
    b.post(Operation::AtomicWrite(b.wrong_key(COUNTER_AT)), FROM_AT, 8)?;
    b.completes("ATOMIC_WRITE", WcStatus::RemoteAccess)
}

// ---- the responder's steps: before the QPs meet, and when the requester is done

fn nothing(_: &mut Bench) -> Outcome {
    Ok(())
}

pub(crate) fn one_receive(b: &mut Bench) -> Outcome {
    b.post_recv(RECV_AT, 8192, false)
}

fn one_receive_and_window(b: &mut Bench) -> Outcome {
    b.make_window()?;
    one_receive(b)
}

fn pieces_receive(b: &mut Bench) -> Outcome {
    b.post_recv(RECV_AT, 0, true)
}

fn round_receives(b: &mut Bench) -> Outcome {
    (0..ROUNDS).try_for_each(|i| b.post_recv(ROUNDS_AT + i * ROUND_LEN, ROUND_LEN, false))
}

fn got_late(b: &mut Bench) -> Outcome {
    b.got_send(BIG, WcData::None)
}

fn got_pieces(b: &mut Bench) -> Outcome {
    b.received(PIECES * PIECE, WcData::None)?;
    (0..PIECES).try_for_each(|i| {
        let at = i * 2 * PIECE;
        b.holds("SEND", RECV_AT + at, PIECE, FROM_AT + at, OURS)
    })
}

fn got_inv(b: &mut Bench) -> Outcome {
    let key = b.window_key;
    b.received(20, WcData::Invalidated(key))?;
    b.holds("WRITE", WINDOW_AT, 64, FROM_AT, OURS)
}

fn got_write(b: &mut Bench) -> Outcome {
    b.holds("WRITE", TO_AT, BIG, FROM_AT, OURS)
}

fn got_write_imm(b: &mut Bench) -> Outcome {
    b.received(33, imm())?;
    b.holds("WRITE", TO_AT, 33, FROM_AT, OURS)
}

fn untouched(b: &mut Bench) -> Outcome {
    b.holds("memory", 0, COUNTER_AT, 0, THEIRS)?;
    b.word_is("the counter", COUNTER_AT, OLD)
}

fn got_too_long(b: &mut Bench) -> Outcome {
    let wc = b.next_completion()?;
    if wc.status == WcStatus::Success { Err("the receive succeeded".into()) } else { Ok(()) }
}

fn got_rounds(b: &mut Bench) -> Outcome {
    for _ in 0..ROUNDS {
        b.received(ROUND_LEN, WcData::None)?;
    }
    b.holds("SENDs", ROUNDS_AT, ROUNDS * ROUND_LEN, ROUNDS_AT, OURS)?;
    got_write(b)?;
    b.word_is("the counter", COUNTER_AT, OLD + u64::from(ROUNDS))
}

fn got_atomic_write(b: &mut Bench) -> Outcome {
    b.holds("ATOMIC_WRITE", COUNTER_AT, 8, FROM_AT, OURS)
}
