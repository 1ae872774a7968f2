//! Blocks of memory on huge pages, where the system has some to give, and on normal ones elsewhere.
//!
//! Owns whether large blocks ask for huge pages, and what came of it: both are of the process, as its memory is.
#![allow(unsafe_code)] // Both allocators are unsafe to call.

use core::ptr::NonNull;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::sync::Arc;

use super::{Backing, Inner, REGION_ALIGN, Region, RegionError};

/// Shorter blocks stay on normal pages when the process prefers huge ones: each would take a whole one, usually 2 MiB.
pub const HUGE_MIN: usize = 1 << 20;

static PREFERRED: AtomicBool = AtomicBool::new(false);
static HUGE: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// What a region came to lie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages.
    Huge,
    /// Normal pages: none of the other kind is reserved (`vm.nr_hugepages`), or the build has not the feature
    /// `hugepages`. Worth a line in a log.
    Normal,
}

/// What became of the wish for huge pages, in bytes of all the blocks that were made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageUse {
    /// On huge pages.
    pub huge: u64,
    /// On normal pages though huge ones were asked for.
    pub refused: u64,
}

/// From now on regions of [`Region::alloc`] and the packet pools of devices ask for huge pages first, if they have
/// [`HUGE_MIN`] bytes at least. For the beginning of a program: blocks that exist stay where they are.
pub fn prefer_huge_pages() {
    PREFERRED.store(true, Ordering::Relaxed);
}

/// What came of it so far.
#[must_use]
pub fn page_use() -> PageUse {
    PageUse { huge: HUGE.load(Ordering::Relaxed), refused: REFUSED.load(Ordering::Relaxed) }
}

impl Region {
    /// Allocates `len` zeroed bytes on huge pages if there are enough, else on normal ones; says which.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`].
    pub fn alloc_huge(len: usize) -> Result<(Self, Pages), RegionError> {
        let block = Block::asking(len).ok_or(RegionError::OutOfMemory { len })?;
        let pages = block.pages;
        Ok((Self::over(block, len), pages))
    }

    pub(super) fn over(block: Block, len: usize) -> Self {
        Self(Arc::new(Inner { start: block.start, len, backing: Backing::Block { _block: block } }))
    }
}

/// Zeroed bytes from a page boundary on, given back when dropped.
pub(super) struct Block {
    pub(super) start: NonNull<u8>,
    /// What the allocator gave.
    base: NonNull<u8>,
    layout: Layout,
    pages: Pages,
}

// SAFETY: a block is an address that is freed once, by whoever drops it; what may be done with the bytes is up to its users.
unsafe impl Send for Block {}
// SAFETY: as above: nothing is reached through a shared block.
unsafe impl Sync for Block {}

impl Block {
    /// `len` bytes as the process prefers them; `None`: out of memory.
    pub(super) fn new(len: usize) -> Option<Self> {
        if len >= HUGE_MIN && PREFERRED.load(Ordering::Relaxed) { Self::asking(len) } else { Self::normal(len) }
    }

    /// The same for packets: normal pages take no memory before they are written to.
    pub(super) fn lazy(len: usize) -> Option<Self> {
        if len >= HUGE_MIN && PREFERRED.load(Ordering::Relaxed) {
            return Self::asking(len);
        }
        // Zeroed memory with a large alignment is written to by the allocator, other such memory is not.
        let layout = Layout::from_size_align(len.checked_add(REGION_ALIGN)?, align_of::<u64>()).ok()?;
        // SAFETY: the layout's size is not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        // SAFETY: the block is a page longer than is asked for.
        let start = unsafe { base.add(base.addr().get().wrapping_neg() % REGION_ALIGN) };
        Some(Self { start, base, layout, pages: Pages::Normal })
    }

    /// `len` bytes on huge pages if there are enough.
    fn asking(len: usize) -> Option<Self> {
        let layout = layout(len)?;
        let Some(start) = on_huge_pages(layout) else {
            REFUSED.fetch_add(layout.size() as u64, Ordering::Relaxed);
            return Self::normal(len);
        };
        // The system zeroes fresh pages, but the allocator does not promise it.
        // SAFETY: so many bytes were just allocated here.
        unsafe { core::ptr::write_bytes(start.as_ptr(), 0, layout.size()) };
        HUGE.fetch_add(layout.size() as u64, Ordering::Relaxed);
        Some(Self { start, base: start, layout, pages: Pages::Huge })
    }

