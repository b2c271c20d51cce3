//! The figures of one process.

use super::pools::{self, PoolStatus};
use crate::error::FileFault;
use aquifer_core::PoolStats;
use std::{
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// The figures of one process.
#[derive(Clone, PartialEq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ProcessStatus {
    /// The number that the process had when it started. Not to be trusted: after its death another
    /// process may have it.
    pub process: u32,
    /// The command with its arguments, cut after 504 bytes.
    pub command: String,
    /// The version of the library.
    pub version: String,
    /// When the process began to publish, in nanoseconds since 1970.
    pub started_ns: u64,
    /// Whether the process lives: whether it holds the lock of its file.
    pub is_alive: bool,
    /// Its pools, in the order of their slots.
    pub pools: Vec<PoolStatus>,
    /// Pools whose figures cannot be read.
    pub faults: Vec<FileFault>,
    /// Its file.
    pub path: PathBuf,
}

impl ProcessStatus {
    /// Returns whether the process lived when it was read.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        self.is_alive
    }

    /// Returns when the process began to publish.
    #[must_use]
    pub fn started(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_nanos(self.started_ns)
    }

    /// Returns the sum of the statistics of all pools.
    #[must_use]
    pub fn total(&self) -> PoolStats {
        self.pools.iter().fold(PoolStats::default(), |sum, pool| pools::sum(&sum, &pool.stats))
    }
}
