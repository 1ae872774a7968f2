//! What a responder still has to say, and what it remembers of what it said.
//!
//! Owns the queue of ACKs, NAKs, READ data, atomic results and word of ATOMIC WRITEs and FLUSHes, in PSN order, and the
//! memory of the last READs and atomics, from which repeats are answered (IBTA Vol 1 9.7.5.1.2 to 9.7.5.1.5). Bounded by
//! `max_dest_rd_atomic`.

use std::collections::VecDeque;

use crate::types::{Msn, Psn, Rkey};
use crate::wire::{Aeth, Syndrome};

/// READs and atomics that the verbs allow outstanding.
pub const MAX_RD_ATOMIC: usize = 128;
/// FLUSHes whose answer waits: they do not count as READs do, so they have a limit of their own.
pub const MAX_FLUSHES: usize = 16;
/// Answers that wait at most: one for each READ, atomic or FLUSH, an ACK between any two, and a few more.
pub const MAX_ANSWERS: usize = 2 * (MAX_RD_ATOMIC + MAX_FLUSHES) + MORE_ANSWERS;
/// Repeats and NAKs.
const MORE_ANSWERS: usize = 8;

/// READ data that is still to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ReadAnswer {
    /// PSN of its first packet.
    pub(crate) first: Psn,
    /// PSN of the next one.
    pub(crate) next: Psn,
    /// Packets in all.
    pub(crate) packets: u32,
    /// Where the data is.
    pub(crate) addr: u64,
    /// Key of the region.
    pub(crate) rkey: Rkey,
    /// Bytes in all.
    pub(crate) length: u32,
    /// MSN of the request.
    pub(crate) msn: Msn,
}

impl ReadAnswer {
    /// Whether both answer a PSN.
    fn overlaps(&self, other: &Self) -> bool {
        self.first.is_within(other.first, other.packets) || other.first.is_within(self.first, self.packets)
    }
}

/// Something to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// ACK, RNR NAK or NAK.
    Acknowledge(Psn, Aeth),
    /// READ data.
    Read(ReadAnswer),
    /// Result of an atomic.
    Atomic(Psn, Msn, u64),
    /// An ATOMIC WRITE was done.
    Placed(Psn, Msn),
    /// A FLUSH was done.
    Flushed(Psn, Msn),
}

impl Answer {
    fn first(&self) -> Psn {
        match self {
            Self::Acknowledge(psn, _) | Self::Atomic(psn, ..) | Self::Placed(psn, _) | Self::Flushed(psn, _) => *psn,
            Self::Read(read) => read.first,
        }
    }
}

/// An executed READ or atomic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remembered {
    /// READ: its PSN range and place.
    Read(ReadAnswer),
    /// Atomic: the result, which is never computed again.
    Atomic(Psn, Msn, u64),
    /// ATOMIC WRITE: it is never done again.
    Placed(Psn, Msn),
}

/// An answer that has not left.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    answer: Answer,
    /// The request came again. Its first answer may have left, and the peer may have gone on.
    repeat: bool,
}

/// Queue and memory.
#[derive(Debug)]
pub(crate) struct Answers {
    queue: VecDeque<Waiting>,
    memory: VecDeque<Remembered>,
    depth: usize,
}

impl Answers {
    pub(crate) fn new() -> Self {
        Self {
            // Sized with the depth: a QP that serves no READs pays for none.
            queue: VecDeque::new(),
            memory: VecDeque::new(),
            depth: 0,
        }
    }

    /// Remembers the last `depth` READs and atomics from now on.
    pub(crate) fn set_depth(&mut self, depth: u8) {
        self.depth = usize::from(depth).min(MAX_RD_ATOMIC);
        while self.memory.len() > self.depth {
            self.memory.pop_front();
        }
        self.memory.reserve(self.depth.saturating_sub(self.memory.len()));
        // A peer that sends FLUSHes makes it grow, once.
        self.queue.reserve((2 * self.depth + MORE_ANSWERS).saturating_sub(self.queue.len()));
    }

