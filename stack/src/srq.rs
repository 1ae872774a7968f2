//! Receive queues: a QP's own, and shared ones.
//!
//! Owns the engine's half of the ring and the limit event of an SRQ. Never looks at packets.

use crate::ring::{WqeConsumer, WqeProducer, WqeRingSize, wqe_ring};
use crate::table::Slab;
use crate::verbs::kind;
use crate::verbs::{PdHandle, RecvHead, Sge, SrqInfo, SrqInit};

/// The caller's half of a receive queue.
pub type RecvProducer = WqeProducer<RecvHead, Sge>;
/// The engine's half of a receive queue.
pub type RecvConsumer = WqeConsumer<RecvHead, Sge>;

/// Makes a receive queue.
#[must_use]
pub fn recv_ring(requests: u32, sges: u32) -> (RecvProducer, RecvConsumer) {
    wqe_ring(WqeRingSize { requests: requests as usize, sges: sges as usize, inline: 0 })
}

/// A shared receive queue.
#[derive(Debug)]
pub struct Srq {
    engine: RecvConsumer,
    caller: Option<RecvProducer>,
    pd: PdHandle,
    limit: u32,
    users: u32,
}

impl Srq {
    /// An empty SRQ.
    #[must_use]
    pub fn new(init: &SrqInit) -> Self {
        let (caller, engine) = recv_ring(init.max_wr, init.max_sge);
        Self { engine, caller: Some(caller), pd: init.pd, limit: 0, users: 0 }
    }

    /// Its protection domain.
    #[must_use]
    pub const fn pd(&self) -> PdHandle {
        self.pd
    }

    /// QPs that receive from it.
    #[must_use]
    pub const fn users(&self) -> u32 {
        self.users
    }

    /// One more QP receives from it.
    pub fn attach(&mut self) {
        self.users += 1;
    }

    /// One fewer.
    pub fn detach(&mut self) {
        self.users = self.users.saturating_sub(1);
    }

    /// Elements a receive may have.
    #[must_use]
    pub fn max_sge(&self) -> usize {
        self.engine.size().sges
    }

    /// The caller's half, if it was not given away.
    pub fn caller_mut(&mut self) -> Option<&mut RecvProducer> {
        self.caller.as_mut()
    }

    /// Gives the caller's half away.
    pub fn take_caller(&mut self) -> Option<RecvProducer> {
        self.caller.take()
    }

    /// Arms the limit event; 0 disarms.
    pub fn arm(&mut self, limit: u32) {
        self.limit = limit;
    }

    /// Sizes and fill.
    #[must_use]
    pub fn info(&self) -> SrqInfo {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        SrqInfo { max_wr: count(self.engine.size().requests), available: count(self.engine.len()), limit: self.limit }
    }

    /// Takes a receive. The second value says that the armed limit was passed by it: raise the event.
    pub fn take(&mut self, sges: &mut [Sge]) -> Option<(RecvHead, bool)> {
        let head = self.engine.pop(sges, &mut [])?;
        // A taken receive belongs to its QP: its place in the ring is free at once.
        self.engine.release(1);
        let passed = self.limit > 0 && self.engine.len() < self.limit as usize;
        if passed {
            self.limit = 0;
        }
        Some((head, passed))
    }
}

/// All SRQs of an endpoint.
pub type SrqTable = Slab<kind::Srq, Srq>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_event_fires_once() {
        let mut pds: Slab<kind::Pd, ()> = Slab::new(1);
        let pd = pds.insert(()).unwrap();
        let mut srq = Srq::new(&SrqInit { pd, max_wr: 4, max_sge: 1 });
        let sge = Sge::default();
        for wr_id in 0..4 {
            srq.caller_mut().unwrap().push(RecvHead { wr_id, num_sge: 1, length: 0 }, &[sge], &[]).unwrap();
        }
        srq.arm(2);
        let mut room = [Sge::default()];
        let passed: Vec<bool> = (0..4).map(|_| srq.take(&mut room).unwrap().1).collect();
        assert_eq!(passed, [false, false, true, false]);
        assert!(srq.take(&mut room).is_none());
        assert_eq!(srq.info(), SrqInfo { max_wr: 4, available: 0, limit: 0 });
    }
}
