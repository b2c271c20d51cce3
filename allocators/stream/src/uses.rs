//! Who uses a block besides its home stream.
//!
//! A block lives on the stream it was allocated for, and needs no account of what that stream does
//! with it. Every other stream's use is noted here, and decides at the free when the block may be
//! given out again.
//!
//! A use is *open* while its work may still be queued, then *stamped* with an epoch of its stream:
//!
//! - [`UseList::prepare`] opens one and answers with a [`Use`]; whoever holds it queues the work
//!   and then finishes. A prepared write excludes every other prepare: a conflict is
//!   [`Busy`](aquifer_core::MemoryError::Busy).
//! - [`UseList::lend`] notes one whose end is the end of a borrow, which cannot be seen from here;
//!   it is stamped when the block is freed or used in conflict, both of which the borrow forbids
//!   while it lasts.
//! - [`UseList::record`] notes one whose work has been queued already.
//!
//! One note stands for all uses by one stream with one kind of access, since the later epoch covers
//! the earlier. What the block's own stream has been made to wait for is forgotten: whoever comes
//! next waits for that stream.
//!
//! A borrow may live on beside another of the same block that it conflicts with, where they are of
//! different parts: [`UseList::lend_beside`].
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

/// A use that was not known to be done when its block, or a part of it, was freed: as it stood when
/// it was asked for, or as it stands now if it is [followed](Uses::follow).
///
/// Its example is that of [`UseList`].
#[derive(Clone)]
pub struct Noted {
    on: Arc<Timeline>,
    access: Access,
    /// `None` if it was open.
    epoch: Option<u64>,
    /// The epoch in which it ended; 0 while it is open still.
    later: Option<Arc<AtomicU64>>,
}

impl Noted {
    /// The stream.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }

    /// Whether its holder has not finished it.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.epoch().is_none()
    }

    /// The epoch of its stream that covers it; `None` while it is open, 0 if it was called off.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        self.epoch.or_else(|| match self.later.as_ref()?.load(Ordering::Acquire) {
            0 => None,
            CALLED_OFF => Some(0),
            epoch => Some(epoch),
        })
    }

    /// Whether all of its work is known to be done. Makes no driver call.
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

/// A use that has been prepared and not finished. While it is held, the block's bytes stay the
/// block's, even if the block is freed.
///
/// Dropping it finishes it, which is right whether its work was queued or not; forgetting it keeps
/// the block's memory for good. Ending the last use of a block that has been freed is free of
/// driver calls and never blocks, except where nobody would look at the block again: if its pool
/// has been closed, or it came from the driver's own allocators. Then it takes the block home, and
/// may block until the work that used it is done.
///
/// Its example is that of [`UseList`].
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
    /// The driver's, if the stream has to be fenced at once; the use is ended all the same.
    pub fn finish(mut self) -> Result<()> {
        let epoch = self.on.open();
        self.end_in(epoch)
    }

    /// Ends the use in `epoch`, unless it has ended, and fences its stream where that cannot be
    /// done later.
    pub(crate) fn end_in(&mut self, epoch: u64) -> Result<()> {
        if std::mem::replace(&mut self.ended, true) {
            return Ok(());
        }
        // The event first: whoever is told that the last use has ended looks for it.
        let fenced = self.on.fence_at_once(epoch);
        self.node.end(self.id, &self.on, Some(epoch));
        fenced
    }

    /// Ends the use without any work of it having been queued.
    pub fn abort(mut self) {
        self.ended = true;
        self.node.end(self.id, &self.on, None);
    }

    /// The stream it is on.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.on
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        if !self.ended {
            // A refusal leaves the use without a proof, so the block is held back until the stream
            // is retired.
            let _ = self.end_in(self.on.open());
        }
    }
}

impl fmt::Debug for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Use").field("stream", &self.on.number()).finish_non_exhaustive()
    }
}

/// The uses of one live block by streams other than its home. As large as a pointer, and nothing
/// else until the first use.
#[derive(Default)]
pub struct UseList {
    /// Null, or a node that this list alone notes in. Nodes are never freed.
    node: AtomicPtr<Node>,
}

/// A use that has been noted and may not have been ordered yet.
pub(crate) struct Entered {
    node: &'static Node,
    /// The note; `None` for a borrow that needs none.
    id: Option<u64>,
}

/// Conflicting uses that a new one comes after.
pub(crate) type Before = Few<(Arc<Timeline>, u64)>;

impl Entered {
    /// Makes `on` wait for `home` and for what comes `before` the use; takes the note back if that
    /// fails.
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

    /// Forgets what the home stream, whose use this is, has been made to wait for.
    pub(crate) fn forget(&self, before: &Before) {
        if !before.is_empty() {
            self.node.forget(before);
        }
    }

    /// Takes the note back.
    pub(crate) fn withdraw(&self) {
        if let Some(id) = self.id {
            self.node.withdraw(id);
        }
    }

    /// The guard of an open use.
    pub(crate) fn into_use(self, on: &Arc<Timeline>) -> Use {
        // Only borrows go without a note.
        Use {
            node: self.node,
            id: self.id.unwrap_or_default(),
            on: on.clone(),
            ended: self.id.is_none(),
        }
    }
}

impl UseList {
    /// No uses.
    #[must_use]
    pub fn new() -> Self {
        Self { node: AtomicPtr::new(ptr::null_mut()) }
    }