    /// Answers that may wait: one for each READ, atomic or FLUSH, an ACK between any two, and a few more.
    fn limit(&self) -> usize {
        2 * (self.depth + MAX_FLUSHES) + MORE_ANSWERS
    }

    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn clear(&mut self) {
        self.queue.clear();
        self.memory.clear();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// READs, atomics and ATOMIC WRITEs whose first answer has not left yet. Answers to repeats do not count: a peer that
    /// had the first one may have begun further READs meanwhile.
    pub(crate) fn unanswered(&self) -> usize {
        self.queue
            .iter()
            .filter(|w| !w.repeat && !matches!(w.answer, Answer::Acknowledge(..) | Answer::Flushed(..)))
            .count()
    }

    /// Bytes of READs whose first answer has not left whole yet.
    pub(crate) fn unanswered_bytes(&self) -> u64 {
        let bytes = |w: &Waiting| match &w.answer {
            Answer::Read(read) if !w.repeat => u64::from(read.length),
            _ => 0,
        };
        self.queue.iter().map(bytes).sum()
    }

    /// Queues a positive ACK; one that waits right before it is covered by it and goes.
    pub(crate) fn ack(&mut self, psn: Psn, msn: Msn) -> bool {
        let new = Answer::Acknowledge(psn, Aeth { syndrome: Syndrome::ACK, msn });
        if let Some(Waiting { answer: back, .. }) = self.queue.back_mut()
            && matches!(back, Answer::Acknowledge(_, Aeth { syndrome: Syndrome::Ack { .. }, .. }))
        {
            let coalesced = *back != new;
            *back = new;
            return coalesced;
        }
        self.push(new);
        false
    }

    /// Queues a NAK of any kind.
    pub(crate) fn nak(&mut self, psn: Psn, syndrome: Syndrome, msn: Msn) {
        self.push(Answer::Acknowledge(psn, Aeth { syndrome, msn }));
    }

    fn push(&mut self, answer: Answer) {
        if self.queue.len() < self.limit() {
            self.queue.push_back(Waiting { answer, repeat: false });
        }
    }

    fn remember(&mut self, entry: Remembered) {
        if self.memory.len() >= self.depth {
            self.memory.pop_front();
        }
        self.memory.push_back(entry);
    }

    /// Queues and remembers a READ.
    pub(crate) fn read(&mut self, read: ReadAnswer) {
        self.remember(Remembered::Read(read));
        self.push(Answer::Read(read));
    }

    /// Queues and remembers the result of an atomic.
    pub(crate) fn atomic(&mut self, psn: Psn, msn: Msn, original: u64) {
        self.remember(Remembered::Atomic(psn, msn, original));
        self.push(Answer::Atomic(psn, msn, original));
    }

    /// Queues and remembers that an ATOMIC WRITE was done.
    pub(crate) fn placed(&mut self, psn: Psn, msn: Msn) {
        self.remember(Remembered::Placed(psn, msn));
        self.push(Answer::Placed(psn, msn));
    }

    /// Queues the answer to a FLUSH. It is not remembered: one that comes again was done, whatever else was since, and
    /// its answer says no more than that.
    pub(crate) fn flushed(&mut self, psn: Psn, msn: Msn) {
        self.push(Answer::Flushed(psn, msn));
    }

    /// Whether the answer to one more FLUSH can wait.
    pub(crate) fn takes_flush(&self) -> bool {
        self.queue.iter().filter(|w| matches!(w.answer, Answer::Flushed(..))).count() < MAX_FLUSHES
    }

    /// Answers a repeated FLUSH at `psn`.
    pub(crate) fn repeat_flush(&mut self, psn: Psn, msn: Msn) -> bool {
        self.insert(Answer::Flushed(psn, msn));
        true
    }

    /// Answers a repeated READ at `psn`, when it asks for the rest, or a part of the rest, of a remembered one. The
    /// answer begins with First or Only at `psn`. It is not given while other READ answers wait that make more than `most`
    /// bytes with it: a peer that needs it asks again.
    pub(crate) fn repeat_read(&mut self, psn: Psn, addr: u64, rkey: Rkey, length: u32, mtu: usize, most: u64) -> bool {
        let found = self.memory.iter().rev().find_map(|m| match m {
            Remembered::Read(r) if psn.is_within(r.first, r.packets) => Some(*r),
            _ => None,
        });
        let Some(read) = found else { return false };
        let offset = u64::from(psn.distance_from(read.first).unsigned_abs()) * mtu as u64;
        let fits = rkey == read.rkey
            && addr == read.addr.wrapping_add(offset)
            && u64::from(length) + offset <= u64::from(read.length);
        if !fits {
            return false;
        }
        let packets = if length == 0 { 1 } else { length.div_ceil(u32::try_from(mtu).unwrap_or(u32::MAX)) };
        let again = ReadAnswer { first: psn, next: psn, packets, addr, rkey, length, msn: read.msn };
        let beside = |w: &Waiting| match &w.answer {
            Answer::Read(other) if !other.overlaps(&again) => u64::from(other.length),
            _ => 0,
        };
        let waiting: u64 = self.queue.iter().map(beside).sum();
        if waiting > 0 && waiting + u64::from(length) > most {
            return false;
        }
        self.insert(Answer::Read(again));
        true
    }

    /// Answers a repeated atomic at `psn` with the result it had.
    pub(crate) fn repeat_atomic(&mut self, psn: Psn) -> bool {
        self.repeat_one(|m| match m {
            Remembered::Atomic(p, msn, original) if *p == psn => Some(Answer::Atomic(psn, *msn, *original)),
            _ => None,
        })
    }

    /// Answers a repeated ATOMIC WRITE at `psn`.
    pub(crate) fn repeat_placed(&mut self, psn: Psn) -> bool {
        self.repeat_one(|m| match m {
            Remembered::Placed(p, msn) if *p == psn => Some(Answer::Placed(psn, *msn)),
            _ => None,
        })
    }

    fn repeat_one(&mut self, answer: impl Fn(&Remembered) -> Option<Answer>) -> bool {
        let found = self.memory.iter().rev().find_map(answer);
        found.is_some_and(|answer| {
            self.insert(answer);
            true
        })
    }

    /// Puts the answer to a repeat at its place in PSN order; it replaces what still waits for the same PSNs. So of each
    /// READ no PSN waits twice, wherever its repeats begin: what the peer asked for last is what it needs.
    fn insert(&mut self, answer: Answer) {
        let psn = answer.first();
        let same = |w: &Waiting| match (&w.answer, &answer) {
            (Answer::Read(old), Answer::Read(new)) => old.overlaps(new),
            (Answer::Atomic(old, ..), Answer::Atomic(..))
            | (Answer::Placed(old, _), Answer::Placed(..))
            | (Answer::Flushed(old, _), Answer::Flushed(..)) => *old == psn,
            _ => false,
        };
        let repeat = !self.queue.iter().any(|w| same(w) && !w.repeat);
        self.queue.retain(|w| !same(w));
        if self.queue.len() >= self.limit() {
            return;
        }
        let at = self.queue.iter().position(|w| w.answer.first().distance_from(psn) > 0).unwrap_or(self.queue.len());
        self.queue.insert(at, Waiting { answer, repeat });
    }

    /// Whether a positive ACK waits, and nothing else.
    pub(crate) fn is_ack_alone(&self) -> bool {
        let ack = |w: &Waiting| matches!(w.answer, Answer::Acknowledge(_, Aeth { syndrome: Syndrome::Ack { .. }, .. }));
        self.queue.len() == 1 && self.queue.front().is_some_and(ack)
    }

    /// Lets a positive ACK that waits alone speak for all that was executed since it was queued.
    pub(crate) fn extend_ack(&mut self, psn: Psn, msn: Msn) {
        if self.is_ack_alone()
            && let Some(Waiting { answer: Answer::Acknowledge(of, aeth), .. }) = self.queue.front_mut()
        {
            (*of, aeth.msn) = (psn, msn);
        }
    }

    /// The next thing to say.
    pub(crate) fn front(&self) -> Option<Answer> {
        self.queue.front().map(|w| w.answer)
    }

    /// Whether the next thing to say answers a repeat of something that was answered before.
    pub(crate) fn front_is_repeat(&self) -> bool {
        self.queue.front().is_some_and(|w| w.repeat)
    }

    /// The front answer is not given.
    pub(crate) fn drop_front(&mut self) {
        self.queue.pop_front();
    }

    /// `packets` of the front answer have left.
    pub(crate) fn sent(&mut self, packets: u32) {
        if let Some(Waiting { answer: Answer::Read(read), .. }) = self.queue.front_mut() {
            read.next = read.next.plus(packets);
            if read.next != read.first.plus(read.packets) {
                return;
            }
        }
        self.queue.pop_front();
    }

    /// The front READ cannot go on: everything queued is forgotten and `answer` takes its place.
    pub(crate) fn abort(&mut self, psn: Psn, syndrome: Syndrome, msn: Msn) {
        self.queue.clear();
        self.nak(psn, syndrome, msn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MTU: usize = 1024;

    fn read(psn: u32) -> ReadAnswer {
        let first = Psn::from_wire(psn);
        let (addr, rkey, msn) = (0x1000, Rkey::new(7), Msn::default());
        ReadAnswer { first, next: first, packets: 1, addr, rkey, length: 8, msn }
    }

    #[test]
    fn a_repeat_that_waits_is_not_an_outstanding_read() {
        let mut answers = Answers::new();
        answers.set_depth(1);
        answers.read(read(10));
        assert_eq!(answers.unanswered(), 1);
        answers.sent(1);
        // The answer is under way when the peer's timer fires. The repeat waits for a busy device; the answer arrives,
        // and the peer may begin its next READ.
        assert!(answers.repeat_read(Psn::from_wire(10), 0x1000, Rkey::new(7), 8, MTU, u64::MAX));
        assert!(!answers.is_empty());
        assert_eq!(answers.unanswered(), 0);
        answers.read(read(11));
        assert_eq!(answers.unanswered(), 1);
        let order: Vec<_> = core::iter::from_fn(|| {
            let first = answers.front().map(|a| a.first());
            answers.sent(1);
            first
        })
        .collect();
        assert_eq!(order, [Psn::from_wire(10), Psn::from_wire(11)]);
    }

    /// A READ of 100 packets at PSN 10, answered; then repeats of it.
    fn answered_long() -> Answers {
        let mut answers = Answers::new();
        answers.set_depth(2);
        answers.read(ReadAnswer { packets: 100, length: 100 * 1024, ..read(10) });
        (0..100).for_each(|_| answers.sent(1));
        assert!(answers.is_empty());
        answers
    }

    fn again(answers: &mut Answers, psn: u32, packets: u32, most: u64) -> bool {
        let addr = 0x1000 + u64::from(psn - 10) * 1024;
        answers.repeat_read(Psn::from_wire(psn), addr, Rkey::new(7), packets * 1024, MTU, most)
    }

    /// Packets that wait to be sent.
    fn waiting(answers: &Answers) -> u32 {
        let packets = |w: &Waiting| match w.answer {
            Answer::Read(read) => read.packets,
            _ => 1,
        };
        answers.queue.iter().map(packets).sum()
    }

    #[test]
    fn repeats_that_begin_ever_earlier_are_answered_once() {
        let mut answers = answered_long();
        // Each asks for all the rest: 100 small requests, and 5,050 packets if each had an answer of its own.
        for psn in (10..110).rev() {
            assert!(again(&mut answers, psn, 110 - psn, u64::MAX));
        }
        assert_eq!(waiting(&answers), 100);
        // Pieces that overlap: the last one stands.
        let mut answers = answered_long();
        for (psn, packets) in [(20, 10), (40, 10), (25, 20)] {
            assert!(again(&mut answers, psn, packets, u64::MAX));
        }
        assert_eq!(waiting(&answers), 20);
    }

    #[test]
    fn repeats_beyond_the_bound_on_waiting_reads_wait_for_their_next_turn() {
        let mut answers = answered_long();
        answers.read(ReadAnswer { packets: 50, length: 50 * 1024, ..read(110) });
        (0..50).for_each(|_| answers.sent(1));
        // The bound is 120 packets: one READ alone is served, and the other not beside it.
        let most = 120 * 1024;
        assert!(again(&mut answers, 10, 100, most));
        assert!(!answers.repeat_read(Psn::from_wire(110), 0x1000, Rkey::new(7), 50 * 1024, MTU, most));
        assert_eq!(waiting(&answers), 100);
        // The same again replaces itself.
        assert!(again(&mut answers, 10, 100, most));
        (0..100).for_each(|_| answers.sent(1));
        assert!(answers.repeat_read(Psn::from_wire(110), 0x1000, Rkey::new(7), 50 * 1024, MTU, 1));
    }
}
