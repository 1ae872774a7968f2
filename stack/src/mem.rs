//! Memory regions and their keys.
//!
//! Owns the table that turns a key and an address into a place in a [`Region`], with every check on the way: key,
//! protection domain, access right, bounds (with wrap-around). Every look-up is made anew for each packet, so a
//! deregistered region is never touched again. Never touches the bytes by itself; [`Region`] does.

use crate::raw::Region;
use crate::rng::Rng;
use crate::table::{NumberMap, Slab};
use crate::types::{Lkey, Rkey};
use crate::verbs::kind;
use crate::verbs::{AccessFlags, MemoryRegion, MrHandle, PdHandle, Sge, VerbsError};

/// Regions that one table holds at most; tags are 24 bits.
pub const MAX_MRS: usize = 256 * 1024;

/// Where default wire addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IovaPolicy {
    /// The host address of the region, as hardware verbs do.
    #[default]
    Host,
    /// Drawn from the endpoint's seed, so that two runs put the same addresses on the wire.
    Seeded,
}

/// Why local memory cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SgeError {
    /// Key, range, right or protection domain.
    Protection,
    /// The elements have no room for the bytes.
    TooShort,
}

/// The peer may not do that: one answer for every cause, so that guessing keys tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessDenied;

struct Mr {
    region: Region,
    iova: u64,
    access: AccessFlags,
    pd: PdHandle,
    key: u32,
    remote_valid: bool,
}

/// All memory regions of an endpoint.
pub struct MrTable {
    slab: Slab<kind::Mr, Mr>,
    by_tag: NumberMap<MrHandle>,
    rng: Rng,
    policy: IovaPolicy,
}

/// A checked place in a region.
#[derive(Clone, Copy)]
pub struct Span<'a> {
    region: &'a Region,
    offset: usize,
}

impl Span<'_> {
    /// Copies out of the region.
    ///
    /// # Errors
    /// [`AccessDenied`] beyond the region's end.
    #[inline]
    pub fn read(&self, out: &mut [u8]) -> Result<(), AccessDenied> {
        self.region.read(self.offset, out).map_err(|_| AccessDenied)
    }

    /// Copies into the region.
    ///
    /// # Errors
    /// [`AccessDenied`] beyond the region's end.
    #[inline]
    pub fn write(&self, data: &[u8]) -> Result<(), AccessDenied> {
        self.region.write(self.offset, data).map_err(|_| AccessDenied)
    }

    /// Atomic compare and swap; `None` when the place is not aligned in this process.
    #[must_use]
    pub fn compare_swap(&self, compare: u64, swap: u64) -> Option<u64> {
        self.region.compare_swap(self.offset, compare, swap)
    }

    /// Atomic fetch and add; `None` when the place is not aligned in this process.
    #[must_use]
    pub fn fetch_add(&self, add: u64) -> Option<u64> {
        self.region.fetch_add(self.offset, add)
    }
}

impl MrTable {
    /// An empty table; tags are drawn from `rng`.
    #[must_use]
    pub fn new(mut rng: Rng, policy: IovaPolicy) -> Self {
        let hash_key = rng.next_u64();
        Self { slab: Slab::new(MAX_MRS), by_tag: NumberMap::new(hash_key), rng, policy }
    }

