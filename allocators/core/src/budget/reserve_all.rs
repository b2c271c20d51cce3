//! Charges to several budgets at once, or to none.
//!
//! ```text
//!   under the lock:   admit a ── add a ── admit b ── add b ── admit c: no
//!                                                             │
//!                     as it was ◄── subtract a ◄── subtract b ◄┘
//! ```
//!
//! Each part is admitted with the previous ones in place, so parts that share ancestors are checked
//! together. Peaks, levels and hooks follow after the last part, so a refusal leaves no trace. All
//! parts of one tree are one critical section. An unlocked reader may see parts of a reservation
//! that is then refused, but never more than a limit.
//!
//! There is no waiting for several budgets at once.
//!
//! - A waiter that can never be served has to be refused, or it would block others for ever. That
//!   test follows one path from a node to its root (`unsatisfiable` in `tree`), and parts on
//!   several paths share ancestors.
//! - A waiter for several nodes would take the room of one and leave the others to other charges.
//!   Two such waiters could each hold the room that the other one needs.
//!
//! To wait, a caller waits for the largest part by [`Budget::reserve_by`], and then requests all
//! parts again.

use super::{
    Budget, Reservation,
    charge::Charge,
    node::{Node, Tree},
    refusal::OutOfBudget,
    spin_lock::SpinGuard,
    tree::Refusal,
};
use crate::sync::atomic::Ordering::Relaxed;

/// A budget and the bytes to take from it.
type Part<'a> = (&'a Budget, u64);

impl Budget {
    /// Reserves the bytes of every part, or nothing. Examples are `n` shards on `n` devices, or a
    /// model's weights and their pinned staging memory. The reservations are in the order of the
    /// parts. A budget may occur more than once, also next to its ancestor. A part of zero bytes
    /// yields a reservation too. Never blocks.
    ///
    /// All parts of one tree are one atomic step: no other charge comes in between. With several
    /// trees, each is one step, in the order in which the parts name them. If a later tree refuses,
    /// the earlier ones get their bytes back before the call returns, and other charges may have
    /// been refused in between.
    ///
    /// ```
    /// use aquifer::Budget;
    /// let machine = Budget::new("the machine", 100);
    /// let (left, right) = (machine.child("device 0", 80), machine.child("device 1", 30));
    /// let both = Budget::reserve_all(&[(&left, 60), (&right, 30)])?;
    /// assert_eq!((left.used(), right.used(), both[1].remaining()), (60, 30, 30));
    /// drop(both);
    /// let refused = Budget::reserve_all(&[(&left, 80), (&right, 30)]).unwrap_err();
    /// assert_eq!((refused.budget, refused.requested), ("the machine", 110));
    /// assert_eq!((machine.used(), machine.peak()), (0, 90));
    /// # Ok::<(), aquifer::OutOfBudget>(())
    /// ```
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest budget that has no room for the first part that does not fit
    /// together with the previous ones. `requested` is then the sum of the parts that this budget
    /// would have to hold.
    pub fn reserve_all(parts: &[(&Budget, u64)]) -> Result<Vec<Reservation>, OutOfBudget> {
        let mut granted: Vec<Option<Charge>> = parts.iter().map(|_| None).collect();
        for (first, &(budget, _)) in parts.iter().enumerate() {
            if granted[first].is_some() {
                continue;
            }
            let tree = budget.node.tree;
            // On an error, the charges of earlier trees are dropped.
            tree.charge_all(parts)?;
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
    /// An iterator over the parts that belong to this tree.
    fn own_parts<'a>(
        &'static self,
        parts: &'a [Part<'a>],
    ) -> impl DoubleEndedIterator<Item = (&'static Node, u64)> {
        let own = parts.iter().filter(move |(budget, _)| std::ptr::eq(budget.node.tree, self));
        own.map(|(budget, bytes)| (budget.node, *bytes))
    }

    /// Takes the parts that belong to this tree, or nothing.
    fn charge_all(&'static self, parts: &[Part<'_>]) -> Result<(), OutOfBudget> {
        let Some((first, _)) = self.own_parts(parts).next() else { return Ok(()) };
        let bytes = self.own_parts(parts).map(|(_, bytes)| bytes).fold(0, u64::saturating_add);
        let charge = || first.with_claim(bytes, |guard| self.charge_all_locked(guard, parts));
        match charge() {
            Ok(()) => Ok(()),
            Err(refused) => {
                let nodes = self.own_parts(parts).map(|(node, _)| node.path().count()).sum();
                self.retry_with_recall(refused, nodes, charge)
            }
        }
    }

    fn charge_all_locked(
        &'static self,
        guard: SpinGuard<'_>,
        parts: &[Part<'_>],
    ) -> Result<(), Refusal> {
        for (at, &(budget, bytes)) in parts.iter().enumerate() {
            let node = budget.node;
            if !std::ptr::eq(node.tree, self) {
                continue;
            }
            let admitted = node.admit(bytes, node.priority.load(Relaxed));
            if let Err((by, mut refusal)) = admitted.and_then(|()| node.require_claim(bytes)) {
                // In reverse order, so that each step undoes exactly the last one.
                self.own_parts(&parts[..at])
                    .rev()
                    .for_each(|(node, bytes)| node.subtract_from_sums(bytes));
                // The refusal is restated without the parts of this call in `current`, and with all
                // of them in `requested`.
                let used = by.used.load(Relaxed);
                refusal.remaining += refusal.current - used;
                refusal.current = used;
                let requested = self
                    .own_parts(parts)
                    .filter(|(node, _)| node.is_below(by))
                    .map(|(_, bytes)| bytes);
                refusal.requested = requested.fold(0, u64::saturating_add);
                return Err((by, refusal));
            }
            node.add_to_sums(bytes);
        }
        let mut level_changed = false;
        for (node, _) in self.own_parts(parts) {
            level_changed |= node.update_derived();
        }
        drop(guard);
        if level_changed {
            self.own_parts(parts).for_each(|(node, _)| node.report_levels());
        }
        Ok(())
    }
}
