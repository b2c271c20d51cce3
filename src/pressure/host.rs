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
    report::{HostPressure, HostReading, Pressure},
    thread::{Next, Watch},
};
use aquifer_core::{MemoryError, Result, budget::Level};
use aquifer_host::{
    PinnedPool,
    kernel::{Kernel, StallAlarm},
    topology::{GroupEvents, Stalls, Strain, Topology, TopologyError},
};
use std::{
    fmt,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// The interval of readings while the level is nominal.
const EASY: Duration = Duration::from_secs(1);
/// The interval of readings at higher levels.
const TENSE: Duration = Duration::from_millis(250);
/// Consecutive readings with a lower result after which the level falls by one.
const CALM: u32 = 4;
/// Stalls of this length within each `WITHIN` make the kernel signal at once. Unprivileged
/// processes need spans of two seconds.
const STALLED: Duration = Duration::from_millis(200);
const WITHIN: Duration = Duration::from_secs(2);
/// How long reclaimers other than our pools may take.
const PATIENCE: Duration = Duration::from_millis(100);

/// The hook that is called when the level of the host has changed. Its arguments are the old level,
/// the new level and the reading. It runs on the watch thread, with no lock held. A panic is
/// counted and otherwise ignored.
pub type HostHook = dyn Fn(Level, Level, &Strain) + Send + Sync;

/// The thresholds at which host memory counts as scarce. Shares are of the host's memory, or of the
/// tightest limit of the process's control groups.
///
/// ```
/// use aquifer::{Runtime, base::budget::Level, pressure::HostWatch, sim::Sim};
/// let watch = HostWatch::default().on_level(|_, level, _| {
///     if level > Level::Nominal {
///         println!("evict, or spill");
///     }
/// });
/// let rt = Runtime::builder().driver(Sim::h200(1).driver()).watch_host(watch).build()?;
/// assert!(rt.pressure().host.is_some());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct HostWatch {
    /// Below this share left, in per cent, the level is [`Level::Warning`]. Default 10.
    pub warning_left: u64,
    /// Below this share left, in per cent, the level is [`Level::Critical`]. Pinned pools do not
    /// grow into this share. Default 5.
    pub critical_left: u64,
    /// How much more than the threshold has to be left before the level falls again, in per cent.
    /// Default 2.
    pub slack: u64,
    /// The share of the last ten seconds in which some thread waited for memory, in per cent, from
    /// which the level is a warning. Default 10.
    pub some_stalls: u32,
    /// The share of the last ten seconds in which all threads waited for memory, in per cent, from
    /// which the level is critical. Default 10.
    pub full_stalls: u32,
    /// Whether pinned memory is released at once when the level is critical, although that stalls
    /// the devices. Default `false`. Without a device nothing stalls, and memory is released at
    /// once in any case.
    pub may_stall: bool,
    hook: Option<Arc<HostHook>>,
}

impl Default for HostWatch {
    fn default() -> Self {
        Self {
            warning_left: 10,
            critical_left: 5,
            slack: 2,
            some_stalls: 10,
            full_stalls: 10,
            may_stall: false,
            hook: None,
        }
    }
}

impl HostWatch {
    /// Calls `hook` when the level has changed. Replaces a hook set before.
    #[must_use]
    pub fn on_level(
        mut self,
        hook: impl Fn(Level, Level, &Strain) + Send + Sync + 'static,
    ) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// Returns the level for one reading alone. `now` is the current level: falling below it takes
    /// some slack.
    fn level(
        &self,
        now: Level,
        all: u64,
        left: Option<u64>,
        grown: GroupEvents,
        told: &Told,
    ) -> Level {
        let per_cent = |share: u64| all / 100 * share;
        let below = |share: u64, at: Level| {
            let share = if now >= at { share + self.slack } else { share };
            left.is_some_and(|left| left < per_cent(share))
        };
        // The averages decay over ten seconds. A level ends when they fall to half of the
        // threshold.
        let stalled = |seen: u32, threshold: u32, at: Level| {
            let threshold = threshold * 100;
            threshold > 0 && seen >= if now >= at { threshold / 2 } else { threshold }
        };
        let Stalls { some, full, .. } = told.stalls;
        if below(self.critical_left, Level::Critical)
            || grown.max + grown.oom + grown.oom_kill > 0
            || stalled(full, self.full_stalls, Level::Critical)
        {
            Level::Critical
        } else if below(self.warning_left, Level::Warning)
            || grown.high > 0
            || told.alarm
            || stalled(some, self.some_stalls, Level::Warning)
        {
            Level::Warning
        } else {
            Level::Nominal
        }
    }
}

