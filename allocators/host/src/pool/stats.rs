//! Statistics of a pool.

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
