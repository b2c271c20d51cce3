//! What can go wrong, with the figures a person needs to act on it.

mod json;
mod no_gpu;
mod out_of_memory;
mod remedy;

pub use no_gpu::NoGpu;
pub use out_of_memory::{InUse, OutOfMemory, Stranded, TenantHolding, Tried};
pub use remedy::{Limits, Remedy};

use crate::{Bytes, DeviceId, OutOfBudget, Tag};
use std::{error, fmt};

/// A result with a [`MemoryError`].
pub type Result<T, E = MemoryError> = std::result::Result<T, E>;

/// A call of the GPU driver that answered with an error code.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct DriverError {
    /// The call, as the driver's documentation spells it: `cuMemCreate`.
    pub call: &'static str,
    /// The driver's code, also where this build has no name for it.
    pub code: u32,
    /// The code's name, `CUDA_ERROR_…`, or `unknown`.
    pub name: &'static str,
}

impl DriverError {
    /// Whether the code says that the device itself is gone: a sticky error, after which every call
    /// fails.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        // ECC uncorrectable; illegal address; launch timeout; assert; hardware stack error, illegal
        // instruction, misaligned address, invalid address space, invalid pc, launch failed; tensor
        // memory leak.
        matches!(self.code, 214 | 700 | 702 | 710 | 714..=719 | 721)
    }

    /// Whether the code says that the driver, or the context of the call, has been torn down, or
    /// was never there in this process: whatever was queued does not run any more.
    #[must_use]
    pub fn is_driver_gone(&self) -> bool {
        // Not initialised (a forked child), deinitialised (the process ends), context destroyed
        // (the application's reset).
        matches!(self.code, 3 | 4 | 709)
    }

    /// Whether the code is the driver's out of memory.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        self.code == 2
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.call, self.name, self.code)
    }
}

impl error::Error for DriverError {}

/// A system call that failed.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SystemError {
    /// The call: `mmap`.
    pub call: &'static str,
    /// Its `errno`.
    pub errno: i32,
}

impl fmt::Display for SystemError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.call, std::io::Error::from_raw_os_error(self.errno))
    }
}

impl error::Error for SystemError {}

