//! What a search for a place may use, the window that it claims, and what it did.

use super::{TransferGuard, free_ranges::RangePiece};
use crate::{
    backing::{
        handle::{Handle, HandleError},
        window::Window,
    },
    sharing_policy::steps::PlaceOptions,
    stream_cache::StreamCache,
};
use aquifer_core::{DriverError, Reservation, scratch::List};
use std::sync::Mutex;

/// The memory that a search may use.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Supply<'a> {
    /// The caches whose free memory may be taken.
    pub(crate) donors: &'a [&'static StreamCache],
    pub(crate) options: PlaceOptions,
    /// A reservation that new memory draws from before it charges the budget.
    pub(crate) reserved: Option<&'a Mutex<Reservation>>,
    /// The most bytes that may be taken from the driver.
    pub(crate) max_growth: u64,
}

/// A window whose slots are claimed and whose backed parts are taken out of their caches.
pub(super) struct Claim<'a> {
    pub(super) window: Window<'a>,
    pub(super) pieces: List<'a, RangePiece>,
    /// The maximum number of slots that one handle may cover.
    pub(super) largest: u64,
    /// The slots at the end of the window that need no handle.
    pub(super) overhang: u64,
    /// Lasts from before anything is taken until all of it is in some list again.
    pub(super) _transfer: TransferGuard<'a>,
}

/// What a search has done.
#[derive(Default, Debug)]
pub(crate) struct PlaceOutcome {
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
    /// [`MappedMemory::transfer_counts`](super::MappedMemory::transfer_counts) counts them.
    pub(crate) own_transfers: u64,
    /// Why no more could be taken from the driver.
    pub(crate) refused: Option<HandleError>,
    /// The driver's first refusal to unmap a handle from under free memory.
    pub(crate) unreleased: Option<DriverError>,
}

impl PlaceOutcome {
    /// Counts a handle that was taken from under free memory.
    pub(crate) fn count_move(&mut self, handle: &Handle) {
        self.moves += 1;
        self.moved += handle.bytes();
    }
}
