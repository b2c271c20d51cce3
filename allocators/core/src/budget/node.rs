//! A node, and how it comes and goes.
//!
//! A node is leaked once and used again: when nobody knows it any more and nothing is charged to
//! it, it lies idle until its parent has a child again. So a charge finds its node by a plain
//! reference, and no count of references moves when one is taken or given back. There are as many
//! nodes as were in use at once.
//!
//! ```text
//!             claim               last handle gone, nothing charged
//!   idle ──► between ──► live ───────────────────────────────────► between ──► idle
//! ```
//!
//! A node is known by budgets, its live children, leases and waits: each is a handle. A charge of
//! no bytes is one too; any other charge keeps its node by the bytes themselves. Lists of children
//! only grow, and are walked without a lock.

use super::{
    Budget,
    hooks::Hooks,
    lease::Shell,
    level::{LevelHook, Thresholds},
    lock::Lock,
    reclaim::Reclaimer,
    wait::Line,
};
use crate::sync::{
    Mutex,
    atomic::{
        AtomicBool, AtomicI64, AtomicU8, AtomicU64, AtomicUsize,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    lock,
};
use std::sync::{Arc, OnceLock};

/// The priority of the first in line where nobody is.
pub(super) const NOBODY: i64 = i64::MIN;

/// A [`Node::brim`] that says nothing: somebody is in line, or a guarantee is not used up.
pub(super) const ASK: u64 = u64::MAX;

const IDLE: u8 = 0;
const LIVE: u8 = 1;
const BETWEEN: u8 = 2;

/// What all nodes from one root on share.
pub(super) struct Tree {
    pub(super) lock: Lock,
    /// Who waits for bytes of any node.
    pub(super) line: Line,
    /// Nodes that hold more than a limit which was lowered. Written inside the lock.
    pub(super) over: AtomicUsize,
    /// Leases that are open. Zero spares whoever is refused the search for what they hold.
    pub(super) leases: AtomicUsize,
}

/// One node. Its figures change under the tree's lock only, and are read at any time.
#[repr(align(128))]
pub(super) struct Node {
    /// Bytes in charges and reservations, here and below. Never above the limit that stood when it
    /// was last raised.
    pub(super) used: AtomicU64,
    /// Up to here a charge meets no edge; see [`super::tree`].
    pub(super) easy: AtomicU64,
    /// Down to here a release meets no edge.
    pub(super) floor: AtomicU64,
    /// What `used` could be at most, whoever charges, as far as this node goes; or [`ASK`].
    pub(super) brim: AtomicU64,
    /// Whether more is used than the limit allows: it was lowered, and has not been met yet.
    pub(super) over: AtomicBool,
    pub(super) tree: &'static Tree,
    /// From the parent to the root.
    pub(super) above: &'static [&'static Node],
    /// Who knows this node. Changes at any time; that it is zero counts under the lock.
    pub(super) handles: AtomicUsize,
    pub(super) limit: AtomicU64,
    /// Bytes that children are guaranteed and have not used.
    pub(super) extra: AtomicU64,
    pub(super) guarantee: AtomicU64,
    /// The sum of what the children are guaranteed, used or not.
    pub(super) promised: AtomicU64,
    /// The most that `used` has been since the last reset.
    pub(super) peak: AtomicU64,
    /// Bytes of charges whose free has failed, here and below.
    pub(super) stranded: AtomicU64,
    pub(super) priority: AtomicI64,
    /// The priority of the first who waits for this node to have room, or [`NOBODY`].
    pub(super) line: AtomicI64,
    /// The level that `used` is at, and the one that hooks were told last.
    pub(super) level: AtomicU8,
    pub(super) told: AtomicU8,
    pub(super) telling: AtomicU8,
    pub(super) thresholds: Thresholds,
    pub(super) level_hooks: Hooks<Arc<LevelHook>>,
    pub(super) reclaimers: Hooks<Arc<Reclaimer>>,
    state: AtomicU8,
    name: Mutex<&'static str>,
    children: Shells<Node>,
    pub(super) leases: Shells<Shell>,
}

/// Things that are leaked once and used again, in a list that only grows.
pub(super) struct Shells<T: 'static> {
    first: OnceLock<&'static Cell<T>>,
}

struct Cell<T: 'static> {
    thing: T,
    next: OnceLock<&'static Cell<T>>,
}

impl<T> Shells<T> {
    pub(super) const fn new() -> Self {
        Self { first: OnceLock::new() }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &'static T> {
        std::iter::successors(self.first.get().copied(), |cell| cell.next.get().copied())
            .map(|cell| &cell.thing)
    }

    /// One that `claim` takes, or a new one, which is claimed already.
    pub(super) fn claim(&self, claim: impl Fn(&T) -> bool, make: impl FnOnce() -> T) -> &'static T {
        if let Some(thing) = self.iter().find(|thing| claim(thing)) {
            return thing;
        }
        let cell: &'static Cell<T> =
            Box::leak(Box::new(Cell { thing: make(), next: OnceLock::new() }));
        let mut end = &self.first;
        while end.set(cell).is_err() {
            match end.get() {
                Some(taken) => end = &taken.next,
                None => break,
            }
        }
        &cell.thing
    }
}