impl fmt::Debug for HostWatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostWatch")
            .field("warning_left", &self.warning_left)
            .field("critical_left", &self.critical_left)
            .field("slack", &self.slack)
            .field("some_stalls", &self.some_stalls)
            .field("full_stalls", &self.full_stalls)
            .field("may_stall", &self.may_stall)
            .field("hook", &self.hook.is_some())
            .finish()
    }
}

/// What a reading reports about stalls.
#[derive(Clone, Copy, Default, Debug)]
struct Told {
    stalls: Stalls,
    /// Whether the kernel's alarm was triggered.
    alarm: bool,
}

/// State between readings.
#[derive(Clone, Copy, Debug)]
struct Standing {
    level: Level,
    /// Consecutive readings below the level.
    calm: u32,
    events: Option<GroupEvents>,
}

/// The result of a reading.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Verdict {
    level: Level,
    /// Bytes that are to be released.
    wanted: u64,
}

impl Standing {
    fn start() -> Self {
        Self { level: Level::Nominal, calm: 0, events: None }
    }

    /// Evaluates a reading. The level rises at once. It falls by one after [`CALM`] consecutive
    /// lower readings.
    fn judge(&mut self, watch: &HostWatch, all: u64, strain: &Strain, alarm: bool) -> Verdict {
        let events = strain.events.value;
        let grown = self
            .events
            .zip(events)
            .map_or(GroupEvents::default(), |(before, now)| grown(before, now));
        self.events = events;
        let left = strain.headroom.bytes.value;
        let told = Told { stalls: strain.stalls.value.unwrap_or_default(), alarm };
        let seen = watch.level(self.level, all, left, grown, &told);
        if seen < self.level {
            self.calm += 1;
            if self.calm >= CALM {
                self.level = lower(self.level);
                self.calm = 0;
            }
        } else {
            (self.level, self.calm) = (seen, 0);
        }
        let per_cent = |share: u64| all / 100 * share;
        let short =
            left.map_or(0, |left| per_cent(watch.warning_left + watch.slack).saturating_sub(left));
        let wanted = match self.level {
            Level::Nominal => 0,
            // Memory is scarce although enough is left: other processes stall, and releasing ours
            // eases that.
            Level::Warning => short.max(per_cent(1)),
            Level::Critical => u64::MAX,
        };
        Verdict { level: self.level, wanted }
    }
}

fn grown(before: GroupEvents, now: GroupEvents) -> GroupEvents {
    let mut grown = GroupEvents::default();
    grown.high = now.high.saturating_sub(before.high);
    grown.max = now.max.saturating_sub(before.max);
    grown.oom = now.oom.saturating_sub(before.oom);
    grown.oom_kill = now.oom_kill.saturating_sub(before.oom_kill);
    grown
}

fn lower(level: Level) -> Level {
    match level {
        Level::Critical => Level::Warning,
        Level::Warning | Level::Nominal => Level::Nominal,
    }
}

/// Pinned memory that is released for the host.
#[derive(Clone)]
struct Pinned {
    /// The budget above all pinned memory.
    ceiling: Ceiling,
    pools: Vec<PinnedPool>,
}

impl Pinned {
    /// Releases up to `bytes`. Waits for the devices.
    fn give(&self, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        let budget = self.ceiling.budget();
        let before = budget.used();
        // Free slots and caches return to the pools first, so that their regions can be released.
        budget.reclaim(bytes, Instant::now().checked_add(PATIENCE), None);
        let (mut given, mut failed) = (before.saturating_sub(budget.used()), None);
        for pool in &self.pools {
            let missing = bytes.saturating_sub(given);
            if missing == 0 {
                break;
            }
            // Regions are released whole. If none is small enough, more than the missing bytes is
            // released.
            let some = pool.stats().memory.cached.saturating_sub(missing);
            for keep in [usize::try_from(some).unwrap_or(usize::MAX), 0] {
                if given >= bytes {
                    break;
                }
                match pool.trim(keep) {
                    Ok(bytes) => given += bytes,
                    Err(error) => failed = Some(error),
                }
            }
        }
        failed.filter(|_| given == 0).map_or(Ok(given), Err)
    }
}

/// Watches the host until it is dropped.
pub(crate) struct WatchedHost {
    _watch: Watch,
    pinned: Pinned,
    seen: Arc<Mutex<Seen>>,
}

/// What was seen and done, and when.
#[derive(Default)]
struct Seen {
    report: HostPressure,
    read: Option<(Strain, Instant)>,
}

