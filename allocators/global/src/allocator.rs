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

/// How much a [`Global`] keeps account of: [`Uncounted`], [`Counted`] or [`Tracked`].
pub trait Accounting: sealed::Sealed {
    /// Whether it counts, and heeds the cap.
    #[doc(hidden)]
    const COUNTS: bool;
    /// Whether each block says whose it is.
    #[doc(hidden)]
    const TRACKS: bool;
}

/// Nothing is counted and no cap is heeded; routes work.
///
/// Its example is that of [`Global`], with this in the place of its parameter.
#[derive(Clone, Copy, Default, Debug)]
pub struct Uncounted;

/// The account of the process: totals, the peak, the cap, and what has been allocated by tag.
#[derive(Clone, Copy, Default, Debug)]
pub struct Counted;

/// As [`Counted`], and four bytes behind each block say whose it is: what each tag holds
/// ([`held_under`](crate::held_under), [`top`](crate::top)), and where what is held was allocated
/// (`sample_every`, with the feature `stacks`).
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

/// The program's allocator, counted, capped and routed.
///
/// It adds about 2 ns to an allocation and its free together, on any number of threads. A
/// zero-sized type over the system's allocator: the account and the routes are the process's.
///
/// ```
/// #[global_allocator]
/// static GLOBAL: aquifer_global::Global = aquifer_global::Global::new();
/// assert!(aquifer_global::is_installed());
/// ```
///
/// Over another allocator, and knowing what each tag holds, for some nanoseconds and four bytes a
/// block more:
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
    /// Wraps the system's allocator.
    #[must_use]
    pub const fn new() -> Self {
        Self::over(System)
    }
}

impl<A, K: Accounting> Global<A, K> {
    /// Bytes behind each block that are ours.
    const NOTE: usize = if K::TRACKS { note::BYTES } else { 0 };

    /// Wraps `inner`.
    pub const fn over(inner: A) -> Self {
        Self { inner, keeps: PhantomData }
    }

    /// The allocator below.
    pub const fn inner(&self) -> &A {
        &self.inner
    }

    /// What to ask the allocators below for; `None` if no block can be that large.
    #[inline]
    fn whole(layout: Layout) -> Option<Layout> {
        if K::TRACKS { note::room_behind(layout) } else { Some(layout) }
    }
}

impl<A: GlobalAlloc, K: Accounting> Global<A, K> {
    /// A new block, of the route that `routed` asks or of the allocator below.
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
            // Nobody's: there is nothing to note.
            return self.allocate_charged(whole, |inner| ask(inner, whole));
        }
        if K::TRACKS && account::charge_unrouted(layout.size()) {
            let block = self.allocate_charged(whole, |inner| ask(inner, whole));
            // SAFETY: it comes from the allocator below, which was asked for `whole`.
            return unsafe { Self::noted(block, layout.size()) };
        }
        self.fresh_in_a_scope(whole, routed, ask)
    }

    /// The same in a scope, or for a thread whose change is used up. Apart, so that the others keep
    /// no registers for it.
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
        // SAFETY: it comes from the allocator below or a route, which was asked for `whole`.
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

    /// Counts a fresh block, if it is one, under its tag.
    ///
    /// # Safety
    /// It is null or fresh, and was asked for with a note behind so many bytes if blocks have one.
    #[inline]
    unsafe fn noted(block: *mut u8, bytes: usize) -> *mut u8 {
        if block.is_null() {
            return block;
        }
        if K::TRACKS {
            // SAFETY: the caller's promise.
            unsafe { note::sign(block, bytes) };
        } else {
            tags::note(bytes, 1);
        }
        block
    }

    /// Asks the allocator below, by `ask`, and keeps the account. Layouts are whole here and
    /// further down.
    #[inline]
    fn allocate(&self, layout: Layout, ask: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        let bytes = layout.size() - Self::NOTE;
        if K::COUNTS && !account::charge(bytes) {
            return ptr::null_mut();
        }
        self.allocate_charged(layout, ask)
    }

    /// The same for a block that has been paid for.
    #[inline]
    fn allocate_charged(&self, layout: Layout, ask: impl FnOnce(&A) -> *mut u8) -> *mut u8 {
        let block = ask(&self.inner);
        if K::COUNTS && block.is_null() {
            account::refund(layout.size() - Self::NOTE);
        }
        block
    }

    /// Gives a block back to the allocator below, and keeps the account.
    ///
    /// # Safety
    /// The block is `inner`'s, of this layout, and is not used any more.
    #[inline]
    unsafe fn release(&self, block: *mut u8, layout: Layout) {
        if K::COUNTS && !account::frees_plainly(layout.size() - Self::NOTE) {
            // SAFETY: the caller's promise.
            return unsafe { self.release_and_return(block, layout) };
        }
        // SAFETY: the caller's promise.
        unsafe { self.inner.dealloc(block, layout) };
    }

    /// The same for a thread whose change would be too large.
    ///
    /// # Safety
    /// As for [`release`](Self::release).
    #[cold]
    #[inline(never)]
    unsafe fn release_and_return(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { self.inner.dealloc(block, layout) };
        // Afterwards: what others could take is charged until it is really free.
        account::freed(layout.size() - Self::NOTE);
    }

    /// Resizes a block that stays with the allocator below.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::realloc`], with a block of `inner`'s.
    #[inline]
    unsafe fn resize(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        let growth = new_size.saturating_sub(layout.size());
        if K::COUNTS && growth > 0 && !account::charge_growth(growth) {
            return ptr::null_mut();
        }
        // SAFETY: the caller's promise.
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

    /// Resizes a block, wherever it is and whoever it goes to.
    ///
    /// # Safety
    /// As for [`GlobalAlloc::realloc`], with a block of `inner`'s or of a route.
    #[inline]
    unsafe fn resize_anywhere(&self, block: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        let common = old.size().min(new.size());
        // SAFETY: the caller's promise, if the block is a route's.
        match unsafe { route::reallocate(block, old, new, Self::NOTE) } {
            // SAFETY: the caller's promise; the block is no route's, so it is `inner`'s.
            route::Reallocation::Plain => unsafe { self.resize(block, old, new.size()) },
            route::Reallocation::Done(moved) => moved.as_ptr(),
            route::Reallocation::Leave => {
                // The route has no more: the block moves to the allocator below.
                // SAFETY: `new` has a size.
                let moved = self.allocate(new, |inner| unsafe { inner.alloc(new) });
                if !moved.is_null() {
                    // SAFETY: 1. Both blocks are live and have that many bytes. 2. They do not
                    // overlap.
                    unsafe { ptr::copy_nonoverlapping(block, moved, common) };
                    // SAFETY: the block is a route's, and the caller hands it over.
                    unsafe { route::deallocate(block, old, Self::NOTE) };
                }
                moved
            }
            route::Reallocation::Enter { moved } => {
                // The block has grown into a route's part.
                // SAFETY: 1. Both blocks are live and have that many bytes. 2. They do not overlap.
                unsafe { ptr::copy_nonoverlapping(block, moved.as_ptr(), common) };
                // SAFETY: the block is no route's, and the caller hands it over.
                unsafe { self.release(block, old) };
                moved.as_ptr()
            }
        }
    }
}

