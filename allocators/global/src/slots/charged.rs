//! The shared part of the account: the bytes that are charged, and the cap.

use crossbeam_utils::CachePadded;
use std::sync::{
    OnceLock,
    atomic::{AtomicU64, Ordering},
};

/// Bytes that a thread charges at once in addition to what it needs.
pub(super) const BATCH: u64 = 64 << 10;
/// The credit above which a thread returns all except [`BATCH`].
pub(super) const MAX_CREDIT: u64 = 2 * BATCH;
/// Headroom below which a thread charges only what it needs, so that the last bytes below the cap
/// can all be allocated.
const NEAR_CAP: u64 = 64 * BATCH;

// Relaxed throughout: none of these guards other memory, and each has its own modification order.
/// Bytes in live blocks and in the credit of threads. Never above the cap that was in effect when
/// it was last raised. A lower cap recalls the credit.
pub(crate) static CHARGED: CachePadded<AtomicU64> = CachePadded::new(AtomicU64::new(0));
pub(crate) static CAP: AtomicU64 = AtomicU64::new(u64::MAX);
/// The maximum of `CHARGED` since the last reset.
pub(crate) static PEAK: AtomicU64 = AtomicU64::new(0);
/// What is called where the account crosses a multiple of [`STEP`], if anything. It must not
/// allocate.
pub(crate) static ON_STEP: OnceLock<fn()> = OnceLock::new();
pub(crate) const STEP: u64 = 1 << 20;
pub(crate) static REFUSALS: AtomicU64 = AtomicU64::new(0);

/// Charges `need` bytes to the shared account, and `extra` more if the cap is not near. Returns the
/// charged bytes, or `None` if the cap refuses.
pub(crate) fn charge_account(need: u64, extra: u64) -> Option<u64> {
    let mut charged = CHARGED.load(Ordering::Relaxed);
    loop {
        let cap = CAP.load(Ordering::Relaxed);
        let least = charged.checked_add(need).filter(|&least| least <= cap)?;
        let added = if cap - least >= NEAR_CAP { need + extra } else { need };
        match CHARGED.compare_exchange_weak(
            charged,
            charged + added,
            Ordering::Relaxed,
            Ordering::Relaxed,
        ) {
            Ok(_) => {
                if PEAK.load(Ordering::Relaxed) < charged + added {
                    PEAK.fetch_max(charged + added, Ordering::Relaxed);
                }
                on_change(charged, charged + added);
                return Some(added);
            }
            Err(now) => charged = now,
        }
    }
}

/// Gives bytes back to the shared account.
pub(crate) fn uncharge(bytes: u64) {
    let before = CHARGED.fetch_sub(bytes, Ordering::Relaxed);
    on_change(before, before.saturating_sub(bytes));
}

#[inline]
fn on_change(before: u64, now: u64) {
    if before / STEP != now / STEP
        && let Some(call) = ON_STEP.get()
    {
        call();
    }
}

#[cold]
pub(crate) fn count_refusal() {
    REFUSALS.fetch_add(1, Ordering::Relaxed);
}
