//! Whether streams keep what is free apart from each other, or share it.
//!
//! Apart, a stream's cache serves it without looking at anybody else, and no stream waits for
//! another. But what is free in one is no use to the others, and the layout of each is its own: on
//! a recorded serving program with four streams it takes 1.54 times the live bytes, and under a
//! limit of 1.05 times 11,000 handles have to move, since a large block finds room in no single
//! cache.
//!
//! Together, what streams free comes to the commons, and blocks go to the lowest address that is
//! ready for them, whoever used it last. That packs the same program into 1.047 times its live
//! bytes without moving anything. The price is a slow path for nearly each block above the small
//! sizes, and waits between streams.
//!
//! So streams keep apart while memory is ample, and come together once more than half of the budget
//! is taken. Before that a stream takes what others have freed only for a large block, and where a
//! third of all memory lies idle: when every block did so, sixteen threads with random sizes up to
//! 1 MiB took ranges from each other for ever, at 68 µs an operation instead of 47 ns. And where a
//! third lies idle a large block takes it before there is new memory, even if its stream has to
//! wait for the others' work: on a device that lags behind, rounds of the serving program would
//! take more and more, six times the live bytes after twenty.
//!
//! **Rounds that are alike come to rest.** What was enough for a round is enough for the next, if
//! the next finds room in it. So below the high water of use a block of 8 MiB and more takes what
//! others have, or waits for it on the device, before there is new memory, however little lies
//! idle. Where it finds no room what there is lies badly, and it gets new memory as long as itself,
//! not as long as the gap beside some free range: a hole that lasts. And once five fourths of the
//! high water are held by several streams, large blocks come from what streams share, at the lowest
//! address that is ready: they lie side by side and leave large holes, and small ones stay apart.
//! On the simulator, in twenty rounds of each recorded program on its own streams, and of all three
//! split over 1, 2, 3, 4, 5, 6 and 8 as well (432 rounds after the second):
//!
//! | | serving: memory calls of rounds 2, 3, … 20; held at last, over live | training on two streams | rounds after the second with memory calls, of all |
//! |---|---|---|---|
//! | apart | 162, 91, 0, 0, 25, 0, 0, 182, 89, 0, 0, 95, then none; 1.817 | 3 in nearly each of nine; 1.071 | – |
//! | what others have, where a third lies idle | 83, 188, 188, then none; 1.724 | 5, then none; 1.047 | – |
//! | the same, and large blocks from what is shared | none but 71 in round 15; 1.398 | none; 1.038 | 38 |
//! | what others have, however little lies idle | none but 65 in one; 1.317 | none but 5 in one; 1.036 | – |
//! | the same, and holes as long as the block | none; 1.310 | none; 1.027 | 28 |
//!
//! What is left in the splits is a hole that is missing now and then; on six streams handles move
//! as well. Tried beside it, and no better: small blocks' memory at addresses of its own (65 to 74
//! such rounds in place of 56, made programs included), and all free memory brought together
//! whenever use falls to a quarter of its high water (25 in place of 56, but caches are empty then,
//! and warm rounds of the training program took ten times as long).

use aquifer_core::Budget;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Blocks up to this size, in bytes, come from the stream's own cache in either case: many of them
/// fit in what is taken at once.
const ALWAYS_OWN: u64 = 64 << 10;
/// Blocks from this size on, in bytes, are worth a look at what other streams have: for a smaller
/// one that costs more than it saves, and streams that allocate at the same time would take the
/// same ranges from each other for ever.
const LARGE: u64 = 16 << 20;
/// Where as much has been in use before, blocks from this size on, in bytes, take what others have
/// rather than more.
const MIDDLING: u64 = 8 << 20;
/// A stream counts as one of several that share when it holds more than this part of all memory, or
/// more than half of an equal share where there are more streams.
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
    /// New memory: half of the budget is left, and no more than a third of what is held lies idle,
    /// or the block is not large and no more than half does.
    New,
    /// What is in no cache, if the stream has to wait for it; then as before: as much has been in
    /// use before, and a quarter more is held.
    Nobodys,
    /// What lies idle elsewhere, if the stream has to wait for it; then new memory: also for a
    /// middling block, however little lies idle, where as much has been in use before.
    Idle,
    /// The same, and before new memory handles that lie idle move: what is held is seven fourths of
    /// what has ever been in use.
    Moves,
}

