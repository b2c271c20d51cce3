//! The policy that decides how much memory a pool holds, and whether its streams share free memory.
//!
//! **One bound.** A pool holds at most the peak of its live bytes, the new block included, and its
//! [slack](crate::PoolConfig::slack), by default 17 % of the peak and at least 64 MiB, or the limit
//! of its budget if that is less. A block with no room in its stream's cache gets the first of
//! these:
//!
//! 1. new memory, until half of the bound or of the budget, whichever leaves less, is in use;
//! 2. what any stream has freed and the device has done with, and new memory up to the bound;
//! 3. what the device still works on: the stream waits for that work on the device;
//! 4. handles from under free memory, which move to the block, and new memory up to the bound;
//! 5. the same, and new memory beyond the bound: live blocks pin the other handles.
//!
//! Beyond that half, if several streams hold a good part, larger blocks come from one list of all
//! free memory. Each time that two threads take these steps at once, the bound rises by two of
//! their blocks: a pool that many threads use all the time is held by its budget alone.

pub(crate) mod steps;

use crate::base::policy_params::{fraction, policy};
use aquifer_core::Budget;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use steps::{AT_BOUND, Step, WITHIN_BOUND};

/// The default of [`PoolConfig::slack`](crate::PoolConfig::slack), in per cent.
pub(crate) const DEFAULT_SLACK: u32 = 17;

/// Returns the part of what is held that a new handle has at most. Live blocks pin less of what a
/// smaller slack leaves if the handles are smaller too, by its square.
pub(crate) fn held_parts(slack: u32) -> u64 {
    let squares =
        [slack.clamp(1, DEFAULT_SLACK), DEFAULT_SLACK].map(|slack| u64::from(slack).pow(2));
    policy().held_parts * squares[1] / squares[0]
}

/// The memory of one stream, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CacheFootprint {
    /// In live blocks.
    pub(crate) live: u64,
    /// In its cache, or freed and still in use elsewhere.
    pub(crate) free: u64,
}

/// The current state of the policy.
#[derive(Default, Debug)]
pub(crate) struct SharingPolicy {
    /// Whether the caches can share. If not, each keeps its memory for good.
    sharing: bool,
    /// The per cent of the peak that the pool may hold beyond it, if it has a bound.
    slack: Option<u64>,
    all_shared: AtomicBool,
    /// The threads on the slow path.
    threads: AtomicU64,
    /// The bytes of the blocks of threads that met there, by which the bound rises.
    met: AtomicU64,
    /// Half of the bound is left.
    spacious: AtomicBool,
    /// More than half of the budget is live.
    crowded: AtomicBool,
    /// Bytes in use at the last decision.
    live: AtomicU64,
    /// The most bytes in use at any decision or right after it.
    peak_live: AtomicU64,
    /// Bytes held at the last decision.
    held: AtomicU64,
}

/// A thread on the slow path.
pub(crate) struct OnSlowPath<'a>(&'a SharingPolicy);

impl Drop for OnSlowPath<'_> {
    fn drop(&mut self) {
        self.0.threads.fetch_sub(1, Ordering::Relaxed);
    }
}

impl SharingPolicy {
    /// Creates a policy under which streams start separate, and stay so unless `sharing` is set.
    /// Without sharing, only a `slack` below the default bounds what is held.
    pub(crate) fn new(sharing: bool, slack: u32) -> Self {
        let is_bounded = sharing || slack < DEFAULT_SLACK;
        Self { sharing, slack: is_bounded.then_some(u64::from(slack)), ..Self::default() }
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

    /// Returns whether a block of `bytes` searches the shared free list before anything is polled.
    /// Not in a pool whose slack is set below the default: it polls first.
    pub(crate) fn searches_shared_first(&self, bytes: u64) -> bool {
        self.prefers_shared(bytes) && !self.has_small_slack()
    }

    /// Counts a thread on the slow path, for a block of `bytes`, until the value is dropped. Raises
    /// the bound where another thread is there. Any limit to that makes threads that allocate all
    /// the time meet on the slow path again and again, 20 to 200 times as slow: half of the slack,
    /// 2 GiB, and the peak itself were tried.
    pub(crate) fn enter_slow_path(&self, bytes: u64) -> OnSlowPath<'_> {
        if self.threads.fetch_add(1, Ordering::Relaxed) > 0 {
            self.met.fetch_add((2 * bytes).min(policy().least_slack), Ordering::Relaxed);
        }
        OnSlowPath(self)
    }

