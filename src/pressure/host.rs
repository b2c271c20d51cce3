//! The host: how near the process is to the end of what its control groups and nodes leave it, and
//! what follows.
//!
//! Pinned memory is given back by unregistering it, which waits for the device and holds up
//! launches meanwhile. So a shortage only says how much is wanted; it is given back when the
//! program says that nothing is being launched
//! ([`Runtime::quiet_point`](crate::Runtime::quiet_point)), or at once where it may stall. What
//! pinned pools may grow by is limited at once: populating memory beyond a group's limit is a kill,
//! not an error.

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

/// Between looks while the level is nominal.
const EASY: Duration = Duration::from_secs(1);
/// Between looks while it is not.
const TENSE: Duration = Duration::from_millis(250);
/// Looks in a row that have to find less before the level falls, by one.
const CALM: u32 = 4;
/// Stalls of this length in each span make the kernel tell at once. Without privileges it takes
/// spans of two seconds.
const STALLED: Duration = Duration::from_millis(200);
const WITHIN: Duration = Duration::from_secs(2);
/// How long those who are not our pools may take to give back.
const PATIENCE: Duration = Duration::from_millis(100);

/// What is called when the level of the host has changed: the level before, the level now, and what
/// was read. It is called on the thread that looks, with no lock held; a panic is counted and
/// otherwise passed over.
pub type HostHook = dyn Fn(Level, Level, &Strain) + Send + Sync;

/// When host memory counts as scarce. Shares are of the host's memory, or of the tightest limit of
/// the process's control groups.
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
    /// Less left than this, in per cent, is [`Level::Warning`]. 10 unless set.
    pub warning_left: u64,
    /// Less left than this, in per cent, is [`Level::Critical`], and pinned pools do not grow into
    /// it. 5 unless set.
    pub critical_left: u64,
    /// How much more than that has to be left for the level to fall again, in per cent. 2 unless
    /// set.
    pub slack: u64,
    /// Of the last ten seconds, those in which some thread waited for memory, in per cent: as many
    /// or more are a warning. 10 unless set.
    pub some_stalls: u32,
    /// The same of those in which all threads did: as many or more are critical. 10 unless set.
    pub full_stalls: u32,
    /// Give pinned memory back at once when the level is critical, though that stalls the devices.
    /// Not unless set: without a device nothing stalls, and it is given back at once in any case.
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
    /// Calls `hook` when the level has changed, instead of what was to be called before.
    #[must_use]
    pub fn on_level(
        mut self,
        hook: impl Fn(Level, Level, &Strain) + Send + Sync + 'static,
    ) -> Self {
        self.hook = Some(Arc::new(hook));
        self
    }

    /// The level that one reading alone would make. `now` is the level that stands: leaving it
    /// takes some slack.
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
        // Stalls fade over ten seconds by themselves; half of the threshold is over.
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

/// What was heard of stalls.
#[derive(Clone, Copy, Default, Debug)]
struct Told {
    stalls: Stalls,
    /// The kernel's alarm went off.
    alarm: bool,
}

/// What stands between looks.
#[derive(Clone, Copy, Debug)]
struct Standing {
    level: Level,
    /// Looks in a row that found less than the level.
    calm: u32,
    events: Option<GroupEvents>,
}

/// What follows from a look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Verdict {
    level: Level,
    /// Bytes that are to be given back.
    wanted: u64,
}

impl Standing {
    fn start() -> Self {
        Self { level: Level::Nominal, calm: 0, events: None }
    }

    /// Takes a reading in. The level rises at once, and falls by one when some looks in a row have
    /// found less.
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
            // Scarce though enough is left: it is somebody else's stalls that our memory would
            // ease.
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

/// Pinned memory that gives way to the host.
#[derive(Clone)]
struct Pinned {
    /// Above all pinned memory.
    ceiling: Ceiling,
    pools: Vec<PinnedPool>,
}

impl Pinned {
    /// Gives back up to `bytes`. Waits for the devices.
    fn give(&self, bytes: u64) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        let budget = self.ceiling.budget();
        let before = budget.used();
        // Free slots and caches come back to the pools first, and go with their regions then.
        budget.reclaim(bytes, Instant::now().checked_add(PATIENCE), None);
        let (mut given, mut failed) = (before.saturating_sub(budget.used()), None);
        for pool in &self.pools {
            let missing = bytes.saturating_sub(given);
            if missing == 0 {
                break;
            }
            // Regions go whole: where none fits into what is missing, more than that goes.
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
    /// Starts to look at the host on a thread.
    ///
    /// # Errors
    /// The system's, where there may be no more threads or files.
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
                    // Before anybody is told: nothing limits pinned memory any more.
                    looker.pinned.ceiling.lift();
                    lock(&looker.seen).report.ended = Some(error);
                    Next::Over
                }
            }
        });
        Ok(Self { _watch: watch.map_err(MemoryError::System)?, pinned, seen })
    }

    /// Whether pinned memory should be given back.
    pub(crate) fn is_short(&self) -> bool {
        lock(&self.seen).report.wanted > 0
    }

    /// Gives back what is wanted. Waits for the devices.
    ///
    /// # Errors
    /// The driver's or the kernel's, where nothing could be given back.
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

/// The kernel's alarm at the nearest account of stalls that takes one.
fn alarm(kernel: &Kernel, topology: &Topology) -> Option<StallAlarm> {
    let files = topology.stall_files().unwrap_or_default();
    files.iter().find_map(|file| kernel.stall_alarm(file, STALLED, WITHIN).ok())
}

/// Who looks.
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
        // What is left is read within, so that the ceiling goes by the count of that moment.
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
            // What was thrown may throw again when it goes.
            let _kept = ManuallyDrop::new(panic);
            lock(&self.seen).report.panics += 1;
        }
    }
}

impl Drop for Looker {
    /// Pinned pools outlive the watch, and are not held by its last reading.
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

    /// A reading: what is left in per cent, `some` and `full` in per cent, and how often
    /// `memory.max` and `.high` were met.
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
        // One after another: a reading, whether the alarm went off, and the level after it.
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
