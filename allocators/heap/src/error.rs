//! The errors of a heap.

use core::fmt;

use crate::Range;

/// The reason why a heap refused a call. The call changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HeapError {
    /// The range is empty, wraps around, or does not consist of whole units.
    BadRange {
        /// The given range.
        range: Range,
        /// The heap's unit.
        unit: u64,
    },
    /// A part of the range is already in the heap.
    Overlap {
        /// The given range.
        range: Range,
        /// The lowest extent or block of the heap that it overlaps.
        with: Range,
    },
    /// A part of the range is not free: it is in use, or not in the heap.
    NotFree {
        /// The requested range.
        range: Range,
        /// The lowest address in it that is not free.
        at: u64,
    },
    /// The range is free, but a block there would cross a border.
    Border {
        /// The requested range.
        range: Range,
        /// The address of the lowest border.
        at: u64,
    },
    /// The address is not in the heap.
    Foreign {
        /// The given address.
        address: u64,
    },
    /// The address is in the heap, but already free.
    DoubleFree {
        /// The given address.
        address: u64,
    },
    /// The address is inside a live block, but not its start.
    Interior {
        /// The given address.
        address: u64,
        /// The block that contains it.
        block: Range,
    },
    /// The given [`HeapBlock`](crate::HeapBlock) has been freed, and a later block starts at its
    /// address.
    Stale {
        /// The given address.
        address: u64,
    },
    /// The block cannot grow in place.
    NoRoom {
        /// The block.
        block: Range,
        /// The requested size, in bytes.
        wanted: u64,
        /// The possible size, in bytes.
        available: u64,
    },
    /// A request for zero bytes.
    ZeroSize,
    /// The heap has the maximum number of records, 2³⁰.
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
