//! What threads share here: the standard atomics and locks, or loom's when every interleaving is
//! tried.

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

/// Enters, also where somebody has panicked inside: nothing here leaves its data half changed.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Enters if nobody is inside.
pub(crate) fn try_lock<T>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
    match mutex.try_lock() {
        Ok(inside) => Some(inside),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Between a write and a read of two atomics of which somebody else writes the second and reads the
/// first, so that one of both sees the other. The accesses are sequentially consistent by
/// themselves, and the first is a read-modify-write; loom takes them for weaker than they are.
#[inline]
pub(crate) fn between_write_and_read() {
    #[cfg(loom)]
    atomic::fence(atomic::Ordering::SeqCst);
}

/// Where one thread, its maker, sleeps until another wakes it. What wakes it before it sleeps is
/// not lost.
#[derive(Debug)]
pub(crate) struct Bed {
    #[cfg(not(loom))]
    thread: std::thread::Thread,
    // Loom's threads that are unparked while they wait for a lock believe that they have it.
    #[cfg(loom)]
    woken: loom::sync::Notify,
}

impl Bed {
    pub(crate) fn new() -> Self {
        Self {
            #[cfg(not(loom))]
            thread: std::thread::current(),
            #[cfg(loom)]
            woken: loom::sync::Notify::new(),
        }
    }

    /// Until it is woken or the moment has come, or for no reason.
    pub(crate) fn sleep(&self, until: Option<Instant>) {
        #[cfg(not(loom))]
        match until {
            None => std::thread::park(),
            Some(until) => {
                std::thread::park_timeout(until.saturating_duration_since(Instant::now()));
            }
        }
        // Nobody has a deadline in a model.
        #[cfg(loom)]
        if until.is_none() {
            self.woken.wait();
        }
    }

    pub(crate) fn wake(&self) {
        #[cfg(not(loom))]
        self.thread.unpark();
        #[cfg(loom)]
        self.woken.notify();
    }
}
