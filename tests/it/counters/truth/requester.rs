//! The send side of an RC QP as its packets show it: what was sent, what came back, and what that means.

use std::collections::VecDeque;

use super::Tally;
use super::packet::{Head, Kind, Psn, Reth, distance, plus};

/// Limits that the QP was given.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) mtu: u32,
    /// Nanoseconds.
    pub(super) timeout: u64,
    pub(super) retries: u8,
    /// `None`: for ever.
    pub(super) rnr_retries: Option<u8>,
    /// PSNs that one READ request asks for at most.
    pub(super) read_psns: u32,
}

/// The RNR timers of IBTA Vol 1 table 45, in microseconds; the first is the longest.
const RNR_US: [u64; 32] = [
    655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560, 3840, 5120, 7680, 10_240,
    15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880, 163_840, 245_760, 327_680, 491_520,
];

pub(super) struct Requester {
    limits: Limits,
    /// Oldest PSN without an answer, next to send, one beyond the highest sent.
    una: Psn,
    cursor: Psn,
    end: Psn,
    /// PSNs of READs and atomics that were sent and not answered to their end: from, to.
    reads: VecDeque<(Psn, Psn)>,
    /// The last READ that was sent for the first time.
    last_read: Option<(Psn, Reth)>,
    retries: u8,
    rnr_retries: u32,
    ack_due: Option<u64>,
    rnr_due: Option<u64>,
    /// It went back, and nothing new was answered since.
    recovering: bool,
}

/// The work request at the front failed.
pub(super) struct Failed;

type Outcome = Result<(), Failed>;

impl Requester {
    pub(super) fn new(limits: Limits, first: Psn) -> Self {
        Self {
            limits,
            una: first,
            cursor: first,
            end: first,
            reads: VecDeque::new(),
            last_read: None,
            retries: 0,
            rnr_retries: 0,
            ack_due: None,
            rnr_due: None,
            recovering: false,
        }
    }

    /// It sent a request.
    pub(super) fn sent(&mut self, now: u64, head: &Head, tally: &mut Tally) {
        assert_eq!(head.psn, self.cursor, "a request out of turn: {head:?}");
        let psns = match head.kind {
            Kind::Read(reth) => reth.length.div_ceil(self.limits.mtu).max(1),
            _ => 1,
        };
        let next = plus(head.psn, psns);
        if distance(head.psn, self.end) < 0 {
            tally.add("retransmitted_pkts");
        } else {
            if self.begins(head) {
                tally.add("rdma_sends");
            }
            if !matches!(head.kind, Kind::Data { .. }) {
                self.reads.push_back((head.psn, next));
            }
            if let Kind::Read(reth) = head.kind {
                self.last_read = Some((next, reth));
            }
        }
        self.rnr_due = None;
        self.cursor = next;
        if distance(next, self.end) > 0 {
            self.end = next;
        }
        self.ack_due.get_or_insert(now + self.limits.timeout);
    }

    /// Whether a new request is the first of its work request. A long READ goes on where the last request ended.
    fn begins(&self, head: &Head) -> bool {
        match (head.kind, self.last_read) {
            (Kind::Data { begins, .. }, _) => begins,
            (Kind::Read(reth), Some((next, last))) => {
                let whole = last.length == self.limits.read_psns * self.limits.mtu;
                let follows = reth.addr == last.addr.wrapping_add(last.length.into()) && reth.rkey == last.rkey;
                !(next == head.psn && whole && follows)
            }
            _ => true,
        }
    }

