//! The refusal of a charge.

use crate::Bytes;
use std::{error, fmt};

/// The error of a refused charge. The charge changed nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct OutOfBudget {
    /// The name of the budget that refused: the charged one, or the nearest ancestor that has no
    /// room.
    pub budget: &'static str,
    /// Bytes requested.
    pub requested: u64,
    /// Bytes charged to this budget already.
    pub current: u64,
    /// Bytes that it would have granted. Less than `limit - current` if the rest is guaranteed to
    /// others, or waited for.
    pub remaining: u64,
    /// Its limit, in bytes.
    pub limit: u64,
}

/// A limit that is too low for a charge.
///
/// ```
/// use aquifer_core::{Budget, budget::Raise};
/// let device = Budget::new("device 0", 64);
/// let _held = device.charge(60)?;
/// assert_eq!(device.raises(22, 0), [Raise { budget: "device 0", by: 18, to: 82 }]);
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Raise {
    /// The name of the budget with this limit.
    pub budget: &'static str,
    /// Bytes that are missing.
    pub by: u64,
    /// The limit at which the charge would fit, in bytes.
    pub to: u64,
}

impl OutOfBudget {
    /// Returns how many bytes have to be released there before the request is granted. This
    /// includes use beyond a lowered limit.
    #[must_use]
    pub fn missing(&self) -> u64 {
        let over = self.current.saturating_add(self.requested).saturating_sub(self.limit);
        self.requested.saturating_sub(self.remaining).max(over)
    }

    /// Returns the bytes below the limit that are kept for others: guaranteed to them, or waited
    /// for by them.
    #[must_use]
    pub fn kept(&self) -> u64 {
        self.limit.saturating_sub(self.current).saturating_sub(self.remaining)
    }
}

crate::__debug_as_display!(OutOfBudget);

impl fmt::Display for OutOfBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} asked of the budget of {}, {} of {} used, {} left",
            Bytes(self.requested),
            self.budget,
            Bytes(self.current),
            Bytes(self.limit),
            Bytes(self.remaining)
        )?;
        match self.kept() {
            0 => Ok(()),
            kept => write!(f, ", {} kept for others", Bytes(kept)),
        }
    }
}

impl error::Error for OutOfBudget {}
