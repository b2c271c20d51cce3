//! The use records of one block.
//!
//! - Nodes are leaked once and recycled. A block takes a node at its first use by another stream,
//!   and returns it when the block is freed and all uses have ended. So recording a use allocates
//!   nothing once there are as many nodes as blocks in use.
//! - A [`Use`](super::Use) needs no reference count to find its record: it stores a plain `&'static
//!   Node`.
//! - While a use is open, its node serves no other block, even if its own block is freed.
//! - Memory that a block's holder sub-allocated comes back with its uses. Open uses must find their
//!   records where they were created, so such a node is *joined* to the block's node instead of
//!   merged into it.

use super::{Held, Noted};
use crate::{
    Spin, Timeline,
    sync::atomic::{AtomicU64, Ordering},
};
use aquifer_core::{MemoryError, Tag};
use aquifer_driver::Access;
use smallvec::SmallVec;
use std::{
    fmt, mem,
    sync::{Arc, Mutex, PoisonError},
};

/// Most blocks are used by at most two other streams. More elements go to the heap.
pub(super) type Few<T> = SmallVec<[T; 2]>;

/// When the work of a use ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stamp {
    /// The use is still open.
    Open,
    /// It ends with a borrow, whose end cannot be observed here.
    Lent,
    /// In this epoch of its stream.
    At(u64),
}

/// Whether borrows that conflict with a new use have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Borrows {
    /// They have ended.
    Over,
    /// They may be live: they are of other parts of the block.
    Beside,
}

impl Borrows {
    pub(crate) fn over_if(over: bool) -> Self {
        if over { Self::Over } else { Self::Beside }
    }
}

/// The record of one stream's use of the block. Filled field by field and emptied by taking the
/// stream out, never moved: copying a struct just after partial writes stalls on store forwarding.
#[derive(Clone)]
struct Note {
    /// `None` if the record is free.
    on: Option<Arc<Timeline>>,
    stamp: Stamp,
    /// The id of the record in its node, used to finish the use.
    id: u64,
    access: Access,
    /// Whether it is on the block's owner stream, which is in order with itself. `false` once the
    /// block is freed.
    at_home: bool,
}

impl Note {
    const FREE: Self =
        Self { on: None, stamp: Stamp::Open, id: 0, access: Access::Read, at_home: false };

    fn is_open(&self) -> bool {
        self.on.is_some() && self.stamp == Stamp::Open
    }

    /// Returns whether all work of the use is known to be complete. Makes no driver call.
    fn is_done(&self) -> bool {
        match (&self.on, self.stamp) {
            (Some(on), Stamp::At(epoch)) => on.is_done(epoch),
            _ => false,
        }
    }

    fn is(&self, on: &Arc<Timeline>, access: Access) -> bool {
        self.is_on(on) && self.access == access
    }

    fn is_on(&self, on: &Arc<Timeline>) -> bool {
        self.on.as_ref().is_some_and(|other| Arc::ptr_eq(other, on))
    }

    /// Returns its current state, or `None` if the record is free.
    fn noted(&self) -> Option<Noted> {
        let epoch = if let Stamp::At(epoch) = self.stamp { Some(epoch) } else { None };
        self.on.clone().map(|on| Noted { on, access: self.access, epoch, later: None })
    }

    /// Returns its stream and epoch if it is stamped.
    fn stamped(&self) -> Option<(&Arc<Timeline>, u64)> {
        match (&self.on, self.stamp) {
            (Some(on), Stamp::At(epoch)) => Some((on, epoch)),
            _ => None,
        }
    }
}

/// A callback for the end of the last open use of a freed block.
///
/// ```
/// use aquifer_stream::LastUse;
/// struct Pool;
/// impl LastUse for Pool {
///     fn ended(&self) { /* look again at the blocks that were held back */ }
/// }
/// ```
pub trait LastUse: Send + Sync {
    /// Called by the thread that ended the last open use. May block.
    fn ended(&self);
}

