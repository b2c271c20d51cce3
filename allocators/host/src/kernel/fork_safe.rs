//! Process-wide locks that stay consistent across forks.
//!
//! A child of a fork has one thread. A lock that another thread of the parent held at that moment
//! would stay locked in the child forever, and its data could be half changed. So a fork first
//! takes all these locks, and parent and child release them afterwards (`pthread_atfork`), as the C
//! library does with the locks of `malloc`. Locks of one pool, stager or worker group need no such
//! care, because a child must not touch these objects (see [`Process`](super::Process)).
#![expect(unsafe_code, reason = "installs fork handlers")]

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
pub(crate) enum LockOrder {
    /// Cores of closed pools with pending blocks.
    Lingering,
    /// Cores without a pool.
    IdleCores,
    /// The machines of open pools.
    Open,
    /// Regions that wait for a quiet point.
    Retired,
    /// Regions that the driver or the kernel could not release.
    Stranded,
    /// Addresses of regions.
    Window,
    /// Thread numbers.
    Threads,
}

const LOCK_COUNT: usize = LockOrder::Threads as usize + 1;

/// In lock order.
static LOCK_TABLE: [Mutex<()>; LOCK_COUNT] = [const { Mutex::new(()) }; LOCK_COUNT];

type OrderGuard = MutexGuard<'static, ()>;

thread_local! {
    /// All guards, while this thread forks. Const and without a destructor, so nothing is
    /// allocated.
    static FORKING: Cell<Option<ManuallyDrop<[OrderGuard; LOCK_COUNT]>>> = const { Cell::new(None) };
}

fn acquire(index: usize) -> OrderGuard {
    LOCK_TABLE[index].lock().unwrap_or_else(PoisonError::into_inner)
}

/// A value behind a lock that no fork can interrupt, from the first use of any such lock.
pub(crate) struct ForkSafe<T> {
    order: LockOrder,
    /// Locked only under the lock of `of`, so that a child also finds it unlocked.
    value: Mutex<T>,
}

impl<T> ForkSafe<T> {
    pub(crate) const fn new(order: LockOrder, value: T) -> Self {
        Self { order, value: Mutex::new(value) }
    }

    /// Takes the lock. Blocks until it is free. Ignores poisoning: the value is consistent after a
    /// panic.
    pub(crate) fn lock(&self) -> ForkSafeGuard<'_, T> {
        install_handlers();
        let lock = acquire(self.order as usize);
        ForkSafeGuard {
            value: self.value.lock().unwrap_or_else(PoisonError::into_inner),
            _lock: lock,
        }
    }
}

/// Its fields are dropped in this order: the value's guard first.
pub(crate) struct ForkSafeGuard<'a, T> {
    value: MutexGuard<'a, T>,
    _lock: OrderGuard,
}

impl<T> Deref for ForkSafeGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T> DerefMut for ForkSafeGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.value
    }
}

impl<T> fmt::Debug for ForkSafe<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ForkSafe").field(&self.order).finish()
    }
}

/// Installs handlers before and after each fork. If the C library refuses, forks are not protected.
fn install_handlers() {
    static INSTALLED: OnceLock<()> = OnceLock::new();
    INSTALLED.get_or_init(|| {
        // Before a fork, the C library runs the handlers in reverse order of registration. A thread
        // that holds one of these locks may charge a budget, so the handlers of the budgets must be
        // registered first.
        aquifer_driver::forks::hold_budgets();
        // SAFETY: 1. both are valid for the whole life of the program. `after_fork` may run in a
        // child of a process with threads: it only releases the locks of its own thread.
        let _installed =
            unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork)) };
    });
}

unsafe extern "C" fn before_fork() {
    FORKING.set(Some(ManuallyDrop::new(std::array::from_fn(acquire))));
}

unsafe extern "C" fn after_fork() {
    drop(FORKING.take().map(ManuallyDrop::into_inner));
}
