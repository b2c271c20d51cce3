//! Limits on bytes, in a tree, exact at every instant.
//!
//! [`Budget::charge`] takes bytes from a budget and from all above it, and answers with a
//! [`Charge`], which gives exactly those bytes back when it is dropped. The bytes stand in the
//! charge, so releasing one never depends on what others did meanwhile: an account kept as the
//! difference of two readings of a shared counter drifts as soon as two threads allocate
//! at once. [`Budget::reserve`] takes bytes all at once or not at all, and hands them out later: a
//! [`Reservation`] draws charges that cannot be refused any more.
//!
//! ```text
//!   process ── host node or device ── pool ── tenant or tag
//!     96 GiB        80 GiB            80 GiB      8 GiB, of which 2 guaranteed
//!
//!   used:  0 ────── charge(60) ── 60 ── reserve(40) ── 100 ── draw(30) ── 100 ── drop reservation ── 90
//!   limit: 100                              ▲ a charge of one byte is refused from here ……………………… to here
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `tree` | the arithmetic: limits, guarantees, peaks |
//! | `lock` | the lock of a tree |
//! | `node` | how nodes come and go |
//! | `admission` | the way in and out |
//! | `charge` | [`Charge`], [`Reservation`], [`StrandedCharge`] |
//! | `together` | [`Budget::reserve_all`]: several nodes at once |
//! | `refusal` | [`OutOfBudget`], [`Raise`] |
//! | `wait` | [`Waiting`]: the line |
//! | `lease` | [`Lease`]: bytes paid for in advance |
//! | `level` | [`Level`]: soft limits and who is told |
//! | `reclaim` | [`Reclaim`]: who can give bytes back |
//! | `hooks` | calling what others have registered |
//!
//! # The protocol
//! All of a tree has one spin lock. A charge looks at every node from its own up to the root inside
//! of it, and adds to all or to none. So it is atomic: nobody ever sees a node above its limit,
//! nobody is refused for bytes that a charge under way is about to give back, and of several nodes
//! that have no room the lowest one refuses. What is inside the lock is loads and plain stores,
//! some 10 ns for four nodes; four counters that are each exact would take four locked instructions
//! each way, and a charge that is refused at the root would have been seen, and refused others, at
//! the three below it.
//!
//! Nothing is called inside the lock and nothing allocates there. Wakers, hooks and reclaimers are
//! called after it, with no lock held. A release never blocks: not on the line of those who wait,
//! nor on a hook that another thread is in.
//!
//! # What a node promises
//! 1. `used` is the sum of the charges and reservations here and below, and of what leases hold.
//! 2. `used` grows only where it stays at or below the limit. A limit that was set below it refuses
//!    until it is met.
//! 3. Guaranteed bytes are had whatever others charge: they are set aside at the parent from the
//!    moment they are guaranteed. Only a limit above that is lowered below its guarantees can take
//!    them away.
//! 4. A refusal names the node that has no room, and changes nothing.
//! 5. Whoever waits is served by priority, then in order, and never lost; see `wait`.
//! 6. Bytes that could not be freed stay charged until they are.

mod admission;
mod charge;
#[doc(hidden)]
pub mod forks;
mod hooks;
mod lease;
mod level;
mod lock;
mod node;
mod reclaim;
mod refusal;
mod together;
mod tree;
mod wait;

pub use charge::{Charge, Reservation, StrandedCharge};
pub use lease::{Lease, Leased};
pub use level::{Level, LevelChange, LevelHook, Levels, Registration};
pub use reclaim::{Asking, Offer, Reclaim, Room};
pub use refusal::{OutOfBudget, Raise};
pub use wait::Waiting;

use crate::{Tag, sync::atomic::Ordering::Relaxed};
use node::Node;
use std::{fmt, time::Instant};

/// A limit on bytes, shared by whoever clones it; a node of a tree of them.
///
/// ```
/// use aquifer_core::Budget;
/// let device = Budget::new("device 0", 100);
/// let tenant = device.child("tenant a", 80);
/// let other = device.child("tenant b", 100);
/// other.set_guarantee(30)?;                    // set aside, so that nobody else takes it
/// let most = tenant.charge(70)?;
/// assert_eq!(tenant.charge(5).unwrap_err().budget, "device 0");
/// assert_eq!((device.used(), device.remaining(), other.remaining()), (70, 0, 30));
/// drop(most);
/// assert_eq!(device.used(), 0);
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
pub struct Budget {
    node: &'static Node,
}

