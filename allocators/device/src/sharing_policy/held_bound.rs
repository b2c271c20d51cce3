//! The bound of what a pool holds, and what it costs.

use crate::base::policy_params::{policy, sixteenths};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// The maximum that a pool which does not compact holds, by the high-water mark of its live bytes.
///
/// It starts at `least_bound`, or at `bound_min` more than the high-water mark if that is more, and
/// rises by a 64th of the high-water mark each time it costs too much, up to `most_bound`. Where it
/// costs too much even there, it yields.
///
/// Near the limit of the budget, the bound is `most_bound` at once: memory that is filled in order
/// up to the limit needs fewer moves later than memory that was kept small by moves.
///
/// A handle that moves because of the bound, or a slow path that meets another thread in one, adds
/// `rise_price` to a debt, or `yield_price` where the bound can rise no more. Each allocated block
/// takes 1 off. Once the debt exceeds `bound_debt` the bound rises, or yields until `bound_rest`
/// blocks have been allocated. Each next rest is twice as long, so a program that the bound does
/// not suit pays for it ever more rarely.
#[derive(Default, Debug)]
pub(super) struct HeldBound {
    /// By how many 64ths of the high-water mark it has risen.
    risen: AtomicU64,
    /// Less than half of the budget is left, whatever the bound leaves.
    near_limit: AtomicBool,
    yields: AtomicBool,
    /// Moved handles and encounters of threads since the last decision.
    events: AtomicU64,
    debt: AtomicU64,
    /// The blocks that the pool's streams had allocated at the last decision. Those of a stream
    /// that is gone count no more.
    counted: AtomicU64,
    /// How many blocks are left before the bound applies again.
    rest: AtomicU64,
    /// How often the bound has yielded.
    rests: AtomicU64,
}

impl HeldBound {
    /// Returns the bound in bytes where `peak` is the high-water mark, or `None` if it yields.
    pub(super) fn bytes(&self, peak: u64) -> Option<u64> {
        (!self.yields.load(Ordering::Relaxed)).then(|| self.risen_bytes(peak))
    }

    /// Returns the bound in bytes as far as it has risen.
    fn risen_bytes(&self, peak: u64) -> u64 {
        let (least, most) = limits(peak);
        if self.near_limit.load(Ordering::Relaxed) {
            return most;
        }
        let risen = self.risen.load(Ordering::Relaxed).saturating_mul(peak / 64);
        least.saturating_add(risen).min(most)
    }

    /// Counts moved handles, or encounters of threads, that the bound has caused.
    pub(super) fn add(&self, events: u64) {
        self.events.fetch_add(events, Ordering::Relaxed);
    }

    /// Decides again, where the streams have allocated so many blocks in all, `peak` is the
    /// high-water mark, and `near_limit` tells whether less than half of the budget is left.
    pub(super) fn update(&self, allocations: u64, peak: u64, near_limit: bool) {
        // Relaxed, and read and written in steps: if two threads decide at once, one of them counts
        // for nothing.
        let new = allocations.saturating_sub(self.counted.swap(allocations, Ordering::Relaxed));
        self.near_limit.store(near_limit, Ordering::Relaxed);
        if self.yields.load(Ordering::Relaxed) {
            let rest = self.rest.load(Ordering::Relaxed).saturating_sub(new);
            self.rest.store(rest, Ordering::Relaxed);
            self.yields.store(rest > 0, Ordering::Relaxed);
            return;
        }
        let rises = self.risen_bytes(peak) < limits(peak).1;
        let price = if rises { policy().rise_price } else { policy().yield_price };
        let events = self.events.swap(0, Ordering::Relaxed);
        let cost = events.saturating_mul(price);
        let debt = self.debt.load(Ordering::Relaxed).saturating_add(cost).saturating_sub(new);
        if debt <= policy().bound_debt {
            self.debt.store(debt, Ordering::Relaxed);
            return;
        }
        self.debt.store(0, Ordering::Relaxed);
        if rises {
            self.risen.fetch_add(1, Ordering::Relaxed);
        } else {
            let rests = self.rests.fetch_add(1, Ordering::Relaxed).min(32);
            self.rest.store(policy().bound_rest << rests, Ordering::Relaxed);
            self.yields.store(true, Ordering::Relaxed);
        }
    }
}

/// Returns the least and the most that the bound can be, in bytes.
fn limits(peak: u64) -> (u64, u64) {
    let least = sixteenths(peak, policy().least_bound).max(peak.saturating_add(policy().bound_min));
    (least, sixteenths(peak, policy().most_bound).max(least))
}
