//! The values that go in and out: ranges, extents, blocks.

use core::fmt;
use core::num::NonZeroU32;

/// `len` bytes from `start`.
///
/// Plain numbers: nothing says that memory lies there.
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
    /// How many bytes.
    pub len: u64,
}

impl Range {
    /// `len` bytes from `start`.
    #[must_use]
    pub const fn new(start: u64, len: u64) -> Self {
        Self { start, len }
    }

    /// The first address after it. A range that would pass the last address ends there.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.start.saturating_add(self.len)
    }

    /// Whether `address` lies in it.
    #[must_use]
    pub const fn contains(&self, address: u64) -> bool {
        address >= self.start && address - self.start < self.len
    }

    /// Whether the two share a byte.
    #[must_use]
    pub const fn overlaps(&self, other: &Self) -> bool {
        self.len != 0 && other.len != 0 && self.start < other.end() && other.start < self.end()
    }

    /// Whether every byte of `other` lies in it.
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

/// A stretch of memory that is wholly free.
///
/// Its example is that of [`Heap`](crate::Heap).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Where it lies.
    pub range: Range,
    /// The largest stamp that any of its bytes was added or freed with.
    ///
    /// Merging takes the larger of two, splitting copies, and a block that is handed out keeps
    /// in mind what its bytes carried. So a stamp that says "in use up to epoch 7" can be
    /// overstated for a neighbour, and is never understated.
    pub stamp: u64,
}

/// A live block: where it lies, how long it really is, and where its record is kept.
///
/// It is a note, not an owner: copying it copies nothing and dropping it frees nothing. Its
/// [`Key`] lets [`Heap::free_block`] go straight to the record, and refuse a copy that has
/// outlived its block even when the address is in use again.
///
/// [`Heap::free_block`]: crate::Heap::free_block
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Block {
    /// The first address.
    pub address: u64,
    /// How many bytes it really has: at least what was asked for.
    pub bytes: u64,
    /// Where its record is kept.
    pub key: Key,
}

/// Where a block's record is kept, and which life of that record it is: eight bytes that make
/// freeing a matter of one look, for those who keep an address anyway.
///
/// Never all zero bits, so that an `Option` or an enum around it is no larger.
///
/// Its example is that of [`Heap`](crate::Heap).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key {
    /// The record, or with [`SLOT`] set the slab, shifted up by one, and a one below it.
    place: NonZeroU32,
    /// Which life of that record or slot this is.
    pub(crate) generation: u32,
}

/// Set in [`Key::index`] when the rest of it numbers a slab.
pub(crate) const SLOT: u32 = 1 << 30;

impl Key {
    /// `index` is below `2 * SLOT`.
    #[inline]
    pub(crate) const fn new(index: u32, generation: u32) -> Self {
        // The one below makes this never `None`, which the compiler sees.
        let place = match NonZeroU32::new(index << 1 | 1) {
            Some(place) => place,
            None => NonZeroU32::MIN,
        };
        Self { place, generation }
    }

    /// The record's number, or with [`SLOT`] set the slab's.
    #[inline]
    pub(crate) const fn index(self) -> u32 {
        self.place.get() >> 1
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl Block {
    /// The bytes it covers.
    #[must_use]
    pub const fn range(&self) -> Range {
        Range::new(self.address, self.bytes)
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block").field("range", &self.range()).finish_non_exhaustive()
    }
}

/// What a free gave back.
///
/// Its example is that of [`Heap`](crate::Heap).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Freed {
    /// The block's real size.
    pub bytes: u64,
    /// The extent it is now part of, with what it merged with on both sides; `None` when it
    /// went back to a slab that stays.
    pub extent: Option<Extent>,
}
