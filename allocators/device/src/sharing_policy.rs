//! The policy that decides whether streams keep their free memory in separate caches or share it.
//!
//! - **Separate**: each stream is served from its own cache and never waits for another stream. But
//!   free memory in one cache is of no use to other streams, and a large block may fit in no single
//!   cache although enough is free in all.
//! - **Together**: freed memory goes to a shared free list, and blocks go to the lowest address
//!   that is ready for them, whichever stream used it last. This packs blocks tightly without
//!   moving handles. The price is a slow path for nearly each block above the small sizes, and
//!   waits between streams.
//!
//! Rules:
//!
//! - Streams keep separate caches while memory is ample, and share free memory once more than half
//!   of the budget is used.
//! - While separate, only a large block takes what is in other streams' caches, and only if more
//!   than a third of all memory is idle, except for the steady state below. If every block did so,
//!   streams that allocate at the same time would take the same ranges from each other forever.
//!   What is in no cache serves every block that its own cache has no room for: blocks above the
//!   small sizes while half of the budget is left, and from there on all, in whole slots, until
//!   half of the budget is live.
//! - If more than a third is idle, a large block reuses it before memory grows, even if its stream
//!   has to wait for the others' work on the device. Otherwise memory would grow without bound on a
//!   device that lags behind.
//! - **Similar rounds reach a steady state.** What was enough for one round is enough for the next
//!   if its blocks find room. So below the high-water mark of use, a block of 8 MiB or more reuses
//!   what other streams have, or waits for it on the device, before memory grows, however little is
//!   idle.
//! - If such a block finds no room, the free memory is fragmented. The block then gets new memory
//!   of its full size, not only what is missing next to a free range. This leaves a hole that the
//!   next round can reuse.
//! - Once several streams hold five fourths of the high-water mark, large blocks come from the
//!   shared free list, at the lowest ready address. They then lie side by side and leave large
//!   holes, and small blocks stay in their own caches. From eleven eighths on, blocks above 1 MiB
//!   do so too.
//! - **Held memory is bounded.** Several streams that repeat a loop with small differences in order
//!   find a place missing now and then. If each such block took new memory, the pool would grow in
//!   every round. So before a block above 1 MiB would raise what they hold above twelve eighths
//!   of the high-water mark, all idle handles that can be moved are moved under it.
//! - **A pool that compacts has a lower bound**: 17/16 of the high-water mark, with any number of
//!   streams and for blocks of any size. It behaves as if that were its limit, so streams share
//!   free memory once they hold half of it. A block that would exceed the bound takes what is free
//!   anywhere, also with a wait for other streams, and idle handles move under it for the rest.
//!   Whole slots of other streams come before pieces, or streams that allocate small blocks at the
//!   same time would take pieces from each other forever.

use crate::base::policy_params::{policy, sixteenths};
use aquifer_core::Budget;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The memory of one stream, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheFootprint {
    /// In live blocks.
    pub(crate) live: u64,
    /// In its cache, or freed and still in use elsewhere.
    pub(crate) free: u64,
}

/// The order in which a stream without room searches for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GrowthOrder {
    /// New memory first: half of the budget is left, and at most a third of the held memory is
    /// idle, or the block is not large and at most half is idle.
    GrowFirst,
    /// The shared free list first, even if the stream has to wait for it; then as before. Chosen if
    /// as much has been in use before and a quarter more is held.
    SharedFirst,
    /// Idle memory of other streams first, even if the stream has to wait for it; then new memory.
    /// Also for a block of at least 8 MiB if as much has been in use before, however little is
    /// idle.
    ReuseFirst,
    /// Like `ReuseFirst`, but idle handles are moved before memory grows: the held memory is seven
    /// fourths of the high-water mark of use, or would exceed its bound.
    CompactFirst,
    /// All free memory is shared, and has been searched already.
    SharedOnly,
}

/// The pieces in which a search takes memory of other caches and of the shared free list. What the
/// stream's own cache has is used in pieces of any length.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Granularity {
    /// Whole slots, so that caches stay separate. A slot is the smallest handle, usually 2 MiB.
    Slots,
    /// Pieces of any length, down to one unit of the heap, which is 512 bytes.
    Units,
}

