//! Cursors: programs that run again as recorded, and with changes.

use crate::plans::{made::programs, places::tries};
use aquifer_core::random::SplitMix64;
use aquifer_formats::plan::{
    CursorCounters, NEVER, Plan, PlanAnswer, PlanBlock, PlanCursor, PlanEdge, PlannedBlock,
};
use aquifer_formats::trace::Trace;
use proptest::prelude::*;
use std::{collections::BTreeMap, path::Path};

/// What a program does: it allocates a block, or frees one that it allocated.
#[derive(Clone, Copy, Debug)]
enum Act {
    Allocate { id: u32, bytes: u64, stream: u32 },
    Free { id: u32 },
}

impl Act {
    /// Returns the same act of a block whose number is higher by `base`.
    fn renumbered(self, base: u32) -> Self {
        match self {
            Self::Allocate { id, bytes, stream } => Self::Allocate { id: id + base, bytes, stream },
            Self::Free { id } => Self::Free { id: id + base },
        }
    }
}

/// Returns the acts of a recorded program.
fn acts(blocks: &[PlanBlock]) -> Vec<Act> {
    let mut acts = Vec::new();
    for (id, block) in (0..).zip(blocks) {
        let PlanBlock { bytes, stream, .. } = *block;
        acts.push((block.first, Act::Allocate { id, bytes, stream }));
        if block.end != NEVER {
            acts.push((block.end, Act::Free { id }));
        }
    }
    acts.sort_by_key(|&(step, _)| step);
    acts.into_iter().map(|(_, act)| act).collect()
}

/// Repeatable random numbers.
struct Numbers(SplitMix64);

impl Numbers {
    fn below(&mut self, bound: u64) -> u64 {
        self.0.next_u64() % bound
    }
}

/// Changes `per_cent` of the allocations: one more, one less, another size, or later.
fn changed(acts: &[Act], per_cent: u64, seed: u64) -> Vec<Act> {
    let mut numbers = Numbers(SplitMix64::new(seed));
    let mut gone = std::collections::HashSet::new();
    // Acts that come later, by the position before which they come.
    let mut later: BTreeMap<usize, Vec<Act>> = BTreeMap::new();
    let mut result = Vec::new();
    let mut next = acts.len() as u32;
    for (at, &act) in acts.iter().enumerate() {
        result.extend(later.remove(&at).into_iter().flatten());
        match act {
            Act::Free { id } if gone.contains(&id) => continue,
            Act::Allocate { id, bytes, stream } if numbers.below(100) < per_cent => {
                match numbers.below(4) {
                    0 => {
                        // Of a size that the program has.
                        let other = acts[numbers.below(acts.len() as u64) as usize];
                        let (bytes, stream) = match other {
                            Act::Allocate { bytes, stream, .. } => (bytes, stream),
                            Act::Free { .. } => (bytes, stream),
                        };
                        let more = Act::Allocate { id: next, bytes, stream };
                        let end = at + 1 + numbers.below(400) as usize;
                        later.entry(end).or_default().push(Act::Free { id: next });
                        next += 1;
                        result.extend([more, act]);
                    }
                    1 => {
                        gone.insert(id);
                    }
                    2 => {
                        let bytes = bytes + 512 * (1 + numbers.below(64));
                        result.push(Act::Allocate { id, bytes, stream });
                    }
                    // Before its own free, which is further away than this for most.
                    _ => {
                        let free = acts[at..].iter().take(24).position(
                            |other| matches!(other, Act::Free { id: freed } if *freed == id),
                        );
                        let most = free.unwrap_or(24).max(2) as u64;
                        let end = at + 1 + numbers.below(most - 1) as usize;
                        later.entry(end).or_default().push(act);
                    }
                }
            }
            _ => result.push(act),
        }
    }
    result.extend(later.into_values().flatten());
    result
}

