//! Roots whose capacity is shared with other processes.
//!
//! ```text
//!   charge ── fits the limits ── claim, with no lock held ── under the lock: claimed += bytes,
//!                                     │ refused                              used    += bytes
//!                                     ▼
//!                             refused by the root
//!   release ── under the lock: used −= bytes, claimed = used ── the rest is released to the source
//! ```
//!
//! # Invariants
//! 1. `used` of the root never exceeds `claimed`, and the source has granted at least `claimed`.
//! 2. What is claimed and not used is released to the source as soon as no lock is held. A waiter
//!    of this process gets it before.
//! 3. The fast paths of charges and releases never apply to a shared root. Other trees have the
//!    same fast paths as without shared roots.

use super::{
    node::{Budget, NOT_SHARED, Node, Tree},
    refusal::{CapacitySource, ClaimShortage, OutOfBudget},
    spin_lock::SpinGuard,
    tree::Refusal,
};
use crate::sync::{atomic::Ordering::Relaxed, lock};
use std::sync::Arc;

impl Budget {
    /// Creates a root budget of at most `limit` bytes, each of which is claimed from `source`
    /// before it is granted, and released to it as soon as it is not used.
    ///
    /// A charge that the source refuses is refused by this budget. A guarantee below it is kept
    /// among the budgets of this process only. In a child of a fork the source decides whether
    /// charges are granted.
    ///
    /// ```
    /// use aquifer_core::{Budget, budget::{CapacitySource, ClaimShortage}};
    /// use std::sync::{Arc, Mutex};
    /// /// What all processes have left.
    /// struct Left(Mutex<u64>);
    /// impl CapacitySource for Left {
    ///     fn claim(&self, bytes: u64) -> Result<(), ClaimShortage> {
    ///         let mut left = self.0.lock().unwrap();
    ///         *left = left.checked_sub(bytes).ok_or(*left)?;
    ///         Ok(())
    ///     }
    ///     fn release(&self, bytes: u64) { *self.0.lock().unwrap() += bytes }
    ///     fn room(&self) -> u64 { *self.0.lock().unwrap() }
    ///     fn shortfall(&self, bytes: u64) -> u64 { bytes.saturating_sub(self.room()) }
    /// }
    /// let left = Arc::new(Left(Mutex::new(70)));
    /// let device = Budget::shared("device 0", 100, left.clone());
    /// let charge = device.charge(60)?;
    /// assert_eq!((device.remaining(), left.room()), (10, 10));
    /// assert_eq!(device.charge(20).unwrap_err().remaining, 10);
    /// drop(charge);
    /// assert_eq!(left.room(), 70);
    /// # Ok::<(), aquifer_core::OutOfBudget>(())
    /// ```
    #[doc(hidden)]
    #[must_use]
    pub fn shared(name: &'static str, limit: u64, source: Arc<dyn CapacitySource>) -> Self {
        let node = Node::claim(None, name, limit);
        *lock(&node.tree.source) = Some(source);
        {
            let _guard = node.tree.lock.lock();
            node.tree.claimed.store(0, Relaxed);
            node.update_bounds();
        }
        Self { node }
    }

    /// Claims the bytes of the first waiter of a shared tree, and serves the
    /// waiters with them. What it does not need is released. Called now and then by the thread that
    /// answers other processes, since nothing else in this process sees that they have released
    /// bytes.
    #[doc(hidden)]
    pub fn serve_waiters(&self) {
        let tree = self.node.tree;
        let Some(bytes) = tree.wait_queue.first_waiting() else { return };
        let Some(source) = tree.source() else { return };
        if source.claim(bytes).is_err() {
            return;
        }
        {
            let _guard = tree.lock.lock();
            tree.add_claimed(bytes);
        }
        tree.wait_queue.request_scan();
        self.node.root().release_unused();
    }
}

impl Tree {
    pub(super) fn is_shared(&self) -> bool {
        self.claimed.load(Relaxed) != NOT_SHARED
    }

