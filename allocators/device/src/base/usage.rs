//! What live blocks hold: bytes, counts and peaks, and bytes by tag.
//!
//! Dedicated memory, the driver's allocators and checked pools count here. A stream's cache stores
//! fewer numbers, since it counts on the hot path and its heap counts the live bytes.

use aquifer_core::{PoolStats, Tag, budget::Holding};
use std::{
    ops::{AddAssign, SubAssign},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// By how many bytes a part of a pool may raise the reported peak above the true one.
pub(crate) const PEAK_SLACK: u64 = 1 << 20;

/// The peak of a pool as a whole, for its parts that count outside of the caches.
pub(crate) trait JointPeak: Send + Sync {
    /// Counts memory that becomes live. The caller must not have handed it out yet.
    fn add(&self, bytes: LiveBytes);

    /// Counts memory that is live no more.
    fn remove(&self, bytes: LiveBytes);

    /// Returns the peak of the whole pool.
    fn peak(&self) -> LiveBytes;
}

/// The live blocks of a pool, or of a part of one: bytes, counts and peaks.
#[derive(Default)]
pub(crate) struct LiveUsage {
    now: LiveBytes,
    /// Its own peak, if it is not a part of a pool.
    peak: LiveBytes,
    /// The peaks of the pool that this is a part of.
    pool: Option<Arc<dyn JointPeak>>,
    /// What they count: at most `slack` more than there is.
    told: LiveBytes,
    slack: u64,
    blocks: u64,
    allocations: u64,
    frees: u64,
}

impl LiveUsage {
    /// Creates the counts of a part of a pool, whose peak is that of the whole pool. It counts there
    /// within `slack` bytes, so that most operations change nothing that all parts share.
    pub(crate) fn of_pool(peaks: Arc<dyn JointPeak>, slack: u64) -> Self {
        Self { pool: Some(peaks), slack, ..Self::default() }
    }

    /// Returns the live bytes, in allocated sizes.
    pub(crate) fn live(&self) -> u64 {
        self.now.live
    }

    /// Counts memory that becomes live.
    pub(crate) fn add_bytes(&mut self, live: u64, requested: u64) {
        debug_assert!(requested <= live, "memory is smaller than requested");
        let bytes = LiveBytes { live, requested };
        self.now += bytes;
        match &self.pool {
            Some(peaks) if !self.now.is_within(self.told) => {
                peaks.add(self.now.above(self.told));
                self.told = self.told.max(self.now);
            }
            Some(_) => debug_assert!(
                self.told.above(self.now).is_within(self.slack()),
                "the pool counts more than the slack beyond what is live"
            ),
            None => self.peak = self.peak.max(self.now),
        }
    }

    /// Counts memory that is live no more.
    pub(crate) fn remove_bytes(&mut self, live: u64, requested: u64) {
        let bytes = LiveBytes { live, requested };
        debug_assert!(bytes.is_within(self.now), "more is freed than is live");
        self.now -= bytes;
        let surplus = self.told.above(self.now);
        if let Some(peaks) = &self.pool
            && !surplus.is_within(self.slack())
        {
            peaks.remove(surplus);
            self.told -= surplus;
        }
        debug_assert!(
            self.pool.is_none() || self.now.is_within(self.told),
            "the pool counts less than is live"
        );
    }

    fn slack(&self) -> LiveBytes {
        LiveBytes { live: self.slack, requested: self.slack }
    }

    /// Counts a block whose bytes are counted apart.
    pub(crate) fn add_block(&mut self) {
        self.blocks += 1;
        self.allocations += 1;
    }

    /// Counts the free of a block whose bytes are counted apart.
    pub(crate) fn remove_block(&mut self) {
        debug_assert!(self.blocks > 0, "more blocks are freed than were allocated");
        self.blocks -= 1;
        self.frees += 1;
    }

    /// Counts an allocated block.
    pub(crate) fn record_alloc(&mut self, live: u64, requested: u64) {
        self.add_bytes(live, requested);
        self.add_block();
    }

    /// Counts a freed block.
    pub(crate) fn record_free(&mut self, live: u64, requested: u64) {
        self.remove_bytes(live, requested);
        self.remove_block();
    }

    /// Returns the peak: that of the whole pool, if this is a part of one.
    pub(crate) fn peak(&self) -> LiveBytes {
        self.pool.as_ref().map_or(self.peak, |peaks| peaks.peak())
    }

    /// Adds all counts but the peaks to `stats`.
    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        stats.live += self.now.live;
        stats.requested += self.now.requested;
        stats.blocks += self.blocks;
        stats.allocations += self.allocations;
        stats.frees += self.frees;
    }
}

/// What each tag holds.
#[derive(Default)]
pub(crate) struct TagHoldings {
    holdings: Vec<Holding>,
    /// Index of the last tag. The next block usually has the same tag.
    last: usize,
}

impl TagHoldings {
    /// Returns the holding of a tag, to be changed.
    #[inline]
    pub(crate) fn of_mut(&mut self, tag: Tag) -> &mut Holding {
        if self.holdings.get(self.last).is_none_or(|h| h.tag != tag) {
            self.last = self.find(tag);
        }
        &mut self.holdings[self.last]
    }

