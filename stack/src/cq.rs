//! Completion queues and the queue of asynchronous events.
//!
//! Owns the engine's half of every CQ: pushing completions, arming, and what happens when a CQ is full (an event, never
//! a silent loss). Never decides what completes.

use std::collections::VecDeque;

use crate::counters::Counters;
use crate::ring::{Consumer, Producer, ring};
use crate::table::Slab;
use crate::verbs::kind;
use crate::verbs::{AsyncEvent, CqHandle, Notify, WcStatus, WorkCompletion};

/// Asynchronous events that wait at most; further ones are dropped, as a program that lets so many wait reads none.
pub const MAX_EVENTS: usize = 4096;

/// A completion queue.
#[derive(Debug)]
pub struct Cq {
    engine: Producer<WorkCompletion>,
    caller: Option<Consumer<WorkCompletion>>,
    armed: Option<Notify>,
    failed: bool,
    users: u32,
}

impl Cq {
    /// A CQ of `depth` entries.
    #[must_use]
    pub fn new(depth: usize) -> Self {
        let (engine, caller) = ring(depth);
        Self { engine, caller: Some(caller), armed: None, failed: false, users: 0 }
    }

    /// Entries, and completions that wait to be polled.
    #[must_use]
    pub fn fill(&self) -> (usize, usize) {
        let depth = self.engine.buffer().capacity();
        (depth, depth - self.engine.slots())
    }

    /// QPs that complete here.
    #[must_use]
    pub const fn users(&self) -> u32 {
        self.users
    }

    /// One more QP completes here.
    pub fn attach(&mut self) {
        self.users += 1;
    }

    /// One fewer.
    pub fn detach(&mut self) {
        self.users = self.users.saturating_sub(1);
    }

    /// Whether it overran.
    #[must_use]
    pub const fn has_failed(&self) -> bool {
        self.failed
    }

    /// Takes completions for the caller; 0 when the caller's half was given away.
    pub fn poll(&mut self, out: &mut [WorkCompletion]) -> usize {
        self.caller.as_mut().map_or(0, |c| poll_ring(c, out))
    }

    /// Gives the caller's half away, to be polled without the engine.
    pub fn take_caller(&mut self) -> Option<Consumer<WorkCompletion>> {
        self.caller.take()
    }

    /// Arms the notification. Returns whether completions are already waiting, in which case the caller should poll.
    pub fn arm(&mut self, what: Notify) {
        // The wider wish wins.
        if self.armed != Some(Notify::Any) {
            self.armed = Some(what);
        }
    }
}

/// Takes completions from the caller's half of a CQ.
pub fn poll_ring(ring: &mut Consumer<WorkCompletion>, out: &mut [WorkCompletion]) -> usize {
    let mut n = 0;
    for place in out {
        match ring.pop() {
            Ok(wc) => *place = wc,
            Err(_) => break,
        }
        n += 1;
    }
    n
}

/// Asynchronous events that wait for the program.
#[derive(Debug, Default)]
pub struct EventQueue {
    queue: VecDeque<AsyncEvent>,
}

impl EventQueue {
    /// Adds an event. One that waits already, of the same kind and object, is not added again.
    /// False when there was no room for it.
    pub fn push(&mut self, event: AsyncEvent) -> bool {
        if self.queue.back() == Some(&event) {
            return true;
        }
        if self.queue.len() >= MAX_EVENTS {
            return false;
        }
        self.queue.push_back(event);
        true
    }

    /// Whether none waits.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// The oldest event.
    pub fn pop(&mut self) -> Option<AsyncEvent> {
        self.queue.pop_front()
    }
}

/// All CQs of an endpoint.
pub type CqTable = Slab<kind::Cq, Cq>;

/// Puts a completion into its CQ. A full CQ fails: event, counter, and the error, so that the endpoint moves its QPs to
/// ERR.
///
/// # Errors
/// [`CqOverrun`]; the completion is lost.
pub fn complete(
    cqs: &mut CqTable,
    cq: CqHandle,
    wc: WorkCompletion,
    events: &mut EventQueue,
    counters: &mut Counters,
) -> Result<(), CqOverrun> {
    let Some(queue) = cqs.get_mut(cq) else { return Ok(()) };
    if queue.failed || queue.engine.push(wc).is_err() {
        counters.cq_overruns += 1;
        let first = !core::mem::replace(&mut queue.failed, true);
        if first {
            events.push(AsyncEvent::CqError(cq));
        }
        return Err(CqOverrun { first });
    }
    let wanted = match queue.armed {
        None => false,
        Some(Notify::Any) => true,
        Some(Notify::Solicited) => wc.solicited || wc.status != WcStatus::Success,
    };
    // A program that sleeps for it must have it: without room for the event the CQ stays armed.
    if wanted && events.push(AsyncEvent::CqNotify(cq)) {
        queue.armed = None;
    }
    Ok(())
}

/// The CQ was full, or had overrun before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqOverrun {
    /// It overran just now: all its QPs must go to ERR.
    pub first: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::Qpn;
    use crate::verbs::{QpHandle, WcData, WcOpcode};

    fn completion(qp: QpHandle) -> WorkCompletion {
        WorkCompletion {
            wr_id: 0,
            status: WcStatus::Success,
            opcode: WcOpcode::Send,
            vendor_err: 0,
            byte_len: 0,
            data: WcData::None,
            qp,
            qp_num: Qpn::default(),
            src_qp: Qpn::default(),
            grh: false,
            solicited: false,
        }
    }

    #[test]
    fn a_full_event_queue_does_not_lose_the_notification_of_an_armed_cq() {
        let mut cqs: CqTable = Slab::new(2);
        let cq = cqs.insert(Cq::new(8)).unwrap();
        let mut qps: Slab<kind::Qp, ()> = Slab::new(1);
        let qp = qps.insert(()).unwrap();
        let (mut events, mut counters) = (EventQueue::default(), Counters::default());
        for _ in 0..MAX_EVENTS / 2 {
            events.push(AsyncEvent::PortActive);
            events.push(AsyncEvent::PortError);
        }
        cqs.get_mut(cq).unwrap().arm(Notify::Any);
        complete(&mut cqs, cq, completion(qp), &mut events, &mut counters).unwrap();
        while events.pop().is_some() {}
        complete(&mut cqs, cq, completion(qp), &mut events, &mut counters).unwrap();
        assert_eq!(events.pop(), Some(AsyncEvent::CqNotify(cq)));
        complete(&mut cqs, cq, completion(qp), &mut events, &mut counters).unwrap();
        assert_eq!(events.pop(), None);
    }
}