    /// Counts bytes as claimed. Requires the lock.
    fn add_claimed(&self, bytes: u64) {
        let claimed = self.claimed.load(Relaxed).saturating_add(bytes);
        self.claimed.store(claimed.min(NOT_SHARED - 1), Relaxed);
    }

    /// Returns the source of a shared tree. Not under the tree's lock.
    pub(super) fn source(&self) -> Option<Arc<dyn CapacitySource>> {
        if self.is_shared() { lock(&self.source).clone() } else { None }
    }
}

impl Node {
    pub(super) fn root(&'static self) -> &'static Self {
        self.ancestors.last().copied().unwrap_or(self)
    }

    /// Checks that a charge of `bytes`, which the limits admit, has been claimed. Requires the
    /// lock.
    pub(super) fn require_claim(&'static self, bytes: u64) -> Result<(), Refusal> {
        let claimed = self.tree.claimed.load(Relaxed);
        let root = self.root();
        if claimed == NOT_SHARED || root.used.load(Relaxed) + bytes <= claimed {
            return Ok(());
        }
        let room = claimed - root.used.load(Relaxed);
        Err((root, root.refusal_by_source(bytes, room.into())))
    }

    /// Returns the refusal of a charge that the limits admit and the source refuses now.
    pub(super) fn refusal_of_source(&'static self, bytes: u64) -> Option<OutOfBudget> {
        let source = self.tree.source()?;
        let refused = source.shortfall(bytes) > 0;
        refused.then(|| self.root().refusal_by_source(bytes, source.shortage(bytes)))
    }

    /// Returns the root's refusal of a charge that the source refuses.
    fn refusal_by_source(&self, requested: u64, shortage: ClaimShortage) -> OutOfBudget {
        let ClaimShortage { room, elsewhere } = shortage;
        let (current, limit) = (self.used.load(Relaxed), self.limit.load(Relaxed));
        let remaining = room.min(limit.saturating_sub(current));
        OutOfBudget { budget: self.name(), requested, current, remaining, limit, elsewhere }
    }

    /// Calls `charge`, which adds at most `bytes`, with as many bytes claimed for it. In a tree
    /// that is not shared nothing is claimed.
    pub(super) fn with_claim(
        &'static self,
        bytes: u64,
        charge: impl FnOnce(SpinGuard<'_>) -> Result<(), Refusal>,
    ) -> Result<(), Refusal> {
        let tree = self.tree;
        let Some(source) = tree.source() else { return charge(tree.lock.lock()) };
        let root = self.root();
        source.claim(bytes).map_err(|short| (root, root.refusal_by_source(bytes, short)))?;
        let guard = tree.lock.lock();
        tree.add_claimed(bytes);
        let charged = charge(guard);
        if charged.is_err() {
            root.release_unused();
        }
        charged
    }

    /// Takes back what is claimed for this root and not used. Returns it, with a handle that keeps
    /// the root from being recycled until [`Node::release_claim`]. Requires the lock.
    pub(super) fn take_unused(&'static self) -> Option<(Budget, u64)> {
        let (claimed, used) = (self.tree.claimed.load(Relaxed), self.used.load(Relaxed));
        if claimed == NOT_SHARED || claimed <= used {
            return None;
        }
        self.tree.claimed.store(used, Relaxed);
        Some((self.new_handle(), claimed - used))
    }

    /// Releases to the source what is claimed and not used.
    pub(super) fn release_unused(&'static self) {
        let unused = {
            let _guard = self.tree.lock.lock();
            self.take_unused()
        };
        Self::release_claim(unused);
    }

    /// Releases what [`Node::take_unused`] has returned.
    pub(super) fn release_claim(unused: Option<(Budget, u64)>) {
        if let Some((root, bytes)) = unused
            && let Some(source) = root.node.tree.source()
        {
            source.release(bytes);
        }
    }
}
