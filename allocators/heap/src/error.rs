//! Why the heap refused a call.

use core::fmt;

use crate::Range;

/// Why the heap refused a call. Nothing has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeapError {
    /// The range is empty, passes the last address, or is not made of whole units.
    BadRange {
        /// What was given.
        range: Range,
        /// The heap's unit.
        unit: u64,
    },
    /// Part of the range is in the heap already.
    Overlap {
        /// What was given.
        range: Range,
        /// The lowest extent or block of the heap that it overlaps.
        with: Range,
    },
    /// Part of the range is not free: in use, or not in the heap.
    NotFree {
        /// What was asked for.
        range: Range,
        /// The lowest address of it that is not free.
        at: u64,
    },
    /// The range is free, and a block there would cross a border.
    Border {
        /// What was asked for.
        range: Range,
        /// Where the lowest border lies.
        at: u64,
    },
    /// The address is in no range that was added.
    Foreign {
        /// What was given.
        address: u64,
    },
    /// The address is in the heap, and free already.
    DoubleFree {
        /// What was given.
        address: u64,
    },
    /// The address is inside a live block and not its start.
    Interior {
        /// What was given.
        address: u64,
        /// The block it lies in.
        block: Range,
    },
    /// A live block starts there, and it is a later one than the [`Block`](crate::Block) that
    /// was given: that one has been freed.
    Stale {
        /// What was given.
        address: u64,
    },
    /// The block cannot grow where it is.
    NoRoom {
        /// The block.
        block: Range,
        /// What it was to become, in bytes.
        wanted: u64,
        /// What it could become, in bytes.
        available: u64,
    },
    /// A block of zero bytes was asked for.
    ZeroSize,
    /// The heap keeps as many records as it can number, about two thousand million.
    TooManyRecords,
}

impl fmt::Display for HeapError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::BadRange { range, unit } => {
                write!(
                    f,
                    "range {range} is empty, wraps around, or is not made of whole units of {unit} bytes"
                )
            }
            Self::Overlap { range, with } => {
                write!(f, "range {range} overlaps {with}, which the heap has already")
            }
            Self::NotFree { range, at } => {
                write!(f, "range {range} is not wholly free: {at:#x} is not")
            }
            Self::Border { range, at } => {
                write!(f, "a block at {range} would cross the border at {at:#x}")
            }
            Self::Foreign { address } => write!(f, "{address:#x} is not in this heap"),
            Self::DoubleFree { address } => write!(f, "{address:#x} is free already"),
            Self::Interior { address, block } => {
                write!(f, "{address:#x} is inside the block {block}")
            }
            Self::Stale { address } => {
                write!(
                    f,
                    "the block at {address:#x} was freed, and the address belongs to a later one"
                )
            }
            Self::NoRoom { block, wanted, available } => {
                write!(f, "block {block} cannot grow to {wanted} bytes: {available} are its most")
            }
            Self::ZeroSize => write!(f, "a block has at least one byte"),
            Self::TooManyRecords => write!(f, "the heap cannot number another record"),
        }
    }
}

impl core::error::Error for HeapError {}
