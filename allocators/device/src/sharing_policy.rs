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
//! - **Held memory is bounded** by 17/16 of the high-water mark, or by 96 MiB more than it if that
//!   is more. Several streams that repeat a loop with small differences in order find a place
//!   missing now and then. If each such block took new memory, the pool would grow in every round.
//!   The pool behaves as if the bound were its limit, so streams share free memory once they hold
//!   half of it. A block that would exceed the bound takes what is free anywhere, also with a wait
//!   for other streams, and idle handles move under it for the rest. Whole slots of other streams
//!   come before pieces, or streams that allocate small blocks at the same time would take pieces
//!   from each other forever.
//! - The bound **rises** where it costs too much, by a 64th of the high-water mark at a time: where
//!   many handles move for it, or where several threads allocate at once, which would take turns.
//!   Where less than half of the budget is left, it is 19/16 at once. Where it costs too much even
//!   there, it **yields**. Streams are separate then. All handles that can be moved are moved
//!   before the pool holds more than 28/16 of the high-water mark. After ever longer times the
//!   bound is tried again.
//! - **Gaps are closed** where the budget leaves little beyond the high-water mark. Each handle
//!   that moves leaves bare addresses behind, and blocks around them end within handles. Once an
//!   eighth of what is held is free, handles at the highest addresses move there, so that the next
//!   round finds memory as the first one left it.
//! - A pool that **compacts** keeps to 17/16, at any cost.

mod gap_policy;
mod held_bound;

use crate::base::policy_params::{policy, sixteenths};
use aquifer_core::Budget;
pub(crate) use gap_policy::GapPolicy;
use held_bound::HeldBound;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The memory of one stream, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheFootprint {
    /// In live blocks.
    pub(crate) live: u64,
    /// In its cache, or freed and still in use elsewhere.
    pub(crate) free: u64,
    /// Blocks that it has allocated.
    pub(crate) allocations: u64,
}

/// The order in which a stream without room searches for memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum GrowthOrder {
    /// New memory first: half of the budget is left, and at most a third of the held memory is
    /// idle, or the block is not large.
    GrowFirst,
    /// Idle memory of other streams first, even if the stream has to wait for it; then new memory.
    /// Also for a block of at least 8 MiB if as much has been in use before, however little is
    /// idle.
    ReuseFirst,
    /// Like `ReuseFirst`, but idle handles are moved before memory grows: what is held would exceed
    /// its bound.
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
    /// Bytes in use at the last decision.
    live: AtomicU64,
    /// The most bytes in use at any decision or right after it.
    peak_live: AtomicU64,
    /// Bytes held at the last decision.
    held: AtomicU64,
    /// The bound leaves less than the budget does, and may yield.
    binds: AtomicBool,
    held_bound: HeldBound,
    /// Searches while all free memory is shared and memory is not crowded.
    searches: AtomicU64,
    /// How many of the next searches poll first, since one has found nothing.
    polls: AtomicU64,
    pub(crate) gaps: GapPolicy,
    /// Threads in a slow path.
    threads: AtomicU64,
}

/// A thread in a slow path.
pub(crate) struct InSlowPath<'a>(&'a SharingPolicy);

impl Drop for InSlowPath<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::Relaxed);
    }
}

impl SharingPolicy {
    /// Creates a policy under which streams start separate, and stay so unless `sharing` is set.
    pub(crate) fn new(sharing: bool, compacts: bool) -> Self {
        Self { sharing, compacts, ..Self::default() }
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
        // Smaller ranges in the caches keep small blocks off the slow path.
        if self.crowded.load(Ordering::Relaxed) { 0 } else { policy().own_cache_max }
    }

    /// Returns whether a block of `bytes` comes from the shared free list, even if its own stream's
    /// cache may have room, and even if that stream has just freed a block of this size.
    #[inline]
    pub(crate) fn prefers_shared(&self, bytes: u64) -> bool {
        bytes > policy().own_cache_max && self.shares_all()
    }

    /// Returns whether a block is searched for in the shared free list before any fence is polled,
    /// which takes no driver call. This holds for most searches while free memory is shared.
    /// Polling first packs tighter. So it is always done in a pool that compacts and once half of
    /// the budget is live, and else by one search of several, and for a while after a search that
    /// found no room.
    pub(crate) fn searches_shared_first(&self) -> bool {
        let every = policy().poll_every;
        if !self.shares_all() || self.compacts || self.crowded.load(Ordering::Relaxed) {
            return false;
        }
        let polls = self.polls.load(Ordering::Relaxed);
        if polls > 0 {
            // Relaxed: two threads may count one search.
            self.polls.store(polls - 1, Ordering::Relaxed);
            return false;
        }
        self.searches.fetch_add(1, Ordering::Relaxed) % every != every - 1
    }

