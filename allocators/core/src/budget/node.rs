//! The data of a budget tree, and the creation and recycling of its nodes.
//!
//! The handles, leases and waiters of a node point to it, and the node to them. So their data is in
//! one file. What is done with it is in the modules that import this one.
//!
//! - Nodes are allocated once, never freed, and recycled: when the last handle is gone and nothing
//!   is charged, a node is idle until its parent creates another child.
//! - A charge can therefore store a plain `&'static` reference. Charging and releasing change no
//!   reference count.
//! - There are as many nodes as were live at once.
//!
//! ```text
//!                  claim                   last handle gone, nothing charged
//!   idle ──► in transition ──► live ───────────────────────────────────► in transition ──► idle
//! ```
//!
//! Budgets, live children, leases and waits each count as one handle. So does a charge of no bytes.
//! Any other charge keeps its node live by its bytes. Lists of children only grow, and are walked
//! without a lock.

use super::{
    hooks::Hooks, hooks::Reclaimer, refusal::CapacitySource, refusal::OutOfBudget,
    spin_lock::SpinLock,
};
use crate::sync::{
    Mutex,
    atomic::{
        AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    lock,
};
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    sync::{Arc, OnceLock},
    task::Waker,
    time::Instant,
};

/// The waiter priority of a node that has no waiter.
pub(super) const NO_WAITER: i64 = i64::MIN;

/// A [`Node::headroom_limit`] without a bound: a waiter or an unused guarantee requires the slow
/// path.
pub(super) const SLOW_PATH: u64 = u64::MAX;

/// The [`Tree::claimed`] of a tree whose capacity is not shared with other processes.
pub(super) const NOT_SHARED: u64 = u64::MAX;

const IDLE: u8 = 0;
const LIVE: u8 = 1;
const IN_TRANSITION: u8 = 2;

/// The state that all nodes of one root share.
pub(super) struct Tree {
    pub(super) lock: SpinLock,
    /// The wait queue of all nodes.
    pub(super) wait_queue: WaitQueue,
    /// The number of nodes that hold more than their limit, which was lowered. Written under the
    /// lock.
    pub(super) nodes_over_limit: AtomicUsize,
    /// The number of open leases. If it is zero, a refused charge skips the search for spare
    /// bytes.
    pub(super) open_leases: AtomicUsize,
    /// What a shared root has claimed, at least its `used`, or [`NOT_SHARED`]. Written under the
    /// lock.
    pub(super) claimed: AtomicU64,
    /// What a shared root claims from.
    pub(super) source: Mutex<Option<Arc<dyn CapacitySource>>>,
}

/// One node. Its figures change only under the tree's lock, and may be read at any time.
#[repr(align(128))]
pub(super) struct Node {
    /// Bytes in charges and reservations, here and below. At or below the limit that applied when
    /// it last grew.
    pub(super) used: AtomicU64,
    /// The bound for the fast path of charges (see [`super::tree`]).
    pub(super) fast_limit: AtomicU64,
    /// The bound for the fast path of releases.
    pub(super) fast_floor: AtomicU64,
    /// The most that `used` could reach as far as this node is concerned, or [`SLOW_PATH`].
    pub(super) headroom_limit: AtomicU64,
    /// Whether `held` is above the limit, because the limit was lowered.
    pub(super) over_limit: AtomicBool,
    pub(super) tree: &'static Tree,
    /// The ancestors, from the parent to the root.
    pub(super) ancestors: &'static [&'static Node],
    /// The number of handles. Changes at any time, but zero is only acted on under the lock.
    pub(super) handles: AtomicUsize,
    pub(super) limit: AtomicU64,
    /// Bytes guaranteed to children and not used by them.
    pub(super) unused_guarantee: AtomicU64,
    pub(super) guarantee: AtomicU64,
    /// The sum of the children's guarantees, used or not.
    pub(super) guaranteed: AtomicU64,
    /// The maximum of `used` since the last reset.
    pub(super) peak: AtomicU64,
    /// Bytes of charges whose release has failed, here and below.
    pub(super) stranded: AtomicU64,
    pub(super) priority: AtomicI64,
    /// The priority of the first waiter for room at this node, or [`NO_WAITER`].
    pub(super) waiter_priority: AtomicI64,
    pub(super) reclaimers: Hooks<Arc<Reclaimer>>,
    state: AtomicU8,
    name: Mutex<&'static str>,
    children: ImmortalList<Node>,
    pub(super) leases: ImmortalList<LeaseBody>,
}

/// All nodes without a parent.
pub(super) static ROOTS: ImmortalList<Node> = ImmortalList::new();

