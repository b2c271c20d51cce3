//! When the next sample of a thread is due.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

/// When the next sample of a thread is due. Only the owner of its slot accesses it.
pub(crate) struct Clock {
    /// Bytes until the next sample or the next check.
    pub(crate) remaining: AtomicI64,
    /// The interval for which `remaining` was drawn, 0 for none.
    pub(crate) drawn_for: AtomicU64,
    /// The state of the thread's random number generator.
    seed: AtomicU64,
}

impl Clock {
    pub(super) const fn new() -> Self {
        Self { remaining: AtomicI64::new(0), drawn_for: AtomicU64::new(0), seed: AtomicU64::new(0) }
    }

    /// Returns the bytes to the next point, drawn from an exponential distribution with this mean
    /// (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
    pub(crate) fn draw(&self, interval: u64) -> i64 {
        // All clocks start in the same state, so the address is mixed in to distinguish them.
        let step = 0x9e37_79b9_7f4a_7c15u64;
        let seed = self.seed.load(Ordering::Relaxed).wrapping_add(step);
        self.seed.store(seed, Ordering::Relaxed);
        let mut word = seed ^ (std::ptr::from_ref(self).addr() as u64).wrapping_mul(step);
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^= word >> 31;
        let unit = ((word >> 11) + 1) as f64 / (1u64 << 53) as f64; // in (0, 1]
        (-unit.ln() * interval as f64) as i64
    }
}
