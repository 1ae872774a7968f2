//! The memory that frames lie in, in chunks, shared with the kernel.
//!
//! Owns a map and gives out slices of it. A map of its own, not a piece of the heap: the kernel may hold on to the pages for
//! a while after the socket is closed, and nobody else shall find them. Never knows which chunks are whose: the socket
//! keeps that, and gives out only what the kernel has let go of.
#![allow(unsafe_code)] // Memory that the kernel reads and writes.

use core::ptr::NonNull;
use std::io;

use memmap2::{MmapMut, MmapOptions};

use crate::raw::Pages;

/// Bytes of a chunk: the most that the kernel takes on normal pages.
pub(super) const CHUNK: usize = 4096;
/// Bytes of a huge page, and their logarithm.
const HUGE_PAGE: usize = 1 << HUGE_PAGE_BITS;
const HUGE_PAGE_BITS: u8 = 21;

/// See the module.
pub(super) struct Umem {
    /// Keeps the bytes; reached through `start` alone.
    _map: MmapMut,
    start: NonNull<u8>,
    len: usize,
    pages: Pages,
}

// SAFETY: the memory is the value's own, whichever thread has it.
unsafe impl Send for Umem {}

impl Umem {
    /// `chunks` of them, on huge pages where enough are reserved.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn new(chunks: usize) -> io::Result<Self> {
        let len = chunks * CHUNK;
        let huge = MmapOptions::new().len(len.next_multiple_of(HUGE_PAGE)).huge(Some(HUGE_PAGE_BITS)).map_anon();
        let (mut map, pages) = match huge {
            Ok(map) => (map, Pages::Huge),
            Err(_) => (MmapOptions::new().len(len).populate().map_anon()?, Pages::Normal),
        };
        let start = NonNull::new(map.as_mut_ptr()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { _map: map, start, len, pages })
    }

    pub(super) fn address(&self) -> u64 {
        self.start.as_ptr().expose_provenance() as u64
    }

    pub(super) const fn len(&self) -> usize {
        self.len
    }

    pub(super) const fn pages(&self) -> Pages {
        self.pages
    }

    /// Bytes that the kernel does not write now.
    ///
    /// # Safety
    /// The kernel gave these bytes back and has not got them again.
    pub(super) unsafe fn get(&self, at: usize, len: usize) -> Option<&[u8]> {
        if at.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: inside the map, which lives as long as `self` and is zeroed or written; the caller answers for the kernel,
        // and `get_mut` wants `self` for itself.
        Some(unsafe { core::slice::from_raw_parts(self.start.as_ptr().add(at), len) })
    }

    /// Bytes that the kernel does not look at now.
    ///
    /// # Safety
    /// As for [`Self::get`].
    pub(super) unsafe fn get_mut(&mut self, at: usize, len: usize) -> Option<&mut [u8]> {
        if at.checked_add(len)? > self.len {
            return None;
        }
        // SAFETY: as above, and borrowed for writing.
        Some(unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr().add(at), len) })
    }
}
