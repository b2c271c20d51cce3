//! What the memory of graphs holds.

use super::GraphMemory;
use aquifer_core::PoolStats;
use std::fmt;

impl GraphMemory {
    pub(in crate::graphs) fn stats(&self) -> PoolStats {
        let state = self.state();
        let mut stats = PoolStats::default();
        stats.blocks = state.slots.blocks.len() as u64;
        if !state.slots.phase.has_memory() {
            return stats;
        }
        (stats.physical, stats.graphs) = (state.slots.of_graphs, state.slots.of_graphs);
        (stats.live, stats.requested) = state.slots.live();
        stats.pending = state.slots.ranges.pending_bytes();
        stats.cached = stats.physical - stats.live - stats.pending;
        stats
    }
}

impl fmt::Debug for GraphMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.stats();
        f.debug_struct("Memory")
            .field("number", &self.number)
            .field("physical", &stats.physical)
            .field("live", &stats.live)
            .finish_non_exhaustive()
    }
}
