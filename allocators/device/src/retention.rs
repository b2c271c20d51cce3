//! Retention: how much idle memory a pool keeps. It is controlled by the release threshold, the
//! warm reserve and the cap on each stream's cache.
//!
//! None of it is checked while a stream's cache serves a request. The cap is enforced when a slow
//! path has polled which frees are done. The threshold is enforced after a slow path has served its
//! request, so that memory the request needs is not released first.

use std::sync::atomic::{AtomicU64, Ordering};

/// The amounts of memory that a pool keeps.
#[derive(Debug)]
pub(crate) struct Retention {
    /// Idle bytes that are kept; `u64::MAX` for all.
    threshold: u64,
    /// Idle bytes that one stream's cache keeps; `u64::MAX` for all.
    pub(crate) stream_cache: u64,
    /// Bytes, in use or idle, below which nothing is released unless memory is short.
    reserve: AtomicU64,
}

impl Retention {
    pub(crate) fn new(threshold: u64, stream_cache: u64) -> Self {
        Self { threshold, stream_cache, reserve: AtomicU64::new(0) }
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
        live.saturating_add(self.threshold).max(self.reserve())
    }
}
