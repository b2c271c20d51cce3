//! Charging and releasing: every charge, reservation, lease refill and release goes through here.
//! Only `together`, which charges several nodes at once, adds to the sums itself.

use super::{
    lock::Inside,
    node::{Node, Tree},
    refusal::OutOfBudget,
    tree::Refused,
};
use crate::sync::atomic::Ordering::Relaxed;

impl Tree {
    /// Retries a refused charge after recalling spare bytes, at most `nodes` times: as many nodes
    /// could refuse.
    #[cold]
    pub(super) fn insist(
        &self,
        mut refused: Refused,
        nodes: usize,
        again: impl Fn() -> Result<(), Refused>,
    ) -> Result<(), OutOfBudget> {
        // Any charge may use the spare bytes of leases. Those below the refusing node are what it
        // lacks. Afterwards the next node may refuse.
        for _ in 0..nodes {
            if refused.0.recall() == 0 {
                break;
            }
            match again() {
                Ok(()) => return Ok(()),
                Err(next) => refused = next,
            }
        }
        // The first waiter may have an expired deadline that no thread has acted on yet.
        if self.line.is_waited_for() {
            self.line.look();
            return again().map_err(|(_, refusal)| refusal);
        }
        Err(refused.1)
    }
}

impl Node {
    /// Takes `bytes` here and from every ancestor, or nothing. Never blocks.
    #[inline]
    pub(super) fn take(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        let inside = self.tree.lock.enter();
        if self.take_easily(bytes) {
            return Ok(());
        }
        self.take_slowly(inside, bytes, self.priority.load(Relaxed))
    }

    /// Like [`Node::take`], but with `priority` instead of the node's own.
    #[inline]
    pub(super) fn take_as(&'static self, bytes: u64, priority: i64) -> Result<(), OutOfBudget> {
        let inside = self.tree.lock.enter();
        if self.take_easily(bytes) { Ok(()) } else { self.take_slowly(inside, bytes, priority) }
    }

    #[cold]
    fn take_slowly(
        &'static self,
        inside: Inside<'_>,
        bytes: u64,
        priority: i64,
    ) -> Result<(), OutOfBudget> {
        let Err(refused) = self.take_inside(inside, bytes, priority) else { return Ok(()) };
        let tree = self.tree;
        tree.insist(refused, self.path().count(), || {
            self.take_inside(tree.lock.enter(), bytes, priority)
        })
    }

    /// Like [`Node::take`], without recalling the spare bytes of leases.
    pub(super) fn take_now(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        let priority = self.priority.load(Relaxed);
        self.take_inside(self.tree.lock.enter(), bytes, priority).map_err(|(_, refusal)| refusal)
    }

    fn take_inside(
        &'static self,
        inside: Inside<'_>,
        bytes: u64,
        priority: i64,
    ) -> Result<(), Refused> {
        self.admit(bytes, priority)?;
        let crossed = self.add(bytes);
        drop(inside);
        if crossed {
            self.tell_path();
        }
        Ok(())
    }

    /// Releases charged bytes. Never blocks.
    #[inline]
    pub(super) fn give(&'static self, bytes: u64) {
        let inside = self.tree.lock.enter();
        let easy = self.give_easily(bytes);
        let crossed = !easy && self.subtract(bytes);
        let waited = self.tree.line.is_waited_for();
        let last = self.used.load(Relaxed) == 0;
        drop(inside);
        if crossed || waited {
            self.follow_up(crossed, waited);
        }
        // From here on another thread may recycle and reuse the node. It is live then, and
        // `leave_if_unknown` leaves it alone.
        if last && self.handles.load(Relaxed) == 0 {
            self.leave_if_unknown();
        }
    }

    #[cold]
    fn follow_up(&'static self, crossed: bool, waited: bool) {
        if waited {
            self.tree.line.look();
        }
        if crossed {
            self.tell_path();
        }
    }

    /// Recalls the spare bytes of leases here and below. Returns how many there were.
    #[cold]
    pub(super) fn recall(&'static self) -> u64 {
        let mut bytes = 0;
        if self.tree.leases.load(Relaxed) > 0 {
            self.walk(&mut |node| {
                bytes += node.leases.iter().map(|shell| shell.recall()).sum::<u64>();
            });
        }
        bytes
    }

    /// Recalls the spare bytes of all leases of the tree.
    pub(super) fn recall_all(&'static self) -> u64 {
        self.above.last().copied().unwrap_or(self).recall()
    }

    /// Returns the spare bytes of leases here and below.
    pub(super) fn spare(&'static self) -> u64 {
        let mut bytes = 0;
        self.walk(&mut |node| bytes += node.leases.iter().map(|shell| shell.spare()).sum::<u64>());
        bytes
    }

    pub(super) fn strand(&'static self, bytes: u64) {
        let _inside = self.tree.lock.enter();
        self.path()
            .for_each(|node| node.stranded.store(node.stranded.load(Relaxed) + bytes, Relaxed));
    }

    pub(super) fn unstrand(&'static self, bytes: u64) {
        let _inside = self.tree.lock.enter();
        self.path()
            .for_each(|node| node.stranded.store(node.stranded.load(Relaxed) - bytes, Relaxed));
    }
}
