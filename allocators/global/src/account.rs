//! What the process holds, and how much it may.
//!
//! `charged` is one shared atomic; each thread has a slot with the part of it that it has not used,
//! its change. The crate's documentation draws it.

mod slot;
mod soft;
pub(crate) mod tags;

pub(crate) use slot::{
    SHARED, Slot, charge, charge_growth, charge_plainly, charge_unrouted, freed, frees_plainly,
    mine, refund, release,
};
pub use soft::{SoftCap, is_soft_cap_exceeded, on_soft_cap, set_soft_cap, soft_cap};
pub use tags::{Allocated, Consumer, Held, allocated_under, held_under, top};

use crate::{report, route};
use crossbeam_utils::CachePadded;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a thread takes at once beyond what it needs.
const BATCH: u64 = 64 << 10;
/// Change at which a thread gives back all but [`BATCH`].
const MOST_CHANGE: u64 = 2 * BATCH;
/// Headroom below which nobody takes more than they need, so that the last bytes go to whoever asks
/// for them.
const NEAR: u64 = 64 * BATCH;

// Relaxed throughout: none of these guards other memory, and each one's changes are in one order.
/// Bytes in live blocks and in threads' change. Never above the cap that stood when it was last
/// raised: a lower cap recalls the change.
static CHARGED: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
static CAP: AtomicU64 = AtomicU64::new(u64::MAX);
/// The most that `CHARGED` has been since the last reset.
static PEAK: AtomicU64 = AtomicU64::new(0);
static REFUSALS: AtomicU64 = AtomicU64::new(0);

/// What the process has allocated through [`Global`](crate::Global).
///
/// A block that moves between the wrapped allocator and a route is freed by the one and allocated
/// by the other.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Stats {
    /// Bytes in live blocks of the wrapped allocator, as they were asked for. Exact when no call
    /// is under way on any thread.
    pub live: u64,
    /// The most that `live` has been since the start or the last [`reset_peak`]: never below the
    /// truth, and above it by at most 128 KiB for each thread.
    pub peak: u64,
    /// Allocations (a count). Growing and shrinking are neither allocation nor free.
    pub allocations: u64,
    /// Blocks freed (a count).
    pub frees: u64,
    /// Calls that the cap refused (a count).
    pub refusals: u64,
    /// Bytes in live blocks that routes serve. Not part of `live`, nor under the cap: the memory
    /// is not the wrapped allocator's.
    pub routed: u64,
    /// Allocations that routes have served (a count).
    pub routed_allocations: u64,
    /// Allocations that a route refused and the wrapped allocator served instead, or refused as
    /// well (a count).
    pub route_refusals: u64,
}

/// The figures of this moment. Allocates nothing and takes no lock; in time linear in the most
/// threads there have been at once.
#[must_use]
pub fn stats() -> Stats {
    let totals = slot::totals();
    let live = CHARGED.load(Ordering::Relaxed).saturating_sub(totals.change);
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

/// Sets the most bytes that may be live, for allocations from now on; `u64::MAX` lifts it. Answers
/// with the bytes by which it is exceeded already, or 0: until those are freed every allocation is
/// refused.
///
/// An allocation beyond the cap answers with null, which a `Vec` turns into an abort and
/// `try_reserve` into an error. No allocation exceeds the cap that begins after it was set. It may
/// refuse early by what other threads hold as change, 128 KiB each at most; the calling thread's
/// own is used up first.
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
/// Where [`Global`](crate::Global) is not the program's global allocator the cap holds for what is
/// allocated from it by name alone, and the first call says so on the standard error stream: see
/// [`is_installed`](crate::is_installed).
pub fn set_cap(bytes: u64) -> u64 {
    if bytes != u64::MAX {
        report::warn_unless_installed();
    }
    CAP.store(bytes, Ordering::Relaxed);
    slot::recall();
    stats().live.saturating_sub(bytes)
}

/// The cap, in bytes; `u64::MAX` if there is none.
#[must_use]
pub fn cap() -> u64 {
    CAP.load(Ordering::Relaxed)
}

/// Starts the peak anew from what is charged now, and each tag's.
///
/// Its example is that of [`stats`].
pub fn reset_peak() {
    PEAK.store(CHARGED.load(Ordering::Relaxed), Ordering::Relaxed);
    tags::reset_peaks();
}

/// Takes `need` bytes from the shared account, and up to `extra` more if they are easily had.
/// Answers with what it took, or with `None` if the cap refuses.
fn take(need: u64, extra: u64) -> Option<u64> {
    let mut charged = CHARGED.load(Ordering::Relaxed);
    loop {
        let cap = CAP.load(Ordering::Relaxed);
        let least = charged.checked_add(need).filter(|&least| least <= cap)?;
        let taken = if cap - least >= NEAR { need + extra } else { need };
        match CHARGED.compare_exchange_weak(
            charged,
            charged + taken,
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            Ok(_) => {
                if PEAK.load(Ordering::Relaxed) < charged + taken {
                    PEAK.fetch_max(charged + taken, Ordering::Relaxed);
                }
                soft::risen(charged + taken);
                return Some(taken);
            }
            Err(now) => charged = now,
        }
    }
}

/// Returns bytes to the shared account.
fn put_back(bytes: u64) {
    let before = CHARGED.fetch_sub(bytes, Ordering::Relaxed);
    soft::fallen(before.saturating_sub(bytes));
}

#[cold]
fn refused() {
    REFUSALS.fetch_add(1, Ordering::Relaxed);
}
