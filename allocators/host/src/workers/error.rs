//! The error of workers.

use crate::topology::NodeId;
use aquifer_core::SystemError;
use std::{error, fmt};

/// Why a task was not accepted or has no result, or what is wrong with the workers.
///
/// See [`Workers`](crate::workers::Workers) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WorkerError {
    /// There is no such node, or the process may run on no CPU of it.
    NoCpus {
        /// The node.
        node: NodeId,
    },
    /// A worker could not be bound to the node's CPUs, and runs anywhere.
    Bind {
        /// The node.
        node: NodeId,
        /// The cause.
        error: SystemError,
    },
    /// No thread could be started.
    Spawn {
        /// The cause.
        error: SystemError,
    },
    /// The workers are threads of the parent process.
    Forked,
    /// The task panicked, or the workers ended before it.
    Lost,
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCpus { node } => write!(f, "the process may run on no CPU of {node}"),
            Self::Bind { node, error } => {
                write!(f, "a worker could not be bound to {node}: {error}")
            }
            Self::Spawn { error } => write!(f, "no worker could be started: {error}"),
            Self::Forked => f.write_str("the workers are the parent process's"),
            Self::Lost => f.write_str("the worker panicked, or ended before the task"),
        }
    }
}

impl error::Error for WorkerError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Bind { error, .. } | Self::Spawn { error } => Some(error),
            _ => None,
        }
    }
}
