//! The refusal of a charge.

use crate::{Bytes, Tag};
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
    /// What other processes hold, if they share the capacity and stand in the way.
    pub elsewhere: HeldElsewhere,
}

/// What other processes hold of a capacity that a root budget shares with them. All of it is 0 for
/// other budgets.
///
/// ```
/// use aquifer::{Budget, error::HeldElsewhere};
/// let refused = Budget::new("device 0", 64).charge(80).unwrap_err();
/// assert_eq!(refused.elsewhere, HeldElsewhere::default());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldElsewhere {
    /// Bytes that they hold in all.
    pub bytes: u64,
    /// The process that holds the most, or 0 if it is not known.
    pub process: u32,
    /// Its command, interned as a tag's name is.
    pub command: Tag,
    /// Bytes that it holds.
    pub most: u64,
}

impl Default for HeldElsewhere {
    fn default() -> Self {
        Self { bytes: 0, process: 0, command: Tag::NONE, most: 0 }
    }
}

impl fmt::Display for HeldElsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { bytes, process, command, most } = *self;
        write!(f, "other processes hold {}", Bytes(bytes))?;
        match process {
            0 => Ok(()),
            // A command may have any characters, which `?` escapes.
            _ => write!(f, ", process {process} most ({}, {:?})", Bytes(most), command.name()),
        }
    }
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
    /// for by them. What other processes [hold](OutOfBudget::elsewhere) is not among them.
    #[must_use]
    pub fn kept(&self) -> u64 {
        let left = self.limit.saturating_sub(self.current).saturating_sub(self.remaining);
        left.saturating_sub(self.elsewhere.bytes)
    }

    /// Returns whether the limit admits the charge, and other processes hold the bytes.
    #[must_use]
    pub fn is_held_elsewhere(&self) -> bool {
        let within = self.current.checked_add(self.requested).is_some_and(|all| all <= self.limit);
        within && self.elsewhere.bytes > 0
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
            0 => {}
            kept => write!(f, ", {} kept for others", Bytes(kept))?,
        }
        match self.elsewhere.bytes {
            0 => Ok(()),
            _ => write!(f, "; {}", self.elsewhere),
        }
    }
}

impl error::Error for OutOfBudget {}
