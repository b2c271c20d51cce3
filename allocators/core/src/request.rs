//! An allocation request for opaque memory.

use crate::Tag;

/// The minimum alignment of a block of device memory, in bytes.
pub const BLOCK_ALIGN: u64 = 512;

/// The size, alignment and tag of an allocation.
///
/// ```
/// use aquifer::{Request, Tag};
/// let request = Request::bytes(1 << 30).align(4096).tag(Tag::named("kv"));
/// assert_eq!(request.size(), 1 << 30);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Request {
    bytes: u64,
    align: u64,
    tag: Tag,
}

impl Request {
    /// Creates a request for `bytes`, aligned to [`BLOCK_ALIGN`], with this thread's current tag.
    #[inline]
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, align: BLOCK_ALIGN, tag: Tag::current() }
    }

    /// Sets the alignment in bytes: a power of two, up to what the source of the memory supports.
    #[inline]
    #[must_use]
    pub fn align(self, align: u64) -> Self {
        Self { align, ..self }
    }

    /// Sets the tag under which the block is counted.
    #[inline]
    #[must_use]
    pub fn tag(self, tag: Tag) -> Self {
        Self { tag, ..self }
    }

    /// Returns the requested bytes.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// Returns the requested alignment, in bytes.
    #[inline]
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.align
    }

    /// Returns the tag.
    #[inline]
    #[must_use]
    pub fn owner(&self) -> Tag {
        self.tag
    }
}
