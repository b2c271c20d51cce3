//! The lock of a tree.
//!
//! What it guards are atomics that only its holder writes, with plain stores; anybody may read them
//! at any time. A charge through four nodes so costs one locked instruction on the way in and none
//! on the way out, where four counters of their own would cost one each, and roll-backs that others
//! can see.

use crate::sync::{
    atomic::{AtomicBool, Ordering},
    spin_loop, yield_now,
};
use std::mem::ManuallyDrop;

/// Lets one thread in at a time. Whoever is inside does a few dozen loads and stores, calls nothing
/// and allocates nothing.
#[derive(Debug)]
pub(super) struct Lock {
    taken: AtomicBool,
}

/// Being inside; ends when dropped.
pub(super) struct Inside<'a>(&'a Lock);

/// Looks at a taken lock before the processor is left to others: its holder may be waiting for one.
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
            // Looking does not take the line away from the holder; trying does.
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
    /// Ends what [`Inside::keep`] has left open, on the same thread.
    pub(super) fn give_back(&self) {
        self.taken.store(false, Ordering::Release);
    }
}

impl Inside<'_> {
    /// Stays inside until [`Lock::give_back`].
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
