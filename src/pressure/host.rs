//! The host watch: how close the process is to the limits of its control groups and nodes, and the
//! reaction to it.
//!
//! Pinned memory is released by unregistering it. This waits for the device and stalls launches. So
//! a shortage only records how much is to be released. It is released when the program reports that
//! nothing is being launched ([`Runtime::quiet_point`](crate::Runtime::quiet_point)), or at once if
//! stalls are allowed. The growth of pinned pools is limited at once: populating memory beyond a
//! group's limit kills the process instead of returning an error.

use super::{
    Ceiling,
    report::{HostPressure, HostReading, Level, Pressure},
    watch_thread::{Next, WatchThread},
};
use aquifer_core::{MemoryError, Result};
use aquifer_host::{
    PinnedPool,
    kernel::Kernel,
    topology::{Found, Topology, TopologyError},
};
use std::{
    fmt,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The interval of readings while the level is nominal.
const NOMINAL_INTERVAL: Duration = Duration::from_secs(1);
/// The interval of readings at higher levels.
const PRESSURE_INTERVAL: Duration = Duration::from_millis(250);
/// Consecutive readings with a lower result after which the level falls by one.
const CALM_READINGS: u32 = 4;
/// Below this share left, in per cent, the level is [`Level::Warning`].
const WARNING_LEFT: u64 = 10;
/// Below this share left, in per cent, the level is [`Level::Critical`]. Pinned pools do not grow
/// into this share.
const CRITICAL_LEFT: u64 = 5;
/// How much more than the threshold has to be left before the level falls again, in per cent.
const SLACK: u64 = 2;
/// How long reclaimers other than our pools may take.
const RECLAIM_TIMEOUT: Duration = Duration::from_millis(100);

/// The hook that is called when the level of the host has changed. Its arguments are the old level,
/// the new level and the reading. It runs on the watch thread, with no lock held. A panic is
/// counted and otherwise ignored.
type HostHook = dyn Fn(Level, Level, &Found<u64>) + Send + Sync;

/// What is done when host memory is scarce.
///
/// The level is [`Level::Warning`] if less than 10 per cent of the host's memory is left, or of the
/// tightest limit of the process's control groups, and [`Level::Critical`] below 5 per cent.
///
/// ```
/// use aquifer::{Runtime, pressure::{HostWatch, Level}, sim::Sim};
/// let watch = HostWatch::default().on_level(|_, level, _| {
///     if level > Level::Nominal {
///         println!("evict, or spill");
///     }
/// });
/// let rt = Runtime::builder().driver(Sim::h200(1).driver()).watch_host(watch).build()?;
/// assert!(rt.pressure().host.is_some());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Default)]
#[non_exhaustive]
pub struct HostWatch {
    /// Whether pinned memory is released at once when the level is critical, although that stalls
    /// the devices. Default `false`. Without a device nothing stalls, and memory is released at
    /// once in any case.
    pub may_stall: bool,
    hook: Option<Arc<HostHook>>,
}

impl HostWatch {
    /// Calls `hook` when the level has changed. Replaces a hook set before.
    #[must_use]
    pub fn on_level(
        mut self,
        hook: impl Fn(Level, Level, &Found<u64>) + Send + Sync + 'static,
    ) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }
}

/// Returns the level for one reading alone. `now` is the current level: falling below it takes some
/// slack.
fn level_of(now: Level, total: u64, left: Option<u64>) -> Level {
    let below = |share: u64, at: Level| {
        let share = if now >= at { share + SLACK } else { share };
        left.is_some_and(|left| left < total / 100 * share)
    };
    if below(CRITICAL_LEFT, Level::Critical) {
        Level::Critical
    } else if below(WARNING_LEFT, Level::Warning) {
        Level::Warning
    } else {
        Level::Nominal
    }
}

impl fmt::Debug for HostWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostWatch")
            .field("may_stall", &self.may_stall)
            .field("hook", &self.hook.is_some())
            .finish()
    }
}

/// State between readings.
#[derive(Clone, Copy, Debug)]
struct LevelState {
    level: Level,
    /// Consecutive readings below the level.
    calm: u32,
}

/// The result of a reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Assessment {
    level: Level,
    /// Bytes that are to be released.
    wanted: u64,
}

impl LevelState {
    fn start() -> Self {
        Self { level: Level::Nominal, calm: 0 }
    }

