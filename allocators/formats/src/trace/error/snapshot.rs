//! The errors of a snapshot.

use crate::{pickle::PickleError, trace::model::TraceDevice};
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
    /// No device has an event or a segment.
    NoTrace,
    /// The selected device does not exist.
    NoDevice {
        /// The selected device.
        asked: u32,
        /// The number of devices.
        count: usize,
    },
}

/// A place in a snapshot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SnapshotPath {
    /// The whole snapshot.
    Root,
    /// An event of a device's trace.
    Event(TraceDevice, usize),
    /// A segment.
    Segment(usize),
    /// A block of a segment.
    Block(usize, usize),
}

impl fmt::Display for SnapshotPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("the snapshot"),
            Self::Event(TraceDevice::Gpu(device), event) => {
                write!(f, "device_traces[{device}][{event}]")
            }
            Self::Event(TraceDevice::Host(_), event) => write!(f, "host_traces[{event}]"),
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
