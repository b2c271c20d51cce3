//! Fault injection: which system call fails, and when.

use aquifer_core::SystemError;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// A system call that a [`Kernel`](super::Kernel) makes, by its purpose.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SystemCall {
    /// `mmap` of addresses without memory.
    Reserve,
    /// `mmap` of ordinary memory.
    Map,
    /// `mmap` of huge pages from the pool.
    MapHuge,
    /// `mmap` that releases memory.
    Unmap,
    /// `madvise(MADV_DONTFORK)`.
    DontFork,
    /// `madvise(MADV_DONTDUMP)`.
    DontDump,
    /// `madvise(MADV_HUGEPAGE)`.
    HugePage,
    /// `mbind`.
    Prefer,
    /// `madvise(MADV_POPULATE_WRITE)`.
    Populate,
    /// `move_pages`.
    Query,
    /// `sched_setaffinity`.
    Bind,
    /// `clone` of a thread.
    Spawn,
    /// `membarrier`.
    Barrier,
    /// `madvise(MADV_NOHUGEPAGE)`.
    NoHugePage,
    /// `madvise(MADV_REMOVE)`.
    Remove,
}

impl SystemCall {
    /// All calls.
    pub const ALL: [SystemCall; 15] = [
        Self::Reserve,
        Self::Map,
        Self::MapHuge,
        Self::Unmap,
        Self::DontFork,
        Self::DontDump,
        Self::HugePage,
        Self::Prefer,
        Self::Populate,
        Self::Query,
        Self::Bind,
        Self::Spawn,
        Self::Barrier,
        Self::NoHugePage,
        Self::Remove,
    ];

    /// Returns the name of the system call.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve | Self::Map | Self::MapHuge | Self::Unmap => "mmap",
            Self::DontFork
            | Self::DontDump
            | Self::HugePage
            | Self::NoHugePage
            | Self::Remove
            | Self::Populate => "madvise",
            Self::Prefer => "mbind",
            Self::Query => "move_pages",
            Self::Bind => "sched_setaffinity",
            Self::Spawn => "clone",
            Self::Barrier => "membarrier",
        }
    }
}

/// A plan of failures, shared with the [`Kernel`](super::Kernel) that follows it.
///
/// ```
/// use aquifer_host::kernel::{Faults, Kernel, SystemCall};
/// use std::{num::NonZeroUsize, sync::Arc};
/// let faults = Arc::new(Faults::new());
/// let kernel = Kernel::with_faults(faults.clone());
/// faults.fail(SystemCall::Reserve, 1, 12);
/// assert_eq!(kernel.reserve(NonZeroUsize::MIN).unwrap_err().errno, 12);
/// ```
#[derive(Debug, Default)]
pub struct Faults {
    plan: Mutex<FaultPlan>,
}

#[derive(Debug, Default)]
struct FaultPlan {
    made: [u64; SystemCall::ALL.len()],
    faults: Vec<PlannedFault>,
    times: Vec<TimedCalls>,
}

/// Calls with a simulated duration.
#[derive(Clone, Copy, Debug)]
struct TimedCalls {
    call: SystemCall,
    first: u64,
    last: u64,
    time: Duration,
}

#[derive(Clone, Copy, Debug)]
struct PlannedFault {
    call: SystemCall,
    /// The calls of this kind that fail, as numbers that count all calls of this kind.
    first: u64,
    last: u64,
    errno: i32,
}

impl Faults {
    /// Creates a plan without failures.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the `nth` call of this kind from now on fail with `errno`. 1 is the next call.
    pub fn fail(&self, call: SystemCall, nth: u64, errno: i32) {
        let mut plan = self.lock();
        let at = plan.made[call as usize].saturating_add(nth);
        plan.faults.push(PlannedFault { call, first: at, last: at, errno });
    }

    /// Makes the `nth` call of this kind from now on, and all after it, fail with `errno`.
    pub fn fail_from(&self, call: SystemCall, nth: u64, errno: i32) {
        let mut plan = self.lock();
        let first = plan.made[call as usize].saturating_add(nth);
        plan.faults.push(PlannedFault { call, first, last: u64::MAX, errno });
    }

    /// Makes the next `count` calls of this kind report the duration `time`, after those planned
    /// before. The calls do not wait. Only populating reports a duration.
    pub fn seem_to_take(&self, call: SystemCall, count: u64, time: Duration) {
        let mut plan = self.lock();
        let planned =
            plan.times.iter().filter(|timed| timed.call == call).map(|timed| timed.last).max();
        let before = plan.made[call as usize].max(planned.unwrap_or(0));
        plan.times.push(TimedCalls {
            call,
            first: before + 1,
            last: before.saturating_add(count),
            time,
        });
    }

    /// Removes everything that is planned. The counts stay.
    pub fn clear(&self) {
        let mut plan = self.lock();
        plan.faults.clear();
        plan.times.clear();
    }

    /// Returns the number of calls of this kind, including failures.
    #[must_use]
    pub fn made(&self, call: SystemCall) -> u64 {
        self.lock().made[call as usize]
    }

    /// Counts a call. Returns its simulated duration, if any, or the failure planned for it.
    pub(super) fn intercept(&self, call: SystemCall) -> Result<Option<Duration>, SystemError> {
        let mut plan = self.lock();
        plan.made[call as usize] += 1;
        let number = plan.made[call as usize];
        let hit =
            plan.faults.iter().find(|f| f.call == call && (f.first..=f.last).contains(&number));
        if let Some(fault) = hit {
            return Err(SystemError { call: call.name(), errno: fault.errno });
        }
        let timed =
            plan.times.iter().find(|t| t.call == call && (t.first..=t.last).contains(&number));
        Ok(timed.map(|timed| timed.time))
    }

    fn lock(&self) -> MutexGuard<'_, FaultPlan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
