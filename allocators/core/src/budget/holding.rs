//! What one tag holds.

use crate::Tag;

/// The live bytes and blocks of one tag.
///
/// See the example of [`OutOfMemory`](crate::OutOfMemory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Holding {
    /// The tag.
    pub tag: Tag,
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks.
    pub blocks: u64,
}
