//! The lock in front of a stream's cache.
//!
//! It is held for tens of nanoseconds and hardly ever by two threads at once, so it spins. One
//! locked instruction takes it and a plain store gives it back: on x86 that is half of what a mutex
//! costs, whose unlock is locked as well since it must see whether somebody sleeps. A pair of an
//! allocation and a free takes it twice, measured at 14–19 ns against 29 with the standard
//! library's mutex.
//!
//! # A way without locked instructions, and why it is not taken
//! The thread that uses a cache most could enter by plain stores: it writes a flag of its own and
//! reads whose the lock is, with no barrier between; whoever else comes ends that bias, makes a
//! barrier on every thread of the process (Linux's `membarrier`) and waits for the flag. That was
//! written, with a bias after 4,096 entries in a row by one thread. Loom tried every interleaving
//! of an owner and one other thread, those of three threads with at most two preemptions, and found
//! two threads inside as soon as either half of the barrier was missing. It was measured
//! beside this lock in one process, on two AMD Zen 4 processors of a virtual machine that others
//! used as well:
//!
//! | medians | this lock | biased |
//! |---|---|---|
//! | two entries with nothing inside, ns | 4.4–8.4 | 2.2 |
//! | an allocation and a free of 256 B through the pool, ns | 42 | 39.5 |
//! | the same of 64 KiB and 1 MiB, ns | 83–86 | 80–82 |
//! | two threads on one stream, ns a pair, two runs | 73 and 160 | 86 and 184 |
//! | 16 threads with a stream each, ns a pair, two runs | 79 and 108 | 83 and 107 |
//! | replay of `serve_mixed` under 1.05 × its peak, ns an operation | 812 | 807 |
//!
//! What surrounds a locked instruction hides most of it here: 1.9–3.7 ns of a pair were saved, at
//! the price of 15–17 % where two threads share a stream, a system call of 8 ms once in a process,
//! another of 1 µs (14 when the machine was busy) at each end of a bias, and a process that is
//! killed for it where a sandbox closes after the first bias. Variants did worse. With the bias on
//! a cache line of its own 0.5 ns were saved. With `work` run in two places, the owner's and
//! everybody's, it was no longer inlined and a pair cost 11 ns more. As for this lock itself,
//! `swap` is no cheaper than `compare_exchange`.
//!
//! It is worth another look when the rest of a pair is much shorter, or where locked instructions
//! cost more: an Intel host paid 21 ns for two entries. Two things to know then: run `work` in one
//! place only, and form no reference to the value before the owner is outside, or two exist at
//! once.
//!
//! # The rule
//! **Never hold it over a driver call, a wait, or anything that can block or unwind into user
//! code.** Its only door is [`Spin::with`], so what happens under it can be read in one place each
//! time.
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
    taken: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: 1. the value is reached by `with` alone, from one thread at a time, so sharing the lock
// shares no `&T`; moving the value between threads is what `T: Send` allows.
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

    /// Runs `work` on the value while no other thread does. Spins, with pauses that grow, while one
    /// does.
    ///
    /// A panic in `work` opens the lock again and leaves the value as it is: what `work` does must
    /// be consistent at every point where it could unwind, and short.
    #[inline]
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        struct Open<'a>(&'a AtomicBool);
        impl Drop for Open<'_> {
            #[inline]
            fn drop(&mut self) {
                self.0.store(false, Ordering::Release);
            }
        }
        if self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.contended();
        }
        let _open = Open(&self.taken);
        self.value.with_mut(|value| {
            // SAFETY: 1. `taken` went from false to true in this thread, and stays true until
            // `_open` is dropped, so no other reference to the value exists.
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
                && self
                    .taken
                    .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
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