/// The choice among otherwise equal places for a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fit {
    /// The lowest, so that free memory gathers at the other end.
    Lowest,
    /// The one that pins the fewest handles which are wholly free now. Of several, the lowest.
    FewestPinned,
}

/// The current state of the policy.
#[derive(Default, Debug)]
pub(crate) struct SharingPolicy {
    /// Whether the caches can share. If not, each keeps its memory for good.
    sharing: bool,
    /// Whether the pool compacts: see [`PoolConfig::compact`](crate::PoolConfig::compact).
    compacts: bool,
    all_shared: AtomicBool,
    /// Half of the budget is left.
    spacious: AtomicBool,
    /// At most a third of the held memory is idle.
    ample: AtomicBool,
    /// Nearly all of the budget is in use: see [`policy`].
    tight: AtomicBool,
    /// More than half of the budget is live.
    crowded: AtomicBool,
    /// There is more than one stream.
    several_streams: AtomicBool,
    /// The minimum size of blocks that come from the shared free list; `u64::MAX` if none do.
    shared_from: AtomicU64,
    /// Bytes in use at the last decision.
    live: AtomicU64,
    /// The most bytes in use at any decision or right after it.
    peak_live: AtomicU64,
    /// Bytes held at the last decision.
    held: AtomicU64,
    /// The most bytes in use at any decision. It is compared with `held`, which is also taken at
    /// decisions. With `peak_live` instead, handles would move later, and held memory would exceed
    /// its bound.
    high_water: AtomicU64,
}

impl SharingPolicy {
    /// Creates a policy under which streams start separate, and stay so unless `sharing` is set.
    pub(crate) fn new(sharing: bool, compacts: bool) -> Self {
        Self { sharing, compacts, shared_from: AtomicU64::new(u64::MAX), ..Self::default() }
    }

    /// Returns whether streams share free memory.
    #[inline]
    pub(crate) fn shares_all(&self) -> bool {
        // Relaxed: a stream that sees the change late takes one block from its own cache.
        self.all_shared.load(Ordering::Relaxed)
    }

    /// Returns the minimum size, in bytes, of free ranges that a cache releases to the shared free
    /// list.
    pub(crate) fn min_shared_extent(&self) -> u64 {
        if self.shares_all() {
            // Smaller ranges in the caches keep small blocks off the slow path.
            if self.crowded.load(Ordering::Relaxed) { 0 } else { policy().own_cache_max }
        } else {
            self.shared_from.load(Ordering::Relaxed).min(policy().large_block)
        }
    }

    /// Returns whether a block of `bytes` comes from the shared free list, even if its own stream's
    /// cache may have room, and even if that stream has just freed a block of this size.
    #[inline]
    pub(crate) fn prefers_shared(&self, bytes: u64) -> bool {
        bytes >= self.shared_from.load(Ordering::Relaxed)
    }

    /// Returns whether a block of `bytes` is searched for in the shared free list before any fence
    /// is polled: what is there is usually ready, and finding it takes no driver call. While caches
    /// release all their ranges above 1 MiB to the list, this holds for every size. It does not
    /// hold while all free memory is shared: polling first packs tighter then.
    pub(crate) fn searches_shared_first(&self, bytes: u64) -> bool {
        let shared_from = self.shared_from.load(Ordering::Relaxed);
        !self.shares_all() && (bytes >= shared_from || shared_from <= policy().unbounded_max + 1)
    }

    /// Returns the pieces of the shared free list that serve a block of `bytes` which does not fit
    /// in its stream's cache, or `None` if a search of all memory comes first.
    pub(crate) fn shared_pieces(&self, bytes: u64) -> Option<Granularity> {
        if !self.sharing {
            return None;
        }
        if self.shares_all() || bytes >= policy().medium_block {
            return Some(Granularity::Units);
        }
        if self.spacious.load(Ordering::Relaxed) {
            // A small block takes new memory.
            return (bytes > policy().own_cache_max).then_some(Granularity::Units);
        }
        // Beside what is still in a cache, a unit would pin a slot for nothing.
        (!self.crowded.load(Ordering::Relaxed)).then_some(Granularity::Slots)
    }

