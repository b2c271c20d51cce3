//! Plans: a place for each block of a recorded program, in as few addresses as possible.
//!
//! A program that allocates the same blocks in the same order each time needs no search for memory
//! while it runs. A [`Plan`] is made once, from a trace of the program: each block has an offset,
//! the range has the size of the most live bytes or little more, and for each reuse of addresses
//! across streams the plan has an edge that says what must be complete first.
//!
//! | module | contents |
//! |---|---|
//! | `block` | blocks with the steps of their lives, the checks on them, and edges |
//! | `trace` | the blocks of a trace, with the feature `read` |
//! | `occupancy` | which addresses are occupied during which part of time |
//! | `range_set` | a set of addresses |
//! | `search` | the search for an order of placement |
//! | `exact` | the search for the lowest top of few blocks |
//! | `random` | its random numbers |
//! | `reuse` | which edges are needed, and the check that no live blocks overlap |
//! | `cursor` | follows a plan while its program runs again, in a loop or once |
//! | `expectation` | what a plan says about its blocks, for a cursor |
//! | `last_users` | which blocks used which addresses last, for a cursor |
//! | `file` | plan files |
//! | `error` | errors |
//!
//! # Cost
//! Placing `n` blocks once takes about `n log n` steps for each of the ranges that a search passes,
//! of which a dense plan has few: 40 ms for 30,000 blocks of a training, and 7 s and 130 MB of
//! memory for 200,000 blocks of random sizes and lives, on one core.
//!
//! # Plan files
//! All numbers are little-endian. A file is a header, the blocks, the edges and a checksum, with
//! nothing between or after them.
//!
//! | bytes | of the header |
//! |---|---|
//! | 0–7 | `aqplan\r\n` |
//! | 8–11 | the version: 1 |
//! | 12–15 | the bytes of a unit: 512 |
//! | 16–19 | the number of blocks, from 1 to [`MAX_BLOCKS`] |
//! | 20–23 | the number of edges, at most four for each block |
//!
//! A block has six numbers of 32 bits: its size in units, its offset in units, its first step, its
//! end ([`NEVER`] if it is never freed), its stream, and 1 if it is shared, else 0. Blocks are in
//! the order of their first steps, and no two have the same.
//!
//! An edge has two numbers of 32 bits, which count blocks from 0: the one before, and the one
//! after. Edges are in the order of the one after and then of the one before.
//!
//! The last eight bytes are the CRC-64/XZ of all bytes before them.
//!
//! A reader refuses a file whose length does not follow from its header, whose checksum differs,
//! whose live blocks overlap, or whose edges are not exactly those that its blocks need.

mod block;
mod cursor;
mod error;
mod exact;
mod expectation;
mod file;
mod last_users;
mod occupancy;
mod random;
mod range_set;
mod reuse;
mod search;
#[cfg(feature = "read")]
mod trace;

pub use block::{PlanBlock, PlanEdge, PlannedBlock};
pub use cursor::{CursorCounters, PlanAnswer, PlanCursor};
pub use error::{MAX_BLOCK, MAX_BLOCKS, MAX_TOP, NEVER, PlanError};
pub use file::PlanFileError;
pub use search::PlanOptions;

use self::{block::Lives, search::search};
use aquifer_core::BLOCK_ALIGN;

/// A place for each block of a program.
///
/// - Blocks that live at the same time have no address in common.
/// - If a block takes addresses of another one, the order of its stream or an [edge](PlanEdge)
///   puts the other's last use before it.
/// - Equal blocks and options give equal plans, unless the time for the search runs out.
///
/// ```
/// use aquifer_formats::plan::{NEVER, Plan, PlanBlock, PlanEdge, PlanOptions};
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
    /// of the plan. At most [`MAX_TOP`].
    pub fn top(&self) -> u64 {
        self.top
    }
}
