//! Byte budgets: hierarchical limits on memory, exact at every instant.
//!
//! [`Budget::charge`] takes bytes from a budget and from all its ancestors. It returns a
//! [`Charge`], which releases exactly those bytes when it is dropped. The charge stores its own
//! size, so a release does not depend on concurrent operations and the accounts cannot drift.
//! [`Budget::reserve`] takes bytes all at once or not at all. The resulting [`Reservation`] then
//! draws charges that cannot fail.
//!
//! ```text
//!   process ── host node or device ── pool ── tenant or tag
//!     96 GiB        80 GiB            80 GiB      8 GiB, of which 2 guaranteed
//!
//!   used:  0 ─ charge(60) ─ 60 ─ reserve(40) ─ 100 ─ draw(30) ─ 100 ─ drop reservation ─ 90
//!   limit: 100                                 ▲ one byte more is refused     until here ▲
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `spin_lock` | the lock of a tree |
//! | `refusal` | [`OutOfBudget`], [`Raise`]; [`Holding`]: live bytes of a tag; [`CapacitySource`]: what a shared root claims from |
//! | `hooks` | lists of registered hooks, and their calls; [`Reclaim`]: holders of memory that can be reclaimed; [`Offer`]: what one could release |
//! | `node` | the data of a tree: nodes, their handles, leases and wait queue; `ImmortalList`: leaked objects that are recycled |
//! | `tree` | the arithmetic: limits, guarantees, peaks |
//! | `shared` | `Budget::shared`: claims, and waiters of several processes |
//! | `admission` | charging and releasing |
//! | `charge` | [`Charge`], [`Reservation`], [`StrandedCount`] |
//! | `wait` | [`Waiting`]: the scan of the wait queue |
//! | `lease` | [`BudgetLease`]: prepaid bytes |
//! | `reclaim` | [`HookRegistration`], and [`Asking`]: the search for memory to reclaim |
//! | `forks` | the locks of all trees while a process forks |
//!
//! Each module imports only modules above it in this table. A method of a node may be defined below
//! its callers.
//!
//! # The protocol
//! Each tree has one spin lock. A charge checks every node from its own up to the root under this
//! lock, and adds to all of them or to none. So a charge is atomic:
//!
//! - No thread sees a node above its limit.
//! - A charge is not refused because of another charge that is later rolled back.
//! - If several nodes lack room, the lowest one is reported.
//!
//! The critical section is a few loads and plain stores. Separate exact counters per node would
//! need one atomic read-modify-write each, and a charge refused at the root would be visible below
//! for a moment.
//!
//! Under the lock no callback runs and nothing allocates. Wakers, hooks and reclaimers are called
//! afterwards, with no lock held. A release never blocks: neither on the wait queue nor on a hook
//! that runs in another thread.
//!
//! # Invariants
//! 1. `used` of a node is the sum of the charges and reservations here and below, and of the bytes
//!    that leases hold. [`Budget::used`] excludes what they hold as spare.
//! 2. `used` grows only while the sum stays at or below the limit. A limit set below `used` refuses
//!    charges until enough bytes are released.
//! 3. Guaranteed bytes are available whatever other budgets charge: they are set aside at the
//!    parent from the moment of the guarantee. Only lowering an ancestor's limit below its
//!    guarantees can take them away.
//! 4. A refusal names the node that has no room, and changes nothing.
//! 5. Waiters are served by priority, then in order of arrival, and no wakeup is lost (see `wait`).
//! 6. Bytes that could not be freed stay charged until they are freed.

mod admission;
mod charge;
#[doc(hidden)]
pub mod forks;
pub(crate) mod hooks;
mod lease;
mod node;
mod reclaim;
pub(crate) mod refusal;
mod shared;
mod spin_lock;
mod tree;
mod wait;

