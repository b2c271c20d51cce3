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
//! that a stream takes what others have freed only where a third of all memory lies idle: if it took whenever it could,
//! streams that allocate at the same time would take the same ranges from each other for ever.

use aquifer_core::Budget;
use std::sync::atomic::{AtomicBool, Ordering};

/// Blocks up to this size, in bytes, come from the stream's own cache in either case: many of them fit in what is taken
/// at once.
const ALWAYS_OWN: u64 = 64 << 10;
/// A stream counts as one of several that share when it holds this part of all memory.
const HOLDERS_PART: u64 = 8;

/// What one stream holds, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Holds {
    /// In use, or waiting for it to end.
    pub(crate) live: u64,
    /// In its cache.
    pub(crate) free: u64,
}

/// Which of the two it is.
#[derive(Default, Debug)]
pub(crate) struct Leasing {
    together: AtomicBool,
    /// A stream that needs memory takes new one before it looks what others have freed.
    ample: AtomicBool,
}

impl Leasing {
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

    /// Whether new memory comes before what others have freed.
    pub(crate) fn is_ample(&self) -> bool {
        self.ample.load(Ordering::Relaxed)
    }

    /// Decides anew, by what is left in the budget and what each stream holds. Once together, streams stay so until less
    /// than three eighths are taken, so that a loop at the border does not go back and forth.
    pub(crate) fn decide(&self, budget: &Budget, streams: &[Holds]) {
        let (used, limit) = (budget.used(), budget.limit());
        let border = if self.is_together() { limit / 8 * 3 } else { limit / 2 };
        let holders = streams.iter().filter(|stream| stream.live + stream.free > used / HOLDERS_PART);
        let together = used > border && holders.count() > 1;
        let (live, free) = streams.iter().fold((0, 0), |(live, free), s| (live + s.live, free + s.free));
        let ample = used <= limit / 2 && free <= live / 2;
        // Read far more often than it changes: the line stays shared.
        for (flag, value) in [(&self.together, together), (&self.ample, ample)] {
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
        let (leasing, budget) = (Leasing::default(), Budget::new("a test", 800));
        let mut step = |used: u64| {
            let charge = budget.charge(used);
            leasing.decide(&budget, &[Holds { live: used / 2, free: 0 }; 2]);
            drop(charge);
            leasing.is_together()
        };
        assert_eq!([400, 401, 301, 300, 400].map(&mut step), [false, true, true, false, false]);
    }

    #[test]
    fn a_stream_that_holds_nearly_all_of_it_shares_with_nobody() {
        let (leasing, budget) = (Leasing::default(), Budget::new("a test", 800));
        let charge = budget.charge(800);
        let step = |first: u64, second: u64| {
            leasing.decide(
                &budget,
                &[Holds { live: first, free: 0 }, Holds { live: second / 2, free: second / 2 }],
            );
            leasing.is_together()
        };
        assert!(!step(720, 80));
        assert!(step(690, 110));
        drop(charge);
    }

    #[test]
    fn memory_is_ample_while_half_of_the_budget_is_left_and_a_third_of_it_lies_idle_at_most() {
        let (leasing, budget) = (Leasing::default(), Budget::new("a test", 800));
        let step = |live: u64, free: u64| {
            let charge = budget.charge(live + free);
            leasing.decide(&budget, &[Holds { live, free }]);
            drop(charge);
            leasing.is_ample()
        };
        assert_eq!(
            [(200, 100), (200, 101), (300, 101)].map(|(live, free)| step(live, free)),
            [true, false, false]
        );
    }
}
