//! Packet memory: one block in equal pieces, each its owner's alone.
//!
//! Owns where a piece begins. The bytes are no registered memory: nobody else reaches them, so they are plain slices.
#![allow(unsafe_code)] // Pieces of one block are told apart by their offsets, which the compiler cannot see.

#[cfg(target_arch = "x86_64")]
use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
use core::ops::{Deref, DerefMut};
use core::ptr::NonNull;
use std::alloc::{Layout, handle_alloc_error};
use std::sync::Arc;

use super::REGION_ALIGN;
use super::huge::Block;

/// Where a piece begins in its page. Copies between buffers whose page offsets differ by less than 32 bytes are 20 times
/// slower on some processors, and regions usually start at a page.
pub(crate) const PAGE_OFFSET: usize = 1024;

/// Bytes of a cache line.
#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;

/// Bytes that one owner has, zeroed at first. They may lie on huge pages (see [`super::prefer_huge_pages`]); pages that are
/// never written to cost nothing otherwise.
pub(crate) struct Piece {
    start: NonNull<u8>,
    len: usize,
    /// Keeps the memory.
    _block: Arc<Block>,
}

// SAFETY: a piece is the only way to its bytes, which are plain data.
unsafe impl Send for Piece {}
// SAFETY: a shared piece gives out shared slices only.
unsafe impl Sync for Piece {}

impl Piece {
    /// `count` pieces of `len` bytes.
    pub(crate) fn many(count: usize, len: usize) -> Vec<Self> {
        let stride = (PAGE_OFFSET + len).next_multiple_of(REGION_ALIGN);
        let block = Arc::new(block(stride.saturating_mul(count)));
        let piece = |i: usize| {
            // SAFETY: the block has `count` times `stride` bytes, and a piece with its offset is at most `stride` long.
            let start = unsafe { block.start.add(i * stride + PAGE_OFFSET) };
            Self { start, len, _block: Arc::clone(&block) }
        };
        (0..count).map(piece).collect()
    }

    /// One piece of `len` bytes.
    pub(crate) fn one(len: usize) -> Self {
        let block = block(PAGE_OFFSET + len);
        // SAFETY: the block is longer than the offset.
        let start = unsafe { block.start.add(PAGE_OFFSET) };
        Self { start, len, _block: Arc::new(block) }
    }

    /// Asks for the first `len` bytes, which another processor may have: whoever reads them soon waits less. A hint.
    #[inline]
    pub(crate) fn ask_for(&self, len: usize) {
        #[cfg(target_arch = "x86_64")]
        for line in (0..len.min(self.len)).step_by(LINE) {
            // SAFETY: a hint, inside the piece, which touches neither memory nor registers.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(self.start.as_ptr().add(line).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = len;
    }

    /// `len` bytes from a page boundary on.
    pub(crate) fn whole(len: usize) -> Self {
        let block = block(len);
        Self { start: block.start, len, _block: Arc::new(block) }
    }
}

/// As the standard library's buffers: without memory the program ends.
fn block(len: usize) -> Block {
    match Block::lazy(len) {
        Some(block) => block,
        None => handle_alloc_error(Layout::from_size_align(len, REGION_ALIGN).unwrap_or(Layout::new::<u8>())),
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` and `len` are inside the block, which lives as long as `self`; no other piece has these bytes.
        unsafe { core::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Piece {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed for writing.
        unsafe { core::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl core::fmt::Debug for Piece {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Piece").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_begin_where_copies_like_it_and_do_not_meet() {
        for len in [1, 3072, 3073, 65_535] {
            let mut pieces = Piece::many(5, len);
            for (piece, fill) in pieces.iter_mut().zip(1..) {
                assert_eq!((piece.len(), piece.as_ptr().addr() % REGION_ALIGN), (len, PAGE_OFFSET));
                assert!(piece.iter().all(|b| *b == 0));
                piece.fill(fill);
            }
            assert!(pieces.iter().zip(1..).all(|(piece, fill)| piece.iter().all(|b| *b == fill)));
        }
        assert_eq!(Piece::many(0, 9).len(), 0);
    }

    #[test]
    fn a_piece_outlives_its_siblings() {
        let mut last = Piece::many(3, 100).pop().unwrap();
        last.fill(7);
        let moved = std::thread::spawn(move || last.iter().all(|b| *b == 7)).join();
        assert!(moved.unwrap());
        assert_eq!(Piece::one(70_000).as_ptr().addr() % REGION_ALIGN, PAGE_OFFSET);
        assert_eq!(Piece::whole(70_000).as_ptr().addr() % REGION_ALIGN, 0);
    }
}