pub use charge::{Charge, Reservation, StrandedCount};
pub use hooks::{Offer, Reclaim};
pub use lease::{BudgetLease, Leased};
pub use node::Budget;
pub use reclaim::{Asking, HookRegistration, Room};
pub use refusal::{CapacitySource, ClaimShortage, HeldElsewhere, Holding, OutOfBudget, Raise};
pub use wait::Waiting;

use crate::sync::atomic::Ordering::Relaxed;
use node::Node;
use std::{
    borrow::Cow,
    collections::BTreeSet,
    fmt,
    sync::{Mutex, PoisonError},
    time::Instant,
};

/// Names of budgets that were made at run time.
static NAMES: Mutex<BTreeSet<&'static str>> = Mutex::new(BTreeSet::new());

/// Returns a name for the life of the process, the same for equal ones.
fn stored(name: Cow<'static, str>) -> &'static str {
    let name = match name {
        Cow::Borrowed(name) => return name,
        Cow::Owned(name) => name,
    };
    let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&known) = names.get(name.as_str()) {
        return known;
    }
    let new: &'static str = name.leak();
    names.insert(new);
    new
}

/// The figures of one node at one moment, in bytes unless noted.
///
/// See the example of [`Budget`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Figures {
    /// The name given at creation.
    pub name: &'static str,
    /// Bytes in charges and reservations here and below, also in those of leases.
    pub used: u64,
    /// `used`, plus the spare bytes of leases and the bytes set aside for the guarantees of the
    /// descendants.
    pub held: u64,
    /// The limit.
    pub limit: u64,
    /// The bytes that no other budget can take.
    pub guarantee: u64,
    /// The maximum of `used` and the spare bytes of leases.
    pub peak: u64,
    /// Bytes whose release has failed so far. They are part of `used`.
    pub stranded: u64,
    /// The priority of charges and waits (a number).
    pub priority: i32,
}

impl Budget {
    /// Creates a root budget of `limit` bytes. `name` appears in its errors.
    ///
    /// A name that is made at run time is stored for the life of the process, since errors outlive
    /// their budgets. Each different name costs its length and about 24 bytes that are never freed,
    /// and each creation by such a name a process-wide lock and a search. The budgets themselves
    /// are recycled. So a server that creates a budget for each request should name them alike, or
    /// by the client. A name takes up no [`Tag`](crate::Tag) until a recorder records a
    /// [refusal](crate::Event::refused_by) of the budget.
    ///
    /// ```
    /// use aquifer::Budget;
    /// let tenants = [0, 1, 2].map(|n| Budget::new(format!("tenant {n}"), 100));
    /// assert_eq!(tenants[2].charge(101).unwrap_err().budget, "tenant 2");
    /// ```
    #[must_use]
    pub fn new(name: impl Into<Cow<'static, str>>, limit: u64) -> Self {
        Self { node: Node::claim(None, stored(name.into()), limit) }
    }

    /// Checks that the sums of this budget and of all below it add up. Takes the tree's lock. For
    /// tests and fuzz programs.
    ///
    /// # Errors
    /// The name of the budget where they do not, and what is wrong there.
    #[doc(hidden)]
    pub fn check(&self) -> Result<(), (&'static str, &'static str)> {
        let _guard = self.node.tree.lock.lock();
        self.node.check()
    }

    /// Creates a root budget without a limit, which only counts. [`Budget::new`] tells what its
    /// name costs.
    #[must_use]
    pub fn unlimited(name: impl Into<Cow<'static, str>>) -> Self {
        Self::new(name, u64::MAX)
    }

    /// Creates a budget below this one: what is charged to it is charged here as well. It inherits
    /// this budget's priority. It lives as long as a handle to it or a charge of it exists.
    /// [`Budget::new`] tells what its name costs.
    #[must_use]
    pub fn child(&self, name: impl Into<Cow<'static, str>>, limit: u64) -> Self {
        Self { node: Node::claim(Some(self.node), stored(name.into()), limit) }
    }

