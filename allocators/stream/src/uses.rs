//! The uses of a block by streams other than its owner stream.
//!
//! A block belongs to the stream that it was allocated for, and that stream's own work needs no
//! record. The use by any other stream is recorded here. When the block is freed, these records
//! decide when it may be allocated again.
//!
//! A use is *open* while its work may still be queued. It is then *stamped* with an epoch of its
//! stream:
//!
//! - [`UseList::prepare`] opens a use and returns a [`Use`]. Its holder queues the work and then
//!   finishes the use. An open write excludes every other `prepare`: a conflict returns
//!   [`Busy`](aquifer_core::MemoryError::Busy).
//! - [`UseList::lend`] records a use that ends with a Rust borrow, whose end cannot be observed
//!   here. It is stamped when the block is freed or used in conflict. The borrow checker forbids
//!   both while the borrow lives.
//! - [`UseList::record`] records a use whose work is already queued.
//!
//! Further properties:
//!
//! - One record covers all uses by one stream with one kind of access, because a later epoch covers
//!   the earlier ones.
//! - A use is forgotten once the owner stream has been made to wait for it: later users wait for
//!   the owner stream.
//! - [`UseList::lend_beside`] allows conflicting borrows of one block if they are of different
//!   parts.
#![expect(unsafe_code, reason = "follows a pointer to what is never freed")]

pub(crate) mod node;
mod watch;

pub use watch::Watch;

use crate::{
    Timeline,
    sync::atomic::{AtomicPtr, AtomicU64, Ordering},
};
use aquifer_core::Result;
use aquifer_driver::Access;
use node::{Borrows, CALLED_OFF, Few, LastUse, Node, Stamp};
use std::{fmt, ptr, sync::Arc};

/// A use that was not known to be complete when its block, or a part of it, was freed. A snapshot,
/// or its current state if it is [followed](Uses::follow).
///
/// See [`UseList`] for an example.
#[derive(Clone)]
pub struct Noted {
    on: Arc<Timeline>,
    access: Access,
    /// `None` if it was open.
    epoch: Option<u64>,
    /// Receives the epoch in which the use ends. 0 while it is open.
    later: Option<Arc<AtomicU64>>,
}

impl Noted {
    /// Returns the stream of the use.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }

    /// Returns whether the use is still open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.epoch().is_none()
    }

    /// Returns the epoch of its stream that covers the use. `None` while it is open, 0 if it was
    /// aborted.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.epoch.or_else(|| match self.later.as_ref()?.load(Ordering::Acquire) {
            0 => None,
            CALLED_OFF => Some(0),
            epoch => Some(epoch),
        })
    }

    /// Returns whether all work of the use is known to be complete. Makes no driver call.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.epoch().is_some_and(|epoch| self.on.is_done(epoch))
    }
}

impl fmt::Debug for Noted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noted")
            .field("stream", &self.on.number())
            .field("access", &self.access)
            .field("epoch", &self.epoch())
            .finish()
    }
}

/// A use that was prepared and is not finished. While it is held, the block's memory is not reused,
/// even if the block is freed.
///
/// Dropping it finishes it, which is correct whether or not the work was queued. Forgetting it
/// leaks the block's memory. Ending the last use of a freed block makes no driver call and never
/// blocks, with one exception. If the block's pool is closed, or the block came from the driver's
/// own allocators, nothing else would collect the block. Ending the use then returns the block, and
/// may block until the work that used it is complete.
///
/// See [`UseList`] for an example.
#[must_use = "a use that is dropped at once covers no work"]
pub struct Use {
    node: &'static Node,
    id: u64,
    on: Arc<Timeline>,
    ended: bool,
}

impl Use {
    /// Ends the use: all of its work is queued.
    ///
    /// # Errors
    /// Driver errors, if the stream has to be fenced immediately. The use ends even then.
    pub fn finish(mut self) -> Result<()> {
        let epoch = self.on.open();
        self.end_in(epoch)
    }

