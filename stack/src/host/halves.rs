//! The callers' halves of queues, found by handle without the engine's lock.
//!
//! Owns one table a kind of object, shared by all handles, and a private cache of it in each handle, so that the usual
//! look-up touches nothing that another thread writes. Never looks into a queue.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};

use crate::lock::RwLock;
use crate::table::Handle;

/// The caller's half of an object.
pub(super) struct Half<K, T> {
    pub(super) handle: Handle<K>,
    destroyed: AtomicBool,
    pub(super) queue: T,
}

impl<K, T> Half<K, T> {
    /// Whether the object is gone.
    pub(super) fn is_destroyed(&self) -> bool {
        self.destroyed.load(Ordering::Acquire)
    }
}

type Slots<K, T> = Vec<Option<Arc<Half<K, T>>>>;

/// All halves of a kind, by slot. As long as the endpoint's own table of that kind.
pub(super) struct Halves<K, T>(RwLock<Slots<K, T>>);

impl<K, T> Halves<K, T> {
    pub(super) const fn new() -> Self {
        Self(RwLock::new(Vec::new()))
    }

    pub(super) fn insert(&self, handle: Handle<K>, queue: T) -> Arc<Half<K, T>> {
        let half = Arc::new(Half { handle, destroyed: AtomicBool::new(false), queue });
        put(&mut self.0.write().unwrap_or_else(PoisonError::into_inner), Arc::clone(&half));
        half
    }

    pub(super) fn get(&self, handle: Handle<K>) -> Option<Arc<Half<K, T>>> {
        find(&self.0.read().unwrap_or_else(PoisonError::into_inner), handle).cloned()
    }

    /// Forgets an object, in every cache too.
    pub(super) fn remove(&self, handle: Handle<K>) -> Option<Arc<Half<K, T>>> {
        let mut slots = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let half = find(&slots, handle).cloned()?;
        half.destroyed.store(true, Ordering::Release);
        if let Some(slot) = slots.get_mut(handle.slot() as usize) {
            *slot = None;
        }
        Some(half)
    }
}

/// The halves that one handle has used.
pub(super) struct Cache<K, T>(Slots<K, T>);

impl<K, T> Cache<K, T> {
    pub(super) const fn new() -> Self {
        Self(Vec::new())
    }

    /// The half that `handle` names: from here, or by `fetch` the first time.
    pub(super) fn get(
        &mut self,
        handle: Handle<K>,
        fetch: impl FnOnce() -> Option<Arc<Half<K, T>>>,
    ) -> Option<&Arc<Half<K, T>>> {
        if find(&self.0, handle).is_none_or(|h| h.is_destroyed()) {
            put(&mut self.0, fetch()?);
        }
        find(&self.0, handle)
    }
}

fn find<K, T>(slots: &Slots<K, T>, handle: Handle<K>) -> Option<&Arc<Half<K, T>>> {
    slots.get(handle.slot() as usize)?.as_ref().filter(|h| h.handle == handle)
}

fn put<K, T>(slots: &mut Slots<K, T>, half: Arc<Half<K, T>>) {
    let at = half.handle.slot() as usize;
    if slots.len() <= at {
        slots.resize_with(at + 1, || None);
    }
    if let Some(slot) = slots.get_mut(at) {
        *slot = Some(half);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::Slab;

    #[test]
    fn a_stale_handle_finds_neither_the_old_object_nor_the_new_one() {
        enum Kind {}
        let mut slab: Slab<Kind, ()> = Slab::new(1);
        let halves: Halves<Kind, u32> = Halves::new();
        let mut cache = Cache::new();
        let old = slab.insert(()).unwrap();
        halves.insert(old, 1);
        assert_eq!(cache.get(old, || halves.get(old)).unwrap().queue, 1);
        halves.remove(old).unwrap();
        slab.remove(old);
        assert!(cache.get(old, || halves.get(old)).is_none());
        let new = slab.insert(()).unwrap();
        assert_eq!(new.slot(), old.slot());
        halves.insert(new, 2);
        assert!(cache.get(old, || halves.get(old)).is_none());
        assert_eq!(cache.get(new, || halves.get(new)).unwrap().queue, 2);
        assert!(halves.remove(old).is_none());
        assert_eq!(halves.get(new).unwrap().queue, 2);
    }
}
