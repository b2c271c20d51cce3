//! Atomics and locks: those of the standard library, or loom's for model checking.

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{Mutex, MutexGuard, atomic},
    thread::yield_now,
};

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Mutex, MutexGuard, atomic},
    thread::{yield_now, yield_now as spin_loop},
};

use std::{
    sync::{PoisonError, TryLockError},
    time::Instant,
};

/// Locks a mutex, and ignores poisoning: no critical section here leaves its data half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks a mutex if it is free.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Orders a write of one atomic before a read of another, where another thread does the reverse: at
/// least one of the two sees the other's write. The accesses themselves are sequentially consistent
/// and the first is a read-modify-write, which suffices in the real memory model. Loom models them
/// as weaker and needs the fence.
#[inline]
pub(crate) fn store_load_fence() {
    #[cfg(loom)]
    atomic::fence(atomic::Ordering::SeqCst);
}

/// A parking place for the thread that created it. A wakeup before the sleep is not lost.
#[derive(Debug)]
pub(crate) struct Parker {
    #[cfg(not(loom))]
    thread: std::thread::Thread,
    // Under loom, unparking a thread that waits for a lock would let it enter without the lock.
    #[cfg(loom)]
    woken: loom::sync::Notify,
}

impl Parker {
    pub(crate) fn new() -> Self {
        Self {
            #[cfg(not(loom))]
            thread: std::thread::current(),
            #[cfg(loom)]
            woken: loom::sync::Notify::new(),
        }
    }

    /// Sleeps until it is woken or `until` is reached. May wake spuriously.
    pub(crate) fn park(&self, until: Option<Instant>) {
        #[cfg(not(loom))]
        match until {
            None => std::thread::park(),
            Some(until) => {
                std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
            }
        }
        // Deadlines are not modelled under loom.
        #[cfg(loom)]
        if until.is_none() {
            self.woken.wait();
        }
    }

    pub(crate) fn unpark(&self) {
        #[cfg(not(loom))]
        self.thread.unpark();
        #[cfg(loom)]
        self.woken.notify();
    }
}
