//! The figures of the account.

use crate::{
    route,
    slots::{
        self,
        charged::{CHARGED, PEAK, REFUSALS},
    },
};
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
