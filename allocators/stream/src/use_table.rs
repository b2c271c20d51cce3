//! The use records of one block.
//!
//! - Tables are leaked once and recycled. A block takes a table at its first use by another stream,
//!   and returns it when the block is freed and all uses have ended. So recording a use allocates
//!   nothing once there are as many tables as blocks in use.
//! - A [`Use`](crate::Use) needs no reference count to find its record: it stores a plain `&'static
//!   UseTable`.
//! - While a use is open, its table serves no other block, even if its own block is freed.
//! - Memory that a block's holder sub-allocated comes back with its uses. Open uses must find their
//!   records where they were created, so such a table is *joined* to the block's table instead of
//!   merged into it.

use crate::{
    Spin, Timeline,
    sync::atomic::{AtomicU64, Ordering},
};
use aquifer_core::{MemoryError, Tag};
use aquifer_driver::Access;
use smallvec::SmallVec;
use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Most blocks are used by at most two other streams. More elements go to the heap.
pub(crate) type UseVec<T> = SmallVec<[T; 2]>;

/// When the work of a use ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Stamp {
    /// The use is still open.
    Open,
    /// It ends with a borrow, whose end cannot be observed here.
    Borrowed,
    /// In this epoch of its stream.
    Epoch(u64),
}

/// Whether borrows that conflict with a new use have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ConflictingBorrows {
    /// They have ended.
    Ended,
    /// They may be live: they are of other parts of the block.
    MaybeLive,
}

impl ConflictingBorrows {
    pub(crate) fn ended_if(ended: bool) -> Self {
        if ended { Self::Ended } else { Self::MaybeLive }
    }
}

/// The state of a use at one moment, or its current state if it is followed.
#[derive(Clone)]
pub(crate) struct UseSnapshot {
    pub(crate) on: Arc<Timeline>,
    pub(crate) access: Access,
    /// `None` if it was open.
    pub(crate) epoch: Option<u64>,
    /// Receives the epoch in which the use ends. 0 while it is open.
    pub(crate) end: Option<Arc<AtomicU64>>,
}

/// The record of one stream's use of the block. Filled field by field and emptied by taking the
/// stream out, never moved: copying a struct just after partial writes stalls on store forwarding.
struct UseRecord {
    /// `None` if the record is free.
    on: Option<Arc<Timeline>>,
    stamp: Stamp,
    /// The id of the record in its table, used to finish the use.
    id: u64,
    access: Access,
    /// Whether it is on the block's owner stream, which is in order with itself. `false` once the
    /// block is freed.
    by_owner: bool,
}

impl UseRecord {
    const FREE: Self =
        Self { on: None, stamp: Stamp::Open, id: 0, access: Access::Read, by_owner: false };

    fn is_open(&self) -> bool {
        self.on.is_some() && self.stamp == Stamp::Open
    }

    /// Returns whether all work of the use is known to be complete. Makes no driver call.
    fn is_done(&self) -> bool {
        match (&self.on, self.stamp) {
            (Some(on), Stamp::Epoch(epoch)) => on.is_done(epoch),
            _ => false,
        }
    }

    fn matches(&self, on: &Arc<Timeline>, access: Access) -> bool {
        self.is_on(on) && self.access == access
    }

    fn is_on(&self, on: &Arc<Timeline>) -> bool {
        self.on.as_ref().is_some_and(|other| Arc::ptr_eq(other, on))
    }

    /// Returns its current state, or `None` if the record is free.
    fn snapshot(&self) -> Option<UseSnapshot> {
        let epoch = if let Stamp::Epoch(epoch) = self.stamp { Some(epoch) } else { None };
        self.on.clone().map(|on| UseSnapshot { on, access: self.access, epoch, end: None })
    }

