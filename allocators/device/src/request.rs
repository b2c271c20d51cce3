//! What is asked of a pool.

use aquifer_core::{MemoryError, Result, Tag};

/// Every block of device memory is aligned to this at least, in bytes.
pub const BLOCK_ALIGN: u64 = 512;
/// The largest alignment that can be asked for, in bytes.
pub const MAX_ALIGN: u64 = 2 << 20;
/// More than any device has: a request beyond it is an arithmetic mistake.
pub(crate) const MAX_BYTES: u64 = 1 << 46;

/// How much, how aligned, and for whom.
///
/// ```
/// use aquifer_device::Request;
/// use aquifer_core::Tag;
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

    /// Aligned to `align` bytes, a power of two up to [`MAX_ALIGN`].
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

    /// Whether it makes sense as it is, and asks for no more alignment than every block has: true of nearly all.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.bytes.wrapping_sub(1) < MAX_BYTES && self.align == BLOCK_ALIGN
    }

    /// The request, if it makes sense: not empty, not beyond any device, an alignment that can be had.
    pub(crate) fn checked(self) -> Result<Self> {
        if self.bytes == 0 {
            return Err(MemoryError::ZeroSize);
        }
        if self.bytes > MAX_BYTES {
            return Err(MemoryError::TooLarge { requested: self.bytes, limit: MAX_BYTES });
        }
        if !self.align.is_power_of_two() || self.align > MAX_ALIGN {
            return Err(MemoryError::BadAlignment { align: self.align });
        }
        Ok(Self { align: self.align.max(BLOCK_ALIGN), ..self })
    }
}
