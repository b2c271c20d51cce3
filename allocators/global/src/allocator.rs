//! The wrapper around the program's allocator.
#![expect(unsafe_code, reason = "implements `GlobalAlloc`")]

use crate::{account, note, route};
use account::tags;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    marker::PhantomData,
    ptr,
};

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Uncounted {}
    impl Sealed for super::Counted {}
    impl Sealed for super::Tracked {}
}

/// How much a [`Global`] accounts for: [`Uncounted`], [`Counted`] or [`Tracked`].
pub trait Accounting: sealed::Sealed {
    /// Whether it counts, and respects the cap.
    #[doc(hidden)]
    const COUNTS: bool;
    /// Whether each block records its tag.
    #[doc(hidden)]
    const TRACKS: bool;
}

/// No accounting and no cap. Routes work.
///
/// See [`Global`] for an example. Use this as its parameter.
#[derive(Clone, Copy, Default, Debug)]
pub struct Uncounted;

/// Accounting for the process: totals, the peak, the cap, and allocated bytes by tag.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counted;

/// As [`Counted`], with four bytes behind each block that record its tag.
///
/// This makes available what each tag holds ([`held_under`](crate::held_under),
/// [`top`](crate::top)), and where held blocks were allocated (`sample_every`, with the feature
/// `stacks`).
#[derive(Clone, Copy, Default, Debug)]
pub struct Tracked;

impl Accounting for Uncounted {
    const COUNTS: bool = false;
    const TRACKS: bool = false;
}

impl Accounting for Counted {
    const COUNTS: bool = true;
    const TRACKS: bool = false;
}

impl Accounting for Tracked {
    const COUNTS: bool = true;
    const TRACKS: bool = true;
}

/// The program's allocator, with accounting, caps and routes.
///
/// It adds about 2 ns to an allocation together with its free, on any number of threads. It is a
/// zero-sized type over the system allocator: accounts and routes are global to the process.
///
/// ```
/// #[global_allocator]
/// static GLOBAL: aquifer_global::Global = aquifer_global::Global::new();
/// assert!(aquifer_global::is_installed());
/// ```
///
/// It can wrap another allocator. It can also record what each tag holds, which costs some
/// nanoseconds and four bytes for each block:
///
/// ```
/// use aquifer_global::{Global, Tracked};
/// use std::alloc::System; // or mimalloc's, or jemalloc's
/// #[global_allocator]
/// static GLOBAL: Global<System, Tracked> = Global::over(System);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct Global<A = System, K = Counted> {
    inner: A,
    keeps: PhantomData<K>,
}

impl<K: Accounting> Global<System, K> {
    /// Wraps the system allocator.
    #[must_use]
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl<A, K: Accounting> Global<A, K> {
    /// Bytes behind each block that belong to this allocator.
    const NOTE: usize = if K::TRACKS { note::BYTES } else { 0 };

    /// Wraps `inner`.
    pub const fn over(inner: A) -> Self {
        Self { inner, keeps: PhantomData }
    }

    /// Returns the wrapped allocator.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// Returns the layout to request from the underlying allocators, or `None` if no block can be
    /// that large.
    #[inline]
    fn whole(layout: Layout) -> Option<Layout> {
        if K::TRACKS { note::room_behind(layout) } else { Some(layout) }
    }
}

impl<A: GlobalAlloc, K: Accounting> Global<A, K> {
    /// Allocates a block, from the route through `routed` or from the wrapped allocator through
    /// `ask`.
    #[inline]
    fn fresh(
        &self,
        layout: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        ask: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        let Some(whole) = Self::whole(layout) else { return ptr::null_mut() };
        if !K::COUNTS {
            return self.fresh_of_either(whole, routed, ask);
        }
        if !K::TRACKS && account::charge_plainly(layout.size()) {
            // Outside all scopes there is no tag to count under.
            return self.allocate_charged(whole, |inner| ask(inner, whole));
        }
        if K::TRACKS && account::charge_unrouted(layout.size()) {
            let block = self.allocate_charged(whole, |inner| ask(inner, whole));
            // SAFETY: the block was allocated by the wrapped allocator with the layout `whole`.
            return unsafe { Self::noted(block, layout.size()) };
        }
        self.fresh_in_a_scope(whole, routed, ask)
    }