#[derive(Default)]
struct State {
    notes: Few<Note>,
    next_id: u64,
    watcher: Option<Arc<dyn LastUse>>,
    /// Nodes of uses that came back with sub-allocated memory. No thread that holds their locks
    /// acquires this one.
    joined: Vec<Held>,
    /// Where to store the epochs in which open uses end, by record id.
    followed: Vec<(u64, Arc<AtomicU64>)>,
    /// Only the holders of open uses still refer to the node.
    left: bool,
    /// The tag of the parked memory that contains the block. No use may begin while it is set.
    parked: Option<Tag>,
}

/// Why a use may not begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Denied {
    /// A conflicting use is open.
    Busy,
    /// The block's memory is parked.
    Parked(Tag),
}

impl Denied {
    /// Converts to an error for the block at `address`.
    pub(super) fn at(self, address: u64) -> MemoryError {
        match self {
            Self::Busy => MemoryError::Busy { address },
            Self::Parked(tag) => MemoryError::Parked { tag },
        }
    }
}

/// Stored instead of an epoch when a use was aborted. 0 stands for an open use.
pub(super) const CALLED_OFF: u64 = u64::MAX;

/// The use records of a block.
#[derive(Default)]
pub(super) struct Node {
    state: Spin<State>,
}

/// Nodes of streams that no longer exist.
static SPARE: Mutex<Vec<&'static Node>> = Mutex::new(Vec::new());

