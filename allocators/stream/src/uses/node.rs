//! The account of one block's uses.
//!
//! A node is leaked once and goes round: a block gets one at its first use by another stream, and
//! gives it back when it has been freed and all uses are over. So noting a use makes no allocation
//! once there are as many nodes as blocks in use at once, and a [`Use`](super::Use) needs no
//! reference count to find its note: a plain `&'static` does. While a use is open its node goes to
//! no other block, whatever becomes of its own.
//!
//! Memory that a block's holder has lent on comes back with its uses. Open ones find their notes
//! where they were made, so such a node is not emptied into another: it is *joined* to it.

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

/// Most blocks are used by one or two streams besides their own; more go to the heap.
pub(super) type Few<T> = SmallVec<[T; 2]>;

/// When a use's work is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stamp {
    /// Its holder has not finished it.
    Open,
    /// It ends with a borrow, which cannot be seen from here.
    Lent,
    /// With this epoch of its stream.
    At(u64),
}

/// What becomes of borrows that a new use conflicts with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Borrows {
    /// They are over.
    Over,
    /// They may go on: they are of other parts of the block.
    Beside,
}

impl Borrows {
    pub(crate) fn over_if(over: bool) -> Self {
        if over { Self::Over } else { Self::Beside }
    }
}

/// Room for one stream's use of the block. Filled field by field and emptied by taking the stream
/// out, never moved: a struct that has just been written in parts and is copied whole waits for the
/// parts.
#[derive(Clone)]
struct Note {
    /// `None` in one that is free.
    on: Option<Arc<Timeline>>,
    stamp: Stamp,
    /// Its name in the node, for whoever will finish it.
    id: u64,
    access: Access,
    /// Whether it is on the block's own stream, which is in order with itself. Not once the block
    /// is freed.
    at_home: bool,
}

impl Note {
    const FREE: Self =
        Self { on: None, stamp: Stamp::Open, id: 0, access: Access::Read, at_home: false };

    fn is_open(&self) -> bool {
        self.on.is_some() && self.stamp == Stamp::Open
    }

    /// Whether all of its work is known to be done. Makes no driver call.
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

    /// How it stands now; `None` if it is free.
    fn noted(&self) -> Option<Noted> {
        let epoch = if let Stamp::At(epoch) = self.stamp { Some(epoch) } else { None };
        self.on.clone().map(|on| Noted { on, access: self.access, epoch, later: None })
    }

    /// Its stream and epoch, if it is stamped.
    fn stamped(&self) -> Option<(&Arc<Timeline>, u64)> {
        match (&self.on, self.stamp) {
            (Some(on), Stamp::At(epoch)) => Some((on, epoch)),
            _ => None,
        }
    }
}

/// Told when no use of a freed block is open any more.
///
/// ```
/// use aquifer_stream::LastUse;
/// struct Pool;
/// impl LastUse for Pool {
///     fn ended(&self) { /* look again at the blocks that were held back */ }
/// }
/// ```
pub trait LastUse: Send + Sync {
    /// The last open use has ended, on the thread that calls. May block.
    fn ended(&self);
}

#[derive(Default)]
struct State {
    notes: Few<Note>,
    next_id: u64,
    watcher: Option<Arc<dyn LastUse>>,
    /// Accounts of uses that came back with memory that was lent on. None is waited for by anybody
    /// who holds this lock.
    joined: Vec<Held>,
    /// Who wants to know the epochs in which open uses end, by their names.
    followed: Vec<(u64, Arc<AtomicU64>)>,
    /// Nobody but the holders of open uses refers to it any more.
    left: bool,
    /// Whose memory is parked, the block's with it: no use may begin.
    parked: Option<Tag>,
}

/// Why a use may not begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Denied {
    /// One that conflicts is open.
    Busy,
    /// The block's memory is parked.
    Parked(Tag),
}

impl Denied {
    /// As an error about the block at `address`.
    pub(super) fn at(self, address: u64) -> MemoryError {
        match self {
            Self::Busy => MemoryError::Busy { address },
            Self::Parked(tag) => MemoryError::Parked { tag },
        }
    }
}

