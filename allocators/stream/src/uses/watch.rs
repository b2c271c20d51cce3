//! Access to the uses of a live block from its pool, which parks the block's memory or runs its own
//! work on it.

use super::{UseList, snapshots};
use crate::{Timeline, use_table::UseTable};
use aquifer_core::{Result, Tag};
use aquifer_driver::Access;
use std::{fmt, sync::Arc};

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
/// let watch = list.watch(owner.timeline());
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
    table: &'static UseTable<Timeline>,
}

impl UseList {
    /// Returns a view of this list for the pool. From now on, uses by the owner stream are checked
    /// too, which costs them a lock.
    #[must_use]
    pub fn watch(&self, owner: &Timeline) -> Watch {
        Watch { table: self.table_or_init(owner) }
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