impl Node {
    /// Returns an unused node.
    #[cold]
    pub(super) fn another() -> &'static Self {
        // Loom locks belong to one model run, so no node passes from one run to the next.
        let old = if cfg!(loom) {
            None
        } else {
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop()
        };
        old.unwrap_or_else(|| Box::leak(Box::default()))
    }

    /// Takes in the nodes of a stream that no longer exists, or a node whose stream is unknown.
    #[cold]
    pub(super) fn spare(nodes: impl IntoIterator<Item = &'static Self>) {
        if !cfg!(loom) {
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).extend(nodes);
        }
    }

    /// Records a use if it may begin. Returns the id of the record if one is needed. Adds to
    /// `before` the conflicting uses that must be waited for: stamped uses, and unless borrows have
    /// ended, the work queued so far for them.
    pub(super) fn enter(
        &self,
        at_home: bool,
        on: &Arc<Timeline>,
        access: Access,
        stamp: Stamp,
        borrows: Borrows,
        before: &mut Few<(Arc<Timeline>, u64)>,
    ) -> Result<Option<u64>, Denied> {
        // Streams are dropped after the lock is released: this may be the last reference to another
        // library's stream.
        let mut over = Few::new();
        self.state.with(|s| {
            s.admit()?;
            if !s.precede(on, access, borrows, &mut over, before) {
                return Err(Denied::Busy);
            }
            s.take_out(&mut over, Note::is_done);
            // Borrows by the owner stream need no record: the block returns to that stream. Two
            // borrows by one stream share the record, which is stamped later and covers both.
            let lent = |note: &Note| note.stamp == Stamp::Lent && note.is(on, access);
            let covered = stamp == Stamp::Lent && (at_home || s.notes.iter().any(lent));
            Ok((!covered).then(|| s.note(on, access, stamp, at_home)))
        })
    }

    /// Records a use whose work ends in `epoch`.
    pub(super) fn record(
        &self,
        on: &Arc<Timeline>,
        access: Access,
        epoch: u64,
    ) -> Result<(), Denied> {
        self.state.with(|s| {
            s.admit()?;
            if !s.raise(on, access, epoch) {
                s.note(on, access, Stamp::At(epoch), false);
            }
            Ok(())
        })
    }

    /// Checks whether a use may begin, without recording one.
    pub(super) fn admits(&self) -> Result<(), Denied> {
        self.state.with(|s| s.admit())
    }

    /// Refuses every use from now on, unless one is open. Returns the work that may be queued or
    /// running, including that of borrows.
    pub(super) fn park(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>, Denied> {
        self.state.with(|s| {
            s.admit()?;
            let mut work = Vec::new();
            s.work(&mut work)?;
            s.parked = Some(tag);
            Ok(work)
        })
    }

    /// Returns the work that may be queued or running, including that of borrows, unless a use is
    /// open.
    pub(super) fn work(&self) -> Result<Vec<(Arc<Timeline>, u64)>, Denied> {
        let mut work = Vec::new();
        self.state.with(|s| s.work(&mut work)).map(|()| work)
    }

    /// Allows uses again.
    pub(super) fn resume(&self) {
        self.state.with(|s| s.parked = None);
    }

    /// Ends an open use on `on` in `epoch`. `None` aborts it.
    pub(super) fn end(&'static self, id: u64, on: &Arc<Timeline>, epoch: Option<u64>) {
        let mut over = Few::new();
        let (watcher, spare) = self.state.with(|s| {
            let Some(at) = s.notes.iter().position(|note| note.id == id && note.is_open()) else {
                return (None, false);
            };
            let (at_home, access) = (s.notes[at].at_home, s.notes[at].access);
            match epoch {
                // Only stamped records are raised, so this open one would not be the record found.
                Some(epoch) if !at_home && !s.raise(on, access, epoch) => {
                    s.notes[at].stamp = Stamp::At(epoch);
                }
                // Covered by another record, or aborted, or on the owner stream, for which every
                // later user waits anyway.
                _ => over.extend(s.notes[at].on.take()),
            }
            s.tell_followers(id, epoch);
            if !(s.watcher.is_some() || s.left) || s.any_open() {
                return (None, false);
            }
            let spare = mem::take(&mut s.left);
            if spare {
                s.take_out(&mut over, |_| true);
            }
            (s.watcher.take(), spare)
        });
        drop(over);
        if spare {
            Self::spare([self]);
        }
        if let Some(watcher) = watcher {
            watcher.ended();
        }
    }

    /// Withdraws a use that could not be ordered.
    pub(super) fn withdraw(&self, id: u64) {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, |note| note.id == id);
            s.tell_followers(id, None);
        });
    }

    /// Forgets uses that the owner stream has been made to wait for, unless their epoch has been
    /// raised since.
    pub(super) fn forget(&self, waited: &[(Arc<Timeline>, u64)]) {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, |note| {
                waited.iter().any(|(on, epoch)| note.is_on(on) && note.stamp == Stamp::At(*epoch))
            });
        });
    }

    /// Called when the block is freed. All borrows have ended, and uses that are complete or in
    /// order with the owner stream are forgotten. Returns whether any use is left. Adds to
    /// `stamped` the epochs that must be fenced immediately, and moves the joined nodes to
    /// `joined`.
    pub(super) fn freed(
        &self,
        stamped: &mut Few<(Arc<Timeline>, u64)>,
        joined: &mut Vec<Held>,
    ) -> bool {
        let mut over = Few::new();
        self.state.with(|s| {
            s.end_borrows(&mut over, |_| true);
            s.take_out(&mut over, |note| {
                note.is_done() || note.at_home && note.stamp != Stamp::Open
            });
            for (on, epoch) in s.notes.iter().filter_map(Note::stamped) {
                if on.fences_at_once() {
                    stamped.push((on.clone(), epoch));
                }
            }
            joined.append(&mut s.joined);
            s.leave_home();
            !s.is_empty()
        })
    }

    /// Called when the block that this node was joined to is freed.
    pub(super) fn leave_home(&self) {
        self.state.with(State::leave_home);
    }

    /// Forgets complete uses. Returns whether any use is left.
    pub(super) fn forget_done(&self) -> bool {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, Note::is_done);
            !s.is_empty()
        })
    }

    /// Forgets everything that is not open. Returns whether nothing is left, so that the node may
    /// serve another block. Otherwise the holder of the last open use recycles the node.
    pub(super) fn clear(&self) -> bool {
        let mut over = Few::new();
        let (empty, _watcher, _joined) = self.state.with(|s| {
            s.take_out(&mut over, |note| note.stamp != Stamp::Open);
            let (empty, joined) = (s.is_empty(), mem::take(&mut s.joined));
            s.left = !empty;
            (empty, if empty { s.watcher.take() } else { None }, joined)
        });
        empty
    }

    /// Releases the node of a block that is no longer tracked.
    #[cold]
    pub(super) fn let_go(&'static self) {
        if self.clear() {
            Self::spare([self]);
        }
    }

    /// Joins nodes of the same memory to this one.
    pub(super) fn join(&self, others: impl Iterator<Item = Held>) {
        for other in others {
            self.state.with(|s| s.joined.push(other));
        }
    }

    /// Makes `home` the owner stream of the block.
    pub(super) fn move_to(&self, home: &Arc<Timeline>) {
        self.state.with(|s| {
            for note in &mut s.notes {
                note.at_home = note.is_on(home);
            }
        });
    }

    /// Returns whether a use is open.
    pub(super) fn is_open(&self) -> bool {
        self.state.with(|s| s.any_open())
    }

    /// Returns the stamped uses, with their epochs.
    pub(super) fn stamped(&self) -> Few<(Arc<Timeline>, u64)> {
        let stamped = |note: &Note| note.stamped().map(|(on, epoch)| (on.clone(), epoch));
        self.state.with(|s| s.notes.iter().filter_map(stamped).collect())
    }

    /// Returns all uses in their current state.
    pub(super) fn noted(&self) -> Few<Noted> {
        self.state.with(|s| s.notes.iter().filter_map(Note::noted).collect())
    }

    /// Returns all uses in their current state. Those that are open are updated when they end.
    pub(super) fn follow(&self) -> Vec<Noted> {
        self.state.with(|s| {
            let mut all = Vec::with_capacity(s.notes.len());
            for note in &s.notes {
                let Some(mut noted) = note.noted() else { continue };
                if note.is_open() {
                    let known = s.followed.iter().find(|(id, _)| *id == note.id);
                    let end = known.map_or_else(Arc::default, |(_, end)| end.clone());
                    if known.is_none() {
                        s.followed.push((note.id, end.clone()));
                    }
                    noted.later = Some(end);
                }
                all.push(noted);
            }
            all
        })
    }

    /// Calls `watcher` when no use is open any more, unless none is open now. Returns whether one
    /// is open.
    pub(super) fn watch(&self, watcher: &Arc<dyn LastUse>) -> bool {
        let replaced =
            self.state.with(|s| s.any_open().then(|| s.watcher.replace(watcher.clone())));
        replaced.is_some()
    }
}