    /// Takes `bytes` here and from every ancestor, or nothing. Never blocks.
    ///
    /// If others wait for room that the bytes would take, only a charge with a higher priority is
    /// granted.
    ///
    /// Each charge and each release takes the tree's lock for a short time. Threads that charge
    /// often contend for it. They should charge a [lease](Budget::lease) of their own, which goes
    /// to the tree once for many charges.
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest budget that has no room, with its figures of that moment.
    #[inline]
    pub fn charge(&self, bytes: u64) -> Result<Charge, OutOfBudget> {
        self.node.charge(bytes)?;
        Ok(Charge::granted(self.node, bytes))
    }

    /// Like [`Budget::charge`], but with this priority instead of the budget's own.
    ///
    /// # Errors
    /// See [`Budget::charge`].
    #[inline]
    pub fn charge_as(&self, bytes: u64, priority: i32) -> Result<Charge, OutOfBudget> {
        self.node.charge_as(bytes, priority.into())?;
        Ok(Charge::granted(self.node, bytes))
    }

    /// Takes `bytes` at once, to be drawn later, or nothing. Never blocks.
    ///
    /// # Errors
    /// See [`Budget::charge`].
    #[inline]
    pub fn reserve(&self, bytes: u64) -> Result<Reservation, OutOfBudget> {
        self.charge(bytes).map(Reservation::from)
    }

    /// Like [`Budget::reserve`], but waits as [`Budget::charge_by`] does. The asynchronous form is
    /// `budget.charge_async(bytes).await.map(Reservation::from)`.
    ///
    /// # Errors
    /// See [`Budget::charge_by`].
    pub fn reserve_by(
        &self,
        bytes: u64,
        deadline: Option<Instant>,
    ) -> Result<Reservation, OutOfBudget> {
        self.charge_by(bytes, deadline).map(Reservation::from)
    }