    /// Returns the steps, in order, of a stream that has no room for `bytes`.
    pub(crate) fn steps(&self, bytes: u64) -> &'static [Step] {
        if self.room_of_exceeded_bound(bytes).is_some() {
            AT_BOUND
        } else if self.spacious.load(Ordering::Relaxed) {
            WITHIN_BOUND
        } else {
            &WITHIN_BOUND[1..]
        }
    }

    /// Returns the bytes of new memory that a block of `bytes` may take before idle handles move
    /// under it, where its size would exceed the bound.
    pub(crate) fn growth_before_moves(&self, bytes: u64) -> u64 {
        self.room_of_exceeded_bound(bytes).unwrap_or(0)
    }

    /// Returns whether the slack was set below the default: memory comes before speed then.
    fn has_small_slack(&self) -> bool {
        self.slack.is_some_and(|slack| slack < u64::from(DEFAULT_SLACK))
    }

    /// Returns the bytes that the pool may hold where `peak` is the most that was in use; `None` if
    /// it has no bound.
    fn bound(&self, peak: u64) -> Option<u64> {
        let slack = self.slack?;
        let share = fraction(peak, slack, 100);
        if self.has_small_slack() {
            return Some(peak.saturating_add(share));
        }
        let met = self.met.load(Ordering::Relaxed);
        Some(peak.saturating_add(share.max(policy().least_slack)).saturating_add(met))
    }

    /// Returns the bytes that can be added to what is held before it exceeds the bound, where a
    /// block of `bytes` would exceed it.
    fn room_of_exceeded_bound(&self, bytes: u64) -> Option<u64> {
        let peak = self.peak_live.load(Ordering::Relaxed).max(self.live_with(bytes));
        let room = self.bound(peak)?.saturating_sub(self.held.load(Ordering::Relaxed));
        (room < bytes).then_some(room)
    }

    /// Returns the live bytes as they are with a block of `bytes` more.
    fn live_with(&self, bytes: u64) -> u64 {
        self.live.load(Ordering::Relaxed).saturating_add(bytes)
    }

    /// Records that a block of `bytes` has been allocated since the last decision.
    pub(crate) fn record_served(&self, bytes: u64) {
        self.peak_live.fetch_max(self.live_with(bytes), Ordering::Relaxed);
    }

    /// Decides again, from the budget, the memory of each stream, and the `shared` free bytes.
    /// `streams` has those that are leased or hold memory: idle caches are no streams.
    pub(crate) fn update(&self, budget: &Budget, streams: &[CacheFootprint], shared: u64) {
        let (live, free) =
            streams.iter().fold((0, shared), |(live, free), s| (live + s.live, free + s.free));
        let all_held = live + free;
        let peak_live = self.peak_live.fetch_max(live, Ordering::Relaxed).max(live);
        let (mut used, mut limit) = (budget.used(), budget.limit());
        // The one that leaves less. Other pools may use the same budget.
        if let Some(bound) = self.bound(peak_live)
            && bound.saturating_sub(all_held) < limit.saturating_sub(used)
        {
            (used, limit) = (all_held, bound);
        }
        let held = |stream: &&CacheFootprint| stream.live + stream.free;
        let some = streams.iter().filter(|stream| held(stream) > 0).count() as u64;
        let holders = streams
            .iter()
            .filter(|stream| held(stream) > used / policy().holder_part.max(2 * some));
        let spacious = used <= limit / 2;
        let all_shared = self.sharing && !spacious && holders.count() > 1;
        self.held.store(all_held, Ordering::Relaxed);
        self.live.store(live, Ordering::Relaxed);
        let flags = [
            (&self.all_shared, all_shared),
            (&self.spacious, spacious),
            (&self.crowded, live > budget.limit() / 2),
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
    const LARGEST: u32 = 10_000;

    fn footprint(live: u64, free: u64) -> CacheFootprint {
        CacheFootprint { live, free }
    }

    /// Returns a policy that has no bound.
    fn unbounded() -> SharingPolicy {
        SharingPolicy { slack: None, ..SharingPolicy::new(true, 0) }
    }

    #[test]
    fn streams_share_while_more_than_half_of_the_budget_is_in_use() {
        let (policy, budget) = (unbounded(), Budget::new("a test", 800));
        let mut step = |used: u64| {
            let charge = budget.charge(used);
            policy.update(&budget, &[footprint(used / 2, 0); 2], 0);
            drop(charge);
            policy.shares_all()
        };
        assert_eq!([400, 402, 400].map(&mut step), [false, true, false]);
    }

    #[test]
    fn a_stream_that_holds_nearly_all_memory_does_not_share() {
        let (policy, budget) =
            (SharingPolicy::new(true, DEFAULT_SLACK), Budget::new("a test", 800));
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
            let policy = SharingPolicy::new(true, DEFAULT_SLACK);
            // Streams that hold nothing do not count.
            let mut equal = vec![footprint(1600 / count, 0); count as usize];
            equal.extend([footprint(0, 0); 50]);
            policy.update(&budget, &equal, 0);
            assert!(policy.shares_all(), "{count} equal streams");
            let policy = SharingPolicy::new(true, DEFAULT_SLACK);
            let mut small = vec![footprint(160 / count, 0); count as usize];
            small.push(footprint(1440, 0));
            policy.update(&budget, &small, 0);
            assert!(!policy.shares_all(), "one large stream and {count} small ones");
        }
    }

    #[test]
    fn a_stream_grows_before_it_searches_others_while_half_of_the_limit_is_left() {
        let (policy, budget) = (unbounded(), Budget::new("a test", 800));
        let steps = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            policy.update(&budget, &[footprint(live, 0)], free);
            drop(charge);
            policy.steps(MIB)
        };
        assert_eq!(steps(200, 200), WITHIN_BOUND);
        assert_eq!(steps(200, 201), &WITHIN_BOUND[1..]);
    }

    #[test]
    fn handles_move_before_a_pool_exceeds_its_bound() {
        let budget = Budget::new("a test", 1 << 40);
        for slack in [DEFAULT_SLACK, 6, 1] {
            let policy = SharingPolicy::new(true, slack);
            let (high, room) = (1600 * MIB, 16 * MIB * u64::from(slack));
            let step = |live: u64, free: u64, bytes: u64, streams: u64| {
                let each = footprint(live / streams, 0);
                policy.update(&budget, &vec![each; streams as usize], free);
                policy.steps(bytes) == AT_BOUND
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
    fn the_bound_rises_by_two_blocks_where_threads_meet() {
        for (slack, rises) in [(DEFAULT_SLACK, true), (DEFAULT_SLACK - 1, false)] {
            let policy = SharingPolicy::new(true, slack);
            let before = policy.bound(MIB);
            drop(policy.enter_slow_path(MIB));
            assert_eq!(policy.bound(MIB), before, "no other thread was there");
            let _other = policy.enter_slow_path(MIB);
            drop(policy.enter_slow_path(MIB));
            drop(policy.enter_slow_path(1 << 40));
            let risen = if rises { 2 * MIB + POLICY.least_slack } else { 0 };
            assert_eq!(policy.bound(MIB), before.map(|before| before + risen));
        }
    }

    #[test]
    fn streams_share_as_if_the_bound_were_the_limit() {
        let budget = Budget::new("a test", 1 << 40);
        // Of another pool. It counts for the budget, and not for the bound.
        let _other = budget.charge(8 << 30);
        let high = 1600 * MIB;
        for (sharing, slack) in
            [(true, DEFAULT_SLACK), (true, 6), (false, DEFAULT_SLACK), (false, 6)]
        {
            let half = high / 100 * (100 + u64::from(slack)) / 2;
            for (held, above) in [(half, false), (half + 2, true), (2 * half, true)] {
                let policy = SharingPolicy::new(sharing, slack);
                // One stream at the peak.
                policy.update(&budget, &[footprint(high, 0)], 0);
                assert!(!policy.shares_all());
                let charge = budget.charge(held);
                let each = footprint(400 * MIB, (held - 800 * MIB) / 2);
                policy.update(&budget, &[each; 2], 0);
                drop(charge);
                assert_eq!(policy.shares_all(), sharing && above, "{held} of {half}");
            }
        }
    }

    #[test]
    fn a_bound_is_the_peak_and_its_slack_and_by_default_at_least_64_mib_more() {
        let bound = |sharing, slack, peak| SharingPolicy::new(sharing, slack).bound(peak);
        let high = 100_000 * MIB;
        for (slack, expected) in [(0, high), (6, 106_000 * MIB), (16, 116_000 * MIB)] {
            for sharing in [true, false] {
                assert_eq!(bound(sharing, slack, high), Some(expected), "{slack} %");
                assert_eq!(bound(sharing, slack, 0), Some(0));
            }
        }
        for (slack, expected) in [(DEFAULT_SLACK, 117_000 * MIB), (LARGEST, 101 * high)] {
            assert_eq!(bound(true, slack, high), Some(expected), "{slack} %");
            assert_eq!(bound(true, slack, 100), Some(100 + 64 * MIB));
            assert_eq!(bound(false, slack, high), None);
        }
        for slack in [0, 6, DEFAULT_SLACK, LARGEST] {
            assert_eq!(bound(true, slack, u64::MAX), Some(u64::MAX));
        }
    }
}