impl State {
    fn admit(&self) -> Result<(), Denied> {
        self.parked.map_or(Ok(()), |tag| Err(Denied::Parked(tag)))
    }

    /// Adds the work that may be queued or running, unless a use is open. For a borrow, this is all
    /// work that its stream has queued so far.
    fn work(&self, all: &mut Vec<(Arc<Timeline>, u64)>) -> Result<(), Denied> {
        for note in &self.notes {
            let Some(on) = &note.on else { continue };
            match note.stamp {
                Stamp::Open => return Err(Denied::Busy),
                Stamp::Lent => all.push((on.clone(), on.open())),
                Stamp::At(epoch) => all.push((on.clone(), epoch)),
            }
        }
        let mut joined = self.joined.iter().filter_map(Held::node);
        joined.try_for_each(|node| node.state.with(|s| s.work(all)))
    }

    /// Adds to `before` the uses that must come before a use on `on`. Returns whether that use may
    /// begin.
    fn precede(
        &mut self,
        on: &Arc<Timeline>,
        access: Access,
        borrows: Borrows,
        over: &mut Few<Arc<Timeline>>,
        before: &mut Few<(Arc<Timeline>, u64)>,
    ) -> bool {
        if self.notes.iter().any(|note| note.is_open() && note.access.conflicts(access)) {
            return false;
        }
        if borrows == Borrows::Over {
            self.end_borrows(over, |note| note.access.conflicts(access));
        }
        for note in self.notes.iter().filter(|note| note.access.conflicts(access)) {
            let Some(other) = note.on.as_ref().filter(|other| !Arc::ptr_eq(other, on)) else {
                continue;
            };
            match note.stamp {
                Stamp::At(epoch) => before.push((other.clone(), epoch)),
                Stamp::Lent => before.push((other.clone(), other.open())),
                Stamp::Open => {}
            }
        }
        self.joined.iter().all(|held| {
            held.node().is_none_or(|node| {
                node.state.with(|s| s.precede(on, access, borrows, over, before))
            })
        })
    }

