//! When QPs want to be called.
//!
//! Owns a heap with one entry a QP, which knows where each QP's entry stands. An entry may be early (its QP's deadline
//! moved on): then it comes up, and is put back at the right time. So a deadline that moves away, as it does with
//! every acknowledgement, costs nothing; one that moves nearer moves its entry; and nothing piles up, however a peer
//! plays with our timers.

use crate::time::Instant;
use crate::verbs::QpHandle;

/// Deadlines of QPs.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: Vec<(Instant, QpHandle)>,
    /// Where the entry of the QP in each slot stands.
    places: Vec<Option<usize>>,
}

impl Timers {
    /// Makes sure that `qp` comes up at `at` at the latest.
    pub(super) fn arm(&mut self, qp: QpHandle, at: Instant) {
        let slot = qp.slot() as usize;
        if slot >= self.places.len() {
            self.places.resize(slot + 1, None);
        }
        let place = self.places.get(slot).copied().flatten();
        match place.and_then(|p| self.heap.get_mut(p).map(|entry| (p, entry))) {
            // A new QP takes over the entry of the one that had its slot.
            Some((p, entry)) if entry.1 != qp => {
                let nearer = at < entry.0;
                *entry = (at, qp);
                if nearer { self.rise(p) } else { self.sink(p) }
            }
            Some((p, entry)) if at < entry.0 => {
                entry.0 = at;
                self.rise(p);
            }
            Some(_) => {}
            None => {
                self.heap.push((at, qp));
                self.rise(self.heap.len() - 1);
            }
        }
    }

    /// The earliest entry's time.
    pub(super) fn next(&self) -> Option<Instant> {
        self.heap.first().map(|(at, _)| *at)
    }

    /// Entries: at most one for each QP that ever armed one.
    pub(super) fn len(&self) -> usize {
        self.heap.len()
    }

    /// Takes an entry that is due.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<QpHandle> {
        if self.next()? > now {
            return None;
        }
        let (_, qp) = self.heap.swap_remove(0);
        if let Some(place) = self.places.get_mut(qp.slot() as usize) {
            *place = None;
        }
        self.sink(0);
        Some(qp)
    }

    /// Notes where the entry at `index` stands.
    fn settle(&mut self, index: usize) {
        if let Some((_, qp)) = self.heap.get(index)
            && let Some(place) = self.places.get_mut(qp.slot() as usize)
        {
            *place = Some(index);
        }
    }

    fn rise(&mut self, mut index: usize) {
        while index > 0 {
            let parent = (index - 1) / 2;
            if self.heap.get(parent) <= self.heap.get(index) {
                break;
            }
            self.heap.swap(parent, index);
            self.settle(index);
            index = parent;
        }
        self.settle(index);
    }

    fn sink(&mut self, mut index: usize) {
        loop {
            let child = |n: usize| self.heap.get(2 * index + n).map(|entry| (*entry, 2 * index + n));
            let least = match (child(1), child(2)) {
                (Some(a), Some(b)) => a.min(b),
                (Some(a), None) => a,
                _ => break,
            };
            if self.heap.get(index).is_some_and(|entry| *entry <= least.0) {
                break;
            }
            self.heap.swap(index, least.1);
            self.settle(index);
            index = least.1;
        }
        self.settle(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;
    use crate::table::Slab;
    use crate::verbs::kind;
    use std::collections::BTreeMap;

    #[test]
    fn entries_come_up_in_order_and_never_late() {
        let mut slab: Slab<kind::Qp, ()> = Slab::new(64);
        let qps: Vec<QpHandle> = (0..64).map(|_| slab.insert(()).unwrap()).collect();
        let mut rng = Rng::from_u64(3);
        let (mut timers, mut model) = (Timers::default(), BTreeMap::new());
        let mut now = 0;
        for _ in 0..20_000 {
            let qp = qps[usize::try_from(rng.within(0..=63)).unwrap()];
            let at = now + rng.within(1..=1000);
            timers.arm(qp, Instant::from_nanos(at));
            // The entry is where the nearest wish since it last came up is.
            model.entry(qp).and_modify(|t: &mut u64| *t = at.min(*t)).or_insert(at);
            now += rng.within(0..=20);
            assert_eq!(timers.next().map(Instant::as_nanos), model.values().min().copied());
            while let Some(qp) = timers.pop_due(Instant::from_nanos(now)) {
                let at = model.remove(&qp).unwrap();
                assert!(at <= now && model.values().all(|other| *other >= at));
            }
            assert!(model.values().all(|at| *at > now));
            assert_eq!(timers.len(), model.len());
        }
    }

    #[test]
    fn a_new_qp_takes_over_the_entry_of_its_slot() {
        let mut slab: Slab<kind::Qp, ()> = Slab::new(1);
        let old = slab.insert(()).unwrap();
        let mut timers = Timers::default();
        timers.arm(old, Instant::from_nanos(5));
        slab.remove(old);
        let new = slab.insert(()).unwrap();
        timers.arm(new, Instant::from_nanos(9));
        assert_eq!((timers.len(), timers.next()), (1, Some(Instant::from_nanos(9))));
        assert_eq!(timers.pop_due(Instant::from_nanos(9)), Some(new));
    }
}
