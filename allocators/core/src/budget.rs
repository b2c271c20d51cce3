//! A limit on bytes that is exact at every instant.
//!
//! [`Budget::charge`] takes bytes and answers with a [`Charge`], which gives exactly those bytes back when it is
//! dropped. The bytes stand in the charge, so releasing one never depends on what others did meanwhile: an account kept
//! as the difference of two readings of a shared counter drifts as soon as two threads allocate at once.
//!
//! [`Budget::reserve`] takes bytes all at once or not at all, and hands them out later: a [`Reservation`] draws
//! charges that cannot be refused any more.
//!
//! ```text
//!   used:  0 ────── charge(60) ── 60 ── reserve(40) ── 100 ── draw(30) ── 100 ── drop reservation ── 90
//!   limit: 100                              ▲ a charge of one byte is refused from here ……………………… to here
//! ```
//!
//! Nothing here blocks, and nothing is notified: a pool that is refused looks for what it can give back and asks again.

use crate::{
    Bytes, Tag,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use std::{error, fmt};

/// A limit on bytes, shared by whoever clones it.
///
/// ```
/// use aquifer_core::Budget;
/// let budget = Budget::new("device 0", 100);
/// let charge = budget.charge(100)?;
/// assert!(budget.charge(1).is_err());
/// drop(charge);
/// assert_eq!(budget.used(), 0);
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[derive(Clone)]
pub struct Budget {
    account: Arc<Account>,
}

struct Account {
    name: &'static str,
    /// Bytes in charges and reservations. Never above the limit that stood when it was last raised.
    used: AtomicU64,
    limit: AtomicU64,
    /// The most that `used` has been since the last reset.
    peak: AtomicU64,
}

/// A charge that was refused. Nothing has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OutOfBudget {
    /// The budget that refused.
    pub budget: &'static str,
    /// Bytes asked for.
    pub requested: u64,
    /// Bytes charged already.
    pub current: u64,
    /// Bytes that would have been granted.
    pub remaining: u64,
    /// The limit, in bytes.
    pub limit: u64,
}

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
        )
    }
}

impl error::Error for OutOfBudget {}

impl Budget {
    /// A budget of `limit` bytes with a name for its errors, usually a tag's or a literal.
    #[must_use]
    pub fn new(name: &'static str, limit: u64) -> Self {
        Self {
            account: Arc::new(Account {
                name,
                used: AtomicU64::new(0),
                limit: AtomicU64::new(limit),
                peak: AtomicU64::new(0),
            }),
        }
    }

    /// A budget that only counts.
    #[must_use]
    pub fn unlimited(name: &'static str) -> Self {
        Self::new(name, u64::MAX)
    }

    /// Takes `bytes`, or nothing. Never blocks.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the figures of that moment.
    pub fn charge(&self, bytes: u64) -> Result<Charge, OutOfBudget> {
        let account = &*self.account;
        // Relaxed: the account guards no other memory, and every read-modify-write of one atomic is in one order.
        let mut current = account.used.load(Ordering::Relaxed);
        loop {
            let limit = account.limit.load(Ordering::Relaxed);
            let next = match current.checked_add(bytes) {
                Some(next) if next <= limit => next,
                _ => return Err(self.refusal(bytes, current, limit)),
            };
            match account.used.compare_exchange_weak(current, next, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => {
                    account.peak.fetch_max(next, Ordering::Relaxed);
                    return Ok(Charge { budget: self.clone(), bytes });
                }
                Err(now) => current = now,
            }
        }
    }

    /// Takes `bytes` at once to be drawn later, or nothing. Never blocks.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the figures of that moment.
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, OutOfBudget> {
        self.charge(bytes).map(|rest| Reservation { rest })
    }

    fn refusal(&self, requested: u64, current: u64, limit: u64) -> OutOfBudget {
        OutOfBudget {
            budget: self.account.name,
            requested,
            current,
            remaining: limit.saturating_sub(current),
            limit,
        }
    }

    /// The name given at the start.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.account.name
    }

    /// Bytes in charges and reservations.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.account.used.load(Ordering::Relaxed)
    }

    /// The limit, in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.account.limit.load(Ordering::Relaxed)
    }

    /// Bytes that a charge could take now.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.limit().saturating_sub(self.used())
    }

    /// Sets the limit for charges from now on. Below what is used it refuses all of them until enough has been given
    /// back; answers with that excess, in bytes.
    pub fn set_limit(&self, limit: u64) -> u64 {
        self.account.limit.store(limit, Ordering::Relaxed);
        self.used().saturating_sub(limit)
    }

    /// The most bytes that were used at once since the start or the last [`Budget::reset_peak`].
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.account.peak.load(Ordering::Relaxed)
    }

    /// Starts the peak anew from what is used now.
    pub fn reset_peak(&self) {
        self.account.peak.store(self.used(), Ordering::Relaxed);
    }

    /// Whether both are handles to one account.
    #[must_use]
    pub fn is(&self, other: &Budget) -> bool {
        Arc::ptr_eq(&self.account, &other.account)
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("name", &self.account.name)
            .field("used", &self.used())
            .field("limit", &self.limit())
            .field("peak", &self.peak())
            .finish()
    }
}

/// Bytes taken from a [`Budget`], given back when this is dropped.
///
/// Keep it beside what it pays for: a physical handle, a region, a block. Forgetting one keeps the bytes charged.
#[must_use = "a charge that is dropped at once pays for nothing"]
pub struct Charge {
    budget: Budget,
    /// Exactly what `drop` gives back.
    bytes: u64,
}

impl Charge {
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

    /// Cuts `bytes` off into a charge of their own; `None` if it holds fewer. The total stays as it is.
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Option<Charge> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Charge { budget: self.budget.clone(), bytes })
    }

    /// Takes in another charge of the same budget; hands it back untouched if it is of another.
    ///
    /// # Errors
    /// The other charge.
    pub fn merge(&mut self, mut other: Charge) -> Result<(), Charge> {
        if !self.budget.is(&other.budget) {
            return Err(other);
        }
        // Both are parts of one u64 that did not overflow when they were taken.
        self.bytes += std::mem::take(&mut other.bytes);
        Ok(())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.budget.account.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Charge").field("budget", &self.budget.name()).field("bytes", &self.bytes).finish()
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

impl Reservation {
    /// Takes `bytes` out of what is held, as a charge of their own.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the reservation's own figures if it holds fewer; it is as it was.
    pub fn draw(&mut self, bytes: u64) -> Result<Charge, OutOfBudget> {
        let held = self.rest.bytes;
        self.rest.split(bytes).ok_or_else(|| self.rest.budget.refusal(bytes, 0, held))
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

/// Bytes and how many blocks one tag holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Whose.
    pub tag: Tag,
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks.
    pub blocks: u64,
}
