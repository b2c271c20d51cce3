//! The time, cheaply.
#![expect(unsafe_code, reason = "asks the kernel for the time")]

use nix::libc;
use std::time::{Duration, Instant};

/// Time since some moment in the past, to the kernel's last tick: 1 to 10 ms ago
/// (`CLOCK_MONOTONIC_COARSE`). It costs a fraction of [`Instant::now`](std::time::Instant::now),
/// which asks the hardware, and never goes back.
///
/// ```
/// let before = aquifer_host::clock::coarse();
/// assert!(aquifer_host::clock::coarse() >= before);
/// ```
#[inline]
#[must_use]
pub fn coarse() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // nix's wrapper of this call takes as long again as the call itself, of which `place` makes
    // one. SAFETY: 1. `time` is writable.
    // Every kernel since 2.6.32 has this clock; without it no time passes.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC_COARSE, &raw mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The moment that lies so far ahead. A time that no clock can tell is a century and more ahead.
pub(crate) fn after(wait: Duration) -> Instant {
    const AGES: Duration = Duration::from_secs(u32::MAX as u64);
    let now = Instant::now();
    now.checked_add(wait).unwrap_or_else(|| now + AGES)
}
