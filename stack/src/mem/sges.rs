//! Local memory: the elements of work requests.
//!
//! Owns the checks of local keys and the walk over a list of elements. Never knows what the bytes are.

use super::{Entry, LOCAL, MrTable, Span};
use crate::verbs::{AccessFlags, PdHandle, Sge};

/// Why local memory cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SgeError {
    /// Key, range, right or protection domain.
    Protection,
    /// The elements have no room for the bytes.
    TooShort,
}

impl MrTable {
    #[inline]
    pub(super) fn local(
        &self,
        pd: PdHandle,
        sge: &Sge,
        skip: u64,
        len: u64,
        write: bool,
    ) -> Result<Span<'_>, SgeError> {
        let entry: &Entry = self.by_key(sge.lkey.get()).ok_or(SgeError::Protection)?;
        let need = if write { LOCAL | AccessFlags::LOCAL_WRITE.bits() } else { LOCAL };
        if entry.pd != pd || entry.rights & need != need {
            return Err(SgeError::Protection);
        }
        let addr = sge.addr.checked_add(skip).ok_or(SgeError::Protection)?;
        entry.span(addr, len).ok_or(SgeError::Protection)
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

    /// As [`MrTable::gather`], and goes on from `crc` with the CRC-32 of what was copied.
    ///
    /// # Errors
    /// [`SgeError`].
    #[inline]
    pub fn gather_crc(
        &self,
        pd: PdHandle,
        sges: &[Sge],
        offset: u64,
        out: &mut [u8],
        mut crc: u32,
    ) -> Result<u32, SgeError> {
        let mut done = 0usize;
        for (sge, skip, len) in pieces(sges, offset, out.len()) {
            let part = out.get_mut(done..done + len).ok_or(SgeError::TooShort)?;
            crc =
                self.local(pd, sge, skip, len as u64, false)?.read_crc(part, crc).map_err(|_| SgeError::Protection)?;
            done += len;
        }
        if done == out.len() { Ok(crc) } else { Err(SgeError::TooShort) }
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

/// The pieces of `sges` that `len` bytes from `offset` on cover: element, bytes to skip in it, bytes to take.
pub(super) fn pieces(sges: &[Sge], offset: u64, len: usize) -> impl Iterator<Item = (&Sge, u64, usize)> {
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
