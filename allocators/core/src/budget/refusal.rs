//! The refusal of a charge ([`OutOfBudget`]), with what other processes hold ([`HeldElsewhere`])
//! and the limits to raise ([`Raise`]); the live bytes of a tag ([`Holding`]); and
//! [`CapacitySource`], from which a shared root claims, with the refusal of a claim
//! ([`ClaimShortage`]).

use crate::{Bytes, Tag};
use std::{error, fmt};

/// The error of a refused charge. The charge changed nothing.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
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
    /// What other processes hold, if they share the capacity and stand in the way:
    /// [`OutOfBudget::held_elsewhere`] and [`OutOfBudget::largest_holder`].
    #[doc(hidden)]
    pub elsewhere: HeldElsewhere,
}

/// What other processes hold of a capacity that a root budget shares with them. All of it is 0 for
/// other budgets. [`OutOfBudget`] tells it.
#[doc(hidden)]
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct HeldElsewhere {
    /// The bytes above the number of the holder's tag: a refusal is part of every error of this
    /// library, which must stay small.
    packed: u64,
}

impl HeldElsewhere {
    /// The most bytes that are told.
    const MOST: u64 = u64::MAX >> 16;

    /// Creates the account of `bytes`, of which `holder` names the process that holds most, or is
    /// [`Tag::NONE`].
    #[must_use]
    pub fn new(bytes: u64, holder: Tag) -> Self {
        Self { packed: bytes.min(Self::MOST) << 16 | holder.index() as u64 }
    }

    /// Returns the bytes that they hold in all, at most 256 TiB.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.packed >> 16
    }

    /// Returns the process that holds the most, with its command, if it is known.
    #[must_use]
    pub fn holder(self) -> Option<&'static str> {
        let holder = Tag::from_index((self.packed & 0xffff) as usize)?;
        (holder != Tag::NONE).then(|| holder.name())
    }
}

/// The bytes and the holder, or nothing.
#[cfg(feature = "serde")]
impl serde::Serialize for HeldElsewhere {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.bytes() > 0).then(|| (self.bytes(), self.holder())).serialize(serializer)
    }
}

impl fmt::Display for HeldElsewhere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_held(f, self.bytes(), self.holder())
    }
}

/// Writes what other processes hold, and the largest holder.
pub(crate) fn write_held(
    f: &mut fmt::Formatter<'_>,
    bytes: u64,
    holder: Option<&str>,
) -> fmt::Result {
    write!(f, "other processes hold {}", Bytes(bytes))?;
    holder.map_or(Ok(()), |holder| write!(f, ", most of it {holder}"))
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
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
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
    /// for by them. What other processes [hold](OutOfBudget::held_elsewhere) is not among them.
    #[must_use]
    pub fn kept(&self) -> u64 {
        let left = self.limit.saturating_sub(self.current).saturating_sub(self.remaining);
        left.saturating_sub(self.elsewhere.bytes())
    }

    /// Returns the bytes that other processes hold of the capacity that they share with this
    /// budget, if they stand in the way: at most 256 TiB.
    #[must_use]
    pub fn held_elsewhere(&self) -> u64 {
        self.elsewhere.bytes()
    }

    /// Returns the process that holds the most of [these bytes](OutOfBudget::held_elsewhere), with
    /// its command, if it is known.
    #[must_use]
    pub fn largest_holder(&self) -> Option<&'static str> {
        self.elsewhere.holder()
    }

    /// Returns whether the limit admits the charge, and other processes hold the bytes.
    #[must_use]
    pub fn is_held_elsewhere(&self) -> bool {
        let within = self.current.checked_add(self.requested).is_some_and(|all| all <= self.limit);
        within && self.elsewhere.bytes() > 0
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
        match self.elsewhere.bytes() {
            0 => Ok(()),
            _ => write!(f, "; {}", self.elsewhere),
        }
    }
}

impl error::Error for OutOfBudget {}

/// The live bytes and blocks of one tag.
///
/// See the example of [`OutOfMemory`](crate::OutOfMemory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Holding {
    /// The tag.
    pub tag: Tag,
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks.
    pub blocks: u64,
}

/// The refusal of a claim.
#[derive(Clone, Copy, Debug)]
pub struct ClaimShortage {
    /// Bytes that a claim could have taken.
    pub room: u64,
    /// What other processes hold.
    pub elsewhere: HeldElsewhere,
}

impl From<u64> for ClaimShortage {
    /// The refusal of a source that tells nothing of other processes.
    fn from(room: u64) -> Self {
        Self { room, elsewhere: HeldElsewhere::default() }
    }
}

/// Where a root budget claims the bytes that it grants.
///
/// Nothing here is called with a lock of the budget held.
pub trait CapacitySource: Send + Sync {
    /// Claims `bytes`, or nothing. Does not wait for other processes to release any.
    ///
    /// A claim comes before its charge. Of several threads that claim at once, some may then be
    /// refused by a limit of the tree, and release what they have claimed.
    ///
    /// # Errors
    /// [`ClaimShortage`].
    fn claim(&self, bytes: u64) -> Result<(), ClaimShortage>;

    /// Releases claimed bytes. Must not block.
    fn release(&self, bytes: u64);

    /// Returns the bytes that a claim could take now.
    fn room(&self) -> u64;

    /// Returns how many bytes a reclaimer has to obtain before a claim of `bytes` is granted, or 0
    /// if it would be granted now.
    fn shortfall(&self, bytes: u64) -> u64;

    /// Is told that a driver has refused `bytes` that were claimed: less is free than the source
    /// takes for room.
    fn refused_by_driver(&self, _bytes: u64) {}

    /// Returns what a refused claim of `bytes` would return now.
    fn shortage(&self, _bytes: u64) -> ClaimShortage {
        self.room().into()
    }
}
