//! Threads that do the first touch of memory, so that its pages lie on the right NUMA node.
//!
//! The kernel places a page on the node of the thread that touches it first, unless a policy says
//! otherwise. Several threads touch memory about ten times as fast as one. So [`Workers`] has
//! threads for each node, bound to the CPUs of the node that the process may use, and runs jobs on
//! them in pieces.
//!
//! ```text
//!   submit(node, pieces, work)          node's queue              its workers
//!     Job ◄────────── results ◄──────── [job: 0 1 2 3 …] ◄─── claim a piece, run it, next
//! ```
//!
//! - Threads start when a job finds too few free ones. They spin briefly after a job, then sleep,
//!   and end with the [`Workers`].
//! - A thread is bound when it starts, to the CPUs that the process may then use on the node. If
//!   the binding fails, as in sandboxes, the thread runs anywhere, and [`Workers::shortfall`]
//!   reports it.
//! - A piece that panics fails only its own job. A worker that dies is replaced.
//! - A job whose deadline passes starts no further piece. Its results are dropped, by a worker if
//!   necessary.
//!
//! A forked child process has none of its parent's threads. Its calls return
//! [`WorkerError::Forked`] and [`JobError::Closed`] instead of waiting for them.
//!
//! # What workers keep
//! Records that a worker makes lie on its node already and need no allocation per task, so no arena
//! holds them. A staging worker reuses the list of a slot, which it touched first. A thread makes
//! its own magazine. The data of a job (the list of its results, and the chunks of a transfer) is
//! allocated once, by the submitter, in a few allocations. Workers read only some bytes of it for
//! each chunk of megabytes.

mod error;
mod job;
mod worker_group;

pub use error::WorkerError;
pub use job::{Job, JobError};

use crate::{
    kernel::{Kernel, is_forked_child},
    topology::{NodeId, Topology},
};
use std::{collections::BTreeMap, error::Error, fmt, num::NonZeroUsize, sync::Arc, time::Instant};
use worker_group::{NodeBinding, WorkerGroup};

/// Worker threads for each NUMA node.
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
    nodes: BTreeMap<NodeId, Arc<WorkerGroup>>,
    /// All nodes, including those without CPUs for the process.
    known: Vec<NodeId>,
    /// Unbound workers, for memory whose node is unknown.
    anywhere: Arc<WorkerGroup>,
}

impl Workers {
    /// The default maximum number of threads per node. More than eight do not populate memory
    /// faster.
    pub const PER_NODE: NonZeroUsize = NonZeroUsize::new(8).unwrap();

    /// Creates workers for the nodes of `topology`. Starts no thread yet.
    #[must_use]
    pub fn new(topology: &Topology, kernel: Kernel) -> Self {
        Self::with_threads(topology, kernel, Self::PER_NODE)
    }

    /// As [`Workers::new`], with at most `per_node` threads per node, and at most one per usable
    /// CPU.
    #[must_use]
    pub fn with_threads(topology: &Topology, kernel: Kernel, per_node: NonZeroUsize) -> Self {
        let cpus = topology.cpus_allowed().value.as_ref().map_or(1, |cpus| cpus.len().max(1));
        let topology = Arc::new(topology.clone());
        let with_cpus = topology.nodes().iter().filter(|node| !node.allowed_cpus.is_empty());
        let nodes = with_cpus.map(|node| {
            let threads = per_node.get().min(node.allowed_cpus.len());
            let binding = NodeBinding { node: node.clone(), topology: topology.clone() };
            (node.id, Arc::new(WorkerGroup::new(Some(binding), threads, kernel.clone())))
        });
        Self {
            nodes: nodes.collect(),
            known: topology.nodes().iter().map(|node| node.id).collect(),
            anywhere: Arc::new(WorkerGroup::new(None, per_node.get().min(cpus), kernel)),
        }
    }

    /// Queues a job for the workers of a node, or for unbound ones if `node` is `None`. `work` is
    /// called once for each number below `pieces`, in that order, by several threads. Blocks only
    /// while a worker starts.
    ///
    /// No piece starts after `deadline`. Dropping the [`Job`] cancels the pieces that have not
    /// started.
    ///
    /// # Errors
    /// [`WorkerError`]. An unknown node is an error. The job does not run elsewhere.
    pub fn submit<R: Send + 'static>(
        &self,
        node: Option<NodeId>,
        pieces: usize,
        deadline: Option<Instant>,
        work: impl Fn(usize) -> R + Send + Sync + 'static,
    ) -> Result<Job<R>, WorkerError> {
        // This check comes first: a lock may be held by a thread that does not exist in this
        // process.
        if is_forked_child() {
            return Err(WorkerError::Forked);
        }
        let group = match node {
            None => &self.anywhere,
            Some(node) => match self.nodes.get(&node) {
                Some(group) => group,
                None if self.known.contains(&node) => return Err(WorkerError::NoCpus { node }),
                None => return Err(WorkerError::UnknownNode { node }),
            },
        };
        group.ensure_threads(pieces)?;
        let job = Job::new(pieces, deadline, work);
        group.enqueue(job.work());
        Ok(job)
    }

    /// Runs `work` once on a worker of the node and waits for it.
    ///
    /// # Errors
    /// [`RunError`]. A result that arrives after the deadline is dropped by the worker.
    pub fn run<R: Send + 'static>(
        &self,
        node: Option<NodeId>,
        deadline: Option<Instant>,
        work: impl Fn() -> R + Send + Sync + 'static,
    ) -> Result<R, RunError> {
        let job = self.submit(node, 1, deadline, move |_| work()).map_err(RunError::NotTaken)?;
        let mut results = job.wait(None).map_err(RunError::NotDone)?;
        results.pop().ok_or(RunError::NotDone(JobError::Closed))
    }

    /// Returns [`WorkerError::Bind`] if any live worker of the node could not be bound. The first
    /// touch by such a worker does not determine the node of memory.
    #[must_use]
    pub fn shortfall(&self, node: NodeId) -> Option<WorkerError> {
        if is_forked_child() {
            return Some(WorkerError::Forked);
        }
        self.nodes.get(&node)?.shortfall()
    }

    /// Returns the number of live threads, bound and unbound.
    #[must_use]
    pub fn threads(&self) -> usize {
        if is_forked_child() {
            return 0;
        }
        self.nodes.values().map(|group| group.alive()).sum::<usize>() + self.anywhere.alive()
    }
}

impl Drop for Workers {
    /// Ends the threads after their current pieces. Unfinished jobs return [`JobError::Closed`].
    /// Does not wait.
    fn drop(&mut self) {
        if is_forked_child() {
            return;
        }
        self.nodes.values().for_each(|group| group.close());
        self.anywhere.close();
    }
}

/// Why [`Workers::run`] has no result.
///
/// See [`Workers`] for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum RunError {
    /// The job was not accepted.
    NotTaken(WorkerError),
    /// The job was accepted but not completed.
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

impl Error for RunError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::NotTaken(error) => Some(error),
            Self::NotDone(error) => Some(error),
        }
    }
}
