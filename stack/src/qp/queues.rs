//! Everything that is allocated with a QP: its queues, their elements and its memory of past READs.
//!
//! Owns making them, taking them out of a QP that is gone, and the few sets that wait for the next QP of the same sizes:
//! programs that open and close connections would spend a fifth of their time in the allocator otherwise. Nothing of
//! the old QP is left in a set that is used again: its queues are empty, and all state is made anew.

use std::collections::VecDeque;
use std::sync::Arc;

use super::answers::Answers;
use super::post::{Poster, QpShared, SendProducer};
use super::send_queue::SendQueue;
use crate::ring::{WqeRingSize, wqe_ring};
use crate::srq::{RecvConsumer, RecvProducer, recv_ring};
use crate::types::Psn;
use crate::verbs::{QpCapabilities, Sge};

/// Sets that wait for a QP at most.
pub const SPARE_QUEUES: usize = 64;
/// Sets larger than this do not wait: all together hold 8 MiB at most.
pub const SPARE_BYTES: usize = 128 << 10;
/// READs in flight at most, as many as the verbs allow, so that nothing is allocated later.
const READS: usize = 128;
/// What a work request takes, its elements and inline bytes apart; a guess from above.
const REQUEST_BYTES: usize = 256;

/// What a QP is made of.
#[derive(Debug)]
pub(crate) struct Queues {
    caps: QpCapabilities,
    pub(super) send: SendQueue,
    pub(super) send_caller: SendProducer,
    /// `None` with an SRQ.
    pub(super) recv: Option<(RecvProducer, RecvConsumer)>,
    pub(super) recv_sges: Vec<Sge>,
    pub(super) reads: VecDeque<Psn>,
    pub(super) answers: Answers,
    pub(super) shared: Arc<QpShared>,
}

impl Queues {
    /// New ones. `srq` is how many elements a receive of its SRQ may have, where it has one.
    pub(super) fn new(caps: QpCapabilities, srq: Option<usize>, datagram_mtu: u16) -> Self {
        let size = WqeRingSize {
            requests: caps.max_send_wr as usize,
            sges: caps.max_send_sge as usize,
            inline: caps.max_inline as usize,
        };
        let (send_caller, send_engine) = wqe_ring(size);
        Self {
            caps,
            send: SendQueue::new(send_engine),
            send_caller,
            recv: srq.is_none().then(|| recv_ring(caps.max_recv_wr, caps.max_recv_sge)),
            recv_sges: vec![Sge::default(); srq.unwrap_or(caps.max_recv_sge as usize)],
            reads: VecDeque::with_capacity(READS),
            answers: Answers::new(),
            shared: Arc::new(QpShared::new(datagram_mtu)),
        }
    }

    /// Puts a QP's parts together again, emptied.
    pub(super) fn gather(
        poster: Poster,
        mut send: SendQueue,
        (recv, recv_sges): (Option<RecvConsumer>, Vec<Sge>),
        mut reads: VecDeque<Psn>,
        mut answers: Answers,
    ) -> Self {
        let Poster { caps, shared, send: send_caller, recv: recv_caller, .. } = poster;
        send.clear();
        reads.clear();
        answers.clear();
        let mut recv = recv_caller.zip(recv);
        if let Some((_, ring)) = &mut recv {
            ring.clear();
        }
        shared.reset();
        Self { caps, send, send_caller, recv, recv_sges, reads, answers, shared }
    }

    /// Whether they are worth keeping: of a QP with a receive queue of its own, and small.
    fn may_wait(&self) -> bool {
        let c = &self.caps;
        let elements = |wr: u32, sges: u32| wr as usize * (REQUEST_BYTES + 2 * sges as usize * size_of::<Sge>());
        let inline = 2 * c.max_send_wr as usize * c.max_inline as usize;
        self.recv.is_some()
            && elements(c.max_send_wr, c.max_send_sge) + elements(c.max_recv_wr, c.max_recv_sge) + inline <= SPARE_BYTES
    }
}

/// Sets of queues that wait for a QP.
#[derive(Debug, Default)]
pub(crate) struct SpareQueues(Vec<Queues>);

impl SpareQueues {
    /// A set of these sizes. The last that came is taken first: it is still in the processor's caches.
    pub(crate) fn take(&mut self, caps: &QpCapabilities) -> Option<Queues> {
        let index = self.0.iter().rposition(|queues| queues.caps == *caps)?;
        Some(self.0.swap_remove(index))
    }

    /// Keeps a set. It is dropped where it is too large, and the oldest where there are too many.
    pub(crate) fn keep(&mut self, queues: Queues) {
        if !queues.may_wait() {
            return;
        }
        if self.0.len() >= SPARE_QUEUES {
            self.0.swap_remove(0);
        }
        self.0.push(queues);
    }
}