// SAFETY: 1. Every block is one of `inner`, or of a route, which promises as much; each goes back
// where it came from, since a route tells its blocks by their address and `inner`'s are in none,
// and with the layout that was asked for: whether there is a note behind is one for all blocks of
// an allocator. 2. Nothing here unwinds: there is no indexing, arithmetic or call that could,
// `inner` and routes promise not to, and the thread-locals have no destructor that could
// have run. 3. A refusal leaves the block of `realloc` as it is, and its note.
unsafe impl<A: GlobalAlloc, K: Accounting> GlobalAlloc for Global<A, K> {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise: the layout has a size.
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
            // SAFETY: the caller's promise: the layout has a size.
            |inner, whole| unsafe { inner.alloc_zeroed(whole) },
        )
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // A live block's layout has had room behind before.
        let Some(whole) = Self::whole(layout) else { return };
        let block = if K::TRACKS {
            // SAFETY: the block is live, and like all of this allocator it was signed.
            note::strike(unsafe { note::read(block, layout.size()) }, layout.size());
            note::whole(block)
        } else {
            block
        };
        // SAFETY: the caller's promise, if the block is a route's.
        if unsafe { route::deallocate(block, whole, Self::NOTE) } {
            return;
        }
        // SAFETY: the caller's promise; the block is no route's, so it is `inner`'s.
        unsafe { self.release(block, whole) };
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: 1. The alignment is that of a layout. 2. The caller promises that the size,
        // rounded up to it, is at most `isize::MAX`.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let (Some(old), Some(new)) = (Self::whole(layout), Self::whole(new)) else {
            return ptr::null_mut();
        };
        if !K::TRACKS {
            // SAFETY: the caller's promise.
            let moved = unsafe { self.resize_anywhere(block, old, new) };
            let growth = new_size.saturating_sub(layout.size());
            if K::COUNTS && growth > 0 && !moved.is_null() {
                tags::note(growth, 0);
            }
            return moved;
        }
        // SAFETY: the block is live, and like all of this allocator it was signed.
        let note = unsafe { note::read(block, layout.size()) };
        // SAFETY: the caller's promise, with the layouts that were asked for below.
        let moved = unsafe { self.resize_anywhere(note::whole(block), old, new) };
        if !moved.is_null() {
            // SAFETY: it has the size of `new`.
            unsafe { note::sign_again(moved, note, layout.size(), new_size) };
        }
        moved
    }
}
