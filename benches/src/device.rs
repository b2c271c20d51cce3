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
//! | `state` | the state of the benchmark |
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
mod state;
mod threads;
pub(super) mod work;

use crate::console::{
    place::{DeviceChoice, Place},
    progress::ProgressLine,
};
use crate::{
    lap::Pace,
    report::BenchReport,
    row::size,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, measure},
};
use state::DeviceBench;

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

/// Measures the selected rows, with `driver` also those of the driver's own calls. Takes most of a
/// minute.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(
    device: DeviceChoice,
    driver: bool,
    rows: &RowSelection,
) -> Result<BenchReport, BenchError> {
    let mut progress = ProgressLine::on_terminal();
    progress.phase("opening the device");
    let place = Place::choose(device).map_err(BenchError::Place)?;
    if driver && matches!(place, Place::Sim(_)) {
        return Err(BenchError::NoDriver);
    }
    let pace = Pace::of(rows.quick);
    let mut bench = DeviceBench::new(&place, pace, rows.only.as_deref(), driver)?;
    bench.measure(&mut progress)?;
    bench.sheet.report("device", &place, rows.quick)
}

impl DeviceBench<'_> {
    fn measure(&mut self, progress: &mut ProgressLine) -> Result<(), BenchError> {
        measure(self, |bench| &mut bench.sheet, &groups(), progress)
    }
}

#[cfg(test)]
mod tests;
