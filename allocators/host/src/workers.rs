//! Threads that touch memory first, so that it lies where they run.
//!
//! The kernel puts a page on the node of the thread that touches it first, unless a policy says
//! otherwise, and one thread touches 4 GB/s where eight touch 40. So [`Workers`] keeps threads for
//! each node, bound to those of its CPUs that the process may use, and gives them jobs in pieces.
//!
//! ```text
//!   submit(node, pieces, work)          node's queue              its workers
//!     Job ◄────────── results ◄──────── [job: 0 1 2 3 …] ◄─── claim a piece, run it, next
//! ```
//!
//! Threads start with the first job that finds too few of them free, sleep between jobs that do not
//! come one right after the other, and end with the [`Workers`].
//! Each is bound when it starts, to the CPUs that the node has for the process at that time; where
//! that is refused, as sandboxes do, it runs anywhere, and [`Workers::shortfall`] says so. A piece
//! that panics fails its job and nothing else; a worker that dies is replaced. A job whose deadline
//! passes begins no further piece, and what it has made is dropped, by the worker if need be:
//! nothing waits for somebody to fetch it.
//!
//! A child process that was forked has none of its parent's threads. It is told so by
//! [`WorkerError::Forked`] and [`JobError::Closed`] instead of waiting for them, and can make
//! [`Workers`] of its own.
//!
//! # What workers keep
//! Records that a worker makes lie on its node already, and cost no allocation by the task, so that
//! no arena holds them. A staging worker lists what a slot carries in the slot's own list: it has
//! touched that first, empties it and fills it again. A thread's magazine is made by that thread.
//! What a job has of its own, the list of its results and the chunks of a transfer, is made once by
//! who submits it, in a few allocations for the whole of it; workers read some bytes of that for
//! each chunk of megabytes. `aquifer bench arena` has the staging worker's list in three ways: 16
//! ns for sixteen pieces in the list that is kept, 48 in bumpalo, 76 by `malloc` (two cores of an
//! EPYC).

mod crew;
mod job;

pub use job::{Deadline, Job, JobError};

use crate::{
    kernel::{Kernel, Process},
    topology::{NodeId, Topology},
};
use aquifer_core::SystemError;
use crew::{Crew, Home};
use std::{collections::BTreeMap, error, fmt, num::NonZeroUsize, sync::Arc};

/// Why a job was not taken, and nothing of it has run; or what is amiss with those that took it.
///
/// Its example is that of [`Workers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum WorkerError {
    /// A node that this machine does not have, or that is hidden by `AQUIFER_NUMA=off`.
    UnknownNode {
        /// The node.
        node: NodeId,
    },
    /// A node on whose CPUs the process may not run, or that has none.
    NoCpus {
        /// The node.
        node: NodeId,
    },
    /// A worker could not be bound to the node's CPUs, and runs anywhere.
    Bind {
        /// The node.
        node: NodeId,
        /// Why.
        error: SystemError,
    },
    /// No thread could be started.
    Spawn {
        /// Why.
        error: SystemError,
    },
    /// The workers are threads of the process that this one was forked from.
    Forked,
}

impl fmt::Display for WorkerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownNode { node } => write!(f, "there is no {node} here"),
            Self::NoCpus { node } => write!(f, "the process may run on no CPU of {node}"),
            Self::Bind { node, error } => {
                write!(f, "a worker could not be bound to {node}: {error}")
            }
            Self::Spawn { error } => write!(f, "no worker could be started: {error}"),
            Self::Forked => f.write_str("the workers are the parent process's"),
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

/// Threads for each node that memory is wanted on.
///
/// ```
/// use aquifer_host::{kernel::Kernel, topology::Topology, workers::Workers};
/// let workers = Workers::new(&Topology::read()?, Kernel::new());
/// let job = workers.submit(None, 8, None, |piece| piece * piece)?;
/// assert_eq!(job.wait(None)?, [0, 1, 4, 9, 16, 25, 36, 49]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Workers {
    nodes: BTreeMap<NodeId, Arc<Crew>>,
    /// Nodes that are there, whether or not they have CPUs for us.
    known: Vec<NodeId>,
    /// Workers that run anywhere, for memory whose node is unknown.
    anywhere: Arc<Crew>,
    /// The process whose threads they are.
    process: Process,
}

impl Workers {
    /// Threads that a node has at most, unless told otherwise: beyond eight, populating does not
    /// get faster.
    pub const PER_NODE: NonZeroUsize = NonZeroUsize::new(8).unwrap();

    /// Workers for the nodes of `topology`. Starts no thread yet.
    #[must_use]
    pub fn new(topology: &Topology, kernel: Kernel) -> Self {
        Self::with_threads(topology, kernel, Self::PER_NODE)
    }

