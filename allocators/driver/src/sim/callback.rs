//! Host calls from within a stream.

use super::{Sim, clock::Clock};
use crate::Access;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// A host call for `Sim::host_callback` that declares the pinned memory it accesses.
///
/// It runs on any thread, and at each launch if it was captured. It must not call the driver. Its
/// declared accesses are checked when it is queued, at its position in the stream, like those of a
/// kernel. [`Sim::host_read`] and [`Sim::host_write`] are ignored while it runs.
///
/// ```
/// use aquifer_driver::{DeviceId, HostFlags, sim::{Callback, Sim}};
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// let (sender, receiver) = std::sync::mpsc::channel();
/// let token = sim.host_callback(stream, Callback::new("done", move || drop(sender.send(42))))?;
/// assert_eq!(receiver.recv(), Ok(42));
/// assert!(token.has_run()); // from here on the host knows that the earlier work is done
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[must_use = "a callback does nothing until it is queued"]
pub struct Callback {
    pub(crate) name: &'static str,
    pub(crate) accesses: Vec<(u64, u64, Access)>,
    pub(crate) call: Box<dyn FnMut() + Send>,
}

impl Callback {
    /// Creates a call without accesses. Reports contain its name.
    pub fn new(name: &'static str, call: impl FnMut() + Send + 'static) -> Self {
        Self { name, accesses: Vec::new(), call: Box::new(call) }
    }

    /// Declares that it reads `bytes` of pinned memory.
    pub fn reads(mut self, address: u64, bytes: u64) -> Self {
        self.accesses.push((address, bytes, Access::Read));
        self
    }

    /// Declares that it writes `bytes` of pinned memory.
    pub fn writes(mut self, address: u64, bytes: u64) -> Self {
        self.accesses.push((address, bytes, Access::Write));
        self
    }
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callback")
            .field("name", &self.name)
            .field("touches", &self.accesses)
            .finish_non_exhaustive()
    }
}

/// The call as an item of a queue.
#[derive(Clone)]
pub(crate) struct QueuedCallback {
    call: Arc<Mutex<dyn FnMut() + Send>>,
    /// The clock that preceded its last run.
    last_run: Arc<Mutex<Option<Clock>>>,
    /// The clock that precedes it.
    pub(crate) clock: Clock,
}

impl QueuedCallback {
    pub(crate) fn new(call: Box<dyn FnMut() + Send>) -> Self {
        Self { call: Arc::new(Mutex::new(call)), last_run: Arc::default(), clock: Clock::default() }
    }

    /// Returns a token that reports whether it has run.
    pub(crate) fn token(&self, sim: Sim) -> CallbackToken {
        CallbackToken { sim, last_run: Arc::clone(&self.last_run) }
    }

    /// Runs the call. The simulator's lock must not be held.
    pub(crate) fn run(self) {
        (self.call.lock().unwrap_or_else(PoisonError::into_inner))();
        *self.last_run.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.clock);
    }
}

/// A host callback that has been queued.
///
/// See [`Callback`] for an example.
#[derive(Debug)]
pub struct CallbackToken {
    sim: Sim,
    last_run: Arc<Mutex<Option<Clock>>>,
}

impl CallbackToken {
    /// Returns whether it has run, at least once if it was captured. If so, the host
    /// now knows that all work before the last run is done.
    #[must_use]
    pub fn has_run(&self) -> bool {
        let last_run = self.last_run.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(clock) = &last_run {
            self.sim.machine.lock().order_host_after(clock);
        }
        last_run.is_some()
    }
}