/// Why a request for memory, or about memory, was refused. Nothing has changed.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryError {
    /// A request for no bytes.
    ZeroSize,
    /// A request that no device or host could hold, or whose arithmetic overflows.
    TooLarge {
        /// Bytes asked for.
        requested: u64,
        /// The most that could ever be asked for here.
        limit: u64,
    },
    /// An alignment that is not a power of two, or beyond what the memory has.
    BadAlignment {
        /// The alignment asked for, in bytes.
        align: u64,
    },
    /// A budget refused, and nothing was tried to make room.
    OutOfBudget(OutOfBudget),
    /// Nothing that was tried made room.
    OutOfMemory(Box<OutOfMemory>),
    /// The driver refused.
    Driver(DriverError),
    /// The kernel refused.
    System(SystemError),
    /// The device had a sticky error; only the application may reset it.
    DeviceLost {
        /// Which device.
        device: DeviceId,
    },
    /// A device that is not there.
    NoDevice {
        /// Which was asked for, by its index.
        asked: u32,
        /// How many there are.
        count: u32,
    },
    /// A device was asked for where no GPU can be used.
    NoGpu {
        /// Which was asked for, by its index.
        asked: u32,
        /// Why there is none.
        why: Box<NoGpu>,
    },
    /// A block or stream of one machine was used with another: of two simulated ones, or of a
    /// simulated one and this host.
    OtherMachine {
        /// The machine of the pool or stream: 0 is this host's own GPUs, others are simulated.
        expected: u64,
        /// The machine of what was handed in.
        actual: u64,
    },
    /// A block or stream of one device was used on another.
    WrongDevice {
        /// The device of the pool or stream.
        expected: DeviceId,
        /// The device of what was handed in.
        actual: DeviceId,
    },
    /// An address that this pool has not given out.
    ForeignBlock {
        /// The address.
        address: u64,
    },
    /// An address whose block has been freed already.
    DoubleFree {
        /// The address.
        address: u64,
    },
    /// A part of a block that reaches past its end.
    OutOfBounds {
        /// First byte asked for, counted from the block's start.
        offset: u64,
        /// Bytes asked for.
        len: u64,
        /// Bytes there are.
        bytes: u64,
    },
    /// A part of reserved addresses that has no memory behind it.
    Uncommitted {
        /// First byte without memory, counted from the start of the addresses.
        offset: u64,
        /// How many bytes from there on have none.
        len: u64,
    },
    /// Two sides of a copy that differ in length.
    LengthMismatch {
        /// Bytes of the source.
        from: u64,
        /// Bytes of the destination.
        to: u64,
    },
    /// Rows that lie closer together than they are long.
    BadPitch {
        /// Bytes from the start of one row to that of the next.
        pitch: u64,
        /// Bytes of a row.
        width: u64,
    },
    /// Two sides of a copy that share bytes.
    Overlap {
        /// Address of the source.
        from: u64,
        /// Address of the destination.
        to: u64,
        /// Bytes of the larger side.
        bytes: u64,
    },
    /// A use that conflicts with one which has been prepared and not finished.
    Busy {
        /// The block.
        address: u64,
    },
    /// A use of memory that is parked: its contents are saved elsewhere or dropped, and nothing is
    /// behind its addresses.
    Parked {
        /// Whose memory is parked, all of it at once.
        tag: Tag,
    },
    /// A block was to be given out over one that is held: a bug of whatever gave it. The memory is
    /// kept from use.
    BlockOverlap {
        /// Where the block begins.
        address: u64,
        /// Where the one that it overlaps begins.
        held: u64,
    },
    /// Bytes that one launch lists twice, where one of the two writes.
    ListedTwice {
        /// The block.
        address: u64,
    },
    /// The pool that would have to answer has been shut down.
    Closed,
    /// As many as the pool may have are leased already.
    Capacity {
        /// The pool's cap.
        max: u32,
    },
    /// A stream captures a graph: what is queued there runs later, if ever, so nobody can wait for
    /// it now, and it may wait for nothing outside of its capture. No call was made, and the
    /// capture is whole.
    Capturing {
        /// The stream's handle.
        stream: u64,
    },
    /// The captures of a stream have been announced already, and that announcement is still open.
    AlreadyAnnounced {
        /// The stream's handle.
        stream: u64,
    },
    /// Some call has broken the capture that a stream takes part in. It has to be ended before the
    /// stream can be used.
    CaptureInvalidated {
        /// The stream's handle.
        stream: u64,
    },
    /// A range that ends before it begins.
    ReversedRange {
        /// Its first element.
        start: u64,
        /// The element that it ends before.
        end: u64,
    },
    /// An id of another pool, or of something that is no longer there.
    UnknownId,
    /// A pool of the process that this one was forked from. Its memory was not inherited, and its
    /// locks may be held by threads that are not here.
    OtherProcess,
    /// The per-thread default stream of another thread. Its handle means a different stream here,
    /// so no call was made.
    OtherThread {
        /// The handle, 2.
        stream: u64,
    },
    /// The driver or device lacks what was asked for.
    Unsupported {
        /// What is missing, in the driver's words.
        feature: &'static str,
    },
    /// A wait that ended at its deadline.
    TimedOut,
    /// Something that exists once was set twice.
    AlreadySet {
        /// What.
        what: &'static str,
        /// Where it was set first.
        by: &'static std::panic::Location<'static>,
    },
    /// Something that exists once is needed and has not been set.
    NotSet {
        /// What.
        what: &'static str,
        /// The call that sets it.
        by: &'static str,
    },
    /// A setting that cannot be followed.
    BadSetting {
        /// The setting, as its environment variable or field is called.
        name: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be set to.
        expected: &'static str,
    },
}

