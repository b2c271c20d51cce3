//! Errors in traces: of rows, of names of generated traces, and of snapshots.

use super::model::{EVENTS_HEADER, MAX_BLOCK, MAX_STREAMS, TraceDevice};
use crate::pickle::PickleError;
use crate::rmm;
use std::{error, fmt, io};

/// The error in a trace and its row. Row 1 is the header.
///
/// See the example of [`Trace`](super::Trace).
#[derive(Debug)]
pub struct TraceError {
    /// The invalid row, or none if the error is in the file as a whole.
    pub(crate) row: Option<u64>,
    /// The error.
    pub(crate) fault: Fault,
}

impl TraceError {
    /// Returns the invalid row, or `None` if the error is in the file as a whole. Row 1 is the
    /// header.
    pub fn row(&self) -> Option<u64> {
        self.row
    }

    /// Creates an error without a row.
    pub(crate) fn whole(fault: Fault) -> Self {
        Self { row: None, fault }
    }
}

/// The errors of a trace.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The file cannot be opened or read.
    Io(io::Error),
    /// The file is empty.
    Empty,
    /// The compressed stream is truncated.
    CutStream,
    /// The compressed stream is corrupt.
    BadStream(String),
    /// The compressed stream requires more memory than the limit.
    TooMuchMemory {
        /// Bytes that it requires.
        bytes: u64,
        /// The limit in bytes.
        most: u64,
    },
    /// The last row has no newline.
    CutRow,
    /// A row that is not text, or longer than any row of a trace.
    NoText,
    /// The first row is not a known header.
    Header {
        /// The row.
        found: String,
    },
    /// A header without an allocation after it.
    NoAllocation,
    /// Too few or too many fields.
    Fields {
        /// The number of fields.
        found: usize,
        /// The expected number.
        expected: usize,
    },
    /// A field has an invalid value.
    Field {
        /// The field's name.
        name: &'static str,
        /// The value.
        found: String,
        /// The expected form.
        expected: &'static str,
    },
    /// A size below one byte.
    NoBytes {
        /// The value.
        found: String,
    },
    /// A size above [`MAX_BLOCK`], or a sum of sizes that overflows.
    AbsurdSize {
        /// The value.
        found: String,
    },
    /// A row about a block that was never allocated.
    Unknown {
        /// Its name.
        id: Name,
        /// The operation.
        done: &'static str,
    },
    /// An allocation under a name that is in use.
    TwiceAllocated {
        /// The name.
        id: Name,
        /// The row of the first allocation.
        first: u64,
    },
    /// An allocation under the name of a block that is freed but not completed.
    StillInUse {
        /// The name.
        id: Name,
        /// The row of its free.
        freed: u64,
    },
    /// A second free.
    TwiceFreed {
        /// The block.
        id: Name,
        /// The row of the first free.
        first: u64,
    },
    /// A completion of a block that is still allocated.
    CompleteBeforeFree {
        /// The block.
        id: Name,
    },
    /// A second completion.
    TwiceCompleted {
        /// The block.
        id: Name,
    },
    /// A size that differs from that of the allocation.
    SizeChanged {
        /// The block.
        id: Name,
        /// The allocated bytes and their row.
        allocated: (u64, u64),
        /// Bytes in this row.
        now: u64,
    },
    /// More streams than [`MAX_STREAMS`].
    TooManyStreams,
    /// More blocks than the index type can number.
    TooManyBlocks,
    /// A generated trace with an invalid name or option.
    Made(MadeError),
    /// An invalid memory snapshot.
    Snapshot(Box<SnapshotError>),
    /// A device is selected in a trace that does not name devices.
    NoDevices,
    /// The selected device or pinned memory has no blocks in the input.
    NoSuchMemory {
        /// The selected device.
        asked: TraceDevice,
        /// The devices in the input.
        there: Vec<TraceDevice>,
    },
    /// The trace has pinned memory only, and no device memory.
    OnlyPinned {
        /// The number of blocks.
        blocks: u64,
    },
}

