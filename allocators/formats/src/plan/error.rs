//! Why blocks cannot be planned.

use aquifer_core::{BLOCK_ALIGN, Bytes};
use std::{error, fmt};

/// The largest valid size of a block: below 1 TiB, which is more than any device has.
pub const MAX_BLOCK: u64 = (1 << 40) - BLOCK_ALIGN;
/// The most addresses of a plan: below 2 TiB, so that an address in units has 32 bits.
pub const MAX_TOP: u64 = (1 << 41) - BLOCK_ALIGN;
/// The most blocks of a plan.
pub const MAX_BLOCKS: u32 = 1 << 24;
/// The [`end`](crate::plan::PlanBlock::end) of a block that is never freed.
pub const NEVER: u32 = u32::MAX;

/// Why there is no plan for some blocks.
///
/// ```
/// use aquifer_formats::plan::{Plan, PlanBlock, PlanError, PlanOptions};
/// let block = PlanBlock { bytes: 0, first: 0, end: 1, stream: 0, shared: false };
/// let error = Plan::make(&[block], &PlanOptions::default()).unwrap_err();
/// assert_eq!(error, PlanError::ZeroBytes { block: 0 });
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum PlanError {
    /// There are no blocks.
    NoBlocks,
    /// There are more blocks than a plan may have.
    TooManyBlocks {
        /// The number of blocks.
        blocks: usize,
    },
    /// A block has no bytes.
    ZeroBytes {
        /// The block, counted from 0.
        block: usize,
    },
    /// A block is larger than a plan may hold.
    TooLarge {
        /// The block, counted from 0.
        block: usize,
        /// Its bytes.
        bytes: u64,
    },
    /// A block does not end after it begins.
    EndsBeforeStart {
        /// The block, counted from 0.
        block: usize,
    },
    /// A block does not begin after the one before it.
    OutOfOrder {
        /// The block, counted from 0.
        block: usize,
    },
    /// The blocks need more addresses than a plan may have.
    TooMuch {
        /// The bytes that are live at once.
        live: u64,
    },
    /// The planner placed two blocks over each other. This is a defect of it.
    Overlap {
        /// The block that begins first.
        first: u32,
        /// The other one.
        second: u32,
    },
}

impl fmt::Display for PlanError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBlocks => f.write_str("there are no blocks to plan"),
            Self::TooManyBlocks { blocks } => {
                write!(f, "{blocks} blocks; a plan has at most {MAX_BLOCKS}")
            }
            Self::ZeroBytes { block } => write!(f, "block {block} has no bytes"),
            Self::TooLarge { block, bytes } => write!(
                f,
                "block {block} has {bytes} bytes; a block of a plan has at most {MAX_BLOCK} ({})",
                Bytes(MAX_BLOCK)
            ),
            Self::EndsBeforeStart { block } => {
                write!(f, "block {block} does not end after its first step")
            }
            Self::OutOfOrder { block } => {
                write!(f, "block {block} does not begin after the block before it")
            }
            Self::TooMuch { live } => write!(
                f,
                "{live} bytes ({}) are live at once, and a plan has at most {MAX_TOP} bytes ({})",
                Bytes(*live),
                Bytes(MAX_TOP)
            ),
            Self::Overlap { first, second } => {
                write!(
                    f,
                    "the planner placed blocks {first} and {second} over each other: a defect"
                )
            }
        }
    }
}

impl error::Error for PlanError {}