impl WatchedHost {
    /// Starts the watch on a thread.
    ///
    /// # Errors
    /// The system's error, if no more threads or files can be had.
    pub(crate) fn start(
        kernel: &Kernel,
        topology: Arc<Topology>,
        watch: HostWatch,
        ceiling: Ceiling,
        pools: Vec<PinnedPool>,
    ) -> Result<Self> {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let pinned = Pinned { ceiling, pools };
        let alarm = alarm(kernel, &topology);
        lock(&seen).report.alarmed = alarm.is_some();
        let mut looker = Looker {
            watch,
            topology,
            standing: Standing::start(),
            pinned: pinned.clone(),
            seen: seen.clone(),
        };
        let watch = Watch::start(kernel, "aq-host", alarm, move |_, woken| {
            if woken.over {
                lock(&looker.seen).report.alarmed = false;
            }
            match looker.look(woken.stalled) {
                Ok(pause) => Next::In(pause),
                Err(error) => {
                    // Lifted before the end is reported: from here nothing limits pinned memory.
                    looker.pinned.ceiling.lift();
                    lock(&looker.seen).report.ended = Some(error);
                    Next::Over
                }
            }
        });
        Ok(Self { _watch: watch.map_err(MemoryError::System)?, pinned, seen })
    }

    /// Returns whether pinned memory should be released.
    pub(crate) fn is_short(&self) -> bool {
        lock(&self.seen).report.wanted > 0
    }

    /// Releases the bytes that the last reading called for. Waits for the devices.
    ///
    /// # Errors
    /// The error of the driver or of the kernel, if nothing could be released.
    pub(crate) fn give_back(&self) -> Result<u64> {
        let wanted = std::mem::take(&mut lock(&self.seen).report.wanted);
        let given = self.pinned.give(wanted)?;
        lock(&self.seen).report.given_back += given;
        Ok(given)
    }

    pub(crate) fn report(&self, pressure: &mut Pressure) {
        let seen = lock(&self.seen);
        let mut report = seen.report.clone();
        let reading = |(strain, at): &(Strain, Instant)| HostReading {
            strain: strain.clone(),
            age: at.elapsed(),
        };
        report.reading = seen.read.as_ref().map(reading);
        pressure.host = Some(report);
    }
}

/// Returns an alarm on the first stall file that accepts one, the nearest group first.
fn alarm(kernel: &Kernel, topology: &Topology) -> Option<StallAlarm> {
    let files = topology.stall_files().unwrap_or_default();
    files.iter().find_map(|file| kernel.stall_alarm(file, STALLED, WITHIN).ok())
}

/// The state of the watch thread.
struct Looker {
    watch: HostWatch,
    topology: Arc<Topology>,
    standing: Standing,
    pinned: Pinned,
    seen: Arc<Mutex<Seen>>,
}

impl Looker {
    fn look(&mut self, alarm: bool) -> std::result::Result<Duration, TopologyError> {
        let all = self.topology.host_memory()?.value.unwrap_or(0);
        let before = self.standing.level;
        let ceiling = &self.pinned.ceiling;
        let critical = all / 100 * self.watch.critical_left;
        // The figure is read within `follow`, so that the ceiling matches the count of that moment.
        let strain = ceiling.follow(critical, || {
            let strain = self.topology.strain()?;
            let left = strain.headroom.bytes.value.unwrap_or(u64::MAX);
            Ok::<_, TopologyError>((strain, left))
        })?;
        let Verdict { level, wanted } = self.standing.judge(&self.watch, all, &strain, alarm);
        {
            let mut seen = lock(&self.seen);
            seen.report.looks += 1;
            seen.report.alarms += u64::from(alarm);
            seen.report.rises += u64::from(level > before);
            seen.report.level = level;
            seen.report.wanted = wanted;
            seen.read = Some((strain.clone(), Instant::now()));
        }
        if level != before {
            self.tell(before, level, &strain);
        }
        if level == Level::Critical && self.watch.may_stall {
            let given = self.pinned.give(wanted).unwrap_or(0);
            lock(&self.seen).report.given_back += given;
        }
        Ok(if level == Level::Nominal { EASY } else { TENSE })
    }

    fn tell(&self, before: Level, level: Level, strain: &Strain) {
        let Some(hook) = &self.watch.hook else { return };
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| hook(before, level, strain))) {
            // The payload is leaked, since dropping it may panic again.
            let _kept = ManuallyDrop::new(panic);
            lock(&self.seen).report.panics += 1;
        }
    }
}

impl Drop for Looker {
    /// Pinned pools outlive the watch and must not stay limited by its last reading.
    fn drop(&mut self) {
        self.pinned.ceiling.lift();
    }
}

