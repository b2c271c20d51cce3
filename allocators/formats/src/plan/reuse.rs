//! Which blocks take the addresses of which others, and the check that no two live ones share any.

use crate::plan::block::{PlanEdge, PlannedBlock};
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
/// # Errors
/// [`Overlap`], of the earliest block that has one.
pub(crate) fn edges(blocks: &[PlannedBlock]) -> Result<Vec<PlanEdge>, Overlap> {
    let mut edges = Vec::new();
    for_each_reuse(blocks, |after, earlier, _| {
        let block = &blocks[after as usize];
        let needs = |before: &&u32| {
            let earlier = &blocks[**before as usize];
            earlier.stream != block.stream || earlier.shared
        };
        edges.extend(earlier.iter().filter(needs).map(|&before| PlanEdge { before, after }));
    })?;
    Ok(edges)
}

/// Calls `visit` for each block with the last blocks before it that had any of its addresses, in
/// ascending order, and with whether some of its addresses had no block before.
///
/// Blocks before those are ordered by the same rule: each block came after its own predecessors.
///
/// # Errors
/// [`Overlap`], of the earliest block that has one.
pub(crate) fn for_each_reuse(
    blocks: &[PlannedBlock],
    visit: impl FnMut(u32, &[u32], bool),
) -> Result<(), Overlap> {
    each_reuse(blocks, visit).map(drop)
}

/// The last block of each address: ranges that do not overlap, by their start.
pub(crate) type Owners = BTreeMap<u64, (u64, u32)>;

/// As [`for_each_reuse`], and returns the last block of each address.
pub(crate) fn each_reuse(
    blocks: &[PlannedBlock],
    mut visit: impl FnMut(u32, &[u32], bool),
) -> Result<Owners, Overlap> {
    let mut owners = Owners::new();
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
        let live = before.iter().find(|&&owner| blocks[owner as usize].end > block.first);
        if let Some(&first) = live {
            return Err(Overlap { first, second: number });
        }
        let mut had = 0;
        for &(from, to, owner) in &taken {
            had += to.min(end) - from.max(start);
            owners.remove(&from);
            if from < start {
                owners.insert(from, (start, owner));
            }
            if to > end {
                owners.insert(end, (to, owner));
            }
        }
        visit(number, &before, had < block.bytes);
        owners.insert(start, (end, number));
    }
    Ok(owners)
}
