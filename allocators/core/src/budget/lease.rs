//! Leases: prepaid bytes, so that a limit on live bytes costs little per charge.
//!
//! ```text
//!   the tree    ──── used: 128 KiB ──────────────────────────────────────────
//!                         ▲ a grain at a time          │ what is above two grains
//!   the lease   ──── live 40 KiB │ spare 88 KiB ───────▼─────────────────────
//!                      charge ──►│◄── release            one atomic of its own
//! ```
//!
//! A lease takes bytes from the tree in units of a grain, and serves charges from its spare bytes.
//!
//! - Spare bytes are available to every charge of the tree. Before a charge is refused, when a
//!   waiter enters the queue and when a limit is lowered, the spare bytes are recalled by the
//!   thread that needs them, without the lease's owner.
//! - While there is a waiter, or use and unused guarantees exceed a lowered limit, a lease keeps no
//!   spare bytes.
//! - So a limit on live bytes is exact: a charge is refused only if the live bytes leave no room
//!   for it. A refusal has to visit every lease.
//!
//! A thread that makes bytes spare checks afterwards for waiters and lowered limits. A thread that
//! waits or lowers a limit publishes that first and recalls afterwards. So one of the two sees the
//! other.

use super::{
    node::{Budget, LeaseBody},
    refusal::OutOfBudget,
};
use crate::sync::{
    atomic::{
        AtomicU8, AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
    },
    store_load_fence,
};
use std::fmt;

/// Set in `spare` when the lease is closed: from then on no bytes are kept.
const CLOSED: u64 = 1 << 63;
const IDLE: u8 = 0;
const IN_USE: u8 = 1;

/// A prepaid part of a budget, for the live bytes of a thread, a stream or a shard.
///
/// Several threads may share one, but one per thread is fastest. Spare bytes count towards the
/// limit, but not as [used](Budget::used). A charge that would be refused recalls them first.
///
/// ```
/// use aquifer::Budget;
/// let tenant = Budget::new("tenant a", 1 << 20);
/// let lease = tenant.lease(64 << 10);
/// let live = lease.charge(1000)?;              // from here on a few instructions per charge
/// assert_eq!((live.bytes(), lease.spare()), (1000, 64 << 10));
/// let all = tenant.charge((1 << 20) - 1000)?;  // recalls the spare bytes instead of failing
/// assert_eq!(lease.spare(), 0);
/// assert!(lease.charge(1).is_err());
/// drop((live, all, lease));
/// assert_eq!(tenant.used(), 0);
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
pub struct BudgetLease {
    body: &'static LeaseBody,
}

/// Bytes charged to a [`BudgetLease`]. Dropping it gives them back to the lease, or to the budget
/// if the lease is closed.
#[must_use = "a charge that is dropped at once pays for nothing"]
pub struct Leased {
    body: &'static LeaseBody,
    bytes: u64,
}

impl Budget {
    /// Opens a lease that takes `grain` bytes at a time and keeps at most twice that. Takes nothing
    /// yet.
    #[must_use]
    pub fn lease(&self, grain: u64) -> BudgetLease {
        let node = self.node;
        let idle =
            |body: &LeaseBody| body.state.compare_exchange(IDLE, IN_USE, AcqRel, Relaxed).is_ok();
        let body = node.leases.claim(idle, || LeaseBody {
            spare: AtomicU64::new(0),
            outstanding: AtomicU64::new(0),
            grain: AtomicU64::new(0),
            node,
            state: AtomicU8::new(IN_USE),
        });
        node.handles.fetch_add(1, Relaxed);
        node.tree.open_leases.fetch_add(1, Relaxed);
        // Bounded, so that a sum of spare bytes cannot reach the `CLOSED` bit.
        body.grain.store(grain.min(CLOSED >> 3), Relaxed);
        body.outstanding.store(1, Relaxed);
        body.spare.store(0, Release);
        BudgetLease { body }
    }
}

impl BudgetLease {
    /// Takes `bytes`, or nothing. Never blocks.
    ///
    /// # Errors
    /// [`OutOfBudget`] of the budget or of the ancestor that refused, once no lease has spare bytes
    /// left.
    #[inline]
    pub fn charge(&self, bytes: u64) -> Result<Leased, OutOfBudget> {
        let body = self.body;
        let mut spare = body.spare.load(Relaxed);
        while let Some(rest) = spare.checked_sub(bytes) {
            match body.spare.compare_exchange_weak(spare, rest, AcqRel, Relaxed) {
                Ok(_) => return Ok(Leased { body, bytes }),
                Err(now) => spare = now,
            }
        }
        body.refill(bytes)?;
        Ok(Leased { body, bytes })
    }

    /// Returns the bytes that are prepaid and not charged.
    #[must_use]
    pub fn spare(&self) -> u64 {
        self.body.spare()
    }

    /// Returns a handle to the budget that is charged.
    #[must_use]
    pub fn budget(&self) -> Budget {
        self.body.node.new_handle()
    }

