//! Counters of the slow path.

use aquifer_core::PoolStats;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counters of the slow path.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    pub(crate) reaped: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) growths: AtomicU64,
    pub(crate) moves: AtomicU64,
    pub(crate) adoptions: AtomicU64,
    pub(crate) fences: AtomicU64,
    pub(crate) stream_waits: AtomicU64,
    pub(crate) host_waits: AtomicU64,
}

impl Counters {
    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.reaped += read(&self.reaped);
        stats.failures += read(&self.failures);
        stats.growths += read(&self.growths);
        stats.moves += read(&self.moves);
        stats.adoptions += read(&self.adoptions);
        stats.fences += read(&self.fences);
        stats.stream_waits += read(&self.stream_waits);
        stats.host_waits += read(&self.host_waits);
    }
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    if by > 0 {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}
