//! The simulated machine behind its lock, and the entry of its calls.

use super::{
    codes::{self, ErrorCode},
    config::{Mode, Schedule, SimConfig},
    device_code,
    faults::Stalls,
    machine_state::MachineState,
    reporting::{self, OnViolation},
    store::Store,
};
use crate::{
    Call, CallCounts, DeviceId, DriverError, Result,
    site::{self, Site},
};
use std::{
    fmt,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

/// The simulated machine behind its lock.
pub(crate) struct Machine {
    pub(crate) config: SimConfig,
    pub(crate) calls: CallCounts,
    /// The number of this machine, unique in the process.
    pub(crate) machine_id: u64,
    pub(crate) stalls: Arc<Stalls>,
    /// Whether the oracle is on: a copy of the state's flag that is read without the lock.
    pub(crate) oracle_on: AtomicBool,
    pub(crate) on_violation: OnViolation,
    /// The process that created it. A forked child reports nothing.
    process_id: u32,
    /// The name of the thread that created it, unless that is the main thread.
    creator: Option<Box<str>>,
    state: Mutex<MachineState>,
    /// Signalled when an item has run.
    pub(crate) changed: Condvar,
}

impl fmt::Debug for Machine {
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
pub(crate) type StateGuard<'a> = MutexGuard<'a, MachineState>;

/// Converts the code of a call to its error.
pub(crate) fn error_of(call: Call) -> impl Fn(ErrorCode) -> DriverError {
    move |code| codes::error(call.name(), code)
}

impl Machine {
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
        let machine_id = MACHINES.fetch_add(1, Ordering::Relaxed);
        let on_violation = config.on_violation.unwrap_or_else(OnViolation::process_default);
        let state = MachineState::new(machine_id, config.clone(), store);
        Self {
            on_violation,
            process_id: std::process::id(),
            creator: thread::current().name().filter(|name| *name != "main").map(Into::into),
            calls: CallCounts::new(),
            machine_id,
            stalls: Arc::new(Stalls::default()),
            oracle_on: AtomicBool::new(true),
            state: Mutex::new(state),
            changed: Condvar::new(),
            config,
        }
    }

    /// Locks the state. A poisoned lock is valid, since closures never run under it.
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes unreported violations to standard error. Returns whether there were any.
    pub(crate) fn report(&self) -> bool {
        self.report_of(self.lock())
    }

    /// As [`Machine::report`], when the process ends and another thread may hold the lock forever.
    pub(crate) fn report_at_exit(&self) {
        if let Ok(state) = self.state.try_lock() {
            self.report_of(state);
        }
    }

    fn report_of(&self, mut state: StateGuard<'_>) -> bool {
        if self.on_violation == OnViolation::Quiet || self.process_id != std::process::id() {
            return false;
        }
        let unreported = state.violations.take_unreported();
        drop(state);
        reporting::write(&unreported, self.creator.as_deref());
        if let (OnViolation::Exit(code), false) = (self.on_violation, unreported.is_empty()) {
            reporting::exit_with(code);
        }
        !unreported.is_empty()
    }

    /// Enters a counted call: counts it, blocks or refuses it if a test requires that, and lets
    /// time pass. Refuses a `device` that does not exist or is lost.
    pub(crate) fn enter(&self, call: Call, device: Option<DeviceId>) -> Result<StateGuard<'_>> {
        self.calls.add(call);
        self.stalls.wait_while_stalled(call);
        if device_code::is_running() {
            return Err(error_of(call)(codes::NOT_PERMITTED));
        }
        let mut state = self.lock();
        if let Some(code) = state.faults.count_call(call) {
            let error = error_of(call)(code);
            let entry = device.and_then(|device| state.devices.get_mut(device.0 as usize));
            if let Some(entry) = entry.filter(|_| error.is_device_lost()) {
                entry.record_loss();
            }
            return Err(error);
        }
        // Last: the lock is released while an item runs, and the device may be lost meanwhile.
        let mut state = self.advance_time(state);
        if let Some(device) = device {
            state.device(device).map_err(error_of(call))?;
        }
        Ok(state)
    }

    /// As [`Machine::enter`], for a call that is not part of the trait.
    pub(crate) fn enter_named(
        &self,
        call: &'static str,
        device: DeviceId,
    ) -> Result<StateGuard<'_>> {
        if device_code::is_running() {
            return Err(codes::error(call, codes::NOT_PERMITTED));
        }
        let mut state = self.advance_time(self.lock());
        state.device(device).map_err(|code| codes::error(call, code))?;
        Ok(state)
    }

    fn advance_time<'a>(&'a self, mut state: StateGuard<'a>) -> StateGuard<'a> {
        match self.config.schedule {
            Schedule::Seeded(_) if state.queued > 0 => {
                state.calls_since_run += 1;
                if state.calls_since_run < self.config.pace {
                    return state;
                }
                state.calls_since_run = 0;
                self.run_random_items(state)
            }
            _ => state,
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        reporting::unregister(self.machine_id);
        self.report();
    }
}

/// Returns the line of the program that a call is made for: the entered one, or the caller's own.
#[track_caller]
pub(crate) fn caller_site() -> Site {
    let _entered = site::enter();
    site::current()
}
