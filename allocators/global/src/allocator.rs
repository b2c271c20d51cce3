//! The wrapper around the program's allocator.
#![expect(unsafe_code, reason = "implements `GlobalAlloc`")]

use crate::{account, footer, report, route};
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
///
/// See [`Global`] for an example.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counted;

/// As [`Counted`], with two bytes behind each block that record its tag.
///
/// This makes available what each tag holds ([`held_under`](crate::held_under),
/// [`top`](crate::top)).
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
/// static GLOBAL: aquifer::Global = aquifer::Global::new();
/// assert!(aquifer::global::is_installed());
/// ```
///
/// It can wrap another allocator. It can also record what each tag holds, which costs some
/// nanoseconds and two bytes for each block:
///
/// ```
/// use aquifer::{Global, global::Tracked};
/// use std::alloc::System; // or mimalloc's, or jemalloc's
/// #[global_allocator]
/// static GLOBAL: Global<System, Tracked> = Global::over(System);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct Global<A = System, K = Counted> {
    inner: A,
    accounting: PhantomData<K>,
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
    const FOOTER: usize = if K::TRACKS { footer::BYTES } else { 0 };

    /// Wraps `inner`.
    pub const fn over(inner: A) -> Self {
        Self { inner, accounting: PhantomData }
    }

    /// Returns the wrapped allocator.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// Returns the layout to request from the underlying allocators, or `None` if no block can be
    /// that large.
    #[inline]
    fn with_footer(layout: Layout) -> Option<Layout> {
        if K::TRACKS { footer::with_footer(layout) } else { Some(layout) }
    }
}

impl<A: GlobalAlloc, K: Accounting> Global<A, K> {
    /// Allocates a block, from the route through `routed` or from the wrapped allocator through
    /// `allocate_inner`.
    #[inline]
    fn allocate_block(
        &self,
        layout: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        allocate_inner: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        let Some(whole) = Self::with_footer(layout) else { return ptr::null_mut() };
        if !K::COUNTS {
            return self.route_or_allocate(whole, routed, allocate_inner);
        }
        if !K::TRACKS && account::try_charge_unscoped(layout.size()) {
            // Outside all scopes there is no tag to count under.
            return self.allocate_charged(whole, |inner| allocate_inner(inner, whole));
        }
        if K::TRACKS && account::try_charge_unrouted(layout.size()) {
            let block = self.allocate_charged(whole, |inner| allocate_inner(inner, whole));
            // SAFETY: the block was allocated by the wrapped allocator with the layout `whole`.
            return unsafe { Self::record_block(block, layout.size()) };
        }
        self.allocate_in_scope(whole, routed, allocate_inner)
    }

    /// Allocates a block in a scope, or on a thread whose credit is used up. A separate function,
    /// so that the common path needs no registers for it.
    #[inline(never)]
    fn allocate_in_scope(
        &self,
        whole: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        allocate_inner: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        let bytes = whole.size() - Self::FOOTER;
        let block = if !K::TRACKS && account::try_charge_unrouted(bytes) {
            self.allocate_charged(whole, |inner| allocate_inner(inner, whole))
        } else {
            // The first allocation of each thread gets here, since it has no credit yet.
            report::request();
            self.route_or_allocate(whole, routed, allocate_inner)
        };
        // SAFETY: the block was allocated by the wrapped allocator or by a route, with the layout
        // `whole`.
        unsafe { Self::record_block(block, bytes) }
    }

    #[inline]
    fn route_or_allocate(
        &self,
        whole: Layout,
        routed: impl FnOnce(Layout) -> Option<ptr::NonNull<u8>>,
        allocate_inner: impl FnOnce(&A, Layout) -> *mut u8,
    ) -> *mut u8 {
        match routed(whole) {
            Some(block) => block.as_ptr(),
            None => self.allocate(whole, |inner| allocate_inner(inner, whole)),
        }
    }

