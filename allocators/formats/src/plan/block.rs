//! The blocks of a program, and the checks on them.

use crate::plan::error::{MAX_BLOCK, MAX_BLOCKS, PlanError};
use aquifer_core::BLOCK_ALIGN;
use std::ops::Range;

/// A block of a recorded program.
///
/// Steps are numbered in the order in which the program took them: allocations, and ends of uses.
///
/// See the example of [`Plan`](crate::plan::Plan).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PlanBlock {
    /// The requested bytes.
    pub bytes: u64,
    /// The step that allocates it. No two blocks have the same.
    pub first: u32,
    /// The step at which its last use on any stream is complete, above `first`, or
    /// [`NEVER`](crate::plan::NEVER). A block that is allocated at this step or a later one may have its
    /// addresses.
    pub end: u32,
    /// The stream that it is allocated on.
    pub stream: u32,
    /// Whether a stream other than its own uses or frees it.
    pub shared: bool,
}

/// A block with its place.
///
/// See the example of [`Plan`](crate::plan::Plan).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PlannedBlock {
    /// Its bytes: the requested ones, rounded up to [`BLOCK_ALIGN`].
    pub bytes: u64,
    /// Its first address, counted from that of the plan: a multiple of [`BLOCK_ALIGN`].
    pub offset: u64,
    /// As in [`PlanBlock::first`].
    pub first: u32,
    /// As in [`PlanBlock::end`].
    pub end: u32,
    /// As in [`PlanBlock::stream`].
    pub stream: u32,
    /// As in [`PlanBlock::shared`].
    pub shared: bool,
}

/// An order that a plan relies on: `after` has addresses of `before`, and no stream orders the two.
///
/// The stream of `after` has to wait until all uses of `before` are complete.
///
/// See the example of [`Plan`](crate::plan::Plan).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PlanEdge {
    /// The block that had the addresses before.
    pub before: u32,
    /// The block that takes them.
    pub after: u32,
}

/// Valid blocks in units of [`BLOCK_ALIGN`] bytes and slots of time.
///
/// A slot is the time from one allocation to the next. Two blocks live at the same time if and only
/// if their slots overlap, because the number of live blocks grows only where a slot begins.
#[derive(Debug)]
pub(crate) struct Lives {
    /// The size of each block.
    pub(crate) units: Vec<u32>,
    /// The slots of each block. Block `n` begins with slot `n`.
    pub(crate) slots: Vec<Range<u32>>,
    /// The most units that are live at once: no plan has a lower top.
    pub(crate) load: u32,
}

impl Lives {
    /// Checks blocks, which are in the order of their first steps.
    ///
    /// # Errors
    /// [`PlanError`].
    pub(crate) fn of(blocks: &[PlanBlock]) -> Result<Self, PlanError> {
        if blocks.is_empty() {
            return Err(PlanError::NoBlocks);
        }
        let Some(count) = u32::try_from(blocks.len()).ok().filter(|count| *count <= MAX_BLOCKS)
        else {
            return Err(PlanError::TooManyBlocks { blocks: blocks.len() });
        };
        let mut units = Vec::with_capacity(blocks.len());
        for (block, facts) in blocks.iter().enumerate() {
            if facts.bytes == 0 {
                return Err(PlanError::ZeroBytes { block });
            }
            if facts.bytes > MAX_BLOCK {
                return Err(PlanError::TooLarge { block, bytes: facts.bytes });
            }
            if facts.end <= facts.first {
                return Err(PlanError::EndsBeforeStart { block });
            }
            if block > 0 && facts.first <= blocks[block - 1].first {
                return Err(PlanError::OutOfOrder { block });
            }
            // At most MAX_BLOCK, which is below 2^31 units.
            units.push(facts.bytes.div_ceil(BLOCK_ALIGN) as u32);
        }
        let end =
            |facts: &PlanBlock| blocks.partition_point(|other| other.first < facts.end) as u32;
        let slots: Vec<_> = (0..count).zip(blocks).map(|(slot, facts)| slot..end(facts)).collect();
        // Below 2^55: at most 2^24 blocks of fewer than 2^31 units.
        let mut ended = vec![0_u64; blocks.len() + 1];
        for (life, &units) in slots.iter().zip(&units) {
            ended[life.end as usize] += u64::from(units);
        }
        let (mut live, mut load) = (0, 0);
        for (&units, &ended) in units.iter().zip(&ended) {
            live = live + u64::from(units) - ended;
            load = load.max(live);
        }
        match u32::try_from(load) {
            Ok(load) if load < u32::MAX => Ok(Self { units, slots, load }),
            _ => Err(PlanError::TooMuch { live: load.saturating_mul(BLOCK_ALIGN) }),
        }
    }

    /// Returns the number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.units.len()
    }
}
