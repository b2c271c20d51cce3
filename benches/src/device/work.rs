//! Workloads that are generated before they are timed.
//!
//! The random sizes follow the rules of RMM's own benchmark. The generator is `splitmix64`. It is
//! easy to write in any language, so that other allocators can run the identical work:
//!
//! - There are `2n` steps. Each draws a size in `1..=max`, whether or not it is used.
//! - With no live block the step allocates. Otherwise it draws a number in `0..100`, and allocates
//!   if that is below 73, fewer than `n` were allocated, and the live bytes with this block stay
//!   below the limit.
//! - Otherwise it draws a number in `0..n`, takes it modulo the number of live blocks, and frees
//!   that block. The last one takes its index.
//!
//! The result has `n` allocations and `n` frees, and no block is live at the end. Numbers are drawn
//! by modulo.

use aquifer_core::random::SplitMix64;

/// Allocations in a random trace.
const ALLOCATIONS: u64 = 1000;
/// The seed of the first thread. Each further thread has the next one.
const SEED: u64 = 1;
/// How many of 100 steps would allocate.
const ALLOCATING: u64 = 73;
/// The limit of live bytes over all threads.
const LIVE: u64 = 16_000 << 20;

/// Random choices, in a form that is simple in other languages too.
#[derive(Clone, Debug)]
pub(crate) struct RandomChoice(SplitMix64);

impl RandomChoice {
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Returns a number below `bound`, which must not be zero. Smaller numbers are slightly more
    /// likely, which keeps the rule simple for other languages.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }

    /// Shuffles `all`.
    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for last in (1..all.len()).rev() {
            let other = self.below(last as u64 + 1);
            all.swap(last, other as usize);
        }
    }
}

/// One step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Operation {
    /// The index of the block.
    pub(crate) slot: u32,
    /// Whether it is an allocation. Otherwise it is a free.
    pub(crate) allocates: bool,
    /// The block's size.
    pub(crate) bytes: u64,
}

/// Steps in order. Each block is allocated at most once before it is freed, and none is live at the
/// end.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct WorkPlan {
    pub(crate) operations: Vec<Operation>,
    /// The number of block indices.
    pub(crate) slots: usize,
    /// The peak of live bytes.
    pub(crate) peak: u64,
}

impl WorkPlan {
    /// Creates random sizes up to `max`, for the `thread`th of `threads` threads.
    pub(crate) fn random(max: u64, thread: u64, threads: u64) -> Self {
        let limit = LIVE / threads;
        Self::drawn(ALLOCATIONS, max.min(limit), limit, SEED + thread)
    }

    /// As [`WorkPlan::random`], with at most `limit` live bytes in each thread.
    pub(crate) fn random_within(max: u64, thread: u64, limit: u64) -> Self {
        Self::drawn(ALLOCATIONS, max.min(limit), limit, SEED + thread)
    }

    fn drawn(count: u64, max: u64, limit: u64, seed: u64) -> Self {
        let mut numbers = RandomChoice::new(seed);
        let mut operations = Vec::with_capacity(2 * count as usize);
        let mut live: Vec<Operation> = Vec::new();
        let (mut allocated, mut bytes, mut peak) = (0, 0, 0);
        for _ in 0..2 * count {
            let size = 1 + numbers.below(max);
            // The number is drawn even if it decides nothing.
            let allocates = live.is_empty()
                || (numbers.below(100) < ALLOCATING && allocated < count && bytes + size < limit);
            if allocates {
                let step = Operation { slot: allocated as u32, allocates: true, bytes: size };
                operations.push(step);
                live.push(step);
                allocated += 1;
                bytes += size;
                peak = peak.max(bytes);
            } else {
                let place = numbers.below(count) % live.len() as u64;
                let gone = live.swap_remove(place as usize);
                bytes -= gone.bytes;
                operations.push(Operation { allocates: false, ..gone });
            }
        }
        operations.extend(live.into_iter().map(|left| Operation { allocates: false, ..left }));
        Self { operations, slots: allocated as usize, peak }
    }

