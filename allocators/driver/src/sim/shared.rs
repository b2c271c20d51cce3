//! What every face of the simulator shares, and how a call comes in.

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
    /// Tells it from every other machine of the process.
    pub(crate) machine: u64,
    pub(crate) stalls: Arc<Stalls>,
    /// Whether the oracle looks. The state's own flag is the same; this one is read without the
    /// lock.
    pub(crate) watched: AtomicBool,
    pub(crate) on_violation: OnViolation,
    /// The process that made it: a child that it forks has nothing to report.
    process: u32,
    modelled: AtomicU64,
    costs: Costs,
    state: Mutex<State>,
    /// Something has run, or can run now.
    pub(crate) changed: Condvar,
}

impl fmt::Debug for Shared {
    /// What is simulated, and not all that it remembers: every pool that is printed prints its
    /// driver.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sim")
            .field("devices", &self.config.devices.len())
            .field("mode", &self.config.mode)
            .field("schedule", &self.config.schedule)
            .finish_non_exhaustive()
    }
}

/// Machines made so far.
static MACHINES: AtomicU64 = AtomicU64::new(0);

/// The machine, locked.
pub(crate) type Guard<'a> = MutexGuard<'a, State>;

/// Makes an error of a call out of its code.
pub(crate) fn at(call: Call) -> impl Fn(u32) -> DriverError {
    move |code| codes::error(call.name(), code)
}

impl Shared {
    pub(crate) fn new(mut config: SimConfig) -> Self {
        let store = match config.mode {
            Mode::Symbolic => Store::symbolic(),
            Mode::Bytes => Store::bytes().unwrap_or_else(|_| {
                // A system without files in memory can still check who touches what. The
                // configuration says so.
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

    /// The state. A panic of another thread while it held this left it whole: closures never run
    /// under it.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes what has not been told to standard error. Whether there was anything.
    pub(crate) fn report(&self) -> bool {
        self.report_of(self.lock())
    }

    /// The same when the process ends, where another thread may keep the lock for good.
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

    /// Panics where violations are to, and there are some that have not been told. Never called by
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

    /// Waits until something has run.
    pub(crate) fn wait<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// A counted call comes in: counted, held up, refused where a test wants that, and given the
    /// time that passes at each call. `device` is refused if it is not there, or lost.
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

    /// The same for something that is no call of the trait's.
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

    /// Adds what a call costs.
    pub(crate) fn cost(&self, call: Call, bytes: u64) {
        self.modelled.fetch_add(self.costs.of(call, bytes), Ordering::Relaxed);
    }

    /// Adds what opening a mapping to so many peers costs.
    pub(crate) fn cost_of_opening(&self, bytes: u64, peers: u32) {
        self.modelled.fetch_add(self.costs.opening(bytes, peers), Ordering::Relaxed);
    }

    /// What all calls so far have cost, in nanoseconds.
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

/// The line of the program that a call is made for: the one entered, or the caller's own.
#[track_caller]
pub(crate) fn here() -> &'static Location<'static> {
    let _entered = site::enter();
    site::current()
}
