//! What is asked of a source of opaque memory.

use crate::Tag;

/// Every block of device memory is aligned to this at least, in bytes.
pub const BLOCK_ALIGN: u64 = 512;

/// How much, how aligned, and for whom.
///
/// ```
/// use aquifer_core::{Request, Tag};
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
    /// A block of `bytes`, aligned to [`BLOCK_ALIGN`], with this thread's current tag.
    #[inline]
    #[must_use]
    pub fn bytes(bytes: u64) -> Self {
        Self { bytes, align: BLOCK_ALIGN, tag: Tag::current() }
    }

    /// Aligned to `align` bytes: a power of two, up to what the source of the memory can do.
    #[inline]
    #[must_use]
    pub fn align(self, align: u64) -> Self {
        Self { align, ..self }
    }

    /// Counted under `tag`.
    #[inline]
    #[must_use]
    pub fn tag(self, tag: Tag) -> Self {
        Self { tag, ..self }
    }

    /// Bytes asked for.
    #[inline]
    #[must_use]
    pub fn size(&self) -> u64 {
        self.bytes
    }

    /// The alignment asked for, in bytes.
    #[inline]
    #[must_use]
    pub fn alignment(&self) -> u64 {
        self.align
    }

    /// Who it is for.
    #[inline]
    #[must_use]
    pub fn owner(&self) -> Tag {
        self.tag
    }
}
