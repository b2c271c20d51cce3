//! Charging and releasing: every charge, reservation, lease refill and release goes through here.
//! Only `reserve_all`, which charges several nodes at once, adds to the sums itself.

use super::{
    node::{Budget, Node, Tree},
    refusal::OutOfBudget,
    spin_lock::SpinGuard,
    tree::Refusal,
};
use crate::sync::atomic::Ordering::Relaxed;

impl Tree {
    /// Retries a refused charge after recalling spare bytes, at most `nodes` times: as many nodes
    /// could refuse.
    #[cold]
    pub(super) fn retry_with_recall(
        &self,
        mut refused: Refusal,
        nodes: usize,
        retry: impl Fn() -> Result<(), Refusal>,
    ) -> Result<(), OutOfBudget> {
        // Any charge may use the spare bytes of leases. Those below the refusing node are what it
        // lacks. Afterwards the next node may refuse.
        for _ in 0..nodes {
            if refused.0.recall() == 0 {
                break;
            }
            match retry() {
                Ok(()) => return Ok(()),
                Err(next) => refused = next,
            }
        }
        // The first waiter may have an expired deadline that no thread has acted on yet.
        if self.wait_queue.has_waiters() {
            self.wait_queue.request_scan();
            return retry().map_err(|(_, refusal)| refusal);
        }
        Err(refused.1)
    }
}

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
        let refused = match self.tree.is_shared().then(charge) {
            Some(Ok(())) => return Ok(()),
            Some(Err(refused)) => refused,
            None => refused,
        };
        self.tree.retry_with_recall(refused, self.path().count(), charge)
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
        let level_changed = self.add(bytes);
        drop(guard);
        if level_changed {
            self.report_levels();
        }
        Ok(())
    }

    /// Releases charged bytes. Never blocks.
    #[inline]
    pub(super) fn release(&'static self, bytes: u64) {
        let guard = self.tree.lock.lock();
        let fast = self.release_fast(bytes);
        let level_changed = !fast && self.subtract(bytes);
        let has_waiters = self.tree.wait_queue.has_waiters();
        // Waiters of this process come first.
        let unused = if fast || has_waiters { None } else { self.root().take_unused() };
        let last = self.used.load(Relaxed) == 0;
        drop(guard);
        if level_changed || has_waiters || unused.is_some() {
            self.notify(level_changed, has_waiters, unused);
        }
        // From here on another thread may recycle and reuse the node. It is live then, and
        // `recycle_if_unused` leaves it alone.
        if last && self.handles.load(Relaxed) == 0 {
            self.recycle_if_unused();
        }
    }

    #[cold]
    fn notify(
        &'static self,
        level_changed: bool,
        has_waiters: bool,
        unused: Option<(Budget, u64)>,
    ) {
        Self::release_claim(unused);
        if has_waiters {
            self.tree.wait_queue.request_scan();
            if self.tree.is_shared() {
                self.root().release_unused();
            }
        }
        if level_changed {
            self.report_levels();
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