    /// Returns the name given at creation.
    #[must_use]
    pub fn name(&self) -> &'static str {
        self.node.name()
    }

    /// Returns the bytes in charges and reservations, here and below, also in those of leases. What
    /// leases hold as [spare](Budget::spare) is not used: every charge can take it. In a tree with
    /// open leases this visits them.
    #[inline]
    #[must_use]
    pub fn used(&self) -> u64 {
        let used = self.node.used.load(Relaxed);
        let has_leases = self.node.tree.open_leases.load(Relaxed) > 0;
        if has_leases { used.saturating_sub(self.node.spare()) } else { used }
    }

    /// Returns the bytes that leases here and below hold in advance, in addition to
    /// [`Budget::used`].
    #[must_use]
    pub fn spare(&self) -> u64 {
        self.node.spare()
    }

    /// Returns the limit, in bytes.
    #[inline]
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.node.limit.load(Relaxed)
    }

    /// Returns the bytes that a charge could take now, here and in every ancestor. The spare bytes
    /// of leases are not included, but a charge can take them too.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        let room = {
            let _guard = self.node.tree.lock.lock();
            self.node.room(self.node.priority.load(Relaxed))
        };
        self.node.tree.source().map_or(room, |source| room.min(source.room()))
    }

    /// Returns an estimate of [`Budget::remaining`] without taking the tree's lock.
    ///
    /// The figures are read one after another while other threads change them. Use it to compare
    /// many budgets before charging one of them, since the charge itself is exact. `priority`
    /// replaces the budget's own priority if given.
    #[inline]
    #[must_use]
    pub fn estimate(&self, priority: Option<i32>) -> u64 {
        self.node
            .estimate_room(|| priority.map_or_else(|| self.node.priority.load(Relaxed), i64::from))
    }

    /// Sets the limit for charges from now on, and returns the excess in bytes: how far `used` is
    /// above the limit, after the spare bytes of leases are recalled.
    ///
    /// While there is an excess, every charge is refused. [`Budget::shrink`] also reclaims the
    /// excess. A guarantee above the limit is lowered to it. Waiters are served if there is room
    /// now, and refused if there can never be room.
    pub fn set_limit(&self, limit: u64) -> u64 {
        let node = self.node;
        {
            let _guard = node.tree.lock.lock();
            node.limit.store(limit, Relaxed);
            if node.guarantee.load(Relaxed) > limit {
                // Lowering a guarantee cannot fail.
                let _ = node.set_guarantee(limit);
            }
            node.update_bounds();
        }
        if node.over_limit.load(Relaxed) {
            node.recall();
        }
        node.tree.wait_queue.request_scan();
        self.used().saturating_sub(limit)
    }

    /// Guarantees `bytes` to this budget and its descendants, and replaces the previous guarantee.
    /// The bytes are set aside in every ancestor, so that no other charge can take them.
    ///
    /// # Errors
    /// [`OutOfBudget`] of the nearest ancestor that cannot set that much aside, or of this budget
    /// if its limit is lower.
    pub fn set_guarantee(&self, bytes: u64) -> Result<(), OutOfBudget> {
        let node = self.node;
        let set = || {
            let _guard = node.tree.lock.lock();
            node.set_guarantee(bytes)
        };
        let mut result = set();
        if result.is_err() && node.recall_all() > 0 {
            result = set();
        }
        // A lower guarantee frees room for waiters. A higher one may make a wait unsatisfiable.
        if result.is_ok() {
            node.tree.wait_queue.request_scan();
        }
        result
    }

    /// Returns the bytes guaranteed to this budget.
    #[must_use]
    pub fn guarantee(&self) -> u64 {
        self.node.guarantee.load(Relaxed)
    }

    /// Sets the priority of this budget's charges and waits from now on. Higher priorities are
    /// served first. Children created later inherit it.
    pub fn set_priority(&self, priority: i32) {
        self.node.priority.store(priority.into(), Relaxed);
    }

    /// Returns the maximum of [`Budget::used`] since creation or the last [`Budget::reset_peak`].
    /// Includes what leases held as spare.
    #[must_use]
    pub fn peak(&self) -> u64 {
        self.node.peak.load(Relaxed)
    }

    /// Resets the peak to what is used now.
    pub fn reset_peak(&self) {
        let _guard = self.node.tree.lock.lock();
        self.node.peak.store(self.node.used.load(Relaxed), Relaxed);
        self.node.update_bounds();
    }

    /// Returns the bytes whose release has failed, here and below. They are part of
    /// [`Budget::used`].
    #[must_use]
    pub fn stranded(&self) -> u64 {
        self.node.stranded.load(Relaxed)
    }

    /// Returns the parent budget, or `None` for a root.
    #[must_use]
    pub fn parent(&self) -> Option<Budget> {
        self.node.ancestors.first().map(|parent| parent.new_handle())
    }

    /// An iterator over the live children: those with a handle or with charged bytes.
    pub fn children(&self) -> impl Iterator<Item = Budget> {
        self.node.children()
    }

    /// Returns all figures of this node, read at one moment.
    #[must_use]
    pub fn figures(&self) -> Figures {
        let (node, name) = (self.node, self.name());
        let _guard = node.tree.lock.lock();
        let used = node.used.load(Relaxed);
        Figures {
            name,
            used: self.used(),
            held: used.saturating_add(node.unused_guarantee.load(Relaxed)),
            limit: self.limit(),
            guarantee: self.guarantee(),
            peak: self.peak(),
            stranded: self.stranded(),
            // The value was stored from an `i32`.
            priority: i32::try_from(node.priority.load(Relaxed)).unwrap_or_default(),
        }
    }

    /// Returns `true` if both are handles to the same node.
    #[must_use]
    pub fn is(&self, other: &Budget) -> bool {
        std::ptr::eq(self.node, other.node)
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

// The figures of a tree are atomics, and its lists are behind locks that ignore poison. Hooks,
// wakers, sources and reclaimers are called with no lock held, and their panics are contained.
crate::__unwind_safe! { [] Budget, [] BudgetLease, [] Leased, [] HookRegistration }