/// Where a block goes of several places that are as good otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Fit {
    /// To the lowest: what is free gathers at the other end.
    Lowest,
    /// Where it keeps the fewest handles from being moved that are wholly free now, and of those to
    /// the lowest.
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
    /// There is more than one stream.
    several: AtomicBool,
    /// What is held is five fourths of what has ever been in use, by several streams.
    gathers: AtomicBool,
    /// Bytes in use at the last decision.
    live: AtomicU64,
    /// Bytes in use at any decision or right after it, at most.
    most: AtomicU64,
    /// Bytes held at the last decision.
    held: AtomicU64,
    /// Bytes in use at any decision, at most: what is compared with `held`, which is of that
    /// moment too. By `most` in its place handles would move later, and a training step no longer
    /// fitted 1.05 times its edge.
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

    /// The smallest free ranges, in bytes, that a cache gives up to what streams share.
    pub(crate) fn gives_up(&self) -> u64 {
        if self.is_together() { 0 } else { LARGE }
    }

    /// Whether a block of `bytes` comes from what streams share, though its own stream's cache may
    /// have room.
    #[inline]
    pub(crate) fn takes_over(&self, bytes: u64) -> bool {
        bytes > ALWAYS_OWN
            && (self.is_together() || bytes >= LARGE && self.gathers.load(Ordering::Relaxed))
    }

    /// Whether a block of `bytes` that finds no room in its stream's cache may be cut from what
    /// streams share: single units for it are not worth their while.
    pub(crate) fn may_share(&self, bytes: u64) -> bool {
        self.is_together() || self.sharing && bytes >= MIDDLING
    }

    /// Where a block goes of several places that are as good otherwise.
    pub(crate) fn fit(&self) -> Fit {
        if self.tight.load(Ordering::Relaxed) { Fit::FewestPinned } else { Fit::Lowest }
    }

    /// What comes first for a stream that has no room for `bytes`.
    pub(crate) fn first(&self, bytes: u64) -> First {
        let (held, high) =
            (self.held.load(Ordering::Relaxed), self.high_water.load(Ordering::Relaxed));
        let again = self.is_again(bytes);
        let new = match self.has_been_enough(bytes) && self.gathers.load(Ordering::Relaxed) {
            true => First::Nobodys,
            false => First::New,
        };
        match (self.spacious.load(Ordering::Relaxed), self.ample.load(Ordering::Relaxed)) {
            (true, true) if !again && !self.takes_over(bytes) => new,
            (true, false) if !again && bytes < LARGE && held < high.saturating_mul(2) => new,
            _ if held < high / 4 * 7 => First::Idle,
            _ => First::Moves,
        }
    }

    /// Whether as much has been in use before as with a block of `bytes` more.
    fn has_been_enough(&self, bytes: u64) -> bool {
        self.live.load(Ordering::Relaxed).saturating_add(bytes) <= self.most.load(Ordering::Relaxed)
    }

    /// Whether a block of `bytes` is worth a look at what others have since what there is was
    /// enough before.
    fn is_again(&self, bytes: u64) -> bool {
        bytes >= MIDDLING && self.several.load(Ordering::Relaxed) && self.has_been_enough(bytes)
    }

    /// Whether new memory for a block of `bytes` is to be as long as the block, whatever is free
    /// beside it: what there is was enough before and lies badly now, so a hole is made that lasts.
    pub(crate) fn grows_whole(&self, bytes: u64) -> bool {
        self.is_again(bytes)
    }

    /// A block of `bytes` has been made since the last decision: it is in use as well.
    pub(crate) fn served(&self, bytes: u64) {
        self.most
            .fetch_max(self.live.load(Ordering::Relaxed).saturating_add(bytes), Ordering::Relaxed);
    }

    /// Decides anew, by what is left in the budget, what each stream holds and the bytes that lie
    /// free beside them. Once together, streams stay so until less than three eighths are taken, so
    /// that a loop at the border does not go back and forth.
    pub(crate) fn decide(&self, budget: &Budget, streams: &[Holds], shared: u64) {
        let (used, limit) = (budget.used(), budget.limit());
        let border = if self.is_together() { limit / 8 * 3 } else { limit / 2 };
        let held = |stream: &&Holds| stream.live + stream.free;
        let some = streams.iter().filter(|stream| held(stream) > 0).count() as u64;
        let holders =
            streams.iter().filter(|stream| held(stream) > used / HOLDERS_PART.max(2 * some));
        let together = self.sharing && used > border && holders.count() > 1;
        let (live, free) =
            streams.iter().fold((0, shared), |(live, free), s| (live + s.live, free + s.free));
        let (spacious, ample) = (used <= limit / 2, free <= live / 2);
        let tight = limit.saturating_sub(used) + free < limit / TIGHT_PART;
        self.held.store(live + free, Ordering::Relaxed);
        self.live.store(live, Ordering::Relaxed);
        self.high_water.fetch_max(live, Ordering::Relaxed);
        let most = self.most.fetch_max(live, Ordering::Relaxed).max(live);
        let gathers = self.sharing && streams.len() > 1 && live + free >= most / 4 * 5;
        // Read far more often than it changes: the line stays shared.
        let flags = [
            (&self.together, together),
            (&self.spacious, spacious),
            (&self.ample, ample),
            (&self.tight, tight),
            (&self.gathers, gathers),
            (&self.several, streams.len() > 1),
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

    const MIB: u64 = 1 << 20;

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
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 3200 * MIB));
        let step = |live: u64, free: u64| {
            let (live, free) = (live * MIB, free * MIB);
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

    #[test]
    fn large_blocks_come_from_what_streams_share_once_a_quarter_more_is_held_than_was_ever_in_use()
    {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 100_000));
        let decide = |streams: &[Holds], shared: u64| leasing.decide(&budget, streams, shared);
        let two = [Holds { live: 500, free: 0 }; 2];
        decide(&two, 0);
        assert!(!leasing.takes_over(LARGE));
        decide(&two, 249);
        assert!(!leasing.takes_over(LARGE));
        decide(&two, 250);
        assert!(leasing.takes_over(LARGE) && !leasing.takes_over(LARGE - 1));
        // What has been in use counts, not what is.
        decide(&[Holds { live: 100, free: 0 }; 2], 1000);
        assert!(!leasing.takes_over(LARGE));
        // A stream that is alone has nobody to share with.
        decide(&two[..1], 1000);
        assert!(!leasing.takes_over(LARGE));
        let apart = Leasing::new(false);
        apart.decide(&budget, &two, 1000);
        assert!(!apart.takes_over(LARGE));
    }

    #[test]
    fn where_as_much_has_been_in_use_before_a_middling_block_takes_what_lies_idle() {
        let (leasing, budget) = (Leasing::new(true), Budget::new("a test", 1 << 40));
        let step = |live: u64, free: u64, bytes: u64| {
            leasing.decide(&budget, &[Holds { live: live / 2, free: 0 }; 2], free);
            leasing.first(bytes)
        };
        let high = 100 * MIDDLING;
        assert_eq!(step(high, 0, MIDDLING), First::New);
        // Half as much lies idle beside it, and the block would be new use, or not.
        assert_eq!(step(high, high / 2 + 1, MIDDLING), First::New);
        assert_eq!(step(high - MIDDLING, high / 2 + 1, MIDDLING), First::Idle);
        assert_eq!(step(high - MIDDLING, high / 2 + 1, MIDDLING - 1), First::Nobodys);
        assert_eq!(
            step(high - MIDDLING, high / 8, MIDDLING),
            First::Idle,
            "however little lies idle"
        );
        assert_eq!(step(high - MIDDLING, high / 8, MIDDLING - 1), First::New);
        assert!(leasing.grows_whole(MIDDLING) && !leasing.grows_whole(MIDDLING + 1));
    }
}
