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

use crate::{
    Timeline,
    sync::atomic::{AtomicPtr, Ordering},
    use_table::{
        ABORTED, ConflictingBorrows, LastUse, Stamp, TableGuard, UseError, UseSnapshot, UseTable,
        UseVec,
    },
};
use aquifer_core::{Result, Tag};
use aquifer_driver::Access;
use std::{fmt, ptr, sync::Arc};

/// A use that was not known to be complete when its block, or a part of it, was freed. A snapshot,
/// or its current state if it is [followed](Uses::follow).
///
/// See [`UseList`] for an example.
#[derive(Clone)]
pub struct Noted(UseSnapshot);

impl Noted {
    /// Returns the stream of the use.
    #[must_use]
    pub fn on(&self) -> &Arc<Timeline> {
        &self.0.on
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
        self.0.epoch.or_else(|| match self.0.end.as_ref()?.load(Ordering::Acquire) {
            0 => None,
            ABORTED => Some(0),
            epoch => Some(epoch),
        })
    }

    /// Returns whether all work of the use is known to be complete. Makes no driver call.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.epoch().is_some_and(|epoch| self.0.on.is_done(epoch))
    }
}

impl fmt::Debug for Noted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Noted")
            .field("stream", &self.0.on.number())
            .field("access", &self.0.access)
            .field("epoch", &self.epoch())
            .finish()
    }
}

/// Returns all uses of a table in their current state.
fn snapshots(table: &UseTable) -> UseVec<Noted> {
    table.snapshots().into_iter().map(Noted).collect()
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
    table: &'static UseTable,
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
        self.table.end(self.id, &self.on, Some(epoch));
        fenced
    }

    /// Ends the use without covering any work: none was queued.
    pub fn abort(mut self) {
        self.ended = true;
        self.table.end(self.id, &self.on, None);
    }

    /// Returns the stream of the use.
    #[must_use]
    #[doc(hidden)]
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
    /// Null, or a table that only this list records in. Tables are never freed.
    table: AtomicPtr<UseTable>,
}

/// A use that is recorded but may not be ordered yet.
pub(crate) struct UnorderedUse {
    table: &'static UseTable,
    /// The id of the record, or `None` for a borrow that needs none.
    id: Option<u64>,
}

/// Conflicting uses that must complete before a new one.
pub(crate) type Predecessors = UseVec<(Arc<Timeline>, u64)>;

impl UnorderedUse {
    /// Makes `on` wait for `owner` and for the uses in `predecessors`. Withdraws the record if that
    /// fails.
    pub(crate) fn order(
        &self,
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        predecessors: &Predecessors,
    ) -> Result<()> {
        let by_owner = Arc::ptr_eq(owner, on);
        let ordered = (|| {
            if !by_owner {
                on.wait_for(owner, owner.open())?;
            }
            predecessors.iter().try_for_each(|(other, epoch)| on.wait_for(other, *epoch).map(drop))
        })();
        match ordered {
            Ok(()) if by_owner => self.remove_waited(predecessors),
            Ok(()) => {}
            Err(_) => self.withdraw(),
        }
        ordered
    }

    /// Forgets the uses that the owner stream, whose use this is, has been made to wait for.
    pub(crate) fn remove_waited(&self, predecessors: &Predecessors) {
        if !predecessors.is_empty() {
            self.table.remove_waited(predecessors);
        }
    }

    /// Withdraws the record.
    pub(crate) fn withdraw(&self) {
        if let Some(id) = self.id {
            self.table.withdraw(id);
        }
    }

    /// Converts into the guard of an open use.
    pub(crate) fn into_use(self, on: &Arc<Timeline>) -> Use {
        // Only borrows have no record.
        Use {
            table: self.table,
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
        Self { table: AtomicPtr::new(ptr::null_mut()) }
    }

    #[inline]
    fn table(&self) -> Option<&'static UseTable> {
        // SAFETY: 1. null, or created from a `&'static UseTable`.
        unsafe { self.table.load(Ordering::Acquire).as_ref() }
    }

