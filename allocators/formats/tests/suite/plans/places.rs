//! Where blocks lie.

use crate::plans::made::{programs, programs_of};
use aquifer_formats::plan::{
    MAX_BLOCK, NEVER, Plan, PlanBlock, PlanError, PlanOptions, PlannedBlock,
};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use std::time::Duration;

/// Returns options for a result that depends on no clock.
pub(crate) fn tries(tries: u32) -> PlanOptions {
    let mut options = PlanOptions::default();
    (options.tries, options.time) = (tries, Duration::MAX);
    options
}

fn units(bytes: u64) -> u64 {
    bytes.next_multiple_of(512)
}

/// Returns the most bytes of blocks that live at once, by looking at each first step.
fn load(blocks: &[PlanBlock]) -> u64 {
    let live = |at: u32| blocks.iter().filter(move |block| block.first <= at && at < block.end);
    blocks.iter().map(|block| live(block.first).map(|b| units(b.bytes)).sum()).max().unwrap_or(0)
}

fn live_together(a: &PlannedBlock, b: &PlannedBlock) -> bool {
    a.first < b.end && b.first < a.end
}

/// Returns the top of the lowest placement in this order, by looking at each block placed before.
fn naive_top(blocks: &[PlanBlock], order: &[usize]) -> u64 {
    let mut placed: Vec<PlannedBlock> = Vec::new();
    for &number in order {
        let PlanBlock { bytes, first, end, stream, shared } = blocks[number];
        let mut block = PlannedBlock { bytes: units(bytes), offset: 0, first, end, stream, shared };
        let above = |block: &PlannedBlock| {
            let mut others = placed.iter().filter(|other| live_together(other, block));
            let overlap = others.find(|other| {
                other.offset < block.offset + block.bytes
                    && block.offset < other.offset + other.bytes
            });
            overlap.map(|other| other.offset + other.bytes)
        };
        while let Some(next) = above(&block) {
            block.offset = next;
        }
        placed.push(block);
    }
    placed.iter().map(|block| block.offset + block.bytes).max().unwrap_or(0)
}

/// Returns the lowest top of all orders. A placement with the lowest top stays as it is or sinks if
/// its blocks are placed again in the order of their offsets, so that some order has it.
fn lowest_top(blocks: &[PlanBlock], order: &mut Vec<usize>) -> u64 {
    if order.len() == blocks.len() {
        return naive_top(blocks, order);
    }
    let mut lowest = u64::MAX;
    for next in 0..blocks.len() {
        if !order.contains(&next) {
            order.push(next);
            lowest = lowest.min(lowest_top(blocks, order));
            order.pop();
        }
    }
    lowest
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn live_blocks_never_overlap_and_the_top_is_at_least_the_load(blocks in programs(120)) {
        let plan = Plan::make(&blocks, &tries(12)).expect("a plan");
        prop_assert_eq!(plan.blocks().len(), blocks.len());
        prop_assert_eq!(plan.lower_bound(), load(&blocks));
        prop_assert!(plan.top() >= plan.lower_bound());
        for (number, (block, facts)) in plan.blocks().iter().zip(&blocks).enumerate() {
            prop_assert_eq!(block.bytes, units(facts.bytes));
            prop_assert_eq!((block.first, block.end), (facts.first, facts.end));
            prop_assert!(block.offset % 512 == 0 && block.offset + block.bytes <= plan.top());
            for other in &plan.blocks()[..number] {
                let apart = block.offset + block.bytes <= other.offset
                    || other.offset + other.bytes <= block.offset;
                prop_assert!(apart || !live_together(block, other), "{:?} {:?}", block, other);
            }
        }
    }

    #[test]
    fn equal_blocks_and_options_give_equal_plans(blocks in programs(80)) {
        let plan = Plan::make(&blocks, &tries(9)).expect("a plan");
        prop_assert_eq!(plan, Plan::make(&blocks, &tries(9)).expect("a plan"));
    }

    /// The first order alone: the largest first, as the naive placement does it.
    #[test]
    fn one_try_is_the_lowest_placement_of_the_largest_first(blocks in programs(60)) {
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by_key(|&number| {
            (std::cmp::Reverse(units(blocks[number].bytes)), blocks[number].stream, number)
        });
        let plan = Plan::make(&blocks, &tries(1)).expect("a plan");
        prop_assert_eq!(plan.top(), naive_top(&blocks, &order));
    }
}

/// No exact search is worse than the orders that it begins with, and some are better.
#[test]
fn an_exact_search_finds_tops_that_orders_do_not() {
    let mut runner = TestRunner::deterministic();
    let strategy = programs_of((1..40_u64).prop_map(|units| units * 512), 30..40);
    let mut gained = 0;
    for _ in 0..60 {
        let blocks = strategy.new_tree(&mut runner).expect("a program").current();
        let mut options = tries(64);
        options.time = Duration::from_secs(1);
        let exact = Plan::make(&blocks, &options).expect("a plan");
        let orders = Plan::make(&blocks, &tries(63)).expect("a plan");
        assert!(exact.lower_bound() <= exact.top() && exact.top() <= orders.top());
        gained += u32::from(exact.top() < orders.top());
    }
    assert!(gained > 0);
}

