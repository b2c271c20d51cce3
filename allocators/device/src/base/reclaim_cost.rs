//! The cost of reclaim.

use std::time::Duration;

pub(crate) const MIB: u64 = 1 << 20;

/// Returns the cost of releasing so many bytes in so many pieces and allocating them again.
pub(crate) fn reclaim_cost(
    pieces: u64,
    each: Duration,
    bytes: u64,
    each_mib: Duration,
) -> Duration {
    let of =
        |cost: Duration, count: u64| cost.saturating_mul(u32::try_from(count).unwrap_or(u32::MAX));
    of(each, pieces).saturating_add(of(each_mib, bytes / MIB))
}
