//! A block that other streams use takes nothing from the host's heap, once as many have been used at once before.
#![expect(unsafe_code, reason = "counts what an allocator is asked for")]

mod support;

use aquifer_device::Request;
use aquifer_driver::{Access, sim::Sim};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};
use support::Rig;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: 1. the system's allocator does the work; counting touches a constant thread-local without a destructor.
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

/// What `round` asks of the heap when it has run a few times.
fn asked(mut round: impl FnMut()) -> u64 {
    (0..4).for_each(|_| round());
    let before = ASKED.get();
    (0..100).for_each(|_| round());
    ASKED.get() - before
}

#[test]
fn in_a_steady_state_blocks_that_other_streams_use_take_nothing_from_the_heap() {
    // Nobody watches who has which block.
    let sim = Sim::h200(1).symbolic();
    sim.oracle(false);
    let rig = Rig::on(sim, 64, |_| ());
    let (s, u) = (rig.stream(), rig.stream());
    let alloc = || rig.pool.alloc(&s, Request::bytes(4096)).unwrap();
    let alone = asked(|| drop(alloc()));
    // Each block is held back until the end of the round, and all go home together.
    let used = asked(|| {
        for _ in 0..8 {
            alloc().record_use(&u, Access::Read).unwrap();
        }
        // The driver's calls are its own affair.
        let before = ASKED.get();
        u.synchronize().unwrap();
        rig.pool.trim(u64::MAX).unwrap();
        assert_eq!(rig.pool.stats().pending, 0);
        ASKED.set(before);
    });
    assert_eq!((alone, used), (0, 0));
}