    /// Returns the choice among otherwise equal places for a block.
    pub(crate) fn fit(&self) -> Fit {
        if self.tight.load(Ordering::Relaxed) { Fit::FewestPinned } else { Fit::Lowest }
    }

    /// Returns the search order for a stream that has no room for `bytes`.
    pub(crate) fn growth_order(&self, bytes: u64) -> GrowthOrder {
        if self.compacts && self.room_below(policy().compact_bound, bytes) < bytes {
            return GrowthOrder::CompactFirst;
        }
        if self.shares_all() {
            return GrowthOrder::SharedOnly;
        }
        if self.exceeds_bound(bytes) {
            return GrowthOrder::CompactFirst;
        }
        let (held, high) =
            (self.held.load(Ordering::Relaxed), self.high_water.load(Ordering::Relaxed));
        let again = self.should_reuse(bytes);
        let shares_some = self.shared_from.load(Ordering::Relaxed) < u64::MAX;
        let new = match self.fits_peak(bytes) && shares_some {
            true => GrowthOrder::SharedFirst,
            false => GrowthOrder::GrowFirst,
        };
        match (self.spacious.load(Ordering::Relaxed), self.ample.load(Ordering::Relaxed)) {
            (true, true) if !again && !self.prefers_shared(bytes) => new,
            (true, false)
                if !again
                    && bytes < policy().large_block
                    && held < sixteenths(high, policy().reuse_all_from) =>
            {
                new
            }
            _ if held < sixteenths(high, policy().compact_from) => GrowthOrder::ReuseFirst,
            _ => GrowthOrder::CompactFirst,
        }
    }

    /// Returns the bytes of new memory that a block of `bytes` may take before idle handles move
    /// under it, where its size would exceed the bound. A pool that does not compact moves them
    /// first: below its bound, streams share less and are faster.
    pub(crate) fn growth_before_moves(&self, bytes: u64) -> u64 {
        if self.compacts { self.room_below(policy().compact_bound, bytes) } else { 0 }
    }

    /// Returns the bytes that can be added to what is held before it exceeds these sixteenths of
    /// the peak of live bytes, as that is with a block of `bytes` more.
    fn room_below(&self, parts: u64, bytes: u64) -> u64 {
        let live = self.live.load(Ordering::Relaxed).saturating_add(bytes);
        sixteenths(self.peak_live.load(Ordering::Relaxed).max(live), parts)
            .saturating_sub(self.held.load(Ordering::Relaxed))
    }

    /// Returns whether several streams would hold more than the bound with `bytes` of new memory.
    fn exceeds_bound(&self, bytes: u64) -> bool {
        self.sharing
            && bytes > policy().unbounded_max
            && self.several_streams.load(Ordering::Relaxed)
            && self.room_below(policy().bound, bytes) < bytes
    }

    /// Returns whether as much has been in use before as now with a block of `bytes` more.
    fn fits_peak(&self, bytes: u64) -> bool {
        self.live.load(Ordering::Relaxed).saturating_add(bytes)
            <= self.peak_live.load(Ordering::Relaxed)
    }

    /// Returns whether a block of `bytes` should search other streams' memory because what is held
    /// was enough before.
    fn should_reuse(&self, bytes: u64) -> bool {
        bytes >= policy().medium_block
            && self.several_streams.load(Ordering::Relaxed)
            && self.fits_peak(bytes)
    }

    /// Returns whether new memory for a block of `bytes` has the full size of the block, whatever
    /// is free next to it. The held memory was enough before and is fragmented now, so this creates
    /// a hole that can be reused.
    pub(crate) fn grows_whole_blocks(&self, bytes: u64) -> bool {
        self.should_reuse(bytes)
    }

    /// Records that a block of `bytes` has been allocated since the last decision.
    pub(crate) fn record_served(&self, bytes: u64) {
        self.peak_live
            .fetch_max(self.live.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Relaxed);
    }

