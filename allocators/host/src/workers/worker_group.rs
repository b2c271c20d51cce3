//! The worker threads of one node, and their queue.

use super::{JobError, WorkerError, job::Work};
use crate::{
    kernel::Kernel,
    topology::{Node, Topology},
};
use aquifer_core::SystemError;
use std::{
    collections::VecDeque,
    fmt, hint,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
};

/// The workers of one node, or unbound ones.
pub(super) struct WorkerGroup {
    binding: Option<NodeBinding>,
    /// Maximum number of threads.
    limit: usize,
    kernel: Kernel,
    state: Mutex<State>,
    /// Notified when a job arrives or the group is closed.
    wake: Condvar,
    /// Number of workers that run a piece.
    busy: AtomicUsize,
    /// Number of jobs in the queue, for workers that spin without the lock.
    queued: AtomicUsize,
}

/// Spin iterations of an idle worker before it sleeps. They take less time than a wake-up, which
/// takes tens of microseconds. A caller with consecutive transfers finds the workers awake.
const SPINS: u32 = 2000;

/// The CPUs that the workers of a group are bound to.
#[derive(Debug)]
pub(super) struct NodeBinding {
    /// The node at the time when the workers were created.
    pub(super) node: Node,
    /// The topology, whose CPUs are read again when a worker starts.
    pub(super) topology: Arc<Topology>,
}

impl NodeBinding {
    /// Binds the calling thread to the CPUs of the node that the process may use now.
    fn bind(&self, kernel: &Kernel) -> Result<(), SystemError> {
        let now = self.topology.allowed_cpus(self.node.id).ok().and_then(|found| found.value);
        kernel.bind_thread(now.as_ref().unwrap_or(&self.node.allowed_cpus))
    }
}

struct State {
    queue: VecDeque<Arc<dyn Work>>,
    /// Number of threads, including those that are starting. At most the limit.
    alive: usize,
    /// Sleeping threads. Avoids a system call that would wake none.
    asleep: usize,
    /// Threads that could not be bound, and run anywhere.
    unbound: usize,
    /// The error of the last thread that could not be bound.
    refused: Option<SystemError>,
    closed: bool,
    /// Number of threads started so far, for thread names.
    started: u64,
}

