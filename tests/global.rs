//! Tests of the program's global allocator with the conformance suite: each accounting mode, in
//! plain memory, in scopes of tags, and in a route to pinned memory, where growing and shrinking
//! move blocks between the two allocators.
//!
//! The test forms a separate process because its global allocator counts by tag, unlike that of
//! `staging`, and because it installs a staging allocator.

mod support;

use allocator_api2::alloc::Global as Installed;
use aquifer::{
    Global, Tag,
    conformance::Suite,
    global::{Counted, Tracked, Uncounted},
    impl_allocator,
    sim::Sim,
    staging, tagged,
};
use std::{
    alloc::{GlobalAlloc, System},
    ptr::NonNull,
    thread,
};
use support::runtime;

#[global_allocator]
static GLOBAL: Global<System, Tracked> = Global::new();

static UNCOUNTED: Global<System, Uncounted> = Global::new();
static COUNTED: Global<System, Counted> = Global::new();

/// Adapts a global allocator to the `Allocator` trait.
#[derive(Debug)]
struct By<A: 'static>(&'static A);

impl<A> Clone for By<A> {
    fn clone(&self) -> Self {
        Self(self.0)
    }
}

impl<A: GlobalAlloc> By<A> {
    /// Allocates a nonempty block.
    fn ask(layout: std::alloc::Layout, ask: impl FnOnce() -> *mut u8) -> Option<NonNull<[u8]>> {
        if layout.size() == 0 {
            let nowhere = NonNull::without_provenance(layout.align().try_into().ok()?);
            return Some(NonNull::slice_from_raw_parts(nowhere, 0));
        }
        Some(NonNull::slice_from_raw_parts(NonNull::new(ask())?, layout.size()))
    }
}

#[expect(unsafe_code, reason = "calls a global allocator by hand")]
mod by {
    use super::*;
    use std::alloc::Layout as Shape;

    impl<A: GlobalAlloc> By<A> {
        /// Resizes a block if the alignment stays, and moves it otherwise.
        ///
        /// # Safety
        /// As for an allocator's `grow`, or `shrink`.
        unsafe fn resize(
            &self,
            block: NonNull<u8>,
            old: Shape,
            new: Shape,
        ) -> Option<NonNull<[u8]>> {
            if old.align() == new.align() && old.size() > 0 && new.size() > 0 {
                // SAFETY: guaranteed by the caller; the block is not empty before or after.
                return Self::ask(new, || unsafe {
                    self.0.realloc(block.as_ptr(), old, new.size())
                });
            }
            // SAFETY: called only where the layout has a size.
            let moved = Self::ask(new, || unsafe { self.0.alloc(new) })?;
            // SAFETY: 1. both are live and have this many bytes. 2. They do not overlap.
            unsafe {
                moved.cast::<u8>().copy_from_nonoverlapping(block, old.size().min(new.size()));
            };
            if old.size() > 0 {
                // SAFETY: the caller passes ownership.
                unsafe { self.0.dealloc(block.as_ptr(), old) };
            }
            Some(moved)
        }
    }

    impl_allocator! {
        // SAFETY: blocks are the global allocator's, each freed with its layout, since sizes are
        // exact.
        unsafe impl [A: GlobalAlloc] for By<A> {
            fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: called only where the layout has a size.
                Self::ask(layout, || unsafe { self.0.alloc(layout) }).ok_or(AllocError)
            }

            fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: called only where the layout has a size.
                Self::ask(layout, || unsafe { self.0.alloc_zeroed(layout) }).ok_or(AllocError)
            }

            unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
                if layout.size() > 0 {
                    // SAFETY: guaranteed by the caller.
                    unsafe { self.0.dealloc(block.as_ptr(), layout) };
                }
            }

            unsafe fn grow(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: guaranteed by the caller.
                unsafe { self.resize(block, old, new) }.ok_or(AllocError)
            }

            unsafe fn shrink(
                &self,
                block: NonNull<u8>,
                old: Layout,
                new: Layout,
            ) -> Result<NonNull<[u8]>, AllocError> {
                // SAFETY: guaranteed by the caller.
                unsafe { self.resize(block, old, new) }.ok_or(AllocError)
            }
        }
    }
}

/// Returns a suite with some blocks larger than the minimum of a route, so that they move between
/// it and the process's own memory.
fn suite() -> Suite {
    Suite::new().operations(300).largest(3 * staging::ROUTE_FROM)
}

/// Runs the suite over the installed allocator, and over each with another accounting mode.
fn all_conform(what: &str) {
    for seed in 0..2 {
        let suite = suite().seed(seed);
        assert_eq!(suite.check_clone(&Installed), Ok(()), "installed, {what}");
        assert_eq!(suite.check_clone(&By(&GLOBAL)), Ok(()), "tracked, {what}");
        assert_eq!(suite.check_clone(&By(&COUNTED)), Ok(()), "counted, {what}");
        assert_eq!(suite.check_clone(&By(&UNCOUNTED)), Ok(()), "uncounted, {what}");
    }
}

#[test]
fn each_mode_keeps_the_allocator_contract_inside_and_outside_of_scopes_and_routes() {
    all_conform("in no scope");
    tagged(Tag::named("suite"), || all_conform("under a tag"));

    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    staging::install(rt.pinned_near(0).clone()).unwrap();
    let (pool, before) = (staging::installed().unwrap(), aquifer::global::stats());
    let held = pool.stats().memory.requested;
    staging::route(|| all_conform("in a route"));
    tagged(Tag::named("suite"), || staging::route(|| all_conform("in a route, under a tag")));
    let after = aquifer::global::stats();
    assert!(after.routed_allocations > before.routed_allocations + 100, "they were the pool's");
    assert_eq!(
        (pool.stats().memory.requested, pool.stats().refused_frees),
        (held, 0),
        "all of it went back"
    );
    assert_eq!(after.routed, before.routed);

    // A thread without these scopes can use blocks of a route like any others.
    let blocks =
        staging::route(|| (0..20u8).map(|n| vec![n; 2 * staging::ROUTE_FROM]).collect::<Vec<_>>());
    let sums = thread::spawn(move || {
        blocks.into_iter().zip(0u8..).all(|(b, n)| b.iter().all(|&x| x == n))
    });
    assert!(sums.join().unwrap());
    assert_eq!(pool.stats().memory.requested, held);
    assert!(sim.violations().is_empty());
}