    /// Decides again, from the budget, the memory of each stream, and the `shared` free bytes.
    /// `streams` has those that are leased or hold memory: idle caches are no streams. Once
    /// together, streams stay so until less than three eighths of the budget are used. This
    /// hysteresis keeps a loop at the border from oscillating.
    pub(crate) fn update(&self, budget: &Budget, streams: &[CacheFootprint], shared: u64) {
        let (live, free) =
            streams.iter().fold((0, shared), |(live, free), s| (live + s.live, free + s.free));
        let all_held = live + free;
        let peak_live = self.peak_live.fetch_max(live, Ordering::Relaxed).max(live);
        let (mut used, mut limit) = (budget.used(), budget.limit());
        let bound = sixteenths(peak_live, policy().compact_bound);
        // The one that leaves less. Other pools may use the same budget.
        if self.compacts && bound.saturating_sub(all_held) < limit.saturating_sub(used) {
            (used, limit) = (all_held, bound);
        }
        let border = match self.shares_all() {
            true => sixteenths(limit, policy().separate_below),
            false => sixteenths(limit, policy().share_above),
        };
        let held = |stream: &&CacheFootprint| stream.live + stream.free;
        let some = streams.iter().filter(|stream| held(stream) > 0).count() as u64;
        let holders = streams
            .iter()
            .filter(|stream| held(stream) > used / policy().holder_part.max(2 * some));
        let all_shared = self.sharing && used > border && holders.count() > 1;
        let (spacious, ample) = (
            used <= sixteenths(limit, policy().spacious_up_to),
            free <= sixteenths(live, policy().ample_idle),
        );
        let tight = limit.saturating_sub(used) + free < limit / policy().tight_part;
        self.held.store(all_held, Ordering::Relaxed);
        self.live.store(live, Ordering::Relaxed);
        self.high_water.fetch_max(live, Ordering::Relaxed);
        let holds =
            |parts| self.sharing && streams.len() > 1 && all_held >= sixteenths(peak_live, parts);
        let shared_from = if all_shared {
            policy().own_cache_max + 1
        } else if holds(policy().share_larger_from) {
            policy().unbounded_max + 1
        } else if holds(policy().surplus) {
            policy().large_block
        } else {
            u64::MAX
        };
        let flags = [
            (&self.all_shared, all_shared),
            (&self.spacious, spacious),
            (&self.ample, ample),
            (&self.tight, tight),
            (&self.crowded, live > sixteenths(budget.limit(), policy().drain_above)),
            (&self.several_streams, streams.len() > 1),
        ];
        // Written only on change: the flags are read far more often, and the cache line stays
        // shared.
        if self.shared_from.load(Ordering::Relaxed) != shared_from {
            self.shared_from.store(shared_from, Ordering::Relaxed);
        }
        for (flag, value) in flags {
            if flag.load(Ordering::Relaxed) != value {
                flag.store(value, Ordering::Relaxed);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::policy_params::POLICY;

    const MIB: u64 = 1 << 20;
    const MEDIUM: u64 = POLICY.medium_block;
    const LARGE: u64 = POLICY.large_block;

    #[test]
    fn sharing_starts_above_half_of_the_budget_and_ends_below_three_eighths() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 800));
        let mut step = |used: u64| {
            let charge = budget.charge(used);
            policy.update(&budget, &[CacheFootprint { live: used / 2, free: 0 }; 2], 0);
            drop(charge);
            policy.shares_all()
        };
        assert_eq!([400, 401, 301, 300, 400].map(&mut step), [false, true, true, false, false]);
    }

