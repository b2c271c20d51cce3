//! Statistics of a stream's cache.

use super::CacheState;
use crate::{base::usage::LiveBytes, sharing_policy::CacheFootprint};
use aquifer_core::{PoolStats, Tag, budget::Holding};
use aquifer_status::{CacheFigures, is_shown};

impl CacheState {
    /// Returns the bytes of live blocks, and the bytes that are free or pending.
    pub(crate) fn footprint(&self) -> CacheFootprint {
        let live = self.live();
        CacheFootprint { live, free: self.heap.managed_bytes() - live }
    }

    /// Returns the memory of the cache's stream. Returns `None` if the cache has no stream, or if
    /// its stream has no lease and holds nothing: such a stream neither takes nor gives memory.
    pub(crate) fn stream_footprint(&self) -> Option<CacheFootprint> {
        let (leased, footprint) = (self.timeline()?.is_leased(), self.footprint());
        (leased || footprint.live + footprint.free > 0).then_some(footprint)
    }

    /// Returns the bytes of the live blocks.
    #[inline]
    pub(super) fn live(&self) -> u64 {
        self.heap.live_bytes() - self.usage.pending
    }

    /// Returns the bytes of the live blocks, in both ways of counting.
    #[inline]
    pub(crate) fn live_bytes(&self) -> LiveBytes {
        LiveBytes { live: self.live(), requested: self.usage.requested }
    }

    /// Returns the number of live blocks.
    pub(super) fn blocks(&self) -> u64 {
        self.heap.live_blocks() - self.usage.pending_blocks
    }

    /// Adds the counters of this cache to `stats`. Peaks are those of the whole pool.
    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        let blocks = self.blocks();
        stats.live += self.live();
        stats.requested += self.usage.requested;
        stats.pending += self.usage.pending;
        stats.blocks += blocks;
        stats.allocations += self.usage.allocations;
        stats.frees += self.usage.allocations - blocks;
        stats.cached += self.heap.managed_bytes() - self.heap.live_bytes();
    }

    /// Writes the counters to the line that other processes read. The last freed block counts as
    /// live.
    pub(crate) fn write_line(&self) {
        let usage = &self.usage;
        let figures = CacheFigures {
            occupied: self.heap.live_bytes(),
            requested: usage.requested,
            allocations: usage.allocations,
            blocks: self.heap.live_blocks(),
            pending: usage.pending,
            pending_blocks: usage.pending_blocks,
        };
        self.line.store(self.line_owner, &figures);
    }

    /// Writes the counters to the line, and adds to `stats` what readers do not find there: the
    /// bytes of the cache, or all counters if there is no room for its line.
    pub(crate) fn publish(&self, stats: &mut PoolStats) {
        self.write_line();
        if is_shown(self.line) {
            stats.cached += self.heap.managed_bytes();
        } else {
            self.add_to(stats);
        }
    }

    /// An iterator over what each tag holds.
    pub(crate) fn holdings(&self) -> impl Iterator<Item = Holding> {
        let tagged = &self.usage.tagged;
        let untagged = Holding {
            tag: Tag::NONE,
            bytes: self.usage.requested - tagged.iter().map(|h| h.bytes).sum::<u64>(),
            blocks: self.blocks() - tagged.iter().map(|h| h.blocks).sum::<u64>(),
        };
        std::iter::once(untagged).chain(tagged.iter().copied())
    }

    /// Returns the stream's number and the bytes of its cache that its own queued work may still
    /// use; `None` where there are none.
    pub(crate) fn in_use(&self) -> Option<(u32, u64)> {
        let timeline = self.timeline().filter(|timeline| !timeline.is_done(self.last_free))?;
        let busy = self.heap.free_extents().filter(|extent| !timeline.is_done(extent.stamp));
        let bytes: u64 = busy.map(|extent| extent.range.len).sum();
        (bytes > 0).then(|| (timeline.number(), bytes))
    }

    /// An iterator over the uses of pending blocks: the number of the using stream, and the bytes
    /// of the block.
    pub(crate) fn users(&self) -> impl Iterator<Item = (u32, u64)> {
        self.pending.iter().flat_map(|p| p.uses.iter().map(|used| (used.on().number(), p.bytes)))
    }
}
