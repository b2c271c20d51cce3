//! The clock of wishes.

use nix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds of the monotonic clock, which all processes of a machine share.
pub(crate) fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map_or(0, |now| now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}