    /// The same with at most `per_node` threads a node, and never more than it has CPUs for us.
    #[must_use]
    pub fn with_threads(topology: &Topology, kernel: Kernel, per_node: NonZeroUsize) -> Self {
        let cpus = topology.cpus_allowed().value.as_ref().map_or(1, |cpus| cpus.len().max(1));
        let topology = Arc::new(topology.clone());
        let with_cpus = topology.nodes().iter().filter(|node| !node.allowed_cpus.is_empty());
        let nodes = with_cpus.map(|node| {
            let threads = per_node.get().min(node.allowed_cpus.len());
            let home = Home { node: node.clone(), topology: topology.clone() };
            (node.id, Arc::new(Crew::new(Some(home), threads, kernel.clone())))
        });
        Self {
            nodes: nodes.collect(),
            known: topology.nodes().iter().map(|node| node.id).collect(),
            anywhere: Arc::new(Crew::new(None, per_node.get().min(cpus), kernel)),
            process: Process::current(),
        }
    }

    /// Hands `work` to the workers of a node, or to unbound ones where `node` is `None`. It is
    /// called once for each number below `pieces`, in that order, by several threads. Blocks only
    /// while a worker starts.
    ///
    /// No piece begins after `deadline`: a moment, or a time from the first piece's begin. Dropping
    /// the [`Job`] cancels what has not begun.
    ///
    /// # Errors
    /// [`WorkerError`]: an unknown node is refused rather than served from anywhere.
    pub fn submit<R: Send + 'static>(
        &self,
        node: Option<NodeId>,
        pieces: usize,
        deadline: impl Into<Deadline>,
        work: impl Fn(usize) -> R + Send + Sync + 'static,
    ) -> Result<Job<R>, WorkerError> {
        // First of all: a lock may be held by a thread that this process does not have.
        if self.are_the_parents() {
            return Err(WorkerError::Forked);
        }
        let crew = match node {
            None => &self.anywhere,
            Some(node) => match self.nodes.get(&node) {
                Some(crew) => crew,
                None if self.known.contains(&node) => return Err(WorkerError::NoCpus { node }),
                None => return Err(WorkerError::UnknownNode { node }),
            },
        };
        crew.staff(pieces)?;
        let job = Job::new(pieces, deadline.into(), work);
        crew.enqueue(job.work());
        Ok(job)
    }

    /// Runs `work` once on a worker of the node and waits for it.
    ///
    /// # Errors
    /// [`RunError`]. After a deadline the result, when there is one in the end, is dropped where it
    /// was made.
    pub fn run<R: Send + 'static>(
        &self,
        node: Option<NodeId>,
        deadline: impl Into<Deadline>,
        work: impl Fn() -> R + Send + Sync + 'static,
    ) -> Result<R, RunError> {
        let job = self.submit(node, 1, deadline, move |_| work()).map_err(RunError::NotTaken)?;
        let mut results = job.wait(None).map_err(RunError::NotDone)?;
        results.pop().ok_or(RunError::NotDone(JobError::Closed))
    }

    /// Why workers of a node run somewhere else, if any do: where they touch memory says nothing
    /// about where it lies. [`WorkerError::Bind`], of the workers that are alive now.
    #[must_use]
    pub fn shortfall(&self, node: NodeId) -> Option<WorkerError> {
        if self.are_the_parents() {
            return Some(WorkerError::Forked);
        }
        self.nodes.get(&node)?.shortfall()
    }

    fn are_the_parents(&self) -> bool {
        !self.process.is_current()
    }

    /// Threads that are alive now, bound and unbound.
    #[must_use]
    pub fn threads(&self) -> usize {
        if self.are_the_parents() {
            return 0;
        }
        self.nodes.values().map(|crew| crew.alive()).sum::<usize>() + self.anywhere.alive()
    }
}

impl Drop for Workers {
    /// Ends the threads after the pieces they are at; jobs that are not done answer
    /// [`JobError::Closed`]. Does not wait.
    fn drop(&mut self) {
        if self.are_the_parents() {
            return;
        }
        self.nodes.values().for_each(|crew| crew.close());
        self.anywhere.close();
    }
}

/// Why a piece of work has no result.
///
/// Its example is that of [`Workers`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RunError {
    /// It was not taken.
    NotTaken(WorkerError),
    /// It was taken and not done.
    NotDone(JobError),
}

impl fmt::Display for RunError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTaken(error) => error.fmt(f),
            Self::NotDone(error) => error.fmt(f),
        }
    }
}

impl error::Error for RunError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::NotTaken(error) => Some(error),
            Self::NotDone(error) => Some(error),
        }
    }
}
