//! Memory regions, memory windows and their keys.
//!
//! Owns the table that turns a key and an address into a place in a [`Region`], with every check on the way: key,
//! protection domain, QP, access right, bounds (with wrap-around). Every look-up is made anew for each packet, so a
//! region that was deregistered or a key that was invalidated is never used again. Never touches the bytes by itself;
//! [`Region`] does.
//!
//! A region and a window stand in the table as the same thing, an entry, so that a window costs a peer's packet
//! what a region costs. What changes entries is in `windows` (binds) and `fast` (registration by work request).

mod fast;
mod flush;
mod sges;
mod stretch;
mod windows;

pub use flush::{FlushError, FlushRange};
pub use sges::SgeError;
pub use stretch::Stretch;

use crate::raw::Region;
use crate::rng::Rng;
use crate::table::{Handle, NumberMap, Slab};
use crate::types::{Lkey, Rkey};
use crate::verbs::{AccessFlags, MemoryRegion, MrHandle, PdHandle, QpHandle, VerbsError};
use windows::Window;

/// Regions that one table holds at most; tags are 24 bits.
pub const MAX_MRS: usize = 256 * 1024;
/// Memory windows that one table holds at most.
pub const MAX_MWS: usize = 256 * 1024;

/// Where default wire addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum IovaPolicy {
    /// The host address of the region, as hardware verbs do.
    #[default]
    Host,
    /// Drawn from the endpoint's seed, so that two runs put the same addresses on the wire.
    Seeded,
}

/// The peer may not do that: one answer for every cause, so that guessing keys tells nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessDenied;

/// A work request on this side that changes what a key stands for was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused;

/// The key is in force: a bit beside those of [`AccessFlags`].
const VALID: u32 = 1 << 31;
/// Local elements may name it: it is a region's key.
const LOCAL: u32 = 1 << 30;

/// Tag type of what a key names, region or window.
enum Keyed {}
type KeyHandle = Handle<Keyed>;

/// What a key reaches, and what it allows.
struct Entry {
    /// The memory; none under a window that is not bound.
    region: Option<Region>,
    /// Wire address of the first byte that the key reaches.
    base: u64,
    /// Where that byte is in the region.
    start: u64,
    /// Bytes that the key reaches.
    len: u64,
    /// Rights in force: bits of [`AccessFlags`], [`VALID`] and [`LOCAL`]; 0 while nobody may use the key.
    rights: u32,
    pd: PdHandle,
    key: u32,
    /// The only QP that the key serves; any of the protection domain without one.
    qp: Option<QpHandle>,
    kind: Kind,
}

enum Kind {
    Region {
        /// Windows bound to it.
        windows: u32,
        /// Made for fast registration: its key can be invalidated.
        fast: bool,
    },
    Window(Window),
}

/// All memory regions and windows of an endpoint.
pub struct MrTable {
    slab: Slab<Keyed, Entry>,
    by_tag: NumberMap<KeyHandle>,
    rng: Rng,
    policy: IovaPolicy,
    regions: usize,
    windows: usize,
    /// Windows that are bound to a QP.
    bound_to_qps: usize,
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

    /// Copies out of the region, and goes on from `crc` with the CRC-32 of what was copied.
    ///
    /// # Errors
    /// [`AccessDenied`] beyond the region's end.
    #[inline]
    pub fn read_crc(&self, out: &mut [u8], crc: u32) -> Result<u32, AccessDenied> {
        self.region.read_crc(self.offset, out, crc).map_err(|_| AccessDenied)
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

    /// Puts 8 bytes in place at once; `None` when the place is not aligned in this process.
    #[must_use]
    pub fn write_atomic(&self, bytes: [u8; 8]) -> Option<()> {
        self.region.write_atomic(self.offset, bytes)
    }
}

impl MrTable {
    /// An empty table; tags are drawn from `rng`.
    #[must_use]
    pub fn new(mut rng: Rng, policy: IovaPolicy) -> Self {
        let hash_key = rng.next_u64();
        Self {
            slab: Slab::new(MAX_MRS + MAX_MWS),
            by_tag: NumberMap::new(hash_key),
            rng,
            policy,
            regions: 0,
            windows: 0,
            bound_to_qps: 0,
        }
    }

