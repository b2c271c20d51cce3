//! What threads share here: the standard atomics and locks, or loom's when every interleaving is tried.

#[cfg(not(loom))]
pub(crate) use std::{
    hint::spin_loop,
    sync::{Mutex, MutexGuard, atomic},
    thread::{self, yield_now},
};

#[cfg(loom)]
pub(crate) use loom::{
    sync::{Mutex, MutexGuard, atomic},
    thread::{self, yield_now, yield_now as spin_loop},
};

use std::sync::{PoisonError, TryLockError};

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

/// Between a write and a read of two atomics of which somebody else writes the second and reads the first, so that one of
/// both sees the other. The accesses are sequentially consistent by themselves, and the first is a read-modify-write;
/// loom takes them for weaker than they are.
#[inline]
pub(crate) fn between_write_and_read() {
    #[cfg(loom)]
    atomic::fence(atomic::Ordering::SeqCst);
}
