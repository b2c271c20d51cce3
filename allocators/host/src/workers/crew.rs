//! The threads of one node and their queue.

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
pub(super) struct Crew {
    home: Option<Home>,
    /// Threads at most.
    limit: usize,
    kernel: Kernel,
    state: Mutex<State>,
    /// A job came, or the crew was closed.
    called: Condvar,
    /// Workers that are at a piece.
    busy: AtomicUsize,
    /// Jobs in the queue, for workers that look without the lock.
    queued: AtomicUsize,
}

/// How often a worker that has nothing to do looks for a job before it goes to sleep: for less than
/// it takes to be woken, which is some tens of microseconds. Who makes one transfer after another
/// finds them awake.
const LOOKS: u32 = 2000;

/// Where a crew's workers run.
#[derive(Debug)]
pub(super) struct Home {
    /// The node as it was when the workers were described.
    pub(super) node: Node,
    /// The machine, to be asked again when a worker starts.
    pub(super) topology: Arc<Topology>,
}

impl Home {
    /// Binds the calling thread to the CPUs that the node has for the process now.
    fn bind(&self, kernel: &Kernel) -> Result<(), SystemError> {
        let now = self.topology.allowed_cpus(self.node.id).ok().and_then(|found| found.value);
        kernel.bind_thread(now.as_ref().unwrap_or(&self.node.allowed_cpus))
    }
}

struct State {
    queue: VecDeque<Arc<dyn Work>>,
    /// Threads that run, those about to start included. At most the limit.
    alive: usize,
    /// Those of them that sleep: waking nobody is a system call all the same.
    asleep: usize,
    /// Those of them that could not be bound, and run anywhere.
    unbound: usize,
    /// Why the last of them could not.
    refused: Option<SystemError>,
    closed: bool,
    /// Threads started so far, for their names.
    started: u64,
}

impl Crew {
    pub(super) fn new(home: Option<Home>, limit: usize, kernel: Kernel) -> Self {
        let state = State {
            queue: VecDeque::new(),
            alive: 0,
            asleep: 0,
            unbound: 0,
            refused: None,
            closed: false,
            started: 0,
        };
        let (state, called) = (Mutex::new(state), Condvar::new());
        let (busy, queued) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { home, limit, kernel, state, called, busy, queued }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn alive(&self) -> usize {
        self.lock().alive
    }

    /// What is wrong with its workers, though they work.
    pub(super) fn shortfall(&self) -> Option<WorkerError> {
        let node = self.home.as_ref()?.node.id;
        let state = self.lock();
        let error = state.refused.filter(|_| state.unbound > 0)?;
        Some(WorkerError::Bind { node, error })
    }

    /// Sees to it that there are workers for a job of so many pieces, beside those that are busy.
    /// One is enough for success, and may be busy.
    pub(super) fn staff(self: &Arc<Self>, pieces: usize) -> Result<(), WorkerError> {
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

    /// Starts a worker and waits until it is bound, or is known not to be. The caller has counted
    /// it as alive.
    fn start(self: &Arc<Self>, number: u64) -> Result<(), WorkerError> {
        let (tell, told) = mpsc::sync_channel::<()>(1);
        let mut present = Present { crew: self.clone(), unbound: false };
        // The kernel keeps 15 bytes of a name.
        let name = match &self.home {
            Some(home) => format!("touch-n{}.{number}", home.node.id.0),
            None => format!("touch-{number}"),
        };
        let spawned = self.kernel.spawn(name, move || {
            let crew = present.crew.clone();
            if let Some(Err(error)) = crew.home.as_ref().map(|home| home.bind(&crew.kernel)) {
                // It works all the same, anywhere: where memory has a policy, that places it.
                present.unbound = true;
                let mut state = crew.lock();
                state.unbound += 1;
                state.refused = Some(error);
            }
            let _ = tell.send(());
            drop(tell);
            crew.serve();
            drop(present);
        });
        // A thread that did not start has dropped what it was to run: it is counted out by then.
        spawned.map_err(|error| WorkerError::Spawn { error })?;
        let _ = told.recv();
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
        self.count(&state);
        let asleep = state.asleep;
        drop(state);
        // As many as have something to do: each that wakes goes on until nothing is left. Those
        // that are awake look again before they go to sleep.
        if pieces < asleep {
            (0..pieces).for_each(|_| self.called.notify_one());
        } else if asleep > 0 {
            self.called.notify_all();
        }
    }

    /// Tells those who look without the lock how many jobs there are.
    fn count(&self, state: &State) {
        self.queued.store(state.queue.len() + usize::from(state.closed), Ordering::Relaxed);
    }

    /// A worker's life.
    fn serve(&self) {
        loop {
            for _ in 0..LOOKS {
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
                    state = self.called.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.asleep -= 1;
                }
            };
            if !work.run_piece(&self.busy) {
                let mut state = self.lock();
                state.queue.retain(|queued| !Arc::ptr_eq(queued, &work));
                self.count(&state);
            }
        }
    }

    /// Takes no further job and stops those that wait.
    pub(super) fn close(&self) {
        let waiting = {
            let mut state = self.lock();
            state.closed = true;
            let waiting = std::mem::take(&mut state.queue);
            self.count(&state);
            waiting
        };
        self.called.notify_all();
        waiting.iter().for_each(|work| work.stop(JobError::Closed));
    }
}

impl fmt::Debug for Crew {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Crew")
            .field("home", &self.home)
            .field("limit", &self.limit)
            .finish_non_exhaustive()
    }
}

/// Counts a worker out however its thread ends, and sees to a successor where work is left.
struct Present {
    crew: Arc<Crew>,
    unbound: bool,
}

impl Drop for Present {
    fn drop(&mut self) {
        let orphaned = {
            let mut state = self.crew.lock();
            state.alive -= 1;
            state.unbound -= usize::from(self.unbound);
            !state.closed && state.alive == 0 && !state.queue.is_empty()
        };
        if orphaned && std::thread::panicking() && self.crew.staff(1).is_err() {
            // Nobody is left to do it and nobody can be found.
            let waiting = {
                let mut state = self.crew.lock();
                let waiting = std::mem::take(&mut state.queue);
                self.crew.count(&state);
                waiting
            };
            waiting.iter().for_each(|work| work.stop(JobError::Closed));
        }
    }
}
