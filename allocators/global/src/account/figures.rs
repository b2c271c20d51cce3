//! The figures of the account, and what other processes are shown of them.
//!
//! They are published where the shared account crosses a multiple of
//! [`STEP`](crate::slots::charged::STEP), so most allocations do nothing for it. A publication
//! allocates nothing, takes no lock and makes no system call.

use crate::{
    route,
    slots::{
        self,
        charged::{CAP, CHARGED, ON_STEP, PEAK, REFUSALS},
    },
};
use aquifer_core::PoolStats;
use aquifer_status::{PoolFigures, PoolKind, PoolSlot, SlotDescription};
use std::sync::{OnceLock, atomic::Ordering};

/// What the process has allocated through [`Global`](crate::Global).
///
/// A block that moves between the wrapped allocator and a route counts as a free of one and an
/// allocation of the other.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Requested bytes in live blocks of the wrapped allocator. Exact when no call is in progress
    /// on any thread.
    pub live: u64,
    /// Maximum of `live` since the start or the last [`reset_peak`](super::reset_peak). Never too
    /// low, and too high by at most 128 KiB per thread.
    pub peak: u64,
    /// Number of allocations. Resizing a block is neither an allocation nor a free.
    pub allocations: u64,
    /// Number of freed blocks.
    pub frees: u64,
    /// Number of calls that the cap refused.
    pub refusals: u64,
    /// Bytes in live blocks of routes. They are not part of `live` and not subject to the cap,
    /// since their memory does not come from the wrapped allocator.
    pub routed: u64,
    /// Number of allocations that routes have served.
    pub routed_allocations: u64,
    /// Number of allocations that a route refused, whether the wrapped allocator then served them
    /// or not.
    pub route_refusals: u64,
}

/// Returns the current figures. Allocates nothing and takes no lock.
pub(super) fn read() -> Stats {
    let totals = slots::totals();
    let live = CHARGED.load(Ordering::Relaxed).saturating_sub(totals.credit);
    let (routed, routed_allocations, route_refusals) = route::figures();
    Stats {
        live,
        peak: PEAK.load(Ordering::Relaxed).max(live),
        allocations: totals.allocations,
        frees: totals.frees,
        refusals: REFUSALS.load(Ordering::Relaxed),
        routed,
        routed_allocations,
        route_refusals,
    }
}

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
            let account = read();
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
