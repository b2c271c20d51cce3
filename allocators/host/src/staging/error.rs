//! Errors of transfers.

use crate::workers::WorkerError;
use aquifer_core::MemoryError;
use std::{error, fmt, io, sync::Arc};

/// The reason why a transfer was rejected, or ended early.
///
/// A rejected transfer has changed nothing. A transfer that ended early may have moved some bytes.
/// Other transfers continue.
#[derive(Clone)]
#[non_exhaustive]
pub enum StageError {
    /// An error of the driver, a pool or an operand: different lengths, a conflicting use, no
    /// pinned memory, a lost device, or a deadline that passed.
    Memory(MemoryError),
    /// A source returned an error.
    Source {
        /// Offset of the first requested byte.
        offset: u64,
        /// The source's error.
        error: Arc<io::Error>,
    },
    /// A source ended early.
    SourceEnded {
        /// Offset at which it ended.
        offset: u64,
        /// Number of requested bytes that are missing from there.
        missing: u64,
    },
    /// A sink returned an error, or accepted no bytes.
    Sink {
        /// Offset of the first byte that was passed to it.
        offset: u64,
        /// The sink's error.
        error: Arc<io::Error>,
    },
    /// A source or a sink panicked. The message went to the panic hook, and the worker continues.
    SourcePanicked {
        /// Offset of the first byte that it had to read or write.
        offset: u64,
    },
    /// No worker could be started.
    Workers(WorkerError),
    /// The transfer was cancelled.
    Cancelled,
    /// A worker left the transfer early, because of a bug in the stager.
    WorkerLost,
    /// The result has already been taken.
    Taken,
}

impl StageError {
    /// Returns whether the device is lost, so that no transfer can succeed any more.
    #[must_use]
    pub fn is_device_lost(&self) -> bool {
        matches!(self, Self::Memory(MemoryError::DeviceLost { .. }))
    }
}

aquifer_core::__debug_as_display!(StageError);

impl fmt::Display for StageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(error) => error.fmt(f),
            Self::Source { offset, error } => {
                write!(f, "the source failed at byte {offset}: {error}")
            }
            Self::SourceEnded { offset, missing } => {
                write!(f, "the source ends at byte {offset}, {missing} bytes early")
            }
            Self::Sink { offset, error } => write!(f, "the sink failed at byte {offset}: {error}"),
            Self::SourcePanicked { offset } => {
                write!(f, "the source or sink panicked at byte {offset}")
            }
            Self::Workers(error) => error.fmt(f),
            Self::Cancelled => f.write_str("the transfer was cancelled"),
            Self::WorkerLost => f.write_str("a worker left the transfer in the middle"),
            Self::Taken => f.write_str("the result of the transfer has been taken already"),
        }
    }
}

impl error::Error for StageError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            Self::Source { error, .. } | Self::Sink { error, .. } => Some(&**error),
            Self::Workers(error) => Some(error),
            _ => None,
        }
    }
}

impl From<MemoryError> for StageError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

/// A failed transfer, with the operands of the call.
///
/// See [`Stager`](crate::Stager) for an example.
pub struct Failed<T> {
    /// The operands of the call. `None` only if they had already been [taken](StageError::Taken).
    /// A failed download may have written some bytes.
    pub back: Option<T>,
    /// The reason.
    pub error: StageError,
}

impl<T> fmt::Debug for Failed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
impl<T> fmt::Display for Failed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}
impl<T> error::Error for Failed<T> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.error)
    }
}
impl<T> From<Failed<T>> for StageError {
    fn from(failed: Failed<T>) -> Self {
        failed.error
    }
}