    /// Evaluates a reading. The level rises at once. It falls by one after [`CALM_READINGS`]
    /// consecutive lower readings.
    fn assess(&mut self, total: u64, left: Option<u64>) -> Assessment {
        let level = level_of(self.level, total, left);
        if level < self.level {
            self.calm += 1;
            if self.calm >= CALM_READINGS {
                self.level = lower(self.level);
                self.calm = 0;
            }
        } else {
            (self.level, self.calm) = (level, 0);
        }
        let per_cent = |share: u64| total / 100 * share;
        let short = left.map_or(0, |left| per_cent(WARNING_LEFT + SLACK).saturating_sub(left));
        let wanted = match self.level {
            Level::Nominal => 0,
            Level::Warning => short,
            Level::Critical => u64::MAX,
        };
        Assessment { level: self.level, wanted }
    }
}

fn lower(level: Level) -> Level {
    match level {
        Level::Critical => Level::Warning,
        Level::Warning | Level::Nominal => Level::Nominal,
    }
}

/// Pinned memory that is released for the host.
#[derive(Clone)]
struct PinnedMemory {
    /// The budget above all pinned memory.
    ceiling: Ceiling,
    pools: Vec<PinnedPool>,
}

impl PinnedMemory {
    /// Releases up to `bytes`. Waits for the devices.
    fn release(&self, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        let budget = self.ceiling.budget();
        let before = budget.used();
        // Free slots and caches return to the pools first, so that their regions can be released.
        budget.reclaim(bytes, Instant::now().checked_add(RECLAIM_TIMEOUT), None);
        let (mut released, mut failed) = (before.saturating_sub(budget.used()), None);
        for pool in &self.pools {
            let missing = bytes.saturating_sub(released);
            if missing == 0 {
                break;
            }
            // Regions are released whole. If none is small enough, more than the missing bytes is
            // released.
            let some = pool.stats().memory.cached.saturating_sub(missing);
            for keep in [usize::try_from(some).unwrap_or(usize::MAX), 0] {
                if released >= bytes {
                    break;
                }
                match pool.trim(keep) {
                    Ok(bytes) => released += bytes,
                    Err(error) => failed = Some(error),
                }
            }
        }
        failed.filter(|_| released == 0).map_or(Ok(released), Err)
    }
}

/// Watches the host until it is dropped.
pub(crate) struct WatchedHost {
    _watch: WatchThread,
    pinned: PinnedMemory,
    status: Arc<Mutex<HostStatus>>,
}

/// What was read and done, and when.
#[derive(Default)]
struct HostStatus {
    report: HostPressure,
    last_reading: Option<(Found<u64>, Instant)>,
}

impl WatchedHost {
    /// Starts the watch on a thread.
    ///
    /// # Errors
    /// The system's error, if no more threads can be had.
    pub(crate) fn start(
        kernel: &Kernel,
        topology: Arc<Topology>,
        watch: HostWatch,
        ceiling: Ceiling,
        pools: Vec<PinnedPool>,
    ) -> Result<Self> {
        let status = Arc::new(Mutex::new(HostStatus::default()));
        let pinned = PinnedMemory { ceiling, pools };
        let mut monitor = HostMonitor {
            watch,
            topology,
            state: LevelState::start(),
            pinned: pinned.clone(),
            status: status.clone(),
        };
        let watch = WatchThread::start(kernel, "aq-host", move |_| match monitor.read() {
            Ok(pause) => Next::After(pause),
            Err(error) => {
                // Lifted before the end is reported: from here nothing limits pinned memory.
                monitor.pinned.ceiling.lift();
                lock(&monitor.status).report.ended = Some(error);
                Next::Stop
            }
        });
        Ok(Self { _watch: watch.map_err(MemoryError::System)?, pinned, status })
    }

    /// Returns whether pinned memory should be released.
    pub(crate) fn is_short(&self) -> bool {
        lock(&self.status).report.wanted > 0
    }

    /// Releases the bytes that the last reading called for. Waits for the devices.
    ///
    /// # Errors
    /// The error of the driver or of the kernel, if nothing could be released.
    pub(crate) fn release_wanted(&self) -> Result<u64> {
        let wanted = std::mem::take(&mut lock(&self.status).report.wanted);
        let released = self.pinned.release(wanted)?;
        lock(&self.status).report.given_back += released;
        Ok(released)
    }

    pub(crate) fn report(&self, pressure: &mut Pressure) {
        let status = lock(&self.status);
        let mut report = status.report.clone();
        let reading = |(headroom, at): &(Found<u64>, Instant)| HostReading {
            headroom: headroom.clone(),
            age: at.elapsed(),
        };
        report.reading = status.last_reading.as_ref().map(reading);
        pressure.host = Some(report);
    }
}

