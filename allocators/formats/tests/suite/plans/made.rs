//! Programs for the properties.

use aquifer_formats::plan::{NEVER, PlanBlock};
use proptest::{prelude::*, sample::Index};
use std::ops::Range;

/// A program: sizes with streams, and which live block ends before each allocation.
pub(crate) fn programs(most: usize) -> impl Strategy<Value = Vec<PlanBlock>> {
    programs_of(prop_oneof![1..2000_u64, 1..(1_u64 << 20), Just(512), Just(1 << 16)], 1..most)
}

/// The same with blocks of these sizes and numbers.
pub(crate) fn programs_of(
    size: impl Strategy<Value = u64>,
    blocks: Range<usize>,
) -> impl Strategy<Value = Vec<PlanBlock>> {
    let step = (size, 0..4_u32, any::<bool>(), prop::collection::vec(any::<Index>(), 0..3));
    prop::collection::vec(step, blocks).prop_map(|steps| {
        let (mut blocks, mut live): (Vec<PlanBlock>, Vec<usize>) = (Vec::new(), Vec::new());
        let mut number = 0;
        for (bytes, stream, shared, ends) in steps {
            for end in ends {
                if !live.is_empty() {
                    blocks[live.swap_remove(end.index(live.len()))].end = number;
                    number += 1;
                }
            }
            live.push(blocks.len());
            blocks.push(PlanBlock { bytes, first: number, end: NEVER, stream, shared });
            number += 1;
        }
        blocks
    })
}
