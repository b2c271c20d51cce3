//! The spin lock of a tree.
//!
//! It guards atomics that only the lock holder writes, with plain stores. Any thread may read them
//! at any time. A charge through four nodes costs one atomic read-modify-write. Separate atomic
//! counters would cost one each, and their roll-backs would be visible to other threads.

use crate::sync::{
    atomic::{AtomicBool, Ordering},
    spin_loop, yield_now,
};
use std::mem::ManuallyDrop;

/// A spin lock. The critical sections are a few dozen loads and stores. They call no foreign code
/// and do not allocate.
#[derive(Debug)]
pub(super) struct Lock {
    taken: AtomicBool,
}

/// The guard of a locked [`Lock`].
pub(super) struct Inside<'a>(&'a Lock);

/// Spin iterations before yielding the processor, which a preempted lock holder may need.
const SPINS: u32 = 64;

impl Lock {
    pub(super) fn new() -> Self {
        Self { taken: AtomicBool::new(false) }
    }

    #[inline]
    pub(super) fn enter(&self) -> Inside<'_> {
        if self.taken.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            self.wait();
        }
        Inside(self)
    }

    #[cold]
    fn wait(&self) {
        let mut looks = 0u32;
        loop {
            // A load leaves the cache line shared, while a failed exchange takes it from the
            // holder.
            if !self.taken.load(Ordering::Relaxed)
                && self
                    .taken
                    .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            looks += 1;
            if looks.is_multiple_of(SPINS) { yield_now() } else { spin_loop() }
        }
    }
}

impl Lock {
    /// Unlocks what [`Inside::keep`] has left locked, on the same thread.
    pub(super) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl Inside<'_> {
    /// Leaves the lock locked until [`Lock::give_back`].
    pub(super) fn keep(self) {
        let _stays = ManuallyDrop::new(self);
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.taken.store(false, Ordering::Release);
    }
}
