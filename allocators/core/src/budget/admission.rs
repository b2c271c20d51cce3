//! Charging and releasing: every charge, reservation, lease refill and release goes through here.

use super::{
    node::{Budget, Node},
    refusal::OutOfBudget,
    spin_lock::SpinGuard,
    tree::Refusal,
};
use crate::sync::atomic::Ordering::Relaxed;

impl Node {
    /// Takes `bytes` here and from every ancestor, or nothing. Never blocks.
    #[inline]
    pub(super) fn charge(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        let guard = self.tree.lock.lock();
        if self.charge_fast(bytes) {
            return Ok(());
        }
        self.charge_slow(guard, bytes, self.priority.load(Relaxed))
    }

    /// Like [`Node::charge`], but with `priority` instead of the node's own.
    #[inline]
    pub(super) fn charge_as(&'static self, bytes: u64, priority: i64) -> Result<(), OutOfBudget> {
        let guard = self.tree.lock.lock();
        if self.charge_fast(bytes) { Ok(()) } else { self.charge_slow(guard, bytes, priority) }
    }

    #[cold]
    fn charge_slow(
        &'static self,
        guard: SpinGuard<'_>,
        bytes: u64,
        priority: i64,
    ) -> Result<(), OutOfBudget> {
        let Err(refused) = self.charge_locked(guard, bytes, priority) else { return Ok(()) };
        let charge = || self.charge_claiming(bytes, priority);
        let mut refused = match self.tree.is_shared().then(charge) {
            Some(Ok(())) => return Ok(()),
            Some(Err(refused)) => refused,
            None => refused,
        };
        // Any charge may use the spare bytes of leases. Those below the refusing node are what it
        // lacks. Afterwards the next node may refuse.
        for _ in self.path() {
            if refused.0.recall() == 0 {
                break;
            }
            match charge() {
                Ok(()) => return Ok(()),
                Err(next) => refused = next,
            }
        }
        // The first waiter may have an expired deadline that no thread has acted on yet.
        if self.tree.wait_queue.has_waiters() {
            self.tree.wait_queue.request_scan();
            return charge().map_err(|(_, refusal)| refusal);
        }
        Err(refused.1)
    }

    /// Like [`Node::charge_locked`]. In a shared tree, what the limits admit is claimed first.
    fn charge_claiming(&'static self, bytes: u64, priority: i64) -> Result<(), Refusal> {
        if self.tree.is_shared() {
            let _guard = self.tree.lock.lock();
            self.admit(bytes, priority)?;
        }
        self.with_claim(bytes, |guard| self.charge_locked(guard, bytes, priority))
    }

    /// Like [`Node::charge`], without recalling the spare bytes of leases.
    pub(super) fn charge_without_recall(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        let priority = self.priority.load(Relaxed);
        self.charge_locked(self.tree.lock.lock(), bytes, priority).map_err(|(_, refusal)| refusal)
    }

    fn charge_locked(
        &'static self,
        guard: SpinGuard<'_>,
        bytes: u64,
        priority: i64,
    ) -> Result<(), Refusal> {
        self.admit(bytes, priority).and_then(|()| self.require_claim(bytes))?;
        self.add(bytes);
        drop(guard);
        Ok(())
    }

    /// Releases charged bytes. Never blocks.
    #[inline]
    pub(super) fn release(&'static self, bytes: u64) {
        let guard = self.tree.lock.lock();
        let fast = self.release_fast(bytes);
        if !fast {
            self.subtract(bytes);
        }
        let has_waiters = self.tree.wait_queue.has_waiters();
        // Waiters of this process come first.
        let unused = if fast || has_waiters { None } else { self.root().take_unused() };
        let last = self.used.load(Relaxed) == 0;
        drop(guard);
        if has_waiters || unused.is_some() {
            self.notify(has_waiters, unused);
        }
        // From here on another thread may recycle and reuse the node. It is live then, and
        // `recycle_if_unused` leaves it alone.
        if last && self.handles.load(Relaxed) == 0 {
            self.recycle_if_unused();
        }
    }

    #[cold]
    fn notify(&'static self, has_waiters: bool, unused: Option<(Budget, u64)>) {
        Self::release_claim(unused);
        if has_waiters {
            self.tree.wait_queue.request_scan();
            if self.tree.is_shared() {
                self.root().release_unused();
            }
        }
    }

    /// Recalls the spare bytes of leases here and below. Returns how many there were.
    #[cold]
    pub(super) fn recall(&'static self) -> u64 {
        let mut bytes = 0;
        if self.tree.open_leases.load(Relaxed) > 0 {
            self.visit_subtree(&mut |node| {
                bytes += node.leases.iter().map(|body| body.recall()).sum::<u64>();
            });
        }
        bytes
    }

    /// Recalls the spare bytes of all leases of the tree.
    pub(super) fn recall_all(&'static self) -> u64 {
        self.ancestors.last().copied().unwrap_or(self).recall()
    }

    /// Returns the spare bytes of leases here and below.
    pub(super) fn spare(&'static self) -> u64 {
        let mut bytes = 0;
        self.visit_subtree(&mut |node| {
            bytes += node.leases.iter().map(|body| body.spare()).sum::<u64>();
        });
        bytes
    }

    /// Counts bytes as stranded until [`Node::unstrand`] is called for the same number. The sums
    /// wrap, so that each pair of calls cancels out.
    pub(super) fn strand(&'static self, bytes: u64) {
        let _guard = self.tree.lock.lock();
        let add = |node: &Node| node.stranded.load(Relaxed).wrapping_add(bytes);
        self.path().for_each(|node| node.stranded.store(add(node), Relaxed));
    }

    pub(super) fn unstrand(&'static self, bytes: u64) {
        let _guard = self.tree.lock.lock();
        let sub = |node: &Node| node.stranded.load(Relaxed).wrapping_sub(bytes);
        self.path().for_each(|node| node.stranded.store(sub(node), Relaxed));
    }
}