/// All that have no parent.
pub(super) static ROOTS: Shells<Node> = Shells::new();

impl Node {
    /// A live node with one handle and nothing in it.
    pub(super) fn claim(
        parent: Option<&'static Node>,
        name: &'static str,
        limit: u64,
    ) -> &'static Node {
        // What belongs to one model must not be met in the next one.
        let fresh = Shells::new();
        let list = match parent {
            Some(parent) => &parent.children,
            None if cfg!(loom) => &fresh,
            None => &ROOTS,
        };
        let idle =
            |node: &Node| node.state.compare_exchange(IDLE, BETWEEN, AcqRel, Relaxed).is_ok();
        let node = list.claim(idle, || Node::new(parent));
        if let Some(parent) = parent {
            parent.handles.fetch_add(1, Relaxed);
        }
        *lock(&node.name) = name;
        node.priority.store(parent.map_or(0, |parent| parent.priority.load(Relaxed)), Relaxed);
        node.handles.fetch_add(1, Relaxed);
        let inside = node.tree.lock.enter();
        node.limit.store(limit, Relaxed);
        node.peak.store(0, Relaxed);
        node.refresh();
        node.state.store(LIVE, Release);
        drop(inside);
        node
    }

    fn new(parent: Option<&'static Node>) -> Self {
        let above = parent.map_or_else(Vec::new, |parent| {
            std::iter::once(parent).chain(parent.above.iter().copied()).collect()
        });
        let tree = match parent {
            Some(parent) => parent.tree,
            None => Box::leak(Box::new(Tree {
                lock: Lock::new(),
                line: Line::new(),
                over: AtomicUsize::new(0),
                leases: AtomicUsize::new(0),
            })),
        };
        Self {
            used: AtomicU64::new(0),
            easy: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            brim: AtomicU64::new(ASK),
            over: AtomicBool::new(false),
            tree,
            above: above.leak(),
            handles: AtomicUsize::new(0),
            limit: AtomicU64::new(0),
            extra: AtomicU64::new(0),
            guarantee: AtomicU64::new(0),
            promised: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            stranded: AtomicU64::new(0),
            priority: AtomicI64::new(0),
            line: AtomicI64::new(NOBODY),
            level: AtomicU8::new(0),
            told: AtomicU8::new(0),
            telling: AtomicU8::new(0),
            thresholds: Thresholds::none(),
            level_hooks: Hooks::new(),
            reclaimers: Hooks::new(),
            state: AtomicU8::new(BETWEEN),
            name: Mutex::new(""),
            children: Shells::new(),
            leases: Shells::new(),
        }
    }

    pub(super) fn name(&self) -> &'static str {
        *lock(&self.name)
    }

    /// One more who knows this node, by one who does.
    pub(super) fn know(&'static self) -> Budget {
        self.handles.fetch_add(1, Relaxed);
        Budget { node: self }
    }

    /// A budget of this node if it is live: for whoever meets it in a list.
    pub(super) fn meet(&'static self) -> Option<Budget> {
        let _inside = self.tree.lock.enter();
        (self.state.load(Acquire) == LIVE).then(|| self.know())
    }

    /// One less who knows this node.
    pub(super) fn forget(&'static self) {
        // Release and acquire: what others did with it comes before whatever the last one does.
        if self.handles.fetch_sub(1, AcqRel) == 1 {
            self.leave_if_unknown();
        }
    }

    /// Goes idle if nobody knows this node and nothing is charged to it. To be called after the
    /// last handle went and after the last byte did, whichever is later.
    #[cold]
    pub(super) fn leave_if_unknown(&'static self) {
        {
            let _inside = self.tree.lock.enter();
            let unknown = self.handles.load(Acquire) == 0 && self.used.load(Relaxed) == 0;
            if !unknown || self.state.load(Relaxed) != LIVE {
                return;
            }
            self.state.store(BETWEEN, Relaxed);
            // Never above what it was, so never refused.
            let _ = self.guarantee(0);
            self.clear_levels();
            self.stranded.store(0, Relaxed);
        }
        self.level_hooks.clear();
        self.reclaimers.clear();
        // Others may wait for what it was guaranteed.
        self.tree.line.look();
        self.state.store(IDLE, Release);
        if let Some(parent) = self.above.first() {
            parent.forget();
        }
    }

    /// This node and all below it, with idle ones among them.
    pub(super) fn walk(&'static self, visit: &mut dyn FnMut(&'static Node)) {
        visit(self);
        for child in self.children.iter() {
            child.walk(visit);
        }
    }

    /// The live children.
    pub(super) fn children(&self) -> impl Iterator<Item = Budget> {
        self.children.iter().filter_map(Node::meet)
    }

    /// Whether this node is `other`, or below it.
    pub(super) fn is_below(&'static self, other: &'static Node) -> bool {
        self.path().any(|node| std::ptr::eq(node, other))
    }
}