/// Plays acts and checks every hit: no live block has its addresses, and all last users of its
/// addresses are said to come before it. Those of its own stream go without saying if the plan's
/// order is said to suffice, and the others are then those of the plan's edges.
fn follow(cursor: &mut PlanCursor, acts: &[Act]) -> u64 {
    let blocks: Vec<PlannedBlock> = cursor.plan().blocks().to_vec();
    let edges: std::collections::HashSet<_> = cursor.plan().edges().iter().copied().collect();
    let mut held: std::collections::HashMap<u32, u32> = std::collections::HashMap::new();
    let mut live: BTreeMap<u64, u64> = BTreeMap::new();
    // The last user of each address, by the start of its range.
    let mut users: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
    let mut recorded_hits = 0;
    for &act in acts {
        let (id, bytes, stream) = match act {
            Act::Allocate { id, bytes, stream } => (id, bytes, stream),
            Act::Free { id } => {
                if let Some(block) = held.remove(&id) {
                    assert!(cursor.free(block));
                    assert!(!cursor.free(block), "it is freed once");
                    live.remove(&blocks[block as usize].offset);
                }
                continue;
            }
        };
        let PlanAnswer::Hit { block, offset, recorded } = cursor.allocate(bytes, stream) else {
            continue;
        };
        let place = blocks[block as usize];
        assert_eq!((place.offset, place.stream), (offset, stream));
        assert_eq!(place.bytes, bytes.next_multiple_of(512));
        let end = offset + place.bytes;
        let below = live.range(..end).next_back();
        assert!(below.is_none_or(|(_, &other)| other <= offset), "block {block} overlaps");
        live.insert(offset, end);
        held.insert(id, block);
        recorded_hits += u64::from(recorded);
        let followed = cursor.followed().to_vec();
        for &before in followed.iter().filter(|&&before| recorded && before < block) {
            assert!(edges.contains(&PlanEdge { before, after: block }), "block {block}");
        }
        let from = users.range(..offset).next_back().filter(|(_, user)| user.0 > offset);
        let from = from.map_or(offset, |(&from, _)| from);
        let before: Vec<_> =
            users.range(from..end).map(|(&from, &(to, user))| (from, to, user)).collect();
        for (from, to, user) in before {
            let earlier = &blocks[user as usize];
            let is_of_stream = recorded && earlier.stream == stream && !earlier.shared;
            let ordered = is_of_stream || followed.contains(&user);
            assert!(ordered, "block {block} follows block {user} by nothing");
            users.remove(&from);
            if from < offset {
                users.insert(from, (offset, user));
            }
            if to > end {
                users.insert(end, (to, user));
            }
        }
        users.insert(offset, (end, block));
    }
    recorded_hits
}

fn ratio(counters: CursorCounters) -> f64 {
    counters.hits as f64 / (counters.hits + counters.strays) as f64
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_program_that_runs_as_recorded_hits_always_in_the_order_of_the_plan(
        blocks in programs(200),
    ) {
        let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(3)).expect("a plan"));
        let recorded = follow(&mut cursor, &acts(&blocks));
        let counters = cursor.counters();
        prop_assert_eq!((counters.hits, recorded), (blocks.len() as u64, blocks.len() as u64));
        prop_assert_eq!((counters.strays, counters.resynchronisations), (0, 0));
    }

    #[test]
    fn no_change_of_a_program_makes_live_blocks_overlap(
        blocks in programs(300), per_cent in 0..60_u64, seed: u64, passes in 1..4_u64,
    ) {
        let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(3)).expect("a plan"));
        let mut all = Vec::new();
        for pass in 0..passes {
            // Blocks that are not freed stay, under numbers of their own.
            let base = pass as u32 * 100_000;
            let acts = changed(&acts(&blocks), per_cent, seed ^ pass);
            all.extend(acts.into_iter().map(|act| act.renumbered(base)));
        }
        follow(&mut cursor, &all);
    }

    #[test]
    fn any_calls_at_all_keep_live_blocks_apart(
        blocks in programs(60),
        calls in prop::collection::vec((0..6_u8, any::<prop::sample::Index>()), 1..400),
    ) {
        let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(2)).expect("a plan"));
        let places = cursor.plan().blocks().to_vec();
        let mut live: Vec<u32> = Vec::new();
        for (kind, pick) in calls {
            match kind {
                0..=3 => {
                    let facts = blocks[pick.index(blocks.len())];
                    if let PlanAnswer::Hit { block, .. } = cursor.allocate(facts.bytes, facts.stream) {
                        let place = places[block as usize];
                        for &other in &live {
                            let other = places[other as usize];
                            prop_assert!(place.offset + place.bytes <= other.offset
                                || other.offset + other.bytes <= place.offset);
                        }
                        live.push(block);
                    }
                }
                4 if !live.is_empty() => {
                    let block = live.swap_remove(pick.index(live.len()));
                    prop_assert!(cursor.free(block));
                }
                _ => cursor.begin_step(),
            }
        }
    }
}

