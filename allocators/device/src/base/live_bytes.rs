//! Bytes of live blocks, in allocated and in requested sizes.

use aquifer_core::PoolStats;
use std::ops::{Add, AddAssign, SubAssign};

/// Bytes of live blocks, in both ways of counting. Sums wrap around: a part of them may be below
/// zero for a moment.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct LiveBytes {
    /// In allocated sizes.
    pub(crate) live: u64,
    /// In requested sizes.
    pub(crate) requested: u64,
}

impl LiveBytes {
    /// More than any pool has.
    pub(crate) const MAX: Self = Self { live: u64::MAX, requested: u64::MAX };

    /// Returns whether neither number is above its bound.
    #[inline]
    pub(crate) fn is_within(self, bound: Self) -> bool {
        self.live <= bound.live && self.requested <= bound.requested
    }

    /// Returns the larger of each number.
    pub(crate) fn max(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// Returns the smaller of each number.
    pub(crate) fn min(self, other: Self) -> Self {
        self.zip(other, u64::min)
    }

    /// Returns what `self` has above `other`, or 0, of each number.
    pub(crate) fn above(self, other: Self) -> Self {
        self.zip(other, u64::saturating_sub)
    }

    /// Returns `change` of each number.
    pub(crate) fn map(self, change: impl Fn(u64) -> u64) -> Self {
        Self { live: change(self.live), requested: change(self.requested) }
    }

    /// Sets the peaks of `stats` to these bytes, or to what is live there if that is more: a block
    /// that is being allocated may be live in one of the counts only.
    pub(crate) fn set_in(self, stats: &mut PoolStats) {
        stats.peak_live = self.live.max(stats.live);
        stats.peak_requested = self.requested.max(stats.requested);
    }

    fn zip(self, other: Self, with: impl Fn(u64, u64) -> u64) -> Self {
        Self { live: with(self.live, other.live), requested: with(self.requested, other.requested) }
    }
}

impl Add for LiveBytes {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.zip(other, u64::wrapping_add)
    }
}

impl AddAssign for LiveBytes {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl SubAssign for LiveBytes {
    fn sub_assign(&mut self, other: Self) {
        *self = self.zip(other, u64::wrapping_sub);
    }
}
