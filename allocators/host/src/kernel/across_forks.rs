//! Locks of the whole process's, and forks.
//!
//! A child of a fork has one thread. A lock that another thread of its parent had at that moment
//! would stay taken for ever there, and what it guards half changed. So a fork waits until nobody
//! has any of these, and both processes let go of them (`pthread_atfork`), as the C library does
//! with the locks of `malloc`. What belongs to one pool, stager or crew needs none of that: a child
//! may not touch it at all (see [`Process`](super::Process)).
#![expect(unsafe_code, reason = "has the C library tell of forks")]

use nix::libc;
use std::{
    cell::Cell,
    fmt,
    mem::ManuallyDrop,
    ops::{Deref, DerefMut},
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
};

/// What there is one of in a process. Whoever has one of these locks may take a later one, and
/// never an earlier one: memory for a list may come from a pool.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Of {
    /// Shells of closed pools with pending blocks.
    Lingering,
    /// Shells without a pool.
    Shells,
    /// Regions that wait for a quiet point.
    Retired,
    /// Regions that driver or kernel would not take back.
    Stranded,
    /// Pages that are registered.
    Claims,
    /// Addresses of regions.
    Window,
    /// Numbers of threads.
    Threads,
}

const LOCKS: usize = Of::Threads as usize + 1;

/// In their order.
static TAKEN: [Mutex<()>; LOCKS] = [const { Mutex::new(()) }; LOCKS];

type Taken = MutexGuard<'static, ()>;

thread_local! {
    /// All of them, while this thread forks. Const and without a destructor: nothing is allocated for it.
    static FORKING: Cell<Option<ManuallyDrop<[Taken; LOCKS]>>> = const { Cell::new(None) };
}

fn take(of: usize) -> Taken {
    TAKEN[of].lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a lock guards under which no fork happens, once somebody has taken one of them.
pub(crate) struct AcrossForks<T> {
    of: Of,
    /// Only taken with the lock, so that a child finds it free as well.
    value: Mutex<T>,
}

impl<T> AcrossForks<T> {
    pub(crate) const fn new(of: Of, value: T) -> Self {
        Self { of, value: Mutex::new(value) }
    }

    /// Blocks until nobody else has it. What it guards is whole, whoever panicked.
    pub(crate) fn lock(&self) -> Guard<'_, T> {
        tell_of_forks();
        let lock = take(self.of as usize);
        Guard { value: self.value.lock().unwrap_or_else(PoisonError::into_inner), _lock: lock }
    }
}

/// Ends in the order of its fields.
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

/// Has the C library call before and after each fork. Where it will not, forks are as they would be
/// without.
fn tell_of_forks() {
    static TOLD: OnceLock<()> = OnceLock::new();
    TOLD.get_or_init(|| {
        // The C library calls those first that it was told of last: a thread that holds one of
        // these may charge a budget.
        aquifer_driver::forks::hold_budgets();
        // SAFETY: 1. both are there as long as the program is. `after` may run in a child of a
        // process with threads: it lets go of what its thread has.
        let _told = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(after)) };
    });
}

unsafe extern "C" fn before() {
    FORKING.set(Some(ManuallyDrop::new(std::array::from_fn(take))));
}

unsafe extern "C" fn after() {
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}
