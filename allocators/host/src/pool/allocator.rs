//! A pinned pool as an `Allocator`.
#![expect(unsafe_code, reason = "implements the allocator traits, which copy between blocks")]

use super::{magazine::Magazine, page_map, poison, pool_core::PoolCore, span::SlabSpan, thread};
use aquifer_core::{DeferReuse, Gate, Result, impl_allocator};
use std::{alloc::Layout, fmt, ptr::NonNull, sync::Arc};

/// A [`PinnedPool`](super::PinnedPool) as an allocator for collections. It is `Copy`, has the size
/// of a slice reference, and never dangles.
///
/// Once its pool is closed, allocations return an error. Blocks that it allocated before stay valid
/// and can be freed. Any copy can free the blocks of any other copy, from any thread. Growing and
/// shrinking happen in place where possible.
///
/// A collection that cannot grow calls `handle_alloc_error`, which ends the process with a message
/// that has only the size. `AllocError` has no room for more. So the pool writes why it refused to
/// the standard error stream, once. A program that goes on without the memory calls `try_reserve`:
///
/// ```
/// use aquifer::{Budget, PinnedConfig, PinnedPool, Runtime, vec::Vec};
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let budget = Budget::new("pinned", 8 << 20);
/// let pool = PinnedPool::new(rt.host(), &budget, PinnedConfig::default())?;
/// let mut batch: Vec<u8, _> = Vec::new_in(pool.allocator());
/// assert!(batch.try_reserve(64 << 20).is_err()); // nothing has changed
/// assert!(batch.try_reserve(1 << 20).is_ok());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// `deallocate` ignores and counts a pointer that is no live block, and a layout that is longer
/// than the block.
///
/// ```
/// use aquifer::Runtime;
/// use hashbrown::HashMap;
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let pinned = rt.pinned_near(0).allocator();
/// let mut index = HashMap::<u64, [f32; 4], std::hash::RandomState, _>::with_hasher_in(Default::default(), pinned);
/// index.insert(7, [1.0; 4]);
/// assert_eq!(index[&7], [1.0; 4]);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Copy)]
pub struct PinnedAllocator {
    core: &'static PoolCore,
    /// The generation of the core that its blocks belong to, unique among pools. A core with live
    /// blocks keeps its generation.
    generation: u64,
}

impl PinnedAllocator {
    pub(super) fn new(core: &'static PoolCore, generation: u64) -> Self {
        Self { core, generation }
    }

    /// Returns whether the pool still serves allocations.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.core.with(|state| state.open_as(self.generation).is_ok())
    }

    /// Returns whether a block of any pool of this process begins at `address`. Never blocks. For
    /// callers that free by address.
    #[must_use]
    pub fn owns(&self, address: NonNull<u8>) -> bool {
        page_map::block_starting_at(address.addr().get() as u64).is_some()
    }
}

