//! The random numbers of a search.

use aquifer_core::random::SplitMix64;

/// The random numbers of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanRandom(SplitMix64);

impl PlanRandom {
    /// Creates a generator. Equal seeds give equal numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Returns a number below `bound`, or 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The upper half of the product: the bias is below `bound` / 2^64.
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}
