//! `aquifer bench pinned`: pools of pinned host memory, compared with the host's `malloc` and the
//! driver's allocations.
//!
//! | module | rows |
//! |---|---|
//! | `pool` | pairs, random sizes and their waste, on up to 16 threads |
//! | `driver` | the driver's allocations, on a GPU |
//! | `source` | the allocators |
//! | `regions` | creation of whole regions, by page size and number of workers |
//! | `state` | the state of the benchmark |
//!
//! Memory is allocated as for a program near the device. Without a GPU it is pageable. The pool is
//! the same.

mod driver;
mod pool;
mod regions;
mod source;
mod state;

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
use state::PinnedBench;

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
/// [`BenchError`], before anything is measured.
pub(crate) fn run(device: DeviceChoice, rows: &RowSelection) -> Result<BenchReport, BenchError> {
    let mut progress = ProgressLine::on_terminal();
    progress.phase("opening the device");
    let place = Place::choose(device).map_err(BenchError::Place)?;
    let pace = Pace::of(rows.quick);
    let mut bench = PinnedBench::new(&place, pace, rows.only.as_deref())?;
    bench.measure(&mut progress)?;
    bench.sheet.report("pinned", &place, rows.quick)
}

impl PinnedBench<'_> {
    fn measure(&mut self, progress: &mut ProgressLine) -> Result<(), BenchError> {
        measure(self, |bench| &mut bench.sheet, &groups(), progress)
    }
}
