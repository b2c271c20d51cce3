//! The seeded random numbers of a run.

/// `SplitMix64`. Runs must be reproducible on every machine, and statistical quality matters
/// little.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..=max`.
    pub(crate) fn up_to(&mut self, max: usize) -> usize {
        let max = max as u64;
        // Slightly biased for a huge `max`, which does not matter.
        let value = if max == u64::MAX { self.next() } else { self.next() % (max + 1) };
        // At most `max`, which was a `usize`.
        usize::try_from(value).unwrap_or(usize::MAX)
    }

    /// Returns a size in `1..=max`, with small and large sizes equally likely.
    pub(crate) fn size(&mut self, max: usize) -> usize {
        let bits = usize::BITS - max.leading_zeros();
        let shift = self.up_to(bits.saturating_sub(1) as usize);
        (1 + self.up_to(max.saturating_sub(1))).min((2usize << shift) - 1).max(1)
    }
}