/// The name of a block in a trace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Name {
    /// A number.
    Id(u64),
    /// An address.
    Pointer(u64),
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => write!(f, "block {id}"),
            Self::Pointer(address) => write!(f, "the block at {address:#x}"),
        }
    }
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.row {
            Some(row) => write!(f, "row {row}: {}", self.fault),
            None => self.fault.fmt(f),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) => e.fmt(f),
            Self::Empty => f.write_str("the file is empty"),
            Self::CutStream => f.write_str("cut off: the compressed stream ends before its end"),
            Self::BadStream(what) => write!(f, "the compressed stream is damaged: {what}"),
            Self::TooMuchMemory { bytes, most } => write!(
                f,
                "the compressed stream needs {bytes} bytes of memory to be read; {most} are the most that it may have"
            ),
            Self::CutRow => f.write_str("cut off: the row has no line end"),
            Self::NoText => f.write_str("not a row of text"),
            Self::Header { found } => write!(
                f,
                "not a trace: the first row is {:?}; accepted are {:?} of this library, {:?} of RMM, \
                 and snapshots of PyTorch",
                Clipped(found),
                EVENTS_HEADER,
                rmm::HEADER
            ),
            Self::NoAllocation => f.write_str("nothing is allocated in it"),
            Self::Fields { found, expected } => write!(f, "{found} fields where {expected} belong"),
            Self::Field { name, found, expected } => {
                write!(f, "{name} is {:?}, not {expected}", Clipped(found))
            }
            Self::NoBytes { found } => write!(f, "a block of {} bytes; at least 1 is needed", Clipped(found)),
            Self::AbsurdSize { found } => {
                write!(
                    f,
                    "a block of {} bytes; {MAX_BLOCK} are all that a process can address",
                    Clipped(found)
                )
            }
            Self::Unknown { id, done } => write!(f, "{id} is {done} but was never allocated"),
            Self::TwiceAllocated { id, first } => write!(f, "{id} is allocated twice, first in row {first}"),
            Self::StillInUse { id, freed } => {
                write!(f, "{id} is allocated again, but its free in row {freed} has had no completion yet")
            }
            Self::TwiceFreed { id, first } => write!(f, "{id} is freed twice, first in row {first}"),
            Self::CompleteBeforeFree { id } => write!(f, "{id} is completed before it is freed"),
            Self::TwiceCompleted { id } => write!(f, "{id} is completed twice"),
            Self::SizeChanged { id, allocated: (bytes, row), now } => {
                write!(f, "{id} has {now} bytes here and {bytes} in row {row}")
            }
            Self::TooManyStreams => write!(f, "more than {MAX_STREAMS} streams"),
            Self::TooManyBlocks => write!(f, "more than {} blocks", u32::MAX),
            Self::Made(e) => e.fmt(f),
            Self::Snapshot(e) => e.fmt(f),
            Self::NoDevices => f.write_str(
                "it has no devices to choose from: neither a field `device` nor a snapshot of PyTorch's",
            ),
            Self::NoSuchMemory { asked, there } => {
                write!(f, "nothing is allocated on device {asked} in it, but on ")?;
                let names: Vec<_> = there.iter().take(8).map(ToString::to_string).collect();
                match names.len() {
                    0 => f.write_str("none"),
                    count if count < there.len() => {
                        write!(f, "{} and {} more", names.join(", "), there.len() - count)
                    }
                    _ => f.write_str(&names.join(", ")),
                }
            }
            Self::OnlyPinned { blocks } => {
                write!(f, "no device memory is allocated in it; its {blocks} blocks are pinned host memory")
            }
        }
    }
}

impl error::Error for TraceError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match &self.fault {
            Fault::Io(e) => Some(e),
            Fault::Made(e) => Some(e),
            Fault::Snapshot(e) => Some(e),
            _ => None,
        }
    }
}

/// A text from a file, shortened to fit into a one-line error.
struct Clipped<'a>(&'a str);

impl Clipped<'_> {
    const MOST: usize = 48;

    fn parts(&self) -> (&str, &str) {
        match self.0.char_indices().nth(Self::MOST) {
            Some((end, _)) => (&self.0[..end], "…"),
            None => (self.0, ""),
        }
    }
}

impl fmt::Display for Clipped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, more) = self.parts();
        write!(f, "{head}{more}")
    }
}

impl fmt::Debug for Clipped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (head, more) = self.parts();
        write!(f, "{head:?}{more}")
    }
}

/// Why a name is not a valid generated trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum MadeError {
    /// No such workload.
    Name {
        /// The name.
        found: String,
    },
    /// No such option.
    Option {
        /// The text found.
        found: String,
    },
    /// An option with an invalid value.
    Value {
        /// The option.
        option: &'static str,
        /// The value.
        found: String,
        /// The expected value.
        expected: &'static str,
    },
}

impl fmt::Display for MadeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name { found } => {
                write!(f, "no workload is called {found:?}; `aquifer replay made:` lists them")
            }
            Self::Option { found } => {
                write!(
                    f,
                    "{found:?} is no option of a made trace; there are seed=, scale= and length="
                )
            }
            Self::Value { option, found, expected } => {
                write!(f, "{option} is {found:?}, not {expected}")
            }
        }
    }
}

impl error::Error for MadeError {}

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
