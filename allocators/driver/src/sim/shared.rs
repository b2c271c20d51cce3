//! The shared body of a simulated machine, and the entry of its calls.

use super::{
    codes,
    config::SimConfig,
    config::{Mode, Schedule},
    cost::Costs,
    faults::Stalls,
    inside,
    reporting::{self, OnViolation},
    state::State,
    store::Store,
};
use crate::{Call, CallCounts, DeviceId, DriverError, Result, site};
use std::sync::{
    Arc, Condvar, Mutex, MutexGuard, PoisonError,
    atomic::{AtomicBool, AtomicU64, Ordering},
};
use std::{fmt, panic::Location};

/// The simulated machine behind its lock.
pub(crate) struct Shared {
    pub(crate) config: SimConfig,
    pub(crate) calls: CallCounts,
    /// The number of this machine, unique in the process.
    pub(crate) machine: u64,
    pub(crate) stalls: Arc<Stalls>,
    /// Whether the oracle is on: a copy of the state's flag that is read without the lock.
    pub(crate) watched: AtomicBool,
    pub(crate) on_violation: OnViolation,
    /// The process that created it. A forked child reports nothing.
    process: u32,
    modelled: AtomicU64,
    costs: Costs,
    state: Mutex<State>,
    /// Signalled when an item has run, or can run now.
    pub(crate) changed: Condvar,
}

impl fmt::Debug for Shared {
    /// Prints the configuration only, since every pool that is printed prints its driver.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim")
            .field("devices", &self.config.devices.len())
            .field("mode", &self.config.mode)
            .field("schedule", &self.config.schedule)
            .finish_non_exhaustive()
    }
}

/// The number of machines created so far.
static MACHINES: AtomicU64 = AtomicU64::new(0);

/// The locked state of the machine.
pub(crate) type Guard<'a> = MutexGuard<'a, State>;

/// Converts the code of a call to its error.
pub(crate) fn at(call: Call) -> impl Fn(u32) -> DriverError {
    move |code| codes::error(call.name(), code)
}

impl Shared {
    pub(crate) fn new(mut config: SimConfig) -> Self {
        let store = match config.mode {
            Mode::Symbolic => Store::symbolic(),
            Mode::Bytes => Store::bytes().unwrap_or_else(|_| {
                // A system without memory files can still check order and ownership. The
                // configuration reports the change.
                config.mode = Mode::Symbolic;
                Store::symbolic()
            }),
        };
        let machine = MACHINES.fetch_add(1, Ordering::Relaxed);
        let on_violation = config.on_violation.unwrap_or_else(OnViolation::of_process);
        let mut state = State::new(machine, config.clone(), store);
        state.reports.at_once = on_violation == OnViolation::ReportAtOnce;
        Self {
            on_violation,
            process: std::process::id(),
            calls: CallCounts::new(),
            machine,
            stalls: Arc::new(Stalls::default()),
            watched: AtomicBool::new(true),
            modelled: AtomicU64::new(0),
            costs: config.costs,
            state: Mutex::new(state),
            changed: Condvar::new(),
            config,
        }
    }

    /// Locks the state. A poisoned lock is valid, since closures never run under it.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes unreported violations to standard error. Returns whether there were any.
    pub(crate) fn report(&self) -> bool {
        self.report_of(self.lock())
    }

    /// As [`Shared::report`], when the process ends and another thread may hold the lock forever.
    pub(crate) fn report_at_exit(&self) {
        if let Ok(state) = self.state.try_lock() {
            self.report_of(state);
        }
    }

    fn report_of(&self, mut state: Guard<'_>) -> bool {
        if self.on_violation == OnViolation::Quiet || self.process != std::process::id() {
            return false;
        }
        let untold = state.reports.untold();
        drop(state);
        reporting::write(&untold);
        if let (OnViolation::Exit(code), false) = (self.on_violation, untold.is_empty()) {
            reporting::exit_with(code);
        }
        !untold.is_empty()
    }

    /// Panics if [`OnViolation::Panic`] is set and there are unreported violations. Never called by
    /// a drop.
    #[track_caller]
    #[expect(clippy::panic, reason = "the program has asked for it")]
    pub(crate) fn checkpoint(&self) {
        if self.on_violation != OnViolation::Panic || std::thread::panicking() || inside::any() {
            return;
        }
        let untold = self.lock().reports.untold();
        if !untold.is_empty() {
            panic!("{}", reporting::Text(&untold));
        }
    }

    /// Waits until an item has run.
    pub(crate) fn wait<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// Enters a counted call: counts it, blocks or refuses it if a test requires that, and lets
    /// time pass. Refuses a `device` that does not exist or is lost.
    pub(crate) fn enter(&self, call: Call, device: Option<DeviceId>) -> Result<Guard<'_>> {
        self.calls.add(call);
        self.stalls.pass(call);
        if inside::any() {
            return Err(at(call)(codes::NOT_PERMITTED));
        }
        let mut state = self.lock();
        if let Some(code) = state.faults.meet(call) {
            let error = at(call)(code);
            let there = device.and_then(|device| state.devices.get_mut(device.0 as usize));
            if let Some(there) = there.filter(|_| error.is_device_lost()) {
                there.is_told_lost();
            }
            return Err(error);
        }
        if let Some(device) = device {
            state.device(device).map_err(at(call))?;
        }
        Ok(self.come_in(state))
    }

    /// As [`Shared::enter`], for a call that is not part of the trait.
    pub(crate) fn enter_named(&self, call: &'static str, device: DeviceId) -> Result<Guard<'_>> {
        if inside::any() {
            return Err(codes::error(call, codes::NOT_PERMITTED));
        }
        let mut state = self.lock();
        state.device(device).map_err(|code| codes::error(call, code))?;
        Ok(self.come_in(state))
    }

    fn come_in<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        match self.config.schedule {
            Schedule::Seeded(_) if state.queued > 0 => {
                state.since_pace += 1;
                if state.since_pace < self.config.pace {
                    return state;
                }
                state.since_pace = 0;
                self.drift(state)
            }
            _ => state,
        }
    }

    /// Adds the cost of a call.
    pub(crate) fn cost(&self, call: Call, bytes: u64) {
        self.modelled.fetch_add(self.costs.of(call, bytes), Ordering::Relaxed);
    }

    /// Adds the cost of setting access to a mapping for `peers` peers.
    pub(crate) fn cost_of_opening(&self, bytes: u64, peers: u32) {
        self.modelled.fetch_add(self.costs.opening(bytes, peers), Ordering::Relaxed);
    }

    /// Returns the cost of all calls so far, in nanoseconds.
    pub(crate) fn modelled(&self) -> u64 {
        self.modelled.load(Ordering::Relaxed)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        reporting::forget(self.machine);
        self.report();
    }
}

/// Returns the line of the program that a call is made for: the entered one, or the caller's own.
#[track_caller]
pub(crate) fn here() -> &'static Location<'static> {
    let _entered = site::enter();
    site::current()
}
