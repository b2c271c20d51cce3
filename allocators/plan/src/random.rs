//! Repeatable random numbers.

/// The generator `splitmix64` of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators" (2014).
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanRandom(u64);

impl PlanRandom {
    /// Creates a generator. Equal seeds give equal numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`, or 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The upper half of the product: the bias is below `bound` / 2^64.
        ((u128::from(self.next()) * u128::from(bound)) >> 64) as u64
    }
}
