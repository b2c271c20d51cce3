//! `aquifer bench pinned`: pools of pinned host memory beside the host's `malloc` and the driver's own allocations.
//!
//! | module | rows |
//! |---|---|
//! | `pool` | pairs, random sizes and what they waste, on up to 16 threads |
//! | `driver` | the driver's own allocations, on a GPU |
//! | `source` | who serves |
//! | `regions` | whole regions made ready, by pages and workers |
//!
//! Memory is what a program near the device would get. Without a GPU it is pageable, which changes nothing in the pool.

mod driver;
mod pool;
mod regions;
mod source;

use super::{
    device::{Mistake, size},
    host,
    lap::{Failed, Pace},
    report::{Failure, LeftOut, Report},
    row::{Peer, Row, Unit},
};
use crate::{
    cli,
    place::{Place, Session},
    progress::Progress,
};
use aquifer_core::{Budget, Bytes, DeviceId, MemoryError, Result};
use aquifer_driver::Driver;
use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
use std::sync::Arc;

/// Rows that are measured together.
struct Group {
    names: fn(&Bench<'_>) -> Vec<String>,
    measure: fn(&mut Bench<'_>) -> Result<()>,
}

/// In the order in which they are measured and printed.
const GROUPS: [Group; 5] = [
    Group { names: pool::pair_names, measure: pool::pairs },
    Group { names: driver::names, measure: driver::measure },
    Group { names: pool::random_names, measure: pool::random },
    Group { names: pool::thread_names, measure: pool::threads },
    Group { names: regions::names, measure: regions::measure },
];

/// Measures what was asked for. Takes most of a minute.
///
/// # Errors
/// [`Mistake`], before anything is measured.
pub(crate) fn run(args: &cli::BenchPinned) -> std::result::Result<Report, Mistake> {
    let place = Place::choose(args.device).map_err(Mistake::Place)?;
    let pace = if args.quick { Pace::QUICK } else { Pace::FULL };
    let mut bench = Bench::new(&place, pace, args.only.as_deref())?;
    bench.measure(&mut Progress::on_terminal())?;
    let Bench { rows, failures, left_out, version, .. } = bench;
    let of_driver = format!("CUDA {}.{}", version / 1000, version % 1000 / 10);
    Ok(Report {
        what: "pinned",
        device: place.name(),
        device_title: place.title(),
        driver: match place {
            Place::Sim(_) => format!("simulated, {of_driver}"),
            Place::Cuda { .. } => of_driver,
        },
        processor: host::processor(),
        processors: host::processors(),
        date: host::date(),
        quick: args.quick,
        rows,
        failures,
        left_out,
    })
}

/// A bench under way.
struct Bench<'a> {
    place: &'a Place,
    pace: Pace,
    /// What a row's name must contain, in lower case.
    only: Option<String>,
    host: Host,
    driver: Arc<dyn Driver>,
    device: DeviceId,
    /// The most bytes that a row may take: half of what this machine has left.
    room: u64,
    /// Of the driver's interface.
    version: u32,
    rows: Vec<Row>,
    failures: Vec<Failure>,
    left_out: Vec<LeftOut>,
}

impl<'a> Bench<'a> {
    fn new(place: &'a Place, pace: Pace, only: Option<&str>) -> std::result::Result<Self, Mistake> {
        let Session { driver, device, .. } = place.begin(false);
        let version = driver.driver_version().map_err(|e| Mistake::Device(MemoryError::driver(device, e)))?;
        let topology = Topology::read().map_err(|e| Mistake::Device(MemoryError::from(e)))?;
        let host = Host::new(topology, Kernel::new());
        let host = match place {
            Place::Sim(_) => host,
            Place::Cuda { .. } => host.with_driver(driver.clone(), device),
        };
        Ok(Self {
            place,
            pace,
            only: only.map(str::to_lowercase),
            host,
            driver,
            device,
            room: host::available() / 2,
            version,
            rows: Vec::new(),
            failures: Vec::new(),
            left_out: Vec::new(),
        })
    }

    fn measure(&mut self, progress: &mut Progress) -> std::result::Result<(), Mistake> {
        let names: Vec<_> = GROUPS.iter().map(|group| (group.names)(self)).collect();
        let all = || names.iter().flatten();
        if !all().any(|name| self.wants(name)) {
            // One of each kind.
            let names = names.iter().filter_map(|names| names.last().cloned()).collect();
            return Err(Mistake::NoRow { pattern: self.only.clone().unwrap_or_default(), names });
        }
        progress.phase("measuring:");
        let count = all().count() as u64;
        let mut done = 0;
        for (group, names) in GROUPS.iter().zip(&names) {
            progress.at(done, count);
            done += names.len() as u64;
            if !names.iter().any(|name| self.wants(name)) {
                continue;
            }
            let before = self.rows.len();
            if let Err(error) = (group.measure)(self) {
                // What is missing now is missing because of it.
                let measured = &self.rows[before..];
                let missing = names
                    .iter()
                    .filter(|name| self.wants(name) && !measured.iter().any(|row| row.name == **name));
                let row = missing.cloned().collect::<Vec<_>>().join("; ");
                self.failures.push(Failure { row, count: 1, said: error.to_string() });
            }
        }
        Ok(())
    }

    /// Whether a row is to be measured.
    fn wants(&self, name: &str) -> bool {
        self.only.as_ref().is_none_or(|only| name.to_lowercase().contains(only))
    }

    /// Whether a GPU's driver is there to be measured.
    fn has_gpu(&self) -> bool {
        matches!(self.place, Place::Cuda { .. })
    }

    /// A pool that has so many bytes ready.
    fn pool(&self, bytes: u64) -> Result<PinnedPool> {
        let pool = PinnedPool::new(&self.host, &Budget::unlimited("bench"), PinnedConfig::default())?;
        pool.warm(bytes as usize)?;
        Ok(pool)
    }

    /// Whether there is memory for a row; if not, the row says why it is not there.
    fn has_room(&mut self, name: &str, bytes: u64) -> bool {
        if bytes > self.room && self.wants(name) {
            let why = format!("needs {} of {}", Bytes(bytes), Bytes(self.room));
            self.left_out.push(LeftOut { row: name.to_owned(), why });
        }
        bytes <= self.room
    }

    /// Notes what was refused while a row was measured.
    fn note(&mut self, name: &str, failed: Failed) {
        if failed.count > 0 {
            let said = failed.first.unwrap_or_default();
            self.failures.push(Failure { row: name.to_owned(), count: failed.count, said });
        }
    }

    /// A row, if it is wanted.
    fn add(&mut self, name: &str, unit: Unit, ns: f64, peer: Option<(&str, f64)>) {
        if self.wants(name) {
            let peer = peer.map(|(name, ns)| Peer { name: name.to_owned(), ns });
            self.rows.push(Row { name: name.to_owned(), ns, unit, peer });
        }
    }
}
