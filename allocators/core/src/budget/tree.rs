//! The arithmetic of a budget tree: what a charge changes in each node, under the tree's lock.
//!
//! ```text
//!   used   = bytes in charges, here and below
//!   extra  = bytes that children are guaranteed and have not used
//!   held   = used + extra                          ≤ limit when it grows
//!   a node holds max(held, guarantee) of its parent
//! ```
//!
//! So a charge of `bytes` adds `bytes` to `used` on the whole path to the root. It adds to `held`
//! only the part that no guarantee below had set aside.
//!
//! **Fast path.** Most charges cross no boundary: no limit, no new peak, no level, no unused
//! guarantee, no waiter. Each node combines all of these in three bounds, which are recomputed
//! whenever an input changes:
//!
//! - `easy`: up to this value of `used`, a charge is a plain addition.
//! - `floor`: down to this value, a release is a plain subtraction.
//! - `brim`: the bound for [`Node::glance`], which only reads how much room there is.

use super::{
    node::{ASK, NOBODY, Node},
    refusal::{OutOfBudget, Raise},
};
use crate::sync::atomic::{
    AtomicU64,
    Ordering::{Relaxed, SeqCst},
};

/// The node that refused, and its refusal.
pub(super) type Refused = (&'static Node, OutOfBudget);

/// Moves a sum by the change of one of its terms.
fn shift(sum: &AtomicU64, before: u64, after: u64) {
    let (up, down) = (after.saturating_sub(before), before.saturating_sub(after));
    sum.store(sum.load(Relaxed) + up - down, Relaxed);
}

// Every function here requires the tree's lock, unless it says otherwise.
impl Node {
    /// An iterator over this node and its ancestors, up to the root.
    #[inline]
    pub(super) fn path(&'static self) -> impl Iterator<Item = &'static Node> + Clone {
        std::iter::once(self).chain(self.above.iter().copied())
    }

    /// Adds `bytes` if no bound is crossed. Returns whether it did.
    #[inline]
    pub(super) fn take_easily(&'static self, bytes: u64) -> bool {
        let fits = |node: &Node| {
            node.used
                .load(Relaxed)
                .checked_add(bytes)
                .is_some_and(|next| next <= node.easy.load(Relaxed))
        };
        let mut easy = fits(self);
        for above in self.above {
            easy &= fits(above);
        }
        if easy {
            self.used.store(self.used.load(Relaxed) + bytes, Relaxed);
            for above in self.above {
                above.used.store(above.used.load(Relaxed) + bytes, Relaxed);
            }
        }
        easy
    }

    /// Subtracts `bytes` if no bound is crossed. Returns whether it did.
    #[inline]
    pub(super) fn give_easily(&'static self, bytes: u64) -> bool {
        // Released bytes were charged before, so the difference cannot underflow.
        let fits = |node: &Node| node.used.load(Relaxed) - bytes >= node.floor.load(Relaxed);
        let mut easy = fits(self);
        for above in self.above {
            easy &= fits(above);
        }
        if easy {
            self.used.store(self.used.load(Relaxed) - bytes, Relaxed);
            for above in self.above {
                above.used.store(above.used.load(Relaxed) - bytes, Relaxed);
            }
        }
        easy
    }

    #[inline]
    fn held(&self) -> u64 {
        self.used.load(Relaxed).saturating_add(self.extra.load(Relaxed))
    }

    /// Returns the bytes that the parent has to hold for this node.
    fn share(&self) -> u64 {
        self.held().max(self.guarantee.load(Relaxed))
    }

    /// Returns the guaranteed bytes that are used neither here nor below.
    fn unmet(&self) -> u64 {
        self.guarantee.load(Relaxed).saturating_sub(self.held())
    }

    /// Checks whether a charge of `bytes` at `priority` fits on the whole path. Changes nothing.
    pub(super) fn admit(&'static self, bytes: u64, priority: i64) -> Result<(), Refused> {
        // The bytes that this node's `held` would grow by. The rest is covered by guarantees below.
        let mut more = bytes;
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let within =
                |now: u64, more: u64| now.checked_add(more).is_some_and(|next| next <= limit);
            let in_line = node.line.load(Relaxed) >= priority;
            // A limit also applies if it was lowered below existing guarantees.
            if !within(node.used.load(Relaxed), bytes)
                || (more > 0 && (in_line || !within(node.held(), more)))
            {
                return Err((node, node.refusal(bytes, bytes - more, in_line)));
            }
            more -= more.min(node.unmet());
        }
        Ok(())
    }

    /// Returns this node's refusal of a charge of `bytes`, of which `aside` are covered by
    /// guarantees below.
    fn refusal(&self, bytes: u64, aside: u64, in_line: bool) -> OutOfBudget {
        let (used, limit) = (self.used.load(Relaxed), self.limit.load(Relaxed));
        let room = if in_line { 0 } else { limit.saturating_sub(self.held()) };
        OutOfBudget {
            budget: self.name(),
            requested: bytes,
            current: used,
            remaining: limit.saturating_sub(used).min(room.saturating_add(aside)),
            limit,
        }
    }

    /// Returns the most bytes that a charge at `priority` could take.
    pub(super) fn room(&'static self, priority: i64) -> u64 {
        let (mut room, mut aside) = (u64::MAX, 0u64);
        for node in self.path() {
            let (used, limit) = (node.used.load(Relaxed), node.limit.load(Relaxed));
            let free = if node.line.load(Relaxed) >= priority {
                0
            } else {
                limit.saturating_sub(node.held())
            };
            room = room.min(limit.saturating_sub(used)).min(free.saturating_add(aside));
            aside = aside.saturating_add(node.unmet());
        }
        room
    }

    /// Returns how many bytes have to be released before a charge of `bytes` at `priority` fits on
    /// the whole path.
    pub(super) fn shortfall(&'static self, bytes: u64, priority: i64) -> u64 {
        let (mut most, mut more) = (0, bytes);
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let over = |now: u64, more: u64| now.saturating_add(more).saturating_sub(limit);
            most = most.max(over(node.used.load(Relaxed), bytes));
            if more > 0 {
                let in_line = node.line.load(Relaxed) >= priority;
                most = most.max(if in_line { more } else { over(node.held(), more) });
            }
            more -= more.min(node.unmet());
        }
        most
    }

    /// Returns the limits on the path that are too low for a charge of `bytes`, and by how much, if
    /// `spared` bytes charged here are released first.
    pub(super) fn raises(&'static self, bytes: u64, spared: u64) -> Vec<Raise> {
        let (mut raises, mut more) = (Vec::new(), bytes);
        for node in self.path() {
            let limit = node.limit.load(Relaxed);
            let over = |now: u64, more: u64| now.saturating_add(more).saturating_sub(limit);
            let aside = if more > 0 { over(node.held(), more) } else { 0 };
            let by = over(node.used.load(Relaxed), bytes).max(aside).saturating_sub(spared);
            if by > 0 {
                raises.push(Raise { budget: node.name(), by, to: limit.saturating_add(by) });
            }
            more -= more.min(node.unmet());
        }
        raises
    }

    /// Like [`Node::room`], without the lock: two loads a node in the common case. `priority` is
    /// called only if it matters.
    #[inline]
    pub(super) fn glance(&'static self, priority: impl Fn() -> i64) -> u64 {
        let look = |node: &Node| {
            let brim = node.brim.load(Relaxed);
            (brim != ASK).then(|| brim.saturating_sub(node.used.load(Relaxed)))
        };
        let Some(mut room) = look(self) else { return self.room(priority()) };
        for above in self.above {
            let Some(more) = look(above) else { return self.room(priority()) };
            room = room.min(more);
        }
        room
    }

    /// Returns the refusal of the first node where `bytes` more can never fit, even if all other
    /// bytes were released: the request exceeds a limit minus the guarantees of other nodes below
    /// it.
    pub(super) fn never(&'static self, bytes: u64) -> Option<OutOfBudget> {
        let (mut need, mut own) = (bytes, 0);
        for node in self.path() {
            // The least that this node holds with these bytes charged.
            need = need.saturating_add(node.promised.load(Relaxed) - own);
            if need > node.limit.load(Relaxed) {
                return Some(node.refusal(bytes, 0, false));
            }
            need = need.max(node.guarantee.load(Relaxed));
            own = node.promise();
        }
        None
    }

    /// Adds a charge that [`Node::admit`] has accepted. Returns whether a level has changed.
    pub(super) fn add(&'static self, bytes: u64) -> bool {
        self.raise(bytes);
        self.settle()
    }

    /// Subtracts a charge. Returns whether a level has changed.
    pub(super) fn subtract(&'static self, bytes: u64) -> bool {
        self.lower(bytes);
        self.settle()
    }

    /// Adds a charge that [`Node::admit`] has accepted, to the sums alone. [`Node::lower`] undoes
    /// it exactly if calls are undone in reverse order.
    pub(super) fn raise(&'static self, bytes: u64) {
        let mut more = bytes;
        for node in self.path() {
            let unmet = node.unmet();
            node.used.store(node.used.load(Relaxed) + bytes, Relaxed);
            node.extra.store(node.extra.load(Relaxed) - (bytes - more), Relaxed);
            more -= more.min(unmet);
        }
    }

    /// Subtracts a charge from the sums alone.
    pub(super) fn lower(&'static self, bytes: u64) {
        let mut less = bytes;
        for node in self.path() {
            let share = node.share();
            node.used.store(node.used.load(Relaxed) - bytes, Relaxed);
            node.extra.store(node.extra.load(Relaxed) + (bytes - less), Relaxed);
            less = share - node.share();
        }
    }

    /// Updates what depends on the sums: peaks, levels, bounds. Returns whether a level has
    /// changed.
    pub(super) fn settle(&'static self) -> bool {
        let mut crossed = false;
        for node in self.path() {
            node.peak.store(node.peak.load(Relaxed).max(node.used.load(Relaxed)), Relaxed);
            crossed |= node.cross();
            node.refresh();
        }
        crossed
    }

    /// Returns what the parent must always be able to hold for this node: its own guarantee, or the
    /// sum of those below it if that is larger.
    fn promise(&self) -> u64 {
        self.guarantee.load(Relaxed).max(self.promised.load(Relaxed))
    }

    /// Sets the guarantee, if the ancestors can hold that much for it.
    pub(super) fn guarantee(&'static self, bytes: u64) -> Result<(), OutOfBudget> {
        if bytes > self.limit.load(Relaxed) {
            return Err(self.refusal(bytes, 0, false));
        }
        let mut more = self.held().max(bytes).saturating_sub(self.share());
        for node in self.above {
            let next = node.held().checked_add(more);
            match next {
                _ if more == 0 => break,
                Some(next) if next <= node.limit.load(Relaxed) => {
                    more = next.max(node.guarantee.load(Relaxed)) - node.share();
                }
                _ => return Err(node.refusal(more, 0, false)),
            }
        }
        self.move_guarantee(bytes);
        Ok(())
    }

    fn move_guarantee(&'static self, bytes: u64) {
        let (mut share, mut promise) = (self.share(), self.promise());
        self.guarantee.store(bytes, Relaxed);
        let mut below = self;
        self.refresh();
        for node in self.above {
            let (next_share, next_promise) = (below.share(), below.promise());
            let (node_share, node_promise) = (node.share(), node.promise());
            shift(&node.extra, share, next_share);
            shift(&node.promised, promise, next_promise);
            node.refresh();
            (share, promise, below) = (node_share, node_promise, node);
        }
    }

    /// Recomputes the bounds of the fast path: up to where charges and down to where releases cross
    /// no boundary.
    pub(super) fn refresh(&self) {
        let (extra, guarantee) = (self.extra.load(Relaxed), self.guarantee.load(Relaxed));
        let met = self.unmet() == 0;
        let ceiling = self.limit.load(Relaxed).saturating_sub(extra);
        let (rise, fall) = self.thresholds();
        let plain = met && self.line.load(Relaxed) == NOBODY;
        self.brim.store(if plain { ceiling.min(ASK - 1) } else { ASK }, Relaxed);
        let easy = if plain { ceiling.min(self.peak.load(Relaxed)).min(rise) } else { 0 };
        self.easy.store(easy, Relaxed);
        let limit = self.limit.load(Relaxed);
        let over = self.used.load(Relaxed) > limit;
        let floor = if met { guarantee.saturating_sub(extra).max(fall) } else { u64::MAX };
        // The release that brings `used` down to a lowered limit has to take the slow path.
        self.floor.store(if over { floor.max(limit + 1) } else { floor }, Relaxed);
        if over != self.over.load(Relaxed) {
            self.over.store(over, Relaxed);
            let (now, count) = (self.tree.over.load(Relaxed), usize::from(over));
            self.tree.over.store(now + count - (1 - count), SeqCst);
        }
    }

    /// Returns whether this node or an ancestor uses more than its limit. Leases then keep no spare
    /// bytes. Does not need the lock.
    #[inline]
    pub(super) fn is_over(&'static self) -> bool {
        self.tree.over.load(SeqCst) != 0 && self.path().any(|node| node.over.load(Relaxed))
    }
}
