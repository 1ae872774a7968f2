//! Tables that handles and numbers point into.
//!
//! Owns the generational slab behind every verbs handle and the map from 24-bit numbers to slots. A stale handle is
//! told from a live one; look-up is constant time. Nothing here is iterated in hash order.

use core::fmt;
use core::hash::{BuildHasher, Hasher};
use core::marker::PhantomData;
use std::collections::HashMap;

/// A handle: a slot and the generation of its content. `T` only keeps kinds apart.
pub struct Handle<T> {
    slot: u32,
    generation: u32,
    kind: PhantomData<fn() -> T>,
}

impl<T> Handle<T> {
    /// The slot, an index below the slab's capacity.
    #[must_use]
    pub const fn slot(self) -> u32 {
        self.slot
    }

    /// The generation of the slot's content.
    #[must_use]
    pub const fn generation(self) -> u32 {
        self.generation
    }
}

impl<T> Handle<T> {
    /// The same slot and generation in a table that holds several kinds.
    pub(crate) const fn retag<U>(self) -> Handle<U> {
        Handle { slot: self.slot, generation: self.generation, kind: PhantomData }
    }
}

impl<T> Clone for Handle<T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Handle<T> {}
impl<T> PartialEq for Handle<T> {
    fn eq(&self, other: &Self) -> bool {
        (self.slot, self.generation) == (other.slot, other.generation)
    }
}
impl<T> Eq for Handle<T> {}
impl<T> PartialOrd for Handle<T> {
    fn partial_cmp(&self, other: &Self) -> Option<core::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<T> Ord for Handle<T> {
    fn cmp(&self, other: &Self) -> core::cmp::Ordering {
        (self.slot, self.generation).cmp(&(other.slot, other.generation))
    }
}
impl<T> core::hash::Hash for Handle<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.slot, self.generation).hash(state);
    }
}
impl<T> fmt::Debug for Handle<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}.{}", self.slot, self.generation)
    }
}

struct Slot<V> {
    generation: u32,
    value: Option<V>,
}

/// A bounded slab of `V`, reached by `Handle<T>`.
pub struct Slab<T, V> {
    slots: Vec<Slot<V>>,
    free: Vec<u32>,
    limit: usize,
    kind: PhantomData<fn() -> T>,
}

impl<T, V> Slab<T, V> {
    /// A slab that holds at most `limit` values.
    #[must_use]
    pub const fn new(limit: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), limit, kind: PhantomData }
    }

    /// Values held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Whether no value is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Slots in use or used before: every handle's slot is below.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Stores a value; `None` when the limit is reached.
    pub fn insert(&mut self, value: V) -> Option<Handle<T>> {
        self.insert_with(|_| value)
    }

    /// Stores the value that `make` returns for its handle; `None` when the limit is reached.
    pub fn insert_with(&mut self, make: impl FnOnce(Handle<T>) -> V) -> Option<Handle<T>> {
        let slot = if let Some(slot) = self.free.pop() {
            slot
        } else {
            if self.slots.len() >= self.limit {
                return None;
            }
            self.slots.push(Slot { generation: 0, value: None });
            u32::try_from(self.slots.len() - 1).ok()?
        };
        let entry = self.slots.get_mut(slot as usize)?;
        let handle = Handle { slot, generation: entry.generation, kind: PhantomData };
        entry.value = Some(make(handle));
        Some(handle)
    }

    /// The value of a live handle.
    #[must_use]
    pub fn get(&self, h: Handle<T>) -> Option<&V> {
        let s = self.slots.get(h.slot as usize)?;
        if s.generation == h.generation { s.value.as_ref() } else { None }
    }

    /// The value of a live handle.
    #[must_use]
    pub fn get_mut(&mut self, h: Handle<T>) -> Option<&mut V> {
        let s = self.slots.get_mut(h.slot as usize)?;
        if s.generation == h.generation { s.value.as_mut() } else { None }
    }

    /// The handle of the value in `slot`, if one is there.
    #[must_use]
    pub fn handle_at(&self, slot: u32) -> Option<Handle<T>> {
        let s = self.slots.get(slot as usize)?;
        s.value.as_ref().map(|_| Handle { slot, generation: s.generation, kind: PhantomData })
    }

    /// Takes the value of a live handle; the handle is stale from then on.
    pub fn remove(&mut self, h: Handle<T>) -> Option<V> {
        let s = self.slots.get_mut(h.slot as usize)?;
        if s.generation != h.generation {
            return None;
        }
        let value = s.value.take()?;
        s.generation = s.generation.wrapping_add(1);
        self.free.push(h.slot);
        Some(value)
    }

    /// All live values, by slot.
    pub fn iter(&self) -> impl Iterator<Item = (Handle<T>, &V)> {
        self.slots.iter().enumerate().filter_map(|(i, s)| {
            let slot = u32::try_from(i).ok()?;
            s.value.as_ref().map(|v| (Handle { slot, generation: s.generation, kind: PhantomData }, v))
        })
    }
}

