//! Counts allocations from the host's heap, by thread: a global allocator, for the whole of each
//! program that has this module. Tests on other threads do not disturb the count.
//!
//! The tests of several crates include this file by its path, so it names no items of theirs.
#![allow(dead_code, unsafe_code, reason = "an allocator, of which each test binary uses some")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: 1. the system's allocator does the work; counting accesses a constant thread-local
// without a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: 1. guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: 1. guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new: usize) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: 1. guaranteed by the caller.
        unsafe { System.realloc(block, layout, new) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: 1. guaranteed by the caller.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns how often `round` allocates on this thread in a hundred runs, after a few warm-up runs.
pub(crate) fn asked(mut round: impl FnMut()) -> u64 {
    (0..4).for_each(|_| round());
    let before = ASKED.get();
    (0..100).for_each(|_| round());
    ASKED.get() - before
}

/// Runs `work` without counting its allocations.
pub(crate) fn uncounted<R>(work: impl FnOnce() -> R) -> R {
    let before = ASKED.get();
    let result = work();
    ASKED.set(before);
    result
}