/// The state of a lease. Allocated once, never freed, and recycled, as nodes are.
#[repr(align(128))]
pub(super) struct LeaseBody {
    /// Bytes that are prepaid and not charged, and the bit that closes it.
    pub(super) spare: AtomicU64,
    /// Bytes taken from the tree and not released, plus one while the lease is open. The thread
    /// that brings it to zero recycles the state.
    pub(super) outstanding: AtomicU64,
    pub(super) grain: AtomicU64,
    pub(super) node: &'static Node,
    pub(super) state: AtomicU8,
}

/// The key of a waiter: higher priority first, then earlier arrival.
pub(super) type WaiterKey = (Reverse<i64>, u64);
pub(super) type WaitResult = Result<(), OutOfBudget>;

/// The wait queue of a tree.
pub(super) struct WaitQueue {
    /// The number of waiters. Written under the tree's lock.
    pub(super) waiters: AtomicU64,
    /// The number of scans requested.
    pub(super) scans_requested: AtomicU64,
    pub(super) state: Mutex<Waiters>,
}

/// The waiters of a tree, and their results.
pub(super) struct Waiters {
    pub(super) next: u64,
    /// The value of `scans_requested` that the last scan has covered.
    pub(super) scans_done: u64,
    pub(super) waiters: BTreeMap<WaiterKey, Waiter>,
    pub(super) results: BTreeMap<u64, WaitResult>,
    /// Nodes that refused a waiter in the last scan. Their room is kept for waiters.
    pub(super) contended: Vec<&'static Node>,
}

/// One waiter.
pub(super) struct Waiter {
    pub(super) node: &'static Node,
    pub(super) bytes: u64,
    pub(super) deadline: Option<Instant>,
    pub(super) waker: Option<Waker>,
    pub(super) result: Option<WaitResult>,
}

impl WaitQueue {
    pub(super) fn new() -> Self {
        Self {
            waiters: AtomicU64::new(0),
            scans_requested: AtomicU64::new(0),
            state: Mutex::new(Waiters {
                next: 0,
                scans_done: 0,
                waiters: BTreeMap::new(),
                results: BTreeMap::new(),
                contended: Vec::new(),
            }),
        }
    }
}

/// A shared limit on bytes: a node in a tree of budgets.
///
/// Clones are handles to the same node.
///
/// ```
/// use aquifer::Budget;
/// let device = Budget::new("device 0", 100);
/// let tenant = device.child("tenant a", 80);
/// let other = device.child("tenant b", 100);
/// other.set_guarantee(30)?;                    // set aside: other budgets cannot charge it
/// let most = tenant.charge(70)?;
/// assert_eq!(tenant.charge(5).unwrap_err().budget, "device 0");
/// assert_eq!((device.used(), device.remaining(), other.remaining()), (70, 0, 30));
/// drop(most);
/// assert_eq!(device.used(), 0);
/// # Ok::<(), aquifer::OutOfBudget>(())
/// ```
pub struct Budget {
    pub(super) node: &'static Node,
}

impl Clone for Budget {
    fn clone(&self) -> Self {
        self.node.new_handle()
    }
}

impl Drop for Budget {
    fn drop(&mut self) {
        self.node.release_handle();
    }
}