    /// Ends the use in `epoch`, unless it has ended, and fences the stream if that cannot be done
    /// later.
    pub(crate) fn end_in(&mut self, epoch: u64) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        // The event must be recorded first: the callback for the last use looks for it.
        let fenced = self.on.fence_at_once(epoch);
        self.node.end(self.id, &self.on, Some(epoch));
        fenced
    }

    /// Ends the use without covering any work: none was queued.
    pub fn abort(mut self) {
        self.ended = true;
        self.node.end(self.id, &self.on, None);
    }

    /// Returns the stream of the use.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if !self.ended {
            // After an error nothing proves the use, so the block is held back until the stream is
            // retired.
            let _ = self.end_in(self.on.open());
        }
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Use").field("stream", &self.on.number()).finish_non_exhaustive()
    }
}

/// The uses of one live block by streams other than its owner stream. As large as a pointer.
/// Allocates no record before the first use.
#[derive(Default)]
pub struct UseList {
    /// Null, or a node that only this list records in. Nodes are never freed.
    node: AtomicPtr<Node>,
}

/// A use that is recorded but may not be ordered yet.
pub(crate) struct Entered {
    node: &'static Node,
    /// The id of the record, or `None` for a borrow that needs none.
    id: Option<u64>,
}

/// Conflicting uses that must complete before a new one.
pub(crate) type Before = Few<(Arc<Timeline>, u64)>;

impl Entered {
    /// Makes `on` wait for `home` and for the uses in `before`. Withdraws the record if that fails.
    pub(crate) fn order(
        &self,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        before: &Before,
    ) -> Result<()> {
        let at_home = Arc::ptr_eq(home, on);
        let ordered = (|| {
            if !at_home {
                on.wait_for(home, home.open())?;
            }
            before.iter().try_for_each(|(other, epoch)| on.wait_for(other, *epoch).map(drop))
        })();
        match ordered {
            Ok(()) if at_home => self.forget(before),
            Ok(()) => {}
            Err(_) => self.withdraw(),
        }
        ordered
    }

    /// Forgets the uses that the owner stream, whose use this is, has been made to wait for.
    pub(crate) fn forget(&self, before: &Before) {
        if !before.is_empty() {
            self.node.forget(before);
        }
    }

    /// Withdraws the record.
    pub(crate) fn withdraw(&self) {
        if let Some(id) = self.id {
            self.node.withdraw(id);
        }
    }

    /// Converts into the guard of an open use.
    pub(crate) fn into_use(self, on: &Arc<Timeline>) -> Use {
        // Only borrows have no record.
        Use {
            node: self.node,
            id: self.id.unwrap_or_default(),
            on: on.clone(),
            ended: self.id.is_none(),
        }
    }
}

impl UseList {
    /// Creates an empty list.
    #[must_use]
    pub fn new() -> Self {
        Self { node: AtomicPtr::new(ptr::null_mut()) }
    }

    #[inline]
    fn node(&self) -> Option<&'static Node> {
        // SAFETY: 1. null, or created from a `&'static Node`.
        unsafe { self.node.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the node. The first use takes it from the nodes of the owner stream.
    #[inline]
    fn node_or_new(&self, home: &Timeline) -> &'static Node {
        match self.node() {
            Some(node) => node,
            None => self.first_node(home),
        }
    }

