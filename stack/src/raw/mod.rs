//! Memory that a peer and the program's own threads may change at any time.
//!
//! Owns the only raw pointers to registered memory. No reference to its bytes is ever formed: copies in and out go
//! through raw pointers, so a racing writer can tear data (as on hardware) but never break an aliasing rule.
//! Never knows of keys, access rights or protection domains: `mem` does.
#![allow(unsafe_code)] // One of the few files that may: every access to shared memory is here.

pub mod copy;
mod file;
mod huge;
mod pool;

pub use huge::{HUGE_MIN, PageUse, Pages, page_use, prefer_huge_pages};

pub(crate) use pool::{PAGE_OFFSET, Piece};

use core::ptr::NonNull;
use core::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::Arc;

/// Alignment of regions that are allocated here: a page, so that atomics and direct I/O have what they need.
pub const REGION_ALIGN: usize = 4096;

/// Why a region could not be made or accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegionError {
    /// The allocator has no such block.
    #[error("out of memory for a region of {len} bytes")]
    OutOfMemory {
        /// Bytes asked for.
        len: usize,
    },
    /// The memory does not persist, or the system could not store it.
    #[error("the bytes were not stored")]
    NotStored,
    /// The access leaves the region.
    #[error("offset {offset} + {len} bytes is outside a region of {size} bytes")]
    OutOfBounds {
        /// First byte of the access.
        offset: usize,
        /// Bytes of the access.
        len: usize,
        /// Bytes of the region.
        size: usize,
    },
}

enum Backing {
    /// A block of our own.
    Block { _block: huge::Block },
    /// A map of a file, shared with everyone who maps it.
    File(memmap2::MmapMut),
    /// Kept alive by a value that owns it (a map).
    Owner { _owner: Box<dyn Send + Sync> },
    /// The caller's, who promised that it outlives the region.
    Borrowed,
}

struct Inner {
    start: NonNull<u8>,
    len: usize,
    backing: Backing,
}

// SAFETY: the pointer is only used for raw copies and atomics, which may race by design; the backing is Send + Sync.
unsafe impl Send for Inner {}
// SAFETY: as above: no method gives out a reference to the bytes.
unsafe impl Sync for Inner {}

/// A block of memory that can be registered. Clones share the block; it is freed with the last clone.
#[derive(Clone)]
pub struct Region(Arc<Inner>);

impl core::fmt::Debug for Region {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        // Contents never reach a log.
        f.debug_struct("Region").field("len", &self.0.len).finish_non_exhaustive()
    }
}

impl Region {
    /// Allocates `len` zeroed bytes, page aligned. A length of 0 is allowed. A large one lies on huge pages where the process
    /// prefers them ([`prefer_huge_pages`]) and the system has enough.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`].
    pub fn alloc(len: usize) -> Result<Self, RegionError> {
        let block = huge::Block::new(len).ok_or(RegionError::OutOfMemory { len })?;
        Ok(Self::over(block, len))
    }

    /// A region over memory that `owner` keeps alive.
    ///
    /// # Safety
    /// `start..start + len` must stay readable and writable, and must not be reached through Rust references, as long
    /// as `owner` lives.
    #[must_use]
    pub unsafe fn from_owner(start: NonNull<u8>, len: usize, owner: Box<dyn Send + Sync>) -> Self {
        Self(Arc::new(Inner { start, len, backing: Backing::Owner { _owner: owner } }))
    }

    /// A region over the caller's memory.
    ///
    /// # Safety
    /// `start..start + len` must stay valid, and must not be reached through Rust references, until the last clone of
    /// the region is dropped.
    #[must_use]
    pub unsafe fn from_raw(start: NonNull<u8>, len: usize) -> Self {
        Self(Arc::new(Inner { start, len, backing: Backing::Borrowed }))
    }

    /// Bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the region has no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The address of the first byte in this process: the wire address that real verbs would use.
    #[must_use]
    pub fn host_address(&self) -> u64 {
        self.0.start.as_ptr() as u64
    }

    /// A pointer to `offset` once `offset + len` is known to lie inside.
    #[inline]
    fn at(&self, offset: usize, len: usize) -> Result<*mut u8, RegionError> {
        let size = self.0.len;
        match offset.checked_add(len) {
            // SAFETY: offset <= size, so the pointer stays inside (or one past) the block.
            Some(end) if end <= size => Ok(unsafe { self.0.start.as_ptr().add(offset) }),
            _ => Err(RegionError::OutOfBounds { offset, len, size }),
        }
    }

    /// Copies `out.len()` bytes from `offset` out of the region.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; nothing is copied then.
    #[inline]
    pub fn read(&self, offset: usize, out: &mut [u8]) -> Result<(), RegionError> {
        let from = self.at(offset, out.len())?;
        // SAFETY: `at` checked the range; `out` is a distinct Rust slice, so the two do not overlap unless the caller
        // broke the contract of `from_raw`.
        unsafe { copy::copy_raw(from, out.as_mut_ptr(), out.len()) };
        Ok(())
    }

