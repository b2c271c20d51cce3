//! `aquifer plot`, and `--plot` of `aquifer bench`: pictures of runs.

use crate::cli;
use aquifer_benches::{BenchReport, BenchRun, PictureFile, PlotError, picture};
use aquifer_console::{figures::Of, foreign};

/// Draws the runs in files, and returns what was drawn.
///
/// # Errors
/// [`PlotError`]. Nothing is written then.
pub(crate) fn run(args: &cli::Plot) -> Result<String, PlotError> {
    let file = PictureFile::at(&args.output)?;
    let mut runs: Vec<_> =
        args.runs.iter().map(|path| BenchRun::read(path)).collect::<Result<_, _>>()?;
    if let Some(only) = &args.only {
        runs.iter_mut().for_each(|run| run.select(only));
        runs.retain(|run| run.row_count() > 0);
    }
    file.write(&picture(&runs)?)?;
    let rows = runs.iter().map(BenchRun::row_count).sum::<usize>() as u64;
    Ok(format!(
        "{}: {} of {}",
        foreign::path(&args.output),
        Of(rows, "row"),
        Of(runs.len() as u64, "run")
    ))
}

/// Draws a report into a file. The picture is that of the report's JSON.
///
/// # Errors
/// [`PlotError`].
pub(crate) fn draw(report: &BenchReport, file: &PictureFile) -> Result<(), PlotError> {
    file.write(&picture(&[BenchRun::parse(&report.to_json())?])?)
}