    /// Counts a new block, unless it is null, under its tag.
    ///
    /// # Safety
    /// It is null or new, and if blocks have a footer, it was allocated with room for one behind
    /// `bytes` bytes.
    #[inline]
    unsafe fn record_block(block: *mut u8, bytes: usize) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        if K::TRACKS {
            // SAFETY: guaranteed by the caller.
            unsafe { footer::record_new(block, bytes) };
        } else {
            tags::count_allocation(bytes, 1);
        }
        block
    }

    /// Charges the account, and allocates from the wrapped allocator through `allocate_inner`. From
    /// here on layouts include the footer.
    #[inline]
    fn allocate(&self, layout: Layout, allocate_inner: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        let bytes = layout.size() - Self::FOOTER;
        if K::COUNTS && !account::charge(bytes) {
            return ptr::null_mut();
        }
        self.allocate_charged(layout, allocate_inner)
    }

    /// Allocates a block that has already been charged.
    #[inline]
    fn allocate_charged(
        &self,
        layout: Layout,
        allocate_inner: impl FnOnce(&A) -> *mut u8,
    ) -> *mut u8 {
        let block = allocate_inner(&self.inner);
        if K::COUNTS && block.is_null() {
            account::refund(layout.size() - Self::FOOTER);
        }
        block
    }

    /// Deallocates a block of the wrapped allocator, and credits the account.
    ///
    /// # Safety
    /// The block belongs to `inner`, has this layout, and is no longer used.
    #[inline]
    unsafe fn release(&self, block: *mut u8, layout: Layout) {
        if K::COUNTS && !account::try_credit_free(layout.size() - Self::FOOTER) {
            // SAFETY: guaranteed by the caller.
            return unsafe { self.release_slowly(block, layout) };
        }
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.dealloc(block, layout) };
    }

    /// Deallocates a block on a thread whose credit would become too large.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    #[cold]
    #[inline(never)]
    unsafe fn release_slowly(&self, block: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.inner.dealloc(block, layout) };
        // Credited after the free: bytes that other threads could charge must really be free.
        account::credit_free(layout.size() - Self::FOOTER);
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
            account::credit_shrink(if moved.is_null() {
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
    unsafe fn resize_or_move(&self, block: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        let common = old.size().min(new.size());
        // SAFETY: guaranteed by the caller, if the block belongs to a route.
        match unsafe { route::reallocate(block, old, new, Self::FOOTER) } {
            // SAFETY: guaranteed by the caller. The block belongs to no route, so it belongs to
            // `inner`.
            route::Reallocation::NotRouted => unsafe { self.resize(block, old, new.size()) },
            route::Reallocation::Resized(moved) => moved.as_ptr(),
            route::Reallocation::MoveOut => {
                // The route refused, so the block moves to the wrapped allocator.
                // SAFETY: `new` has a nonzero size.
                let moved = self.allocate(new, |inner| unsafe { inner.alloc(new) });
                if !moved.is_null() {
                    // SAFETY: 1. Both blocks are live and have at least `common` bytes. 2. They do
                    // not overlap.
                    unsafe { ptr::copy_nonoverlapping(block, moved, common) };
                    // SAFETY: the block belongs to a route, and the caller gives it up.
                    unsafe { route::deallocate(block, old, Self::FOOTER) };
                }
                moved
            }
            route::Reallocation::MoveIn { moved } => {
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
// one allocator have a footer, or none has. 2. Nothing here unwinds: no indexing, arithmetic or
// call can panic, `inner` and routes guarantee not to unwind, and the thread-locals have no
// destructor that could have run. 3. A refused `realloc` leaves the block and its footer unchanged.
unsafe impl<A: GlobalAlloc, K: Accounting> GlobalAlloc for Global<A, K> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller: the layout has a nonzero size.
        self.allocate_block(
            layout,
            |whole| route::allocate(whole, Self::FOOTER),
            |inner, whole| unsafe { inner.alloc(whole) },
        )
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.allocate_block(
            layout,
            |whole| route::allocate_zeroed(whole, Self::FOOTER),
            // SAFETY: guaranteed by the caller: the layout has a nonzero size.
            |inner, whole| unsafe { inner.alloc_zeroed(whole) },
        )
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // The layout of a live block always has room for a footer.
        let Some(whole) = Self::with_footer(layout) else { return };
        let block = if K::TRACKS {
            // SAFETY: the block is live, and every block of this allocator has a footer.
            footer::record_free(unsafe { footer::read(block, layout.size()) }, layout.size());
            footer::underlying(block)
        } else {
            block
        };
        // SAFETY: guaranteed by the caller, if the block belongs to a route.
        if unsafe { route::deallocate(block, whole, Self::FOOTER) } {
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
        let (Some(old), Some(new)) = (Self::with_footer(layout), Self::with_footer(new)) else {
            return ptr::null_mut();
        };
        if !K::TRACKS {
            // SAFETY: guaranteed by the caller.
            let moved = unsafe { self.resize_or_move(block, old, new) };
            let growth = new_size.saturating_sub(layout.size());
            if K::COUNTS && growth > 0 && !moved.is_null() {
                tags::count_allocation(growth, 0);
            }
            return moved;
        }
        // SAFETY: the block is live, and every block of this allocator has a footer.
        let footer = unsafe { footer::read(block, layout.size()) };
        // SAFETY: guaranteed by the caller, with the layouts of the underlying allocations.
        let moved = unsafe { self.resize_or_move(footer::underlying(block), old, new) };
        if !moved.is_null() {
            // SAFETY: the block has the size of `new`.
            unsafe { footer::record_resize(moved, footer, layout.size(), new_size) };
        }
        moved
    }
}