/// The state of the watch thread.
struct HostMonitor {
    watch: HostWatch,
    topology: Arc<Topology>,
    state: LevelState,
    pinned: PinnedMemory,
    status: Arc<Mutex<HostStatus>>,
}

impl HostMonitor {
    fn read(&mut self) -> std::result::Result<Duration, TopologyError> {
        let total = self.topology.host_memory()?.unwrap_or(0);
        let before = self.state.level;
        let ceiling = &self.pinned.ceiling;
        let critical = total / 100 * CRITICAL_LEFT;
        // The figure is read within `follow`, so that the ceiling matches the count of that moment.
        let headroom = ceiling.follow(critical, || {
            let headroom = self.topology.headroom()?;
            let left = headroom.value.unwrap_or(u64::MAX);
            Ok::<_, TopologyError>((headroom, left))
        })?;
        let left = headroom.value;
        let Assessment { level, wanted } = self.state.assess(total, left);
        {
            let mut status = lock(&self.status);
            status.report.looks += 1;
            status.report.rises += u64::from(level > before);
            status.report.level = level;
            status.report.wanted = wanted;
            status.last_reading = Some((headroom.clone(), Instant::now()));
        }
        if level != before {
            self.call_hook(before, level, &headroom);
        }
        if level == Level::Critical && self.watch.may_stall {
            let released = self.pinned.release(wanted).unwrap_or(0);
            lock(&self.status).report.given_back += released;
        }
        Ok(if level == Level::Nominal { NOMINAL_INTERVAL } else { PRESSURE_INTERVAL })
    }

    fn call_hook(&self, before: Level, level: Level, headroom: &Found<u64>) {
        let Some(hook) = &self.watch.hook else { return };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| hook(before, level, headroom))) {
            // The payload is leaked, since dropping it may panic again.
            let _leaked = ManuallyDrop::new(panic);
            lock(&self.status).report.panics += 1;
        }
    }
}

impl Drop for HostMonitor {
    /// Pinned pools outlive the watch and must not stay limited by its last reading.
    fn drop(&mut self) {
        self.pinned.ceiling.lift();
    }
}

fn lock(status: &Mutex<HostStatus>) -> MutexGuard<'_, HostStatus> {
    status.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: u64 = 1000 << 20;

    #[test]
    fn what_is_left_raises_the_level_at_once_and_it_falls_stepwise_after_calm_readings() {
        use Level::{Critical, Nominal, Warning};
        // Each step: the share left in per cent, and the level after it.
        for (name, steps) in [
            ("little is left", vec![(50, Nominal), (9, Warning)]),
            ("hardly any is left", vec![(4, Critical)]),
            ("the edge itself is none", vec![(10, Nominal)]),
            (
                "within the slack it stays, and beyond it falls after four readings",
                [vec![(9, Warning)], vec![(11, Warning); 8], vec![(12, Warning); 3]]
                    .concat()
                    .into_iter()
                    .chain([(12, Nominal)])
                    .collect(),
            ),
            (
                "by one at a time",
                [vec![(4, Critical)], vec![(50, Critical); 3], vec![(50, Warning); 4]]
                    .concat()
                    .into_iter()
                    .chain([(50, Nominal)])
                    .collect(),
            ),
            (
                "a reading that is not calm restarts the count",
                [vec![(9, Warning)], vec![(50, Warning); 2], vec![(9, Warning)]]
                    .concat()
                    .into_iter()
                    .chain([(50, Warning), (50, Warning), (50, Warning), (50, Nominal)])
                    .collect(),
            ),
        ] {
            let mut state = LevelState::start();
            for (step, (left, level)) in steps.into_iter().enumerate() {
                let assessment = state.assess(ALL, Some(ALL / 100 * left));
                assert_eq!(assessment.level, level, "{name}, step {step}");
            }
        }
    }

    #[test]
    fn the_missing_bytes_are_wanted_and_all_bytes_if_the_level_is_critical() {
        let wanted = |left: Option<u64>| {
            let left = left.map(|share| ALL / 100 * share);
            LevelState::start().assess(ALL, left).wanted
        };
        assert_eq!(wanted(Some(50)), 0);
        assert_eq!(wanted(Some(9)), ALL / 100 * 3, "up to where the level falls");
        assert_eq!(wanted(Some(1)), u64::MAX);
        assert_eq!(wanted(None), 0, "an unknown figure is no pressure");
    }
}