    /// Allocates a block in a scope, or on a thread whose change is used up. A separate function,
    /// so that the common path needs no registers for it.
    #[inline(never)]
    fn fresh_in_a_scope(
        &self,
        whole: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        ask: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        let bytes = whole.size() - Self::NOTE;
        let block = if !K::TRACKS && account::charge_unrouted(bytes) {
            self.allocate_charged(whole, |inner| ask(inner, whole))
        } else {
            self.fresh_of_either(whole, routed, ask)
        };
        // SAFETY: the block was allocated by the wrapped allocator or by a route, with the layout
        // `whole`.
        unsafe { Self::noted(block, bytes) }
    }

    #[inline]
    fn fresh_of_either(
        &self,
        whole: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        ask: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        match routed(whole) {
            Some(block) => block.as_ptr(),
            None => self.allocate(whole, |inner| ask(inner, whole)),
        }
    }

    /// Counts a new block, unless it is null, under its tag.
    ///
    /// # Safety
    /// It is null or new, and if blocks have a note, it was allocated with room for one behind
    /// `bytes` bytes.
    #[inline]
    unsafe fn noted(block: *mut u8, bytes: usize) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        if K::TRACKS {
            // SAFETY: guaranteed by the caller.
            unsafe { note::sign(block, bytes) };
        } else {
            tags::note(bytes, 1);
        }
        block
    }

    /// Allocates from the wrapped allocator through `ask`, and charges the account. From here on
    /// layouts include the note.
    #[inline]
    fn allocate(&self, layout: Layout, ask: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        let bytes = layout.size() - Self::NOTE;
        if K::COUNTS && !account::charge(bytes) {
            return ptr::null_mut();
        }
        self.allocate_charged(layout, ask)
    }

    /// Allocates a block that has already been charged.
    #[inline]
    fn allocate_charged(&self, layout: Layout, ask: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        let block = ask(&self.inner);
        if K::COUNTS && block.is_null() {
            account::refund(layout.size() - Self::NOTE);
        }
        block
    }

    /// Deallocates a block of the wrapped allocator, and credits the account.
    ///
    /// # Safety
    /// The block belongs to `inner`, has this layout, and is no longer used.
    #[inline]
    unsafe fn release(&self, block: *mut u8, layout: Layout) {
        if K::COUNTS && !account::frees_plainly(layout.size() - Self::NOTE) {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.release_and_return(block, layout) };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.dealloc(block, layout) };
    }

    /// Deallocates a block on a thread whose change would become too large.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    #[cold]
    #[inline(never)]
    unsafe fn release_and_return(&self, block: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.dealloc(block, layout) };
        // Credited after the free: bytes that other threads could charge must really be free.
        account::freed(layout.size() - Self::NOTE);
    }

    /// Resizes a block that stays in the wrapped allocator.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::realloc`], with a block of `inner`.
    #[inline]
    unsafe fn resize(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let growth = new_size.saturating_sub(layout.size());
        if K::COUNTS && growth > 0 && !account::charge_growth(growth) {
            return ptr::null_mut();
        }
        // SAFETY: guaranteed by the caller.
        let moved = unsafe { self.inner.realloc(block, layout, new_size) };
        if K::COUNTS {
            account::release(if moved.is_null() {
                growth
            } else {
                layout.size().saturating_sub(new_size)
            });
        }
        moved
    }

    /// Resizes a block of the wrapped allocator or of a route, and moves it between them if needed.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::realloc`], with a block of `inner` or of a route.
    #[inline]
    unsafe fn resize_anywhere(&self, block: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        let common = old.size().min(new.size());
        // SAFETY: guaranteed by the caller, if the block belongs to a route.
        match unsafe { route::reallocate(block, old, new, Self::NOTE) } {
            // SAFETY: guaranteed by the caller. The block belongs to no route, so it belongs to
            // `inner`.
            route::Reallocation::Plain => unsafe { self.resize(block, old, new.size()) },
            route::Reallocation::Done(moved) => moved.as_ptr(),
            route::Reallocation::Leave => {
                // The route refused, so the block moves to the wrapped allocator.
                // SAFETY: `new` has a nonzero size.
                let moved = self.allocate(new, |inner| unsafe { inner.alloc(new) });
                if !moved.is_null() {
                    // SAFETY: 1. Both blocks are live and have at least `common` bytes. 2. They do
                    // not overlap.
                    unsafe { ptr::copy_nonoverlapping(block, moved, common) };
                    // SAFETY: the block belongs to a route, and the caller gives it up.
                    unsafe { route::deallocate(block, old, Self::NOTE) };
                }
                moved
            }
            route::Reallocation::Enter { moved } => {
                // The block has grown to a size that the scope routes.
                // SAFETY: 1. Both blocks are live and have at least `common` bytes. 2. They do not
                // overlap.
                unsafe { ptr::copy_nonoverlapping(block, moved.as_ptr(), common) };
                // SAFETY: the block belongs to no route, and the caller gives it up.
                unsafe { self.release(block, old) };
                moved.as_ptr()
            }
        }
    }
}

