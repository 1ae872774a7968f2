//! Regions over a mapped file.
#![allow(unsafe_code)] // Mapping a file is unsafe by nature: another process may change or truncate it.

use core::ptr::NonNull;
use std::fs::File;
use std::sync::Arc;

use memmap2::{MmapMut, MmapOptions};

use super::{Backing, Inner, Region};

impl Region {
    /// A region over the first `len` bytes of `file`, shared with everyone who maps it: what a peer writes is in the
    /// file. The file must be open for reading and writing, and at least `len` bytes long.
    ///
    /// # Safety
    /// The file must not become shorter than `len` while the region lives, by anyone: touching a page beyond the end
    /// of a mapped file raises SIGBUS, which ends the process.
    ///
    /// # Errors
    /// The system's: not permitted, no memory. A file shorter than `len` is `InvalidInput`.
    pub unsafe fn map_file(file: &File, len: usize) -> std::io::Result<Self> {
        if file.metadata()?.len() < len as u64 {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "the file is shorter than the region; extend it first",
            ));
        }
        // SAFETY: the caller promises that the file stays as long as the map; changes by others are what a region
        // allows, as its bytes are never seen through references.
        let map = unsafe { MmapOptions::new().len(len).map_mut(file) }?;
        Ok(over(map, Backing::File))
    }

    /// A region over anonymous memory of its own, page aligned and given back to the system when dropped. Unlike
    /// [`Region::alloc`] it takes no memory until it is touched, whatever the allocator does with large blocks.
    ///
    /// # Errors
    /// The system's.
    pub fn map_anonymous(len: usize) -> std::io::Result<Self> {
        Ok(over(MmapMut::map_anon(len)?, |map| Backing::Owner { _owner: Box::new(map) }))
    }
}

/// The map moves into the region as its owner, and nobody else holds it; its address does not move with it.
fn over(mut map: MmapMut, backing: impl FnOnce(MmapMut) -> Backing) -> Region {
    let (start, len) = (map.as_mut_ptr(), map.len());
    // A map is never at address 0.
    let start = NonNull::new(start).unwrap_or(NonNull::dangling());
    Region(Arc::new(Inner { start, len, backing: backing(map) }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read as _, Seek as _, SeekFrom};

    #[test]
    fn what_is_written_is_in_the_file() {
        let mut file = tempfile::tempfile().unwrap();
        file.set_len(10_000).unwrap();
        // SAFETY: nobody else knows the file.
        let region = unsafe { Region::map_file(&file, 10_000) }.unwrap();
        region.write(9_000, b"through the map").unwrap();
        let mut text = [0; 15];
        file.seek(SeekFrom::Start(9_000)).unwrap();
        file.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"through the map");
        // SAFETY: as above; it is refused.
        let refused = unsafe { Region::map_file(&file, 10_001) };
        assert_eq!(refused.unwrap_err().kind(), std::io::ErrorKind::InvalidInput);
    }

    #[test]
    fn anonymous_memory_is_zero_and_page_aligned() {
        let region = Region::map_anonymous(5000).unwrap();
        assert_eq!(region.host_address() % 4096, 0);
        assert!(region.to_vec().iter().all(|b| *b == 0));
        assert!(Region::map_anonymous(0).unwrap().is_empty());
    }
}