    fn normal(len: usize) -> Option<Self> {
        let layout = layout(len)?;
        // SAFETY: the layout's size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { start, base: start, layout, pages: Pages::Normal })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.pages == Pages::Huge {
            return give_back(self.base, self.layout);
        }
        // SAFETY: `base` came from `alloc_zeroed` with this layout and is freed once, here.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

fn layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.max(1), REGION_ALIGN).ok()
}

#[cfg(not(feature = "hugepages"))]
fn on_huge_pages(_layout: Layout) -> Option<NonNull<u8>> {
    None
}

#[cfg(not(feature = "hugepages"))]
fn give_back(_start: NonNull<u8>, _layout: Layout) {}

#[cfg(feature = "hugepages")]
fn on_huge_pages(layout: Layout) -> Option<NonNull<u8>> {
    use std::sync::OnceLock;

    /// Whether the system knows huge pages at all: the allocator panics where it does not.
    static KNOWN: OnceLock<bool> = OnceLock::new();
    let known = || std::fs::read_to_string("/proc/meminfo").is_ok_and(|facts| has_huge_pages(&facts));
    if !KNOWN.get_or_init(known) {
        return None;
    }
    // SAFETY: the layout's size is not zero.
    NonNull::new(unsafe { hugepage_rs::alloc(layout) })
}

#[cfg(feature = "hugepages")]
fn has_huge_pages(facts: &str) -> bool {
    let size = facts.lines().find_map(|l| l.strip_prefix("Hugepagesize:")).and_then(|l| l.trim().strip_suffix(" kB"));
    size.is_some_and(|kilobytes| kilobytes.trim().parse::<usize>().is_ok_and(|kb| kb > 0 && kb < 1 << 30))
}

#[cfg(feature = "hugepages")]
fn give_back(start: NonNull<u8>, layout: Layout) {
    // SAFETY: `start` came from `on_huge_pages` with this layout, and a block is given back once.
    unsafe { hugepage_rs::dealloc(start.as_ptr(), layout) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reserved() -> usize {
        let facts = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = facts.lines().find_map(|l| l.strip_prefix("HugePages_Free:")).unwrap_or("0");
        line.trim().parse().unwrap()
    }

    #[test]
    fn falls_back_to_normal_pages_and_says_so() {
        let (region, pages) = Region::alloc_huge(4096).unwrap();
        region.write(4000, b"works either way").unwrap();
        assert!(region.to_vec()[..4000].iter().all(|b| *b == 0));
        if cfg!(not(feature = "hugepages")) || reserved() == 0 {
            assert_eq!(pages, Pages::Normal);
        }
        let grown = page_use();
        match pages {
            Pages::Huge => assert!(grown.huge >= 4096),
            Pages::Normal => assert!(grown.refused >= 4096),
        }
    }

    #[test]
    fn blocks_are_zero_and_begin_with_a_page() {
        for block in [Block::new(5000).unwrap(), Block::lazy(5000).unwrap(), Block::asking(5000).unwrap()] {
            assert_eq!(block.start.addr().get() % REGION_ALIGN, 0);
            let region = Region::over(block, 5000);
            assert!(region.to_vec().iter().all(|b| *b == 0));
        }
        assert!(Block::new(usize::MAX).is_none());
        assert!(Block::asking(usize::MAX).is_none() && Block::lazy(usize::MAX).is_none());
    }

    #[cfg(feature = "hugepages")]
    #[test]
    fn a_system_without_huge_pages_is_not_asked() {
        assert!(has_huge_pages("MemTotal: 1 kB\nHugepagesize:       2048 kB\n"));
        for facts in ["", "MemTotal: 1 kB", "Hugepagesize:", "Hugepagesize: 0 kB", "Hugepagesize: x kB"] {
            assert!(!has_huge_pages(facts), "{facts}");
        }
    }
}