    /// Releases the spare bytes to the budget.
    pub fn trim(&self) {
        self.body.recall();
    }
}

impl Drop for BudgetLease {
    fn drop(&mut self) {
        self.body.spare.fetch_or(CLOSED, AcqRel);
        self.body.recall();
        self.body.node.tree.open_leases.fetch_sub(1, Relaxed);
        self.body.drop_outstanding(1);
    }
}

impl fmt::Debug for BudgetLease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease")
            .field("budget", &self.body.node.name())
            .field("spare", &self.spare())
            .finish_non_exhaustive()
    }
}

impl Leased {
    /// Returns the charged bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Splits off a charge of `bytes`, or returns `None` if this one holds fewer. The total does
    /// not change.
    ///
    /// ```
    /// use aquifer::Budget;
    /// let tenant = Budget::new("tenant a", 100);
    /// let lease = tenant.lease(10);
    /// let mut both = lease.charge(70)?;
    /// let one = both.split(30);
    /// assert_eq!((both.bytes(), one.map(|one| one.bytes())), (40, Some(30)));
    /// drop((both, lease));
    /// assert_eq!(tenant.used(), 0);
    /// # Ok::<(), aquifer::OutOfBudget>(())
    /// ```
    #[must_use]
    pub fn split(&mut self, bytes: u64) -> Option<Leased> {
        self.bytes = self.bytes.checked_sub(bytes)?;
        Some(Leased { body: self.body, bytes })
    }
}

impl Drop for Leased {
    #[inline]
    fn drop(&mut self) {
        let body = self.body;
        // Bytes beyond a grain are not kept.
        if self.bytes > body.grain.load(Relaxed) {
            body.release_to_tree(self.bytes);
        } else if self.bytes > 0 {
            body.add_spare(self.bytes);
        }
    }
}

impl fmt::Debug for Leased {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leased").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl LeaseBody {
    pub(super) fn spare(&self) -> u64 {
        self.spare.load(Relaxed) & !CLOSED
    }

    /// Takes `bytes` from the tree, and a grain on top if that fits without a recall.
    #[cold]
    fn refill(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        let grain = self.grain.load(Relaxed);
        let tree = self.node.tree;
        if bytes <= grain
            && !tree.wait_queue.has_waiters()
            && self.node.charge_without_recall(bytes + grain).is_ok()
        {
            self.outstanding.fetch_add(bytes + grain, AcqRel);
            self.add_spare(grain);
            return Ok(());
        }
        self.node.charge(bytes)?;
        self.outstanding.fetch_add(bytes, AcqRel);
        Ok(())
    }

    /// Keeps bytes for the next charge, or releases them if they must not be kept.
    #[inline]
    fn add_spare(&'static self, bytes: u64) {
        let before = self.spare.fetch_add(bytes, SeqCst);
        debug_assert!((before & !CLOSED) + bytes < CLOSED, "spare bytes reach the closing bit");
        store_load_fence();
        let most = 2 * self.grain.load(Relaxed);
        // The `CLOSED` bit exceeds every bound.
        if before + bytes > most || self.must_return_spare() {
            self.return_spare(most / 2);
        }
    }

    /// Returns whether spare bytes must go back: there is a waiter, or a lowered limit is
    /// exceeded.
    #[inline]
    fn must_return_spare(&self) -> bool {
        self.node.tree.wait_queue.has_waiters() || self.node.is_over_limit()
    }

    /// Releases the spare bytes above `keep` to the tree, or all of them if none may be kept.
    #[cold]
    fn return_spare(&'static self, keep: u64) {
        let mut spare = self.spare.load(Acquire);
        loop {
            let retained = if spare & CLOSED != 0 || self.must_return_spare() { 0 } else { keep };
            let Some(excess) = (spare & !CLOSED).checked_sub(retained) else { return };
            match self.spare.compare_exchange_weak(spare, spare - excess, AcqRel, Acquire) {
                Ok(_) => return self.release_to_tree(excess),
                Err(now) => spare = now,
            }
        }
    }

    /// Releases all spare bytes to the tree. Called by the thread that needs them.
    pub(super) fn recall(&'static self) -> u64 {
        store_load_fence();
        if self.spare.load(SeqCst) & !CLOSED == 0 {
            return 0;
        }
        let spare = self.spare.fetch_and(CLOSED, SeqCst) & !CLOSED;
        self.release_to_tree(spare);
        spare
    }

    fn release_to_tree(&'static self, bytes: u64) {
        if bytes > 0 {
            self.node.release(bytes);
            self.drop_outstanding(bytes);
        }
    }

    fn drop_outstanding(&'static self, bytes: u64) {
        if self.outstanding.fetch_sub(bytes, AcqRel) == bytes {
            let node = self.node;
            self.spare.store(0, Relaxed);
            self.state.store(IDLE, Release);
            node.release_handle();
        }
    }
}
