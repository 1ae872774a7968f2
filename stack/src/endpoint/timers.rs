//! When QPs want to be called.
//!
//! Owns a heap with at most one useful entry a QP. An entry may be early (its QP's deadline moved on): then it is put
//! back at the right time when it comes up. So a moved deadline costs nothing, and nothing is allocated per packet.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::time::Instant;
use crate::verbs::QpHandle;

/// Deadlines of QPs.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Instant, QpHandle)>>,
}

impl Timers {
    /// Adds an entry.
    pub(super) fn push(&mut self, at: Instant, qp: QpHandle) {
        self.heap.push(Reverse((at, qp)));
    }

    /// The earliest entry's time.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse((at, _))| *at)
    }

    /// Takes an entry that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<QpHandle> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, qp))| qp)
    }
}
