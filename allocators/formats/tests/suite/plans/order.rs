//! Edges: every reuse of addresses is ordered by the streams and the edges together.

use crate::plans::{made::programs, places::tries};
use aquifer_formats::plan::{Plan, PlanBlock, PlanEdge};
use proptest::prelude::*;

/// What is known to be complete: for each block, whether all of its uses are.
type Done = Vec<bool>;

/// Plays a plan on streams that know of each other by its edges alone, and returns the first reuse
/// that nothing orders. A shared block is used by a stream that no other one knows of, so that
/// nothing but an edge completes it.
fn unordered_reuse(plan: &Plan, edges: &[PlanEdge]) -> Option<PlanEdge> {
    let blocks = plan.blocks();
    let streams = blocks.iter().map(|block| block.stream).max().map_or(0, |most| most + 1);
    // What each stream has behind it, and what was behind each block when it was freed.
    let mut behind: Vec<Done> = vec![vec![false; blocks.len()]; streams as usize];
    let mut at_end: Vec<Done> = vec![Vec::new(); blocks.len()];
    let mut events: Vec<(u32, usize, bool)> = Vec::new();
    for (number, block) in blocks.iter().enumerate() {
        events.push((block.first, number, true));
        events.push((block.end, number, false));
    }
    events.sort_unstable();
    for (_, number, is_first) in events {
        let block = &blocks[number];
        let stream = block.stream as usize;
        if !is_first {
            at_end[number] = behind[stream].clone();
            at_end[number][number] = true;
            // Its own stream has its own uses behind it.
            behind[stream][number] |= !block.shared;
            continue;
        }
        for edge in edges.iter().filter(|edge| edge.after as usize == number) {
            let known = at_end[edge.before as usize].clone();
            behind[stream].iter_mut().zip(known).for_each(|(done, known)| *done |= known);
        }
        for (earlier, other) in blocks[..number].iter().enumerate() {
            let common = block.offset < other.offset + other.bytes
                && other.offset < block.offset + block.bytes;
            if common && !behind[stream][earlier] {
                return Some(PlanEdge { before: earlier as u32, after: number as u32 });
            }
        }
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn every_reuse_is_ordered_by_streams_and_edges(blocks in programs(80)) {
        let plan = Plan::make(&blocks, &tries(6)).expect("a plan");
        prop_assert_eq!(unordered_reuse(&plan, plan.edges()), None);
    }

    /// An edge may be implied by others. One of the earliest block is not, and the file has it.
    #[test]
    fn a_plan_without_one_of_its_edges_is_refused(blocks in programs(60), pick: prop::sample::Index) {
        let plan = Plan::make(&blocks, &tries(3)).expect("a plan");
        prop_assume!(!plan.edges().is_empty());
        let mut file = Vec::new();
        plan.write_to(&mut file).expect("memory");
        let at = pick.index(plan.edges().len());
        let from = 24 + plan.blocks().len() * 24 + at * 8;
        file.drain(from..from + 8);
        file[20..24].copy_from_slice(&(plan.edges().len() as u32 - 1).to_le_bytes());
        let error = Plan::read_from(sealed(file).as_slice()).expect_err("an edge is missing");
        let PlanEdge { before, after } = plan.edges()[at];
        prop_assert!(
            error.to_string().starts_with(&format!("block {after} takes addresses of block {before}")),
            "{}", error
        );
    }
}

/// Replaces the checksum of a file by the right one, computed bit by bit.
fn sealed(mut file: Vec<u8>) -> Vec<u8> {
    file.truncate(file.len() - 8);
    let mut sum = u64::MAX;
    for &byte in &file {
        sum ^= u64::from(byte);
        for _ in 0..8 {
            sum = if sum & 1 == 1 { sum >> 1 ^ 0xC96C_5795_D787_0F42 } else { sum >> 1 };
        }
    }
    file.extend((!sum).to_le_bytes());
    file
}

#[test]
fn the_check_of_order_objects_to_a_plan_without_an_edge() {
    let block = |first, end, stream| PlanBlock { bytes: 512, first, end, stream, shared: false };
    let plan =
        Plan::make(&[block(0, 1, 0), block(2, 3, 1), block(4, 5, 1)], &tries(1)).expect("a plan");
    let edge = PlanEdge { before: 0, after: 1 };
    assert_eq!(plan.edges(), [edge]);
    assert_eq!(unordered_reuse(&plan, &[edge]), None);
    assert_eq!(unordered_reuse(&plan, &[]), Some(edge));
}

#[test]
fn reuse_on_one_stream_needs_an_edge_only_after_a_shared_block() {
    let block = |first, end, shared| PlanBlock { bytes: 512, first, end, stream: 3, shared };
    let plan = Plan::make(&[block(0, 1, false), block(2, 3, true), block(4, 5, false)], &tries(1));
    assert_eq!(plan.expect("a plan").edges(), [PlanEdge { before: 1, after: 2 }]);
}

#[test]
fn equal_blocks_take_the_addresses_of_their_own_stream() {
    // Two streams in turn, with two blocks live at any time.
    let block = |number: u32| PlanBlock {
        bytes: 4096,
        first: number * 2 + 1,
        end: (number + 2) * 2,
        stream: number % 2,
        shared: false,
    };
    let blocks: Vec<_> = (0..100).map(block).collect();
    let plan = Plan::make(&blocks, &tries(1)).expect("a plan");
    assert_eq!((plan.top(), plan.edges().len()), (8192, 0));
}