    /// Creates `count` blocks of one size, freed in the order of their allocation.
    pub(crate) fn batch(count: u32, bytes: u64) -> Self {
        let each = |allocates| (0..count).map(move |slot| Operation { slot, allocates, bytes });
        let operations = each(true).chain(each(false)).collect();
        Self { operations, slots: count as usize, peak: u64::from(count) * bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Returns a hash of every step (FNV-1a over the index, the kind and the size as whole
    /// numbers).
    fn folded(work: &WorkPlan) -> u64 {
        let fields = work
            .operations
            .iter()
            .flat_map(|o| [u64::from(o.slot), u64::from(o.allocates), o.bytes]);
        fields.fold(0xcbf2_9ce4_8422_2325, |hash, field| {
            (hash ^ field).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// The expected values come from two ports of the rules, in Python and in C++.
    #[test]
    fn random_work_is_the_same_as_in_other_languages() {
        // Maximum size, thread, threads; peak of live bytes, total bytes, hash of every step.
        let table = [
            (MIB, 0, 1, 342_162_656, 540_558_799, 0xd4e6_7e0f_8785_b419),
            (64 * MIB, 0, 1, 16_776_630_520, 31_977_780_644, 0xa059_8ab1_b29a_ddbd),
            (4096 * MIB, 0, 1, 16_776_116_382, 1_798_214_509_475, 0x7d62_0a2d_48a4_85a7),
            (MIB, 15, 16, 332_730_812, 530_886_000, 0x6540_402e_04ad_7e19),
            // A sixteenth of the limit is less than the maximum size.
            (4096 * MIB, 15, 16, 1_048_151_713, 425_612_056_860, 0xc49b_105b_68cc_9e1d),
        ];
        for (max, thread, threads, peak, bytes, hash) in table {
            let work = WorkPlan::random(max, thread, threads);
            assert_eq!((work.operations.len(), work.slots, work.peak), (2000, 1000, peak));
            let allocated = work.operations.iter().filter(|o| o.allocates).map(|o| o.bytes);
            assert_eq!(allocated.sum::<u64>(), bytes);
            assert_eq!(folded(&work), hash, "up to {max}, thread {thread} of {threads}");
        }
    }

    #[test]
    fn random_work_begins_and_ends_as_in_other_languages() {
        let work = WorkPlan::random(MIB, 0, 1);
        let step = |slot, allocates, bytes| Operation { slot, allocates, bytes };
        let first = [
            step(0, true, 154_818),
            step(0, false, 154_818),
            step(1, true, 112_058),
            step(2, true, 328_321),
            step(3, true, 492_918),
            step(4, true, 92_055),
            step(3, false, 492_918),
            step(5, true, 808_873),
        ];
        assert_eq!(work.operations[..8], first);
        assert_eq!(work.operations[1998..], [step(984, false, 61_897), step(319, false, 735_798)]);
        let large = WorkPlan::random(4096 * MIB, 0, 1);
        assert_eq!(large.operations[0], step(0, true, 2_298_633_410));
        assert_eq!(large.operations[7], step(5, true, 1_867_274_153));
    }

    #[test]
    fn every_block_is_freed_once_after_its_allocation() {
        for work in [WorkPlan::random(MIB, 3, 4), WorkPlan::batch(64, 100)] {
            let mut live = vec![false; work.slots];
            for step in work.operations {
                let slot = &mut live[step.slot as usize];
                assert_ne!(*slot, step.allocates);
                *slot = step.allocates;
            }
            assert!(live.iter().all(|live| !live));
        }
    }

    #[test]
    fn a_batch_is_freed_in_the_order_of_its_allocation() {
        let work = WorkPlan::batch(2, 5);
        let steps = work.operations.iter().map(|o| (o.slot, o.allocates));
        assert_eq!(steps.collect::<Vec<_>>(), [(0, true), (1, true), (0, false), (1, false)]);
        assert_eq!(work.peak, 10);
    }

    #[test]
    fn a_shuffle_keeps_everything() {
        let mut all: Vec<u32> = (0..100).collect();
        RandomChoice::new(1).shuffle(&mut all);
        assert!(!all.is_sorted());
        all.sort_unstable();
        assert_eq!(all, (0..100).collect::<Vec<_>>());
    }
}
