//! `aquifer bench device`: the caching pool, compared with the driver's allocator and the host's
//! `malloc`.
//!
//! | module | rows |
//! |---|---|
//! | `cached` | pairs, batches and random sizes on one thread |
//! | `threads` | the same on up to 16 threads, a stream each |
//! | `holes` | pairs in a cache with many free holes |
//! | `growth` | the first allocation, growing, trimming, moving handles |
//! | `calls` | the driver's own calls, with `--driver` |
//!
//! | module | contents |
//! |---|---|
//! | `work` | workloads, generated before they are timed |
//! | `source` | the allocators |
//! | `lane` | the threads |
//!
//! On a GPU the driver's stream-ordered allocator does the same work in turn with the pool. Its
//! release threshold is set to keep everything. On a simulated device the peer is the host's
//! `malloc`, since the time of a simulated driver call means nothing.

mod cached;
mod calls;
mod growth;
mod holes;
pub(super) mod lane;
pub(super) mod source;
mod threads;
pub(super) mod work;

use super::{
    lap::{Contender, Outcome, Pace, contest},
    report::BenchReport,
    row::size,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use crate::{
    cli,
    place::{Place, Session},
    progress::Progress,
};
use aquifer_core::MemoryError;
use source::AsyncPool;
use std::sync::Arc;

/// The groups, in the order of measurement and output. The holes are the last group that holds
/// memory, since they need the most.
fn groups<'a>() -> [RowGroup<DeviceBench<'a>>; 7] {
    [
        RowGroup { names: cached::pair_names, measure: cached::pairs },
        RowGroup { names: cached::batch_names, measure: cached::batches },
        RowGroup { names: cached::random_names, measure: cached::random },
        RowGroup { names: threads::names, measure: threads::measure },
        RowGroup { names: growth::names, measure: growth::measure },
        RowGroup { names: holes::names, measure: holes::measure },
        RowGroup { names: calls::names, measure: calls::measure },
    ]
}

/// Measures the selected rows. Takes most of a minute.
///
/// # Errors
/// [`Mistake`], before anything is measured.
pub(crate) fn run(args: &cli::BenchDevice) -> Result<BenchReport, BenchError> {
    let place = Place::choose(args.device).map_err(BenchError::Place)?;
    if args.driver && matches!(place, Place::Sim(_)) {
        return Err(BenchError::NoDriver);
    }
    let pace = Pace::of(args.rows.quick);
    let mut bench = DeviceBench::new(&place, pace, args.rows.only.as_deref(), args.driver)?;
    bench.measure(&mut Progress::on_terminal())?;
    let DeviceBench { sheet, version, .. } = bench;
    Ok(sheet.report("device", &place, version, args.rows.quick))
}

/// The state of a benchmark.
struct DeviceBench<'a> {
    place: &'a Place,
    pace: Pace,
    /// Whether the driver's calls are measured too.
    driver: bool,
    /// The maximum bytes of a pool: its default.
    room: u64,
    /// Version of the driver interface.
    version: u32,
    /// The number of devices.
    devices: u32,
    sheet: Sheet,
}

impl<'a> DeviceBench<'a> {
    fn new(
        place: &'a Place,
        pace: Pace,
        only: Option<&str>,
        driver: bool,
    ) -> Result<Self, BenchError> {
        let session = place.begin(false);
        let lost = |e| BenchError::Device(MemoryError::driver(session.device, e));
        let free = session.driver.memory_info(session.device).map_err(lost)?.free;
        Ok(Self {
            place,
            pace,
            driver,
            room: free / 5 * 4,
            version: session.driver.driver_version().map_err(lost)?,
            devices: session.driver.device_count().map_err(lost)?,
            sheet: Sheet::new(only),
        })
    }

    fn measure(&mut self, progress: &mut Progress) -> Result<(), BenchError> {
        measure(self, |bench| &mut bench.sheet, &groups(), progress)
    }

    /// Opens the device with the simulator's oracle inactive.
    fn session(&self) -> Session {
        self.place.begin(false)
    }

    /// Returns the driver's allocator if it is a peer: on a GPU that has it.
    fn peer(&self, session: &Session) -> aquifer_core::Result<Option<Arc<AsyncPool>>> {
        let there = matches!(self.place, Place::Cuda { .. }) && self.place.info().async_pools;
        if there { AsyncPool::open(session).map(Some) } else { Ok(None) }
    }

    /// Returns whether there is memory for a row, for the pool and a peer. Otherwise notes why the
    /// row is missing.
    fn has_room(&mut self, name: &str, bytes: u64, peer: bool) -> bool {
        self.sheet.has_room(name, if peer { bytes * 2 } else { bytes }, self.room)
    }

    /// Measures the pool and its peer, if any, and returns both outcomes. Notes failed calls.
    fn compete<'c>(
        &mut self,
        pace: Pace,
        name: &str,
        pool: Contender<'c>,
        peer: Option<Contender<'c>>,
    ) -> (Outcome, Option<Outcome>) {
        let contenders = std::iter::once(pool).chain(peer).collect();
        let mut outcomes = contest(pace, contenders).into_iter();
        let mut next = |who: &str| {
            let mut outcome = outcomes.next()?;
            self.sheet.note(&format!("{name}{who}"), std::mem::take(&mut outcome.failed));
            Some(outcome)
        };
        (next("").unwrap_or_default(), next(" (peer)"))
    }
}

#[cfg(test)]
mod tests;
