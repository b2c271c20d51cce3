//! Threads that do the first touch of memory, so that its pages lie on the right NUMA node.
//!
//! The kernel places a page on the node of the thread that touches it first, unless a policy says
//! otherwise. Several threads touch memory about ten times as fast as one. So [`Workers`] has
//! threads for each node, bound to the CPUs of the node that the process may use, and runs tasks on
//! them.
//!
//! ```text
//!   submit(node, 4, work)          node's queue                    its workers
//!                                  [work work work work] ◄─── take one, call it, next
//! ```
//!
//! - A task divides its work itself: each worker that runs it claims a part, and another one, until
//!   nothing is left.
//! - Threads start when a task finds too few free ones. They spin briefly after it, then sleep,
//!   and end with the [`Workers`].
//! - A thread is bound when it starts, to the CPUs that the process may use on the node. If
//!   the binding fails, as in sandboxes, the thread runs anywhere, and [`Workers::shortfall`]
//!   reports it.
//! - A panic ends the call of the task, and not the worker.
//!
//! A forked child process has none of its parent's threads. Its calls return
//! [`WorkerError::Forked`] instead of waiting for them.
//!
//! # What workers keep
//! Records that a worker makes lie on its node already and need no allocation per task, so no arena
//! holds them. A staging worker reuses the list of a slot, which it touched first. A thread makes
//! its own magazine. The data of a task (the chunks of a transfer) is allocated once, by the
//! submitter, in a few allocations. Workers read only some bytes of it for each chunk of megabytes.

mod error;
mod worker_group;

pub use error::WorkerError;

use crate::{
    kernel::{Kernel, is_forked_child},
    topology::{NodeId, Topology},
};
use std::{
    collections::BTreeMap,
    num::NonZeroUsize,
    sync::{Arc, mpsc},
};
use worker_group::{NodeBinding, Task, WorkerGroup};

/// Worker threads for each NUMA node.
///
/// ```
/// use aquifer_host::{kernel::Kernel, topology::Topology, workers::Workers};
/// let workers = Workers::new(&Topology::read()?, Kernel::new());
/// assert_eq!(workers.run(None, || 7 * 7)?, 49);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Workers {
    nodes: BTreeMap<NodeId, Arc<WorkerGroup>>,
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
        let cpus = topology.cpus_allowed().map_or(1, |cpus| cpus.len().max(1));
        let with_cpus = topology.nodes().iter().filter(|node| !node.allowed_cpus.is_empty());
        let nodes = with_cpus.map(|node| {
            let threads = per_node.get().min(node.allowed_cpus.len());
            let binding = NodeBinding { node: node.id, cpus: node.allowed_cpus.clone() };
            (node.id, Arc::new(WorkerGroup::new(Some(binding), threads, kernel.clone())))
        });
        Self {
            nodes: nodes.collect(),
            anywhere: Arc::new(WorkerGroup::new(None, per_node.get().min(cpus), kernel)),
        }
    }

    /// Has up to `workers` threads of a node run `work`, each once, or unbound ones if `node` is
    /// `None`. Blocks only while a worker starts.
    ///
    /// # Errors
    /// [`WorkerError`]. The task does not run elsewhere.
    pub fn submit(
        &self,
        node: Option<NodeId>,
        workers: usize,
        work: impl Fn() + Send + Sync + 'static,
    ) -> Result<(), WorkerError> {
        // This check comes first: a lock may be held by a thread that does not exist in this
        // process.
        if is_forked_child() {
            return Err(WorkerError::Forked);
        }
        let group = match node {
            None => &self.anywhere,
            Some(node) => self.nodes.get(&node).ok_or(WorkerError::NoCpus { node })?,
        };
        let task: Task = Arc::new(work);
        group.submit(workers, &task)
    }

    /// Runs `work` once on a worker of the node and waits for it.
    ///
    /// # Errors
    /// [`WorkerError::Lost`], or that the task was not accepted.
    pub fn run<R: Send + 'static>(
        &self,
        node: Option<NodeId>,
        work: impl Fn() -> R + Send + Sync + 'static,
    ) -> Result<R, WorkerError> {
        let (result, receiver) = mpsc::sync_channel(1);
        self.submit(node, 1, move || {
            let _ = result.send(work());
        })?;
        receiver.recv().map_err(|_| WorkerError::Lost)
    }

    /// Returns [`WorkerError::Bind`] if any worker of the node could not be bound. The first
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
    /// Ends the threads after their current tasks. Does not wait.
    fn drop(&mut self) {
        if is_forked_child() {
            return;
        }
        self.nodes.values().for_each(|group| group.close());
        self.anywhere.close();
    }
}
