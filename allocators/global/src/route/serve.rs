//! The way of one call to a route, and back.
#![expect(unsafe_code, reason = "calls routes with blocks of theirs")]

use super::{Route, Scope, deferred, table};
use crate::here::{HERE, Here};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

// Relaxed: figures, which guard no other memory. A routed call is no hot path, so they are shared.
static LIVE: AtomicU64 = AtomicU64::new(0);
static SERVED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Live bytes, blocks served, requests refused.
pub(crate) fn figures() -> (u64, u64, u64) {
    (LIVE.load(Ordering::Relaxed), SERVED.load(Ordering::Relaxed), REFUSED.load(Ordering::Relaxed))
}

/// Takes back the refusal of a probe.
pub(super) fn forgive() {
    REFUSED.fetch_sub(1, Ordering::Relaxed);
}

/// Calls a route. Scopes are off meanwhile on this thread; frees of routed blocks wait for the end.
fn visit<R>(here: &Here, call: impl FnOnce() -> R) -> R {
    here.inside.set(true);
    let answer = call();
    deferred::settle();
    here.inside.set(false);
    answer
}

/// The route that an allocation of this size on this thread goes to.
#[inline]
fn bound_for(here: &Here, bytes: usize) -> Option<&'static dyn Route> {
    let scope = Scope::innermost(here)?;
    (bytes >= scope.at_least && !here.inside.get()).then_some(scope.route)
}

/// A block from this thread's route, if it is in a scope and the route serves it. Of the layout's
/// bytes the last `ours` are not the caller's; here and below they count for nothing.
#[inline]
pub(crate) fn allocate(layout: Layout, ours: usize) -> Option<NonNull<u8>> {
    HERE.with(|here| {
        let route = bound_for(here, layout.size() - ours)?;
        served(here, layout.size() - ours, || route.allocate(layout))
    })
}

/// As [`allocate`], zeroed.
#[inline]
pub(crate) fn allocate_zeroed(layout: Layout, ours: usize) -> Option<NonNull<u8>> {
    HERE.with(|here| {
        let route = bound_for(here, layout.size() - ours)?;
        served(here, layout.size() - ours, || route.allocate_zeroed(layout))
    })
}

#[cold]
#[inline(never)]
fn served(
    here: &Here,
    bytes: usize,
    ask: impl FnOnce() -> Option<NonNull<u8>>,
) -> Option<NonNull<u8>> {
    let block = visit(here, ask);
    if block.is_none() {
        REFUSED.fetch_add(1, Ordering::Relaxed);
        return None;
    }
    SERVED.fetch_add(1, Ordering::Relaxed);
    LIVE.fetch_add(bytes as u64, Ordering::Relaxed);
    block
}

/// Takes a block back if it is a route's. Says whether it was.
///
/// # Safety
/// As for `GlobalAlloc::dealloc`.
#[inline]
pub(crate) unsafe fn deallocate(block: *mut u8, layout: Layout, ours: usize) -> bool {
    if !table::may_own(block) {
        return false;
    }
    // SAFETY: the caller's promise.
    unsafe { deallocate_in_window(block, layout, ours) }
}

/// # Safety
/// As for `GlobalAlloc::dealloc`.
#[cold]
#[inline(never)]
unsafe fn deallocate_in_window(block: *mut u8, layout: Layout, ours: usize) -> bool {
    let Some(block) = NonNull::new(block) else { return false };
    let Some(route) = table::owner(block) else { return false };
    LIVE.fetch_sub((layout.size() - ours) as u64, Ordering::Relaxed);
    HERE.with(|here| {
        if here.inside.get() {
            deferred::put_off(route, block, layout);
        } else {
            // SAFETY: 1. The route owns the block. 2. The caller hands it over with its layout.
            visit(here, || unsafe { route.deallocate(block, layout) });
        }
    });
    true
}

/// What became of a reallocation.
pub(crate) enum Reallocation {
    /// No route has to do with it.
    Plain,
    /// The block is a route's and has been resized.
    Done(NonNull<u8>),
    /// The block is a route's, which cannot resize it: it has to move to the wrapped allocator.
    Leave,
    /// The block is the wrapped allocator's and has to move here.
    Enter {
        /// A block of the new size.
        moved: NonNull<u8>,
    },
}

/// Resizes a block of a route, or finds a place in one for a block that has grown into it.
///
/// # Safety
/// As for `GlobalAlloc::realloc`.
#[inline]
pub(crate) unsafe fn reallocate(
    block: *mut u8,
    old: Layout,
    new: Layout,
    ours: usize,
) -> Reallocation {
    if table::may_own(block) {
        // SAFETY: the caller's promise.
        let found = unsafe { reallocate_in_window(block, old, new) };
        if !matches!(found, Reallocation::Plain) {
            return found;
        }
    }
    // Only growth enters: a block that shrinks in place is cheaper where it is.
    if new.size() <= old.size() {
        return Reallocation::Plain;
    }
    match allocate(new, ours) {
        Some(moved) => Reallocation::Enter { moved },
        None => Reallocation::Plain,
    }
}

/// # Safety
/// As for `GlobalAlloc::realloc`.
#[cold]
#[inline(never)]
unsafe fn reallocate_in_window(block: *mut u8, old: Layout, new: Layout) -> Reallocation {
    let Some(block) = NonNull::new(block) else { return Reallocation::Plain };
    let Some(route) = table::owner(block) else { return Reallocation::Plain };
    HERE.with(|here| {
        if here.inside.get() {
            return Reallocation::Leave;
        }
        // SAFETY: 1. The route owns the block. 2. The caller hands it over, if it is answered with
        // another, with its layout. 3. `new` has the same alignment, and the caller promises a
        // size.
        match visit(here, || unsafe { route.resize(block, old, new) }) {
            None => {
                REFUSED.fetch_add(1, Ordering::Relaxed);
                Reallocation::Leave
            }
            Some(moved) => {
                // Two steps of one counter: the sum is what matters.
                LIVE.fetch_add(new.size() as u64, Ordering::Relaxed);
                LIVE.fetch_sub(old.size() as u64, Ordering::Relaxed);
                Reallocation::Done(moved)
            }
        }
    })
}
