//! The state of the benchmark.

use crate::console::place::{Place, Session};
use crate::{
    host,
    lap::Pace,
    sheet::{BenchError, Sheet},
};
use aquifer_core::{Budget, DeviceId, MemoryError, Result};
use aquifer_driver::Driver;
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use std::sync::Arc;

/// The state of a benchmark.
pub(super) struct PinnedBench<'a> {
    pub(super) place: &'a Place,
    pub(super) pace: Pace,
    pub(super) host: Host,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) device: DeviceId,
    /// The maximum bytes of a row: half of what this machine has left.
    pub(super) room: u64,
    pub(super) sheet: Sheet,
}

impl<'a> PinnedBench<'a> {
    pub(super) fn new(
        place: &'a Place,
        pace: Pace,
        only: Option<&str>,
    ) -> std::result::Result<Self, BenchError> {
        let Session { driver, device, .. } = place.begin();
        let topology = Topology::read().map_err(|e| BenchError::Device(MemoryError::from(e)))?;
        let host = Host::new(topology, Kernel::new());
        let host = match place {
            Place::Sim(_) => host,
            Place::Cuda { .. } => host.with_driver(driver.clone(), device),
        };
        Ok(Self {
            place,
            pace,
            host,
            driver,
            device,
            room: host::available().unwrap_or(0) / 2,
            sheet: Sheet::new(only),
        })
    }

    /// Returns whether a GPU's driver can be measured.
    pub(super) fn has_gpu(&self) -> bool {
        matches!(self.place, Place::Cuda { .. })
    }

    /// Creates a pool with this many bytes ready.
    pub(super) fn pool(&self, bytes: u64) -> Result<PinnedPool> {
        let pool =
            PinnedPool::new(&self.host, &Budget::unlimited("bench"), PinnedConfig::default())?;
        pool.warm(bytes as usize)?;
        Ok(pool)
    }

    /// Returns whether there is memory for a row. Otherwise notes why the row is missing.
    pub(super) fn has_room(&mut self, name: &str, bytes: u64) -> bool {
        self.sheet.has_room(name, bytes, self.room)
    }
}