    /// Returns the table. The first use takes one that serves no other block.
    #[inline]
    fn table_or_init(&self) -> &'static UseTable {
        match self.table() {
            Some(table) => table,
            None => self.init_table(),
        }
    }

    fn init_table(&self) -> &'static UseTable {
        let new = UseTable::new_or_recycled();
        let at = ptr::from_ref(new).cast_mut();
        match self.table.compare_exchange(ptr::null_mut(), at, Ordering::AcqRel, Ordering::Acquire)
        {
            Ok(_) => new,
            Err(other) => {
                // Another thread was faster.
                new.recycle();
                // SAFETY: 1. not null, so it was created from a `&'static UseTable`.
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
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<Use> {
        let mut predecessors = Predecessors::new();
        // Holding `&self` proves that no mutable borrow is live. A declared write proves nothing,
        // so shared borrows may continue.
        let borrows = ConflictingBorrows::ended_if(!access.writes());
        let entered = self.open_use(address, owner, on, access, borrows, &mut predecessors)?;
        entered.order(owner, on, &predecessors)?;
        Ok(entered.into_use(on))
    }

    /// Opens a use that must still be ordered after the uses added to `predecessors`. The use is
    /// recorded before it is ordered, so that only one of two conflicting uses succeeds.
    ///
    /// # Errors
    /// `Busy` or `Parked`. Nothing is recorded then.
    #[inline]
    pub(crate) fn open_use(
        &self,
        address: u64,
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
        borrows: ConflictingBorrows,
        predecessors: &mut Predecessors,
    ) -> Result<UnorderedUse> {
        let table = self.table_or_init();
        let id =
            table.begin(Arc::ptr_eq(owner, on), on, access, Stamp::Open, borrows, predecessors);
        Ok(UnorderedUse { table, id: id.map_err(|error| error.with_address(address))? })
    }

    /// Makes `on` wait for what must come before `access`, and records a use that ends with a
    /// borrow. Never blocks.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend(
        &self,
        address: u64,
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<()> {
        self.record_borrow(address, owner, on, access, ConflictingBorrows::Ended)
    }

    /// Like [`UseList::lend`], but conflicting borrows may still be live, because they are of other
    /// parts of the block. `on` waits for their work queued so far, and they remain usable.
    ///
    /// # Errors
    /// As [`UseList::prepare`].
    pub fn lend_beside(
        &self,
        address: u64,
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
    ) -> Result<()> {
        self.record_borrow(address, owner, on, access, ConflictingBorrows::MaybeLive)
    }

    fn record_borrow(
        &self,
        address: u64,
        owner: &Arc<Timeline>,
        on: &Arc<Timeline>,
        access: Access,
        borrows: ConflictingBorrows,
    ) -> Result<()> {
        if Arc::ptr_eq(owner, on) && self.table().is_none() {
            // The owner stream is in order with itself, and no recorded use could conflict.
            return Ok(());
        }
        let (table, mut predecessors) = (self.table_or_init(), Predecessors::new());
        let id = table.begin(
            Arc::ptr_eq(owner, on),
            on,
            access,
            Stamp::Borrowed,
            borrows,
            &mut predecessors,
        );
        UnorderedUse { table, id: id.map_err(|error| error.with_address(address))? }.order(
            owner,
            on,
            &predecessors,
        )
    }

    /// Records a use whose work is queued on `on`, in order with what came before it.
    ///
    /// # Errors
    /// [`Parked`](aquifer_core::MemoryError::Parked) if no memory is mapped behind the block's
    /// addresses. Nothing is recorded then. Driver errors if the stream has to be fenced
    /// immediately. The use is recorded even then.
    pub fn record(&self, owner: &Arc<Timeline>, on: &Arc<Timeline>, access: Access) -> Result<()> {
        // Only parked memory refuses a record, and that error contains no address.
        let to_error = |error: UseError| error.with_address(0);
        if Arc::ptr_eq(owner, on) {
            return self.table().map_or(Ok(()), UseTable::check_parked).map_err(to_error);
        }
        let epoch = on.open();
        self.table_or_init().record(on, access, epoch).map_err(to_error)?;
        on.fence_at_once(epoch)
    }

    /// Returns whether the block never had a use that had to be recorded.
    #[inline]
    pub fn is_empty(&mut self) -> bool {
        // Relaxed: `&mut self` proves that every access by another thread came before.
        self.table.load(Ordering::Relaxed).is_null()
    }

    /// Takes the uses that are not known to be complete. Called when the block is freed, so all
    /// borrows have ended. Uses by the owner stream itself are included only while open, because
    /// that stream is in order with itself.
    #[must_use]
    pub fn take(&mut self) -> Uses {
        let Some(table) = self.table() else { return Uses::default() };
        self.table.store(ptr::null_mut(), Ordering::Relaxed);
        let (mut at_once, mut joined) = (UseVec::new(), Vec::new());
        let remains = table.on_block_freed(&mut at_once, &mut joined);
        for (on, epoch) in at_once {
            // After an error nothing proves the use, so the block is held back until the stream is
            // retired.
            let _ = on.fence_at_once(epoch);
        }
        let guard = TableGuard { table: Some(table) };
        let mut uses = Uses { own: remains.then_some(guard), joined };
        if !uses.joined.is_empty() {
            uses.joined.iter().filter_map(TableGuard::table).for_each(UseTable::clear_owner);
            uses.forget_done();
        }
        uses
    }

    /// Returns the uses that [`UseList::take`] would return, without removing them. For a part of a
    /// block that is freed while the rest stays. All borrows have ended then too.
    #[must_use]
    pub fn current(&mut self, owner: &Arc<Timeline>) -> Vec<Noted> {
        let uses = self.take();
        let current = uses.follow();
        self.take_over(owner, uses);
        current
    }

    /// Adds uses that were recorded in another list and taken from it. For memory that the holder
    /// of this block had sub-allocated and that was returned while still in use. `owner` is the
    /// owner stream of this block.
    pub fn take_over(&mut self, owner: &Arc<Timeline>, uses: Uses) {
        let Uses { own, joined } = uses;
        let mut all = own.into_iter().chain(joined);
        let table = match self.table() {
            Some(table) => table,
            None => {
                let Some(table) = all.next().and_then(|mut first| first.table.take()) else {
                    return;
                };
                table.set_owner(owner);
                self.table.store(ptr::from_ref(table).cast_mut(), Ordering::Release);
                table
            }
        };
        table.join(all.inspect(|guard| {
            if let Some(table) = guard.table {
                table.set_owner(owner);
            }
        }));
    }
}

impl Drop for UseList {
    #[inline]
    fn drop(&mut self) {
        if let Some(table) = self.table() {
            table.release();
        }
    }
}

impl fmt::Debug for UseList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("UseList").field(&self.table().map(snapshots)).finish()
    }
}

