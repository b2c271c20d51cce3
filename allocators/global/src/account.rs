//! The account of the process: what it holds, and its cap.
//!
//! `charged` is one shared atomic. Each thread has a slot with its *credit*, the part of `charged`
//! that it has not used yet. See the diagram in the documentation of the crate.

mod credit;
mod figures;
pub(crate) mod tags;

pub(crate) use credit::{
    charge, charge_growth, credit_free, credit_shrink, refund, thread_slot, try_charge_unrouted,
    try_charge_unscoped, try_credit_free,
};
pub use figures::{Stats, publish_status};
pub use tags::{Allocated, Consumer, Held, allocated_under, held_under, top};

use crate::{
    not_installed::Warning,
    slots::{
        charged::{CAP, CHARGED, PEAK},
        recall,
    },
};
use std::sync::atomic::Ordering;

/// Returns the current figures. Allocates nothing and takes no lock. Takes time linear in the
/// maximum number of concurrent threads so far.
#[must_use]
pub fn stats() -> Stats {
    figures::publish();
    figures::read()
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
/// use aquifer::{Global, global};
/// #[global_allocator]
/// static GLOBAL: Global = Global::new();
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
    static WARNING: Warning = Warning::new("a cap refuses nothing that other code allocates");
    if bytes != u64::MAX {
        WARNING.check_once();
    }
    CAP.store(bytes, Ordering::Relaxed);
    recall();
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
