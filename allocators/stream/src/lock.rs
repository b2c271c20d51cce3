//! A spin lock for short critical sections, such as those of a stream's cache.
//!
//! - It is held for tens of nanoseconds and is rarely contended, so waiters spin.
//! - Locking takes one atomic read-modify-write, and unlocking a plain store. A mutex also needs an
//!   atomic read-modify-write to unlock, because it must check for sleeping threads.
//! - An owner-biased lock without atomic read-modify-writes (`membarrier`) was rejected. It saves
//!   little here and costs more under contention.
//!
//! # Rule
//! **Never hold it across a driver call, a wait, or anything that can block or unwind into user
//! code.** [`Spin::with`] locks one value for one closure. [`Spin::lock_all`] locks several values,
//! for a figure of one instant.
#![expect(unsafe_code, reason = "a lock is a promise about a cell")]

use crate::sync::{
    UnsafeCell,
    atomic::{AtomicBool, Ordering},
};
use std::fmt;

/// A value behind a spin lock.
///
/// ```
/// use aquifer_stream::Spin;
/// let count = Spin::new(0u64);
/// std::thread::scope(|threads| {
///     for _ in 0..2 {
///         threads.spawn(|| (0..100).for_each(|_| count.with(|n| *n += 1)));
///     }
/// });
/// assert_eq!(count.with(|n| *n), 200);
/// ```
pub struct Spin<T> {
    /// True while a thread is inside [`Spin::with`].
    locked: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: 1. only `with` accesses the value, from one thread at a time. So sharing the lock shares
// no `&T`, and `T: Send` allows moving the value between threads.
unsafe impl<T: Send> Sync for Spin<T> {}
// SAFETY: 1. the lock owns its value.
unsafe impl<T: Send> Send for Spin<T> {}

impl<T> Spin<T> {
    /// Creates a lock around `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Creates a lock around `value`.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self { locked: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `work` with exclusive access to the value. Spins with growing pauses while another
    /// thread holds the lock.
    ///
    /// If `work` panics, the lock is released and the value stays as it is. So `work` must be
    /// short, and must leave the value consistent wherever it can unwind.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Unlock<'a>(&'a AtomicBool);
        impl Drop for Unlock<'_> {
            #[inline]
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        self.lock();
        let _unlock = Unlock(&self.locked);
        self.value.with_mut(|value| {
            // SAFETY: 1. this thread changed `locked` from false to true, and it stays true until
            // `_unlock` is dropped, so no other reference to the value exists.
            work(unsafe { &mut *value })
        })
    }

    /// Locks all values of the list, in its order, and holds them until the result is dropped: what
    /// is read of them is of one instant.
    ///
    /// Each lock may be in the list once. A thread that holds one of these locks, or two threads
    /// that lock the same values in different orders, wait for ever.
    ///
    /// ```
    /// use aquifer_stream::Spin;
    /// let (a, b) = (Spin::new(1u64), Spin::new(2u64));
    /// let mut sum = 0;
    /// Spin::lock_all(&[&a, &b]).for_each(|n| sum += *n);
    /// assert_eq!(sum, 3);
    /// ```
    pub fn lock_all<'a>(locks: &'a [&'a Self]) -> AllLocked<'a, T> {
        let mut all = AllLocked { locks, held: 0 };
        for lock in locks {
            lock.lock();
            all.held += 1;
        }
        all
    }

    #[inline]
    fn lock(&self) {
        if self.locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            self.lock_contended();
        }
    }

    #[cold]
    fn lock_contended(&self) {
        #[cfg(not(loom))]
        let backoff = crossbeam_utils::Backoff::new();
        loop {
            #[cfg(not(loom))]
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
            // Test with a plain load first, so that waiting threads share the cache line.
            if !self.locked.load(Ordering::Relaxed)
                && self
                    .locked
                    .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
        }
    }

    /// Returns the value. `&mut self` excludes all other access.
    #[cfg(not(loom))]
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// Returns the value. `&mut self` excludes all other access.
    #[cfg(loom)]
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: 1. `&mut self` excludes every other access.
        self.value.with_mut(|value| unsafe { &mut *value })
    }
}

/// Several locked values: see [`Spin::lock_all`]. Its drop unlocks them.
pub struct AllLocked<'a, T> {
    locks: &'a [&'a Spin<T>],
    /// The number of locks, from the first on, that this value has locked. Only less than all
    /// while it is made.
    held: usize,
}

impl<T> AllLocked<'_, T> {
    /// Calls `work` with exclusive access to each value, in the order of the list.
    pub fn for_each(&mut self, mut work: impl FnMut(&mut T)) {
        for lock in self.locks {
            lock.value.with_mut(|value| {
                // SAFETY: 1. `lock_all` has locked every lock of the list, and only the drop of
                // `self` unlocks them, so no other thread has a reference to the value. 2. `&mut
                // self` excludes another call, and a lock is in the list once, since the second
                // attempt to lock it would not have ended. So this thread has none either.
                work(unsafe { &mut *value });
            });
        }
    }
}

impl<T> Drop for AllLocked<'_, T> {
    fn drop(&mut self) {
        for lock in self.locks.iter().take(self.held) {
            lock.locked.store(false, Ordering::Release);
        }
    }
}

impl<T> fmt::Debug for AllLocked<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllLocked").field("locks", &self.locks.len()).finish_non_exhaustive()
    }
}

impl<T: Default> Default for Spin<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for Spin<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Spin(..)")
    }
}