/// Hash keyed from the endpoint's seed. The numbers in the table are drawn by us, so a peer chooses only what is looked
/// up, never what collides.
#[derive(Clone, Copy, Debug)]
pub struct NumberHash(u64);

impl NumberHash {
    /// The hash keyed with `key`.
    #[must_use]
    pub const fn new(key: u64) -> Self {
        Self(key)
    }
}

/// The hasher of [`NumberHash`].
#[derive(Clone, Copy, Debug)]
pub struct NumberHasher(u64);

impl BuildHasher for NumberHash {
    type Hasher = NumberHasher;

    fn build_hasher(&self) -> NumberHasher {
        NumberHasher(self.0)
    }
}

impl Hasher for NumberHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for b in bytes {
            self.write_u32(u32::from(*b));
        }
    }

    fn write_u32(&mut self, v: u32) {
        // One multiply-and-fold round: enough for numbers that are random already.
        let m = u128::from(self.0 ^ u64::from(v)) * 0x9E37_79B9_7F4A_7C15_u128;
        self.0 = u64::try_from(m >> 64).unwrap_or(0) ^ u64::try_from(m & u128::from(u64::MAX)).unwrap_or(0);
    }
}

/// A map from 24-bit or 32-bit numbers to values.
#[derive(Debug)]
pub struct NumberMap<V>(HashMap<u32, V, NumberHash>);

impl<V> NumberMap<V> {
    /// An empty map, its hash keyed with `key`.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self(HashMap::with_hasher(NumberHash(key)))
    }

    /// The value of `number`.
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&V> {
        self.0.get(&number)
    }

    /// Whether `number` is there.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.0.contains_key(&number)
    }

    /// Sets the value of `number`; returns the one before.
    pub fn insert(&mut self, number: u32, value: V) -> Option<V> {
        self.0.insert(number, value)
    }

    /// Removes `number`.
    pub fn remove(&mut self, number: u32) -> Option<V> {
        self.0.remove(&number)
    }

    /// Numbers held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    enum Kind {}

    #[test]
    fn stale_handles_miss() {
        let mut slab: Slab<Kind, u8> = Slab::new(2);
        let a = slab.insert(1).unwrap();
        let b = slab.insert(2).unwrap();
        assert!(slab.insert(3).is_none());
        assert_eq!(slab.remove(a), Some(1));
        assert_eq!(slab.remove(a), None);
        let c = slab.insert(4).unwrap();
        assert_eq!(c.slot(), a.slot());
        assert_eq!(slab.get(a), None);
        assert_eq!(slab.get(c), Some(&4));
        assert_eq!(slab.iter().map(|(_, v)| *v).collect::<Vec<_>>(), [4, 2]);
        assert_eq!(slab.get(b), Some(&2));
    }

    #[test]
    fn number_map_spreads_consecutive_numbers() {
        let mut map = NumberMap::new(99);
        for n in 0..10_000 {
            assert_eq!(map.insert(n, n), None);
        }
        assert!((0..10_000).all(|n| map.get(n) == Some(&n)));
        assert_eq!(map.len(), 10_000);
        assert_eq!(map.remove(7), Some(7));
        assert!(!map.contains(7));
    }
}