    fn first_node(&self, home: &Timeline) -> &'static Node {
        let new = home.nodes().take();
        let at = ptr::from_ref(new).cast_mut();
        match self.node.compare_exchange(ptr::null_mut(), at, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => new,
            Err(other) => {
                // Another thread was faster.
                home.nodes().give(new);
                // SAFETY: 1. not null, so it was created from a `&'static Node`.
                unsafe { &*other }
            }
        }
    }

    /// Makes `on` wait for what must come before `access`, and opens a use. Never blocks.
    ///
    /// # Errors
    /// [`Busy`](aquifer_core::MemoryError::Busy) with `address` if a conflicting use is open,
    /// [`Parked`](aquifer_core::MemoryError::Parked) if no memory is mapped behind the block's
    /// addresses, and driver errors. Nothing is recorded then.
    pub fn prepare(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<Use> {
        let mut before = Before::new();
        // Holding `&self` proves that no mutable borrow is live. A declared write proves nothing,
        // so shared borrows may continue.
        let borrows = Borrows::over_if(!access.writes());
        let entered = self.enter(address, home, on, access, borrows, &mut before)?;
        entered.order(home, on, &before)?;
        Ok(entered.into_use(on))
    }

    /// Opens a use that must still be ordered after the uses added to `before`. The use is recorded
    /// before it is ordered, so that only one of two conflicting uses succeeds.
    ///
    /// # Errors
    /// `Busy` or `Parked`. Nothing is recorded then.
    #[inline]
    pub(crate) fn enter(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
        borrows: Borrows,
        before: &mut Before,
    ) -> Result<Entered> {
        let node = self.node_or_new(home);
        let id = node.enter(Arc::ptr_eq(home, on), on, access, Stamp::Open, borrows, before);
        Ok(Entered { node, id: id.map_err(|denied| denied.at(address))? })
    }

    /// Makes `on` wait for what must come before `access`, and records a use that ends with a
    /// borrow. Never blocks.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<()> {
        self.lend_as(address, home, on, access, Borrows::Over)
    }

    /// Like [`UseList::lend`], but conflicting borrows may still be live, because they are of other
    /// parts of the block. `on` waits for their work queued so far, and they remain usable.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend_beside(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<()> {
        self.lend_as(address, home, on, access, Borrows::Beside)
    }

    fn lend_as(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
        borrows: Borrows,
    ) -> Result<()> {
        if Arc::ptr_eq(home, on) && self.node().is_none() {
            // The owner stream is in order with itself, and no recorded use could conflict.
            return Ok(());
        }
        let (node, mut before) = (self.node_or_new(home), Before::new());
        let id = node.enter(Arc::ptr_eq(home, on), on, access, Stamp::Lent, borrows, &mut before);
        Entered { node, id: id.map_err(|denied| denied.at(address))? }.order(home, on, &before)
    }

    /// Records a use whose work is queued on `on`, in order with what came before it.
    ///
    /// # Errors
    /// [`Parked`](aquifer_core::MemoryError::Parked) if no memory is mapped behind the block's
    /// addresses. Nothing is recorded then. Driver errors if the stream has to be fenced
    /// immediately. The use is recorded even then.
    pub fn record(&self, home: &Arc<Timeline>, on: &Arc<Timeline>, access: Access) -> Result<()> {
        // Only parked memory refuses a record, and that error contains no address.
        let denied = |denied: node::Denied| denied.at(0);
        if Arc::ptr_eq(home, on) {
            return self.node().map_or(Ok(()), Node::admits).map_err(denied);
        }
        let epoch = on.open();
        self.node_or_new(home).record(on, access, epoch).map_err(denied)?;
        on.fence_at_once(epoch)
    }

    /// Returns whether the block never had a use that had to be recorded.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        // Relaxed: `&mut self` proves that every access by another thread came before.
        self.node.load(Ordering::Relaxed).is_null()
    }

    /// Takes the uses that are not known to be complete. Called when the block is freed, so all
    /// borrows have ended. Uses by the owner stream itself are included only while open, because
    /// that stream is in order with itself.
    #[must_use]
    pub fn take(&mut self, home: &Arc<Timeline>) -> Uses {
        let Some(node) = self.node() else { return Uses::default() };
        self.node.store(ptr::null_mut(), Ordering::Relaxed);
        let (mut at_once, mut joined) = (Few::new(), Vec::new());
        let left = node.freed(&mut at_once, &mut joined);
        for (on, epoch) in at_once {
            // After an error nothing proves the use, so the block is held back until the stream is
            // retired.
            let _ = on.fence_at_once(epoch);
        }
        let held = Held { node: Some(node), home: home.clone() };
        let mut uses = Uses { held: left.then_some(held), joined };
        if !uses.joined.is_empty() {
            uses.joined.iter().filter_map(Held::node).for_each(Node::leave_home);
            uses.forget_done();
        }
        uses
    }

    /// Returns the uses that [`UseList::take`] would return, without removing them. For a part of a
    /// block that is freed while the rest stays. All borrows have ended then too.
    #[must_use]
    pub fn current(&mut self, home: &Arc<Timeline>) -> Vec<Noted> {
        let uses = self.take(home);
        let current = uses.follow();
        self.take_over(home, uses);
        current
    }

    /// Adds uses that were recorded in another list and taken from it. For memory that the holder
    /// of this block had sub-allocated and that was returned while still in use. `home` is the
    /// owner stream of this block.
    pub fn take_over(&mut self, home: &Arc<Timeline>, uses: Uses) {
        let Uses { held, joined } = uses;
        let mut all = held.into_iter().chain(joined);
        let node = match self.node() {
            Some(node) => node,
            None => {
                let Some(node) = all.next().and_then(|mut first| first.node.take()) else { return };
                node.move_to(home);
                self.node.store(ptr::from_ref(node).cast_mut(), Ordering::Release);
                node
            }
        };
        node.join(all.inspect(|held| {
            if let Some(node) = held.node {
                node.move_to(home);
            }
        }));
    }
}

