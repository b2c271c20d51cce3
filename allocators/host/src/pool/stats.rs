//! Statistics of a pool, and the counts of its caches.

use aquifer_core::PoolStats;

/// Statistics of a [`PinnedPool`](crate::PinnedPool).
///
/// See [`PinnedPool`](crate::PinnedPool) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PinnedStats {
    /// The statistics common to all pools.
    pub memory: PoolStats,
    /// Regions (a count).
    pub regions: u64,
    /// Bytes of regions that devices can access directly, without staging.
    pub pinned: u64,
    /// Bytes of free blocks in magazines, including those of ended threads, and in the depot. A
    /// part of `memory.cached`.
    pub in_magazines: u64,
    /// Refused frees (a count): the pointer was no live block, or the layout did not fit the
    /// block. Nothing was freed.
    pub refused_frees: u64,
    /// Acquisitions of the pool's lock (a count), including the one by `stats`. Magazines keep
    /// this number low.
    pub locked: u64,
}

/// The counts and the contents of a magazine or a depot.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct Tally {
    pub(super) allocations: u64,
    pub(super) frees: u64,
    /// Bytes requested minus bytes freed. Wraps, since a thread may free what another has
    /// allocated.
    pub(super) requested: u64,
    /// Bytes of its free blocks.
    pub(super) cached: u64,
    /// Number of its free blocks.
    pub(super) blocks: u64,
}

impl Tally {
    pub(super) fn add(&mut self, other: Self) {
        self.allocations += other.allocations;
        self.frees += other.frees;
        self.requested = self.requested.wrapping_add(other.requested);
        self.cached += other.cached;
        self.blocks += other.blocks;
    }
}
