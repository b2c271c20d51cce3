//! A route over any allocator.
#![expect(unsafe_code, reason = "implements an unsafe trait over another")]

use super::Route;
use allocator_api2::alloc::Allocator;
use std::{
    alloc::Layout,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    ptr::NonNull,
};

/// A [`Route`] over an allocator whose blocks lie between two addresses where nobody else's do.
///
/// If a call of the allocator unwinds, that counts as a refusal; a free that unwinds is not done
/// again.
#[derive(Debug)]
pub struct Over<A> {
    inner: A,
    window: Range<usize>,
}

impl<A: Allocator + Sync> Over<A> {
    /// Lays a route over `inner`.
    ///
    /// # Safety
    /// 1. For as long as this route is used, all blocks of `inner` lie in `window`, and no block of
    ///    an allocator that takes its memory from elsewhere does. 2. `inner` may be called at any
    ///    time of a thread's life.
    pub const unsafe fn new(inner: A, window: Range<usize>) -> Self {
        Self { inner, window }
    }
}

impl<A> Over<A> {
    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }
}

/// Runs a call that promises nothing about unwinding.
fn contained<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => Some(answer),
        Err(payload) => {
            // Its drop could unwind in its turn.
            Box::leak(payload);
            None
        }
    }
}

// SAFETY: 1. Blocks are `inner`'s, asked for with the layout or a growth or shrinkage of it. 2. and
// 3. are the promise of `Over::new`. 4. Every call is contained. 5. `inner` is `Sync`, and
// `Over::new` has promised the rest.
unsafe impl<A: Allocator + Sync> Route for Over<A> {
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        contained(|| self.inner.allocate(layout))?.ok().map(NonNull::cast)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        contained(|| self.inner.allocate_zeroed(layout))?.ok().map(NonNull::cast)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: the caller's promise.
        contained(|| unsafe { self.inner.deallocate(block, layout) });
    }

    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        let resized = contained(|| {
            if new.size() >= old.size() {
                // SAFETY: the caller's promise; `new` is no smaller.
                unsafe { self.inner.grow(block, old, new) }
            } else {
                // SAFETY: the caller's promise; `new` is no larger.
                unsafe { self.inner.shrink(block, old, new) }
            }
        });
        resized?.ok().map(NonNull::cast)
    }

    fn owns(&self, block: NonNull<u8>) -> bool {
        self.window.contains(&block.addr().get())
    }

    fn window(&self) -> Range<usize> {
        self.window.clone()
    }
}