crate::__debug_as_display!(DriverError, SystemError, MemoryError);

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroSize => f.write_str("a request for zero bytes"),
            Self::TooLarge { requested, limit } => {
                write!(f, "{} asked, {} is the most there can be", Bytes(*requested), Bytes(*limit))
            }
            Self::BadAlignment { align } => {
                write!(f, "an alignment of {align} bytes cannot be had")
            }
            Self::OutOfBudget(e) => e.fmt(f),
            Self::OutOfMemory(e) => e.fmt(f),
            Self::Driver(e) => e.fmt(f),
            Self::System(e) => e.fmt(f),
            Self::DeviceLost { device } => {
                write!(f, "{device} is lost; only the application may reset it")
            }
            Self::NoDevice { asked, count: 0 } => {
                write!(f, "device {asked} asked, and there is none")
            }
            Self::NoDevice { asked, count } => {
                write!(f, "device {asked} asked, there are {count}, counted from 0")
            }
            Self::NoGpu { asked, why } => {
                write!(f, "device {asked} asked, and there is none: {why}")
            }
            Self::OtherMachine { expected, actual } => {
                let machine = |number: &u64| match number {
                    0 => "this host".to_owned(),
                    number => format!("simulated machine {number}"),
                };
                let (expected, actual) = (machine(expected), machine(actual));
                write!(f, "a stream or memory of {actual} where one of {expected} is needed")
            }
            Self::WrongDevice { expected, actual } => {
                write!(f, "{actual} where {expected} is needed")
            }
            Self::ForeignBlock { address } => write!(f, "{address:#x} is no block of this pool"),
            Self::DoubleFree { address } => {
                write!(f, "the block at {address:#x} has been freed already")
            }
            Self::OutOfBounds { offset, len, bytes } => {
                write!(f, "{len} bytes from {offset} on reach past the end of a block of {bytes}")
            }
            Self::ReversedRange { start, end } => {
                write!(f, "the range {start}..{end} is reversed: it ends before it begins")
            }
            Self::Uncommitted { offset, len } => {
                write!(
                    f,
                    "{len} bytes from {offset} on are not committed: no memory is behind them"
                )
            }
            Self::LengthMismatch { from, to } => write!(f, "a copy of {from} bytes into {to}"),
            Self::BadPitch { pitch, width } => {
                write!(f, "rows of {width} bytes cannot lie {pitch} bytes apart")
            }
            Self::Overlap { from, to, bytes } => {
                write!(f, "a copy of {bytes} bytes from {from:#x} to {to:#x} overlaps itself")
            }
            Self::Busy { address } => {
                write!(f, "the block at {address:#x} has a use prepared that excludes this one")
            }
            Self::Parked { tag } => {
                write!(f, "the memory of {:?} is parked; resume it first", tag.name())
            }
            Self::BlockOverlap { address, held } => {
                write!(
                    f,
                    "a block at {address:#x} would overlap the one at {held:#x}; it is kept from use"
                )
            }
            Self::ListedTwice { address } => {
                write!(f, "one launch lists the block at {address:#x} twice, and writes it")
            }
            Self::Closed => f.write_str("the pool has been shut down"),
            Self::Capacity { max } => {
                write!(f, "all {max} streams are leased; the pool's setting `streams` allows more")
            }
            Self::Capturing { stream } => {
                write!(
                    f,
                    "stream {stream:#x} captures a graph; end the capture, or wait inside of it"
                )
            }
            Self::AlreadyAnnounced { stream } => {
                write!(
                    f,
                    "captures of stream {stream:#x} are announced already; end that announcement first"
                )
            }
            Self::CaptureInvalidated { stream } => {
                write!(f, "the capture of stream {stream:#x} is broken; end it, and capture anew")
            }
            Self::UnknownId => f.write_str("an id of another pool, or of something that is gone"),
            Self::OtherProcess => {
                f.write_str("a pool of the process that this one was forked from; make one here")
            }
            Self::OtherThread { stream } => {
                write!(
                    f,
                    "stream handle {stream} is the default stream of each thread, and this one another thread's"
                )
            }
            Self::Unsupported { feature } => write!(f, "not supported here: {feature}"),
            Self::TimedOut => f.write_str("the deadline passed"),
            Self::AlreadySet { what, by } => write!(f, "{what} was set before, at {by}"),
            Self::NotSet { what, by } => write!(f, "{what} has not been set; {by} does that, once"),
            Self::BadSetting { name, value, expected } => {
                write!(f, "{name} is {value:?}; it can be {expected}")
            }
        }
    }
}

impl error::Error for MemoryError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::OutOfBudget(e) => Some(e),
            Self::OutOfMemory(e) => Some(e),
            Self::NoGpu { why, .. } => Some(&**why),
            Self::Driver(e) => Some(e),
            Self::System(e) => Some(e),
            _ => None,
        }
    }
}

impl MemoryError {
    /// The driver's answer for a call on `device`: a sticky error becomes
    /// [`MemoryError::DeviceLost`].
    #[must_use]
    pub fn driver(device: DeviceId, error: DriverError) -> Self {
        if error.is_device_lost() { Self::DeviceLost { device } } else { Self::Driver(error) }
    }
}

impl From<OutOfBudget> for MemoryError {
    fn from(e: OutOfBudget) -> Self {
        Self::OutOfBudget(e)
    }
}
impl From<DriverError> for MemoryError {
    fn from(e: DriverError) -> Self {
        Self::Driver(e)
    }
}
impl From<SystemError> for MemoryError {
    fn from(e: SystemError) -> Self {
        Self::System(e)
    }
}
