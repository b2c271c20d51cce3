//! The clock of wishes.

use nix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds of the real-time clock, which alone is the same in all time namespaces:
/// each has its own offset of the monotonic clocks.
///
/// Where it is set, a wish that is waited for counts again once it is renewed, within 500 µs, and
/// one that is not may count for another 100 ms.
pub(crate) fn now_ns() -> u64 {
    clock_gettime(ClockId::CLOCK_REALTIME)
        .map_or(0, |now| now.tv_sec() as u64 * 1_000_000_000 + now.tv_nsec() as u64)
}
