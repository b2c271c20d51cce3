//! Which blocks take the addresses of which others, and the check that no two live ones share any.

use crate::block::{PlanEdge, PlannedBlock};
use std::collections::BTreeMap;

/// Two blocks that live at the same time have addresses in common.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Overlap {
    /// The block that was allocated first.
    pub(crate) first: u32,
    /// The other one.
    pub(crate) second: u32,
}

/// Returns the edges that blocks need, in ascending order of the later block and then of the
/// earlier one.
///
/// A block follows the last ones before it that had any of its addresses. Blocks before those are
/// ordered by their edges: each of them came after its own predecessors.
///
/// # Errors
/// [`Overlap`], of the earliest block that has one.
pub(crate) fn edges(blocks: &[PlannedBlock]) -> Result<Vec<PlanEdge>, Overlap> {
    // The last block of each address: ranges that do not overlap, by their start.
    let mut owners: BTreeMap<u64, (u64, u32)> = BTreeMap::new();
    let mut edges = Vec::new();
    let (mut taken, mut before) = (Vec::new(), Vec::new());
    for (number, block) in (0_u32..).zip(blocks) {
        let (start, end) = (block.offset, block.offset + block.bytes);
        let reaches = owners.range(..start).next_back().filter(|(_, owner)| owner.0 > start);
        let from = reaches.map_or(start, |(&from, _)| from);
        taken.clear();
        taken.extend(owners.range(from..end).map(|(&from, &(to, owner))| (from, to, owner)));
        before.clear();
        before.extend(taken.iter().map(|&(_, _, owner)| owner));
        before.sort_unstable();
        before.dedup();
        for &owner in &before {
            let earlier = &blocks[owner as usize];
            if earlier.end > block.first {
                return Err(Overlap { first: owner, second: number });
            }
            if earlier.stream != block.stream || earlier.shared {
                edges.push(PlanEdge { before: owner, after: number });
            }
        }
        for &(from, to, owner) in &taken {
            owners.remove(&from);
            if from < start {
                owners.insert(from, (start, owner));
            }
            if to > end {
                owners.insert(end, (to, owner));
            }
        }
        owners.insert(start, (end, number));
    }
    Ok(edges)
}