    /// Publishes the end of a use to those that follow it.
    #[inline]
    fn tell_followers(&mut self, id: u64, epoch: Option<u64>) {
        if !self.followed.is_empty() {
            let ended = epoch.unwrap_or(CALLED_OFF);
            for (_, end) in self.followed.extract_if(.., |(followed, _)| *followed == id) {
                end.store(ended, Ordering::Release);
            }
        }
    }

    fn any_open(&self) -> bool {
        self.notes.iter().any(Note::is_open)
    }

    fn is_empty(&self) -> bool {
        self.notes.iter().all(|note| note.on.is_none())
    }

    fn note(&mut self, on: &Arc<Timeline>, access: Access, stamp: Stamp, at_home: bool) -> u64 {
        let id = self.next_id;
        self.next_id = id + 1;
        let at = self.notes.iter().position(|note| note.on.is_none()).unwrap_or_else(|| {
            self.notes.push(Note::FREE);
            self.notes.len() - 1
        });
        let note = &mut self.notes[at];
        note.id = id;
        note.access = access;
        note.stamp = stamp;
        note.at_home = at_home;
        note.on = Some(on.clone());
        id
    }

    /// Raises a stamped record of the same stream and access to cover `epoch` too. One record is
    /// enough, because the later epoch covers the earlier. Returns whether such a record exists.
    fn raise(&mut self, on: &Arc<Timeline>, access: Access, epoch: u64) -> bool {
        for note in &mut self.notes {
            if let Stamp::At(earlier) = note.stamp
                && note.is(on, access)
            {
                note.stamp = Stamp::At(epoch.max(earlier));
                return true;
            }
        }
        false
    }

    /// Stamps the records of ended borrows that `which` selects.
    fn end_borrows(&mut self, over: &mut Few<Arc<Timeline>>, which: impl Fn(&Note) -> bool) {
        for at in 0..self.notes.len() {
            let note = &self.notes[at];
            if note.stamp != Stamp::Lent || !which(note) {
                continue;
            }
            let Some(on) = note.on.clone() else { continue };
            let (epoch, access) = (on.open(), note.access);
            if self.raise(&on, access, epoch) {
                over.extend(self.notes[at].on.take());
            } else {
                self.notes[at].stamp = Stamp::At(epoch);
            }
            over.push(on);
        }
    }

    /// Called when the block is freed. An open use on the owner stream continues after the free,
    /// and must be stamped like any other: the epoch of the free does not cover work that is queued
    /// later.
    fn leave_home(&mut self) {
        self.notes.iter_mut().for_each(|note| note.at_home = false);
    }

    fn take_out(&mut self, over: &mut Few<Arc<Timeline>>, which: impl Fn(&Note) -> bool) {
        for note in &mut self.notes {
            if note.on.is_some() && which(note) {
                over.extend(note.on.take());
            }
        }
    }
}

/// The idle nodes of a stream, for its blocks.
#[derive(Default)]
pub(crate) struct Nodes {
    idle: Spin<Vec<&'static Node>>,
}

impl Nodes {
    pub(super) fn take(&self) -> &'static Node {
        self.idle.with(Vec::pop).unwrap_or_else(Node::another)
    }

    /// Returns a node that is empty and has no other references.
    pub(super) fn give(&self, node: &'static Node) {
        if !cfg!(loom) {
            self.idle.with(|idle| idle.push(node));
        }
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        let idle = mem::take(self.idle.get_mut());
        if !idle.is_empty() {
            Node::spare(idle);
        }
    }
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Nodes(..)")
    }
}
