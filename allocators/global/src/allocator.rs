//! The wrapper around the program's allocator.
#![expect(unsafe_code, reason = "implements `GlobalAlloc`")]

use crate::{account, route};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    ptr,
};

/// The program's allocator, counted, capped and routed.
///
/// It adds about 2 ns to an allocation and its free together, on any number of threads. A zero-sized type over the system's
/// allocator: the account and the routes are the process's.
///
/// ```
/// #[global_allocator]
/// static GLOBAL: aquifer_global::Global = aquifer_global::Global::new();
/// assert!(aquifer_global::is_installed());
/// ```
///
/// Over another allocator:
///
/// ```
/// use aquifer_global::Global;
/// use std::alloc::System; // or mimalloc's, or jemalloc's
/// #[global_allocator]
/// static GLOBAL: Global<System> = Global::over(System);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct Global<A = System> {
    inner: A,
}

impl Global {
    /// Wraps the system's allocator.
    #[must_use]
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl<A> Global<A> {
    /// Wraps `inner`.
    pub const fn over(inner: A) -> Self {
        Self { inner }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }
}

impl<A: GlobalAlloc> Global<A> {
    /// Asks the allocator below, by `ask`, and keeps the account.
    #[inline]
    fn allocate(&self, layout: Layout, ask: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        if !account::charge(layout.size()) {
            return ptr::null_mut();
        }
        let block = ask(&self.inner);
        if block.is_null() {
            account::refund(layout.size());
            return block;
        }
        account::note(layout.size(), 1);
        block
    }

    /// Gives a block back to the allocator below, and keeps the account.
    ///
    /// # Safety
    /// The block is `inner`'s, of this layout, and is not used any more.
    #[inline]
    unsafe fn release(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.dealloc(block, layout) };
        // Afterwards: bytes are charged until they are really free.
        account::freed(layout.size());
    }

    /// Resizes a block that stays with the allocator below.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::realloc`], with a block of `inner`'s.
    #[inline]
    unsafe fn resize(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let growth = new_size.saturating_sub(layout.size());
        if growth > 0 && !account::charge_growth(growth) {
            return ptr::null_mut();
        }
        // SAFETY: the caller's promise.
        let moved = unsafe { self.inner.realloc(block, layout, new_size) };
        if moved.is_null() {
            account::release(growth);
            return moved;
        }
        account::release(layout.size().saturating_sub(new_size));
        if growth > 0 {
            account::note(growth, 0);
        }
        moved
    }
}

// SAFETY: 1. Every block is one of `inner`, or of a route, which promises as much; each goes back where it came from,
// since a route tells its blocks by their address and `inner`'s are in none. 2. Nothing here unwinds: there is no
// indexing, arithmetic or call that could, `inner` and routes promise not to, and the thread-locals have no destructor
// that could have run. 3. A refusal leaves the block of `realloc` as it is.
unsafe impl<A: GlobalAlloc> GlobalAlloc for Global<A> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if let Some(block) = route::allocate(layout) {
            return block.as_ptr();
        }
        // SAFETY: the caller's promise: the layout has a size.
        self.allocate(layout, |inner| unsafe { inner.alloc(layout) })
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if let Some(block) = route::allocate_zeroed(layout) {
            return block.as_ptr();
        }
        // SAFETY: the caller's promise: the layout has a size.
        self.allocate(layout, |inner| unsafe { inner.alloc_zeroed(layout) })
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise, if the block is a route's.
        if unsafe { route::deallocate(block, layout) } {
            return;
        }
        // SAFETY: the caller's promise; the block is no route's, so it is `inner`'s.
        unsafe { self.release(block, layout) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: the caller's promise, if the block is a route's.
        match unsafe { route::reallocate(block, layout, new_size) } {
            route::Reallocation::Plain => {}
            route::Reallocation::Done(moved) => return moved.as_ptr(),
            route::Reallocation::Leave { new } => {
                // The route has no more: the block moves to the allocator below.
                // SAFETY: `new` is the layout with the new size, which has one.
                let moved = self.allocate(new, |inner| unsafe { inner.alloc(new) });
                if !moved.is_null() {
                    // SAFETY: 1. Both blocks are live and have that many bytes. 2. They do not overlap.
                    unsafe { ptr::copy_nonoverlapping(block, moved, layout.size().min(new_size)) };
                    // SAFETY: the block is a route's, and the caller hands it over.
                    unsafe { route::deallocate(block, layout) };
                }
                return moved;
            }
            route::Reallocation::Enter { moved } => {
                // The block has grown into a route's part.
                // SAFETY: 1. Both blocks are live and have that many bytes. 2. They do not overlap.
                unsafe { ptr::copy_nonoverlapping(block, moved.as_ptr(), layout.size().min(new_size)) };
                // SAFETY: the block is no route's, and the caller hands it over.
                unsafe { self.release(block, layout) };
                return moved.as_ptr();
            }
        }
        // SAFETY: the caller's promise; the block is no route's, so it is `inner`'s.
        unsafe { self.resize(block, layout, new_size) }
    }
}