    /// Returns its stream and epoch if it is stamped.
    fn stamped(&self) -> Option<(&Arc<Timeline>, u64)> {
        match (&self.on, self.stamp) {
            (Some(on), Stamp::Epoch(epoch)) => Some((on, epoch)),
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
    records: UseVec<UseRecord>,
    next_id: u64,
    watcher: Option<Arc<dyn LastUse>>,
    /// Tables of uses that came back with sub-allocated memory. No thread that holds their locks
    /// acquires this one.
    joined: Vec<TableGuard>,
    /// Where to store the epochs in which open uses end, by record id.
    followers: Vec<(u64, Arc<AtomicU64>)>,
    /// Only the holders of open uses still refer to the table.
    orphaned: bool,
    /// The tag of the parked memory that contains the block. No use may begin while it is set.
    parked: Option<Tag>,
}

/// Why a use may not begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum UseError {
    /// A conflicting use is open.
    Busy,
    /// The block's memory is parked.
    Parked(Tag),
}

impl UseError {
    /// Converts to an error for the block at `address`.
    pub(crate) fn with_address(self, address: u64) -> MemoryError {
        match self {
            Self::Busy => MemoryError::Busy { address },
            Self::Parked(tag) => MemoryError::Parked { tag },
        }
    }
}

/// Stored instead of an epoch when a use was aborted. 0 stands for an open use.
pub(crate) const ABORTED: u64 = u64::MAX;

/// The tables that serve no block.
static SPARE_TABLES: Mutex<Vec<&'static UseTable>> = Mutex::new(Vec::new());

fn spare_tables() -> MutexGuard<'static, Vec<&'static UseTable>> {
    SPARE_TABLES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The use records of a block.
#[derive(Default)]
pub(crate) struct UseTable {
    state: Spin<State>,
}

impl UseTable {
    /// Returns an unused table.
    pub(crate) fn new_or_recycled() -> &'static Self {
        // Loom locks belong to one model run, so no table passes from one run to the next.
        let old = if cfg!(loom) { None } else { spare_tables().pop() };
        old.unwrap_or_else(|| Box::leak(Box::default()))
    }

    /// Takes in a table that is empty and has no other references.
    pub(crate) fn recycle(&'static self) {
        if !cfg!(loom) {
            spare_tables().push(self);
        }
    }

    /// Records a use if it may begin. Returns the id of the record if one is needed. Adds to
    /// `predecessors` the conflicting uses that must be waited for: stamped uses, and unless
    /// borrows have ended, the work queued so far for them.
    pub(crate) fn begin(
        &self,
        by_owner: bool,
        on: &Arc<Timeline>,
        access: Access,
        stamp: Stamp,
        borrows: ConflictingBorrows,
        predecessors: &mut UseVec<(Arc<Timeline>, u64)>,
    ) -> Result<Option<u64>, UseError> {
        // Streams are dropped after the lock is released: this may be the last reference to another
        // library's stream.
        let mut released = UseVec::new();
        self.state.with(|s| {
            s.check_parked()?;
            if !s.collect_predecessors(on, access, borrows, &mut released, predecessors) {
                return Err(UseError::Busy);
            }
            s.remove_where(&mut released, UseRecord::is_done);
            // Borrows by the owner stream need no record: the block returns to that stream. Two
            // borrows by one stream share the record, which is stamped later and covers both.
            let borrowed =
                |record: &UseRecord| record.stamp == Stamp::Borrowed && record.matches(on, access);
            let covered = stamp == Stamp::Borrowed && (by_owner || s.records.iter().any(borrowed));
            Ok((!covered).then(|| s.add_record(on, access, stamp, by_owner)))
        })
    }

    /// Records a use whose work ends in `epoch`.
    pub(crate) fn record(
        &self,
        on: &Arc<Timeline>,
        access: Access,
        epoch: u64,
    ) -> Result<(), UseError> {
        self.state.with(|s| {
            s.check_parked()?;
            if !s.raise_epoch(on, access, epoch) {
                s.add_record(on, access, Stamp::Epoch(epoch), false);
            }
            Ok(())
        })
    }

    /// Checks whether a use may begin, without recording one.
    pub(crate) fn check_parked(&self) -> Result<(), UseError> {
        self.state.with(|s| s.check_parked())
    }

    /// Refuses every use from now on, unless one is open. Returns the work that may be queued or
    /// running, including that of borrows.
    pub(crate) fn park(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>, UseError> {
        self.state.with(|s| {
            s.check_parked()?;
            let mut work = Vec::new();
            s.pending_work(&mut work)?;
            s.parked = Some(tag);
            Ok(work)
        })
    }

    /// Returns the work that may be queued or running, including that of borrows, unless a use is
    /// open.
    pub(crate) fn pending_work(&self) -> Result<Vec<(Arc<Timeline>, u64)>, UseError> {
        let mut work = Vec::new();
        self.state.with(|s| s.pending_work(&mut work)).map(|()| work)
    }

    /// Allows uses again.
    pub(crate) fn resume(&self) {
        self.state.with(|s| s.parked = None);
    }

    /// Ends an open use on `on` in `epoch`. `None` aborts it.
    pub(crate) fn end(&'static self, id: u64, on: &Arc<Timeline>, epoch: Option<u64>) {
        let mut released = UseVec::new();
        let (watcher, recycle) = self.state.with(|s| {
            let Some(at) = s.records.iter().position(|record| record.id == id && record.is_open())
            else {
                return (None, false);
            };
            let (by_owner, access) = (s.records[at].by_owner, s.records[at].access);
            match epoch {
                // Only stamped records are raised, so this open one would not be the record found.
                Some(epoch) if !by_owner && !s.raise_epoch(on, access, epoch) => {
                    s.records[at].stamp = Stamp::Epoch(epoch);
                }
                // Covered by another record, or aborted, or on the owner stream, for which every
                // later user waits anyway.
                _ => released.extend(s.records[at].on.take()),
            }
            s.publish_end(id, epoch);
            if !(s.watcher.is_some() || s.orphaned) || s.any_open() {
                return (None, false);
            }
            let recycle = mem::take(&mut s.orphaned);
            if recycle {
                s.remove_where(&mut released, |_| true);
            }
            (s.watcher.take(), recycle)
        });
        drop(released);
        if recycle {
            self.recycle();
        }
        if let Some(watcher) = watcher {
            watcher.ended();
        }
    }

    /// Withdraws a use that could not be ordered.
    pub(crate) fn withdraw(&self, id: u64) {
        let mut released = UseVec::new();
        self.state.with(|s| {
            s.remove_where(&mut released, |record| record.id == id);
            s.publish_end(id, None);
        });
    }

    /// Forgets uses that the owner stream has been made to wait for, unless their epoch has been
    /// raised since.
    pub(crate) fn remove_waited(&self, waited: &[(Arc<Timeline>, u64)]) {
        let mut released = UseVec::new();
        self.state.with(|s| {
            s.remove_where(&mut released, |record| {
                waited
                    .iter()
                    .any(|(on, epoch)| record.is_on(on) && record.stamp == Stamp::Epoch(*epoch))
            });
        });
    }

    /// Called when the block is freed. All borrows have ended, and uses that are complete or in
    /// order with the owner stream are forgotten. Returns whether any use is left. Adds to
    /// `stamped` the epochs that must be fenced immediately, and moves the joined tables to
    /// `joined`.
    pub(crate) fn on_block_freed(
        &self,
        stamped: &mut UseVec<(Arc<Timeline>, u64)>,
        joined: &mut Vec<TableGuard>,
    ) -> bool {
        let mut released = UseVec::new();
        self.state.with(|s| {
            s.end_borrows(&mut released, |_| true);
            s.remove_where(&mut released, |record| {
                record.is_done() || record.by_owner && record.stamp != Stamp::Open
            });
            for (on, epoch) in s.records.iter().filter_map(UseRecord::stamped) {
                if on.fences_at_once() {
                    stamped.push((on.clone(), epoch));
                }
            }
            joined.append(&mut s.joined);
            s.clear_owner();
            !s.is_empty()
        })
    }

    /// Called when the block that this table was joined to is freed.
    pub(crate) fn clear_owner(&self) {
        self.state.with(State::clear_owner);
    }

    /// Forgets complete uses. Returns whether any use is left.
    pub(crate) fn remove_completed(&self) -> bool {
        let mut released = UseVec::new();
        self.state.with(|s| {
            s.remove_where(&mut released, UseRecord::is_done);
            !s.is_empty()
        })
    }

    /// Forgets everything that is not open. Returns whether nothing is left, so that the table may
    /// serve another block. Otherwise the holder of the last open use recycles the table.
    fn clear(&self) -> bool {
        let mut released = UseVec::new();
        let (empty, _watcher, _joined) = self.state.with(|s| {
            s.remove_where(&mut released, |record| record.stamp != Stamp::Open);
            let (empty, joined) = (s.is_empty(), mem::take(&mut s.joined));
            s.orphaned = !empty;
            (empty, if empty { s.watcher.take() } else { None }, joined)
        });
        empty
    }

    /// Releases the table of a block that is no longer tracked.
    pub(crate) fn release(&'static self) {
        if self.clear() {
            self.recycle();
        }
    }

    /// Joins tables of the same memory to this one.
    pub(crate) fn join(&self, others: impl Iterator<Item = TableGuard>) {
        for other in others {
            self.state.with(|s| s.joined.push(other));
        }
    }

    /// Makes `owner` the owner stream of the block.
    pub(crate) fn set_owner(&self, owner: &Arc<Timeline>) {
        self.state.with(|s| {
            for record in &mut s.records {
                record.by_owner = record.is_on(owner);
            }
        });
    }

    /// Returns whether a use is open.
    pub(crate) fn is_open(&self) -> bool {
        self.state.with(|s| s.any_open())
    }

    /// Returns the stamped uses, with their epochs.
    pub(crate) fn stamped(&self) -> UseVec<(Arc<Timeline>, u64)> {
        let stamped = |record: &UseRecord| record.stamped().map(|(on, epoch)| (on.clone(), epoch));
        self.state.with(|s| s.records.iter().filter_map(stamped).collect())
    }

    /// Calls `visit` under the lock for each stamped use whose work is not known to be complete.
    pub(crate) fn for_each_unfinished(&self, mut visit: impl FnMut(&Arc<Timeline>, u64)) {
        self.state.with(|s| {
            let stamped = s.records.iter().filter_map(UseRecord::stamped);
            stamped.filter(|(on, epoch)| !on.is_done(*epoch)).for_each(|(on, e)| visit(on, e));
        });
    }

    /// Returns all uses in their current state.
    pub(crate) fn snapshots(&self) -> UseVec<UseSnapshot> {
        self.state.with(|s| s.records.iter().filter_map(UseRecord::snapshot).collect())
    }

    /// Returns all uses in their current state. Those that are open are updated when they end.
    pub(crate) fn follow(&self) -> Vec<UseSnapshot> {
        self.state.with(|s| {
            let mut all = Vec::with_capacity(s.records.len());
            for record in &s.records {
                let Some(mut snapshot) = record.snapshot() else { continue };
                if record.is_open() {
                    let known = s.followers.iter().find(|(id, _)| *id == record.id);
                    let end = known.map_or_else(Arc::default, |(_, end)| end.clone());
                    if known.is_none() {
                        s.followers.push((record.id, end.clone()));
                    }
                    snapshot.end = Some(end);
                }
                all.push(snapshot);
            }
            all
        })
    }

    /// Calls `watcher` when no use is open any more, unless none is open now. Returns whether one
    /// is open.
    pub(crate) fn set_watcher(&self, watcher: &Arc<dyn LastUse>) -> bool {
        let replaced =
            self.state.with(|s| s.any_open().then(|| s.watcher.replace(watcher.clone())));
        replaced.is_some()
    }
}

impl State {
    fn check_parked(&self) -> Result<(), UseError> {
        self.parked.map_or(Ok(()), |tag| Err(UseError::Parked(tag)))
    }

    /// Adds the work that may be queued or running, unless a use is open. For a borrow, this is all
    /// work that its stream has queued so far.
    fn pending_work(&self, all: &mut Vec<(Arc<Timeline>, u64)>) -> Result<(), UseError> {
        for record in &self.records {
            let Some(on) = &record.on else { continue };
            match record.stamp {
                Stamp::Open => return Err(UseError::Busy),
                Stamp::Borrowed => all.push((on.clone(), on.open())),
                Stamp::Epoch(epoch) => all.push((on.clone(), epoch)),
            }
        }
        let mut joined = self.joined.iter().filter_map(TableGuard::table);
        joined.try_for_each(|table| table.state.with(|s| s.pending_work(all)))
    }

    /// Adds to `predecessors` the uses that must come before a use on `on`. Returns whether that
    /// use may begin.
    fn collect_predecessors(
        &mut self,
        on: &Arc<Timeline>,
        access: Access,
        borrows: ConflictingBorrows,
        released: &mut UseVec<Arc<Timeline>>,
        predecessors: &mut UseVec<(Arc<Timeline>, u64)>,
    ) -> bool {
        if self.records.iter().any(|record| record.is_open() && record.access.conflicts(access)) {
            return false;
        }
        if borrows == ConflictingBorrows::Ended {
            self.end_borrows(released, |record| record.access.conflicts(access));
        }
        for record in self.records.iter().filter(|record| record.access.conflicts(access)) {
            let Some(other) = record.on.as_ref().filter(|other| !Arc::ptr_eq(other, on)) else {
                continue;
            };
            match record.stamp {
                Stamp::Epoch(epoch) => predecessors.push((other.clone(), epoch)),
                Stamp::Borrowed => predecessors.push((other.clone(), other.open())),
                Stamp::Open => {}
            }
        }
        self.joined.iter().all(|guard| {
            guard.table().is_none_or(|table| {
                table
                    .state
                    .with(|s| s.collect_predecessors(on, access, borrows, released, predecessors))
            })
        })
    }

    /// Publishes the end of a use to those that follow it.
    #[inline]
    fn publish_end(&mut self, id: u64, epoch: Option<u64>) {
        if !self.followers.is_empty() {
            let ended = epoch.unwrap_or(ABORTED);
            for (_, end) in self.followers.extract_if(.., |(followed, _)| *followed == id) {
                end.store(ended, Ordering::Release);
            }
        }
    }

    fn any_open(&self) -> bool {
        self.records.iter().any(UseRecord::is_open)
    }

    fn is_empty(&self) -> bool {
        self.records.iter().all(|record| record.on.is_none())
    }

    fn add_record(
        &mut self,
        on: &Arc<Timeline>,
        access: Access,
        stamp: Stamp,
        by_owner: bool,
    ) -> u64 {
        let id = self.next_id;
        self.next_id = id + 1;
        let at = self.records.iter().position(|record| record.on.is_none()).unwrap_or_else(|| {
            self.records.push(UseRecord::FREE);
            self.records.len() - 1
        });
        let record = &mut self.records[at];
        record.id = id;
        record.access = access;
        record.stamp = stamp;
        record.by_owner = by_owner;
        record.on = Some(on.clone());
        id
    }

    /// Raises a stamped record of the same stream and access to cover `epoch` too. One record is
    /// enough, because the later epoch covers the earlier. Returns whether such a record exists.
    fn raise_epoch(&mut self, on: &Arc<Timeline>, access: Access, epoch: u64) -> bool {
        for record in &mut self.records {
            if let Stamp::Epoch(earlier) = record.stamp
                && record.matches(on, access)
            {
                record.stamp = Stamp::Epoch(epoch.max(earlier));
                return true;
            }
        }
        false
    }

    /// Stamps the records of ended borrows that `which` selects.
    fn end_borrows(
        &mut self,
        released: &mut UseVec<Arc<Timeline>>,
        which: impl Fn(&UseRecord) -> bool,
    ) {
        for at in 0..self.records.len() {
            let record = &self.records[at];
            if record.stamp != Stamp::Borrowed || !which(record) {
                continue;
            }
            let Some(on) = record.on.clone() else { continue };
            let (epoch, access) = (on.open(), record.access);
            if self.raise_epoch(&on, access, epoch) {
                released.extend(self.records[at].on.take());
            } else {
                self.records[at].stamp = Stamp::Epoch(epoch);
            }
            released.push(on);
        }
    }

    /// Called when the block is freed. An open use on the owner stream continues after the free,
    /// and must be stamped like any other: the epoch of the free does not cover work that is queued
    /// later.
    fn clear_owner(&mut self) {
        self.records.iter_mut().for_each(|record| record.by_owner = false);
    }

    fn remove_where(
        &mut self,
        released: &mut UseVec<Arc<Timeline>>,
        which: impl Fn(&UseRecord) -> bool,
    ) {
        for record in &mut self.records {
            if record.on.is_some() && which(record) {
                released.extend(record.on.take());
            }
        }
    }
}

/// The table of a freed block. It serves another block once it has no records left. If a use is
/// still open, its holder returns the table.
pub(crate) struct TableGuard {
    /// `None` once a list has taken the table.
    pub(crate) table: Option<&'static UseTable>,
}

impl TableGuard {
    pub(crate) fn table(&self) -> Option<&'static UseTable> {
        self.table
    }
}

impl Drop for TableGuard {
    fn drop(&mut self) {
        if let Some(table) = self.table {
            table.release();
        }
    }
}