impl_allocator! {
    // SAFETY (of the trait): 1. a block is mapped, aligned and exclusive until it is freed: the
    // heap allocates free ranges of regions, and a region lives as long as any of its blocks. 2.
    // copies of the allocator share the core, which is never freed, so any copy can free any block,
    // and moving a copy moves no memory. 3. no method unwinds: the only user code that runs is
    // gates, whose panics are caught.
    unsafe impl [] for PinnedAllocator {
        #[inline]
        fn allocate(&self, layout: Layout) -> std::result::Result<NonNull<[u8]>, AllocError> {
            match self.allocate_fast(layout) {
                Some(start) => {
                    poison::on_allocate(start, layout.size());
                    Ok(NonNull::slice_from_raw_parts(start, layout.size()))
                }
                None => self.allocate_slow(layout, AllocError),
            }
        }

        #[inline]
        unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
            poison::on_free(self.generation, block, layout);
            // The thread's magazine is looked up first: where access to thread-locals is a function
            // call, few values have to be saved across it.
            let Some(magazine) = thread::magazine(&self.generation) else {
                return self.free_slow(block, layout);
            };
            match PoolCore::free_fast(magazine, self.generation, block, layout) {
                Ok(()) => {}
                Err(Some(span)) => self.free_uncached(magazine, span, block, layout),
                Err(None) => self.free_slow(block, layout),
            }
        }

        unsafe fn grow(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> std::result::Result<NonNull<[u8]>, AllocError> {
            if self.resize_in_place(block, old, new) {
                return Ok(NonNull::slice_from_raw_parts(block, new.size()));
            }
            let (moved, kept) = (self.allocate(new)?, old.size().min(new.size()));
            // SAFETY: 1. `block` has `old.size()` bytes by the caller's contract, and `moved` has
            // `new.size()`. 2. both are live blocks, so they do not overlap.
            unsafe { std::ptr::copy_nonoverlapping(block.as_ptr(), moved.cast().as_ptr(), kept) };
            // SAFETY: 1. the caller owns `block`, with that layout, and it is not used after this.
            unsafe { self.deallocate(block, old) };
            Ok(moved)
        }

        unsafe fn grow_zeroed(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> std::result::Result<NonNull<[u8]>, AllocError> {
            // SAFETY: 1. the caller's conditions, passed on.
            let grown = unsafe { self.grow(block, old, new)? };
            // SAFETY: 1. `new.size()` is at least `old.size()` and is the length of `grown`.
            unsafe { grown.cast::<u8>().add(old.size()).write_bytes(0, new.size() - old.size()) };
            Ok(grown)
        }

        unsafe fn shrink(
            &self,
            block: NonNull<u8>,
            old: Layout,
            new: Layout,
        ) -> std::result::Result<NonNull<[u8]>, AllocError> {
            // SAFETY: 1. the caller's conditions, passed on. The `grow` of this allocator keeps as
            // many bytes as both layouts have.
            unsafe { self.grow(block, old, new) }
        }
    }
}

impl PinnedAllocator {
    /// Allocates a slot from this thread's magazine.
    #[inline(always)]
    fn allocate_fast(&self, layout: Layout) -> Option<NonNull<u8>> {
        self.core.allocate_fast_from(thread::magazine(&self.generation)?, self.generation, layout)
    }

    /// Allocates by the slow path. Returns what `allocate` returns, so that the call can be a tail
    /// call.
    #[cold]
    #[inline(never)]
    fn allocate_slow<E>(&self, layout: Layout, none: E) -> std::result::Result<NonNull<[u8]>, E> {
        let block = self.core.allocate_slow(self.generation, layout);
        block.inspect(|block| poison::on_allocate(block.cast(), layout.size())).map_err(|error| {
            self.core.explain_once(self.generation, &error);
            none
        })
    }

    #[cold]
    #[inline(never)]
    fn free_slow(&self, block: NonNull<u8>, layout: Layout) {
        self.core.deallocate_slow(self.generation, block, layout);
    }

    /// Frees a live block that did not fit into the magazine's bins.
    #[cold]
    #[inline(never)]
    fn free_uncached(
        &self,
        magazine: &Magazine,
        span: &'static SlabSpan,
        block: NonNull<u8>,
        layout: Layout,
    ) {
        if !self.core.free_fast_shared(magazine, self.generation, span, block, layout) {
            self.free_slow(block, layout);
        }
    }

    /// Resizes in place if the address satisfies the new layout and there is room. Returns whether
    /// it did.
    fn resize_in_place(&self, block: NonNull<u8>, old: Layout, new: Layout) -> bool {
        let resized = old.size() > 0
            && new.size() > 0
            && block.addr().get().is_multiple_of(new.align())
            && self.core.resize(self.generation, block, old.size(), new.size());
        if resized && new.size() > old.size() {
            poison::on_allocate(block, new.size());
        }
        resized
    }
}

// SAFETY: 1. when a block with a shut gate is freed, it is kept out of the heap. Its region lives
// as long as the pending block, and the core that holds both is never freed. 2. when such a block
// shrinks, its tail is not reused.
unsafe impl DeferReuse for PinnedAllocator {
    fn defer(&self, address: NonNull<u8>, until: Arc<dyn Gate>) -> Result<()> {
        self.core.defer(self.generation, address, until)
    }
}

impl fmt::Debug for PinnedAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedAllocator")
            .field("generation", &self.generation)
            .finish_non_exhaustive()
    }
}