    /// The region in `slot`, and whether its remote key is valid: for lists of all regions.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<(MemoryRegion, PdHandle, bool)> {
        let handle = self.slab.handle_at(slot)?;
        let mr = self.slab.get(handle)?;
        let (lkey, rkey) = (Lkey::new(mr.key), Rkey::new(mr.key));
        Some((MemoryRegion { handle, lkey, rkey, iova: mr.iova, len: mr.region.len() as u64 }, mr.pd, mr.remote_valid))
    }

    /// Slots in use or used before: the end of a list of all regions.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slab.slots()
    }

    /// Regions registered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.slab.len()
    }

    /// Whether none is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.slab.is_empty()
    }

    /// Whether a region belongs to `pd`.
    #[must_use]
    pub fn uses_pd(&self, pd: PdHandle) -> bool {
        self.slab.iter().any(|(_, mr)| mr.pd == pd)
    }

    /// Registers a region under a fresh key: a random 24-bit tag and a random 8-bit key.
    ///
    /// # Errors
    /// [`VerbsError::InvalidAccess`], [`VerbsError::AddressWrap`], [`VerbsError::LimitReached`].
    pub fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError> {
        let remote_change = access.bits() & (AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC).bits() != 0;
        if remote_change && !access.contains(AccessFlags::LOCAL_WRITE) {
            return Err(VerbsError::InvalidAccess);
        }
        let len = region.len() as u64;
        let iova = iova.unwrap_or_else(|| match self.policy {
            IovaPolicy::Host => region.host_address(),
            // Page aligned as the region itself is, and far below 2^63 so that no length wraps.
            IovaPolicy::Seeded => self.rng.next_u64() >> 2 & !0xFFF,
        });
        iova.checked_add(len).ok_or(VerbsError::AddressWrap)?;
        let full = VerbsError::LimitReached { what: "memory regions", limit: MAX_MRS };
        if self.slab.len() >= MAX_MRS {
            return Err(full);
        }
        let key = self.fresh_key();
        let mr = Mr { region: region.clone(), iova, access, pd, key, remote_valid: true };
        let handle = self.slab.insert(mr).ok_or(full)?;
        self.by_tag.insert(key >> 8, handle);
        Ok(MemoryRegion { handle, lkey: Lkey::new(key), rkey: Rkey::new(key), iova, len })
    }

    /// A key whose tag is not in use. At most 2^18 of 2^24 tags are, so a few draws are enough.
    fn fresh_key(&mut self) -> u32 {
        loop {
            let key = self.rng.next_u32();
            // Tag 0 stays free: keys below 256 are what people take for "no key".
            if key >> 8 != 0 && !self.by_tag.contains(key >> 8) {
                return key;
            }
        }
    }

    /// Ends a registration.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`].
    pub fn deregister(&mut self, handle: MrHandle) -> Result<(), VerbsError> {
        let mr = self.slab.remove(handle).ok_or(VerbsError::InvalidHandle)?;
        self.by_tag.remove(mr.key >> 8);
        Ok(())
    }

    /// Gives a region another key, for replays of captured exchanges and tests.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`] when the tag is taken.
    pub fn set_key(&mut self, handle: MrHandle, key: u32) -> Result<(), VerbsError> {
        if self.by_tag.get(key >> 8).is_some_and(|h| *h != handle) {
            return Err(VerbsError::Busy);
        }
        let mr = self.slab.get_mut(handle).ok_or(VerbsError::InvalidHandle)?;
        self.by_tag.remove(mr.key >> 8);
        mr.key = key;
        self.by_tag.insert(key >> 8, handle);
        Ok(())
    }

    fn by_key(&self, key: u32) -> Option<&Mr> {
        let mr = self.slab.get(*self.by_tag.get(key >> 8)?)?;
        if mr.key == key { Some(mr) } else { None }
    }

    /// The place of `len` bytes at `addr` for a peer that holds `rkey`, on a QP of `pd`, when all rights in `need` are
    /// there. The order of the checks is key, protection domain, right, range.
    ///
    /// # Errors
    /// [`AccessDenied`].
    #[inline]
    pub fn remote(
        &self,
        pd: PdHandle,
        rkey: Rkey,
        addr: u64,
        len: u64,
        need: AccessFlags,
    ) -> Result<Span<'_>, AccessDenied> {
        let mr = self.by_key(rkey.get()).ok_or(AccessDenied)?;
        if mr.pd != pd || !mr.remote_valid || !mr.access.contains(need) {
            return Err(AccessDenied);
        }
        mr.span(addr, len).ok_or(AccessDenied)
    }

    /// Makes `rkey` useless for peers. The region stays registered for its owner.
    ///
    /// # Errors
    /// [`AccessDenied`] when the key names no region of `pd` that a peer could reach.
    pub fn invalidate(&mut self, pd: PdHandle, rkey: Rkey) -> Result<(), AccessDenied> {
        let handle = *self.by_tag.get(rkey.get() >> 8).ok_or(AccessDenied)?;
        let mr = self.slab.get_mut(handle).ok_or(AccessDenied)?;
        let remote = mr.access.bits() & !AccessFlags::LOCAL_WRITE.bits() != 0;
        if mr.key != rkey.get() || mr.pd != pd || !remote || !mr.remote_valid {
            return Err(AccessDenied);
        }
        mr.remote_valid = false;
        Ok(())
    }

    #[inline]
    fn local(&self, pd: PdHandle, sge: &Sge, skip: u64, len: u64, write: bool) -> Result<Span<'_>, SgeError> {
        let mr = self.by_key(sge.lkey.get()).ok_or(SgeError::Protection)?;
        if mr.pd != pd || (write && !mr.access.contains(AccessFlags::LOCAL_WRITE)) {
            return Err(SgeError::Protection);
        }
        let addr = sge.addr.checked_add(skip).ok_or(SgeError::Protection)?;
        mr.span(addr, len).ok_or(SgeError::Protection)
    }

    /// Checks every element in full, before the first byte moves.
    ///
    /// # Errors
    /// [`SgeError::Protection`].
    pub fn check_sges(&self, pd: PdHandle, sges: &[Sge], write: bool) -> Result<(), SgeError> {
        for sge in sges.iter().filter(|s| s.length > 0) {
            self.local(pd, sge, 0, u64::from(sge.length), write)?;
        }
        Ok(())
    }

    /// Copies `out.len()` bytes out of the elements, from byte `offset` of their sequence on.
    ///
    /// # Errors
    /// [`SgeError`].
    #[inline]
    pub fn gather(&self, pd: PdHandle, sges: &[Sge], offset: u64, out: &mut [u8]) -> Result<(), SgeError> {
        let mut done = 0usize;
        for (sge, skip, len) in pieces(sges, offset, out.len()) {
            let part = out.get_mut(done..done + len).ok_or(SgeError::TooShort)?;
            self.local(pd, sge, skip, len as u64, false)?.read(part).map_err(|_| SgeError::Protection)?;
            done += len;
        }
        if done == out.len() { Ok(()) } else { Err(SgeError::TooShort) }
    }

    /// Copies `data` into the elements, from byte `offset` of their sequence on.
    ///
    /// # Errors
    /// [`SgeError`]; earlier elements may have been written then.
    #[inline]
    pub fn scatter(&self, pd: PdHandle, sges: &[Sge], offset: u64, data: &[u8]) -> Result<(), SgeError> {
        let mut done = 0usize;
        for (sge, skip, len) in pieces(sges, offset, data.len()) {
            let part = data.get(done..done + len).ok_or(SgeError::TooShort)?;
            self.local(pd, sge, skip, len as u64, true)?.write(part).map_err(|_| SgeError::Protection)?;
            done += len;
        }
        if done == data.len() { Ok(()) } else { Err(SgeError::TooShort) }
    }
}

