//! What a self-check can find.

use core::fmt;

/// A rule of the heap's own bookkeeping that does not hold.
///
/// [`Heap::check`](crate::Heap::check) answers with the first it finds. Only a defect of this
/// crate can cause one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Broken {
    /// The record at this address is empty, not made of whole units, or crosses a border.
    Shape {
        /// Where it starts.
        at: u64,
    },
    /// The record at this address overlaps the one below, or their links disagree.
    Order {
        /// Where the upper one starts.
        at: u64,
    },
    /// Two free extents touch here with no border between, and are not one.
    Unmerged {
        /// Where the upper one starts.
        at: u64,
    },
    /// The bins hold a record that is not free, miss one that is, or have it in the wrong place.
    Bins {
        /// Where the record starts; zero when it is the bins' own flags.
        at: u64,
    },
    /// The page map does not lead to the record that starts here first in its page.
    PageMap {
        /// Where the record starts.
        at: u64,
    },
    /// The page map holds pages that no record starts in.
    PageCount {
        /// How many pages have a record.
        expected: usize,
        /// How many the map holds.
        found: usize,
    },
    /// The slab at this address does not agree with its record, its bits or its class's list.
    Slab {
        /// Where it starts; zero when it is the lists' own flags.
        at: u64,
    },
    /// A list of numbers that wait to be used again does not end where its count says.
    Vacancies {
        /// What the count says.
        expected: usize,
        /// What the list holds.
        found: usize,
    },
    /// A counter is not the sum of what it counts.
    Count {
        /// The name of the counter.
        name: &'static str,
        /// What the records add up to.
        expected: u64,
        /// What the counter says.
        found: u64,
    },
}

impl fmt::Display for Broken {
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

impl core::error::Error for Broken {}