    /// Searches from the front, since there are few tags.
    #[inline(never)]
    fn find(&mut self, tag: Tag) -> usize {
        self.holdings.iter().position(|h| h.tag == tag).unwrap_or_else(|| {
            self.holdings.push(Holding { tag, bytes: 0, blocks: 0 });
            self.holdings.len() - 1
        })
    }

    /// An iterator over the holdings of all tags that ever had any.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Holding> {
        self.holdings.iter()
    }
}

/// Bytes of live blocks, in both ways of counting. Sums wrap around: a part of them may be below
/// zero for a moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct LiveBytes {
    /// In allocated sizes.
    pub(crate) live: u64,
    /// In requested sizes.
    pub(crate) requested: u64,
}

impl LiveBytes {
    /// More than any pool has.
    pub(crate) const MAX: Self = Self { live: u64::MAX, requested: u64::MAX };

    /// Returns whether neither number is above its bound.
    #[inline]
    pub(crate) fn is_within(self, bound: Self) -> bool {
        self.live <= bound.live && self.requested <= bound.requested
    }

    /// Returns the larger of each number.
    pub(crate) fn max(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// Returns what `self` has above `other`, or 0, of each number.
    pub(crate) fn above(self, other: Self) -> Self {
        self.zip(other, u64::saturating_sub)
    }

    /// Returns `change` of each number.
    pub(crate) fn map(self, change: impl Fn(u64) -> u64) -> Self {
        Self { live: change(self.live), requested: change(self.requested) }
    }

    /// Sets the peaks of `stats` to these bytes, or to what is live there if that is more: a block
    /// that is being allocated may be live in one of the counts only.
    pub(crate) fn set_in(self, stats: &mut PoolStats) {
        stats.peak_live = self.live.max(stats.live);
        stats.peak_requested = self.requested.max(stats.requested);
    }

    fn zip(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self { live: with(self.live, other.live), requested: with(self.requested, other.requested) }
    }
}

impl AddAssign for LiveBytes {
    fn add_assign(&mut self, other: Self) {
        *self = self.zip(other, u64::wrapping_add);
    }
}

impl SubAssign for LiveBytes {
    fn sub_assign(&mut self, other: Self) {
        *self = self.zip(other, u64::wrapping_sub);
    }
}

/// Bytes by which the parts of a pool may rise before they settle: see [`crate::peaks`].
#[derive(Default)]
pub(crate) struct PeakRoom {
    live: AtomicU64,
    requested: AtomicU64,
}

impl PeakRoom {
    /// Sets what there is.
    pub(crate) fn set(&self, bytes: LiveBytes) {
        self.live.store(bytes.live, Ordering::Release);
        self.requested.store(bytes.requested, Ordering::Release);
    }

    /// Returns what there is.
    pub(crate) fn left(&self) -> LiveBytes {
        let load = |bytes: &AtomicU64| bytes.load(Ordering::Acquire);
        LiveBytes { live: load(&self.live), requested: load(&self.requested) }
    }

    pub(crate) fn give(&self, bytes: LiveBytes) {
        self.live.fetch_add(bytes.live, Ordering::AcqRel);
        self.requested.fetch_add(bytes.requested, Ordering::AcqRel);
    }

    /// Takes both numbers, or neither. Returns whether there was enough.
    pub(crate) fn take(&self, bytes: LiveBytes) -> bool {
        let take = |from: &AtomicU64, bytes: u64| {
            let left = |have: u64| have.checked_sub(bytes);
            from.fetch_update(Ordering::AcqRel, Ordering::Acquire, left).is_ok()
        };
        let has_live = take(&self.live, bytes.live);
        let has_both = has_live && take(&self.requested, bytes.requested);
        if has_live && !has_both {
            self.give(LiveBytes { live: bytes.live, requested: 0 });
        }
        has_both
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_of_blocks_and_of_bytes_add_up_and_peaks_stay() {
        let mut usage = LiveUsage::default();
        usage.record_alloc(512, 300);
        usage.add_bytes(1024, 1000);
        usage.record_free(512, 300);
        let counts = |usage: &LiveUsage| {
            let mut stats = PoolStats::default();
            usage.add_to(&mut stats);
            usage.peak().set_in(&mut stats);
            let bytes = [stats.live, stats.requested, stats.peak_live, stats.peak_requested];
            (bytes, [stats.blocks, stats.allocations, stats.frees])
        };
        assert_eq!(counts(&usage), ([1024, 1000, 1536, 1300], [0, 1, 1]));
    }

    #[test]
    fn every_tag_has_one_holding() {
        let mut holdings = TagHoldings::default();
        let tags = [Tag::NONE, Tag::OTHER];
        for (tag, bytes) in [(tags[0], 1), (tags[1], 2), (tags[0], 4), (tags[1], 8)] {
            holdings.of_mut(tag).bytes += bytes;
        }
        assert_eq!(holdings.iter().map(|held| held.bytes).collect::<Vec<_>>(), [5, 10]);
    }
}