    #[test]
    fn a_stream_that_holds_nearly_all_memory_does_not_share() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 800));
        let charge = budget.charge(800);
        let step = |first: u64, second: u64| {
            policy.update(
                &budget,
                &[
                    CacheFootprint { live: first, free: 0 },
                    CacheFootprint { live: second / 2, free: second / 2 },
                ],
                0,
            );
            policy.shares_all()
        };
        assert!(!step(720, 80));
        assert!(step(690, 110));
        drop(charge);
    }

    #[test]
    fn equal_streams_share_but_small_streams_beside_a_large_one_do_not() {
        let budget = Budget::new("a test", 1600);
        let _charge = budget.charge(1600);
        for count in [2, 7, 8, 9, 16, 100] {
            let policy = SharingPolicy::new(true, false);
            // Streams that hold nothing do not count.
            let mut equal = vec![CacheFootprint { live: 1600 / count, free: 0 }; count as usize];
            equal.extend([CacheFootprint { live: 0, free: 0 }; 50]);
            policy.update(&budget, &equal, 0);
            assert!(policy.shares_all(), "{count} equal streams");
            let policy = SharingPolicy::new(true, false);
            let mut small = vec![CacheFootprint { live: 160 / count, free: 0 }; count as usize];
            small.push(CacheFootprint { live: 1440, free: 0 });
            policy.update(&budget, &small, 0);
            assert!(!policy.shares_all(), "one large stream and {count} small ones");
        }
    }

    #[test]
    fn pool_grows_first_while_half_of_the_budget_is_left_and_little_is_idle() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 800));
        let step = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            policy.update(&budget, &[CacheFootprint { live, free: 0 }], free);
            drop(charge);
            policy.growth_order(LARGE) == GrowthOrder::GrowFirst
        };
        assert_eq!(
            [(200, 100), (200, 101), (300, 101)].map(|(live, free)| step(live, free)),
            [true, false, false]
        );
    }

    #[test]
    fn memory_is_tight_when_nearly_all_of_the_budget_is_in_use_but_not_when_it_is_idle() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 3200 * MIB));
        let step = |live: u64, free: u64| {
            let (live, free) = (live * MIB, free * MIB);
            let charge = budget.charge(live + free);
            policy.update(&budget, &[CacheFootprint { live, free: 0 }], free);
            drop(charge);
            policy.fit()
        };
        let part = 3200 / POLICY.tight_part;
        assert_eq!(step(3200 - part, 0), Fit::Lowest);
        assert_eq!(step(3201 - part, 0), Fit::FewestPinned);
        assert_eq!(step(3201 - part, part - 1), Fit::FewestPinned);
        assert_eq!(step(3200 - part, part), Fit::Lowest);
    }

    #[test]
    fn large_blocks_use_shared_memory_once_a_quarter_more_is_held_than_the_peak() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 100_000));
        let update =
            |streams: &[CacheFootprint], shared: u64| policy.update(&budget, streams, shared);
        let two = [CacheFootprint { live: 500, free: 0 }; 2];
        update(&two, 0);
        assert!(!policy.prefers_shared(LARGE));
        update(&two, 249);
        assert!(!policy.prefers_shared(LARGE));
        update(&two, 250);
        assert!(policy.prefers_shared(LARGE) && !policy.prefers_shared(LARGE - 1));
        // From eleven eighths on, all blocks above 1 MiB.
        update(&two, 374);
        assert!(!policy.prefers_shared(MIB + 1) && !policy.searches_shared_first(1));
        update(&two, 375);
        assert!(policy.prefers_shared(MIB + 1) && !policy.prefers_shared(MIB));
        assert!(policy.searches_shared_first(1));
        // The high-water mark counts, not the current use.
        update(&[CacheFootprint { live: 100, free: 0 }; 2], 1000);
        assert!(!policy.prefers_shared(LARGE));
        // A single stream has no other to share with.
        update(&two[..1], 1000);
        assert!(!policy.prefers_shared(LARGE));
        let separate = SharingPolicy::new(false, false);
        separate.update(&budget, &two, 1000);
        assert!(!separate.prefers_shared(LARGE));
    }

    #[test]
    fn handles_move_before_several_streams_hold_half_more_than_the_peak() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 1 << 40));
        let high = 1000 * MIB;
        let step = |live: u64, free: u64, bytes: u64, streams: u64| {
            let each = CacheFootprint { live: live / streams, free: 0 };
            policy.update(&budget, &vec![each; streams as usize], free);
            policy.growth_order(bytes) == GrowthOrder::CompactFirst
        };
        assert!(!step(high, 498 * MIB, 2 * MIB, 2));
        let below = high - 2 * MIB;
        assert!(!step(below, 500 * MIB, 2 * MIB, 2) && step(below, 501 * MIB, 2 * MIB, 2));
        assert!(!step(below, 502 * MIB, MIB, 2), "a small block");
        assert!(!step(below, 502 * MIB, 2 * MIB, 1), "a single stream");
        // A block that raises the peak raises the bound.
        assert!(!step(high, 502 * MIB, 4 * MIB, 2) && step(high, 503 * MIB, 4 * MIB, 2));
    }

    #[test]
    fn handles_of_a_pool_that_compacts_move_before_it_exceeds_its_bound() {
        let (policy, budget) = (SharingPolicy::new(true, true), Budget::new("a test", 1 << 40));
        let high = 1600 * MIB;
        let step = |live: u64, free: u64, bytes: u64, streams: u64| {
            let each = CacheFootprint { live: live / streams, free: 0 };
            policy.update(&budget, &vec![each; streams as usize], free);
            policy.growth_order(bytes) == GrowthOrder::CompactFirst
        };
        let below = high - 2 * MIB;
        for streams in [1, 2] {
            assert!(!step(high, 0, 2 * MIB, streams));
            assert!(!step(below, 100 * MIB, 2 * MIB, streams));
            assert!(step(below, 101 * MIB, 2 * MIB, streams));
            assert!(!step(below, 101 * MIB, MIB / 2, streams), "it fits");
            assert!(step(high, 100 * MIB + 1, 1, streams), "a small block");
            // A block that raises the peak raises the bound.
            assert!(!step(high, 100 * MIB, 2 * MIB, streams));
            assert!(step(high, 101 * MIB, 2 * MIB, streams));
        }
    }

    #[test]
    fn streams_of_a_pool_that_compacts_share_as_if_its_bound_were_the_limit() {
        let budget = Budget::new("a test", 1 << 40);
        // Of another pool. It counts for the budget, and not for the bound.
        let _other = budget.charge(1 << 30);
        let high = 1600;
        for (compacts, held, shares) in
            [(true, 850, false), (true, 852, true), (true, 1700, true), (false, 1700, false)]
        {
            let policy = SharingPolicy::new(true, compacts);
            let step = |live: u64, held: u64| {
                let charge = budget.charge(held);
                let each = CacheFootprint { live: live / 2, free: (held - live) / 2 };
                policy.update(&budget, &[each; 2], 0);
                drop(charge);
            };
            // One stream at the peak.
            policy.update(&budget, &[CacheFootprint { live: high, free: 0 }], 0);
            assert!(!policy.shares_all());
            step(800, held);
            assert_eq!(policy.shares_all(), shares, "{compacts}, {held}");
        }
    }

    #[test]
    fn medium_blocks_reuse_idle_memory_below_the_peak() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 1 << 40));
        let step = |live: u64, free: u64, bytes: u64| {
            policy.update(&budget, &[CacheFootprint { live: live / 2, free: 0 }; 2], free);
            policy.growth_order(bytes)
        };
        let high = 100 * MEDIUM;
        assert_eq!(step(high, 0, MEDIUM), GrowthOrder::GrowFirst);
        // Half as much is idle, and the block would be new use, or not.
        assert_eq!(step(high, high / 2 + 1, MEDIUM), GrowthOrder::GrowFirst);
        assert_eq!(step(high - MEDIUM, high / 2, MEDIUM), GrowthOrder::ReuseFirst);
        assert_eq!(step(high - MEDIUM, high / 2, MEDIUM - 1), GrowthOrder::SharedFirst);
        assert_eq!(
            step(high - MEDIUM, high / 8, MEDIUM),
            GrowthOrder::ReuseFirst,
            "however little lies idle"
        );
        assert_eq!(step(high - MEDIUM, high / 8, MEDIUM - 1), GrowthOrder::GrowFirst);
        assert!(policy.grows_whole_blocks(MEDIUM) && !policy.grows_whole_blocks(MEDIUM + 1));
    }
}
