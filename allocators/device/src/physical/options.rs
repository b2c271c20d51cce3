//! The options and the result of an attempt to place a block.

use super::handle::{Handle, HandleError};
use crate::sharing_policy::Granularity;
use aquifer_core::{DriverError, Reservation};
use std::sync::Mutex;

/// Which free memory of other caches may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Readiness {
    /// Memory whose last work the host has seen done.
    Completed,
    /// Also memory that is still in use: the receiving stream waits for it on the device.
    MayWait,
}

/// The options of an attempt to place a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PlaceOptions {
    pub(crate) readiness: Readiness,
    pub(crate) granularity: Granularity,
    /// Whether new memory may be taken from the driver.
    pub(crate) grow: bool,
    /// Whether handles may be taken from under free memory elsewhere.
    pub(crate) move_handles: bool,
    /// Whether all such handles are taken before new memory. Otherwise they are taken only where
    /// new memory is refused, or would exceed [`PlaceOutcome::max_growth`].
    pub(crate) moves_first: bool,
    /// Whether new memory is limited to [`PlaceOutcome::max_growth`].
    pub(crate) bounded: bool,
    /// Whether the block goes to unclaimed addresses, whatever is free elsewhere. Where handles may
    /// move, the last one may be longer than the block needs: one that is still in use cannot be
    /// replaced by a shorter one.
    pub(crate) apart: bool,
}

/// The result of an attempt to place a block.
#[derive(Default, Debug)]
pub(crate) struct PlaceOutcome<'a> {
    /// A reservation that new memory draws from before it charges the budget.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
    /// The most bytes that may be taken from the driver, if they are limited.
    pub(crate) max_growth: Option<u64>,
    /// Bytes taken from the driver.
    pub(crate) grown: u64,
    /// Bytes taken over from other caches.
    pub(crate) adopted: u64,
    /// Handles that were taken from under free memory, to be mapped elsewhere or to be released
    /// and recreated in another size. [`PoolStats::moves`](aquifer_core::PoolStats::moves) adds
    /// them up.
    pub(crate) moves: u64,
    /// The bytes of these handles.
    pub(crate) moved: u64,
    /// Waits queued on the device.
    pub(crate) waits: u64,
    /// Moves that this call has begun, as
    /// [`Mapped::move_counts`](super::mapped::Mapped::move_counts) counts them.
    pub(crate) own_moves: u64,
    /// Why no more could be taken from the driver.
    pub(crate) refused: Option<HandleError>,
    /// The driver's first refusal to unmap a handle from under free memory.
    pub(crate) unreleased: Option<DriverError>,
}

impl PlaceOutcome<'_> {
    /// Counts a handle that was taken from under free memory.
    pub(crate) fn count_move(&mut self, handle: &Handle) {
        self.moves += 1;
        self.moved += handle.bytes();
    }
}
