//! Cheap reading of the monotonic clock.
#![expect(unsafe_code, reason = "asks the kernel for the time")]

use nix::libc;
use std::time::{Duration, Instant};

/// Returns the time since an arbitrary moment in the past, with the resolution of the kernel's tick
/// (1 to 10 ms). The value is monotonic.
///
/// Reads `CLOCK_MONOTONIC_COARSE`, at a fraction of the cost of
/// [`Instant::now`](std::time::Instant::now), which reads a hardware counter.
///
/// ```
/// let before = aquifer_host::clock::coarse();
/// assert!(aquifer_host::clock::coarse() >= before);
/// ```
#[inline]
#[must_use]
pub fn coarse() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // nix's wrapper would double the cost of the call, and each `place` makes one. Every kernel
    // since 2.6.32 has this clock. If the call fails, the time stays zero. SAFETY: 1. `time` is
    // writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the moment `wait` from now. A moment that the clock cannot represent becomes one more
/// than a century ahead.
pub(crate) fn after(wait: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(u32::MAX as u64);
    let now = Instant::now();
    now.checked_add(wait).unwrap_or_else(|| now + AGES)
}
