//! `tracking-allocator`, which counts in groups what this library counts by tags.

use std::{
    alloc::System,
    sync::{
        OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
};
use tracking_allocator::{
    AllocationGroupId, AllocationGroupToken, AllocationRegistry, AllocationTracker,
    Allocator as Tracking,
};

pub(super) static TRACKING: Tracking<System> = Tracking::system();

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
