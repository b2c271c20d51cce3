//! The benchmarks of aquifer: the cost of calls, together with their peers in the same run. Part of
//! the program `aquifer`, so no interface here is promised to stay.
//!
//! [`run`] measures the selected rows of a [`Benchmark`] and returns a [`BenchReport`], which is
//! written as a page or as JSON. [`load_file`] does the same for loading one file to a device. The
//! command line has a flag for each setting: `aquifer bench …` and `aquifer stage FILE`.
//!
//! An absolute time depends on the machine, its clock and its other load. Contenders therefore take
//! turns, lap by lap, within one run. The ratio of their times is what is comparable across
//! machines.
//!
//! | module | contents |
//! |---|---|
//! | `arena` | arenas |
//! | `budget` | budgets |
//! | `device` | device memory |
//! | `global` | the overhead of the global allocator over those it wraps |
//! | `pinned` | pinned memory |
//! | `placement` | choosing a device |
//! | `stage` | staging |
//! | `file` | loading one file to the device |
//! | [`console`] | what the commands of the program share with this: the device, the progress line, how results are written |
//! | `bed` | a device with a stager, and the driver's own copies |
//! | `lap` | timing |
//! | `row` | a result and that of its peer |
//! | `sheet` | the results so far, and which rows are selected |
//! | `host` | the machine and the date |
//! | `report` | the page, and JSON |
//! | `settings` | what to run, and with which settings |
//!
//! Two programs beside this library measure by themselves: `hot_path.rs` the hot path of the device
//! pool, and `fragmented.rs` its slow path.
//!
//! Some peers are built only with the feature `peers`: mimalloc and jemalloc, which are C code, and
//! bump-scope, `cap`, `stats_alloc` and `tracking-allocator`. Without it a report that lacks them
//! names the command that builds them.

mod arena;
mod bed;
mod budget;
pub mod console;
mod device;
mod file;
mod global;
mod host;
mod lap;
mod pinned;
mod placement;
mod report;
mod row;
mod settings;
mod sheet;
mod stage;

pub use file::{LoadError, LoadReport, load_file};
pub use report::BenchReport;
pub use settings::{Benchmark, RowSelection, StageOptions};
pub use sheet::BenchError;

/// Measures the selected rows of a benchmark. Its progress is displayed on stderr if that is a
/// terminal.
///
/// ```
/// use aquifer_benches::{Benchmark, RowSelection, run};
///
/// let rows = RowSelection { only: Some("4 levels".to_owned()), quick: true };
/// let report = run(&Benchmark::Budget, &rows)?;
/// println!("{}", report.to_screen());
/// # Ok::<(), aquifer_benches::BenchError>(())
/// ```
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub fn run(benchmark: &Benchmark, rows: &RowSelection) -> Result<BenchReport, BenchError> {
    match benchmark {
        Benchmark::Arena { device } => arena::run(*device, rows),
        Benchmark::Budget => budget::run(rows),
        Benchmark::Device { device, driver } => device::run(*device, *driver, rows),
        Benchmark::Global => global::run(rows),
        Benchmark::Pinned { device } => pinned::run(*device, rows),
        Benchmark::Placement => placement::run(rows),
        Benchmark::Stage(options) => stage::run(options, rows),
    }
}
