//! Freed blocks that wait for their last uses.

use super::extent::UntilFree;
use aquifer_core::Tag;
use aquifer_stream::{Timeline, Uses};
use std::sync::Arc;

/// A block that its owner has freed.
pub(crate) struct DeferredFree {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    /// The tag of the request.
    pub(crate) tag: Tag,
    pub(crate) generation: u64,
    pub(crate) timeline: Arc<Timeline>,
    /// The epoch of the owner stream at the free.
    pub(crate) epoch: u64,
    pub(crate) uses: Uses,
    /// Values dropped when the memory is really free, such as charges.
    pub(crate) until_free: UntilFree,
}