/// In place of an epoch, the end of a use that was called off. 0 stands for one that is open.
pub(super) const CALLED_OFF: u64 = u64::MAX;

/// The account of a block's uses.
#[derive(Default)]
pub(super) struct Node {
    state: Spin<State>,
}

/// Nodes whose streams are gone.
static SPARE: Mutex<Vec<&'static Node>> = Mutex::new(Vec::new());

impl Node {
    /// One that nobody uses.
    #[cold]
    pub(super) fn another() -> &'static Self {
        // A model's threads are gone with its locks, so nothing passes from one run to the next.
        let old = if cfg!(loom) {
            None
        } else {
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).pop()
        };
        old.unwrap_or_else(|| Box::leak(Box::default()))
    }

    /// Takes in the nodes of a stream that is gone, or one whose stream nobody knows.
    #[cold]
    pub(super) fn spare(nodes: impl IntoIterator<Item = &'static Self>) {
        if !cfg!(loom) {
            SPARE.lock().unwrap_or_else(PoisonError::into_inner).extend(nodes);
        }
    }

    /// Notes a use, unless it may not begin. Answers with the note, where one is needed, and adds
    /// to `before` the uses that conflict and have to be waited for: those that are stamped; and
    /// what is queued by now for borrows, unless these are over.
    pub(super) fn enter(
        &self,
        at_home: bool,
        on: &Arc<Timeline>,
        access: Access,
        stamp: Stamp,
        borrows: Borrows,
        before: &mut Few<(Arc<Timeline>, u64)>,
    ) -> Result<Option<u64>, Denied> {
        // What is let go of goes when the lock is open: it may be the last to hold another
        // library's stream.
        let mut over = Few::new();
        self.state.with(|s| {
            s.admit()?;
            if !s.precede(on, access, borrows, &mut over, before) {
                return Err(Denied::Busy);
            }
            s.take_out(&mut over, Note::is_done);
            // The home stream's own borrows need no note: the block goes back to that stream. Of
            // two borrows by one stream, the note that is stamped later stands for both.
            let lent = |note: &Note| note.stamp == Stamp::Lent && note.is(on, access);
            let covered = stamp == Stamp::Lent && (at_home || s.notes.iter().any(lent));
            Ok((!covered).then(|| s.note(on, access, stamp, at_home)))
        })
    }

    /// Notes a use whose work ends in `epoch`.
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

    /// Whether a use may begin, where none would be noted.
    pub(super) fn admits(&self) -> Result<(), Denied> {
        self.state.with(|s| s.admit())
    }

    /// Refuses every use from now on, unless one is open. Answers with what may be queued or
    /// running, borrows included.
    pub(super) fn park(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>, Denied> {
        self.state.with(|s| {
            s.admit()?;
            let mut work = Vec::new();
            s.work(&mut work)?;
            s.parked = Some(tag);
            Ok(work)
        })
    }

    /// What may be queued or running, borrows included, unless a use is open.
    pub(super) fn work(&self) -> Result<Vec<(Arc<Timeline>, u64)>, Denied> {
        let mut work = Vec::new();
        self.state.with(|s| s.work(&mut work)).map(|()| work)
    }

    /// Uses may begin again.
    pub(super) fn resume(&self) {
        self.state.with(|s| s.parked = None);
    }

    /// Ends an open use on `on` in `epoch`; `None` calls it off.
    pub(super) fn end(&'static self, id: u64, on: &Arc<Timeline>, epoch: Option<u64>) {
        let mut over = Few::new();
        let (watcher, spare) = self.state.with(|s| {
            let Some(at) = s.notes.iter().position(|note| note.id == id && note.is_open()) else {
                return (None, false);
            };
            let (at_home, access) = (s.notes[at].at_home, s.notes[at].access);
            match epoch {
                // One that is open is not raised, so this is another.
                Some(epoch) if !at_home && !s.raise(on, access, epoch) => {
                    s.notes[at].stamp = Stamp::At(epoch);
                }
                // Covered by another; called off; or at home, where whoever comes next waits in any
                // case.
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

    /// Takes a use back that could not be ordered.
    pub(super) fn withdraw(&self, id: u64) {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, |note| note.id == id);
            s.tell_followers(id, None);
        });
    }

    /// Forgets uses that the block's own stream has been made to wait for, unless they have been
    /// raised since.
    pub(super) fn forget(&self, waited: &[(Arc<Timeline>, u64)]) {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, |note| {
                waited.iter().any(|(on, epoch)| note.is_on(on) && note.stamp == Stamp::At(*epoch))
            });
        });
    }

    /// The block is freed: all borrows are over, and what is done or in order with its stream is
    /// forgotten. Whether anything is left. `stamped` gets what has to be fenced at once, and
    /// `joined` what was joined to this one.
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

    /// The block that this was joined to is freed.
    pub(super) fn leave_home(&self) {
        self.state.with(State::leave_home);
    }

    /// Forgets what is done. Whether anything is left.
    pub(super) fn forget_done(&self) -> bool {
        let mut over = Few::new();
        self.state.with(|s| {
            s.take_out(&mut over, Note::is_done);
            !s.is_empty()
        })
    }

    /// Forgets everything that is not open. Whether nothing is left, so that the node may go to
    /// another block; if not, it is left to the holders of open uses, the last of whom sees to it.
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

    /// Lets go of the node of a block that nobody asks about any more.
    #[cold]
    pub(super) fn let_go(&'static self) {
        if self.clear() {
            Self::spare([self]);
        }
    }

    /// Joins accounts of the same memory to this one.
    pub(super) fn join(&self, others: impl Iterator<Item = Held>) {
        for other in others {
            self.state.with(|s| s.joined.push(other));
        }
    }

    /// The block's own stream is `home` from now on.
    pub(super) fn move_to(&self, home: &Arc<Timeline>) {
        self.state.with(|s| {
            for note in &mut s.notes {
                note.at_home = note.is_on(home);
            }
        });
    }

    /// Whether one is open.
    pub(super) fn is_open(&self) -> bool {
        self.state.with(|s| s.any_open())
    }

    /// Those that are stamped, with their epochs.
    pub(super) fn stamped(&self) -> Few<(Arc<Timeline>, u64)> {
        let stamped = |note: &Note| note.stamped().map(|(on, epoch)| (on.clone(), epoch));
        self.state.with(|s| s.notes.iter().filter_map(stamped).collect())
    }

    /// All, as they stand now.
    pub(super) fn noted(&self) -> Few<Noted> {
        self.state.with(|s| s.notes.iter().filter_map(Note::noted).collect())
    }

    /// All, as they stand now; those that are open will say when they have ended.
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

    /// Has `watcher` told when no use is open any more, unless that is so already. Whether one is
    /// open.
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

    /// Adds what may be queued or running, unless a use is open. A borrow's work is all that its
    /// stream has queued by now.
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

    /// Adds to `before` the uses that one on `on` has to come after. Whether it may come at all.
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

    /// Tells whoever follows an open use that it has ended.
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

    /// Makes a note of the same stream and access cover `epoch` too, if there is one that is
    /// stamped: one for each is enough, since the later epoch covers the earlier.
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

    /// Stamps those of `which` whose end is the end of a borrow: it is over.
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

    /// The block is freed. What is open on its own stream goes on after that, so its end is to be
    /// stamped like any other's: the epoch of the free says nothing about work that is queued after
    /// it.
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

/// The nodes that a stream's blocks have used before.
#[derive(Default)]
pub(crate) struct Nodes {
    idle: Spin<Vec<&'static Node>>,
}

impl Nodes {
    pub(super) fn take(&self) -> &'static Node {
        self.idle.with(Vec::pop).unwrap_or_else(Node::another)
    }

    /// Takes a node back, which is empty and which nobody else refers to.
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
