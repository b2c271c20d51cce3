//! Calls of the host from within a stream.

use super::{Sim, clock::Clock};
use crate::Access;
use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

/// A call of the host, to be queued by [`Sim::host_callback`], that says what pinned memory it
/// touches.
///
/// It runs on whatever thread gets there, at each launch if it was captured, and may call nothing
/// of the driver's. What it touches is checked when it is queued, at its place in the stream, as a
/// kernel's declarations are; what it declares by [`Sim::host_read`] or [`Sim::host_write`] while
/// it runs is passed over.
///
/// ```
/// use aquifer_driver::{DeviceId, HostFlags, sim::{Callback, Sim}};
/// let sim = Sim::h200(1);
/// let driver = sim.driver();
/// let stream = driver.stream_create(DeviceId(0), 0)?;
/// let (sender, receiver) = std::sync::mpsc::channel();
/// let token = sim.host_callback(stream, Callback::new("done", move || drop(sender.send(42))))?;
/// assert_eq!(receiver.recv(), Ok(42));
/// assert!(token.has_run()); // and from here on the host knows what came before it to be done
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
#[must_use = "a callback does nothing until it is queued"]
pub struct Callback {
    pub(crate) name: &'static str,
    pub(crate) touches: Vec<(u64, u64, Access)>,
    pub(crate) call: Box<dyn FnMut() + Send>,
}

impl Callback {
    /// A call that touches nothing yet. Reports call it by its name.
    pub fn new(name: &'static str, call: impl FnMut() + Send + 'static) -> Self {
        Self { name, touches: Vec::new(), call: Box::new(call) }
    }

    /// It reads `bytes` of pinned memory.
    pub fn reads(mut self, address: u64, bytes: u64) -> Self {
        self.touches.push((address, bytes, Access::Read));
        self
    }

    /// It writes `bytes` of pinned memory.
    pub fn writes(mut self, address: u64, bytes: u64) -> Self {
        self.touches.push((address, bytes, Access::Write));
        self
    }
}

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callback")
            .field("name", &self.name)
            .field("touches", &self.touches)
            .finish_non_exhaustive()
    }
}

/// The call as an item of a queue.
#[derive(Clone)]
pub(crate) struct Call {
    call: Arc<Mutex<dyn FnMut() + Send>>,
    /// What came before it when it ran last.
    ran: Arc<Mutex<Option<Clock>>>,
    /// What comes before it.
    pub(crate) clock: Clock,
}

impl Call {
    pub(crate) fn new(call: Box<dyn FnMut() + Send>) -> Self {
        Self { call: Arc::new(Mutex::new(call)), ran: Arc::default(), clock: Clock::default() }
    }

    /// What tells whether it has run.
    pub(crate) fn token(&self, sim: Sim) -> CallbackToken {
        CallbackToken { sim, ran: Arc::clone(&self.ran) }
    }

    /// Makes it. The simulator's lock must not be held.
    pub(crate) fn make(self) {
        (self.call.lock().unwrap_or_else(PoisonError::into_inner))();
        *self.ran.lock().unwrap_or_else(PoisonError::into_inner) = Some(self.clock);
    }
}

/// A host callback that has been queued.
///
/// Its example is that of [`Sim`].
#[derive(Debug)]
pub struct CallbackToken {
    sim: Sim,
    ran: Arc<Mutex<Option<Clock>>>,
}

impl CallbackToken {
    /// Whether it has run, at all if it was captured. If so, the host agent that asks knows
    /// everything that came before it, the last time, to be done.
    #[must_use]
    pub fn has_run(&self) -> bool {
        let ran = self.ran.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if let Some(clock) = &ran {
            self.sim.shared.lock().host_learns(clock);
        }
        ran.is_some()
    }
}
