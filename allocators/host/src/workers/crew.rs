//! The threads of one node and their queue.

use super::{JobError, WorkerError, job::Work};
use crate::{
    kernel::Kernel,
    topology::{Bitmap, NodeId},
};
use aquifer_core::SystemError;
use std::{
    collections::VecDeque,
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc},
};

/// The workers of one node, or unbound ones.
pub(super) struct Crew {
    /// The node and those of its CPUs that the process may use.
    bound: Option<(NodeId, Bitmap)>,
    /// Threads at most.
    limit: usize,
    kernel: Kernel,
    state: Mutex<State>,
    /// A job came, or the crew was closed.
    called: Condvar,
}

struct State {
    queue: VecDeque<Arc<dyn Work>>,
    /// Threads that run, those about to start included. At most the limit.
    alive: usize,
    closed: bool,
    /// Threads started so far, for their names.
    started: u64,
}

impl Crew {
    pub(super) fn new(bound: Option<(NodeId, Bitmap)>, limit: usize, kernel: Kernel) -> Self {
        let state = State { queue: VecDeque::new(), alive: 0, closed: false, started: 0 };
        Self { bound, limit, kernel, state: Mutex::new(state), called: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alive(&self) -> usize {
        self.lock().alive
    }

    /// Sees to it that there are workers for a job of so many pieces. One is enough for success.
    pub(super) fn staff(self: &Arc<Self>, pieces: usize) -> Result<(), WorkerError> {
        let wanted = pieces.min(self.limit);
        loop {
            let number = {
                let mut state = self.lock();
                if state.closed || state.alive >= wanted {
                    return Ok(());
                }
                state.alive += 1;
                state.started += 1;
                state.started
            };
            match self.start(number) {
                Ok(()) => {}
                // Fewer workers than wanted do the same job in more time.
                Err(_) if self.alive() > 0 => return Ok(()),
                Err(error) => return Err(error),
            }
        }
    }

    /// Starts a worker and waits until it is bound. The caller has counted it as alive.
    fn start(self: &Arc<Self>, number: u64) -> Result<(), WorkerError> {
        let (tell, told) = mpsc::sync_channel::<Result<(), SystemError>>(1);
        let present = Present { crew: self.clone() };
        // The kernel keeps 15 bytes of a name.
        let name = match &self.bound {
            Some((node, _)) => format!("touch-n{}.{number}", node.0),
            None => format!("touch-{number}"),
        };
        let spawned = self.kernel.spawn(name, move || {
            let crew = present.crew.clone();
            let bound = crew.bound.as_ref().map_or(Ok(()), |(_, cpus)| crew.kernel.bind_thread(cpus));
            let refused = bound.is_err();
            if refused {
                // Not present any more when the starter learns of it.
                drop(present);
                let _ = tell.send(bound);
                return;
            }
            let _ = tell.send(bound);
            drop(tell);
            crew.serve();
            drop(present);
        });
        match spawned {
            // The thread, and what it was to run, is gone: it is counted out by then.
            Err(error) => Err(WorkerError::Spawn { error }),
            Ok(_detached) => match (told.recv(), &self.bound) {
                (Ok(Err(error)), Some((node, _))) => Err(WorkerError::Bind { node: *node, error }),
                _ => Ok(()),
            },
        }
    }

    pub(super) fn enqueue(&self, work: Arc<dyn Work>) {
        let mut state = self.lock();
        if state.closed || state.alive == 0 {
            drop(state);
            work.stop(JobError::Closed);
            return;
        }
        state.queue.push_back(work);
        drop(state);
        self.called.notify_all();
    }

    /// A worker's life.
    fn serve(&self) {
        loop {
            let work = {
                let mut state = self.lock();
                loop {
                    if let Some(work) = state.queue.front() {
                        break work.clone();
                    }
                    if state.closed {
                        return;
                    }
                    state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
            };
            if !work.run_piece() {
                self.lock().queue.retain(|queued| !Arc::ptr_eq(queued, &work));
            }
        }
    }

    /// Takes no further job and stops those that wait.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.closed = true;
            std::mem::take(&mut state.queue)
        };
        self.called.notify_all();
        waiting.iter().for_each(|work| work.stop(JobError::Closed));
    }
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew").field("bound", &self.bound).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// Counts a worker out however its thread ends, and sees to a successor where work is left.
struct Present {
    crew: Arc<Crew>,
}

impl Drop for Present {
    fn drop(&mut self) {
        let orphaned = {
            let mut state = self.crew.lock();
            state.alive -= 1;
            !state.closed && state.alive == 0 && !state.queue.is_empty()
        };
        if orphaned && std::thread::panicking() && self.crew.staff(1).is_err() {
            // Nobody is left to do it and nobody can be found.
            let waiting = std::mem::take(&mut self.crew.lock().queue);
            waiting.iter().for_each(|work| work.stop(JobError::Closed));
        }
    }
}