/// The uses that hold back the memory of a freed block.
///
/// ```
/// use aquifer_core::DeviceId;
/// use aquifer_driver::{Access, sim::Sim};
/// use aquifer_stream::{StreamPool, UseList};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 2);
/// let (owner, other) = (streams.lease()?, streams.lease()?);
/// let mut list = UseList::new();
/// list.record(owner.timeline(), other.timeline(), Access::Read)?;
/// let mut uses = list.take(); // the block is freed
/// assert!(!uses.is_empty());
/// other.synchronize()?;
/// uses.forget_done();
/// assert!(uses.is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Default)]
pub struct Uses {
    own: Option<TableGuard>,
    /// Uses that came back with sub-allocated memory.
    joined: Vec<TableGuard>,
}

impl Uses {
    fn tables(&self) -> impl Iterator<Item = &'static UseTable> {
        self.own.iter().chain(&self.joined).filter_map(TableGuard::table)
    }

    /// Returns whether no use is left.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.own.is_none() && self.joined.is_empty()
    }

    /// Forgets uses whose work is known to be complete. Makes no driver call.
    pub fn forget_done(&mut self) {
        let remains = |guard: &TableGuard| guard.table.is_some_and(UseTable::remove_completed);
        if self.own.as_ref().is_some_and(|guard| !remains(guard)) {
            self.own = None;
        }
        self.joined.retain(remains);
    }

    /// Forgets all uses, because the owner stream has been made to wait for them. Open uses must
    /// not be forgotten: their block must not be reused.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns whether a use is still open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.tables().any(UseTable::is_open)
    }

    /// Returns the streams and epochs of the uses that are not open. They are collected before the
    /// call returns, and no stream is released meanwhile. So it may be called while a lock is held.
    pub fn stamped(&self) -> impl Iterator<Item = (Arc<Timeline>, u64)> + use<> {
        let mut all = Predecessors::new();
        self.tables().for_each(|table| all.extend(table.stamped()));
        all.into_iter()
    }

    /// Calls `visit` with the stream and epoch of each use that is not open and whose work is not
    /// known to be complete. A lock is held meanwhile, so `visit` must be short and may not look at
    /// uses.
    pub fn for_each_unfinished(&self, mut visit: impl FnMut(&Arc<Timeline>, u64)) {
        self.tables().for_each(|table| table.for_each_unfinished(&mut visit));
    }

    /// Returns the remaining uses in their current state.
    pub fn iter(&self) -> impl Iterator<Item = Noted> + use<> {
        let mut all = UseVec::new();
        self.tables().for_each(|table| all.extend(table.snapshots().into_iter().map(Noted)));
        all.into_iter()
    }

    /// Returns the remaining uses. Each of them continues to report its current state, even after
    /// this value is dropped. For memory that is released in several parts.
    #[must_use]
    pub fn follow(&self) -> Vec<Noted> {
        self.tables().flat_map(UseTable::follow).map(Noted).collect()
    }

    /// Calls [`LastUse::ended`] when no use is open any more: once for the block's own uses, and
    /// once for each block that its memory was sub-allocated as. Returns whether a use is open. If
    /// none is open, it is not called.
    pub fn tell(&self, watcher: &Arc<dyn LastUse>) -> bool {
        let mut open = false;
        self.tables().for_each(|table| open |= table.set_watcher(watcher));
        open
    }
}