    /// As [`Region::read`], in one pass with the CRC-32 of what was copied, which starts where that of earlier bytes
    /// ended: at `crc`. It is right for `out` even while someone changes the region.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; nothing is copied then.
    #[inline]
    pub fn read_crc(&self, offset: usize, out: &mut [u8], crc: u32) -> Result<u32, RegionError> {
        let from = self.at(offset, out.len())?;
        // SAFETY: as in `read`.
        Ok(unsafe { copy::copy_crc_raw(crc, from, out.as_mut_ptr(), out.len()) })
    }

    /// Copies `data` to `offset` of the region. The last byte is written after all others, behind a release fence:
    /// programs poll the end of a buffer to see that a WRITE has arrived.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; nothing is copied then.
    #[inline]
    pub fn write(&self, offset: usize, data: &[u8]) -> Result<(), RegionError> {
        let to = self.at(offset, data.len())?;
        let Some((last, body)) = data.split_last() else { return Ok(()) };
        // SAFETY: `at` checked the range; see `read` for overlap.
        unsafe { copy::copy_raw(body.as_ptr(), to, body.len()) };
        fence(Ordering::Release);
        // SAFETY: body.len() is the index of the last byte of the checked range.
        unsafe { to.add(body.len()).write_volatile(*last) };
        Ok(())
    }

    /// The eight bytes at `offset` as an atomic, when they lie inside and are aligned in this process.
    fn atomic(&self, offset: usize) -> Option<&AtomicU64> {
        let p = self.at(offset, 8).ok()?;
        if p.align_offset(8) != 0 {
            return None;
        }
        // SAFETY: in bounds, aligned, and the block lives as long as `self`; all access is atomic or raw.
        Some(unsafe { AtomicU64::from_ptr(p.cast()) })
    }

    /// Atomically replaces the aligned 8 bytes at `offset` by `swap` if they equal `compare` (host byte order).
    /// Returns the value before, or `None` when the place is outside or not aligned.
    #[must_use]
    pub fn compare_swap(&self, offset: usize, compare: u64, swap: u64) -> Option<u64> {
        let a = self.atomic(offset)?;
        Some(a.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst).unwrap_or_else(|v| v))
    }

    /// Atomically adds `add` to the aligned 8 bytes at `offset` (host byte order, wrapping). Returns the value before,
    /// or `None` when the place is outside or not aligned.
    #[must_use]
    pub fn fetch_add(&self, offset: usize, add: u64) -> Option<u64> {
        Some(self.atomic(offset)?.fetch_add(add, Ordering::SeqCst))
    }

    /// Puts the 8 bytes at `offset` at once: no thread sees a part of them. `None` when the place is outside or not
    /// aligned.
    #[must_use]
    pub fn write_atomic(&self, offset: usize, bytes: [u8; 8]) -> Option<()> {
        self.atomic(offset)?.store(u64::from_ne_bytes(bytes), Ordering::SeqCst);
        Some(())
    }

    /// Whether what is written can outlive the process: the region is a mapped file.
    #[must_use]
    pub fn is_persistent(&self) -> bool {
        matches!(self.0.backing, Backing::File(_))
    }

    /// Waits until the file below the region has `len` bytes from `offset` on, on its device.
    ///
    /// # Errors
    /// [`RegionError::OutOfBounds`]; [`RegionError::NotStored`] when there is no file, or the system says no.
    pub fn persist(&self, offset: usize, len: usize) -> Result<(), RegionError> {
        self.at(offset, len)?;
        let Backing::File(map) = &self.0.backing else { return Err(RegionError::NotStored) };
        if len == 0 {
            return Ok(());
        }
        map.flush_range(offset, len).map_err(|_| RegionError::NotStored)
    }

    /// The whole content, for tests and tools.
    #[must_use]
    pub fn to_vec(&self) -> Vec<u8> {
        let mut out = vec![0; self.len()];
        // The length is the region's own, so the copy is in bounds.
        let _ = self.read(0, &mut out);
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_stay_inside() {
        let r = Region::alloc(16).unwrap();
        r.write(4, b"abcd").unwrap();
        let mut b = [0; 4];
        r.read(4, &mut b).unwrap();
        assert_eq!(&b, b"abcd");
        b = [0; 4];
        assert_eq!(r.read_crc(4, &mut b, 7), Ok(copy::crc(7, b"abcd")));
        assert_eq!(&b, b"abcd");
        assert!(r.read_crc(13, &mut b, 0).is_err());
        assert!(r.write(13, b"abcd").is_err());
        assert!(r.read(usize::MAX, &mut b).is_err());
        r.write(16, b"").unwrap();
        assert!(r.write(17, b"").is_err());
        assert_eq!(&r.to_vec()[..8], b"\0\0\0\0abcd");
    }

    #[test]
    fn atomics_need_alignment_and_room() {
        let r = Region::alloc(16).unwrap();
        assert_eq!(r.fetch_add(8, 5), Some(0));
        assert_eq!(r.compare_swap(8, 5, 9), Some(5));
        assert_eq!(r.compare_swap(8, 5, 1), Some(9));
        assert_eq!(r.fetch_add(4, 1), None);
        assert_eq!(r.fetch_add(16, 1), None);
    }

    #[test]
    fn empty_region() {
        let r = Region::alloc(0).unwrap();
        assert!(r.is_empty());
        assert!(r.write(0, b"x").is_err());
    }
}
