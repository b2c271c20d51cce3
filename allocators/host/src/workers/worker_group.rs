//! The worker threads of one node, and their queue.

use super::WorkerError;
use crate::{
    kernel::Kernel,
    topology::{IdSet, NodeId},
};
use aquifer_core::{SystemError, panics::contain};
use std::{
    collections::VecDeque,
    fmt, hint, iter,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
};

/// What each of several workers calls once.
pub(super) type Task = Arc<dyn Fn() + Send + Sync>;

/// The workers of one node, or unbound ones.
pub(super) struct WorkerGroup {
    binding: Option<NodeBinding>,
    /// Maximum number of threads.
    limit: usize,
    kernel: Kernel,
    queue: Mutex<Queue>,
    /// Notified when a task arrives or the group is closed.
    wake: Condvar,
    /// Whether a worker has something to do, for those that spin without the lock.
    is_wanted: AtomicBool,
}

/// Spin iterations of an idle worker before it sleeps. They take less time than a wake-up, which
/// takes tens of microseconds. A caller with consecutive transfers finds the workers awake.
const SPINS: u32 = 2000;

/// The CPUs that the workers of a group are bound to.
#[derive(Debug)]
pub(super) struct NodeBinding {
    pub(super) node: NodeId,
    /// Its CPUs that the process may use.
    pub(super) cpus: IdSet,
}

#[derive(Default)]
struct Queue {
    /// A task of several workers is in it several times.
    tasks: VecDeque<Task>,
    /// Number of threads, including those that are starting. At most the limit.
    alive: usize,
    /// Threads that run a task.
    busy: usize,
    /// Sleeping threads. Avoids a system call that would wake none.
    asleep: usize,
    /// The error of the last thread that could not be bound, and runs anywhere.
    refused: Option<SystemError>,
    closed: bool,
}

impl WorkerGroup {
    pub(super) fn new(binding: Option<NodeBinding>, limit: usize, kernel: Kernel) -> Self {
        let (queue, wake) = (Mutex::default(), Condvar::new());
        Self { binding, limit, kernel, queue, wake, is_wanted: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alive(&self) -> usize {
        self.lock().alive
    }

    /// Returns the error of a worker that could not be bound.
    pub(super) fn shortfall(&self) -> Option<WorkerError> {
        let node = self.binding.as_ref()?.node;
        self.lock().refused.map(|error| WorkerError::Bind { node, error })
    }

    /// Has up to `workers` threads run `task`, each once. Starts threads if too few are free.
    /// Succeeds if there is at least one, even a busy one.
    pub(super) fn submit(self: &Arc<Self>, workers: usize, task: &Task) -> Result<(), WorkerError> {
        let workers = workers.min(self.limit);
        loop {
            let number = {
                let mut queue = self.lock();
                let wanted = queue.busy + queue.tasks.len() + workers;
                if queue.alive >= wanted.min(self.limit) {
                    break;
                }
                queue.alive += 1;
                queue.alive
            };
            match self.start_thread(number) {
                Ok(()) => {}
                // Fewer workers also do it, but more slowly.
                Err(_) if self.alive() > 0 => break,
                Err(error) => return Err(error),
            }
        }
        let mut queue = self.lock();
        debug_assert!(!queue.closed && queue.alive > 0, "nobody will run the task");
        debug_assert!(queue.alive <= self.limit, "more threads than the limit");
        queue.tasks.extend(iter::repeat_n(task.clone(), workers));
        self.is_wanted.store(true, Ordering::Relaxed);
        let asleep = queue.asleep;
        drop(queue);
        // Workers that are awake check the queue again before they sleep.
        (0..workers.min(asleep)).for_each(|_| self.wake.notify_one());
        Ok(())
    }

    /// Starts a worker and waits until it is bound or has failed to bind. The caller has counted it
    /// as alive.
    fn start_thread(self: &Arc<Self>, number: usize) -> Result<(), WorkerError> {
        let (bound, wait_bound) = mpsc::sync_channel::<()>(1);
        let group = self.clone();
        let name = match &self.binding {
            Some(binding) => format!("touch-n{}.{number}", binding.node.0),
            None => format!("touch-{number}"),
        };
        let spawned = self.kernel.spawn(&name, move || {
            if let Some(binding) = &group.binding
                && let Err(error) = group.kernel.bind_thread(&binding.cpus)
            {
                // An unbound worker is still useful: memory with a policy is placed by that policy.
                group.lock().refused = Some(error);
            }
            let _ = bound.send(());
            drop(bound);
            group.run();
        });
        if let Err(error) = spawned {
            self.lock().alive -= 1;
            return Err(WorkerError::Spawn { error });
        }
        let _ = wait_bound.recv();
        Ok(())
    }

    /// The main loop of a worker.
    fn run(&self) {
        let mut queue = self.lock();
        loop {
            if let Some(task) = queue.tasks.pop_front() {
                queue.busy += 1;
                self.is_wanted.store(!queue.tasks.is_empty(), Ordering::Relaxed);
                drop(queue);
                contain(move || task());
                queue = self.lock();
                debug_assert!(queue.busy > 0, "the task was not counted");
                queue.busy -= 1;
                continue;
            }
            if queue.closed {
                queue.alive -= 1;
                return;
            }
            drop(queue);
            for _ in 0..SPINS {
                if self.is_wanted.load(Ordering::Relaxed) {
                    break;
                }
                hint::spin_loop();
            }
            queue = self.lock();
            if queue.tasks.is_empty() && !queue.closed {
                queue.asleep += 1;
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                queue.asleep -= 1;
            }
        }
    }

    /// Ends the threads after their current tasks. What nobody has begun is dropped.
    pub(super) fn close(&self) {
        let mut queue = self.lock();
        queue.closed = true;
        let unbegun = std::mem::take(&mut queue.tasks);
        self.is_wanted.store(true, Ordering::Relaxed);
        drop(queue);
        self.wake.notify_all();
        drop(unbegun);
    }
}

impl fmt::Debug for WorkerGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerGroup")
            .field("binding", &self.binding)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}
