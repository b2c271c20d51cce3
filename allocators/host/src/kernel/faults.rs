//! Which system call fails when.

use aquifer_core::SystemError;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A system call that a [`Kernel`](super::Kernel) makes, by what it is for.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum SystemCall {
    /// `mmap` of addresses without memory.
    Reserve,
    /// `mmap` of ordinary memory.
    Map,
    /// `mmap` of huge pages from the pool.
    MapHuge,
    /// `mmap` that gives memory back.
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
}

impl SystemCall {
    /// Every call.
    pub const ALL: [SystemCall; 13] = [
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
    ];

    /// The kernel's name for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reserve | Self::Map | Self::MapHuge | Self::Unmap => "mmap",
            Self::DontFork | Self::DontDump | Self::HugePage | Self::Populate => "madvise",
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
    plan: Mutex<Plan>,
}

#[derive(Debug, Default)]
struct Plan {
    made: [u64; SystemCall::ALL.len()],
    faults: Vec<Fault>,
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    call: SystemCall,
    /// The calls of its kind that fail, counted from the first ever made.
    first: u64,
    last: u64,
    errno: i32,
}

impl Faults {
    /// No failures.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The `nth` call of this kind from now on fails with `errno`; 1 is the next.
    pub fn fail(&self, call: SystemCall, nth: u64, errno: i32) {
        let mut plan = self.lock();
        let at = plan.made[call as usize].saturating_add(nth);
        plan.faults.push(Fault { call, first: at, last: at, errno });
    }

    /// The `nth` call of this kind from now on fails with `errno`, and so do all after it.
    pub fn fail_from(&self, call: SystemCall, nth: u64, errno: i32) {
        let mut plan = self.lock();
        let first = plan.made[call as usize].saturating_add(nth);
        plan.faults.push(Fault { call, first, last: u64::MAX, errno });
    }

    /// Forgets every failure that is planned.
    pub fn clear(&self) {
        self.lock().faults.clear();
    }

    /// How often a call has been made, failures included.
    #[must_use]
    pub fn made(&self, call: SystemCall) -> u64 {
        self.lock().made[call as usize]
    }

    pub(super) fn ask(&self, call: SystemCall) -> Result<(), SystemError> {
        let mut plan = self.lock();
        plan.made[call as usize] += 1;
        let number = plan.made[call as usize];
        let hit = plan.faults.iter().find(|f| f.call == call && (f.first..=f.last).contains(&number));
        hit.map_or(Ok(()), |fault| Err(SystemError { call: call.name(), errno: fault.errno }))
    }

    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
