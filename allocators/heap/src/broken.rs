//! The findings of a self-check.

use core::fmt;

/// A violated invariant of the heap's metadata.
///
/// [`Heap::check`](crate::Heap::check) returns the first one that it finds. Only a defect of this
/// crate can cause one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InvariantViolation {
    /// The record at this address is empty, does not consist of whole units, or crosses a border.
    Shape {
        /// The start of the record.
        at: u64,
    },
    /// The record at this address overlaps the one below, or their links are inconsistent.
    Order {
        /// The start of the upper record.
        at: u64,
    },
    /// Two adjacent free extents with no border between them are not merged.
    Unmerged {
        /// The start of the upper extent.
        at: u64,
    },
    /// The bins contain a record that is not free, lack one that is, or have it in the wrong place.
    Bins {
        /// The start of the record, or zero for the bins' bitmaps.
        at: u64,
    },
    /// The page map does not lead to the record that is the first to start in its page.
    PageMap {
        /// The start of the record.
        at: u64,
    },
    /// The page map contains pages in which no record starts.
    PageCount {
        /// The number of pages with a record.
        expected: usize,
        /// The number of pages in the map.
        found: usize,
    },
    /// The slab at this address is inconsistent with its record, its bitmap or its class's list.
    Slab {
        /// The start of the slab, or zero for the lists' own state.
        at: u64,
    },
    /// The length of the list of vacant records differs from its count.
    Vacancies {
        /// The count.
        expected: usize,
        /// The length of the list.
        found: usize,
    },
    /// A counter differs from the sum of the records.
    Count {
        /// The name of the counter.
        name: &'static str,
        /// The sum of the records.
        expected: u64,
        /// The value of the counter.
        found: u64,
    },
}

impl fmt::Display for InvariantViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Shape { at } => write!(f, "the record at {at:#x} is misshapen"),
            Self::Order { at } => write!(f, "the record at {at:#x} is out of order"),
            Self::Unmerged { at } => {
                write!(f, "two free extents touch at {at:#x} and are not merged")
            }
            Self::Bins { at } => write!(f, "the bins are wrong about the extent at {at:#x}"),
            Self::PageMap { at } => write!(f, "the page map does not lead to {at:#x}"),
            Self::PageCount { expected, found } => {
                write!(f, "the page map holds {found} pages, and records start in {expected}")
            }
            Self::Slab { at } => write!(f, "the slab at {at:#x} disagrees with its lists"),
            Self::Vacancies { expected, found } => {
                write!(f, "{expected} records should be vacant, and {found} are")
            }
            Self::Count { name, expected, found } => {
                write!(f, "{name} says {found}, and the records add up to {expected}")
            }
        }
    }
}

impl core::error::Error for InvariantViolation {}