impl Node {
    /// Returns a live, empty node with one handle.
    pub(super) fn claim(
        parent: Option<&'static Node>,
        name: &'static str,
        limit: u64,
    ) -> &'static Node {
        // A loom execution must not reuse nodes of an earlier execution.
        let fresh = ImmortalList::new();
        let list = match parent {
            Some(parent) => &parent.children,
            None if cfg!(loom) => &fresh,
            None => &ROOTS,
        };
        let idle =
            |node: &Node| node.state.compare_exchange(IDLE, IN_TRANSITION, AcqRel, Relaxed).is_ok();
        let node = list.claim(idle, || Node::new(parent));
        if let Some(parent) = parent {
            parent.handles.fetch_add(1, Relaxed);
        }
        *lock(&node.name) = name;
        node.priority.store(parent.map_or(0, |parent| parent.priority.load(Relaxed)), Relaxed);
        node.handles.fetch_add(1, Relaxed);
        let guard = node.tree.lock.lock();
        node.limit.store(limit, Relaxed);
        node.peak.store(0, Relaxed);
        node.update_bounds();
        node.state.store(LIVE, Release);
        drop(guard);
        node
    }

    fn new(parent: Option<&'static Node>) -> Self {
        let ancestors = parent.map_or_else(Vec::new, |parent| {
            std::iter::once(parent).chain(parent.ancestors.iter().copied()).collect()
        });
        let tree = match parent {
            Some(parent) => parent.tree,
            None => Box::leak(Box::new(Tree {
                lock: SpinLock::new(),
                wait_queue: WaitQueue::new(),
                nodes_over_limit: AtomicUsize::new(0),
                open_leases: AtomicUsize::new(0),
                claimed: AtomicU64::new(NOT_SHARED),
                source: Mutex::new(None),
            })),
        };
        Self {
            used: AtomicU64::new(0),
            fast_limit: AtomicU64::new(0),
            fast_floor: AtomicU64::new(0),
            headroom_limit: AtomicU64::new(SLOW_PATH),
            over_limit: AtomicBool::new(false),
            tree,
            ancestors: ancestors.leak(),
            handles: AtomicUsize::new(0),
            limit: AtomicU64::new(0),
            unused_guarantee: AtomicU64::new(0),
            guarantee: AtomicU64::new(0),
            guaranteed: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            stranded: AtomicU64::new(0),
            priority: AtomicI64::new(0),
            waiter_priority: AtomicI64::new(NO_WAITER),
            reclaimers: Hooks::new(),
            state: AtomicU8::new(IN_TRANSITION),
            name: Mutex::new(""),
            children: ImmortalList::new(),
            leases: ImmortalList::new(),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        *lock(&self.name)
    }

    /// Creates another handle. The caller must hold one already.
    pub(super) fn new_handle(&'static self) -> Budget {
        self.handles.fetch_add(1, Relaxed);
        Budget { node: self }
    }

    /// Returns a handle if the node is live. For nodes found in a list.
    pub(super) fn handle_if_live(&'static self) -> Option<Budget> {
        let _guard = self.tree.lock.lock();
        (self.state.load(Acquire) == LIVE).then(|| self.new_handle())
    }

    /// Drops one handle.
    pub(super) fn release_handle(&'static self) {
        debug_assert!(self.handles.load(Relaxed) > 0, "a handle that was released before");
        // Acquire and release: all use of the node through other handles happens before the
        // recycling.
        if self.handles.fetch_sub(1, AcqRel) == 1 {
            self.recycle_if_unused();
        }
    }

    /// Makes the node idle if it has no handles and no charged bytes. Called after the last handle
    /// is dropped and after the last byte is released.
    #[cold]
    pub(super) fn recycle_if_unused(&'static self) {
        {
            let _guard = self.tree.lock.lock();
            let unused = self.handles.load(Acquire) == 0 && self.used.load(Relaxed) == 0;
            if !unused || self.state.load(Relaxed) != LIVE {
                return;
            }
            self.state.store(IN_TRANSITION, Relaxed);
            // Lowering a guarantee cannot fail.
            let _ = self.set_guarantee(0);
            self.stranded.store(0, Relaxed);
            if self.ancestors.is_empty() {
                self.tree.claimed.store(NOT_SHARED, Relaxed);
            }
        }
        if self.ancestors.is_empty() {
            // Dropped with no lock held.
            let _source = lock(&self.tree.source).take();
        }
        self.reclaimers.clear();
        // Waiters may be able to use the bytes that were guaranteed to this node.
        self.tree.wait_queue.request_scan();
        self.state.store(IDLE, Release);
        if let Some(parent) = self.ancestors.first() {
            parent.release_handle();
        }
    }

    /// Visits this node and all below it, including idle ones.
    pub(super) fn visit_subtree(&'static self, visit: &mut dyn FnMut(&'static Node)) {
        visit(self);
        for child in self.children.iter() {
            child.visit_subtree(visit);
        }
    }

    /// Visits all children, including idle ones.
    pub(super) fn for_each_child(&self, visit: impl FnMut(&'static Node)) {
        self.children.iter().for_each(visit);
    }

    /// An iterator over the live children.
    pub(super) fn children(&self) -> impl Iterator<Item = Budget> {
        self.children.iter().filter_map(Node::handle_if_live)
    }

    /// Returns `true` if this node is `other` or a descendant of it.
    pub(super) fn is_below(&'static self, other: &'static Node) -> bool {
        self.path().any(|node| std::ptr::eq(node, other))
    }
}

/// A list of leaked objects that are recycled. The list only grows.
pub(super) struct ImmortalList<T: 'static> {
    first: OnceLock<&'static Link<T>>,
}

struct Link<T: 'static> {
    item: T,
    next: OnceLock<&'static Link<T>>,
}

impl<T> ImmortalList<T> {
    pub(super) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'static T> {
        std::iter::successors(self.first.get().copied(), |link| link.next.get().copied())
            .map(|link| &link.item)
    }

    /// Returns the first object that `claim` accepts, or appends a new one, which is claimed
    /// already.
    pub(super) fn claim(&self, claim: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &'static T {
        if let Some(item) = self.iter().find(|item| claim(item)) {
            return item;
        }
        let link: &'static Link<T> =
            Box::leak(Box::new(Link { item: make(), next: OnceLock::new() }));
        let mut end = &self.first;
        while end.set(link).is_err() {
            match end.get() {
                Some(link) => end = &link.next,
                None => break,
            }
        }
        &link.item
    }
}
