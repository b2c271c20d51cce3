//! Retention: how much idle memory a pool keeps. It is controlled by the release threshold, the
//! warm reserve and the cap on each stream's cache.
//!
//! - None of it is checked while a stream's cache serves a request. The cap is enforced when a slow
//!   path has polled which frees are done. The threshold is enforced after a slow path has served
//!   its request, so that memory the request needs is not released first.
//! - **A loop at the threshold must not thrash.** Releasing memory at each low point and taking it
//!   again at each high point would create and map every handle in every round, at 40 µs or more
//!   each. So memory that was released and taken again is kept in addition to the threshold from
//!   then on. A loop pays once for the memory that it needs, and later rounds make no memory call.
//!   Memory that is not needed again stays released. An explicit trim resets this.

use std::sync::{
    Mutex, MutexGuard, PoisonError,
    atomic::{AtomicU64, Ordering},
};

/// The amounts of memory that a pool keeps.
#[derive(Debug)]
pub(crate) struct Retention {
    /// Idle bytes that are kept; `u64::MAX` for all.
    threshold: u64,
    /// Idle bytes that one stream's cache keeps; `u64::MAX` for all.
    pub(crate) stream_cache: u64,
    /// Bytes, in use or idle, below which nothing is released unless memory is short.
    reserve: AtomicU64,
    history: Mutex<ReleaseHistory>,
}

/// The memory that the threshold has released.
#[derive(Default, Debug)]
struct ReleaseHistory {
    /// Bytes that were not needed again.
    released: u64,
    /// Bytes that were taken again.
    regrown: u64,
}

impl Retention {
    pub(crate) fn new(threshold: u64, stream_cache: u64) -> Self {
        Self { threshold, stream_cache, reserve: AtomicU64::new(0), history: Mutex::default() }
    }

    fn history(&self) -> MutexGuard<'_, ReleaseHistory> {
        self.history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is no threshold.
    pub(crate) fn retains_all(&self) -> bool {
        self.threshold == u64::MAX
    }

    pub(crate) fn reserve(&self) -> u64 {
        // Relaxed: it guards no memory, and a trim that misses a change counts as an earlier trim.
        self.reserve.load(Ordering::Relaxed)
    }

    pub(crate) fn set_reserve(&self, bytes: u64) {
        self.reserve.store(bytes, Ordering::Relaxed);
    }

    /// Returns the maximum bytes to hold at a quiet point, while `live` of them are in use.
    pub(crate) fn bytes_to_retain(&self, live: u64) -> u64 {
        let idle = self.threshold.saturating_add(self.history().regrown);
        live.saturating_add(idle).max(self.reserve())
    }

    /// Records that the threshold has released bytes.
    pub(crate) fn record_release(&self, bytes: u64) {
        self.history().released += bytes;
    }

    /// Records that the pool takes bytes from the driver.
    pub(crate) fn record_growth(&self, bytes: u64) {
        if self.retains_all() {
            return;
        }
        let mut history = self.history();
        let missed = bytes.min(history.released);
        history.released -= missed;
        history.regrown += missed;
    }

    /// Resets the record of what was needed again.
    pub(crate) fn reset(&self) {
        *self.history() = ReleaseHistory::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_released_and_needed_again_is_retained() {
        let retention = Retention::new(100, u64::MAX);
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 110, "what is new was never given back");
        retention.record_release(300);
        retention.record_growth(120);
        assert_eq!(retention.bytes_to_retain(10), 230);
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 410, "180 of it had been given back");
        retention.record_growth(500);
        assert_eq!(retention.bytes_to_retain(10), 410);
        retention.set_reserve(1000);
        assert_eq!((retention.bytes_to_retain(10), retention.bytes_to_retain(900)), (1000, 1300));
        retention.reset();
        retention.set_reserve(0);
        assert_eq!(retention.bytes_to_retain(10), 110);
    }
}
