//! Whether streams keep what is free apart from each other, or share it.
//!
//! Apart, a stream's cache serves it without looking at anybody else, and no stream waits for another. But what is free
//! in one is no use to the others, and the layout of each is its own: on a recorded serving program with four streams it
//! takes 1.54 times the live bytes, and under a limit of 1.05 times 11,000 handles have to move, since a large block
//! finds room in no single cache.
//!
//! Together, what streams free comes to the commons, and blocks go to the lowest address that is ready for them,
//! whoever used it last. That packs the same program into 1.047 times its live bytes without moving anything. The price
//! is a slow path for nearly each block above the small sizes, and waits between streams.
//!
//! So streams keep apart while memory is ample, and come together once more than half of the budget is taken. Before
//! that a stream takes what others have freed only for a large block, and where a third of all memory lies idle: when
//! every block did so, sixteen threads with random sizes up to 1 MiB took ranges from each other for ever, at 68 µs an
//! operation instead of 47 ns. And where a third lies idle a large block takes it before there is new memory, even if its
//! stream has to wait for the others' work: on a device that lags behind, rounds of the serving program would take more
//! and more, six times the live bytes after twenty.

use aquifer_core::Budget;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Blocks up to this size, in bytes, come from the stream's own cache in either case: many of them fit in what is taken
/// at once.
const ALWAYS_OWN: u64 = 64 << 10;
/// Blocks from this size on, in bytes, are worth a look at what other streams have: for a smaller one that costs more
/// than it saves, and streams that allocate at the same time would take the same ranges from each other for ever.
const LARGE: u64 = 16 << 20;
/// A stream counts as one of several that share when it holds more than this part of all memory, or more than half of an
/// equal share where there are more streams.
const HOLDERS_PART: u64 = 8;

/// Memory is tight when less than this part of the budget is left or free.
const TIGHT_PART: u64 = 32;

/// What one stream holds, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holds {
    /// Blocks that have an owner.
    pub(crate) live: u64,
    /// In its cache, or freed and still in use elsewhere.
    pub(crate) free: u64,
}

/// Where a stream that has no room looks first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum First {
    /// New memory: half of the budget is left, and no more than a third of what is held lies idle, or the block is not
    /// large and no more than half does.
    New,
    /// What lies idle elsewhere, if the stream has to wait for it; then new memory.
    Idle,
    /// The same, and before new memory handles that lie idle move: what is held is seven fourths of what has ever been in
    /// use.
    Moves,
}

/// Where a block goes of several places that are as good otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fit {
    /// To the lowest: what is free gathers at the other end.
    Lowest,
    /// Where it keeps the fewest handles from being moved that are wholly free now, and of those to the lowest.
    FewestPinned,
}

/// Which of the two it is.
#[derive(Default, Debug)]
pub(crate) struct Leasing {
    /// Caches that cannot share are each served from for good.
    sharing: bool,
    together: AtomicBool,
    /// Half of the budget is left.
    spacious: AtomicBool,
    /// No more than a third of what is held lies idle.
    ample: AtomicBool,
    /// Nearly all of the budget is in use: see [`TIGHT_PART`].
    tight: AtomicBool,
    /// Bytes held at the last decision.
    held: AtomicU64,
    /// Bytes in use, at most.
    high_water: AtomicU64,
}

impl Leasing {
    /// Apart; for good unless there is `sharing`.
    pub(crate) fn new(sharing: bool) -> Self {
        Self { sharing, ..Self::default() }
    }

    /// Whether streams share what is free.
    #[inline]
    pub(crate) fn is_together(&self) -> bool {
        // Relaxed: a stream that learns of it late takes one block out of its own cache.
        self.together.load(Ordering::Relaxed)
    }

    /// Whether a block of `bytes` comes from what streams share, though its own stream's cache may have room.
    #[inline]
    pub(crate) fn takes_over(&self, bytes: u64) -> bool {
        bytes > ALWAYS_OWN && self.is_together()
    }

    /// Where a block goes of several places that are as good otherwise.
    pub(crate) fn fit(&self) -> Fit {
        if self.tight.load(Ordering::Relaxed) { Fit::FewestPinned } else { Fit::Lowest }
    }

    /// What comes first for a stream that has no room for `bytes`.
    pub(crate) fn first(&self, bytes: u64) -> First {
        let (held, high) = (self.held.load(Ordering::Relaxed), self.high_water.load(Ordering::Relaxed));
        let much = held >= high.saturating_mul(2);
        match (self.spacious.load(Ordering::Relaxed), self.ample.load(Ordering::Relaxed)) {
            (true, true) => First::New,
            (true, false) if bytes < LARGE && !much => First::New,
            _ if held < high / 4 * 7 => First::Idle,
            _ => First::Moves,
        }
    }