// SAFETY: 1. Every block is a block of `inner`, or of a route, which gives the same guarantees.
// Each is returned to its owner, since routes identify their blocks by address and blocks of
// `inner` lie in no route. It is returned with the layout of its allocation, since all blocks of
// one allocator have a note, or none has. 2. Nothing here unwinds: no indexing, arithmetic or call
// can panic, `inner` and routes guarantee not to unwind, and the thread-locals have no destructor
// that could have run. 3. A refused `realloc` leaves the block and its note unchanged.
unsafe impl<A: GlobalAlloc, K: Accounting> GlobalAlloc for Global<A, K> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller: the layout has a nonzero size.
        self.fresh(
            layout,
            |whole| route::allocate(whole, Self::NOTE),
            |inner, whole| unsafe { inner.alloc(whole) },
        )
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.fresh(
            layout,
            |whole| route::allocate_zeroed(whole, Self::NOTE),
            // SAFETY: guaranteed by the caller: the layout has a nonzero size.
            |inner, whole| unsafe { inner.alloc_zeroed(whole) },
        )
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // The layout of a live block always has room for a note.
        let Some(whole) = Self::whole(layout) else { return };
        let block = if K::TRACKS {
            // SAFETY: the block is live, and every block of this allocator was signed.
            note::strike(unsafe { note::read(block, layout.size()) }, layout.size());
            note::whole(block)
        } else {
            block
        };
        // SAFETY: guaranteed by the caller, if the block belongs to a route.
        if unsafe { route::deallocate(block, whole, Self::NOTE) } {
            return;
        }
        // SAFETY: guaranteed by the caller. The block belongs to no route, so it belongs to
        // `inner`.
        unsafe { self.release(block, whole) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: 1. The alignment comes from a layout. 2. The caller guarantees that the size,
        // rounded up to the alignment, is at most `isize::MAX`.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let (Some(old), Some(new)) = (Self::whole(layout), Self::whole(new)) else {
            return ptr::null_mut();
        };
        if !K::TRACKS {
            // SAFETY: guaranteed by the caller.
            let moved = unsafe { self.resize_anywhere(block, old, new) };
            let growth = new_size.saturating_sub(layout.size());
            if K::COUNTS && growth > 0 && !moved.is_null() {
                tags::note(growth, 0);
            }
            return moved;
        }
        // SAFETY: the block is live, and every block of this allocator was signed.
        let note = unsafe { note::read(block, layout.size()) };
        // SAFETY: guaranteed by the caller, with the layouts of the underlying allocations.
        let moved = unsafe { self.resize_anywhere(note::whole(block), old, new) };
        if !moved.is_null() {
            // SAFETY: the block has the size of `new`.
            unsafe { note::sign_again(moved, note, layout.size(), new_size) };
        }
        moved
    }
}