    /// The region in `slot`, and whether its key is in force: for lists of all regions.
    #[must_use]
    pub fn at(&self, slot: u32) -> Option<(MemoryRegion, PdHandle, bool)> {
        let handle = self.slab.handle_at(slot)?;
        let Entry { base: iova, len, key, pd, rights, kind: Kind::Region { .. }, .. } = self.slab.get(handle)? else {
            return None;
        };
        let (lkey, rkey) = (Lkey::new(*key), Rkey::new(*key));
        let mr = MemoryRegion { handle: handle.retag(), lkey, rkey, iova: *iova, len: *len };
        Some((mr, *pd, rights & VALID != 0))
    }

    /// Slots in use or used before: the end of a list of all regions.
    #[must_use]
    pub fn slots(&self) -> usize {
        self.slab.slots()
    }

    /// Regions registered.
    #[must_use]
    pub fn len(&self) -> usize {
        self.regions
    }

    /// Whether no region is registered.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.regions == 0
    }

    /// Whether a region or window belongs to `pd`.
    #[must_use]
    pub fn uses_pd(&self, pd: PdHandle) -> bool {
        self.slab.iter().any(|(_, entry)| entry.pd == pd)
    }

    /// Registers a region under a fresh key: a random 24-bit tag and a random 8-bit key.
    ///
    /// # Errors
    /// [`VerbsError::InvalidAccess`], [`VerbsError::NotPersistent`], [`VerbsError::AddressWrap`],
    /// [`VerbsError::LimitReached`].
    pub fn register(
        &mut self,
        pd: PdHandle,
        region: &Region,
        access: AccessFlags,
        iova: Option<u64>,
    ) -> Result<MemoryRegion, VerbsError> {
        check_access(access, region)?;
        let iova = match iova {
            _ if access.contains(AccessFlags::ZERO_BASED) => 0,
            Some(given) => given,
            None => match self.policy {
                IovaPolicy::Host => region.host_address(),
                // Page aligned as the region itself is, and far below 2^63 so that no length wraps.
                IovaPolicy::Seeded => self.rng.next_u64() >> 2 & !0xFFF,
            },
        };
        let len = region.len() as u64;
        iova.checked_add(len).ok_or(VerbsError::AddressWrap)?;
        self.insert_region(pd, region, iova, VALID | LOCAL | access.bits(), false)
    }

    /// Puts a region into the table, in force or not.
    fn insert_region(
        &mut self,
        pd: PdHandle,
        region: &Region,
        iova: u64,
        rights: u32,
        fast: bool,
    ) -> Result<MemoryRegion, VerbsError> {
        let full = VerbsError::LimitReached { what: "memory regions", limit: MAX_MRS };
        if self.regions >= MAX_MRS {
            return Err(full);
        }
        let len = region.len() as u64;
        let key = self.fresh_key();
        let kind = Kind::Region { windows: 0, fast };
        let entry = Entry { region: Some(region.clone()), base: iova, start: 0, len, rights, pd, key, qp: None, kind };
        let handle = self.slab.insert(entry).ok_or(full)?;
        self.by_tag.insert(key >> 8, handle);
        self.regions += 1;
        Ok(MemoryRegion { handle: handle.retag(), lkey: Lkey::new(key), rkey: Rkey::new(key), iova, len })
    }

    /// A key whose tag is not in use. At most 2^19 of 2^24 tags are, so a few draws are enough.
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
    /// [`VerbsError::InvalidHandle`]; [`VerbsError::Busy`] while windows are bound to it.
    pub fn deregister(&mut self, handle: MrHandle) -> Result<(), VerbsError> {
        let entry = self.slab.get(handle.retag()).ok_or(VerbsError::InvalidHandle)?;
        match entry.kind {
            Kind::Region { windows: 0, .. } => {}
            Kind::Region { .. } => return Err(VerbsError::Busy),
            Kind::Window(_) => return Err(VerbsError::InvalidHandle),
        }
        let tag = entry.key >> 8;
        self.slab.remove(handle.retag());
        self.by_tag.remove(tag);
        self.regions -= 1;
        Ok(())
    }

    /// Gives a region another key, for replays of captured exchanges and tests.
    ///
    /// # Errors
    /// [`VerbsError::InvalidHandle`], [`VerbsError::Busy`] when the tag is taken.
    pub fn set_key(&mut self, handle: MrHandle, key: u32) -> Result<(), VerbsError> {
        self.rename(handle.retag(), key)
    }

