//! What the bound of a pool costs, and when it yields.

use crate::base::policy_params::policy;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Decides whether the bound of what a pool holds applies, by what it costs.
///
/// A handle that moves because of the bound, or a slow path that meets another thread in one, adds
/// `bound_price` to a debt, and each allocated block takes 1 off it. Once the debt exceeds
/// `bound_debt` the bound yields until `bound_rest` blocks have been allocated. Each next rest is
/// twice as long, so a program that the bound does not suit pays for it ever more rarely.
#[derive(Default, Debug)]
pub(super) struct BoundCost {
    yields: AtomicBool,
    debt: AtomicU64,
    /// The blocks that the pool's streams had allocated at the last decision. Those of a stream
    /// that is gone count no more.
    counted: AtomicU64,
    /// How many blocks are left before the bound applies again.
    rest: AtomicU64,
    /// How often the bound has yielded.
    rests: AtomicU64,
}

impl BoundCost {
    /// Returns whether the bound does not apply now.
    #[inline]
    pub(super) fn yields(&self) -> bool {
        self.yields.load(Ordering::Relaxed)
    }

    /// Adds the cost of `events`: moved handles, or encounters of threads.
    pub(super) fn add(&self, events: u64) {
        self.debt.fetch_add(events.saturating_mul(policy().bound_price), Ordering::Relaxed);
    }

    /// Decides again, where the streams have allocated so many blocks in all.
    pub(super) fn update(&self, allocations: u64) {
        // Relaxed, and read and written in steps: if two threads decide at once, one of them counts
        // for nothing.
        let new = allocations.saturating_sub(self.counted.swap(allocations, Ordering::Relaxed));
        let debt = self.debt.load(Ordering::Relaxed).saturating_sub(new);
        if self.yields() {
            let rest = self.rest.load(Ordering::Relaxed).saturating_sub(new);
            self.rest.store(rest, Ordering::Relaxed);
            self.yields.store(rest > 0, Ordering::Relaxed);
        } else if debt > policy().bound_debt {
            let rests = self.rests.fetch_add(1, Ordering::Relaxed).min(32);
            self.rest.store(policy().bound_rest << rests, Ordering::Relaxed);
            self.debt.store(0, Ordering::Relaxed);
            self.yields.store(true, Ordering::Relaxed);
        } else {
            self.debt.store(debt, Ordering::Relaxed);
        }
    }
}
