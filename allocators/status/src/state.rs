//! Whether this process publishes now, and when its slow paths did last.

use nix::time::{ClockId, clock_gettime};
use std::{
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
    time::{SystemTime, UNIX_EPOCH},
};

pub(crate) const UNSET: u32 = 0;
pub(crate) const OFF: u32 = 1;
pub(crate) const PUBLISHED: u32 = 2;
/// The child of a fork, whose parent publishes.
pub(crate) const FORKED: u32 = 3;

/// One of the above.
pub(crate) static STATE: AtomicU32 = AtomicU32::new(UNSET);
/// Counts the forks on the way to this process.
pub(crate) static GENERATION: AtomicU32 = AtomicU32::new(0);

/// Returns the time in nanoseconds since 1970.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Returns a number that differs between a process and its children.
pub(crate) fn generation() -> u32 {
    GENERATION.load(Ordering::Relaxed)
}

/// Returns whether this process publishes its figures now.
#[inline]
#[must_use]
pub fn is_published() -> bool {
    STATE.load(Ordering::Acquire) == PUBLISHED
}

/// The least time between two publications of a slow path that publishes from time to time.
const INTERVAL_MS: u64 = 10;

/// Limits how often a slow path publishes: once in 10 ms, by the kernel's tick (1 to 10 ms).
///
/// ```
/// use aquifer_status::PublishTimer;
/// let timer = PublishTimer::new();
/// assert!(timer.is_due());
/// timer.restart();
/// std::thread::sleep(std::time::Duration::from_millis(30));
/// assert!(timer.is_due());
/// ```
#[derive(Default, Debug)]
pub struct PublishTimer {
    /// Milliseconds of the coarse clock, 0 before the first publication.
    restarted: AtomicU64,
}

impl PublishTimer {
    /// Creates a timer that is due.
    #[must_use]
    pub const fn new() -> Self {
        Self { restarted: AtomicU64::new(0) }
    }

    /// Records a publication.
    pub fn restart(&self) {
        self.restarted.store(now_ms(), Ordering::Relaxed);
    }

    /// Returns whether the last publication is 10 ms ago or more.
    pub fn is_due(&self) -> bool {
        now_ms().wrapping_sub(self.restarted.load(Ordering::Relaxed)) >= INTERVAL_MS
    }
}

/// Reads `CLOCK_MONOTONIC_COARSE`, at a fraction of the cost of `Instant::now`.
fn now_ms() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE)
        .map_or(0, |time| time.tv_sec() as u64 * 1000 + time.tv_nsec() as u64 / 1_000_000)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        thread,
        time::{Duration, Instant},
    };

    #[test]
    fn a_timer_is_due_after_the_interval_and_not_before() {
        let timer = PublishTimer::new();
        timer.restart();
        let begun = Instant::now();
        let is_due = timer.is_due();
        // A thread that was stopped for long has nothing to say.
        assert!(!is_due || begun.elapsed() > Duration::from_millis(INTERVAL_MS / 2));
        thread::sleep(Duration::from_millis(3 * INTERVAL_MS));
        assert!(timer.is_due());
    }
}
