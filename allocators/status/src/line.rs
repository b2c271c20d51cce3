//! The figures that a cache's hot path changes.

use crate::layout::LINE_BYTES;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The figures of one cache, beside those of its pool's slot.
///
/// The owner of the cache counts here what it also counts in its own memory, under the cache's lock
/// or on its only thread. It never reads the line, except to add to a figure. A line belongs to its
/// cache until the process ends. Where no file has room for a line, it is private memory.
///
/// ```
/// let line = aquifer_status::claim_line();
/// line.count_alloc(512, 300);     // a block of 512 bytes, of which 300 were requested
/// line.count_free(0, 300);
/// ```
#[derive(Default, Debug)]
#[repr(C, align(128))]
pub struct CacheLine {
    /// The identity of the pool's slot, or 0.
    pub(crate) owner: AtomicU64,
    /// Bytes of live and pending blocks.
    pub(crate) occupied: AtomicU64,
    /// Bytes that the live blocks were requested with. Wraps where one thread frees what another
    /// has allocated.
    pub(crate) requested: AtomicU64,
    /// Blocks allocated.
    pub(crate) taken: AtomicU64,
    /// Blocks freed.
    pub(crate) returned: AtomicU64,
    pub(crate) pending: AtomicU64,
    pub(crate) pending_blocks: AtomicU64,
    unused: [AtomicU64; 9],
}

const _: () = assert!(size_of::<CacheLine>() == LINE_BYTES);

/// The figures that a cache has counted itself, to write them to its [`CacheLine`] as a whole.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CacheFigures {
    /// Bytes of live and pending blocks.
    pub occupied: u64,
    /// Bytes that the live blocks were requested with.
    pub requested: u64,
    /// Blocks allocated (a count).
    pub allocations: u64,
    /// Live and pending blocks (a count).
    pub blocks: u64,
    /// Bytes of pending blocks.
    pub pending: u64,
    /// Pending blocks (a count).
    pub pending_blocks: u64,
}

/// Adds to a figure that has one writer at a time.
#[inline(always)]
fn add(figure: &AtomicU64, by: u64) {
    figure.store(figure.load(Relaxed).wrapping_add(by), Relaxed);
}

impl CacheLine {
    /// Counts an allocation of `requested` bytes. `occupied` are the bytes of all blocks after it.
    #[inline(always)]
    pub fn count_alloc(&self, occupied: u64, requested: u64) {
        add(&self.taken, 1);
        self.occupied.store(occupied, Relaxed);
        add(&self.requested, requested);
    }

    /// Counts a free of a block of `requested` bytes. `occupied` are the bytes of all blocks after
    /// it.
    #[inline(always)]
    pub fn count_free(&self, occupied: u64, requested: u64) {
        add(&self.returned, 1);
        self.occupied.store(occupied, Relaxed);
        add(&self.requested, requested.wrapping_neg());
    }

    /// Writes all figures, and the slot of the pool that they belong to.
    pub fn store(&self, owner: u64, figures: &CacheFigures) {
        self.occupied.store(figures.occupied, Relaxed);
        self.requested.store(figures.requested, Relaxed);
        self.taken.store(figures.allocations, Relaxed);
        self.returned.store(figures.allocations.wrapping_sub(figures.blocks), Relaxed);
        self.pending.store(figures.pending, Relaxed);
        self.pending_blocks.store(figures.pending_blocks, Relaxed);
        self.owner.store(owner, Relaxed);
    }
}
