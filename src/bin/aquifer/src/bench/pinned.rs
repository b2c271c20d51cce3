//! `aquifer bench pinned`: pools of pinned host memory, compared with the host's `malloc` and the
//! driver's allocations.
//!
//! | module | rows |
//! |---|---|
//! | `pool` | pairs, random sizes and their waste, on up to 16 threads |
//! | `driver` | the driver's allocations, on a GPU |
//! | `source` | the allocators |
//! | `regions` | creation of whole regions, by page size and number of workers |
//!
//! Memory is allocated as for a program near the device. Without a GPU it is pageable. The pool is
//! the same.

mod driver;
mod pool;
mod regions;
mod source;

use super::{
    host,
    lap::Pace,
    report::BenchReport,
    row::size,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use crate::{
    cli,
    place::{Place, Session},
    progress::Progress,
};
use aquifer_core::{Budget, DeviceId, MemoryError, Result};
use aquifer_driver::Driver;
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use std::sync::Arc;

/// The groups, in the order of measurement and output.
fn groups<'a>() -> [RowGroup<PinnedBench<'a>>; 5] {
    [
        RowGroup { names: pool::pair_names, measure: pool::pairs },
        RowGroup { names: driver::names, measure: driver::measure },
        RowGroup { names: pool::random_names, measure: pool::random },
        RowGroup { names: pool::thread_names, measure: pool::threads },
        RowGroup { names: regions::names, measure: regions::measure },
    ]
}

/// Measures the selected rows. Takes most of a minute.
///
/// # Errors
/// [`Mistake`], before anything is measured.
pub(crate) fn run(args: &cli::BenchPinned) -> std::result::Result<BenchReport, BenchError> {
    let place = Place::choose(args.device).map_err(BenchError::Place)?;
    let pace = Pace::of(args.rows.quick);
    let mut bench = PinnedBench::new(&place, pace, args.rows.only.as_deref())?;
    bench.measure(&mut Progress::on_terminal())?;
    let PinnedBench { sheet, version, .. } = bench;
    Ok(sheet.report("pinned", &place, version, args.rows.quick))
}

/// The state of a benchmark.
struct PinnedBench<'a> {
    place: &'a Place,
    pace: Pace,
    host: Host,
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// The maximum bytes of a row: half of what this machine has left.
    room: u64,
    /// Version of the driver interface.
    version: u32,
    sheet: Sheet,
}

impl<'a> PinnedBench<'a> {
    fn new(
        place: &'a Place,
        pace: Pace,
        only: Option<&str>,
    ) -> std::result::Result<Self, BenchError> {
        let Session { driver, device, .. } = place.begin(false);
        let version = driver
            .driver_version()
            .map_err(|e| BenchError::Device(MemoryError::driver(device, e)))?;
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
            version,
            sheet: Sheet::new(only),
        })
    }

    fn measure(&mut self, progress: &mut Progress) -> std::result::Result<(), BenchError> {
        measure(self, |bench| &mut bench.sheet, &groups(), progress)
    }

    /// Returns whether a GPU's driver can be measured.
    fn has_gpu(&self) -> bool {
        matches!(self.place, Place::Cuda { .. })
    }

    /// Creates a pool with this many bytes ready.
    fn pool(&self, bytes: u64) -> Result<PinnedPool> {
        let pool =
            PinnedPool::new(&self.host, &Budget::unlimited("bench"), PinnedConfig::default())?;
        pool.warm(bytes as usize)?;
        Ok(pool)
    }

    /// Returns whether there is memory for a row. Otherwise notes why the row is missing.
    fn has_room(&mut self, name: &str, bytes: u64) -> bool {
        self.sheet.has_room(name, bytes, self.room)
    }
}