#[test]
fn recorded_programs_with_changes_hit_and_never_overlap() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    for name in ["llama_train", "resnet_train", "serve_mixed"] {
        let trace = Trace::read(&folder.join(format!("{name}.csv.xz")), None).expect("a trace");
        let blocks = PlanBlock::of_trace(&trace);
        let plan = Plan::make(&blocks, &tries(1)).expect("a plan");
        let acts = acts(&blocks);
        for (per_cent, least) in [(0, 1.0), (1, 0.95), (5, 0.7), (20, 0.35)] {
            let mut cursor = PlanCursor::new(plan.clone());
            let recorded = follow(&mut cursor, &changed(&acts, per_cent, 7));
            let counters = cursor.counters();
            println!(
                "{name} {per_cent:2} %: hits {:.4}, recorded {:.4}, {counters:?}{}",
                ratio(counters),
                recorded as f64 / counters.hits as f64,
                if cursor.is_dropped() { " dropped" } else { "" },
            );
            assert!(ratio(counters) >= least, "{name} {per_cent}: {counters:?}");
        }
    }
}

#[test]
fn a_program_that_leaves_out_a_long_part_is_found_again_by_its_last_three_allocations() {
    // Sizes that repeat only after a long while.
    let block = |number: u32| PlanBlock {
        bytes: 512 * (1 + u64::from(number * 7 % 1009)),
        first: number * 2,
        end: number * 2 + 1,
        stream: 0,
        shared: false,
    };
    let blocks: Vec<_> = (0..1000).map(block).collect();
    let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(1)).expect("a plan"));
    let all = acts(&blocks);
    let without: Vec<_> = all[..400].iter().chain(&all[1200..]).copied().collect();
    follow(&mut cursor, &without);
    let counters = cursor.counters();
    assert_eq!((counters.hits, counters.strays, counters.resynchronisations), (597, 3, 1));
}

#[test]
fn a_loop_hits_in_each_round_and_blocks_that_stay_keep_their_places() {
    let block = |bytes, first, end| PlanBlock { bytes, first, end, stream: 0, shared: false };
    // Weights that stay, and two blocks after each other.
    let blocks = [block(4096, 0, NEVER), block(512, 1, 2), block(1024, 3, 4)];
    let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(1)).expect("a plan"));
    assert!(matches!(cursor.allocate(4096, 0), PlanAnswer::Hit { block: 0, .. }));
    for round in 0..5 {
        for (block, bytes) in [(1, 512), (2, 1024)] {
            let PlanAnswer::Hit { block: found, recorded, .. } = cursor.allocate(bytes, 0) else {
                unreachable!("round {round}: block {block} has a place");
            };
            assert_eq!((found, recorded), (block, true));
            assert!(cursor.free(block));
        }
    }
    assert_eq!((cursor.counters().hits, cursor.counters().strays), (11, 0));
}