fn lock(seen: &Mutex<Seen>) -> MutexGuard<'_, Seen> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use aquifer_host::topology::{Found, Headroom, Source};

    const ALL: u64 = 1000 << 20;

    /// A reading: the share left, `some` and `full`, each in per cent, and the counts of
    /// `memory.max` and `memory.high` events.
    #[derive(Clone, Copy)]
    struct Read(u64, u32, u32, u64, u64);

    fn strain(template: &Strain, Read(left, some, full, max, high): Read) -> Strain {
        let mut strain = template.clone();
        strain.headroom.bytes = Found::known(ALL / 100 * left, Source::Nobody);
        let mut stalls = Stalls::default();
        (stalls.some, stalls.full) = (some * 100, full * 100);
        strain.stalls = Found::known(stalls, Source::Nobody);
        let mut events = GroupEvents::default();
        (events.max, events.high) = (max, high);
        strain.events = Found::known(events, Source::Nobody);
        strain
    }

    fn any() -> Strain {
        let mut strain = Topology::read().unwrap().strain().unwrap();
        let Headroom { bytes, .. } = &mut strain.headroom;
        *bytes = Found::unknown(Source::Nobody);
        (strain.stalls, strain.events) =
            (Found::unknown(Source::Nobody), Found::unknown(Source::Nobody));
        strain
    }

    #[test]
    fn each_source_raises_the_level_at_once_and_it_falls_by_steps_after_some_calm() {
        use Level::{Critical, Nominal, Warning};
        let (watch, template) = (HostWatch::default(), any());
        let calm = Read(50, 0, 0, 0, 0);
        // Each step: a reading, whether the alarm went off, and the level after it.
        for (name, steps) in [
            ("little is left", vec![(calm, false, Nominal), (Read(9, 0, 0, 0, 0), false, Warning)]),
            ("hardly any is left", vec![(Read(4, 0, 0, 0, 0), false, Critical)]),
            ("the edge itself is none", vec![(Read(10, 0, 0, 0, 0), false, Nominal)]),
            ("some wait", vec![(Read(50, 10, 9, 0, 0), false, Warning)]),
            ("all wait", vec![(Read(50, 10, 10, 0, 0), false, Critical)]),
            ("the kernel tells", vec![(calm, true, Warning)]),
            ("counts of before", vec![(Read(50, 0, 0, 7, 9), false, Nominal)]),
            (
                "a limit is met",
                vec![
                    (Read(50, 0, 0, 7, 0), false, Nominal),
                    (Read(50, 0, 0, 8, 0), false, Critical),
                ],
            ),
            ("held up", vec![(calm, false, Nominal), (Read(50, 0, 0, 0, 1), false, Warning)]),
            (
                "within the slack it stays, and beyond it falls after four looks",
                [
                    vec![(Read(9, 0, 0, 0, 0), false, Warning)],
                    vec![(Read(11, 0, 0, 0, 0), false, Warning); 8],
                ]
                .concat()
                .into_iter()
                .chain([(Read(12, 0, 0, 0, 0), false, Warning); 3])
                .chain([(Read(12, 0, 0, 0, 0), false, Nominal)])
                .collect(),
            ),
            (
                "by one at a time",
                [(Read(4, 0, 0, 0, 0), false, Critical)]
                    .into_iter()
                    .chain([(calm, false, Critical); 3])
                    .chain([(calm, false, Warning); 4])
                    .chain([(calm, false, Nominal)])
                    .collect(),
            ),
            (
                "one that is no calm begins anew",
                vec![
                    (Read(9, 0, 0, 0, 0), false, Warning),
                    (calm, false, Warning),
                    (calm, false, Warning),
                    (calm, true, Warning),
                    (calm, false, Warning),
                    (calm, false, Warning),
                    (calm, false, Warning),
                    (calm, false, Nominal),
                ],
            ),
        ] {
            let mut standing = Standing::start();
            for (step, (read, alarm, level)) in steps.into_iter().enumerate() {
                let verdict = standing.judge(&watch, ALL, &strain(&template, read), alarm);
                assert_eq!(verdict.level, level, "{name}, step {step}");
            }
        }
    }

    #[test]
    fn what_is_wanted_is_what_is_missing_and_everything_when_critical() {
        let (watch, template) = (HostWatch::default(), any());
        let wanted = |read, alarm| {
            Standing::start().judge(&watch, ALL, &strain(&template, read), alarm).wanted
        };
        assert_eq!(wanted(Read(50, 0, 0, 0, 0), false), 0);
        assert_eq!(
            wanted(Read(9, 0, 0, 0, 0), false),
            ALL / 100 * 3,
            "up to where the level falls"
        );
        assert_eq!(wanted(Read(50, 0, 0, 0, 0), true), ALL / 100, "somebody else's stalls");
        assert_eq!(wanted(Read(1, 0, 0, 0, 0), false), u64::MAX);
        let unknown = Standing::start().judge(&watch, 0, &template, false);
        assert_eq!(unknown.wanted, 0, "what nobody knows is no pressure");
    }
}
