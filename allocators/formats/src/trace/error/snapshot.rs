//! The errors of a snapshot.

use crate::pickle::PickleError;
use std::{error, fmt};

/// Why a pickle is not a valid snapshot.
#[derive(Debug)]
pub(crate) enum SnapshotError {
    /// It is not a valid pickle.
    Pickle(PickleError),
    /// A part is missing or has the wrong type.
    Missing {
        /// The place.
        place: SnapshotPath,
        /// The part.
        part: &'static str,
        /// The expected type.
        expected: &'static str,
    },
    /// No device has an event.
    NoTrace,
    /// The selected device does not exist.
    NoDevice {
        /// The selected device.
        asked: u32,
        /// The number of devices.
        count: usize,
    },
    /// An event that contradicts earlier ones.
    Order {
        /// The place.
        place: SnapshotPath,
        /// The block's address.
        address: u64,
        /// The operation.
        done: &'static str,
        /// The state of the block.
        was: &'static str,
        /// The event that caused this state.
        since: usize,
    },
    /// A size that differs from an earlier one.
    Size {
        /// The place.
        place: SnapshotPath,
        /// The block's address.
        address: u64,
        /// The earlier size, and the size in this event.
        bytes: (u64, u64),
    },
}

/// A place in a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SnapshotPath {
    /// The whole snapshot.
    Root,
    /// A device's trace.
    Trace(usize),
    /// An event of a device's trace.
    Event(usize, usize),
    /// A segment.
    Segment(usize),
    /// A block of a segment.
    Block(usize, usize),
}

impl fmt::Display for SnapshotPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("the snapshot"),
            Self::Trace(device) => write!(f, "device_traces[{device}]"),
            Self::Event(device, event) => write!(f, "device_traces[{device}][{event}]"),
            Self::Segment(segment) => write!(f, "segments[{segment}]"),
            Self::Block(segment, block) => write!(f, "segments[{segment}].blocks[{block}]"),
        }
    }
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Pickle(e) => e.fmt(f),
            Self::Missing { place: SnapshotPath::Root, part: "", expected } => {
                write!(f, "not a memory snapshot: the pickle holds no {expected}")
            }
            Self::Missing { place: SnapshotPath::Root, part, expected } => {
                write!(f, "not a memory snapshot: {part} is not {expected}")
            }
            Self::Missing { place, part: "", expected } => write!(f, "{place}: not {expected}"),
            Self::Missing { place, part, expected } => write!(f, "{place}: {part} is not {expected}"),
            Self::NoTrace => f.write_str(
                "no device trace: torch.cuda.memory._record_memory_history() has to be called before the work",
            ),
            Self::NoDevice { asked, count } => {
                write!(f, "no device of index {asked}: the snapshot has {count}, counted from 0")
            }
            Self::Order { place, address, done, was, since } => {
                write!(f, "{place}: the block at {address:#x} is {done}, but was {was} by event {since}")
            }
            Self::Size { place, address, bytes: (before, now) } => {
                write!(f, "{place}: the block at {address:#x} has {now} bytes here and {before} before")
            }
        }
    }
}

impl error::Error for SnapshotError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Pickle(e) => Some(e),
            _ => None,
        }
    }
}
