//! Process-wide locks that stay consistent across forks.
//!
//! A child of a fork has one thread. A lock that another thread of the parent held at that moment
//! would stay locked in the child forever, and its data could be half changed. So a fork first
//! takes all these locks, and parent and child release them afterwards (`pthread_atfork`), as the C
//! library does with the locks of `malloc`. Locks of one pool, stager or crew need no such care,
//! because a child must not touch these objects (see [`Process`](super::Process)).
#![expect(unsafe_code, reason = "has the C library tell of forks")]

use nix::libc;
use std::{
    cell::Cell,
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// The process-wide locks in lock order. A thread that holds one may take only later ones, because
/// memory for a list may come from a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    /// Cores of closed pools with pending blocks.
    Lingering,
    /// Cores without a pool.
    Shells,
    /// Regions that wait for a quiet point.
    Retired,
    /// Regions that the driver or the kernel could not release.
    Stranded,
    /// Registered pages.
    Claims,
    /// Addresses of regions.
    Window,
    /// Thread numbers.
    Threads,
}

const LOCKS: usize = Of::Threads as usize + 1;

/// In lock order.
static TAKEN: [Mutex<()>; LOCKS] = [const { Mutex::new(()) }; LOCKS];

type Taken = MutexGuard<'static, ()>;

thread_local! {
    /// All guards, while this thread forks. Const and without a destructor, so nothing is
    /// allocated.
    static FORKING: Cell<Option<ManuallyDrop<[Taken; LOCKS]>>> = const { Cell::new(None) };
}

fn take(of: usize) -> Taken {
    TAKEN[of].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value behind a lock that no fork can interrupt, from the first use of any such lock.
pub(crate) struct AcrossForks<T> {
    of: Of,
    /// Locked only under the lock of `of`, so that a child also finds it unlocked.
    value: Mutex<T>,
}

impl<T> AcrossForks<T> {
    pub(crate) const fn new(of: Of, value: T) -> Self {
        Self { of, value: Mutex::new(value) }
    }

    /// Takes the lock. Blocks until it is free. Ignores poisoning: the value is consistent after a
    /// panic.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        tell_of_forks();
        let lock = take(self.of as usize);
        Guard { value: self.value.lock().unwrap_or_else(PoisonError::into_inner), _lock: lock }
    }
}

/// Its fields are dropped in this order: the value's guard first.
pub(crate) struct Guard<'a, T> {
    value: MutexGuard<'a, T>,
    _lock: Taken,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> fmt::Debug for AcrossForks<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("AcrossForks").field(&self.of).finish()
    }
}

/// Installs handlers before and after each fork. If the C library refuses, forks are not protected.
fn tell_of_forks() {
    static TOLD: OnceLock<()> = OnceLock::new();
    TOLD.get_or_init(|| {
        // Before a fork, the C library runs the handlers in reverse order of registration. A thread
        // that holds one of these locks may charge a budget, so the handlers of the budgets must be
        // registered first.
        aquifer_driver::forks::hold_budgets();
        // SAFETY: 1. both are valid for the whole life of the program. `after` may run in a child
        // of a process with threads: it only releases the locks of its own thread.
        let _told = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    FORKING.set(Some(ManuallyDrop::new(std::array::from_fn(take))));
}

unsafe extern "C" fn after() {
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}
