//! Why a block was not sent or received.

use aquifer_core::MemoryError;
use std::{error, fmt, io};

/// Why a block could not be shared, sent or received. Nothing stays mapped or open.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, device::ShareError, sim::Sim};
/// use std::{io::Write, os::unix::net::UnixStream};
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// let (mut here, there) = UnixStream::pair()?;
/// here.write_all(&[0; 256])?;
/// // SAFETY: 1. and 2. Nothing is received.
/// let refused = unsafe { pool.receive(&pool.stream()?, &there) };
/// assert!(matches!(refused, Err(ShareError::NotAShare)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum ShareError {
    /// The pool or the driver refused.
    Memory(MemoryError),
    /// The socket failed. The kind is [`UnexpectedEof`](io::ErrorKind::UnexpectedEof) if the other
    /// end closed it within a message.
    Io(io::Error),
    /// The other end did not answer in time, or the socket's own timeout has passed.
    TimedOut,
    /// No process serves at the address: none has started to, or it has ended.
    NoServer(io::Error),
    /// The server has no block of this name, or has withdrawn it.
    NotServed {
        /// The name.
        name: String,
    },
    /// The message is not a shared block, or of another version.
    NotAShare,
    /// A number in the message that no block has.
    BadField {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
    /// This process may open no more descriptors.
    DescriptorLimit,
    /// The memory is on another device than the pool.
    OtherDevice {
        /// The bus address of the memory's device.
        expected: String,
        /// That of the pool's device.
        actual: String,
    },
    /// The process at the other end belongs to another user.
    OtherUser {
        /// This process's effective user id.
        expected: u32,
        /// That of the other end.
        actual: u32,
    },
}

impl fmt::Display for ShareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memory(error) => error.fmt(f),
            Self::Io(error) => write!(f, "the socket failed: {error}"),
            Self::TimedOut => f.write_str("the other end did not answer in time"),
            Self::NoServer(error) => write!(f, "no process serves at the address: {error}"),
            Self::NotServed { name } => {
                write!(f, "no block is served as {name:?}; it may have been withdrawn")
            }
            Self::NotAShare => f.write_str("the message is not a shared block of this version"),
            Self::BadField { field, value } => {
                write!(f, "the message is invalid: {field} is {value}")
            }
            Self::DescriptorLimit => {
                f.write_str("this process may open no more descriptors; raise RLIMIT_NOFILE")
            }
            Self::OtherDevice { expected, actual } => {
                write!(f, "the memory is on device {expected}, the pool on device {actual}")
            }
            Self::OtherUser { expected, actual } => {
                write!(f, "the other end belongs to user {actual} instead of {expected}")
            }
        }
    }
}

impl error::Error for ShareError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            Self::Io(error) | Self::NoServer(error) => Some(error),
            _ => None,
        }
    }
}

impl From<MemoryError> for ShareError {
    fn from(error: MemoryError) -> Self {
        Self::Memory(error)
    }
}

impl From<io::Error> for ShareError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::WouldBlock => Self::TimedOut,
            _ => Self::Io(error),
        }
    }
}
