//! Bytes of several budgets at once, or of none.
//!
//! ```text
//!   under the lock:   admit a ── raise a ── admit b ── raise b ── admit c: no
//!                                                                    │
//!                     as it was ◄──────── lower a ◄──── lower b ◄────┘
//! ```
//!
//! Each part is admitted with those before it in place, so two parts that have an edge in common
//! are held against it together. Peaks, levels and whoever is told come after the last one, so a
//! refusal leaves no trace. All of a tree is one stay under its lock; whoever reads a sum meanwhile
//! may see parts of a reservation that is about to be refused, never more than a limit.
//!
//! There is no waiting for several at once. Who in line could never be served is refused, or it
//! would stand there for ever and keep others from room; that is worked out along one path from a
//! node to its root (`never` in `tree`), where what is guaranteed to others counts once. Parts on
//! several paths share edges, and a place in line would have to stand before several nodes, of
//! which it takes the room of one and leaves the others to whoever comes: two such waits could take
//! each other's, each the room that the other lacks. Whoever has to wait waits for the largest part
//! by [`Budget::reserve_by`], and asks for all again.

use super::{
    Budget, Reservation,
    charge::Charge,
    lock::Inside,
    node::{Node, Tree},
    refusal::OutOfBudget,
    tree::Refused,
};
use crate::sync::atomic::Ordering::Relaxed;

/// Bytes of a node.
type Part<'a> = (&'a Budget, u64);

impl Budget {
    /// Reserves the bytes of every part, or nothing: `n` shards on `n` devices, or a model's
    /// weights and the pinned memory that they come through. The reservations are in the order of
    /// the parts. A budget may be there more than once, and above another; no bytes are a
    /// reservation as well. Never blocks.
    ///
    /// Of budgets that have a root in common, all is one step: nobody else's charge comes between.
    /// Of several roots, each is one step, in the order in which the parts name them; what one has
    /// granted goes back before the refusal of a later one is answered, so somebody else may have
    /// been refused for it.
    ///
    /// ```
    /// use aquifer_core::Budget;
    /// let machine = Budget::new("the machine", 100);
    /// let (left, right) = (machine.child("device 0", 80), machine.child("device 1", 30));
    /// let both = Budget::reserve_all(&[(&left, 60), (&right, 30)])?;
    /// assert_eq!((left.used(), right.used(), both[1].remaining()), (60, 30, 30));
    /// drop(both);
    /// let refused = Budget::reserve_all(&[(&left, 80), (&right, 30)]).unwrap_err();
    /// assert_eq!((refused.budget, refused.requested), ("the machine", 110));
    /// assert_eq!((machine.used(), machine.peak()), (0, 90));
    /// # Ok::<(), aquifer_core::OutOfBudget>(())
    /// ```
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest budget that has no room for the first part that does not fit
    /// with those before it. `requested` is then the sum of the parts that this budget would have
    /// to hold.
    pub fn reserve_all(parts: &[(&Budget, u64)]) -> Result<Vec<Reservation>, OutOfBudget> {
        let mut granted: Vec<Option<Charge>> = parts.iter().map(|_| None).collect();
        for (first, &(budget, _)) in parts.iter().enumerate() {
            if granted[first].is_some() {
                continue;
            }
            let tree = budget.node.tree;
            // What others have granted goes back with its charges.
            tree.take_all(parts)?;
            for (charge, &(part, bytes)) in granted.iter_mut().zip(parts) {
                if std::ptr::eq(part.node.tree, tree) {
                    *charge = Some(Charge::granted(part.node, bytes));
                }
            }
        }
        Ok(granted.into_iter().flatten().map(Reservation::from).collect())
    }
}

impl Tree {
    /// The parts that are of this tree.
    fn own<'a>(
        &'static self,
        parts: &'a [Part<'a>],
    ) -> impl DoubleEndedIterator<Item = (&'static Node, u64)> {
        let own = parts.iter().filter(move |(budget, _)| std::ptr::eq(budget.node.tree, self));
        own.map(|(budget, bytes)| (budget.node, *bytes))
    }

    /// Takes the parts that are of this tree, or nothing.
    fn take_all(&'static self, parts: &[Part<'_>]) -> Result<(), OutOfBudget> {
        let take = || self.take_all_inside(self.lock.enter(), parts);
        match take() {
            Ok(()) => Ok(()),
            Err(refused) => {
                let nodes = self.own(parts).map(|(node, _)| node.path().count()).sum();
                self.insist(refused, nodes, take)
            }
        }
    }

    fn take_all_inside(
        &'static self,
        inside: Inside<'_>,
        parts: &[Part<'_>],
    ) -> Result<(), Refused> {
        for (at, &(budget, bytes)) in parts.iter().enumerate() {
            let node = budget.node;
            if !std::ptr::eq(node.tree, self) {
                continue;
            }
            if let Err((by, mut refusal)) = node.admit(bytes, node.priority.load(Relaxed)) {
                // Last first: each step back finds what it left.
                self.own(&parts[..at]).rev().for_each(|(node, bytes)| node.lower(bytes));
                // With nothing of this call in what is there, and all of it in what was asked.
                let used = by.used.load(Relaxed);
                refusal.remaining += refusal.current - used;
                refusal.current = used;
                let asked =
                    self.own(parts).filter(|(node, _)| node.is_below(by)).map(|(_, bytes)| bytes);
                refusal.requested = asked.fold(0, u64::saturating_add);
                return Err((by, refusal));
            }
            node.raise(bytes);
        }
        let mut crossed = false;
        for (node, _) in self.own(parts) {
            crossed |= node.settle();
        }
        drop(inside);
        if crossed {
            self.own(parts).for_each(|(node, _)| node.tell_path());
        }
        Ok(())
    }
}
