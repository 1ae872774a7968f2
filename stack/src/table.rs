//! Tables that handles and numbers point into.
//!
//! Owns the generational slab behind every verbs handle and the map from 24-bit numbers to slots. A stale handle is
//! told from a live one; look-up is constant time. Nothing here is iterated in hash order.

use core::fmt;
use core::hash::{BuildHasher, Hasher};
use core::marker::PhantomData;

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

/// From a number to a value: one place of an array and, seldom, the next ones. The array is at most half full, so a
/// look-up ends soon. Numbers are spread by a hash that is keyed from the seed, so nobody else knows which ones are
/// neighbours.
#[derive(Debug)]
pub struct NumberMap<V> {
    /// A power of two of places, or none before the first number.
    places: Vec<Option<(u32, V)>>,
    len: usize,
    hash: NumberHash,
}

/// Places of a map that holds its first number.
const FIRST_PLACES: usize = 8;

impl<V> NumberMap<V> {
    /// An empty map whose hash is keyed by `key`.
    #[must_use]
    pub fn new(key: u64) -> Self {
        Self { places: Vec::new(), len: 0, hash: NumberHash(key) }
    }

    /// Where a number would stand if nobody else did. Only for a map that has places.
    #[inline]
    fn home(&self, number: u32) -> usize {
        let mut hasher = self.hash.build_hasher();
        hasher.write_u32(number);
        #[allow(clippy::cast_possible_truncation)] // The low bits are as good as all.
        let hash = hasher.finish() as usize;
        hash & self.places.len().wrapping_sub(1)
    }

    #[inline]
    fn after(&self, place: usize) -> usize {
        (place + 1) & self.places.len().wrapping_sub(1)
    }

    /// The place of a number, or the empty one where it would stand; `None` without places.
    #[inline]
    fn place(&self, number: u32) -> Option<usize> {
        let mut at = self.home(number);
        while let Some((other, _)) = self.places.get(at)? {
            if *other == number {
                break;
            }
            at = self.after(at);
        }
        Some(at)
    }

    /// The value of a number.
    #[inline]
    #[must_use]
    pub fn get(&self, number: u32) -> Option<&V> {
        let mut at = self.home(number);
        while let Some((other, value)) = self.places.get(at)? {
            if *other == number {
                return Some(value);
            }
            at = self.after(at);
        }
        None
    }

    /// Whether a number has a value.
    #[must_use]
    pub fn contains(&self, number: u32) -> bool {
        self.get(number).is_some()
    }

    /// Gives a number a value; returns the one before.
    pub fn insert(&mut self, number: u32, value: V) -> Option<V> {
        if self.len * 2 >= self.places.len() {
            self.grow();
        }
        let at = self.place(number)?;
        let before = self.places.get_mut(at)?.replace((number, value));
        self.len += usize::from(before.is_none());
        before.map(|(_, value)| value)
    }

    fn grow(&mut self) {
        let places = (self.places.len() * 2).max(FIRST_PLACES);
        let old = core::mem::replace(&mut self.places, core::iter::repeat_with(|| None).take(places).collect());
        for (number, value) in old.into_iter().flatten() {
            if let Some(place) = self.place(number).and_then(|at| self.places.get_mut(at)) {
                *place = Some((number, value));
            }
        }
    }

    /// Takes a number out; returns its value.
    pub fn remove(&mut self, number: u32) -> Option<V> {
        let mut hole = self.place(number)?;
        let (_, value) = self.places.get_mut(hole)?.take()?;
        self.len -= 1;
        // Whoever stands behind the hole and was sent past it moves up: a look-up ends at an empty place.
        let mut at = self.after(hole);
        while let Some(Some((other, _))) = self.places.get(at) {
            let mask = self.places.len().wrapping_sub(1);
            let home = self.home(*other);
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(hole) & mask {
                self.places.swap(at, hole);
                hole = at;
            }
            at = self.after(at);
        }
        Some(value)
    }

    /// Numbers held.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether none is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
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

    #[test]
    fn number_map_is_a_map() {
        use std::collections::BTreeMap;

        let (mut map, mut model) = (NumberMap::new(5), BTreeMap::new());
        let mut state = 1u32;
        for step in 0..60_000 {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Few numbers, so that they come and go; more of them in between, so that it grows while full of holes.
            let number = (state >> 16) % if step / 10_000 == 3 { 3000 } else { 60 };
            if state >> 8 & 1 == 0 {
                assert_eq!(map.insert(number, step), model.insert(number, step));
            } else {
                assert_eq!(map.remove(number), model.remove(&number));
            }
            assert_eq!(map.len(), model.len());
            let probe = (state >> 4) % 3000;
            assert_eq!(map.get(probe), model.get(&probe));
        }
        assert!((0..3000).all(|number| map.get(number) == model.get(&number)));
        assert!(NumberMap::<u8>::new(1).get(0).is_none());
        assert!(NumberMap::<u8>::new(1).remove(0).is_none());
    }
}
