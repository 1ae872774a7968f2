//! A capture file mapped into memory. The one place of this crate that needs `unsafe`.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

use memmap2::Mmap;

/// A read-only map of a whole file.
///
/// If another process truncates the file while the map lives, reading it raises SIGBUS. The captures are files of the
/// source tree that nothing writes to, and the map lives only while one capture is being read.
pub(crate) fn map(path: &Path) -> io::Result<Mmap> {
    let file = File::open(path)?;
    // SAFETY: the map is read-only and private to this crate, which drops it before `Fixture::frames` returns. The file
    // belongs to the source tree and is not written to while tests run, so the bytes behind the `&[u8]` do not change.
    unsafe { Mmap::map(&file) }
}