/// What stands at one node, at one moment. Bytes, unless a name says otherwise.
///
/// Its example is that of [`Budget`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Figures {
    /// The name given at the start.
    pub name: &'static str,
    /// In charges and reservations here and below, and in leases.
    pub used: u64,
    /// The same, and what is set aside for the guarantees of those below.
    pub held: u64,
    /// The limit.
    pub limit: u64,
    /// What nobody else can take.
    pub guarantee: u64,
    /// The most that was used at once.
    pub peak: u64,
    /// Used, though a free was tried: it has failed so far.
    pub stranded: u64,
    /// The level.
    pub level: Level,
    /// The priority of charges and waits (a number).
    pub priority: i32,
}

impl Budget {
    /// A budget of `limit` bytes with none above it, and a name for its errors: a literal, or a
    /// tag's.
    #[must_use]
    pub fn new(name: &'static str, limit: u64) -> Self {
        Self { node: Node::claim(None, name, limit) }
    }

    /// A budget that only counts.
    #[must_use]
    pub fn unlimited(name: &'static str) -> Self {
        Self::new(name, u64::MAX)
    }

    /// A budget below this one: what is charged to it is charged here as well. Its priority is this
    /// one's. It lasts as long as anybody has it or has bytes of it.
    #[must_use]
    pub fn child(&self, name: &'static str, limit: u64) -> Self {
        Self { node: Node::claim(Some(self.node), name, limit) }
    }

    /// Takes `bytes` here and in every budget above, or nothing. Never blocks.
    ///
    /// Where others wait for room that the bytes would take, only a higher priority passes them.
    ///
    /// It takes the tree's lock for some 10 ns, and its release does. One thread hardly notices;
    /// sixteen that charge all the time take turns, 386 ns for each charge and release on an H200's
    /// host. Threads that charge often charge a [lease](Budget::lease) of their own, which asks the
    /// tree once for many charges: 1.8 ns then.
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest budget that has no room, with its figures of that moment.
    #[inline]
    pub fn charge(&self, bytes: u64) -> Result<Charge, OutOfBudget> {
        self.node.take(bytes)?;
        Ok(Charge::granted(self.node, bytes))
    }

    /// As [`Budget::charge`], by this priority instead of the budget's own.
    ///
    /// # Errors
    /// As [`Budget::charge`].
    #[inline]
    pub fn charge_as(&self, bytes: u64, priority: i32) -> Result<Charge, OutOfBudget> {
        self.node.take_as(bytes, priority.into())?;
        Ok(Charge::granted(self.node, bytes))
    }

    /// Takes `bytes` at once to be drawn later, or nothing. Never blocks.
    ///
    /// # Errors
    /// As [`Budget::charge`].
    #[inline]
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, OutOfBudget> {
        self.charge(bytes).map(Reservation::from)
    }

    /// As [`Budget::reserve`], waiting as [`Budget::charge_by`] does. By a future:
    /// `budget.charge_async(bytes).await.map(Reservation::from)`.
    ///
    /// # Errors
    /// As [`Budget::charge_by`].
    pub fn reserve_by(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
    ) -> Result<Reservation, OutOfBudget> {
        self.charge_by(bytes, deadline).map(Reservation::from)
    }