impl Mr {
    fn span(&self, addr: u64, len: u64) -> Option<Span<'_>> {
        let offset = addr.checked_sub(self.iova)?;
        let end = offset.checked_add(len)?;
        if end > self.region.len() as u64 {
            return None;
        }
        Some(Span { region: &self.region, offset: usize::try_from(offset).ok()? })
    }
}

/// The pieces of `sges` that `len` bytes from `offset` on cover: element, bytes to skip in it, bytes to take.
fn pieces(sges: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = (&Sge, u64, usize)> {
    let (mut skip, mut left) = (offset, len);
    sges.iter().filter_map(move |sge| {
        let size = u64::from(sge.length);
        if skip >= size || left == 0 {
            skip = skip.saturating_sub(size);
            return None;
        }
        let from = skip;
        let take = usize::try_from(size - from).unwrap_or(usize::MAX).min(left);
        skip = 0;
        left -= take;
        Some((sge, from, take))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pd(n: u32) -> PdHandle {
        let mut slab: Slab<kind::Pd, u8> = Slab::new(8);
        let mut last = None;
        for _ in 0..=n {
            last = slab.insert(0);
        }
        last.unwrap()
    }

    fn table() -> MrTable {
        MrTable::new(Rng::from_u64(1), IovaPolicy::Seeded)
    }

    fn sge(mr: &MemoryRegion, at: u64, length: u32) -> Sge {
        Sge { addr: mr.iova + at, length, lkey: mr.lkey }
    }

    #[test]
    fn a_peer_reaches_only_what_the_key_the_pd_the_right_and_the_range_allow() {
        let mut t = table();
        let r = Region::alloc(100).unwrap();
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let mr = t.register(pd(0), &r, access, Some(0x1000)).unwrap();
        let w = AccessFlags::REMOTE_WRITE;
        assert!(t.remote(pd(0), mr.rkey, 0x1000, 100, w).is_ok());
        assert!(t.remote(pd(0), mr.rkey, 0x1000 + 100, 0, w).is_ok());
        for (p, key, addr, len, need) in [
            (pd(1), mr.rkey, 0x1000, 1, w),
            (pd(0), Rkey::new(mr.rkey.get() ^ 1), 0x1000, 1, w),
            (pd(0), Rkey::new(mr.rkey.get() ^ 0x100), 0x1000, 1, w),
            (pd(0), mr.rkey, 0x1000, 1, AccessFlags::REMOTE_READ),
            (pd(0), mr.rkey, 0x1000, 101, w),
            (pd(0), mr.rkey, 0xFFF, 1, w),
            (pd(0), mr.rkey, 0x1000 + 101, 0, w),
            // CVE-2016-8636: sums that wrap.
            (pd(0), mr.rkey, u64::MAX, 1, w),
            (pd(0), mr.rkey, u64::MAX, u64::MAX, w),
            (pd(0), mr.rkey, 0x1000, u64::MAX - 0xFFF, w),
            (pd(0), mr.rkey, 0x1000, u64::from(u32::MAX), w),
        ] {
            assert!(t.remote(p, key, addr, len, need).is_err(), "{key} {addr:#x} {len:#x}");
        }
        t.deregister(mr.handle).unwrap();
        assert!(t.remote(pd(0), mr.rkey, 0x1000, 1, w).is_err());
        assert_eq!(t.deregister(mr.handle), Err(VerbsError::InvalidHandle));
    }

    #[test]
    fn remote_change_needs_local_write_and_addresses_do_not_wrap() {
        let mut t = table();
        let r = Region::alloc(16).unwrap();
        assert_eq!(t.register(pd(0), &r, AccessFlags::REMOTE_WRITE, None), Err(VerbsError::InvalidAccess));
        assert_eq!(t.register(pd(0), &r, AccessFlags::REMOTE_ATOMIC, None), Err(VerbsError::InvalidAccess));
        assert_eq!(t.register(pd(0), &r, AccessFlags::NONE, Some(u64::MAX - 14)), Err(VerbsError::AddressWrap));
        assert!(t.register(pd(0), &r, AccessFlags::NONE, Some(u64::MAX - 16)).is_ok());
    }

    #[test]
    fn gather_and_scatter_walk_the_elements_at_any_offset() {
        let mut t = table();
        let r = Region::alloc(64).unwrap();
        let mr = t.register(pd(0), &r, AccessFlags::LOCAL_WRITE, None).unwrap();
        let list = [sge(&mr, 0, 3), sge(&mr, 9, 0), sge(&mr, 10, 5), sge(&mr, 20, 4)];
        let data: Vec<u8> = (1..=12).collect();
        t.scatter(pd(0), &list, 0, &data).unwrap();
        assert_eq!(&r.to_vec()[..3], &data[..3]);
        assert_eq!(&r.to_vec()[10..15], &data[3..8]);
        assert_eq!(&r.to_vec()[20..24], &data[8..]);
        for from in 0..=12 {
            for to in from..=12 {
                let mut out = vec![0; to - from];
                t.gather(pd(0), &list, from as u64, &mut out).unwrap();
                assert_eq!(out, data[from..to]);
            }
        }
        assert_eq!(t.gather(pd(0), &list, 5, &mut [0; 8]), Err(SgeError::TooShort));
        assert_eq!(t.scatter(pd(1), &list, 0, &data), Err(SgeError::Protection));
    }

    #[test]
    fn an_invalidated_key_serves_no_peer_but_its_owner() {
        let mut t = table();
        let r = Region::alloc(8).unwrap();
        let mr = t.register(pd(0), &r, AccessFlags::ALL, None).unwrap();
        assert!(t.invalidate(pd(1), mr.rkey).is_err());
        t.invalidate(pd(0), mr.rkey).unwrap();
        assert!(t.invalidate(pd(0), mr.rkey).is_err());
        assert!(t.remote(pd(0), mr.rkey, mr.iova, 1, AccessFlags::REMOTE_READ).is_err());
        t.gather(pd(0), &[sge(&mr, 0, 8)], 0, &mut [0; 8]).unwrap();
        let private = t.register(pd(0), &r, AccessFlags::LOCAL_WRITE, None).unwrap();
        assert!(t.invalidate(pd(0), private.rkey).is_err());
    }

    /// rxe gave out faulty keys after 65,536 regions (1aefe5c177c1).
    #[test]
    fn keys_stay_unique_over_many_registrations() {
        let mut t = table();
        let r = Region::alloc(1).unwrap();
        let mut live = std::collections::VecDeque::new();
        for _ in 0..200_000 {
            let mr = t.register(pd(0), &r, AccessFlags::ALL, None).unwrap();
            assert!(t.remote(pd(0), mr.rkey, mr.iova, 1, AccessFlags::REMOTE_READ).is_ok());
            live.push_back(mr);
            if live.len() > 300 {
                let old = live.pop_front().unwrap();
                t.deregister(old.handle).unwrap();
                assert!(t.remote(pd(0), old.rkey, old.iova, 1, AccessFlags::REMOTE_READ).is_err());
            }
        }
        assert_eq!(t.len(), 300);
    }
}