    /// Records that the free memory of all streams, whose work has just been polled, had no room
    /// for a block.
    pub(crate) fn record_no_room(&self) {
        if self.shares_all() {
            self.polls.store(policy().polls_without_room, Ordering::Relaxed);
        }
    }

    /// Counts a thread in the slow path, until the value is dropped.
    pub(crate) fn enter_slow_path(&self) -> InSlowPath<'_> {
        let others = self.threads.fetch_add(1, Ordering::Relaxed);
        self.charge_bound(others.min(1));
        InSlowPath(self)
    }

    /// Counts handles that have moved under a block.
    pub(crate) fn record_moves(&self, moves: u64) {
        self.charge_bound(moves);
    }

    /// Adds moves or encounters to the cost of the bound, if it is what leaves least.
    fn charge_bound(&self, events: u64) {
        if events > 0 && self.binds.load(Ordering::Relaxed) {
            self.held_bound.add(events);
        }
    }

    /// Returns the bytes that the pool may hold where `peak` is the most that was in use; `None` if
    /// the bound has yielded, or if streams keep their memory for good.
    fn bound(&self, peak: u64) -> Option<u64> {
        if self.compacts {
            return Some(sixteenths(peak, policy().least_bound));
        }
        if self.sharing { self.held_bound.bytes(peak) } else { None }
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
        if self.room_of_exceeded_bound(bytes).is_some() {
            return GrowthOrder::CompactFirst;
        }
        if self.shares_all() {
            return GrowthOrder::SharedOnly;
        }
        if self.exceeds_loose_bound(bytes) {
            return GrowthOrder::CompactFirst;
        }
        let grows = self.spacious.load(Ordering::Relaxed)
            && !self.grows_whole_blocks(bytes)
            && (self.ample.load(Ordering::Relaxed) || bytes < policy().large_block);
        if grows { GrowthOrder::GrowFirst } else { GrowthOrder::ReuseFirst }
    }

    /// Returns the bytes of new memory that a block of `bytes` may take before idle handles move
    /// under it, where its size would exceed the bound. After the bound has yielded, handles move
    /// first: below the loose bound, streams share less and are faster.
    pub(crate) fn growth_before_moves(&self, bytes: u64) -> u64 {
        self.room_of_exceeded_bound(bytes).unwrap_or(0)
    }

    /// Returns the bytes that can be added to what is held before it exceeds the bound, where a
    /// block of `bytes` would exceed it.
    fn room_of_exceeded_bound(&self, bytes: u64) -> Option<u64> {
        let bound = self.bound(self.peak_with(bytes))?;
        let room = bound.saturating_sub(self.held.load(Ordering::Relaxed));
        (room < bytes).then_some(room)
    }

    /// Returns the peak of live bytes as it is with a block of `bytes` more.
    fn peak_with(&self, bytes: u64) -> u64 {
        self.peak_live.load(Ordering::Relaxed).max(self.live_with(bytes))
    }

    /// Returns the live bytes as they are with a block of `bytes` more.
    fn live_with(&self, bytes: u64) -> u64 {
        self.live.load(Ordering::Relaxed).saturating_add(bytes)
    }

    /// Returns whether the pool would hold more than the loose bound with `bytes` of new memory.
    fn exceeds_loose_bound(&self, bytes: u64) -> bool {
        bytes > policy().unbounded_max
            && self.held.load(Ordering::Relaxed).saturating_add(bytes)
                > sixteenths(self.peak_with(bytes), policy().loose_bound)
    }

    /// Returns whether as much has been in use before as with a block of `bytes` more, and the
    /// block is large enough for that to matter. What is held was enough then. So the block
    /// searches other streams' memory first, and if it finds no room there, memory is fragmented.
    /// Its new memory then has its full size, whatever is free next to it, which leaves a hole that
    /// can be reused.
    pub(crate) fn grows_whole_blocks(&self, bytes: u64) -> bool {
        bytes >= policy().medium_block
            && self.several_streams.load(Ordering::Relaxed)
            && self.live_with(bytes) <= self.peak_live.load(Ordering::Relaxed)
    }

    /// Records that a block of `bytes` has been allocated since the last decision.
    pub(crate) fn record_served(&self, bytes: u64) {
        self.peak_live.fetch_max(self.live_with(bytes), Ordering::Relaxed);
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
        let beyond_peak = (limit.saturating_sub(used) + all_held).saturating_sub(peak_live);
        self.gaps.update(beyond_peak, peak_live);
        let near_limit = used > sixteenths(limit, policy().spacious_up_to);
        let allocations = streams.iter().map(|stream| stream.allocations).sum();
        self.held_bound.update(allocations, peak_live, near_limit);
        // The one that leaves less. Other pools may use the same budget.
        let mut binds = false;
        if let Some(bound) = self.bound(peak_live)
            && bound.saturating_sub(all_held) < limit.saturating_sub(used)
        {
            (used, limit) = (all_held, bound);
            binds = !self.compacts;
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
        let flags = [
            (&self.all_shared, all_shared),
            (&self.spacious, spacious),
            (&self.ample, ample),
            (&self.tight, tight),
            (&self.crowded, live > sixteenths(budget.limit(), policy().drain_above)),
            (&self.several_streams, streams.len() > 1),
            (&self.binds, binds),
        ];
        // Written only on change: the flags are read far more often, and the cache line stays
        // shared.
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

    fn footprint(live: u64, free: u64) -> CacheFootprint {
        CacheFootprint { live, free, allocations: 0 }
    }

    /// Returns a policy whose bound has yielded.
    fn yielded() -> SharingPolicy {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 1 << 40));
        policy.update(&budget, &[], 0);
        policy.record_moves(1 + POLICY.bound_debt / POLICY.yield_price);
        policy.update(&budget, &[], 0);
        assert_eq!(policy.bound(0), None);
        policy
    }

    #[test]
    fn sharing_starts_above_half_of_the_budget_and_ends_below_three_eighths() {
        let (policy, budget) = (yielded(), Budget::new("a test", 800));
        let mut step = |used: u64| {
            let charge = budget.charge(used);
            policy.update(&budget, &[footprint(used / 2, 0); 2], 0);
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
            policy.update(&budget, &[footprint(first, 0), footprint(second / 2, second / 2)], 0);
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
            let mut equal = vec![footprint(1600 / count, 0); count as usize];
            equal.extend([footprint(0, 0); 50]);
            policy.update(&budget, &equal, 0);
            assert!(policy.shares_all(), "{count} equal streams");
            let policy = SharingPolicy::new(true, false);
            let mut small = vec![footprint(160 / count, 0); count as usize];
            small.push(footprint(1440, 0));
            policy.update(&budget, &small, 0);
            assert!(!policy.shares_all(), "one large stream and {count} small ones");
        }
    }

    #[test]
    fn pool_grows_first_while_half_of_the_budget_is_left_and_little_is_idle() {
        let (policy, budget) = (yielded(), Budget::new("a test", 800));
        let step = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            policy.update(&budget, &[footprint(live, 0)], free);
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
        let (policy, budget) = (yielded(), Budget::new("a test", 3200 * MIB));
        let step = |live: u64, free: u64| {
            let (live, free) = (live * MIB, free * MIB);
            let charge = budget.charge(live + free);
            policy.update(&budget, &[footprint(live, 0)], free);
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
    fn handles_move_before_a_pool_whose_bound_has_yielded_exceeds_the_loose_bound() {
        let (policy, budget) = (yielded(), Budget::new("a test", 1 << 40));
        let step = |live: u64, free: u64, bytes: u64, streams: u64| {
            let each = footprint(live / streams, 0);
            policy.update(&budget, &vec![each; streams as usize], free);
            policy.growth_order(bytes) == GrowthOrder::CompactFirst
        };
        let (high, room) = (1600 * MIB, 100 * MIB * (POLICY.loose_bound - 16));
        let below = high - 2 * MIB;
        for streams in [1, 2] {
            assert!(!step(high, room - 2 * MIB, 2 * MIB, streams));
            assert!(
                !step(below, room, 2 * MIB, streams) && step(below, room + MIB, 2 * MIB, streams)
            );
            assert!(!step(below, room + 2 * MIB, MIB, streams), "a small block");
            // A block that raises the peak raises the bound.
            assert!(!step(high, room + 2 * MIB, 4 * MIB, streams));
            assert!(step(high, room + 4 * MIB, 4 * MIB, streams));
        }
    }

    #[test]
    fn handles_move_before_a_pool_exceeds_its_bound() {
        let budget = Budget::new("a test", 1 << 40);
        for compacts in [false, true] {
            let policy = SharingPolicy::new(true, compacts);
            let (high, room) = (1600 * MIB, 100 * MIB * (POLICY.least_bound - 16));
            let step = |live: u64, free: u64, bytes: u64, streams: u64| {
                let each = footprint(live / streams, 0);
                policy.update(&budget, &vec![each; streams as usize], free);
                policy.growth_order(bytes) == GrowthOrder::CompactFirst
            };
            let below = high - 2 * MIB;
            for streams in [1, 2] {
                assert!(!step(high, 0, 2 * MIB, streams));
                assert!(!step(below, room, 2 * MIB, streams));
                assert!(step(below, room + MIB, 2 * MIB, streams));
                assert!(!step(below, room + MIB, MIB / 2, streams), "it fits");
                assert!(step(high, room + 1, 1, streams), "a small block");
                // A block that raises the peak raises the bound.
                assert!(!step(high, room, 2 * MIB, streams));
                assert!(step(high, room + MIB, 2 * MIB, streams));
            }
        }
    }

    #[test]
    fn streams_share_as_if_the_bound_were_the_limit_unless_it_has_yielded() {
        let budget = Budget::new("a test", 1 << 40);
        // Of another pool. It counts for the budget, and not for the bound.
        let _other = budget.charge(8 << 30);
        let high = 1600 * MIB;
        let (usual, compacts) =
            (|| SharingPolicy::new(true, false), || SharingPolicy::new(true, true));
        let separate = || SharingPolicy::new(false, false);
        let half = high / 16 * POLICY.least_bound / 2;
        let cases: [(&dyn Fn() -> SharingPolicy, u64, bool); 8] = [
            (&usual, half, false),
            (&usual, half + 2, true),
            (&usual, 2 * half, true),
            (&compacts, half, false),
            (&compacts, half + 2, true),
            (&compacts, 2 * half, true),
            (&yielded, 2 * half, false),
            (&separate, 2 * half, false),
        ];
        for (at, (policy, held, shares)) in cases.into_iter().enumerate() {
            let policy = policy();
            let step = |live: u64, held: u64| {
                let charge = budget.charge(held);
                policy.update(&budget, &[footprint(live / 2, (held - live) / 2); 2], 0);
                drop(charge);
            };
            // One stream at the peak.
            policy.update(&budget, &[footprint(high, 0)], 0);
            assert!(!policy.shares_all());
            step(800 * MIB, held);
            assert_eq!(policy.shares_all(), shares, "case {at}");
        }
    }

    #[test]
    fn the_bound_rises_by_a_64th_to_its_most_where_handles_move_more_often_than_blocks_pay_for() {
        let (budget, high) = (Budget::new("a test", 1 << 40), 6400 * MIB);
        let bounds = |policy: &SharingPolicy, moves: u64, blocks: u64, times: u64| -> Vec<u64> {
            let step = |time| {
                policy.record_moves(moves);
                let allocations = blocks * (time + 1);
                policy.update(&budget, &[CacheFootprint { live: high, free: 0, allocations }], 0);
                policy.bound(high).map_or(0, |bound| bound / MIB)
            };
            (0..times).map(step).collect()
        };
        let enough = 1 + POLICY.bound_debt / POLICY.rise_price;
        let new = |compacts| {
            let policy = SharingPolicy::new(true, compacts);
            assert_eq!(bounds(&policy, 0, 0, 1), [6800]);
            policy
        };
        let policy = new(false);
        let all = bounds(&policy, enough, 0, 8);
        assert_eq!(all, [6900, 7000, 7100, 7200, 7300, 7400, 7500, 7600]);
        assert_eq!(bounds(&policy, enough, 0, 7), [7600; 7], "as much would be a rise");
        assert_eq!(bounds(&policy, enough, 0, 1), [0], "it has yielded");
        assert_eq!(bounds(&new(false), enough - 1, POLICY.bound_debt, 9), [6800; 9]);
        assert_eq!(bounds(&new(true), enough, 0, 9), [6800; 9]);
    }

    #[test]
    fn the_bound_is_at_its_most_where_less_than_half_of_the_budget_is_left() {
        let (policy, high) = (SharingPolicy::new(true, false), 1600 * MIB);
        for (limit, room) in [(3200, 100), (3199, 300), (3200, 100)] {
            let budget = Budget::new("a test", limit * MIB);
            let _charge = budget.charge(high);
            policy.update(&budget, &[footprint(high, 0)], 0);
            policy.update(&budget, &[footprint(0, high)], 0);
            let exceeds = |mib: u64| policy.room_of_exceeded_bound(mib * MIB).is_some();
            assert_eq!([exceeds(room), exceeds(room + 1)], [false, true], "of {limit} MiB");
        }
    }

    #[test]
    fn the_bound_yields_to_moves_and_to_threads_that_meet_and_returns_after_ever_longer_rests() {
        let budget = Budget::new("a test", 1 << 40);
        let enough = 1 + POLICY.bound_debt / POLICY.yield_price;
        let update = |policy: &SharingPolicy, allocations: u64| {
            let stream = CacheFootprint { live: 0, free: 0, allocations };
            policy.update(&budget, &[stream], 0);
            policy.bound(0).is_some()
        };
        let policy = SharingPolicy::new(true, false);
        assert!(update(&policy, 0));
        // As many moves as blocks pay for never add up.
        let mut allocations = 0;
        for _ in 0..10 {
            policy.record_moves(enough - 1);
            allocations += POLICY.bound_debt;
            assert!(update(&policy, allocations));
        }
        for rest in [1, 2, 4].map(|times| times * POLICY.bound_rest) {
            policy.record_moves(enough);
            assert!(!update(&policy, allocations));
            // What moves now does not count for the next time.
            policy.record_moves(10 * enough);
            allocations += rest - 1;
            assert!(!update(&policy, allocations));
            allocations += 1;
            assert!(update(&policy, allocations), "after {rest} blocks");
        }
        // A stream that is gone takes its count along.
        assert!(update(&policy, 0));
        // One thread at a time costs nothing, two do.
        for _ in 0..enough {
            drop(policy.enter_slow_path());
        }
        assert!(update(&policy, 0));
        for _ in 0..enough {
            let (_one, _other) = (policy.enter_slow_path(), policy.enter_slow_path());
        }
        assert!(!update(&policy, 0));
        // A pool that compacts does not yield, nor does one because of moves that its limit needs.
        let compacts = SharingPolicy::new(true, true);
        let limited = SharingPolicy::new(true, false);
        assert!(update(&compacts, 0));
        limited.update(&Budget::new("a test", 1), &[], 0);
        for policy in [&compacts, &limited] {
            policy.record_moves(10 * enough);
            assert!(update(policy, 0));
        }
    }

    #[test]
    fn one_search_of_eight_polls_first_while_memory_is_shared_and_all_do_once_it_is_crowded() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 1600));
        let mut polls = |live: u64| {
            let charge = budget.charge(900);
            policy.update(&budget, &[footprint(live / 2, 0); 2], 900 - live);
            drop(charge);
            assert!(policy.shares_all());
            (0..16).filter(|_| !policy.searches_shared_first()).count()
        };
        assert_eq!([800, 802, 800].map(&mut polls), [2, 16, 2]);
    }

    #[test]
    fn searches_poll_first_for_a_while_after_one_that_found_no_room() {
        let (policy, budget) = (SharingPolicy::new(true, false), Budget::new("a test", 1600));
        let charge = budget.charge(900);
        policy.update(&budget, &[footprint(400, 0); 2], 100);
        drop(charge);
        assert!(policy.searches_shared_first());
        for _ in 0..2 {
            policy.record_no_room();
            let polls = (0..POLICY.polls_without_room).filter(|_| !policy.searches_shared_first());
            assert_eq!(polls.count() as u64, POLICY.polls_without_room);
            assert!(policy.searches_shared_first());
        }
        // Streams that are separate take new memory without any search for what is done.
        let separate = SharingPolicy::new(true, false);
        separate.record_no_room();
        assert_eq!(separate.polls.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn medium_blocks_reuse_idle_memory_below_the_peak() {
        let (policy, budget) = (yielded(), Budget::new("a test", 1 << 40));
        let step = |live: u64, free: u64, bytes: u64| {
            policy.update(&budget, &[footprint(live / 2, 0); 2], free);
            policy.growth_order(bytes)
        };
        let high = 100 * MEDIUM;
        assert_eq!(step(high, 0, MEDIUM), GrowthOrder::GrowFirst);
        // Half as much is idle, and the block would be new use, or not.
        assert_eq!(step(high, high / 2 + 1, MEDIUM), GrowthOrder::GrowFirst);
        assert_eq!(step(high - MEDIUM, high / 2, MEDIUM), GrowthOrder::ReuseFirst);
        assert_eq!(step(high - MEDIUM, high / 2, MEDIUM - 1), GrowthOrder::GrowFirst);
        assert_eq!(
            step(high - MEDIUM, high / 8, MEDIUM),
            GrowthOrder::ReuseFirst,
            "however little lies idle"
        );
        assert_eq!(step(high - MEDIUM, high / 8, MEDIUM - 1), GrowthOrder::GrowFirst);
        assert!(policy.grows_whole_blocks(MEDIUM) && !policy.grows_whole_blocks(MEDIUM + 1));
    }
}
