//! The account of the process: what it holds, and its caps.
//!
//! `charged` is one shared atomic. Each thread has a slot with its *credit*, the part of `charged`
//! that it has not used yet. See the diagram in the documentation of the crate.

mod charged;
mod credit;
pub(crate) mod slot;
mod soft;
mod tag_cells;
pub(crate) mod tags;
mod watermark;

pub(crate) use credit::{
    charge, charge_growth, credit_free, credit_shrink, refund, thread_slot, try_charge_unrouted,
    try_charge_unscoped, try_credit_free,
};
pub use soft::{SoftCap, is_soft_cap_exceeded, on_soft_cap, set_soft_cap, soft_cap};
pub use tags::{Allocated, Consumer, Held, allocated_under, held_under, top};

use crate::{not_installed, route};
use charged::{CAP, CHARGED, PEAK, REFUSALS};
use std::sync::atomic::Ordering;

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
    /// Maximum of `live` since the start or the last [`reset_peak`]. Never too low, and too high
    /// by at most 128 KiB per thread.
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

/// Returns the current figures. Allocates nothing and takes no lock. Takes time linear in the
/// maximum number of concurrent threads so far.
#[must_use]
pub fn stats() -> Stats {
    let totals = slot::totals();
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

/// Sets the cap, the maximum of live bytes, for subsequent allocations. `u64::MAX` removes it.
///
/// Returns the number of bytes by which the cap is already exceeded, or 0. Until those bytes are
/// freed, every allocation is refused.
///
/// An allocation beyond the cap returns null. A `Vec` then aborts, and `try_reserve` returns an
/// error. No allocation that begins after this call exceeds the cap. An allocation may be refused
/// early, by the credit of other threads, at most 128 KiB each. The credit of the calling thread is
/// used up first.
///
/// ```
/// use aquifer_global as global;
/// #[global_allocator]
/// static GLOBAL: global::Global = global::Global::new();
///
/// global::set_cap(global::stats().live + (1 << 20));
/// let mut buffer = Vec::<u8>::new();
/// assert!(buffer.try_reserve_exact(2 << 20).is_err());
/// global::set_cap(u64::MAX);
/// assert!(buffer.try_reserve_exact(2 << 20).is_ok());
/// ```
///
/// If [`Global`](crate::Global) is not the program's global allocator, the cap only applies to
/// explicit allocations from it, and the first call prints a warning to standard error. See
/// [`is_installed`](crate::is_installed).
pub fn set_cap(bytes: u64) -> u64 {
    if bytes != u64::MAX {
        not_installed::warn_once();
    }
    CAP.store(bytes, Ordering::Relaxed);
    slot::recall();
    stats().live.saturating_sub(bytes)
}

/// Returns the cap in bytes, or `u64::MAX` if there is none.
#[must_use]
pub fn cap() -> u64 {
    CAP.load(Ordering::Relaxed)
}

/// Resets the peak to the currently charged bytes, also for each tag.
///
/// See [`stats`] for the figures.
pub fn reset_peak() {
    PEAK.store(CHARGED.load(Ordering::Relaxed), Ordering::Relaxed);
    tags::reset_peaks();
}
