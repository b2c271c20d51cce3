//! Status codes of calls.

use aquifer::{MemoryError, device::ShareError, staging::StageError};
use std::fmt;

/// A status code in the C interface.
pub type aq_status = i32;

macro_rules! statuses {
    ($($(#[$doc:meta])* $variant:ident = $number:literal, $name:literal;)*) => {
        /// The status codes. Their numbers never change, and new codes are appended.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
        #[repr(i32)]
        pub enum Status {
            $($(#[$doc])* $variant = $number,)*
        }

        impl Status {
            /// All status codes.
            pub const ALL: &[Status] = &[$(Self::$variant),*];

            /// Returns the name in the header.
            #[must_use]
            pub const fn name(self) -> &'static std::ffi::CStr {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

statuses! {
    /// Success.
    Ok = 0, c"AQ_OK";
    /// Not finished yet. Not an error.
    NotReady = 1, c"AQ_NOT_READY";
    /// A required pointer is null.
    Null = 2, c"AQ_ERROR_NULL";
    /// An argument is invalid.
    BadArgument = 3, c"AQ_ERROR_BAD_ARGUMENT";
    /// A struct of an unknown version.
    Version = 4, c"AQ_ERROR_VERSION";
    /// A number that never belonged to a runtime.
    BadRuntime = 5, c"AQ_ERROR_BAD_RUNTIME";
    /// The runtime has been destroyed.
    Closed = 6, c"AQ_ERROR_CLOSED";
    /// A request for 0 bytes.
    ZeroSize = 7, c"AQ_ERROR_ZERO_SIZE";
    /// A request that is too large for any memory.
    TooLarge = 8, c"AQ_ERROR_TOO_LARGE";
    /// An unsupported alignment.
    BadAlignment = 9, c"AQ_ERROR_BAD_ALIGNMENT";
    /// No step made room.
    OutOfMemory = 10, c"AQ_ERROR_OUT_OF_MEMORY";
    /// A budget refused.
    OutOfBudget = 11, c"AQ_ERROR_OUT_OF_BUDGET";
    /// The driver refused.
    Driver = 12, c"AQ_ERROR_DRIVER";
    /// The kernel refused.
    System = 13, c"AQ_ERROR_SYSTEM";
    /// The device is lost.
    DeviceLost = 14, c"AQ_ERROR_DEVICE_LOST";
    /// There is no such device.
    NoDevice = 15, c"AQ_ERROR_NO_DEVICE";
    /// A block or stream of another device.
    WrongDevice = 16, c"AQ_ERROR_WRONG_DEVICE";
    /// An address that is not that of a live block.
    ForeignBlock = 17, c"AQ_ERROR_FOREIGN_BLOCK";
    /// A block that has been freed already.
    DoubleFree = 18, c"AQ_ERROR_DOUBLE_FREE";
    /// A range beyond the end of a block.
    OutOfBounds = 19, c"AQ_ERROR_OUT_OF_BOUNDS";
    /// Another use excludes this one.
    Busy = 20, c"AQ_ERROR_BUSY";
    /// The maximum number is reached.
    Capacity = 21, c"AQ_ERROR_CAPACITY";
    /// The stream captures a graph.
    Capturing = 22, c"AQ_ERROR_CAPTURING";
    /// An unknown stream.
    UnknownStream = 23, c"AQ_ERROR_UNKNOWN_STREAM";
    /// The default stream of another thread.
    OtherThread = 24, c"AQ_ERROR_OTHER_THREAD";
    /// The driver or device does not support it.
    Unsupported = 25, c"AQ_ERROR_UNSUPPORTED";
    /// A deadline has passed.
    TimedOut = 26, c"AQ_ERROR_TIMED_OUT";
    /// An invalid setting or environment variable.
    BadSetting = 27, c"AQ_ERROR_BAD_SETTING";
    /// A transfer failed.
    Staging = 28, c"AQ_ERROR_STAGING";
    /// A transfer was cancelled.
    Cancelled = 29, c"AQ_ERROR_CANCELLED";
    /// An unknown ticket number.
    UnknownTicket = 30, c"AQ_ERROR_UNKNOWN_TICKET";
    /// A panic within the library, which is a bug. It was contained.
    Panic = 31, c"AQ_ERROR_PANIC";
    /// Another error.
    Other = 32, c"AQ_ERROR_OTHER";
    /// Memory that is parked.
    Parked = 33, c"AQ_ERROR_PARKED";
    /// Addresses without memory.
    Uncommitted = 34, c"AQ_ERROR_UNCOMMITTED";
}

/// A status code and a text. One pointer in size, since most calls return none.
pub(crate) struct Failure(Box<(Status, String)>);

impl Failure {
    #[cold]
    pub(crate) fn new(status: Status, text: impl Into<String>) -> Self {
        Self(Box::new((status, text.into())))
    }

    pub(crate) fn into_parts(self) -> (Status, String) {
        *self.0
    }

    pub(crate) fn status(&self) -> Status {
        self.0.0
    }
}

impl fmt::Debug for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.0.0, self.0.1)
    }
}

fn status_of(error: &MemoryError) -> Status {
    match error {
        MemoryError::ZeroSize => Status::ZeroSize,
        MemoryError::TooLarge { .. } => Status::TooLarge,
        MemoryError::BadAlignment { .. } => Status::BadAlignment,
        MemoryError::OutOfBudget(_) => Status::OutOfBudget,
        MemoryError::OutOfMemory(_) => Status::OutOfMemory,
        MemoryError::Driver(_) => Status::Driver,
        MemoryError::System(_) => Status::System,
        MemoryError::DeviceLost { .. } => Status::DeviceLost,
        MemoryError::NoDevice { .. } | MemoryError::NoGpu { .. } => Status::NoDevice,
        MemoryError::WrongDevice { .. } | MemoryError::OtherMachine { .. } => Status::WrongDevice,
        MemoryError::ForeignBlock { .. } => Status::ForeignBlock,
        MemoryError::DoubleFree { .. } => Status::DoubleFree,
        MemoryError::OutOfBounds { .. } | MemoryError::OutOfRange { .. } => Status::OutOfBounds,
        MemoryError::Busy { .. } => Status::Busy,
        MemoryError::Closed => Status::Closed,
        MemoryError::Capacity { .. } => Status::Capacity,
        MemoryError::Capturing { .. } | MemoryError::CaptureInvalidated { .. } => Status::Capturing,
        MemoryError::AlreadyAnnounced { .. } => Status::Busy,
        // Ids are not part of this interface. What is unknown here is a stream.
        MemoryError::UnknownId => Status::UnknownStream,
        MemoryError::OtherThread { .. } => Status::OtherThread,
        MemoryError::Unsupported { .. } => Status::Unsupported,
        MemoryError::TimedOut => Status::TimedOut,
        MemoryError::Parked { .. } => Status::Parked,
        MemoryError::Uncommitted { .. } => Status::Uncommitted,
        MemoryError::BadSetting { .. } => Status::BadSetting,
        _ => Status::Other,
    }
}

impl From<MemoryError> for Failure {
    #[cold]
    fn from(error: MemoryError) -> Self {
        Self::new(status_of(&error), error.to_string())
    }
}

impl From<StageError> for Failure {
    #[cold]
    fn from(error: StageError) -> Self {
        let status = match &error {
            StageError::Memory(error) => status_of(error),
            StageError::Cancelled => Status::Cancelled,
            _ => Status::Staging,
        };
        Self::new(status, error.to_string())
    }
}

impl From<ShareError> for Failure {
    #[cold]
    fn from(error: ShareError) -> Self {
        let status = match &error {
            ShareError::Memory(error) => status_of(error),
            ShareError::TimedOut => Status::TimedOut,
            ShareError::Io(_) | ShareError::DescriptorLimit => Status::System,
            ShareError::NoServer(_) => Status::Closed,
            ShareError::NotServed { .. } => Status::ForeignBlock,
            ShareError::OtherDevice { .. } => Status::WrongDevice,
            _ => Status::BadArgument,
        };
        Self::new(status, error.to_string())
    }
}
