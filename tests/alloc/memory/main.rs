//! What strangers can make the connection manager hold: never more than its tables, whatever they send.
//!
//! Owns the allocator that counts the bytes a thread has, and the measuring.

#![allow(unsafe_code)] // An allocator cannot be written without.

mod flood;
mod records;
mod storm;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    /// Bytes that this thread has, and the most it had since the last measurement began.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

struct Measuring;

fn held(change: isize) {
    // A thread that is ending has no counter any more, and nothing to measure.
    let _ = HELD.try_with(|h| {
        let (now, most) = h.get();
        h.set((now + change, most.max(now + change)));
    });
}

fn bytes(layout: Layout) -> isize {
    isize::try_from(layout.size()).unwrap_or(isize::MAX)
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of the heap.
unsafe impl GlobalAlloc for Measuring {
    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        held(bytes(layout));
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        held(-bytes(layout));
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Measuring = Measuring;

/// The bytes that a thread came to hold since it was made.
struct Meter {
    before: isize,
}

impl Meter {
    fn start() -> Self {
        let before = HELD.with(|h| {
            let (now, _) = h.get();
            h.set((now, now));
            now
        });
        Self { before }
    }

    /// The most so far.
    fn most(&self) -> usize {
        usize::try_from(HELD.get().1 - self.before).unwrap_or(0)
    }

    /// Now.
    fn now(&self) -> usize {
        usize::try_from(HELD.get().0 - self.before).unwrap_or(0)
    }
}

#[test]
fn the_meter_sees_what_is_held() {
    let meter = Meter::start();
    let big = vec![1u8; 1 << 20];
    drop(vec![1u8; 1 << 19]);
    assert!((1 << 20..(1 << 20) + 4096).contains(&meter.now()));
    drop(big);
    assert!(meter.now() < 4096 && meter.most() >= (1 << 20) + (1 << 19));
}
