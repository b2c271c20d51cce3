//! The error types, with the figures that are needed to act on them.

mod failed_call;
mod out_of_memory;
mod remedy;
mod text;

pub use crate::budget::{HeldElsewhere, hooks::Tried};
pub use failed_call::NoGpu;
pub use failed_call::{DriverError, SystemError};
pub use out_of_memory::{InUse, OutOfMemory, Stranded, TenantHolding};
pub use remedy::{Remedy, RequiredLimits};

use crate::{DeviceId, OutOfBudget, Tag};
use std::{error, fmt};

/// A result with a [`MemoryError`].
pub type Result<T, E = MemoryError> = std::result::Result<T, E>;

/// The reason why a request was refused. The request changed nothing.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryError {
    /// A request for no bytes.
    ZeroSize,
    /// A request that no device or host could hold, or whose arithmetic overflows.
    TooLarge {
        /// Bytes requested.
        requested: u64,
        /// The largest possible request here.
        limit: u64,
    },
    /// An alignment that is not a power of two, or that the memory does not support.
    BadAlignment {
        /// The requested alignment, in bytes.
        align: u64,
    },
    /// A budget refused, and no memory was reclaimed.
    OutOfBudget(OutOfBudget),
    /// Out of memory, after every way to make room has failed.
    OutOfMemory(Box<OutOfMemory>),
    /// The driver refused.
    Driver(DriverError),
    /// The kernel refused.
    System(SystemError),
    /// The device had a sticky error. Only the application may reset it.
    DeviceLost {
        /// The device.
        device: DeviceId,
    },
    /// A device that does not exist.
    NoDevice {
        /// The requested index.
        asked: u32,
        /// The number of devices.
        count: u32,
    },
    /// A device was requested where no GPU can be used.
    NoGpu {
        /// The requested index.
        asked: u32,
        /// The reason why there is none.
        why: Box<NoGpu>,
    },
    /// A block or stream of one machine was used with another machine. At least one of them is
    /// simulated.
    OtherMachine {
        /// The machine of the pool or stream. 0 is this host with its GPUs, others are simulated.
        expected: u64,
        /// The machine of the argument.
        actual: u64,
    },
    /// A block or stream of one device was used on another.
    WrongDevice {
        /// The device of the pool or stream.
        expected: DeviceId,
        /// The device of the argument.
        actual: DeviceId,
    },
    /// An address that this pool has not allocated.
    ForeignBlock {
        /// The address.
        address: u64,
    },
    /// An address whose block has been freed already.
    DoubleFree {
        /// The address.
        address: u64,
    },
    /// A subrange that extends past the end of its block.
    OutOfBounds {
        /// The first byte of the subrange, relative to the start of the block.
        offset: u64,
        /// Length of the subrange in bytes.
        len: u64,
        /// Length of the block in bytes.
        bytes: u64,
    },
    /// A range of elements that is not within a buffer or a slice.
    OutOfRange {
        /// The first element of the range.
        start: u64,
        /// The end of the range (exclusive).
        end: u64,
        /// The number of elements of the buffer or slice.
        len: u64,
    },
    /// A part of reserved addresses that is not backed by memory.
    Uncommitted {
        /// The first byte without memory, relative to the start of the reservation.
        offset: u64,
        /// Number of bytes from there on without memory.
        len: u64,
    },
    /// The source and the destination of a copy differ in length.
    LengthMismatch {
        /// Bytes of the source.
        from: u64,
        /// Bytes of the destination.
        to: u64,
    },
    /// The source and the destination of a copy overlap.
    Overlap {
        /// Address of the source.
        from: u64,
        /// Address of the destination.
        to: u64,
        /// Bytes of the larger side.
        bytes: u64,
    },
    /// A use that conflicts with another use that was prepared and is not finished.
    Busy {
        /// The block.
        address: u64,
    },
    /// A use of parked memory: its contents are saved elsewhere or dropped, and its addresses are
    /// not backed.
    Parked {
        /// The tag whose memory is parked as a whole.
        tag: Tag,
    },
    /// One launch lists the same bytes twice, and at least one of the uses writes.
    ListedTwice {
        /// The block.
        address: u64,
    },
    /// The pool has been shut down.
    Closed,
    /// The pool's maximum number of leases is in use.
    Capacity {
        /// The maximum.
        max: u32,
    },
    /// A stream is capturing a graph. Work queued there runs later, if ever, so it cannot be waited
    /// for now, and it may not wait for work outside the capture. No call was made, and the capture
    /// is intact.
    Capturing {
        /// The stream's handle.
        stream: u64,
    },
    /// Captures of this stream have been announced before, and that announcement is still open.
    AlreadyAnnounced {
        /// The stream's handle.
        stream: u64,
    },
    /// A call has invalidated the capture that a stream takes part in. The capture has to be ended
    /// before the stream can be used.
    CaptureInvalidated {
        /// The stream's handle.
        stream: u64,
    },
    /// A range whose end is before its start.
    ReversedRange {
        /// The start of the range.
        start: u64,
        /// The end of the range (exclusive).
        end: u64,
    },
    /// An id of another pool, or of an object that no longer exists.
    UnknownId,
    /// A pool that was created before a fork, in the parent process, or a new pool of host memory
    /// in the child of such a process. Its locks may be held by threads that do not exist here.
    OtherProcess,
    /// The per-thread default stream of another thread. The handle means a different stream on this
    /// thread, so no call was made.
    OtherThread {
        /// The handle, which is 2.
        stream: u64,
    },
    /// The driver or the device lacks a feature.
    Unsupported {
        /// The missing feature, in the driver's terms.
        feature: &'static str,
    },
    /// A transport has refused to register memory.
    Registration {
        /// The first byte.
        address: u64,
        /// The bytes.
        bytes: u64,
        /// The transport's code.
        code: i32,
    },
    /// A wait that ended at its deadline.
    TimedOut,
    /// A global setting was set twice.
    AlreadySet {
        /// The setting.
        what: &'static str,
        /// The location of the first call.
        by: &'static std::panic::Location<'static>,
    },
    /// A global setting is required and has not been set.
    NotSet {
        /// The setting.
        what: &'static str,
        /// The call that sets it.
        by: &'static str,
    },
    /// A setting with an invalid value.
    BadSetting {
        /// The name of the environment variable or field.
        name: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },
}