#[test]
fn a_round_of_a_loop_follows_the_round_before_by_its_last_users_on_other_streams() {
    let block =
        |first, stream| PlanBlock { bytes: 512, first, end: first + 1, stream, shared: false };
    let plan = Plan::make(&[block(0, 0), block(2, 1), block(4, 1)], &tries(1)).expect("a plan");
    assert_eq!(plan.top(), 512, "all three have the same addresses");
    let mut cursor = PlanCursor::new(plan);
    for _ in 0..3 {
        for (number, stream, follows) in [(0, 0, &[2][..]), (1, 1, &[0]), (2, 1, &[])] {
            let answer = cursor.allocate(512, stream);
            assert_eq!(answer, PlanAnswer::Hit { block: number, offset: 0, recorded: true });
            assert_eq!(cursor.followed(), follows);
            assert!(cursor.free(number));
        }
    }
}

#[test]
fn nothing_relies_on_the_order_behind_a_cancelled_block_or_a_replaced_stream() {
    let block =
        |first, stream| PlanBlock { bytes: 512, first, end: first + 1, stream, shared: false };
    let blocks = [block(0, 0), block(2, 0), block(4, 0), block(6, 0)];
    let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(1)).expect("a plan"));
    let next = |cursor: &mut PlanCursor| match cursor.allocate(512, 0) {
        PlanAnswer::Hit { block, recorded, .. } => {
            let followed = cursor.followed().to_vec();
            assert!(cursor.free(block));
            (block, recorded, followed)
        }
        PlanAnswer::Stray => unreachable!("all blocks hit"),
    };
    assert_eq!(next(&mut cursor), (0, true, vec![]));
    assert!(matches!(cursor.allocate(512, 0), PlanAnswer::Hit { block: 1, .. }));
    cursor.cancel(1);
    let counters = cursor.counters();
    assert_eq!((counters.hits, counters.strays, counters.overlaps), (1, 1, 1));
    assert_eq!(next(&mut cursor), (2, false, vec![1]));
    cursor.replace_stream(0);
    assert_eq!(next(&mut cursor), (3, false, vec![2]));
}

#[test]
fn a_plan_that_misses_for_two_steps_is_dropped_and_one_step_is_forgiven() {
    let block = |number: u32| PlanBlock {
        bytes: 512,
        first: number * 2,
        end: number * 2 + 1,
        stream: 0,
        shared: false,
    };
    let blocks: Vec<_> = (0..10).map(block).collect();
    let mut cursor = PlanCursor::new(Plan::make(&blocks, &tries(1)).expect("a plan"));
    let mut step = |misses: u32| {
        for number in 0..10 {
            match cursor.allocate(if number < misses { 9999 } else { 512 }, 0) {
                PlanAnswer::Hit { block, .. } => assert!(cursor.free(block)),
                PlanAnswer::Stray => {}
            }
        }
        cursor.begin_step();
        cursor.is_dropped()
    };
    // Two of ten are a fifth, which is not too much.
    assert!(![2, 2, 2, 3, 2, 3].into_iter().any(&mut step));
    assert!(step(3));
    // It is not taken up again.
    assert!(step(0));
    assert_eq!(cursor.allocate(512, 0), PlanAnswer::Stray);
}

#[test]
fn sizes_and_blocks_that_no_plan_has_are_strays_and_not_live() {
    let block = PlanBlock { bytes: 512, first: 0, end: NEVER, stream: 0, shared: false };
    let plan = Plan::make(&[block], &tries(1)).expect("a plan");
    let mut full = PlanCursor::new(plan.clone());
    assert!(matches!(full.allocate(512, 0), PlanAnswer::Hit { .. }));
    // All blocks of the plan are live.
    assert_eq!([full.allocate(512, 0), full.allocate(512, 0)], [PlanAnswer::Stray; 2]);
    assert!(full.free(0));
    let mut cursor = PlanCursor::new(plan);
    for bytes in [0, u64::MAX, u64::MAX - 511, 1 << 40] {
        assert_eq!(cursor.allocate(bytes, 0), PlanAnswer::Stray);
    }
    assert!(!cursor.free(0) && !cursor.free(1) && !cursor.free(u32::MAX));
}