impl Drop for UseList {
    #[inline]
    fn drop(&mut self) {
        if let Some(node) = self.node() {
            node.let_go();
        }
    }
}

impl fmt::Debug for UseList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UseList").field(&self.node().map(Node::noted)).finish()
    }
}

/// The uses that hold back the memory of a freed block.
///
/// ```
/// use aquifer_core::DeviceId;
/// use aquifer_driver::{Access, sim::Sim};
/// use aquifer_stream::{StreamPool, UseList};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 2);
/// let (home, other) = (streams.lease()?, streams.lease()?);
/// let mut list = UseList::new();
/// list.record(home.timeline(), other.timeline(), Access::Read)?;
/// let mut uses = list.take(home.timeline()); // the block is freed
/// assert!(!uses.is_empty());
/// other.synchronize()?;
/// uses.forget_done();
/// assert!(uses.is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Default)]
pub struct Uses {
    held: Option<Held>,
    /// Uses that came back with sub-allocated memory.
    joined: Vec<Held>,
}

/// A node that returns to the owner stream's idle nodes when it has no records left. If a use is
/// still open, its holder returns the node.
pub(crate) struct Held {
    /// `None` once a list has taken the node.
    node: Option<&'static Node>,
    home: Arc<Timeline>,
}

impl Held {
    fn node(&self) -> Option<&'static Node> {
        self.node
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(node) = self.node
            && node.clear()
        {
            self.home.nodes().give(node);
        }
    }
}

impl Uses {
    fn nodes(&self) -> impl Iterator<Item = &'static Node> {
        self.held.iter().chain(&self.joined).filter_map(Held::node)
    }

    /// Returns whether no use is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_none() && self.joined.is_empty()
    }

    /// Forgets uses whose work is known to be complete. Makes no driver call.
    pub fn forget_done(&mut self) {
        let left = |held: &Held| held.node.is_some_and(Node::forget_done);
        if self.held.as_ref().is_some_and(|held| !left(held)) {
            self.held = None;
        }
        self.joined.retain(left);
    }

    /// Forgets all uses, because the owner stream has been made to wait for them. Open uses must
    /// not be forgotten: their block must not be reused.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns whether a use is still open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.nodes().any(Node::is_open)
    }

    /// Returns the streams and epochs of the uses that are not open. They are collected before the
    /// call returns, and no stream is released meanwhile. So it may be called while a lock is held.
    pub fn stamped(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> + use<> {
        let mut all = Before::new();
        self.nodes().for_each(|node| all.extend(node.stamped()));
        all.into_iter()
    }

    /// Returns the remaining uses in their current state.
    pub fn iter(&self) -> impl Iterator<Item = Noted> + use<> {
        let mut all = Few::new();
        self.nodes().for_each(|node| all.extend(node.noted()));
        all.into_iter()
    }

    /// Returns the remaining uses. Each of them continues to report its current state, even after
    /// this value is dropped. For memory that is released in several parts.
    #[must_use]
    pub fn follow(&self) -> Vec<Noted> {
        self.nodes().flat_map(Node::follow).collect()
    }

    /// Calls [`LastUse::ended`] when no use is open any more: once for the block's own uses, and
    /// once for each block that its memory was sub-allocated as. Returns whether a use is open. If
    /// none is open, it is not called.
    pub fn tell(&self, whom: &Arc<dyn LastUse>) -> bool {
        let mut open = false;
        self.nodes().for_each(|node| open |= node.watch(whom));
        open
    }
}

impl fmt::Debug for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}