    /// An answer arrived.
    pub(super) fn answered(&mut self, now: u64, head: &Head, tally: &mut Tally) -> Outcome {
        if distance(head.psn, self.una) < 0 || distance(head.psn, self.end) >= 0 {
            // The last answer given again, to say that there are receives now, is none.
            if !(head.has_credits && plus(head.psn, 1) == self.una) {
                tally.add("drop_ghost_ack");
            }
            return Ok(());
        }
        match head.kind {
            Kind::Ack => {
                let next = plus(head.psn, 1);
                if self.acknowledge(now, next) {
                    return Ok(());
                }
                let beyond = self.front_read().is_some_and(|(_, to)| distance(head.psn, to) >= 0);
                if beyond {
                    return self.implied(tally);
                }
                tally.add("drop_unexpected_response");
                Ok(())
            }
            Kind::SequenceNak => {
                tally.add("rcvd_seq_err");
                if !self.acknowledge(now, head.psn) {
                    return self.implied(tally);
                }
                if self.rnr_due.is_some() || self.recovering { Ok(()) } else { self.retry(tally) }
            }
            Kind::RnrNak(code) => {
                tally.add("rcvd_rnr_err");
                if !self.acknowledge(now, head.psn) {
                    return self.implied(tally);
                }
                if self.rnr_due.is_some() {
                    return Ok(());
                }
                if self.limits.rnr_retries.is_some_and(|limit| self.rnr_retries >= limit.into()) {
                    tally.add("retry_rnr_exceeded_err");
                    return Err(Failed);
                }
                self.rnr_retries += 1;
                self.go_back();
                self.rnr_due = Some(now + RNR_US[usize::from(code)] * 1000);
                Ok(())
            }
            Kind::ReadData | Kind::AtomicResult => {
                if !self.acknowledge(now, head.psn) {
                    return self.implied(tally);
                }
                let front = self.front_read().expect("data that was not asked for");
                assert!(distance(head.psn, front.0) >= 0, "data for a request that is not the oldest: {head:?}");
                self.una = plus(head.psn, 1);
                self.progressed(now);
                Ok(())
            }
            other => panic!("no peer of these runs says {other:?}"),
        }
    }

    fn front_read(&self) -> Option<(Psn, Psn)> {
        self.reads.iter().copied().find(|(_, to)| distance(*to, self.una) > 0)
    }

    /// Everything before `end` is answered, up to a READ or atomic that is not. Says whether `end` was reached.
    fn acknowledge(&mut self, now: u64, end: Psn) -> bool {
        if distance(end, self.una) <= 0 {
            return true;
        }
        let stop = self.front_read().map(|(from, _)| if distance(from, self.una) > 0 { from } else { self.una });
        let reached = stop.is_none_or(|stop| distance(end, stop) <= 0);
        let una = if reached { end } else { stop.unwrap() };
        if una != self.una {
            self.una = una;
            self.progressed(now);
        }
        reached
    }

    fn progressed(&mut self, now: u64) {
        (self.retries, self.rnr_retries, self.recovering, self.rnr_due) = (0, 0, false, None);
        let una = self.una;
        self.reads.retain(|(_, to)| distance(*to, una) > 0);
        if distance(self.cursor, self.una) < 0 {
            self.cursor = self.una;
        }
        self.ack_due = (self.cursor != self.una).then_some(now + self.limits.timeout);
    }

    fn implied(&mut self, tally: &mut Tally) -> Outcome {
        if self.recovering {
            return Ok(());
        }
        tally.add("implied_nak_seq_err");
        self.retry(tally)
    }

    fn retry(&mut self, tally: &mut Tally) -> Outcome {
        if self.retries >= self.limits.retries {
            tally.add("retry_exceeded_err");
            return Err(Failed);
        }
        tally.add("completer_retry_err");
        self.retries += 1;
        self.recovering = true;
        self.go_back();
        Ok(())
    }

    fn go_back(&mut self) {
        self.cursor = self.una;
        self.ack_due = None;
    }

    /// The endpoint was told the time.
    pub(super) fn timeout(&mut self, now: u64, tally: &mut Tally) -> Outcome {
        if self.rnr_due.is_some_and(|due| due <= now) {
            self.rnr_due = None;
        }
        if self.ack_due.is_some_and(|due| due <= now) {
            self.ack_due = None;
            tally.add("local_ack_timeout_err");
            return self.retry(tally);
        }
        Ok(())
    }
}
