//! What other processes are shown of the account.
//!
//! The figures are published where the shared account crosses a multiple of
//! [`STEP`](crate::slots::charged::STEP), so most allocations do nothing for it. A publication
//! allocates nothing, takes no lock and makes no system call.

use super::figures;
use crate::slots::charged::{CAP, ON_STEP};
use aquifer_core::PoolStats;
use aquifer_status::{PoolFigures, PoolKind, PoolSlot, SlotDescription};
use std::sync::{OnceLock, atomic::Ordering};

static SLOT: OnceLock<PoolSlot> = OnceLock::new();

/// Shows the figures of the program's global allocator to other processes from now on, if it is
/// [`Global`](crate::Global). Building a runtime calls it.
///
/// ```
/// use aquifer::{Global, global};
/// #[global_allocator]
/// static GLOBAL: Global = Global::new();
///
/// global::publish_status()?;
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// # Errors
/// [`MemoryError::BadSetting`](aquifer_core::MemoryError::BadSetting) for an invalid
/// `AQUIFER_STATUS`.
pub fn publish_status() -> aquifer_core::Result<()> {
    if !crate::is_installed() {
        return Ok(());
    }
    aquifer_status::start()?;
    // Its own allocations are not published before it is set.
    SLOT.get_or_init(|| {
        PoolSlot::open(SlotDescription {
            kind: PoolKind::Global,
            name: "global allocator".to_owned(),
            device: None,
            address: None,
            node: None,
        })
    });
    let _only_once = ON_STEP.set(publish);
    publish();
    Ok(())
}

/// Publishes the figures, if they are shown.
pub(super) fn publish() {
    if let Some(slot) = SLOT.get() {
        slot.publish(|| {
            let account = figures::read();
            let mut stats = PoolStats::default();
            (stats.live, stats.requested) = (account.live, account.live);
            (stats.peak_live, stats.peak_requested) = (account.peak, account.peak);
            (stats.allocations, stats.frees) = (account.allocations, account.frees);
            stats.blocks = account.allocations.wrapping_sub(account.frees);
            stats.failures = account.refusals;
            let limit = Some(CAP.load(Ordering::Relaxed)).filter(|&cap| cap < u64::MAX);
            PoolFigures { stats, limit, largest_free: None }
        });
    }
}
