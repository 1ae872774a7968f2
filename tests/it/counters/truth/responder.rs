//! The receive side of an RC QP as its packets show it, and the queue of its answers.

use std::collections::VecDeque;

use super::Tally;
use super::packet::{Head, Kind, Psn, Reth, distance, plus};

/// An answer that waits for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Ack(Psn),
    /// RNR NAK or NAK for a gap.
    Nak(Psn),
    /// READ data: first PSN, next one, one beyond the last.
    Data(Psn, Psn, Psn),
    Atomic(Psn),
    /// An ATOMIC WRITE was done.
    Placed(Psn),
    /// A FLUSH was done.
    Flushed(Psn),
}

impl Answer {
    const fn first(self) -> Psn {
        match self {
            Self::Ack(psn) | Self::Nak(psn) | Self::Data(psn, ..) => psn,
            Self::Atomic(psn) | Self::Placed(psn) | Self::Flushed(psn) => psn,
        }
    }

    /// Whether both are of one kind and share a PSN: then the later one stands.
    fn clashes(self, other: Self) -> bool {
        match (self, other) {
            (Self::Data(from, _, to), Self::Data(other_from, _, other_to)) => {
                distance(from, other_to) < 0 && distance(other_from, to) < 0
            }
            (Self::Atomic(a), Self::Atomic(b))
            | (Self::Placed(a), Self::Placed(b))
            | (Self::Flushed(a), Self::Flushed(b)) => a == b,
            _ => false,
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Waiting {
    answer: Answer,
    /// Bytes of a READ: they may not become too many.
    bytes: u64,
    /// It answers a request that came again.
    repeat: bool,
}

/// A READ or atomic that was executed.
#[derive(Clone, Copy, Debug)]
enum Done {
    Read(Psn, Psn, Reth),
    Atomic(Psn),
    Placed(Psn),
}

/// FLUSHes whose answer may wait.
const FLUSHES: usize = 16;

pub(super) struct Responder {
    mtu: u32,
    depth: usize,
    expected: Psn,
    /// Something was said about the expected PSN: no more is until it comes.
    refused: bool,
    /// The last SEND or WRITE packet that was executed.
    last_data: Option<Psn>,
    receives: usize,
    /// A receive is being filled.
    held: bool,
    queue: VecDeque<Waiting>,
    /// Bytes of READs that may wait.
    read_bytes: u64,
    memory: VecDeque<Done>,
}

impl Responder {
    pub(super) fn new(mtu: u32, depth: usize, read_bytes: u64, expected: Psn) -> Self {
        Self {
            mtu,
            depth,
            expected,
            refused: false,
            last_data: None,
            receives: 0,
            held: false,
            queue: VecDeque::new(),
            read_bytes,
            memory: VecDeque::new(),
        }
    }

    pub(super) fn receive_posted(&mut self) {
        self.receives += 1;
    }

    /// The QP failed: nothing more is said.
    pub(super) fn silence(&mut self) {
        self.queue.clear();
    }

    /// A request arrived.
    pub(super) fn arrived(&mut self, head: &Head, tally: &mut Tally) {
        let ahead = distance(head.psn, self.expected);
        if ahead < 0 {
            tally.add("duplicate_request");
            if !self.repeat(head) {
                tally.add("drop_forgotten_duplicate");
            }
        } else if ahead > 0 {
            tally.add("out_of_seq_request");
            if self.refused {
                tally.add("drop_ahead_of_sequence");
            } else {
                tally.add("sent_seq_err");
                self.refuse();
            }
        } else {
            self.refused = false;
            self.expected_arrived(head, tally);
        }
    }

    fn refuse(&mut self) {
        self.refused = true;
        self.push(Answer::Nak(self.expected));
    }

    fn expected_arrived(&mut self, head: &Head, tally: &mut Tally) {
        match head.kind {
            Kind::Data { ends, takes_receive, write, .. } => {
                if takes_receive && !self.held {
                    if self.receives == 0 {
                        tally.add("out_of_buffer");
                        tally.add("send_rnr_err");
                        self.refuse();
                        return;
                    }
                    self.receives -= 1;
                    self.held = true;
                }
                self.expected = plus(head.psn, 1);
                self.last_data = Some(head.psn);
                if ends {
                    tally.add("rdma_recvs");
                    if write {
                        tally.add("rx_write_requests");
                    }
                    self.held &= !takes_receive;
                }
                if head.ack_req && self.ack(head.psn) {
                    tally.add("ack_deferred");
                }
            }
            Kind::Read(reth) => {
                let waiting: u64 = self.queue.iter().filter(|w| !w.repeat).map(|w| w.bytes).sum();
                if waiting > 0 && waiting + u64::from(reth.length) > self.read_bytes {
                    tally.add("send_rnr_err");
                    self.refuse();
                    return;
                }
                tally.add("rdma_recvs");
                tally.add("rx_read_requests");
                let end = plus(head.psn, reth.length.div_ceil(self.mtu).max(1));
                self.expected = end;
                self.remember(Done::Read(head.psn, end, reth));
                self.push_read(Answer::Data(head.psn, head.psn, end), reth.length);
            }
            Kind::Flush => {
                let waiting = self.queue.iter().filter(|w| matches!(w.answer, Answer::Flushed(_))).count();
                if waiting >= FLUSHES {
                    tally.add("drop_refused");
                    return;
                }
                tally.add("rdma_recvs");
                tally.add("rx_flush_requests");
                self.expected = plus(head.psn, 1);
                self.push(Answer::Flushed(head.psn));
            }
            kind => {
                tally.add("rdma_recvs");
                tally.add("rx_atomic_requests");
                self.expected = plus(head.psn, 1);
                let placed = kind == Kind::AtomicWrite;
                self.remember(if placed { Done::Placed(head.psn) } else { Done::Atomic(head.psn) });
                self.push(if placed { Answer::Placed(head.psn) } else { Answer::Atomic(head.psn) });
            }
        }
    }

    /// Answers a repeat from memory, if it is remembered.
    fn repeat(&mut self, head: &Head) -> bool {
        let psn = head.psn;
        match head.kind {
            Kind::Read(reth) => {
                let found = self.memory.iter().rev().find_map(|done| match done {
                    Done::Read(from, to, was) if distance(psn, *from) >= 0 && distance(psn, *to) < 0 => {
                        Some((*from, *was))
                    }
                    _ => None,
                });
                let Some((from, was)) = found else { return false };
                let offset = u64::from(distance(psn, from).unsigned_abs()) * u64::from(self.mtu);
                let rest = reth.addr == was.addr.wrapping_add(offset)
                    && reth.rkey == was.rkey
                    && u64::from(reth.length) + offset <= u64::from(was.length);
                let answer = Answer::Data(psn, psn, plus(psn, reth.length.div_ceil(self.mtu).max(1)));
                let beside: u64 = self.queue.iter().filter(|w| !w.answer.clashes(answer)).map(|w| w.bytes).sum();
                let fits = beside == 0 || beside + u64::from(reth.length) <= self.read_bytes;
                if rest && fits {
                    self.insert(answer, reth.length);
                }
                rest && fits
            }
            Kind::Atomic | Kind::AtomicWrite => {
                let answer = self.memory.iter().find_map(|done| match (done, head.kind) {
                    (Done::Atomic(p), Kind::Atomic) if *p == psn => Some(Answer::Atomic(psn)),
                    (Done::Placed(p), Kind::AtomicWrite) if *p == psn => Some(Answer::Placed(psn)),
                    _ => None,
                });
                answer.is_some_and(|answer| {
                    self.insert(answer, 0);
                    true
                })
            }
            // One that comes again was done.
            Kind::Flush => {
                self.insert(Answer::Flushed(psn), 0);
                true
            }
            _ => {
                // Whatever repeats, the last one that was executed is what is acknowledged.
                if let Some(last) = self.last_data {
                    self.ack(last);
                }
                self.last_data.is_some()
            }
        }
    }

    fn limit(&self) -> usize {
        2 * (self.depth + FLUSHES) + 8
    }

    fn push(&mut self, answer: Answer) {
        self.push_read(answer, 0);
    }

    fn push_read(&mut self, answer: Answer, length: u32) {
        if self.queue.len() < self.limit() {
            self.queue.push_back(Waiting { answer, bytes: length.into(), repeat: false });
        }
    }

    /// Queues an ACK. One that stands last is covered by it; says whether that was another.
    fn ack(&mut self, psn: Psn) -> bool {
        match self.queue.back_mut() {
            Some(Waiting { answer: Answer::Ack(last), .. }) => core::mem::replace(last, psn) != psn,
            _ => {
                self.push(Answer::Ack(psn));
                false
            }
        }
    }

    fn remember(&mut self, done: Done) {
        if self.memory.len() >= self.depth {
            self.memory.pop_front();
        }
        self.memory.push_back(done);
    }

    /// The answer to a repeat stands at its place; it replaces what still waits for the same PSNs.
    fn insert(&mut self, answer: Answer, length: u32) {
        let psn = answer.first();
        let repeat = !self.queue.iter().any(|w| w.answer.clashes(answer) && !w.repeat);
        self.queue.retain(|w| !w.answer.clashes(answer));
        if self.queue.len() < self.limit() {
            let behind = self.queue.iter().position(|w| distance(w.answer.first(), psn) > 0);
            let waiting = Waiting { answer, bytes: length.into(), repeat };
            self.queue.insert(behind.unwrap_or(self.queue.len()), waiting);
        }
    }

    /// It sent an answer: the one whose turn it was.
    pub(super) fn sent(&mut self, head: &Head) {
        // An ACK that waits alone speaks for all that was executed since.
        if let ([Waiting { answer: Answer::Ack(psn), .. }], Some(last)) = (self.queue.make_contiguous(), self.last_data)
        {
            *psn = last;
        }
        let front = self.queue.front_mut().unwrap_or_else(|| panic!("an answer to nothing: {head:?}"));
        let (psn, over) = match (&mut front.answer, head.kind) {
            (Answer::Ack(psn), Kind::Ack) => (*psn, true),
            (Answer::Nak(psn), Kind::RnrNak(_) | Kind::SequenceNak) => (*psn, true),
            (Answer::Atomic(psn), Kind::AtomicResult) => (*psn, true),
            (Answer::Placed(psn) | Answer::Flushed(psn), Kind::ReadData) => (*psn, true),
            (Answer::Data(_, next, end), Kind::ReadData) => {
                let psn = *next;
                *next = plus(psn, 1);
                (psn, *next == *end)
            }
            (front, _) => panic!("{head:?} before {front:?}"),
        };
        assert_eq!(head.psn, psn, "an answer out of turn: {head:?}");
        if over {
            self.queue.pop_front();
        }
    }
}
