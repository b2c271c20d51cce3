//! Value types: ranges, extents, blocks.

use core::fmt;
use core::num::NonZeroU32;

/// `len` bytes from `start`.
///
/// Plain numbers, which do not imply that memory exists there.
///
/// ```
/// use aquifer_heap::Range;
///
/// let range = Range::new(0x1000, 0x200);
/// assert_eq!(range.end(), 0x1200);
/// assert!(range.contains(0x11ff) && !range.contains(0x1200));
/// assert!(range.overlaps(&Range::new(0x1100, 0x1000)));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Range {
    /// The first address.
    pub start: u64,
    /// The length in bytes.
    pub len: u64,
}

impl Range {
    /// Creates the range of `len` bytes from `start`.
    #[must_use]
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }

    /// Returns the first address after the range. Saturates at the last address.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Returns whether `address` is in the range.
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.len
    }

    /// Returns whether the two ranges share a byte.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.len != 0 && other.len != 0 && self.start < other.end() && other.start < self.end()
    }

    /// Returns whether the range contains every byte of `other`.
    #[must_use]
    pub const fn covers(&self, other: &Self) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.start, self.end())
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// A range of memory that is entirely free.
///
/// See the example of [`Heap`](crate::Heap).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// The range.
    pub range: Range,
    /// The largest stamp with which any of its bytes was added or freed.
    ///
    /// Merging takes the larger of two stamps, splitting copies the stamp, and a live block keeps
    /// the stamp of its bytes. So the stamp of a range may be too large because of its neighbours,
    /// but is never too small.
    pub stamp: u64,
}

/// A live block: its address, its actual size, and its key.
///
/// A plain value and not an owner: dropping it frees nothing. With its [`Key`],
/// [`Heap::free_block`] finds the record without a search, and rejects a stale copy even if the
/// address is in use again.
///
/// [`Heap::free_block`]: crate::Heap::free_block
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HeapBlock {
    /// The first address.
    pub address: u64,
    /// The actual size in bytes, which is at least the requested size.
    pub bytes: u64,
    /// The key of its record.
    pub key: Key,
}

/// The record of a block and its generation, in eight bytes. With the address, it frees a block
/// without a search.
///
/// Never all zero bits, so that an `Option` or an enum around it is no larger.
///
/// The key of a freed block is refused as stale. The generation has 32 bits and wraps, so there is
/// one exception: a live block at the same address that is exactly the 2³²nd block of its slab or
/// record after the freed one, or a multiple of that. A wider generation would make the token of
/// every block larger, and a check for the wrap would cost every allocation an instruction. A
/// caller that frees each key once does not depend on it.
///
/// See the example of [`Heap`](crate::Heap).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The record number, or the slab number with [`SLAB_BIT`] set, shifted up by one, with the
    /// low bit set.
    bits: NonZeroU32,
    /// The generation of that record or slot.
    pub(crate) generation: u32,
}

/// Set in [`Key::index`] if the other bits are the number of a slab.
pub(crate) const SLAB_BIT: u32 = 1 << 30;

impl Key {
    /// Creates a key. `index` is below `2 * SLAB_BIT`.
    #[inline]
    pub(crate) const fn new(index: u32, generation: u32) -> Self {
        // The low bit is set, so this is never `None`. The compiler removes the check.
        let bits = match NonZeroU32::new(index << 1 | 1) {
            Some(bits) => bits,
            None => NonZeroU32::MIN,
        };
        Self { bits, generation }
    }

    /// Returns the record number, or the slab number with [`SLAB_BIT`] set.
    #[inline]
    pub(crate) const fn index(self) -> u32 {
        self.bits.get() >> 1
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl HeapBlock {
    /// Returns the range of the block.
    #[must_use]
    pub const fn range(&self) -> Range {
        Range::new(self.address, self.bytes)
    }
}

impl fmt::Debug for HeapBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("range", &self.range()).finish_non_exhaustive()
    }
}
