//! Calls of the host from within a stream.

use super::{Sim, clock::Clock};
use crate::Access;
use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

/// A call of the host, to be queued by [`Sim::host_callback`], that says what pinned memory it touches.
///
/// It runs on whatever thread gets there, and may call nothing of the driver's. What it touches is checked when it is
/// queued, at its place in the stream, as a kernel's declarations are; what it declares by [`Sim::host_read`] or
/// [`Sim::host_write`] while it runs is passed over.
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
    pub(crate) call: Box<dyn FnOnce() + Send>,
}

impl Callback {
    /// A call that touches nothing yet. Reports call it by its name.
    pub fn new(name: &'static str, call: impl FnOnce() + Send + 'static) -> Self {
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

/// A host callback that has been queued.
#[derive(Debug)]
pub struct CallbackToken {
    sim: Sim,
    ran: Arc<AtomicBool>,
    clock: Clock,
}

impl CallbackToken {
    /// A token for a call that is yet to run.
    pub(crate) fn new(sim: Sim) -> Self {
        Self { sim, ran: Arc::default(), clock: Clock::default() }
    }

    /// The call, telling when it has run; `clock` is what comes before it.
    pub(crate) fn tells(&mut self, call: Box<dyn FnOnce() + Send>, clock: Clock) -> Box<dyn FnOnce() + Send> {
        self.clock = clock;
        let ran = Arc::clone(&self.ran);
        Box::new(move || {
            call();
            ran.store(true, Ordering::Release);
        })
    }

    /// Whether it has run. If so, the host agent that asks knows everything before it in its stream to be done.
    #[must_use]
    pub fn has_run(&self) -> bool {
        let ran = self.ran.load(Ordering::Acquire);
        if ran {
            self.sim.shared.lock().host_learns(&self.clock);
        }
        ran
    }
}
