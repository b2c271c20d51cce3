//! The state of the benchmark.

use super::source::AsyncPool;
use crate::console::place::{Place, Session};
use crate::{
    lap::Pace,
    sheet::{BenchError, Sheet},
};
use aquifer_core::MemoryError;
use std::sync::Arc;

/// The state of a benchmark.
pub(super) struct DeviceBench<'a> {
    pub(super) place: &'a Place,
    pub(super) pace: Pace,
    /// Whether the driver's calls are measured too.
    pub(super) driver: bool,
    /// The maximum bytes of a pool: its default.
    pub(super) room: u64,
    pub(super) sheet: Sheet,
}

impl<'a> DeviceBench<'a> {
    pub(super) fn new(
        place: &'a Place,
        pace: Pace,
        only: Option<&str>,
        driver: bool,
    ) -> Result<Self, BenchError> {
        let session = place.begin();
        let lost = |e| BenchError::Device(MemoryError::driver(session.device, e));
        let free = session.driver.memory_info(session.device).map_err(lost)?.free;
        Ok(Self { place, pace, driver, room: free / 5 * 4, sheet: Sheet::new(only) })
    }

    /// Opens the device with the simulator's oracle inactive.
    pub(super) fn session(&self) -> Session {
        self.place.begin()
    }

    /// Returns the driver's allocator if it is a peer: on a GPU that has it.
    pub(super) fn peer(&self, session: &Session) -> aquifer_core::Result<Option<Arc<AsyncPool>>> {
        let there = matches!(self.place, Place::Cuda { .. }) && self.place.info().async_pools;
        if there { AsyncPool::open(session).map(Some) } else { Ok(None) }
    }

    /// Returns whether there is memory for a row, for the pool and a peer. Otherwise notes why the
    /// row is missing.
    pub(super) fn has_room(&mut self, name: &str, bytes: u64, peer: bool) -> bool {
        self.sheet.has_room(name, if peer { bytes * 2 } else { bytes }, self.room)
    }
}
