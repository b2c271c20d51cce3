//! What is refused.

use aquifer_core::MemoryError;
use std::{error::Error, fmt, time::Duration};

/// Why NIXL, or a request to it, was refused. Nothing has changed then.
#[derive(Debug)]
#[non_exhaustive]
pub enum NixlError {
    /// `libnixl_capi.so` was not found, or has not all functions of NIXL 1.5.
    Library {
        /// What the dynamic loader says.
        reason: String,
    },
    /// A function of NIXL's failed.
    Call {
        /// The function, without `nixl_capi_`.
        call: &'static str,
        /// Its status: -1 a parameter, -2 the backend, -3 a state, -4 an exception, -6 no metadata
        /// of the peer or no backend for the memory.
        status: i32,
    },
    /// A name of an agent, a backend or a parameter is empty or contains a zero byte.
    BadName {
        /// The name.
        name: String,
    },
    /// A range is empty, or not within its registration or block.
    OutOfBounds {
        /// Its offset there, in bytes.
        offset: u64,
        /// Its length in bytes.
        bytes: u64,
        /// The length of the registration or block.
        within: u64,
    },
    /// A transfer without ranges, or whose ranges do not pair: another number, another length, or
    /// two kinds of memory on one side.
    Unpaired {
        /// Ranges of this side.
        local: usize,
        /// Ranges of the peer.
        remote: usize,
    },
    /// The range or the peer belongs to another agent.
    OtherAgent,
    /// Bytes that name no range.
    BadLocation,
    /// The pool has no free range of that size.
    PoolFull {
        /// The requested bytes.
        bytes: u64,
        /// The bytes that are free, in ranges of any size.
        free: u64,
    },
    /// The transfer was not over in time. It was given up.
    Late {
        /// The time that it had.
        waited: Duration,
    },
    /// There is no memory for a pool.
    Memory(MemoryError),
}

impl fmt::Display for NixlError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library { reason } => write!(
                f,
                "no NIXL: {reason}; AQUIFER_NIXL names the file libnixl_capi.so, which the wheel \
                 nixl-cu13 has"
            ),
            Self::Call { call, status } => {
                let meaning = match status {
                    -1 => "an invalid parameter",
                    -2 => "an error of the backend",
                    -3 => "not in this state",
                    -4 => "an exception",
                    -6 => "no metadata of the peer, or no backend for the memory",
                    _ => "an error",
                };
                write!(f, "nixl_capi_{call} failed: {meaning} ({status})")
            }
            Self::BadName { name } => write!(f, "the name {name:?} is empty or has a zero byte"),
            Self::OutOfBounds { offset, bytes, within } => {
                write!(f, "{bytes} bytes from {offset} are not a part of {within} bytes")
            }
            Self::Unpaired { local, remote } => write!(
                f,
                "{local} local and {remote} remote ranges do not pair: a transfer has as many of \
                 each, of equal lengths, and one kind of memory on a side"
            ),
            Self::OtherAgent => f.write_str("the range or the peer belongs to another agent"),
            Self::BadLocation => f.write_str("the bytes name no range"),
            Self::PoolFull { bytes, free } => {
                write!(f, "no free range of {bytes} bytes; {free} bytes of the pool are free")
            }
            Self::Late { waited } => write!(f, "the transfer was not over within {waited:?}"),
            Self::Memory(error) => write!(f, "no memory for the pool: {error}"),
        }
    }
}

impl Error for NixlError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Memory(error) => Some(error),
            _ => None,
        }
    }
}
