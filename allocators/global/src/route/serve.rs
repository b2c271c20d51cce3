//! Calls of routes for single allocations and frees.
#![expect(unsafe_code, reason = "calls routes with blocks of theirs")]

use super::{Route, Scope, deferred, table};
use crate::here::{HERE, Here};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::atomic::{AtomicU64, Ordering},
};

// Relaxed: statistics, which guard no other memory. Routed calls are rare, so the counters are
// shared.
static LIVE: AtomicU64 = AtomicU64::new(0);
static SERVED: AtomicU64 = AtomicU64::new(0);
static REFUSED: AtomicU64 = AtomicU64::new(0);

/// Returns live bytes, served blocks and refused requests.
pub(crate) fn figures() -> (u64, u64, u64) {
    (LIVE.load(Ordering::Relaxed), SERVED.load(Ordering::Relaxed), REFUSED.load(Ordering::Relaxed))
}

/// Removes the refusal of a probe from the count.
pub(super) fn forgive() {
    REFUSED.fetch_sub(1, Ordering::Relaxed);
}

/// Calls a route. During the call scopes are disabled on this thread, and its frees of routed
/// blocks are deferred.
fn visit<R>(here: &Here, call: impl FnOnce() -> R) -> R {
    here.inside.set(true);
    let answer = call();
    deferred::settle();
    here.inside.set(false);
    answer
}

/// Returns the route for an allocation of this size on this thread.
#[inline]
fn bound_for(here: &Here, bytes: usize) -> Option<&'static dyn Route> {
    let scope = Scope::innermost(here)?;
    (bytes >= scope.at_least && !here.inside.get()).then_some(scope.route)
}

/// Allocates a block from the route of this thread's scope, if there is a scope and the route does
/// not refuse. The last `ours` bytes of the layout do not belong to the caller, and are not counted
/// here or below.
#[inline]
pub(crate) fn allocate(layout: Layout, ours: usize) -> Option<NonNull<u8>> {
    HERE.with(|here| {
        let route = bound_for(here, layout.size() - ours)?;
        served(here, layout.size() - ours, || route.allocate(layout))
    })
}

/// Allocates as [`allocate`] does, with all bytes zero.
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

/// Deallocates a block if it belongs to a route. Returns whether it did.
///
/// # Safety
/// As for `GlobalAlloc::dealloc`.
#[inline]
pub(crate) unsafe fn deallocate(block: *mut u8, layout: Layout, ours: usize) -> bool {
    if !table::may_own(block) {
        return false;
    }
    // SAFETY: guaranteed by the caller.
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
            // SAFETY: 1. The route owns the block. 2. The caller gives it up with its layout.
            visit(here, || unsafe { route.deallocate(block, layout) });
        }
    });
    true
}

/// The result of a reallocation.
pub(crate) enum Reallocation {
    /// No route is involved.
    Plain,
    /// The block belongs to a route and has been resized.
    Done(NonNull<u8>),
    /// The block belongs to a route, which cannot resize it. It has to move to the wrapped
    /// allocator.
    Leave,
    /// The block belongs to the wrapped allocator and has to move to a route.
    Enter {
        /// A block of the new size.
        moved: NonNull<u8>,
    },
}

/// Resizes a block of a route, or allocates one in a route for a block that has grown to a routed
/// size.
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
        // SAFETY: guaranteed by the caller.
        let found = unsafe { reallocate_in_window(block, old, new) };
        if !matches!(found, Reallocation::Plain) {
            return found;
        }
    }
    // Only growing blocks enter a route: a block that shrinks in place is cheaper where it is.
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
        // SAFETY: 1. The route owns the block. 2. If another block is returned, the caller gives
        // this one up, with its layout. 3. `new` has the same alignment, and the caller guarantees
        // a nonzero size.
        match visit(here, || unsafe { route.resize(block, old, new) }) {
            None => {
                REFUSED.fetch_add(1, Ordering::Relaxed);
                Reallocation::Leave
            }
            Some(moved) => {
                // Two updates of one counter: only the sum matters.
                LIVE.fetch_add(new.size() as u64, Ordering::Relaxed);
                LIVE.fetch_sub(old.size() as u64, Ordering::Relaxed);
                Reallocation::Done(moved)
            }
        }
    })
}