/// Cuts a rectangle of time and addresses into blocks, so that they fit into it without a gap. Each
/// cut names the part that it halves, whether across time, and at which of sixteen places.
fn cut_up(cuts: Vec<(prop::sample::Index, bool, u64)>) -> Vec<PlanBlock> {
    let mut parts = vec![((0_u64, 1_u64 << 20), (0_u64, 1_u64 << 20))];
    for (index, across_time, sixteenths) in cuts {
        let part = index.index(parts.len());
        let ((start, end), (low, high)) = parts[part];
        let (from, to) = if across_time { (start, end) } else { (low, high) };
        let at = from + (to - from) * sixteenths / 16;
        let halves = if across_time {
            [((start, at), (low, high)), ((at, end), (low, high))]
        } else {
            [((start, end), (low, at)), ((start, end), (at, high))]
        };
        if halves.iter().all(|(life, units)| life.0 < life.1 && units.0 < units.1) {
            parts.splice(part..=part, halves);
        }
    }
    parts.sort_unstable();
    // Steps are unique: each has room for all blocks that begin at the same time.
    let blocks = (0..).zip(parts).map(|(number, ((start, end), (low, high)))| PlanBlock {
        bytes: (high - low) * 512,
        first: start as u32 * 1024 + number,
        end: end as u32 * 1024,
        stream: 0,
        shared: false,
    });
    blocks.collect()
}

#[test]
fn blocks_that_fit_without_a_gap_are_placed_without_a_gap() {
    let mut runner = TestRunner::deterministic();
    let cut = (any::<prop::sample::Index>(), any::<bool>(), 2..15_u64);
    let strategy = prop::collection::vec(cut, 60..160);
    for _ in 0..10 {
        let blocks = cut_up(strategy.new_tree(&mut runner).expect("cuts").current());
        let plan = Plan::make(&blocks, &tries(64)).expect("a plan");
        assert_eq!((plan.top(), plan.lower_bound()), (512 << 20, 512 << 20));
    }
}

/// The first try of so many blocks takes seconds. The pass over time that replaces it has no
/// overlap, as `Plan::make` checks, and wastes less than what lives.
#[test]
fn the_time_is_kept_where_it_is_too_short_for_one_try() {
    let block = |n: u32| PlanBlock {
        bytes: 512 * u64::from(1 + n * 7919 % 1021),
        first: n * 2,
        end: n * 2 + 1 + n * 104_729 % 4001,
        stream: 0,
        shared: false,
    };
    let blocks: Vec<_> = (0..20_000).map(block).collect();
    let mut options = PlanOptions::default();
    options.time = Duration::ZERO;
    let plan = Plan::make(&blocks, &options).expect("a plan");
    assert!(plan.top() < plan.lower_bound() * 2);
    assert_ne!(Plan::make(&blocks, &tries(1)).expect("a plan"), plan);
}

#[test]
fn small_programs_get_the_lowest_top_that_any_order_has() {
    let mut runner = TestRunner::deterministic();
    // Few sizes, so that holes nearly fit.
    let strategy = programs_of((1..5_u64).prop_map(|units| units * 512), 5..8);
    for _ in 0..100 {
        let blocks = strategy.new_tree(&mut runner).expect("a program").current();
        let plan = Plan::make(&blocks, &tries(64)).expect("a plan");
        assert_eq!(plan.top(), lowest_top(&blocks, &mut Vec::new()), "{blocks:?}");
    }
}

/// Six units are live at most, and no order places these blocks in fewer than seven.
#[test]
fn a_top_above_the_load_is_found_where_no_plan_reaches_the_load() {
    let lives = [
        (3, 0, 5),
        (3, 1, 2),
        (2, 3, 11),
        (1, 4, 8),
        (1, 6, 9),
        (2, 7, 12),
        (2, 10, NEVER),
        (3, 13, NEVER),
    ];
    let block = |(units, first, end): (u64, u32, u32)| PlanBlock {
        bytes: units * 512,
        first,
        end,
        stream: 0,
        shared: false,
    };
    let blocks = lives.map(block);
    let plan = Plan::make(&blocks, &tries(64)).expect("a plan");
    assert_eq!((plan.lower_bound(), plan.top()), (6 * 512, 7 * 512));
    assert_eq!(plan.top(), lowest_top(&blocks, &mut Vec::new()));
}

#[test]
fn impossible_blocks_are_typed_errors() {
    let good = PlanBlock { bytes: 512, first: 0, end: 2, stream: 0, shared: false };
    let second = PlanBlock { first: 1, end: NEVER, ..good };
    let make = |second: PlanBlock| Plan::make(&[good, second], &tries(2));
    assert!(make(second).is_ok());
    assert_eq!(Plan::make(&[], &tries(2)), Err(PlanError::NoBlocks));
    assert_eq!(make(PlanBlock { bytes: 0, ..second }), Err(PlanError::ZeroBytes { block: 1 }));
    for bytes in [MAX_BLOCK + 1, 1 << 40, u64::MAX] {
        assert_eq!(
            make(PlanBlock { bytes, ..second }),
            Err(PlanError::TooLarge { block: 1, bytes })
        );
    }
    for end in [0, 1] {
        assert_eq!(make(PlanBlock { end, ..second }), Err(PlanError::EndsBeforeStart { block: 1 }));
    }
    assert_eq!(make(PlanBlock { first: 0, ..second }), Err(PlanError::OutOfOrder { block: 1 }));
    // Two of the largest fit below the last address, and three do not.
    let large = |first| PlanBlock { bytes: MAX_BLOCK, first, ..second };
    assert!(Plan::make(&[large(0), large(1)], &tries(9)).is_ok());
    let error = Plan::make(&[large(0), large(1), large(2)], &tries(9));
    assert_eq!(error, Err(PlanError::TooMuch { live: MAX_BLOCK * 3 }));
    for error in [
        PlanError::NoBlocks,
        PlanError::TooLarge { block: 1, bytes: u64::MAX },
        PlanError::TooMuch { live: u64::MAX },
    ] {
        assert!(!error.to_string().contains('\n'));
    }
}
