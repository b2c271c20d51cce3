//! Calls of routes for single allocations and frees.
#![expect(unsafe_code, reason = "calls routes with blocks of theirs")]

use super::{Route, deferred, table};
use crate::{
    scope::Scope,
    thread_state::{THREAD_STATE, ThreadState},
};
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
pub(super) fn discount_refusal() {
    REFUSED.fetch_sub(1, Ordering::Relaxed);
}

/// Calls a route. During the call scopes are disabled on this thread, and its frees of routed
/// blocks are deferred.
fn call_route<R>(state: &ThreadState, call: impl FnOnce() -> R) -> R {
    state.in_route.set(true);
    let answer = call();
    deferred::flush();
    state.in_route.set(false);
    answer
}

/// Returns the route for an allocation of this size on this thread.
#[inline]
fn route_for(state: &ThreadState, bytes: usize) -> Option<&'static dyn Route> {
    let scope = Scope::innermost(state)?;
    (bytes >= scope.at_least && !state.in_route.get()).then_some(scope.route)
}

/// Allocates a block from the route of this thread's scope, if there is a scope and the route does
/// not refuse. The last `footer` bytes of the layout do not belong to the caller, and are not
/// counted here or below.
#[inline]
pub(crate) fn allocate(layout: Layout, footer: usize) -> Option<NonNull<u8>> {
    THREAD_STATE.with(|state| {
        let route = route_for(state, layout.size() - footer)?;
        allocate_from_route(state, layout.size() - footer, || route.allocate(layout))
    })
}

/// Allocates as [`allocate`] does, with all bytes zero.
#[inline]
pub(crate) fn allocate_zeroed(layout: Layout, footer: usize) -> Option<NonNull<u8>> {
    THREAD_STATE.with(|state| {
        let route = route_for(state, layout.size() - footer)?;
        allocate_from_route(state, layout.size() - footer, || route.allocate_zeroed(layout))
    })
}

#[cold]
#[inline(never)]
fn allocate_from_route(
    state: &ThreadState,
    bytes: usize,
    allocate: impl FnOnce() -> Option<NonNull<u8>>,
) -> Option<NonNull<u8>> {
    let block = call_route(state, allocate);
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
pub(crate) unsafe fn deallocate(block: *mut u8, layout: Layout, footer: usize) -> bool {
    if !table::may_own(block) {
        return false;
    }
    // SAFETY: guaranteed by the caller.
    unsafe { deallocate_in_window(block, layout, footer) }
}

/// # Safety
/// As for `GlobalAlloc::dealloc`.
#[cold]
#[inline(never)]
unsafe fn deallocate_in_window(block: *mut u8, layout: Layout, footer: usize) -> bool {
    let Some(block) = NonNull::new(block) else { return false };
    let Some(route) = table::owner(block) else { return false };
    LIVE.fetch_sub((layout.size() - footer) as u64, Ordering::Relaxed);
    THREAD_STATE.with(|state| {
        if state.in_route.get() {
            deferred::defer(route, block, layout);
        } else {
            // SAFETY: 1. The route owns the block. 2. The caller gives it up with its layout.
            call_route(state, || unsafe { route.deallocate(block, layout) });
        }
    });
    true
}

/// The result of a reallocation.
pub(crate) enum Reallocation {
    /// No route is involved.
    NotRouted,
    /// The block belongs to a route and has been resized.
    Resized(NonNull<u8>),
    /// The block belongs to a route, which cannot resize it. It has to move to the wrapped
    /// allocator.
    MoveOut,
    /// The block belongs to the wrapped allocator and has to move to a route.
    MoveIn {
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
    footer: usize,
) -> Reallocation {
    if table::may_own(block) {
        // SAFETY: guaranteed by the caller.
        let found = unsafe { reallocate_in_window(block, old, new) };
        if !matches!(found, Reallocation::NotRouted) {
            return found;
        }
    }
    // Only growing blocks enter a route: a block that shrinks in place is cheaper where it is.
    if new.size() <= old.size() {
        return Reallocation::NotRouted;
    }
    match allocate(new, footer) {
        Some(moved) => Reallocation::MoveIn { moved },
        None => Reallocation::NotRouted,
    }
}

/// # Safety
/// As for `GlobalAlloc::realloc`.
#[cold]
#[inline(never)]
unsafe fn reallocate_in_window(block: *mut u8, old: Layout, new: Layout) -> Reallocation {
    let Some(block) = NonNull::new(block) else { return Reallocation::NotRouted };
    let Some(route) = table::owner(block) else { return Reallocation::NotRouted };
    THREAD_STATE.with(|state| {
        if state.in_route.get() {
            return Reallocation::MoveOut;
        }
        // SAFETY: 1. The route owns the block. 2. If another block is returned, the caller gives
        // this one up, with its layout. 3. `new` has the same alignment, and the caller guarantees
        // a nonzero size.
        match call_route(state, || unsafe { route.resize(block, old, new) }) {
            None => {
                REFUSED.fetch_add(1, Ordering::Relaxed);
                Reallocation::MoveOut
            }
            Some(moved) => {
                // Two updates of one counter: only the sum matters.
                LIVE.fetch_add(new.size() as u64, Ordering::Relaxed);
                LIVE.fetch_sub(old.size() as u64, Ordering::Relaxed);
                Reallocation::Resized(moved)
            }
        }
    })
}