    /// Decides anew, by what is left in the budget, what each stream holds and the bytes that lie free beside them. Once
    /// together, streams stay so until less than three eighths are taken, so that a loop at the border does not go back
    /// and forth.
    pub(crate) fn decide(&self, budget: &Budget, streams: &[Holds], shared: u64) {
        let (used, limit) = (budget.used(), budget.limit());
        let border = if self.is_together() { limit / 8 * 3 } else { limit / 2 };
        let held = |stream: &&Holds| stream.live + stream.free;
        let some = streams.iter().filter(|stream| held(stream) > 0).count() as u64;
        let holders = streams.iter().filter(|stream| held(stream) > used / HOLDERS_PART.max(2 * some));
        let together = self.sharing && used > border && holders.count() > 1;
        let (live, free) = streams.iter().fold((0, shared), |(live, free), s| (live + s.live, free + s.free));
        let (spacious, ample) = (used <= limit / 2, free <= live / 2);
        let tight = limit.saturating_sub(used) + free < limit / TIGHT_PART;
        self.held.store(live + free, Ordering::Relaxed);
        self.high_water.fetch_max(live, Ordering::Relaxed);
        // Read far more often than it changes: the line stays shared.
        let flags = [
            (&self.together, together),
            (&self.spacious, spacious),
            (&self.ample, ample),
            (&self.tight, tight),
        ];
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

    #[test]
    fn streams_come_together_above_half_of_the_budget_and_part_below_three_eighths() {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 800));
        let mut step = |used: u64| {
            let charge = budget.charge(used);
            leasing.decide(&budget, &[Holds { live: used / 2, free: 0 }; 2], 0);
            drop(charge);
            leasing.is_together()
        };
        assert_eq!([400, 401, 301, 300, 400].map(&mut step), [false, true, true, false, false]);
    }

    #[test]
    fn a_stream_that_holds_nearly_all_of_it_shares_with_nobody() {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 800));
        let charge = budget.charge(800);
        let step = |first: u64, second: u64| {
            leasing.decide(
                &budget,
                &[Holds { live: first, free: 0 }, Holds { live: second / 2, free: second / 2 }],
                0,
            );
            leasing.is_together()
        };
        assert!(!step(720, 80));
        assert!(step(690, 110));
        drop(charge);
    }

    #[test]
    fn any_number_of_equal_streams_share_and_small_ones_beside_a_large_one_do_not() {
        let budget = Budget::new("a test", 1600);
        let _charge = budget.charge(1600);
        for count in [2, 7, 8, 9, 16, 100] {
            let leasing = Leasing::new(true);
            // Those that hold nothing are nobody to share with.
            let mut equal = vec![Holds { live: 1600 / count, free: 0 }; count as usize];
            equal.extend([Holds { live: 0, free: 0 }; 50]);
            leasing.decide(&budget, &equal, 0);
            assert!(leasing.is_together(), "{count} equal streams");
            let leasing = Leasing::new(true);
            let mut small = vec![Holds { live: 160 / count, free: 0 }; count as usize];
            small.push(Holds { live: 1440, free: 0 });
            leasing.decide(&budget, &small, 0);
            assert!(!leasing.is_together(), "one large stream and {count} small ones");
        }
    }

    #[test]
    fn memory_is_ample_while_half_of_the_budget_is_left_and_a_third_of_it_lies_idle_at_most() {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 800));
        let step = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            leasing.decide(&budget, &[Holds { live, free: 0 }], free);
            drop(charge);
            leasing.first(LARGE) == First::New
        };
        assert_eq!(
            [(200, 100), (200, 101), (300, 101)].map(|(live, free)| step(live, free)),
            [true, false, false]
        );
    }

    #[test]
    fn memory_is_tight_when_nearly_all_of_the_budget_is_in_use_and_not_when_it_only_is_held() {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 3200));
        let step = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            leasing.decide(&budget, &[Holds { live, free: 0 }], free);
            drop(charge);
            leasing.fit()
        };
        assert_eq!(step(3100, 0), Fit::Lowest);
        assert_eq!(step(3101, 0), Fit::FewestPinned);
        assert_eq!(step(3101, 99), Fit::FewestPinned);
        assert_eq!(step(3000, 200), Fit::Lowest);
    }
}
