//! Counts of operations and of cached blocks.

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
