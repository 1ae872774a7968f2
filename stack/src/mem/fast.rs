//! Fast registration: a region whose key, rights and addresses come and go by work requests.
//!
//! Owns the step from free to registered; back to free leads invalidation. Never allocates memory.

use super::windows::with_low;
use super::{KeyHandle, Kind, LOCAL, MrTable, Refused, VALID, check_access};
use crate::raw::Region;
use crate::verbs::{AccessFlags, FastRegister, MemoryRegion, PdHandle, VerbsError};

impl MrTable {
    /// Makes a registration that is free: its key serves nobody.
    ///
    /// # Errors
    /// [`VerbsError::LimitReached`].
    pub fn alloc_fast(&mut self, pd: PdHandle, region: &Region) -> Result<MemoryRegion, VerbsError> {
        self.insert_region(pd, region, 0, 0, true)
    }

    /// Executes a fast registration that was posted on a QP of `pd`.
    ///
    /// # Errors
    /// [`Refused`]: not free, not made for it, another domain, a range outside, rights that cannot be.
    pub fn fast_register(&mut self, pd: PdHandle, wr: &FastRegister) -> Result<(), Refused> {
        let handle: KeyHandle = wr.mr.retag();
        let entry = self.slab.get_mut(handle).ok_or(Refused)?;
        let Kind::Region { fast: true, .. } = entry.kind else { return Err(Refused) };
        if entry.pd != pd || entry.rights != 0 {
            return Err(Refused);
        }
        let region = entry.region.as_ref().ok_or(Refused)?;
        check_access(wr.access, region).map_err(|_| Refused)?;
        let end = wr.offset.checked_add(wr.length).ok_or(Refused)?;
        let base = if wr.access.contains(AccessFlags::ZERO_BASED) { 0 } else { wr.iova };
        if end > region.len() as u64 || base.checked_add(wr.length).is_none() {
            return Err(Refused);
        }
        entry.key = with_low(entry.key, wr.key.get().to_le_bytes()[0]);
        (entry.base, entry.start, entry.len) = (base, wr.offset, wr.length);
        entry.rights = VALID | LOCAL | wr.access.bits();
        Ok(())
    }
}
