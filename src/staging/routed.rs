//! Scopes whose allocations the staging allocator serves.
#![expect(unsafe_code, reason = "implements an unsafe trait over an allocator")]

use allocator_api2::alloc::Allocator;
use aquifer_global::{Route, RouteId};
use aquifer_host::{PinnedAllocator, kernel::Process, region::window};
use std::{alloc::Layout, ops::Range, ptr::NonNull, sync::OnceLock};

/// Bytes from which on an allocation in a [`route`] scope goes to the staging allocator. Smaller
/// ones would gain nothing from being pinned.
pub const ROUTE_FROM: usize = 16 << 10;

/// The route, once it has been made. `None` if the process has as many routes as it can have.
static ROUTED: OnceLock<Option<RouteId>> = OnceLock::new();

/// The staging allocator as a route.
#[derive(Debug)]
struct ToPool {
    pool: PinnedAllocator,
    window: Range<usize>,
    /// The process that the pool's memory is mapped in. A child that it forks does not have it.
    process: Process,
}

impl ToPool {
    /// Whether the pool's memory is there.
    fn is_here(&self) -> bool {
        self.process.is_current()
    }

    /// A block, if it lies where the route's blocks must: memory that the driver itself had to
    /// allocate does not.
    fn inside(&self, block: NonNull<u8>, layout: Layout) -> Option<NonNull<u8>> {
        if self.window.contains(&block.addr().get()) {
            return Some(block);
        }
        // SAFETY: 1. the block is the allocator's, has just been made with this layout, and nobody
        // has it.
        unsafe { self.pool.deallocate(block, layout) };
        None
    }
}

// SAFETY: 1. blocks are the allocator's, asked for with the layout or a growth or shrinkage of it.
// 2. `inside` lets no other through, and the window never moves. 3. nothing but regions of pinned
// pools is ever mapped in the window, and any of their allocators frees a block of any. 4. the
// allocator's methods do not unwind. 5. nor do they use thread-locals with destructors; before
// `main` there is no route.
unsafe impl Route for ToPool {
    fn allocate(&self, layout: Layout) -> Option<NonNull<u8>> {
        if !self.is_here() {
            return None;
        }
        let block = self.pool.allocate(layout).ok()?;
        self.inside(block.cast(), layout)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Option<NonNull<u8>> {
        if !self.is_here() {
            return None;
        }
        let block = self.pool.allocate_zeroed(layout).ok()?;
        self.inside(block.cast(), layout)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        // In a child there is nothing to free, and somebody may have held the pool's lock at the
        // fork.
        if !self.is_here() {
            return;
        }
        // SAFETY: 1. the caller's: a live block of this route, with its layout.
        unsafe { self.pool.deallocate(block, layout) }
    }

    unsafe fn resize(&self, block: NonNull<u8>, old: Layout, new: Layout) -> Option<NonNull<u8>> {
        if !self.is_here() {
            return None;
        }
        if new.size() <= old.size() {
            // SAFETY: 1. the caller's: a live block of this route, with its layout. 2. `new` is no
            // larger.
            return unsafe { self.pool.shrink(block, old, new) }.ok().map(NonNull::cast);
        }
        // Not by `grow`, which may answer with memory outside the window when the block is gone
        // already.
        let moved = self.allocate(new)?;
        // SAFETY: 1. `block` has `old.size()` bytes, `moved` has more. 2. both are live blocks, so
        // they do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), moved.as_ptr(), old.size()) };
        // SAFETY: 1. the caller's: a live block of this route, with its layout, which nobody uses
        // any more.
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

/// Runs `work`, and serves what it allocates on this thread, from [`ROUTE_FROM`] bytes on, from the
/// staging allocator. What it returns may be grown and freed by any thread at any time.
///
/// Needs [`install`](super::install) and [`Global`](crate::Global) as the program's global
/// allocator. Without either, or when the pool has no memory, allocations are what they always are:
/// whether bytes are pinned is for [`PinnedPool::is_pinned`](crate::PinnedPool::is_pinned) to say.
/// In a child of a fork nothing is routed, and what was routed before the fork must not be touched:
/// pinned memory is not inherited.
///
/// The first scope blocks while the pool takes a region, if it has none yet.
pub fn route<R>(work: impl FnOnce() -> R) -> R {
    match ROUTED.get().copied().unwrap_or_else(make) {
        Some(to) => aquifer_global::route(to, ROUTE_FROM, work),
        None => work(),
    }
}

/// Makes the route, at the first use after `install` at which the pool has memory, or can take
/// some.
#[cold]
fn make() -> Option<RouteId> {
    let pool = super::installed()?;
    // The window is reserved with the first region.
    if window::bounds().is_none() {
        pool.warm(ROUTE_FROM).ok()?;
    }
    let window = window::bounds()?;
    *ROUTED.get_or_init(|| {
        let to = ToPool { pool: pool.allocator(), window, process: Process::current() };
        aquifer_global::register(Box::leak(Box::new(to))).ok()
    })
}