impl fmt::Debug for Uses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// A view of the uses of a live block, kept by its pool beside the block that the user owns.
///
/// Valid until the block's uses are [taken](UseList::take). The pool must drop it before that.
///
/// ```
/// use aquifer_core::{DeviceId, MemoryError, Tag};
/// use aquifer_driver::{Access, sim::Sim};
/// use aquifer_stream::{StreamPool, UseList};
/// let streams = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 2);
/// let (owner, other) = (streams.lease()?, streams.lease()?);
/// let (list, tag) = (UseList::new(), Tag::named("weights"));
/// let watch = list.watch();
/// let used = list.prepare(0x1000, owner.timeline(), other.timeline(), Access::Read)?;
/// assert_eq!(watch.park(0x1000, tag).err(), Some(MemoryError::Busy { address: 0x1000 }));
/// used.finish()?;
/// let work = watch.park(0x1000, tag)?; // what `other` has queued
/// assert_eq!(work.len(), 1);
/// let refused = list.prepare(0x1000, owner.timeline(), other.timeline(), Access::Read);
/// assert_eq!(refused.err(), Some(MemoryError::Parked { tag }));
/// watch.resume();
/// list.prepare(0x1000, owner.timeline(), other.timeline(), Access::Read)?.abort();
/// # Ok::<(), MemoryError>(())
/// ```
pub struct Watch {
    table: &'static UseTable,
}

impl UseList {
    /// Returns a view of this list for the pool. From now on, uses by the owner stream are checked
    /// too, which costs them a lock.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch { table: self.table_or_init() }
    }
}

impl Watch {
    /// Refuses every use with [`Parked`](aquifer_core::MemoryError::Parked) from now on. Returns
    /// the streams and epochs of the other streams' work that may be queued or running. For a
    /// borrow, whose end cannot be observed, this is all work that its stream has queued so far.
    /// Never blocks.
    ///
    /// # Errors
    /// [`Busy`](aquifer_core::MemoryError::Busy) with `address` if a prepared use is not finished,
    /// and [`Parked`](aquifer_core::MemoryError::Parked) if uses are refused already. Nothing
    /// changes then.
    pub fn park(&self, address: u64, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.table.park(tag).map_err(|error| error.with_address(address))
    }

    /// Returns the streams and epochs of the other streams' work that may be queued or running. For
    /// a borrow, whose end cannot be observed, this is all work that its stream has queued so far.
    /// Never blocks.
    ///
    /// # Errors
    /// [`Busy`](aquifer_core::MemoryError::Busy) with `address` if a prepared use is not finished.
    pub fn work(&self, address: u64) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.table.pending_work().map_err(|error| error.with_address(address))
    }

    /// Records that the work up to `epoch` of `on` reads and writes the block. Later users wait for
    /// it.
    ///
    /// # Errors
    /// [`Parked`](aquifer_core::MemoryError::Parked). Nothing is recorded then.
    pub fn record(&self, on: &Arc<Timeline>, epoch: u64) -> Result<()> {
        self.table.record(on, Access::ReadWrite, epoch).map_err(|error| error.with_address(0))
    }

    /// Allows uses again.
    pub fn resume(&self) {
        self.table.resume();
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Watch").field(&snapshots(self.table)).finish()
    }
}
