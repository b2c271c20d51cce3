//! The time, cheaply.

use nix::time::{ClockId, clock_gettime};
use std::time::Duration;

/// Time since some moment in the past, to the kernel's last tick: 1 to 10 ms ago (`CLOCK_MONOTONIC_COARSE`). It costs a
/// fraction of [`Instant::now`](std::time::Instant::now), which asks the hardware, and never goes back.
///
/// ```
/// let before = aquifer_host::clock::coarse();
/// assert!(aquifer_host::clock::coarse() >= before);
/// ```
#[inline]
#[must_use]
pub fn coarse() -> Duration {
    // Every kernel since 2.6.32 has this clock; without it no time passes.
    clock_gettime(ClockId::CLOCK_MONOTONIC_COARSE).map_or(Duration::ZERO, Duration::from)
}
