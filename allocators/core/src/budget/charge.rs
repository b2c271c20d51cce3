//! Bytes that were taken: charges, reservations, and charges whose free has failed.

use super::{Budget, node::Node, refusal::OutOfBudget};
use crate::sync::atomic::Ordering::Relaxed;
use std::{fmt, mem::ManuallyDrop};

/// Bytes taken from a [`Budget`] and from all above it, given back when this is dropped.
///
/// Keep it beside what it pays for: a physical handle, a region, a block. Forgetting one keeps the
/// bytes charged. Dropping one never blocks; it may call hooks of levels, and wake whoever waits.
#[must_use = "a charge that is dropped at once pays for nothing"]
pub struct Charge {
    /// No handle of its own, since the bytes keep the node; a handle if there are no bytes.
    budget: ManuallyDrop<Budget>,
    /// Exactly what `drop` gives back.
    bytes: u64,
}

impl Charge {
    /// What [`Node::take`] has let pass.
    #[inline]
    pub(super) fn granted(node: &'static Node, bytes: u64) -> Self {
        if bytes == 0 {
            node.handles.fetch_add(1, Relaxed);
        }
        Self { budget: ManuallyDrop::new(Budget { node }), bytes }
    }

    /// Bytes it holds.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The budget it is charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Cuts `bytes` off into a charge of their own; `None` if it holds fewer. The total stays as it
    /// is.
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

    /// Takes in another charge of the same budget; hands it back untouched if it is of another.
    ///
    /// # Errors
    /// The other charge.
    pub fn merge(&mut self, mut other: Charge) -> Result<(), Charge> {
        if !self.budget.is(&other.budget) {
            return Err(other);
        }
        if self.bytes == 0 {
            // Whichever has no bytes has a handle, and goes.
            std::mem::swap(&mut self.bytes, &mut other.bytes);
        } else if other.bytes > 0 {
            let other = ManuallyDrop::new(other);
            // Both are parts of one u64 that did not overflow when they were taken.
            self.bytes += other.bytes;
        }
        Ok(())
    }

    /// Says that what this pays for could not be freed. The bytes stay charged, and are counted as
    /// stranded here and above, until the owner has freed it after all.
    #[must_use = "the owner can try again"]
    pub fn strand(self) -> StrandedCharge {
        self.budget.node.strand(self.bytes);
        StrandedCharge { charge: ManuallyDrop::new(self) }
    }
}

impl Drop for Charge {
    #[inline]
    fn drop(&mut self) {
        let node = self.budget.node;
        if self.bytes == 0 { node.forget() } else { node.give(self.bytes) }
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

/// Bytes taken all at once and drawn bit by bit; what is left is given back when this is dropped.
///
/// ```
/// use aquifer_core::Budget;
/// let budget = Budget::new("device 0", 100);
/// let mut held = budget.reserve(80)?;
/// let first = held.draw(30)?;                  // cannot be refused by anybody else's charges
/// assert_eq!((held.remaining(), budget.used()), (50, 80));
/// drop(held);
/// assert_eq!(budget.used(), first.bytes());
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[must_use = "a reservation that is dropped at once holds nothing"]
#[derive(Debug)]
pub struct Reservation {
    rest: Charge,
}

impl From<Charge> for Reservation {
    /// All of a charge's bytes, to be drawn later: how a reservation is waited for by a future.
    fn from(rest: Charge) -> Self {
        Self { rest }
    }
}

impl Reservation {
    /// Takes `bytes` out of what is held, as a charge of their own.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the reservation's own figures if it holds fewer; it is as it was.
    pub fn draw(&mut self, bytes: u64) -> Result<Charge, OutOfBudget> {
        let held = self.rest.bytes;
        self.rest.split(bytes).ok_or_else(|| OutOfBudget {
            budget: self.rest.budget.name(),
            requested: bytes,
            current: 0,
            remaining: held,
            limit: held,
        })
    }

    /// Puts back what was drawn and not used; hands it back untouched if it is of another budget.
    ///
    /// # Errors
    /// The charge.
    pub fn put_back(&mut self, drawn: Charge) -> Result<(), Charge> {
        self.rest.merge(drawn)
    }

    /// Bytes not drawn yet.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.rest.bytes
    }

    /// The budget that the bytes are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.rest.budget
    }
}

/// A charge for what could not be freed. Its bytes stay charged, also when this is dropped: the
/// memory is still held.
///
/// ```
/// use aquifer_core::Budget;
/// let budget = Budget::new("device 0", 100);
/// let stranded = budget.charge(60)?.strand();              // the driver has refused to release it
/// assert_eq!((budget.used(), budget.stranded()), (60, 60));
/// let stranded = stranded.retry(|| Err::<(), _>("busy")).unwrap_err().0;
/// assert_eq!(budget.stranded(), 60);
/// assert!(stranded.retry(|| Ok::<_, &str>(())).is_ok());   // now it has
/// assert_eq!((budget.used(), budget.stranded()), (0, 0));
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[must_use = "the memory is still held: its owner can try again"]
#[derive(Debug)]
pub struct StrandedCharge {
    charge: ManuallyDrop<Charge>,
}

impl StrandedCharge {
    /// Bytes that are still charged.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.charge.bytes
    }

    /// The budget that they are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.charge.budget
    }

    /// Tries again: gives the bytes back if `free` succeeds.
    ///
    /// # Errors
    /// The charge, as it was, and the error of `free`.
    pub fn retry<T, E>(self, free: impl FnOnce() -> Result<T, E>) -> Result<T, (Self, E)> {
        match free() {
            Ok(value) => {
                self.freed();
                Ok(value)
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Gives the bytes back: what they pay for has been freed.
    pub fn freed(self) {
        let charge = ManuallyDrop::into_inner(self.charge);
        charge.budget.node.unstrand(charge.bytes);
    }
}
