//! Repeatable random numbers. Internal to this workspace.

/// The generator `splitmix64` of Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
/// Generators" (2014). Equal seeds give equal numbers on every machine and in every version: plans,
/// generated traces and tests depend on them.
#[derive(Clone, Copy, Debug)]
pub struct SplitMix64(u64);

impl SplitMix64 {
    /// Creates a generator.
    ///
    /// ```
    /// use aquifer_core::random::SplitMix64;
    /// let mut random = SplitMix64::new(0);
    /// assert_eq!(random.next_u64(), 0xe220_a839_7b1d_cdaf);
    /// ```
    #[inline]
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next number.
    ///
    /// ```
    /// use aquifer_core::random::SplitMix64;
    /// let mut random = SplitMix64::new(7);
    /// assert!(random.next_u64() != random.next_u64());
    /// ```
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_are_the_published_ones() {
        // The generator's own C program, from the seed 1234567.
        let mut random = SplitMix64::new(1_234_567);
        let expected = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| random.next_u64()), expected);
    }
}
