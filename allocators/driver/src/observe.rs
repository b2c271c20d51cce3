//! Notes from pools to a driver that checks ownership.

use crate::{DeviceRange, RawStream};
use std::fmt::Debug;

/// The owner of a range of device memory from now on.
///
/// Part of a [`BlockNote`], which is passed to [`Observer::block`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Ownership<'a> {
    /// Owned by a block, in stream order on `stream`. `generation` distinguishes it from every
    /// other block at these addresses, past or future.
    Live {
        /// The stream that may use it without waiting.
        stream: RawStream,
        /// The block's number.
        generation: u64,
    },
    /// Freed by its owner while uses on `users` have not ended. Only those uses may still access
    /// it.
    Pending {
        /// The streams whose uses are open.
        users: &'a [RawStream],
    },
    /// A guard beside a block, which its pool has filled to detect writes. Only these streams may
    /// access it.
    Guard {
        /// The streams that the pool reads it back on.
        users: &'a [RawStream],
    },
    /// Free: in a cache, or not in use at all. Every access is an access to freed memory.
    Free,
}

/// A pool's note about the ownership of a range.
///
/// Passed to [`Observer::block`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BlockNote<'a> {
    /// The whole block.
    pub range: DeviceRange,
    /// Its owner.
    pub owner: Ownership<'a>,
}

/// A host access to memory that devices can reach.
///
/// Passed to [`Observer::host`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum HostAccess {
    /// The CPU reads it.
    Read,
    /// The CPU writes it, or its owner passes it to code that will write.
    Write,
    /// Its owner frees it. No queued work may access it any more.
    Free,
}

/// A checker of the ownership and ordering of memory accesses. See `Driver::observer`.
///
/// ```
/// use aquifer::{DeviceId, DeviceRange, Driver, sim::Sim};
/// let driver = Sim::h200(1).driver();
/// let range = DeviceRange { device: DeviceId(0), address: driver.mem_alloc(DeviceId(0), 4096)?, bytes: 4096 };
/// if let Some(observer) = driver.observer() {      // only the simulated GPU has one
///     observer.registered(range);                  // from here on, remapping it is reported
///     observer.unregistered(range);
/// }
/// # Ok::<(), aquifer::error::DriverError>(())
/// ```
pub trait Observer: Debug + Send + Sync {
    /// Returns a handle that means the calling thread's `stream` on every thread, for notes: that
    /// of a thread's default stream means another stream on each. Only notes take it.
    fn on_every_thread(&self, stream: RawStream) -> RawStream {
        stream
    }

    /// Records a change of ownership of a range of device memory.
    fn block(&self, note: BlockNote<'_>);

    /// Records that these addresses are stored outside the pools: by a network card, another
    /// process or a graph. From here on they must stay mapped to the same memory.
    fn registered(&self, range: DeviceRange);

    /// Ends one [`Observer::registered`] of the same range.
    fn unregistered(&self, range: DeviceRange);

    /// Records that a range is kept for graphs from now on. Launches of every graph that was
    /// captured over memory kept for this `keeper` may access it, even if it is free or other
    /// blocks have been noted there since. For all other accesses the notes apply as usual. The
    /// keeper chooses the number, one for each pool that graphs share.
    ///
    /// Called before the first block of the range is allocated to captured work. A range that is
    /// already kept moves to the new keeper.
    fn kept_for_graphs(&self, range: DeviceRange, keeper: u64);

    /// Records that a range is no longer kept for graphs. A launch that still accesses it is
    /// checked against the current owner. Applies to any part of a range that is kept.
    fn let_go_by_graphs(&self, range: DeviceRange);

    /// Records that the host accesses memory that devices can reach.
    fn host(&self, address: u64, bytes: u64, access: HostAccess);
}
