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
mod state;
mod threads;
pub(super) mod work;

use super::{
    lap::Pace,
    report::BenchReport,
    row::size,
    sheet::{BenchError, RowGroup, measure},
};
use crate::{cli, place::Place, progress::Progress};
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

impl DeviceBench<'_> {
    fn measure(&mut self, progress: &mut Progress) -> Result<(), BenchError> {
        measure(self, |bench| &mut bench.sheet, &groups(), progress)
    }
}

#[cfg(test)]
mod tests;
