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

/// A [`Route`] over an allocator whose blocks lie in an address range without foreign blocks.
///
/// If a call of the allocator unwinds, that counts as a refusal. A free that unwinds is not
/// repeated.
#[derive(Debug)]
pub struct Over<A> {
    inner: A,
    window: Range<usize>,
}

impl<A: Allocator + Sync> Over<A> {
    /// Creates a route over `inner`.
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
    /// Returns the wrapped allocator.
    pub const fn inner(&self) -> &A {
        &self.inner
    }
}

/// Runs a call that may unwind.
fn catch<R>(call: impl FnOnce() -> R) -> Option<R> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(answer) => Some(answer),
        Err(payload) => {
            // The drop of the payload could unwind too.
            Box::leak(payload);
            None
        }
    }
}

// SAFETY: 1. Blocks belong to `inner`, and were allocated with the layout or grown or shrunk to it.
// 2. and 3. are guaranteed by the caller of `Over::new`. 4. Every call catches unwinding. 5.
// `inner` is `Sync`, and the caller of `Over::new` guarantees the rest.
unsafe impl<A: Allocator + Sync> Route for Over<A> {
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        catch(|| self.inner.allocate(layout))?.ok().map(NonNull::cast)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        catch(|| self.inner.allocate_zeroed(layout))?.ok().map(NonNull::cast)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        catch(|| unsafe { self.inner.deallocate(block, layout) });
    }

    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        let resized = catch(|| {
            if new.size() >= old.size() {
                // SAFETY: guaranteed by the caller, and `new` is not smaller.
                unsafe { self.inner.grow(block, old, new) }
            } else {
                // SAFETY: guaranteed by the caller, and `new` is not larger.
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
