//! What a plan may have at most.

use aquifer_core::BLOCK_ALIGN;

/// The largest valid size of a block: below 1 TiB, which is more than any device has.
pub const MAX_BLOCK: u64 = (1 << 40) - BLOCK_ALIGN;
/// The most addresses of a plan: below 2 TiB, so that an address in units has 32 bits.
pub const MAX_TOP: u64 = (1 << 41) - BLOCK_ALIGN;
/// The most blocks of a plan.
pub const MAX_BLOCKS: u32 = 1 << 24;
/// The [`end`](crate::PlanBlock::end) of a block that is never freed.
pub const NEVER: u32 = u32::MAX;
