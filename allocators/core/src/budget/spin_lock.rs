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
pub(super) struct SpinLock {
    locked: AtomicBool,
}

/// The guard of a locked [`SpinLock`].
pub(super) struct SpinGuard<'a>(&'a SpinLock);

/// Spin iterations before yielding the processor, which a preempted lock holder may need.
const SPINS: u32 = 64;

impl SpinLock {
    pub(super) fn new() -> Self {
        Self { locked: AtomicBool::new(false) }
    }

    #[inline]
    pub(super) fn lock(&self) -> SpinGuard<'_> {
        if self.locked.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err()
        {
            self.lock_slow();
        }
        SpinGuard(self)
    }

    #[cold]
    fn lock_slow(&self) {
        let mut spins = 0u32;
        loop {
            // A load leaves the cache line shared, while a failed exchange takes it from the
            // holder.
            if !self.locked.load(Ordering::Relaxed)
                && self
                    .locked
                    .compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok()
            {
                return;
            }
            spins += 1;
            if spins.is_multiple_of(SPINS) { yield_now() } else { spin_loop() }
        }
    }
}

impl SpinLock {
    /// Unlocks what [`SpinGuard::leak`] has left locked, on the same thread.
    pub(super) fn unlock(&self) {
        self.locked.store(false, Ordering::Release);
    }
}

impl SpinGuard<'_> {
    /// Leaves the lock locked until [`SpinLock::unlock`].
    pub(super) fn leak(self) {
        let _locked = ManuallyDrop::new(self);
    }
}

impl Drop for SpinGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.locked.store(false, Ordering::Release);
    }
}
