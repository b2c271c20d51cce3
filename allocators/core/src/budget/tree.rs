//! The arithmetic of a budget tree: what a charge changes in each node, under the tree's lock.
//!
//! ```text
//!   used             = bytes in charges, here and below
//!   unused_guarantee = bytes that children are guaranteed and have not used
//!   held             = used + unused_guarantee     ≤ limit when it grows
//!   a node holds max(held, guarantee) of its parent
//! ```
//!
//! So a charge of `bytes` adds `bytes` to `used` on the whole path to the root. It adds to `held`
//! only the part that no guarantee below had set aside.
//!
//! **Fast path.** Most charges cross no boundary: no limit, no new peak, no unused
//! guarantee, no waiter. Each node combines all of these in three bounds, which are recomputed
//! whenever an input changes:
//!
//! - `fast_limit`: up to this value of `used`, a charge is a plain addition.
//! - `fast_floor`: down to this value, a release is a plain subtraction.
//! - `headroom_limit`: the bound for [`Node::estimate_room`], which only reads how much room there
//!   is.

use super::{
    node::{NO_WAITER, NOT_SHARED, Node, SLOW_PATH},
    refusal::{HeldElsewhere, OutOfBudget, Raise},
};
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// The node that refused, and its refusal.
pub(super) type Refusal = (&'static Node, OutOfBudget);

/// Moves a sum by the change of one of its terms.
fn adjust_sum(sum: &AtomicU64, before: u64, after: u64) {
    let (up, down) = (after.saturating_sub(before), before.saturating_sub(after));
    sum.store(sum.load(Relaxed) + up - down, Relaxed);
}

// Every function here requires the tree's lock, unless it says otherwise.
impl Node {
    /// An iterator over this node and its ancestors, up to the root.
    #[inline]
    pub(super) fn path(&'static self) -> impl Iterator<Item = &'static Node> + Clone {
        std::iter::once(self).chain(self.ancestors.iter().copied())
    }

    /// Adds `bytes` if no bound is crossed. Returns whether it did.
    #[inline]
    pub(super) fn charge_fast(&'static self, bytes: u64) -> bool {
        let fits = |node: &Node| {
            node.used
                .load(Relaxed)
                .checked_add(bytes)
                .is_some_and(|next| next <= node.fast_limit.load(Relaxed))
        };
        let mut all_fit = fits(self);
        for ancestor in self.ancestors {
            all_fit &= fits(ancestor);
        }
        if all_fit {
            self.used.store(self.used.load(Relaxed) + bytes, Relaxed);
            for ancestor in self.ancestors {
                ancestor.used.store(ancestor.used.load(Relaxed) + bytes, Relaxed);
            }
            debug_assert!(
                bytes == 0 || self.path().all(Node::charges_are_plain),
                "a stale bound for charges"
            );
        }
        all_fit
    }

    /// Subtracts `bytes` if no bound is crossed. Returns whether it did.
    #[inline]
    pub(super) fn release_fast(&'static self, bytes: u64) -> bool {
        // Released bytes were charged before, so the difference cannot underflow.
        let fits = |node: &Node| node.used.load(Relaxed) - bytes >= node.fast_floor.load(Relaxed);
        let mut all_fit = fits(self);
        for ancestor in self.ancestors {
            all_fit &= fits(ancestor);
        }
        if all_fit {
            self.used.store(self.used.load(Relaxed) - bytes, Relaxed);
            for ancestor in self.ancestors {
                ancestor.used.store(ancestor.used.load(Relaxed) - bytes, Relaxed);
            }
            debug_assert!(self.path().all(Node::releases_are_plain), "a stale bound for releases");
        }
        all_fit
    }

    /// Returns what the fast path of charges relies on: nothing but `used` had to change.
    fn charges_are_plain(&self) -> bool {
        let used = self.used.load(Relaxed);
        self.held() <= self.limit.load(Relaxed)
            && used <= self.peak.load(Relaxed)
            && self.own_unused_guarantee() == 0
            && self.waiter_priority.load(Relaxed) == NO_WAITER
            && !self.is_shared_root()
    }

    /// Returns what the fast path of releases relies on: nothing but `used` had to change.
    fn releases_are_plain(&self) -> bool {
        let is_over = self.over_limit.load(Relaxed);
        (!is_over || self.held() > self.limit.load(Relaxed))
            && self.own_unused_guarantee() == 0
            && !self.is_shared_root()
    }

    /// Returns whether this is a root whose bytes are claimed from a source.
    fn is_shared_root(&self) -> bool {
        self.ancestors.is_empty() && self.tree.claimed.load(Relaxed) != NOT_SHARED
    }

    /// Checks the sums of this node and of all below it. Returns the name of the first node where
    /// they do not add up, and what is wrong there.
    pub(super) fn check(&'static self) -> Result<(), (&'static str, &'static str)> {
        let mut found = Ok(());
        self.visit_subtree(&mut |node| {
            let (mut used, mut unused, mut guaranteed) = (0, 0, 0);
            node.for_each_child(|child| {
                used += child.used.load(Relaxed);
                unused += child.share() - child.used.load(Relaxed);
                guaranteed += child.commitment();
            });
            let wrong = if used > node.used.load(Relaxed) {
                "children use more than their parent"
            } else if unused != node.unused_guarantee.load(Relaxed) {
                "unused guarantees of the children do not add up"
            } else if guaranteed != node.guaranteed.load(Relaxed) {
                "guarantees of the children do not add up"
            } else if node.used.load(Relaxed) > node.peak.load(Relaxed) {
                "the peak is below what is used"
            } else if node.is_shared_root()
                && node.used.load(Relaxed) > node.tree.claimed.load(Relaxed)
            {
                "more is used than is claimed"
            } else {
                return;
            };
            found = found.and(Err((node.name(), wrong)));
        });
        found
    }

    #[inline]
    fn held(&self) -> u64 {
        self.used.load(Relaxed).saturating_add(self.unused_guarantee.load(Relaxed))
    }

    /// Returns the bytes that the parent has to hold for this node.
    fn share(&self) -> u64 {
        self.held().max(self.guarantee.load(Relaxed))
    }

    /// Returns the guaranteed bytes that are used neither here nor below.
    fn own_unused_guarantee(&self) -> u64 {
        self.guarantee.load(Relaxed).saturating_sub(self.held())
    }

    /// Checks whether a charge of `bytes` at `priority` fits on the whole path. Changes nothing.
    pub(super) fn admit(&'static self, bytes: u64, priority: i64) -> Result<(), Refusal> {
        // The bytes that this node's `held` would grow by. The rest is covered by guarantees below.
        let mut more = bytes;
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let within =
                |now: u64, more: u64| now.checked_add(more).is_some_and(|next| next <= limit);
            let waiter_ahead = node.waiter_priority.load(Relaxed) >= priority;
            // A limit also applies if it was lowered below existing guarantees.
            if !within(node.used.load(Relaxed), bytes)
                || (more > 0 && (waiter_ahead || !within(node.held(), more)))
            {
                return Err((node, node.refusal(bytes, bytes - more, waiter_ahead)));
            }
            more -= more.min(node.own_unused_guarantee());
        }
        Ok(())
    }

    /// Returns this node's refusal of a charge of `bytes`, of which `set_aside` are covered by
    /// guarantees below.
    fn refusal(&self, bytes: u64, set_aside: u64, waiter_ahead: bool) -> OutOfBudget {
        let (used, limit) = (self.used.load(Relaxed), self.limit.load(Relaxed));
        let room = if waiter_ahead { 0 } else { limit.saturating_sub(self.held()) };
        OutOfBudget {
            budget: self.name(),
            requested: bytes,
            current: used,
            remaining: limit.saturating_sub(used).min(room.saturating_add(set_aside)),
            limit,
            elsewhere: HeldElsewhere::default(),
        }
    }

    /// Returns the most bytes that a charge at `priority` could take.
    pub(super) fn room(&'static self, priority: i64) -> u64 {
        let (mut room, mut set_aside) = (u64::MAX, 0u64);
        for node in self.path() {
            let (used, limit) = (node.used.load(Relaxed), node.limit.load(Relaxed));
            let free = if node.waiter_priority.load(Relaxed) >= priority {
                0
            } else {
                limit.saturating_sub(node.held())
            };
            room = room.min(limit.saturating_sub(used)).min(free.saturating_add(set_aside));
            set_aside = set_aside.saturating_add(node.own_unused_guarantee());
        }
        room
    }

    /// Returns how many bytes have to be released before a charge of `bytes` at `priority` fits on
    /// the whole path.
    pub(super) fn shortfall(&'static self, bytes: u64, priority: i64) -> u64 {
        let (mut most, mut more) = (0, bytes);
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let excess = |now: u64, more: u64| now.saturating_add(more).saturating_sub(limit);
            most = most.max(excess(node.used.load(Relaxed), bytes));
            if more > 0 {
                let waiter_ahead = node.waiter_priority.load(Relaxed) >= priority;
                most = most.max(if waiter_ahead { more } else { excess(node.held(), more) });
            }
            more -= more.min(node.own_unused_guarantee());
        }
        most
    }

    /// Returns the limits on the path that are too low for a charge of `bytes`, and by how much, if
    /// `spared` bytes charged here are released first.
    pub(super) fn raises(&'static self, bytes: u64, spared: u64) -> Vec<Raise> {
        let (mut raises, mut more) = (Vec::new(), bytes);
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let excess = |now: u64, more: u64| now.saturating_add(more).saturating_sub(limit);
            let set_aside = if more > 0 { excess(node.held(), more) } else { 0 };
            let by = excess(node.used.load(Relaxed), bytes).max(set_aside).saturating_sub(spared);
            if by > 0 {
                raises.push(Raise { budget: node.name(), by, to: limit.saturating_add(by) });
            }
            more -= more.min(node.own_unused_guarantee());
        }
        raises
    }

    /// Like [`Node::room`], without the lock: two loads a node in the common case. `priority` is
    /// called only if it matters.
    #[inline]
    pub(super) fn estimate_room(&'static self, priority: impl Fn() -> i64) -> u64 {
        let headroom = |node: &Node| {
            let headroom_limit = node.headroom_limit.load(Relaxed);
            (headroom_limit != SLOW_PATH)
                .then(|| headroom_limit.saturating_sub(node.used.load(Relaxed)))
        };
        let Some(mut room) = headroom(self) else { return self.room(priority()) };
        for ancestor in self.ancestors {
            let Some(more) = headroom(ancestor) else { return self.room(priority()) };
            room = room.min(more);
        }
        room
    }

    /// Returns the refusal of the first node where `bytes` more can never fit, even if all other
    /// bytes were released: the request exceeds a limit minus the guarantees of other nodes below
    /// it.
    pub(super) fn unsatisfiable(&'static self, bytes: u64) -> Option<OutOfBudget> {
        let (mut required, mut own) = (bytes, 0);
        for node in self.path() {
            // The least that this node holds with these bytes charged.
            required = required.saturating_add(node.guaranteed.load(Relaxed) - own);
            if required > node.limit.load(Relaxed) {
                return Some(node.refusal(bytes, 0, false));
            }
            required = required.max(node.guarantee.load(Relaxed));
            own = node.commitment();
        }
        None
    }

    /// Adds a charge that [`Node::admit`] has accepted.
    pub(super) fn add(&'static self, bytes: u64) {
        let mut more = bytes;
        for node in self.path() {
            let own_unused_guarantee = node.own_unused_guarantee();
            node.used.store(node.used.load(Relaxed) + bytes, Relaxed);
            node.unused_guarantee
                .store(node.unused_guarantee.load(Relaxed) - (bytes - more), Relaxed);
            more -= more.min(own_unused_guarantee);
        }
        for node in self.path() {
            node.peak.store(node.peak.load(Relaxed).max(node.used.load(Relaxed)), Relaxed);
            node.update_bounds();
        }
    }

    /// Subtracts a charge.
    pub(super) fn subtract(&'static self, bytes: u64) {
        let mut less = bytes;
        for node in self.path() {
            let share = node.share();
            node.used.store(node.used.load(Relaxed) - bytes, Relaxed);
            node.unused_guarantee
                .store(node.unused_guarantee.load(Relaxed) + (bytes - less), Relaxed);
            less = share - node.share();
        }
        self.path().for_each(Node::update_bounds);
    }

    /// Returns what the parent must always be able to hold for this node: its own guarantee, or the
    /// sum of those below it if that is larger.
    fn commitment(&self) -> u64 {
        self.guarantee.load(Relaxed).max(self.guaranteed.load(Relaxed))
    }

    /// Sets the guarantee, if the ancestors can hold that much for it.
    pub(super) fn set_guarantee(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        if bytes > self.limit.load(Relaxed) {
            return Err(self.refusal(bytes, 0, false));
        }
        let mut more = self.held().max(bytes).saturating_sub(self.share());
        for node in self.ancestors {
            let next = node.held().checked_add(more);
            match next {
                _ if more == 0 => break,
                Some(next) if next <= node.limit.load(Relaxed) => {
                    more = next.max(node.guarantee.load(Relaxed)) - node.share();
                }
                _ => return Err(node.refusal(more, 0, false)),
            }
        }
        self.apply_guarantee(bytes);
        Ok(())
    }

    fn apply_guarantee(&'static self, bytes: u64) {
        debug_assert!(bytes <= self.limit.load(Relaxed), "a guarantee above the limit");
        let (mut share, mut commitment) = (self.share(), self.commitment());
        self.guarantee.store(bytes, Relaxed);
        let mut below = self;
        self.update_bounds();
        for node in self.ancestors {
            let (next_share, next_commitment) = (below.share(), below.commitment());
            let (node_share, node_commitment) = (node.share(), node.commitment());
            adjust_sum(&node.unused_guarantee, share, next_share);
            adjust_sum(&node.guaranteed, commitment, next_commitment);
            node.update_bounds();
            (share, commitment, below) = (node_share, node_commitment, node);
        }
    }

    /// Recomputes the bounds of the fast path: up to where charges and down to where releases cross
    /// no boundary.
    pub(super) fn update_bounds(&self) {
        let (unused_guarantee, guarantee) =
            (self.unused_guarantee.load(Relaxed), self.guarantee.load(Relaxed));
        let guarantee_used = self.own_unused_guarantee() == 0;
        let ceiling = self.limit.load(Relaxed).saturating_sub(unused_guarantee);
        let fast = guarantee_used && self.waiter_priority.load(Relaxed) == NO_WAITER;
        self.headroom_limit
            .store(if fast { ceiling.min(SLOW_PATH - 1) } else { SLOW_PATH }, Relaxed);
        // Each charge and each release of a shared root goes to its source.
        let is_shared = self.is_shared_root();
        let fast_limit = if fast && !is_shared { ceiling.min(self.peak.load(Relaxed)) } else { 0 };
        self.fast_limit.store(fast_limit, Relaxed);
        // What children are guaranteed counts: `held` can exceed a lowered limit where `used` does
        // not, and then nothing more can be charged here either.
        let over_limit = self.used.load(Relaxed) > ceiling;
        let fast_floor = if guarantee_used && !is_shared {
            guarantee.saturating_sub(unused_guarantee)
        } else {
            u64::MAX
        };
        // The release that brings `held` down to a lowered limit has to take the slow path.
        self.fast_floor
            .store(if over_limit { fast_floor.max(ceiling + 1) } else { fast_floor }, Relaxed);
        if over_limit != self.over_limit.load(Relaxed) {
            self.over_limit.store(over_limit, Relaxed);
            let (now, count) = (self.tree.nodes_over_limit.load(Relaxed), usize::from(over_limit));
            debug_assert!(over_limit || now > 0, "a node over its limit was not counted");
            self.tree.nodes_over_limit.store(now + count - (1 - count), SeqCst);
        }
    }

    /// Returns whether this node or an ancestor holds more than its limit. Leases then keep no
    /// spare bytes. Does not need the lock.
    #[inline]
    pub(super) fn is_over_limit(&'static self) -> bool {
        self.tree.nodes_over_limit.load(SeqCst) != 0
            && self.path().any(|node| node.over_limit.load(Relaxed))
    }
}
