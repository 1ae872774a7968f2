//! An allocator that counts the bytes that a thread holds.
#![allow(unsafe_code)] // An allocator cannot be written without.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

struct Counting;

fn note(more: usize, less: usize) {
    // A thread that is ending has no counter any more, and nothing to count.
    let _ = HELD.try_with(|held| held.set(held.get().wrapping_add_unsigned(more).wrapping_sub_unsigned(less)));
}

// SAFETY: every call goes to the system's allocator unchanged; counting touches no memory of the heap.
unsafe impl GlobalAlloc for Counting {
    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size(), 0);
        // SAFETY: the caller's contract is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        note(0, layout.size());
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }

    // SAFETY: the contract of `GlobalAlloc` is passed on whole.
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note(size, layout.size());
        // SAFETY: the pointer came from `System` with this layout.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes that this thread has allocated and not given back.
pub(crate) fn held() -> isize {
    HELD.with(Cell::get)
}
