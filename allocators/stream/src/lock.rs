//! The lock in front of a stream's cache.
//!
//! It is held for tens of nanoseconds and hardly ever by two threads at once, so it spins. One locked instruction takes
//! it and a plain store gives it back: on x86 that is half of what a mutex costs, whose unlock is locked as well since
//! it must see whether somebody sleeps. A pair of an allocation and a free takes it twice, measured at 14–19 ns against
//! 29 with the standard library's mutex.
//!
//! **Never hold it over a driver call, a wait, or anything that can block or unwind into user code.** Its only door is
//! [`Spin::with`], so what happens under it can be read in one place each time.
#![expect(unsafe_code, reason = "a lock is a promise about a cell")]

use crate::sync::{
    UnsafeCell,
    atomic::{AtomicBool, Ordering},
};
use std::fmt;

/// A value behind a spin lock.
pub struct Spin<T> {
    /// True while a thread is inside [`Spin::with`].
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: 1. the value is reached by `with` alone, from one thread at a time, so sharing the lock shares no `&T`; moving
// the value between threads is what `T: Send` allows.
unsafe impl<T: Send> Sync for Spin<T> {}
// SAFETY: 1. owns its value.
unsafe impl<T: Send> Send for Spin<T> {}

impl<T> Spin<T> {
    /// A lock around `value`.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// A lock around `value`.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self { taken: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    /// Runs `work` on the value while no other thread does. Spins, with pauses that grow, while one does.
    ///
    /// A panic in `work` opens the lock again and leaves the value as it is: what `work` does must be consistent at
    /// every point where it could unwind, and short.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Open<'a>(&'a AtomicBool);
        impl Drop for Open<'_> {
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        if self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.contended();
        }
        let _open = Open(&self.taken);
        self.value.with_mut(|value| {
            // SAFETY: 1. `taken` went from false to true in this thread, and stays true until `_open` is dropped, so no
            // other reference to the value exists.
            work(unsafe { &mut *value })
        })
    }

    #[cold]
    fn contended(&self) {
        #[cfg(not(loom))]
        let backoff = crossbeam_utils::Backoff::new();
        loop {
            #[cfg(not(loom))]
            backoff.snooze();
            #[cfg(loom)]
            loom::thread::yield_now();
            // A plain load first: waiting threads share the line until it is worth a try.
            if !self.taken.load(Ordering::Relaxed)
                && self.taken.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_ok()
            {
                return;
            }
        }
    }

    /// The value, which nobody else can reach.
    #[cfg(not(loom))]
    pub fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }

    /// The value, which nobody else can reach.
    #[cfg(loom)]
    pub fn get_mut(&mut self) -> &mut T {
        // SAFETY: 1. `&mut self` excludes every other access.
        self.value.with_mut(|value| unsafe { &mut *value })
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
