//! Charged bytes: charges and reservations, and bytes whose release has failed.

use super::{
    node::{Budget, Node},
    refusal::{HeldElsewhere, OutOfBudget},
};
use crate::sync::atomic::Ordering::Relaxed;
use std::{fmt, mem::ManuallyDrop};

/// Bytes taken from a [`Budget`] and all its ancestors, released when this is dropped.
///
/// Store it next to the resource that it pays for: a physical handle, a region, a block. Forgetting
/// it keeps the bytes charged. Dropping it never blocks, but may wake waiters.
#[must_use = "a charge that is dropped at once pays for nothing"]
pub struct Charge {
    /// A counted handle only if `bytes` is zero. Otherwise the bytes keep the node live.
    budget: ManuallyDrop<Budget>,
    /// Exactly the bytes that `drop` releases.
    bytes: u64,
}

impl Charge {
    /// Creates the charge that [`Node::charge`] has granted.
    #[inline]
    pub(super) fn granted(node: &'static Node, bytes: u64) -> Self {
        if bytes == 0 {
            node.handles.fetch_add(1, Relaxed);
        }
        Self { budget: ManuallyDrop::new(Budget { node }), bytes }
    }

    /// Returns the charged bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the budget that is charged.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Splits off a charge of `bytes`, or returns `None` if this one holds fewer. The total does
    /// not change.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        let rest = self.bytes.checked_sub(bytes)?;
        let node = self.budget.node;
        if rest == 0 && self.bytes > 0 {
            node.handles.fetch_add(1, Relaxed);
        }
        self.bytes = rest;
        Some(Charge::granted(node, bytes))
    }

    /// Merges another charge of the same budget into this one.
    ///
    /// # Errors
    /// The other charge, unchanged, if it belongs to a different budget.
    pub fn merge(&mut self, mut other: Charge) -> Result<(), Charge> {
        if !self.budget.is(&other.budget) {
            return Err(other);
        }
        if self.bytes == 0 {
            // The charge without bytes owns a handle, and is dropped.
            std::mem::swap(&mut self.bytes, &mut other.bytes);
        } else if other.bytes > 0 {
            let other = ManuallyDrop::new(other);
            debug_assert!(
                self.bytes + other.bytes <= self.budget.used(),
                "charges hold more than their budget has"
            );
            // Cannot overflow: both are parts of the same `u64` sum.
            self.bytes += other.bytes;
        }
        Ok(())
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        let node = self.budget.node;
        if self.bytes == 0 { node.release_handle() } else { node.release(self.bytes) }
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge")
            .field("budget", &self.budget.name())
            .field("bytes", &self.bytes)
            .finish()
    }
}

/// Bytes taken all at once and drawn in parts. The rest is released when this is dropped.
///
/// ```
/// use aquifer::Budget;
/// let budget = Budget::new("device 0", 100);
/// let mut held = budget.reserve(80)?;
/// let first = held.draw(30)?;                  // cannot be refused because of other charges
/// assert_eq!((held.remaining(), budget.used()), (50, 80));
/// drop(held);
/// assert_eq!(budget.used(), first.bytes());
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
#[must_use = "a reservation that is dropped at once holds nothing"]
#[derive(Debug)]
pub struct Reservation {
    rest: Charge,
}

impl From<Charge> for Reservation {
    /// Creates a reservation of all bytes of a charge. This is how a reservation is awaited.
    fn from(rest: Charge) -> Self {
        Self { rest }
    }
}

impl Reservation {
    /// Splits `bytes` off the reservation as a charge.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the reservation's own figures if it holds fewer. The reservation is
    /// unchanged then.
    pub fn draw(&mut self, bytes: u64) -> Result<Charge, OutOfBudget> {
        let held = self.rest.bytes;
        self.rest.split(bytes).ok_or_else(|| OutOfBudget {
            budget: self.rest.budget.name(),
            requested: bytes,
            current: 0,
            remaining: held,
            limit: held,
            elsewhere: HeldElsewhere::default(),
        })
    }

    /// Returns a drawn charge to the reservation.
    ///
    /// # Errors
    /// The charge, unchanged, if it belongs to a different budget.
    pub fn put_back(&mut self, drawn: Charge) -> Result<(), Charge> {
        self.rest.merge(drawn)
    }

    /// Returns the bytes that are not drawn yet.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.rest.bytes
    }

    /// Returns the budget that the bytes are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.rest.budget
    }
}

/// Bytes that are counted as stranded until this is dropped: see the example of
/// `Budget::count_stranded`.
#[must_use = "the bytes are counted until this is dropped"]
#[derive(Debug)]
pub struct StrandedCount {
    budget: Budget,
    bytes: u64,
}

impl Budget {
    /// Counts `bytes` as stranded here and in every ancestor until the returned value is dropped,
    /// or for good if it is forgotten. The bytes must be charged to this budget by other values,
    /// and belong to memory that could not be freed. Takes the tree's lock.
    ///
    /// ```
    /// use aquifer::Budget;
    /// let budget = Budget::new("device 0", 100);
    /// let charge = budget.charge(60)?;                          // for a range that stays mapped
    /// let count = budget.count_stranded(charge.bytes());
    /// assert_eq!((budget.used(), budget.stranded()), (60, 60));
    /// drop((count, charge));                                    // it has been unmapped
    /// assert_eq!((budget.used(), budget.stranded()), (0, 0));
    /// # Ok::<(), aquifer::OutOfBudget>(())
    /// ```
    #[doc(hidden)]
    pub fn count_stranded(&self, bytes: u64) -> StrandedCount {
        self.node.strand(bytes);
        StrandedCount { budget: self.clone(), bytes }
    }
}

impl Drop for StrandedCount {
    fn drop(&mut self) {
        self.budget.node.unstrand(self.bytes);
    }
}
