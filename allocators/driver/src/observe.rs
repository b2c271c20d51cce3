//! What pools tell a driver that checks them.

use crate::{DeviceRange, RawStream};
use std::fmt::Debug;

/// Whose a range of device memory is from now on.
///
/// Its example is that of [`Observer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ownership<'a> {
    /// A block's, in stream order on `stream`. `generation` tells it from every other block that
    /// has ever been or will be at these addresses.
    Live {
        /// The stream that may use it without further ado.
        stream: RawStream,
        /// The block's number.
        generation: u64,
    },
    /// Freed by its owner, while uses on `users` have not ended: those may still touch it, and
    /// nobody else.
    Pending {
        /// The streams whose uses are open.
        users: &'a [RawStream],
    },
    /// A guard beside a block, which its pool has filled to see whether it is written to: only
    /// these streams may touch it.
    Guard {
        /// The streams that the pool reads it back on.
        users: &'a [RawStream],
    },
    /// Nobody's: in a cache, or not in use at all. Whoever touches it touches freed memory.
    Free,
}

/// A pool's word on whose a range is.
///
/// Its example is that of [`Observer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockNote<'a> {
    /// The block, whole.
    pub range: DeviceRange,
    /// Whose it is.
    pub owner: Ownership<'a>,
}

/// What the host does with memory that devices can reach.
///
/// Its example is that of [`Observer`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostAccess {
    /// The CPU reads it.
    Read,
    /// The CPU writes it, or its owner gives it to somebody who will.
    Write,
    /// Its owner frees it: nothing queued may touch it any more.
    Free,
}

/// Somebody who checks that nothing is touched out of turn. See
/// [`Driver::observer`](crate::Driver::observer).
///
/// ```
/// use aquifer_driver::{DeviceId, DeviceRange, Driver, sim::Sim};
/// let driver = Sim::h200(1).driver();
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4096)?, bytes: 4096 };
/// if let Some(observer) = driver.observer() {      // the simulated GPU; a real one has nobody who checks
///     observer.registered(range);                  // from here on a move under it is reported
///     observer.unregistered(range);
/// }
/// # Ok::<(), aquifer_driver::DriverError>(())
/// ```
pub trait Observer: Debug + Send + Sync {
    /// A range of device memory changes hands.
    fn block(&self, note: BlockNote<'_>);

    /// Somebody has been told these addresses and keeps them: a network card, another process, a
    /// graph. From here on they must lead to the memory that they lead to now.
    fn registered(&self, range: DeviceRange);

    /// One who was told, by [`Observer::registered`] with the same range, has forgotten them.
    fn unregistered(&self, range: DeviceRange);

    /// A range is kept for graphs from now on: launches of every graph that was captured over
    /// memory kept for this `keeper` may touch it, whatever blocks have been noted there since and
    /// though it be free. For whoever else touches it the notes count, as ever. The number is the
    /// keeper's own choice, one for each pool that graphs share.
    ///
    /// Said before the first block of the range is handed to work that is captured; a range that is
    /// kept already goes to the new keeper.
    fn kept_for_graphs(&self, range: DeviceRange, keeper: u64);

    /// A range is kept for graphs no longer: a launch that still touches it is told whose it is
    /// now. Ends what was said of any part of it.
    fn let_go_by_graphs(&self, range: DeviceRange);

    /// The host touches memory that devices can reach.
    fn host(&self, address: u64, bytes: u64, access: HostAccess);

    /// A public call of the program's own is about to return, and no lock is held: an observer that
    /// is to panic for what has been found does so here. Never called by a drop.
    #[track_caller]
    fn checkpoint(&self) {}
}