    fn rename(&mut self, handle: KeyHandle, key: u32) -> Result<(), VerbsError> {
        if self.by_tag.get(key >> 8).is_some_and(|h| *h != handle) {
            return Err(VerbsError::Busy);
        }
        let entry = self.slab.get_mut(handle).ok_or(VerbsError::InvalidHandle)?;
        self.by_tag.remove(entry.key >> 8);
        entry.key = key;
        self.by_tag.insert(key >> 8, handle);
        Ok(())
    }

    #[inline]
    fn by_key(&self, key: u32) -> Option<&Entry> {
        let entry = self.slab.get(*self.by_tag.get(key >> 8)?)?;
        if entry.key == key { Some(entry) } else { None }
    }

    /// What a peer reaches that holds `rkey`, on the QP `qp` of `pd`, when all rights in `need` are there. The order of
    /// the checks is key, protection domain, QP, right.
    #[inline]
    fn granted(&self, pd: PdHandle, qp: QpHandle, rkey: Rkey, need: AccessFlags) -> Result<&Entry, AccessDenied> {
        let entry = self.by_key(rkey.get()).ok_or(AccessDenied)?;
        let need = need.bits() | VALID;
        if entry.pd != pd || entry.qp.is_some_and(|only| only != qp) || entry.rights & need != need {
            return Err(AccessDenied);
        }
        Ok(entry)
    }

    /// The place of `len` bytes at `addr` for a peer that holds `rkey`, on the QP `qp` of `pd`, when all rights in `need`
    /// are there. The order of the checks is key, protection domain, QP, right, range.
    ///
    /// # Errors
    /// [`AccessDenied`].
    #[inline]
    pub fn remote(
        &self,
        pd: PdHandle,
        qp: QpHandle,
        rkey: Rkey,
        addr: u64,
        len: u64,
        need: AccessFlags,
    ) -> Result<Span<'_>, AccessDenied> {
        self.granted(pd, qp, rkey, need)?.span(addr, len).ok_or(AccessDenied)
    }

    /// Takes `rkey` out of force, for a peer's SEND with invalidate or a work request of our own that came over `qp` of
    /// `pd`. It must be in force, and the key of a window of type 2 bound on this QP or of a fast registration to which
    /// no window is bound.
    ///
    /// # Errors
    /// [`AccessDenied`].
    pub fn invalidate(&mut self, pd: PdHandle, qp: QpHandle, rkey: Rkey) -> Result<(), AccessDenied> {
        let handle = *self.by_tag.get(rkey.get() >> 8).ok_or(AccessDenied)?;
        let entry = self.slab.get_mut(handle).ok_or(AccessDenied)?;
        if entry.key != rkey.get() || entry.pd != pd || entry.rights & VALID == 0 {
            return Err(AccessDenied);
        }
        match entry.kind {
            Kind::Region { windows: 0, fast: true } => {
                entry.rights = 0;
                Ok(())
            }
            Kind::Window(_) if entry.qp == Some(qp) => {
                self.unbind(handle);
                Ok(())
            }
            _ => Err(AccessDenied),
        }
    }
}

/// Rights that a registration of `region` may have.
fn check_access(access: AccessFlags, region: &Region) -> Result<(), VerbsError> {
    let changes = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    if access.intersection(changes) != AccessFlags::NONE && !access.contains(AccessFlags::LOCAL_WRITE) {
        return Err(VerbsError::InvalidAccess);
    }
    if access.contains(AccessFlags::FLUSH_PERSISTENT) && !region.is_persistent() {
        return Err(VerbsError::NotPersistent);
    }
    Ok(())
}

impl Entry {
    #[inline]
    fn span(&self, addr: u64, len: u64) -> Option<Span<'_>> {
        let offset = addr.checked_sub(self.base)?;
        let end = offset.checked_add(len)?;
        if end > self.len {
            return None;
        }
        let region = self.region.as_ref()?;
        // Within the region, as the whole range of the entry is.
        Some(Span { region, offset: usize::try_from(self.start + offset).ok()? })
    }
}

#[cfg(test)]
mod model;
#[cfg(test)]
mod tests;