impl WorkerGroup {
    pub(super) fn new(binding: Option<NodeBinding>, limit: usize, kernel: Kernel) -> Self {
        let state = State {
            queue: VecDeque::new(),
            alive: 0,
            asleep: 0,
            unbound: 0,
            refused: None,
            closed: false,
            started: 0,
        };
        let (state, wake) = (Mutex::new(state), Condvar::new());
        let (busy, queued) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { binding, limit, kernel, state, wake, busy, queued }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alive(&self) -> usize {
        self.lock().alive
    }

    /// Returns the error of a live worker that could not be bound.
    pub(super) fn shortfall(&self) -> Option<WorkerError> {
        let node = self.binding.as_ref()?.node.id;
        let state = self.lock();
        let error = state.refused.filter(|_| state.unbound > 0)?;
        Some(WorkerError::Bind { node, error })
    }

    /// Starts workers for a job of `pieces` pieces, in addition to busy ones. Succeeds if there is
    /// at least one worker, even a busy one.
    pub(super) fn ensure_threads(self: &Arc<Self>, pieces: usize) -> Result<(), WorkerError> {
        loop {
            let number = {
                let mut state = self.lock();
                let waiting: usize = state.queue.iter().map(|work| work.waiting()).sum();
                let wanted = self
                    .busy
                    .load(Ordering::Relaxed)
                    .saturating_add(waiting)
                    .saturating_add(pieces);
                if state.closed || state.alive >= wanted.min(self.limit) {
                    return Ok(());
                }
                state.alive += 1;
                debug_assert!(state.alive <= self.limit, "more threads than the limit");
                state.started += 1;
                state.started
            };
            match self.start_thread(number) {
                Ok(()) => {}
                // The job also completes with fewer workers, but more slowly.
                Err(_) if self.alive() > 0 => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a worker and waits until it is bound or has failed to bind. The caller has counted it
    /// as alive.
    fn start_thread(self: &Arc<Self>, number: u64) -> Result<(), WorkerError> {
        let (bound, wait_bound) = mpsc::sync_channel::<()>(1);
        let mut guard = ThreadGuard { group: self.clone(), unbound: false };
        let name = match &self.binding {
            Some(binding) => format!("touch-n{}.{number}", binding.node.id.0),
            None => format!("touch-{number}"),
        };
        let spawned = self.kernel.spawn(&name, move || {
            let group = guard.group.clone();
            if let Some(Err(error)) =
                group.binding.as_ref().map(|binding| binding.bind(&group.kernel))
            {
                // An unbound worker is still useful: memory with a policy is placed by that policy.
                guard.unbound = true;
                let mut state = group.lock();
                state.unbound += 1;
                state.refused = Some(error);
            }
            let _ = bound.send(());
            drop(bound);
            group.run();
            drop(guard);
        });
        // If the thread did not start, its closure was dropped, which has corrected the count.
        spawned.map_err(|error| WorkerError::Spawn { error })?;
        let _ = wait_bound.recv();
        Ok(())
    }

    pub(super) fn enqueue(&self, work: Arc<dyn Work>) {
        let pieces = work.waiting();
        let mut state = self.lock();
        if state.closed || state.alive == 0 {
            drop(state);
            work.stop(JobError::Closed);
            return;
        }
        state.queue.push_back(work);
        self.publish_queued(&state);
        let asleep = state.asleep;
        drop(state);
        // One worker per piece is enough, because a worker continues until no piece is left.
        // Workers that are awake check the queue again before they sleep.
        if pieces < asleep {
            (0..pieces).for_each(|_| self.wake.notify_one());
        } else if asleep > 0 {
            self.wake.notify_all();
        }
    }

    /// Updates the number of jobs for workers that spin without the lock.
    fn publish_queued(&self, state: &State) {
        self.queued.store(state.queue.len() + usize::from(state.closed), Ordering::Relaxed);
    }

    /// The main loop of a worker.
    fn run(&self) {
        loop {
            for _ in 0..SPINS {
                if self.queued.load(Ordering::Relaxed) > 0 {
                    break;
                }
                hint::spin_loop();
            }
            let work = {
                let mut state = self.lock();
                loop {
                    if let Some(work) = state.queue.front() {
                        break work.clone();
                    }
                    if state.closed {
                        return;
                    }
                    state.asleep += 1;
                    state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.asleep -= 1;
                }
            };
            if !work.run_piece(&self.busy) {
                let mut state = self.lock();
                state.queue.retain(|queued| !Arc::ptr_eq(queued, &work));
                self.publish_queued(&state);
            }
        }
    }

    /// Accepts no further jobs and stops the queued ones.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.closed = true;
            let waiting = std::mem::take(&mut state.queue);
            self.publish_queued(&state);
            waiting
        };
        self.wake.notify_all();
        waiting.iter().for_each(|work| work.stop(JobError::Closed));
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

/// Corrects the counts when a worker's thread ends, even by a panic, and starts a successor if work
/// is left.
struct ThreadGuard {
    group: Arc<WorkerGroup>,
    unbound: bool,
}

impl Drop for ThreadGuard {
    fn drop(&mut self) {
        let orphaned = {
            let mut state = self.group.lock();
            debug_assert!(state.alive > 0, "the thread was not counted");
            state.alive -= 1;
            state.unbound -= usize::from(self.unbound);
            !state.closed && state.alive == 0 && !state.queue.is_empty()
        };
        if orphaned && std::thread::panicking() && self.group.ensure_threads(1).is_err() {
            // There is no worker left, and no new one could be started.
            let waiting = {
                let mut state = self.group.lock();
                let waiting = std::mem::take(&mut state.queue);
                self.group.publish_queued(&state);
                waiting
            };
            waiting.iter().for_each(|work| work.stop(JobError::Closed));
        }
    }
}
