//! Counts what is asked of the host's heap, by thread.
//!
//! The tests of several crates take this file in by its path, so it names nothing of theirs.
#![allow(dead_code, reason = "each test binary uses some of it")]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: 1. the system's allocator does the work; counting touches a constant thread-local without
// a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.set(ASKED.get() + 1);
        // SAFETY: 1. the caller's promise.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: 1. the caller's promise.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What `round` asks of the heap on this thread in a hundred turns, when it has run a few times.
pub(crate) fn asked(mut round: impl FnMut()) -> u64 {
    (0..4).for_each(|_| round());
    let before = ASKED.get();
    (0..100).for_each(|_| round());
    ASKED.get() - before
}

/// Runs `work` without counting what it asks for.
pub(crate) fn uncounted<R>(work: impl FnOnce() -> R) -> R {
    let before = ASKED.get();
    let result = work();
    ASKED.set(before);
    result
}
