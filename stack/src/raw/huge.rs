//! Regions on huge pages, where the system has some to give.
#![cfg_attr(feature = "hugepages", allow(unsafe_code))] // The allocator below is unsafe to call.

use super::{Region, RegionError};

/// What a region came to lie on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pages {
    /// Huge pages.
    Huge,
    /// Normal pages: none of the other kind is reserved (`vm.nr_hugepages`), or the build has not the feature
    /// `hugepages`. Worth a line in a log.
    Normal,
}

impl Region {
    /// Allocates `len` zeroed bytes on huge pages if there are enough, else on normal ones; says which.
    ///
    /// # Errors
    /// [`RegionError::OutOfMemory`].
    pub fn alloc_huge(len: usize) -> Result<(Self, Pages), RegionError> {
        if let Some(region) = on_huge_pages(len) {
            return Ok((region, Pages::Huge));
        }
        Ok((Self::alloc(len)?, Pages::Normal))
    }
}

#[cfg(not(feature = "hugepages"))]
fn on_huge_pages(_len: usize) -> Option<Region> {
    None
}

#[cfg(feature = "hugepages")]
fn on_huge_pages(len: usize) -> Option<Region> {
    use core::ptr::NonNull;
    use std::alloc::Layout;

    /// Gives the pages back.
    struct Owner(NonNull<u8>, Layout);

    // SAFETY: the owner only frees; the address is not used through it otherwise.
    unsafe impl Send for Owner {}
    // SAFETY: as above.
    unsafe impl Sync for Owner {}

    impl Drop for Owner {
        fn drop(&mut self) {
            // SAFETY: allocated below with this layout, freed once.
            unsafe { hugepage_rs::dealloc(self.0.as_ptr(), self.1) }
        }
    }

    let layout = Layout::from_size_align(len, super::REGION_ALIGN).ok().filter(|l| l.size() > 0)?;
    // SAFETY: the layout's size is not zero.
    let start = NonNull::new(unsafe { hugepage_rs::alloc(layout) })?;
    // The system zeroes fresh pages, but the allocator does not promise it.
    // SAFETY: `len` bytes were just allocated here.
    unsafe { core::ptr::write_bytes(start.as_ptr(), 0, len) };
    // SAFETY: the owner keeps the pages until the region is dropped.
    Some(unsafe { Region::from_owner(start, len, Box::new(Owner(start, layout))) })
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
        let (region, _) = Region::alloc_huge(4096).unwrap();
        region.write(4000, b"works either way").unwrap();
        assert!(region.to_vec()[..4000].iter().all(|b| *b == 0));
        let pages = Region::alloc_huge(1 << 20).unwrap().1;
        if cfg!(not(feature = "hugepages")) || reserved() == 0 {
            assert_eq!(pages, Pages::Normal);
        } else {
            assert_eq!(pages, Pages::Huge);
        }
    }
}
