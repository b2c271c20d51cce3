//! Why bytes did not get there.

use crate::workers::WorkerError;
use aquifer_core::MemoryError;
use std::{error, fmt, io, sync::Arc};

/// Why a transfer was not taken, or did not come to its end.
///
/// A transfer that was not taken has changed nothing. Of one that ended early some bytes may have
/// been moved; what else is in flight goes on.
#[derive(Clone)]
#[non_exhaustive]
pub enum StageError {
    /// The driver, a pool or an operand refused: lengths that differ, a conflicting use, no pinned
    /// memory, a device that is lost, a deadline that passed.
    Memory(MemoryError),
    /// A source answered with an error.
    Source {
        /// First byte that was asked for.
        offset: u64,
        /// What it said.
        error: Arc<io::Error>,
    },
    /// A source ended early.
    SourceEnded {
        /// Where it ended.
        offset: u64,
        /// Bytes that were wanted from there on.
        missing: u64,
    },
    /// A sink answered with an error, or took no bytes.
    Sink {
        /// First byte that was handed to it.
        offset: u64,
        /// What it said.
        error: Arc<io::Error>,
    },
    /// A source or a sink panicked. The message went to the panic hook, and the worker lives on.
    SourcePanicked {
        /// First byte that it was to read or write.
        offset: u64,
    },
    /// No worker could be started.
    Workers(WorkerError),
    /// It was cancelled.
    Cancelled,
    /// As many transfers as the stager may have are under way.
    Full {
        /// That many: [`StagerConfig::depth`](super::StagerConfig::depth).
        depth: usize,
    },
    /// A worker left in the middle, by a bug of the stager.
    WorkerLost,
    /// The result has been taken already.
    Taken,
}

impl StageError {
    /// Whether the device is lost: no transfer will succeed any more.
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
            Self::Full { depth } => {
                write!(f, "{depth} transfers are under way, as many as may be; wait for a permit")
            }
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

/// A transfer that did not come about, with what was handed in.
///
/// Its example is that of [`Stager`](crate::Stager).
pub struct Failed<T> {
    /// What was handed in; `None` only where it had been [taken](StageError::Taken) already. Of a
    /// download that failed some bytes may have been written.
    pub back: Option<T>,
    /// Why.
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