    /// The name given at the start.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.node.name()
    }

    /// Bytes in charges and reservations, here and below, and in leases.
    #[inline]
    #[must_use]
    pub fn used(&self) -> u64 {
        self.node.used.load(Relaxed)
    }

    /// Bytes of [`Budget::used`] that leases here and below have spare: live bytes are the
    /// difference.
    #[must_use]
    pub fn spare(&self) -> u64 {
        self.node.spare()
    }

    /// The limit, in bytes.
    #[inline]
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.node.limit.load(Relaxed)
    }

    /// Bytes that a charge could take now, here and in every budget above. What leases have spare
    /// comes on top.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        let _inside = self.node.tree.lock.enter();
        self.node.room(self.node.priority.load(Relaxed))
    }

    /// As [`Budget::remaining`], from figures that are read one after another while others move
    /// them, without the tree's lock: for whoever compares many budgets, and charges one of them
    /// afterwards, which decides. By another priority than the budget's own, if one is given.
    #[inline]
    #[must_use]
    pub fn estimate(&self, priority: Option<i32>) -> u64 {
        self.node.glance(|| priority.map_or_else(|| self.node.priority.load(Relaxed), i64::from))
    }

    /// Sets the limit for charges from now on. Below what is used it refuses all of them until
    /// enough has been given back; answers with that excess, in bytes, after what leases had spare.
    /// [`Budget::shrink`] asks for it too.
    ///
    /// A guarantee above the limit is lowered to it. Whoever waits is served if there is room now,
    /// and refused if there can be none.
    pub fn set_limit(&self, limit: u64) -> u64 {
        let node = self.node;
        {
            let _inside = node.tree.lock.enter();
            node.limit.store(limit, Relaxed);
            if node.guarantee.load(Relaxed) > limit {
                // Less than before is never refused.
                let _ = node.guarantee(limit);
            }
            node.refresh();
        }
        if self.used() > limit {
            node.recall();
        }
        node.tree.line.look();
        self.used().saturating_sub(limit)
    }

    /// Guarantees `bytes` to this budget and those below it, instead of what was guaranteed before:
    /// they are set aside in every budget above, so that no charge but these can take them.
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest budget above that cannot set as much aside, or of this one
    /// where its limit is lower.
    pub fn set_guarantee(&self, bytes: u64) -> Result<(), OutOfBudget> {
        let node = self.node;
        let set = || {
            let _inside = node.tree.lock.enter();
            node.guarantee(bytes)
        };
        let mut answer = set();
        if answer.is_err() && node.recall_all() > 0 {
            answer = set();
        }
        // Less set aside is room for others, and more may be too much for somebody who waits.
        if answer.is_ok() {
            node.tree.line.look();
        }
        answer
    }

    /// The bytes guaranteed to this budget.
    #[must_use]
    pub fn guarantee(&self) -> u64 {
        self.node.guarantee.load(Relaxed)
    }

    /// Sets the priority of this budget's charges and waits from now on; higher is served first.
    /// Children made later inherit it.
    pub fn set_priority(&self, priority: i32) {
        self.node.priority.store(priority.into(), Relaxed);
    }

    /// The most bytes that were used at once since the start or the last [`Budget::reset_peak`].
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.node.peak.load(Relaxed)
    }

    /// Starts the peak anew from what is used now.
    pub fn reset_peak(&self) {
        let _inside = self.node.tree.lock.enter();
        self.node.peak.store(self.used(), Relaxed);
        self.node.refresh();
    }

    /// Bytes whose free has failed, here and below; they are part of [`Budget::used`].
    #[must_use]
    pub fn stranded(&self) -> u64 {
        self.node.stranded.load(Relaxed)
    }

    /// The budget above, if there is one.
    #[must_use]
    pub fn parent(&self) -> Option<Budget> {
        self.node.above.first().map(|parent| parent.know())
    }

    /// The budgets right below that anybody has, or has bytes of.
    pub fn children(&self) -> impl Iterator<Item = Budget> {
        self.node.children()
    }

    /// All figures of this node, of one moment.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let (node, name) = (self.node, self.name());
        let _inside = node.tree.lock.enter();
        let used = node.used.load(Relaxed);
        Figures {
            name,
            used,
            held: used.saturating_add(node.extra.load(Relaxed)),
            limit: self.limit(),
            guarantee: self.guarantee(),
            peak: self.peak(),
            stranded: self.stranded(),
            level: self.level(),
            // It was one.
            priority: i32::try_from(node.priority.load(Relaxed)).unwrap_or_default(),
        }
    }

    /// Whether both are handles to one account.
    #[must_use]
    pub fn is(&self, other: &Budget) -> bool {
        std::ptr::eq(self.node, other.node)
    }
}

impl Clone for Budget {
    fn clone(&self) -> Self {
        self.node.know()
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.node.forget();
    }
}

impl fmt::Debug for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Budget")
            .field("name", &self.name())
            .field("used", &self.used())
            .field("limit", &self.limit())
            .field("peak", &self.peak())
            .finish()
    }
}

/// Bytes and how many blocks one tag holds.
///
/// Its example is that of [`OutOfMemory`](crate::OutOfMemory).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Holding {
    /// Whose.
    pub tag: Tag,
    /// Live bytes.
    pub bytes: u64,
    /// Live blocks.
    pub blocks: u64,
}
