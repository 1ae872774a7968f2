//! The rings that an AF_XDP socket shares with the kernel.
//!
//! Owns the mapped memory, and the order in which entries and counters are read and written: an entry before the counter
//! that gives it away. One end is ours, the other the kernel's. Never knows what an entry means.
#![allow(unsafe_code)] // Memory that the kernel reads and writes.

use core::marker::PhantomData;
use core::ptr::NonNull;
use core::sync::atomic::{AtomicU32, Ordering};
use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

/// Where things stand in a ring's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Offset of the counter of entries written.
    pub(super) producer: usize,
    /// Offset of the counter of entries read.
    pub(super) consumer: usize,
    /// Offset of the flags.
    pub(super) flags: usize,
    /// Offset of the first entry.
    pub(super) entries: usize,
    /// Entries: a power of two.
    pub(super) size: u32,
}

/// Mapped memory.
struct Map {
    start: NonNull<u8>,
    len: usize,
}

impl Map {
    fn new(fd: BorrowedFd<'_>, offset: libc::off_t, len: usize) -> io::Result<Self> {
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: no address is asked for, so nothing that exists is replaced.
        let start = unsafe { libc::mmap(core::ptr::null_mut(), len, access, kind, fd.as_raw_fd(), offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }
}

impl Drop for Map {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, unmapped once, and whoever holds pointers into it owns it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

/// A ring of `T`, either end of it.
struct Ring<T> {
    map: Map,
    layout: Layout,
    /// Our counter.
    ours: u32,
    /// The kernel's counter, as last seen.
    theirs: u32,
    entries: PhantomData<T>,
}

// SAFETY: the memory is the ring's own, whichever thread has it; the kernel's end is reached through atomics alone.
unsafe impl<T: Send> Send for Ring<T> {}

impl<T: Copy> Ring<T> {
    fn new(fd: BorrowedFd<'_>, offset: libc::off_t, layout: Layout) -> io::Result<Self> {
        let entries = layout.entries + layout.size as usize * size_of::<T>();
        let counters = [layout.producer, layout.consumer, layout.flags].into_iter().max().unwrap_or(0) + 4;
        let aligned = [layout.producer, layout.consumer, layout.flags].iter().all(|at| at.is_multiple_of(4));
        if !layout.size.is_power_of_two() || !aligned || !layout.entries.is_multiple_of(align_of::<T>()) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let map = Map::new(fd, offset, entries.max(counters))?;
        Ok(Self { map, layout, ours: 0, theirs: 0, entries: PhantomData })
    }

    fn counter(&self, at: usize) -> &AtomicU32 {
        // SAFETY: `new` saw to it that each of the three offsets is inside the map and aligned (a map starts at a page); the
        // memory is only ever used as atomics, here and, in effect, in the kernel.
        unsafe { AtomicU32::from_ptr(self.map.start.as_ptr().add(at).cast()) }
    }

    fn entry(&self, counter: u32) -> *mut T {
        let at = (counter & (self.layout.size - 1)) as usize;
        // SAFETY: `at` is less than the number of entries, which `new` made the map large enough for.
        unsafe { self.map.start.as_ptr().add(self.layout.entries).cast::<T>().add(at) }
    }

    fn needs_wakeup(&self) -> bool {
        self.counter(self.layout.flags).load(Ordering::Relaxed) & libc::XDP_RING_NEED_WAKEUP != 0
    }
}

/// A ring that we write.
pub(super) struct Producer<T>(Ring<T>);

impl<T: Copy> Producer<T> {
    /// Maps it.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn new(fd: BorrowedFd<'_>, offset: libc::off_t, layout: Layout) -> io::Result<Self> {
        Ring::new(fd, offset, layout).map(Self)
    }

    /// Writes an entry, which the kernel does not see yet; says whether there was room.
    pub(super) fn push(&mut self, value: T) -> bool {
        let ring = &mut self.0;
        if ring.ours.wrapping_sub(ring.theirs) >= ring.layout.size {
            ring.theirs = ring.counter(ring.layout.consumer).load(Ordering::Acquire);
            if ring.ours.wrapping_sub(ring.theirs) >= ring.layout.size {
                return false;
            }
        }
        // SAFETY: the pointer is inside the map and aligned; the entry is ours, as the kernel has read what was there.
        unsafe { ring.entry(ring.ours).write(value) };
        ring.ours = ring.ours.wrapping_add(1);
        true
    }

    /// Lets the kernel see what was written.
    pub(super) fn publish(&mut self) {
        self.0.counter(self.0.layout.producer).store(self.0.ours, Ordering::Release);
    }

    /// Entries that the kernel has not read.
    pub(super) fn waiting(&self) -> u32 {
        self.0.ours.wrapping_sub(self.0.counter(self.0.layout.consumer).load(Ordering::Acquire))
    }

    /// Whether the kernel only looks when it is called.
    pub(super) fn needs_wakeup(&self) -> bool {
        self.0.needs_wakeup()
    }
}

/// A ring that we read.
pub(super) struct Consumer<T>(Ring<T>);

impl<T: Copy> Consumer<T> {
    /// Maps it.
    ///
    /// # Errors
    /// The system's answer.
    pub(super) fn new(fd: BorrowedFd<'_>, offset: libc::off_t, layout: Layout) -> io::Result<Self> {
        Ring::new(fd, offset, layout).map(Self)
    }

    /// The next entry. Its place stays ours until [`Self::release`].
    pub(super) fn pop(&mut self) -> Option<T> {
        let ring = &mut self.0;
        if ring.ours == ring.theirs {
            ring.theirs = ring.counter(ring.layout.producer).load(Ordering::Acquire);
            if ring.ours == ring.theirs {
                return None;
            }
        }
        // SAFETY: the pointer is inside the map and aligned; the kernel wrote the entry before the counter that was read.
        let value = unsafe { ring.entry(ring.ours).read() };
        ring.ours = ring.ours.wrapping_add(1);
        Some(value)
    }

    /// Gives the places of what was read back.
    pub(super) fn release(&mut self) {
        self.0.counter(self.0.layout.consumer).store(self.0.ours, Ordering::Release);
    }

    /// Whether an entry waits.
    pub(super) fn is_empty(&self) -> bool {
        self.0.ours == self.0.counter(self.0.layout.producer).load(Ordering::Acquire)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    const LAYOUT: Layout = Layout { producer: 0, consumer: 64, flags: 128, entries: 192, size: 4 };

    /// Both ends of one ring: a file stands for the kernel's memory.
    fn both() -> (Producer<u64>, Consumer<u64>) {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        (Producer::new(file.as_fd(), 0, LAYOUT).unwrap(), Consumer::new(file.as_fd(), 0, LAYOUT).unwrap())
    }

    #[test]
    fn what_is_pushed_is_popped_once_published() {
        let (mut p, mut c) = both();
        assert!(p.push(7));
        assert_eq!((c.pop(), c.is_empty()), (None, true));
        p.publish();
        assert_eq!((c.is_empty(), c.pop(), c.pop()), (false, Some(7), None));
        assert_eq!(p.waiting(), 1);
        c.release();
        assert_eq!(p.waiting(), 0);
    }

    #[test]
    fn a_full_ring_takes_no_more_until_places_come_back() {
        let (mut p, mut c) = both();
        for round in 0..10 {
            let pushed: Vec<u64> = (0..5).map(|i| round * 10 + i).take_while(|v| p.push(*v)).collect();
            assert_eq!(pushed.len(), 4);
            p.publish();
            let popped: Vec<u64> = std::iter::from_fn(|| c.pop()).collect();
            assert_eq!(popped, pushed);
            assert!(!p.push(99), "read, and not given back");
            c.release();
        }
    }

    #[test]
    fn counters_wrap() {
        let (mut p, mut c) = both();
        for end in [&mut p.0, &mut c.0] {
            (end.ours, end.theirs) = (u32::MAX - 1, u32::MAX - 1);
            end.counter(LAYOUT.producer).store(u32::MAX - 1, Ordering::Relaxed);
            end.counter(LAYOUT.consumer).store(u32::MAX - 1, Ordering::Relaxed);
        }
        for v in 0..4 {
            assert!(p.push(v));
        }
        assert!(!p.push(4));
        p.publish();
        assert_eq!(std::iter::from_fn(|| c.pop()).collect::<Vec<_>>(), [0, 1, 2, 3]);
        c.release();
        assert_eq!(p.waiting(), 0);
    }
}
