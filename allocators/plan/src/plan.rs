//! A plan: where each block of a program lies.

use crate::{
    block::{Lives, PlanBlock, PlanEdge, PlannedBlock},
    error::PlanError,
    reuse,
    search::{PlanOptions, search},
};
use aquifer_core::BLOCK_ALIGN;

/// A place for each block of a program.
///
/// - Blocks that live at the same time have no address in common.
/// - If a block takes addresses of another one, the order of its stream or an [edge](PlanEdge)
///   puts the other's last use before it.
/// - Equal blocks and options give equal plans, unless the time for the search runs out.
///
/// ```
/// use aquifer_plan::{NEVER, Plan, PlanBlock, PlanEdge, PlanOptions};
/// let block = |bytes, first, end, stream| PlanBlock { bytes, first, end, stream, shared: false };
/// let blocks = [block(1000, 0, 2, 0), block(512, 1, NEVER, 0), block(900, 3, NEVER, 1)];
/// let plan = Plan::make(&blocks, &PlanOptions::default())?;
/// assert_eq!((plan.lower_bound(), plan.top()), (1536, 1536));
/// // The third block takes the addresses of the first, which another stream used.
/// assert_eq!(plan.blocks()[2].offset, plan.blocks()[0].offset);
/// assert_eq!(plan.edges(), [PlanEdge { before: 0, after: 2 }]);
///
/// let mut file = Vec::new();
/// plan.write_to(&mut file)?;
/// assert_eq!(Plan::read_from(file.as_slice())?, plan);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Plan {
    blocks: Vec<PlannedBlock>,
    edges: Vec<PlanEdge>,
    lower_bound: u64,
    top: u64,
}

impl Plan {
    /// Makes a plan for blocks, which are in the order of their first steps. Takes about the time
    /// of the options, or less, and on one thread.
    ///
    /// # Errors
    /// [`PlanError`].
    pub fn make(blocks: &[PlanBlock], options: &PlanOptions) -> Result<Self, PlanError> {
        let lives = Lives::of(blocks)?;
        let lower_bound = u64::from(lives.load) * BLOCK_ALIGN;
        let streams: Vec<u32> = blocks.iter().map(|block| block.stream).collect();
        let placed = search(&lives, &streams, options);
        if placed.top == u32::MAX {
            return Err(PlanError::TooMuch { live: lower_bound });
        }
        let planned = blocks.iter().zip(&lives.units).zip(&placed.at);
        let planned = planned.map(|((block, &units), &at)| PlannedBlock {
            bytes: u64::from(units) * BLOCK_ALIGN,
            offset: u64::from(at) * BLOCK_ALIGN,
            first: block.first,
            end: block.end,
            stream: block.stream,
            shared: block.shared,
        });
        Self::of(planned.collect(), lower_bound)
            .map_err(|reuse::Overlap { first, second }| PlanError::Overlap { first, second })
    }

    /// Derives the rest of a plan from its blocks.
    pub(crate) fn of(blocks: Vec<PlannedBlock>, lower_bound: u64) -> Result<Self, reuse::Overlap> {
        let edges = reuse::edges(&blocks)?;
        let top = blocks.iter().map(|block| block.offset + block.bytes).max().unwrap_or(0);
        Ok(Self { blocks, edges, lower_bound, top })
    }

    /// Returns the blocks, in the order of their first steps.
    pub fn blocks(&self) -> &[PlannedBlock] {
        &self.blocks
    }

    /// Returns the edges, in ascending order of the later block and then of the earlier one.
    pub fn edges(&self) -> &[PlanEdge] {
        &self.edges
    }

    /// Returns the most bytes of blocks that live at the same time. No plan has a lower top.
    pub fn lower_bound(&self) -> u64 {
        self.lower_bound
    }

    /// Returns the bytes that the plan needs: the first address above all blocks, counted from that
    /// of the plan. At most [`MAX_TOP`](crate::MAX_TOP).
    pub fn top(&self) -> u64 {
        self.top
    }
}
