//! What every face of the simulator shares, and how a call comes in.

use super::{
    codes,
    config::SimConfig,
    config::{Mode, Schedule},
    cost::Costs,
    faults::Stalls,
    inside,
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
    /// Whether the oracle looks. The state's own flag is the same; this one is read without the lock.
    pub(crate) watched: AtomicBool,
    modelled: AtomicU64,
    costs: Costs,
    state: Mutex<State>,
    /// Something has run, or can run now.
    pub(crate) changed: Condvar,
}

impl fmt::Debug for Shared {
    /// What is simulated, and not all that it remembers: every pool that is printed prints its driver.
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
                // A system without files in memory can still check who touches what. The configuration says so.
                config.mode = Mode::Symbolic;
                Store::symbolic()
            }),
        };
        Self {
            calls: CallCounts::new(),
            machine: MACHINES.fetch_add(1, Ordering::Relaxed),
            stalls: Arc::new(Stalls::default()),
            watched: AtomicBool::new(true),
            modelled: AtomicU64::new(0),
            costs: config.costs,
            state: Mutex::new(State::new(config.clone(), store)),
            changed: Condvar::new(),
            config,
        }
    }

    /// The state. A panic of another thread while it held this left it whole: closures never run under it.
    pub(crate) fn lock(&self) -> Guard<'_> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something has run.
    pub(crate) fn wait<'a>(&'a self, mut state: Guard<'a>) -> Guard<'a> {
        state.waiting += 1;
        let mut state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// A counted call comes in: counted, held up, refused where a test wants that, and given the time that passes at
    /// each call. `device` is refused if it is not there, or lost.
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

/// The line of the program that a call is made for: the one entered, or the caller's own.
#[track_caller]
pub(crate) fn here() -> &'static Location<'static> {
    let _entered = site::enter();
    site::current()
}
