//! Allocation statistics.
#![expect(unsafe_code, reason = "implements the allocator traits")]

use super::{Owns, cut};
use aquifer_core::{
    DeferReuse, DeviceId, Gate, Opaque, OpaqueBlock, PoolStats, Request, Result as MemoryResult,
    impl_allocator,
};
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

    /// Returns the upstream allocator.
    pub fn inner(&self) -> &A {
        &self.inner
    }
}

impl Counters {
    fn add(&self, bytes: usize) {
        let live = self.live.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    fn count_allocation(&self, bytes: usize) {
        self.add(bytes);
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    fn subtract(&self, bytes: usize) {
        let before = self.live.fetch_sub(bytes as u64, Ordering::Relaxed);
        debug_assert!(before >= bytes as u64, "{bytes} bytes freed, but only {before} are live");
    }

    fn count_free(&self, bytes: usize) {
        self.subtract(bytes);
        self.frees.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a refusal and returns it.
    fn count_failure<E>(&self, refusal: E) -> E {
        self.failures.fetch_add(1, Ordering::Relaxed);
        refusal
    }

    /// Counts an allocation of `bytes`, or its refusal. Returns the block, cut to that size.
    fn allocated<E>(
        &self,
        bytes: usize,
        block: Result<NonNull<[u8]>, E>,
    ) -> Result<NonNull<[u8]>, E> {
        let block = block.map_err(|refusal| self.count_failure(refusal))?;
        self.count_allocation(bytes);
        Ok(cut(block, bytes))
    }

    /// Counts a block that was grown or shrunk, or the refusal. Returns the block, cut to its size.
    fn resized<E>(
        &self,
        old: usize,
        new: usize,
        block: Result<NonNull<[u8]>, E>,
    ) -> Result<NonNull<[u8]>, E> {
        let block = block.map_err(|refusal| self.count_failure(refusal))?;
        if new >= old {
            self.add(new - old);
        } else {
            self.subtract(old - new);
        }
        Ok(cut(block, new))
    }
}

impl_allocator! {
    // SAFETY: 1. Every block belongs to the upstream allocator, cut to the requested size, which
    // fits it. 2. A clone contains a clone of that allocator.
    unsafe impl [A: Allocator] for CountingAllocator<A> {
        fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            self.counters.allocated(layout.size(), self.inner.allocate(layout))
        }

        fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
            self.counters.allocated(layout.size(), self.inner.allocate_zeroed(layout))
        }

        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            // SAFETY: guaranteed by the caller. The block belongs to the upstream allocator.
            unsafe { self.inner.deallocate(block, layout) };
            self.counters.count_free(layout.size());
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            let block = unsafe { self.inner.grow(block, old, new) };
            self.counters.resized(old.size(), new.size(), block)
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller. `old` is exact, so all bytes after it become zero.
            let block = unsafe { self.inner.grow_zeroed(block, old, new) };
            self.counters.resized(old.size(), new.size(), block)
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> Result<NonNull<[u8]>, AllocError> {
            // SAFETY: guaranteed by the caller.
            let block = unsafe { self.inner.shrink(block, old, new) };
            self.counters.resized(old.size(), new.size(), block)
        }
    }
}

// SAFETY: all blocks belong to the upstream allocator, which gives this guarantee.
unsafe impl<A: DeferReuse> DeferReuse for CountingAllocator<A> {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> MemoryResult<()> {
        self.inner.defer(address, until)
    }
}

// SAFETY: all blocks belong to the upstream allocator.
unsafe impl<A: Owns> Owns for CountingAllocator<A> {
    fn owns(&self, block: NonNull<u8>) -> bool {
        self.inner.owns(block)
    }
}

/// A live opaque block. Dropped when its memory is free.
struct LiveBlock {
    counters: Arc<Counters>,
    bytes: usize,
}

impl Drop for LiveBlock {
    fn drop(&mut self) {
        self.counters.count_free(self.bytes);
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
        let mut block = match self.inner.allocate(stream, request) {
            Ok(block) => block,
            Err(error) => return Err(self.counters.count_failure(error)),
        };
        self.counters.count_allocation(bytes);
        block.keep_until_free(Box::new(LiveBlock { counters: self.counters.clone(), bytes }));
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
