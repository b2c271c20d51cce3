//! Scopes whose allocations are served by the staging allocator.
#![expect(unsafe_code, reason = "implements an unsafe trait over an allocator")]

use allocator_api2::alloc::Allocator;
use aquifer_global::{Route, RouteId};
use aquifer_host::{PinnedAllocator, kernel::is_forked_child, region::window};
use std::{alloc::Layout, ops::Range, ptr::NonNull, sync::OnceLock};

/// The minimum size in bytes of an allocation in a [`route`] scope that goes to the staging
/// allocator. Smaller ones would gain nothing from being pinned.
pub const ROUTE_FROM: usize = 16 << 10;

/// The route, once it is registered. `None` if the process has no route left.
static ROUTE: OnceLock<Option<RouteId>> = OnceLock::new();

/// The staging allocator as a route.
#[derive(Debug)]
struct PoolRoute {
    pool: PinnedAllocator,
    window: Range<usize>,
}

impl PoolRoute {
    /// Returns whether this process has the pool's memory.
    fn has_memory(&self) -> bool {
        !is_forked_child()
    }

    /// Returns the block if it lies inside the route's window. Otherwise deallocates it: memory
    /// that the driver itself had to allocate lies elsewhere.
    fn inside(&self, block: NonNull<u8>, layout: Layout) -> Option<NonNull<u8>> {
        if self.window.contains(&block.addr().get()) {
            return Some(block);
        }
        // SAFETY: 1. the allocator has just returned the block for this layout, and it has not been
        // handed out.
        unsafe { self.pool.deallocate(block, layout) };
        None
    }
}

// SAFETY: 1. every block comes from the allocator and was requested with the layout, or is a growth
// or shrinkage of such a block. 2. `inside` returns no block outside the window, and the window
// never moves. 3. only regions of pinned pools are ever mapped in the window, and each of their
// allocators can deallocate a block of any of them. 4. the allocator's methods do not unwind. 5.
// they use no thread-locals with destructors, and before `main` there is no route.
unsafe impl Route for PoolRoute {
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        if !self.has_memory() {
            return None;
        }
        let block = self.pool.allocate(layout).ok()?;
        self.inside(block.cast(), layout)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        if !self.has_memory() {
            return None;
        }
        let block = self.pool.allocate_zeroed(layout).ok()?;
        self.inside(block.cast(), layout)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // A forked child has nothing to free, and the pool's lock may have been held at the fork.
        if !self.has_memory() {
            return;
        }
        // SAFETY: 1. the caller guarantees a live block of this route, with its layout.
        unsafe { self.pool.deallocate(block, layout) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        if !self.has_memory() {
            return None;
        }
        if new.size() <= old.size() {
            // SAFETY: 1. the caller guarantees a live block of this route, with its layout. 2.
            // `new` is no larger.
            return unsafe { self.pool.shrink(block, old, new) }.ok().map(NonNull::cast);
        }
        // `grow` is not used: it may return memory outside the window after it has freed the old
        // block.
        let moved = self.allocate(new)?;
        // SAFETY: 1. `block` has `old.size()` bytes, `moved` has more. 2. both are live blocks, so
        // they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), moved.as_ptr(), old.size()) };
        // SAFETY: 1. the caller guarantees a live block of this route, with its layout, that is not
        // used any more.
        unsafe { self.pool.deallocate(block, old) };
        Some(moved)
    }

    fn owns(&self, block: NonNull<u8>) -> bool {
        self.window.contains(&block.addr().get())
    }

    fn window(&self) -> Range<usize> {
        self.window.clone()
    }
}

/// Runs `work`, and serves its allocations on this thread of at least [`ROUTE_FROM`] bytes from the
/// staging allocator. The memory that it returns may be grown and freed by any thread at any time.
///
/// Requires [`install`](super::install) and [`Global`](crate::Global) as the program's global
/// allocator. Without either, or when the pool has no memory, allocations are unchanged.
/// [`PinnedPool::is_pinned`](crate::PinnedPool::is_pinned) returns whether bytes are pinned. In a
/// forked child nothing is routed, and memory routed before the fork must not be accessed: pinned
/// memory is not inherited.
///
/// The first scope blocks while the pool allocates a region, if it has none yet.
pub fn route<R>(work: impl FnOnce() -> R) -> R {
    match ROUTE.get().copied().unwrap_or_else(register) {
        Some(to) => aquifer_global::route(to, ROUTE_FROM, work),
        None => work(),
    }
}

/// Registers the route at the first use after `install` at which the pool has memory or can
/// allocate some.
#[cold]
fn register() -> Option<RouteId> {
    let pool = super::installed()?;
    // The window is reserved together with the first region.
    if window::bounds().is_none() {
        pool.warm(ROUTE_FROM).ok()?;
    }
    let window = window::bounds()?;
    *ROUTE.get_or_init(|| {
        let to = PoolRoute { pool: pool.allocator(), window };
        aquifer_global::register(Box::leak(Box::new(to))).ok()
    })
}
