//! The allocators: those that are wrapped, this library over them, and similar crates.
#![expect(unsafe_code, reason = "calls allocators by hand; implements a route")]

use crate::bench::device::source::Source;
use aquifer_core::Bytes;
use aquifer_global::{Counted, Global, Route, RouteId, Tracked, Uncounted, register};
use cap::Cap;
use mimalloc::MiMalloc;
use stats_alloc::StatsAlloc;
use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt,
    ops::Range,
    ptr::NonNull,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};
use tikv_jemallocator::Jemalloc;
use tracking_allocator::{
    AllocationGroupId, AllocationGroupToken, AllocationRegistry, AllocationTracker,
    Allocator as Tracking,
};

pub(super) static SYSTEM: System = System;
pub(super) static MIMALLOC: MiMalloc = MiMalloc;
pub(super) static JEMALLOC: Jemalloc = Jemalloc;

/// This library over an allocator, in each of its configurations.
pub(super) struct Ours<A: 'static> {
    pub(super) uncounted: Global<A, Uncounted>,
    pub(super) counted: Global<A, Counted>,
    pub(super) tracked: Global<A, Tracked>,
}

pub(super) static OVER_SYSTEM: Ours<System> = Ours {
    uncounted: Global::over(System),
    counted: Global::over(System),
    tracked: Global::over(System),
};
pub(super) static OVER_MIMALLOC: Ours<MiMalloc> = Ours {
    uncounted: Global::over(MiMalloc),
    counted: Global::over(MiMalloc),
    tracked: Global::over(MiMalloc),
};
pub(super) static OVER_JEMALLOC: Ours<Jemalloc> = Ours {
    uncounted: Global::over(Jemalloc),
    counted: Global::over(Jemalloc),
    tracked: Global::over(Jemalloc),
};

pub(super) static STATS_ALLOC: StatsAlloc<System> = StatsAlloc::system();
pub(super) static CAP: Cap<System> = Cap::new(System, usize::MAX);
pub(super) static TRACKING: Tracking<System> = Tracking::system();

/// An allocator, called through `GlobalAlloc`.
#[derive(Debug)]
pub(super) struct By<A: 'static>(pub(super) &'static A);

/// A block, as its user holds it.
#[derive(Debug)]
pub(super) struct GlobalBlock(NonNull<u8>, Layout);

// SAFETY: the block belongs to the owner of this value, as that of a `Box` does.
unsafe impl Send for GlobalBlock {}

/// The allocator returned null.
#[derive(Debug)]
pub(super) struct NoMemory(u64);

impl fmt::Display for NoMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no memory for {}", Bytes(self.0))
    }
}

impl<A: GlobalAlloc> Source for By<A> {
    type Held = GlobalBlock;
    type Refused = NoMemory;

    #[inline]
    fn take(&self, bytes: u64) -> Result<GlobalBlock, NoMemory> {
        let Ok(layout) = Layout::from_size_align(bytes.max(1) as usize, 16) else {
            return Err(NoMemory(bytes));
        };
        // SAFETY: the layout has a size.
        let block = NonNull::new(unsafe { self.0.alloc(layout) });
        block.map(|block| GlobalBlock(block, layout)).ok_or(NoMemory(bytes))
    }

    #[inline]
    fn give(&self, GlobalBlock(block, layout): GlobalBlock) -> Result<(), NoMemory> {
        // SAFETY: the block was allocated here with this layout, and is freed once.
        unsafe { self.0.dealloc(block.as_ptr(), layout) };
        Ok(())
    }

    fn rest(&self) -> Result<(), NoMemory> {
        Ok(())
    }
}

/// Counts as this library does: bytes and blocks of each group.
struct Counts {
    bytes: AtomicUsize,
    blocks: AtomicUsize,
}

impl AllocationTracker for Counts {
    fn allocated(&self, _: usize, size: usize, _: usize, _: AllocationGroupId) {
        self.bytes.fetch_add(size, Ordering::Relaxed);
        self.blocks.fetch_add(1, Ordering::Relaxed);
    }

    fn deallocated(
        &self,
        _: usize,
        size: usize,
        _: usize,
        _: AllocationGroupId,
        _: AllocationGroupId,
    ) {
        self.bytes.fetch_sub(size, Ordering::Relaxed);
        self.blocks.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Enables tracking in `tracking-allocator`, as its documentation describes. Its tracker can be set
/// once per process.
pub(super) fn track() {
    static SET: OnceLock<()> = OnceLock::new();
    SET.get_or_init(|| {
        let counts = Counts { bytes: AtomicUsize::new(0), blocks: AtomicUsize::new(0) };
        // Fails only if a tracker is already set, which then does the tracking.
        let _ = AllocationRegistry::set_global_tracker(counts);
        AllocationRegistry::enable_tracking();
    });
}

/// Runs `work` in a group of `tracking-allocator`.
pub(super) fn grouped(work: impl FnOnce()) {
    let Some(mut group) = AllocationGroupToken::register() else { return work() };
    let entered = group.enter();
    work();
    drop(entered);
}

/// A route without blocks, to measure what its address window costs all other blocks.
struct Empty(Range<usize>);

// SAFETY: it has no blocks, and nothing in it unwinds.
unsafe impl Route for Empty {
    fn allocate(&self, _layout: Layout) -> Option<NonNull<u8>> {
        None
    }

    fn allocate_zeroed(&self, _layout: Layout) -> Option<NonNull<u8>> {
        None
    }

    unsafe fn deallocate(&self, _block: NonNull<u8>, _layout: Layout) {}

    unsafe fn resize(
        &self,
        _block: NonNull<u8>,
        _old: Layout,
        _new: Layout,
    ) -> Option<NonNull<u8>> {
        None
    }

    fn owns(&self, _block: NonNull<u8>) -> bool {
        false
    }

    fn window(&self) -> Range<usize> {
        self.0.clone()
    }
}

/// Registers a route for the rest of the process.
pub(super) fn routed() -> Option<RouteId> {
    static TO: OnceLock<Option<RouteId>> = OnceLock::new();
    *TO.get_or_init(|| {
        let apart = vec![0u8; 4096].leak().as_ptr_range();
        register(Box::leak(Box::new(Empty(apart.start.addr()..apart.end.addr())))).ok()
    })
}