crate::__debug_as_display!(MemoryError);

impl fmt::Display for MemoryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroSize => {
                f.write_str("elements of zero bytes have no memory; use a type with a size")
            }
            Self::TooLarge { requested, limit } => {
                write!(f, "requested {requested} bytes, but at most {limit} can be allocated")
            }
            Self::BadAlignment { align } => {
                write!(
                    f,
                    "an alignment of {align} bytes is not supported; use a power of two that this kind of memory allows"
                )
            }
            Self::OutOfBudget(e) => e.fmt(f),
            Self::OutOfMemory(e) => e.fmt(f),
            Self::Driver(e) => e.fmt(f),
            Self::System(e) => e.fmt(f),
            Self::DeviceLost { device } => {
                write!(f, "{device} is lost after a sticky error; the application must reset it")
            }
            Self::NoDevice { asked, count: 0 } => {
                write!(f, "device {asked} requested, but no GPU is available")
            }
            Self::NoDevice { asked, count } => {
                write!(
                    f,
                    "device {asked} requested, but the last of {count} devices is {}",
                    count - 1
                )
            }
            Self::NoGpu { asked, why } => {
                write!(f, "device {asked} requested, but no GPU is available: {why}")
            }
            Self::OtherMachine { expected, actual } => {
                let machine = |number: &u64| match number {
                    0 => "this host".to_owned(),
                    number => format!("simulated machine {number}"),
                };
                let (expected, actual) = (machine(expected), machine(actual));
                write!(f, "the stream or memory belongs to {actual}, not to {expected}")
            }
            Self::WrongDevice { expected, actual } => {
                write!(f, "the stream or memory is on {actual}, not on {expected}")
            }
            Self::ForeignBlock { address } => {
                write!(f, "{address:#x} does not belong to this pool")
            }
            Self::DoubleFree { address } => {
                write!(f, "the block at {address:#x} has been freed already")
            }
            Self::OutOfBounds { offset, len, bytes } => {
                write!(f, "{len} bytes at offset {offset} exceed the block of {bytes} bytes")
            }
            Self::OutOfRange { start, end, len } => {
                write!(f, "the range {start}..{end} exceeds the length of {len} elements")
            }
            Self::ReversedRange { start, end } => {
                write!(f, "the range {start}..{end} is reversed: it ends before it begins")
            }
            Self::Uncommitted { offset, len } => {
                write!(f, "{len} bytes at offset {offset} are not committed; commit them first")
            }
            Self::LengthMismatch { from, to } => write!(
                f,
                "a copy of {from} bytes needs a target of the same length, not of {to} bytes"
            ),
            Self::Overlap { from, to, bytes } => {
                write!(f, "a copy of {bytes} bytes from {from:#x} to {to:#x} overlaps its source")
            }
            Self::Busy { address } => {
                write!(
                    f,
                    "the block at {address:#x} has a prepared use that excludes this one; finish or abort it"
                )
            }
            Self::Parked { tag } => {
                write!(f, "the memory of {:?} is parked; resume it first", tag.name())
            }
            Self::ListedTwice { address } => {
                write!(
                    f,
                    "the launch lists the block at {address:#x} twice and writes it; list it once"
                )
            }
            Self::Closed => f.write_str("the pool is closed; keep a handle of it, or the runtime"),
            Self::Capacity { max } => {
                write!(f, "all {max} streams are leased; the pool's setting `streams` allows more")
            }
            Self::Capturing { stream } => {
                write!(
                    f,
                    "stream {stream:#x} captures a graph, in which the host cannot wait; end the capture first"
                )
            }
            Self::AlreadyAnnounced { stream } => {
                write!(
                    f,
                    "captures of stream {stream:#x} are announced already; end that announcement first"
                )
            }
            Self::CaptureInvalidated { stream } => {
                write!(f, "the capture of stream {stream:#x} is invalid; end it and capture again")
            }
            Self::UnknownId => {
                f.write_str("the id belongs to another pool, or to a stream that was retired")
            }
            Self::OtherProcess => {
                f.write_str("the pool belongs to the process that this one was forked from; spawn workers, or fork before there are pools")
            }
            Self::OtherThread { stream } => {
                write!(
                    f,
                    "handle {stream} is the per-thread default stream; this one belongs to another thread"
                )
            }
            Self::Unsupported { feature } => {
                write!(f, "not supported by the device or its driver: {feature}")
            }
            Self::Registration { address, bytes, code } => {
                write!(
                    f,
                    "the transport refused to register {bytes} bytes at {address:#x} (its code: \
                     {code})"
                )
            }
            Self::TimedOut => f.write_str("timed out: the deadline passed"),
            Self::AlreadySet { what, by } => {
                write!(f, "{what} can be set once, and was set at {by}")
            }
            Self::NotSet { what, by } => write!(f, "{what} is not set; call {by} first"),
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
    /// Converts an error of a call on `device`. A sticky error becomes [`MemoryError::DeviceLost`].
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
