//! Regions and registrations that are no longer used and not yet released.
//!
//! Ending a registration makes the driver wait for the whole device, so it is deferred while a
//! program is busy. Retired memory stays mapped, registered and charged until a quiet point.

use super::{
    backing::{Backing, RETIRED_BYTES, retired},
    stranded::{retry_stranded, stranded_bytes},
};
use crate::kernel::is_forked_child;
use std::{mem, sync::atomic::Ordering};

/// Returns the bytes that wait for [`end_retired`]. They stay charged.
#[must_use]
pub fn retired_bytes() -> u64 {
    RETIRED_BYTES.load(Ordering::Relaxed)
}

/// Releases retired and stranded memory, and returns the number of released bytes.
///
/// This includes everything that was [retired](super::Region::retire), and
/// [stranded memory](super::retry_stranded). Memory that the driver refuses to release is stranded
/// and not counted.
///
/// Call this at quiet points: it blocks until devices are idle, if there is anything to do. It also
/// runs before a budget refuses a new region.
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_host::{kernel::Kernel, region::{self, Host, Region, RegionRequest}, topology::Topology};
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let budget = Budget::new("pinned", 1 << 20);
/// Region::new(&host, &budget, &RegionRequest::bytes(1 << 20))?.retire();
/// assert_eq!(budget.remaining(), 0);
/// region::end_retired();
/// assert_eq!(budget.used(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn end_retired() -> u64 {
    if is_forked_child() {
        return 0;
    }
    let stranded = stranded_bytes();
    let retried = stranded.saturating_sub(retry_stranded());
    if retired_bytes() == 0 {
        return retried;
    }
    let waiting = mem::take(&mut *retired());
    RETIRED_BYTES.fetch_sub(waiting.iter().map(Backing::bytes).sum(), Ordering::Relaxed);
    // Each is released, or stranded, without the lock.
    let end = |backing: Backing| {
        let bytes = backing.bytes();
        if backing.close().is_ok() { bytes } else { 0 }
    };
    retried + waiting.into_iter().map(end).sum::<u64>()
}