    #[inline]
    fn node(&self) -> Option<&'static Node> {
        // SAFETY: 1. null, or made from a `&'static Node`.
        unsafe { self.node.load(Ordering::Acquire).as_ref() }
    }

    /// The node, taken from those of the home stream at the first use.
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
                // SAFETY: 1. not null, so made from a `&'static Node`.
                unsafe { &*other }
            }
        }
    }

    /// Makes `on` wait for what must come before `access`, and opens a use. Does not block.
    ///
    /// # Errors
    /// `Busy` with `address` if a use is open that this one conflicts with; `Parked` if nothing is
    /// behind the block's addresses; the driver's. Nothing is noted then.
    pub fn prepare(
        &self,
        address: u64,
        home: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<Use> {
        let mut before = Before::new();
        // Whoever may read the block knows that nobody has borrowed it to be written; whoever says
        // that he writes proves nothing by it, and readers may go on.
        let borrows = Borrows::over_if(!access.writes());
        let entered = self.enter(address, home, on, access, borrows, &mut before)?;
        entered.order(home, on, &before)?;
        Ok(entered.into_use(on))
    }

    /// Opens a use, which is still to be ordered after those added to `before`: first noted, so
    /// that of two that conflict only one can pass.
    ///
    /// # Errors
    /// `Busy`, `Parked`. Nothing is noted then.
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

    /// Makes `on` wait for what must come before `access`, and notes a use that ends with a borrow.
    /// Does not block.
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

    /// As [`UseList::lend`], where borrows that this one conflicts with need not be over: those of
    /// other parts of the block. What is queued for them by now is waited for, and they go on to be
    /// used.
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
            // In order with itself, and nothing has been noted that it could conflict with.
            return Ok(());
        }
        let (node, mut before) = (self.node_or_new(home), Before::new());
        let id = node.enter(Arc::ptr_eq(home, on), on, access, Stamp::Lent, borrows, &mut before);
        Entered { node, id: id.map_err(|denied| denied.at(address))? }.order(home, on, &before)
    }

    /// Notes a use whose work has been queued on `on`, in order with what came before it.
    ///
    /// # Errors
    /// [`Parked`](aquifer_core::MemoryError::Parked) if nothing is behind the block's addresses,
    /// and nothing is noted; the driver's, if the stream has to be fenced at once, and the use is
    /// noted all the same.
    pub fn record(&self, home: &Arc<Timeline>, on: &Arc<Timeline>, access: Access) -> Result<()> {
        // Only parked memory refuses it, and its error names no address.
        let denied = |denied: node::Denied| denied.at(0);
        if Arc::ptr_eq(home, on) {
            return self.node().map_or(Ok(()), Node::admits).map_err(denied);
        }
        let epoch = on.open();
        self.node_or_new(home).record(on, access, epoch).map_err(denied)?;
        on.fence_at_once(epoch)
    }

    /// Whether the block has had no use that had to be noted.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        // Relaxed: `&mut self` says that every other thread's use of the list came before.
        self.node.load(Ordering::Relaxed).is_null()
    }

    /// Takes the uses that are not known to be done, when the block is freed. All borrows are over
    /// then. Uses of the home stream itself are left out unless they are open: it is in order with
    /// itself.
    #[must_use]
    pub fn take(&mut self, home: &Arc<Timeline>) -> Uses {
        let Some(node) = self.node() else { return Uses::default() };
        self.node.store(ptr::null_mut(), Ordering::Relaxed);
        let (mut at_once, mut joined) = (Few::new(), Vec::new());
        let left = node.freed(&mut at_once, &mut joined);
        for (on, epoch) in at_once {
            // A refusal leaves the use without a proof, so the block is held back until the stream
            // is retired.
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

    /// The uses that are not known to be done, as [`UseList::take`] would answer with them; they
    /// stay noted. For a part of a block that is given back while the rest stays: all borrows are
    /// over then as well.
    #[must_use]
    pub fn current(&mut self, home: &Arc<Timeline>) -> Vec<Noted> {
        let uses = self.take(home);
        let current = uses.follow();
        self.take_over(home, uses);
        current
    }

    /// Takes over uses that were noted elsewhere and taken from there: of memory that this block's
    /// holder had lent on, and that comes back under them. `home` is this block's own stream.
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

/// The uses of a block that has been freed, which hold its memory back.
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
    /// Those that came back with memory that was lent on.
    joined: Vec<Held>,
}

/// A node that goes back to the home stream's when nothing is noted in it any more. If something is
/// open still, its holder will look for it, and sees to it.
pub(crate) struct Held {
    /// `None` once a list has it.
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

    /// Whether none is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.held.is_none() && self.joined.is_empty()
    }

    /// Forgets those whose work is known to be done. Makes no driver call.
    pub fn forget_done(&mut self) {
        let left = |held: &Held| held.node.is_some_and(Node::forget_done);
        if self.held.as_ref().is_some_and(|held| !left(held)) {
            self.held = None;
        }
        self.joined.retain(left);
    }

    /// Forgets all: the home stream has been made to wait for them. Those that are open are not to
    /// be forgotten: their block must not be given out.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Whether the holder of one has not finished it.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.nodes().any(Node::is_open)
    }

    /// The streams and epochs of those that are not open. To be collected: no stream is let go of
    /// in between, so this may be asked under a lock.
    pub fn stamped(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> + use<> {
        let mut all = Before::new();
        self.nodes().for_each(|node| all.extend(node.stamped()));
        all.into_iter()
    }

    /// Those that are left, as they stand now.
    pub fn iter(&self) -> impl Iterator<Item = Noted> + use<> {
        let mut all = Few::new();
        self.nodes().for_each(|node| all.extend(node.noted()));
        all.into_iter()
    }

    /// Those that are left, each of which goes on saying how it stands: for memory that goes in
    /// several parts, each when these are done. They say so even when this is gone.
    #[must_use]
    pub fn follow(&self) -> Vec<Noted> {
        self.nodes().flat_map(Node::follow).collect()
    }

    /// Has `whom` told when none is open any more: once for the block's own uses, and once for
    /// those of each block that it was lent on as. Answers whether one is open; if not, nobody is
    /// told.
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
