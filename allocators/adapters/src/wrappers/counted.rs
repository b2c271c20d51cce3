//! Allocation statistics.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{LiveBlock, Rule};
use aquifer_core::{DeviceId, Opaque, OpaqueBlock, PoolStats, Request, Result as MemoryResult};
use std::{
    ptr::NonNull,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// An allocator, or a source of [`Opaque`] memory, that counts its allocations. An opaque block
/// counts as live until its memory is actually free.
///
/// Clones share the counters. All values are exact while no call is in progress. The peak is always
/// exact, because each change of the live bytes is atomic.
///
/// ```
/// use aquifer::adapters::CountingAllocator;
/// use allocator_api2::{alloc::Global, boxed::Box};
/// let counted = CountingAllocator::new(Global);
/// let first = Box::new_in([0u8; 100], &counted);
/// drop(Box::new_in([0u8; 50], &counted));
/// let stats = counted.stats();
/// assert_eq!((stats.live, stats.peak_live, stats.allocations, stats.frees), (100, 150, 2, 1));
/// # drop(first);
/// ```
#[derive(Clone, Debug)]
pub struct CountingAllocator<A> {
    inner: A,
    counters: Arc<Counters>,
}

// Relaxed throughout: the counters protect no other memory, and each has its own modification
// order.
#[derive(Default, Debug)]
struct Counters {
    live: AtomicU64,
    peak: AtomicU64,
    allocations: AtomicU64,
    frees: AtomicU64,
    failures: AtomicU64,
}

impl<A> CountingAllocator<A> {
    /// Creates an adapter that counts allocations from `inner`.
    pub fn new(inner: A) -> Self {
        Self { inner, counters: Arc::default() }
    }

    /// Returns the live bytes (`live` and `requested`), their peak, the live blocks, and the
    /// numbers of allocations, frees and failures. Growing and shrinking count neither as
    /// allocation nor as free. The other fields are 0.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let counters = &*self.counters;
        let mut stats = PoolStats::default();
        stats.live = counters.live.load(Ordering::Relaxed);
        stats.requested = stats.live;
        stats.peak_live = counters.peak.load(Ordering::Relaxed);
        stats.peak_requested = stats.peak_live;
        // Read in this order, so that frees never exceed allocations.
        stats.frees = counters.frees.load(Ordering::Relaxed);
        stats.allocations = counters.allocations.load(Ordering::Relaxed);
        stats.blocks = stats.allocations.saturating_sub(stats.frees);
        stats.failures = counters.failures.load(Ordering::Relaxed);
        stats
    }

    fn rule(&self) -> &Counters {
        &self.counters
    }

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

adapter_with_rule!(CountingAllocator);

impl Rule for Counters {
    type Grant = usize;

    fn admit(&self, bytes: usize) -> Option<usize> {
        Some(bytes)
    }

    fn keep(&self, bytes: usize, fresh: bool) {
        let live = self.live.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(live, Ordering::Relaxed);
        self.allocations.fetch_add(fresh.into(), Ordering::Relaxed);
    }

    fn release(&self, bytes: usize, gone: bool) {
        let before = self.live.fetch_sub(bytes as u64, Ordering::Relaxed);
        debug_assert!(before >= bytes as u64, "{bytes} bytes freed, but only {before} are live");
        self.frees.fetch_add(gone.into(), Ordering::Relaxed);
    }

    fn refused(&self) {
        self.failures.fetch_add(1, Ordering::Relaxed);
    }
}

impl<M: Opaque> Opaque for CountingAllocator<M> {
    type Stream = M::Stream;
    type Block = M::Block;

    fn device(&self) -> DeviceId {
        self.inner.device()
    }

    #[track_caller]
    fn allocate(&self, stream: &M::Stream, request: Request) -> MemoryResult<M::Block> {
        let bytes = request.size() as usize;
        let block = self.inner.allocate(stream, request);
        let mut block = block.inspect_err(|_| self.counters.refused())?;
        self.counters.keep(bytes, true);
        block.keep_until_free(Box::new(LiveBlock { rule: self.counters.clone(), bytes }));
        Ok(block)
    }

    /// Returns the statistics of this adapter.
    fn stats(&self) -> PoolStats {
        self.stats()
    }

    fn trim(&self, keep: u64) -> MemoryResult<u64> {
        self.inner.trim(keep)
    }
}
