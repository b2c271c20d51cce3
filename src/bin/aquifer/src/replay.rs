//! `aquifer replay`: replays a recorded trace.
//!
//! | module | contents |
//! |---|---|
//! | `engine` | what each row of a trace means |
//! | `uses` | uses by other streams that outlive the free of their block |
//! | `work` | the work on blocks: declared to the simulator's oracle, or none |
//! | `stamp` | the same on real bytes |
//! | `tally` | the cost of a round in calls and waits |
//! | `bench` | one pass over a trace: checked, timed, or counted |
//! | `record` | one pass for a memory snapshot |
//! | `fit` | the search for the smallest budget |
//! | `report`, `screen` | the results as JSON and as text |
//!
//! # How time is measured
//! A separate pass plays the trace with only the allocator's calls: no write, no read, no oracle.
//! It is timed as a whole, by two clock reads, and divided by the number of allocations and frees.
//! A clock read per call would cost as much as the call. The result therefore includes the replay's
//! own loop (a few nanoseconds per operation) and uses across streams, which are not counted as
//! operations. On the simulator it also includes the simulator's work in each driver call. That
//! work does not reflect the cost of a real driver.
//!
//! # How calls and waits are counted
//! A third pass plays as many rounds as are timed. It counts the driver calls and the waits of each
//! round. On the simulator the streams perform the reads and writes of the checked pass. On a GPU
//! they have no work, so waits are at their minimum. A round ends when its last blocks are freed
//! and its last uses are over.
//!
//! # How far the simulated device lags
//! In the checked and the counted pass it runs `--lag` operations behind: when an operation begins,
//! all work is done but that of so many operations before it. The last use of a free block is then
//! often still pending and its reuse has to be ordered, as in a program whose speed the GPU limits.
//! Besides that the device runs only what the host waits for.

mod bench;
mod engine;
mod fit;
mod record;
mod report;
mod screen;
mod stamp;
mod tally;
mod uses;
mod work;

pub(crate) use report::ReplayReport;

use crate::{
    cli::{self, Allocator, DEFAULT_LAG},
    error::CommandError,
    output::{is_same_file, write_whole},
};
use aquifer_benches::console::{place::Place, progress::ProgressLine};
use aquifer_formats::plan::{Plan, PlanFileError};
use aquifer_formats::trace::Trace;
use bench::{Checked, ReplayBench};
use engine::Order;
use report::Search;
use std::{fs::File, io::BufReader, num::NonZeroU32, path::Path, sync::Arc};

/// The seed of the changes to a trace, so that all replays change the same allocations.
const CHANGES: u64 = 7;

/// Parses the rows of a trace in a test.
#[cfg(test)]
fn trace_of(rows: &str) -> Trace {
    let text = format!("t_us,op,id,bytes,stream\n{rows}");
    Trace::from_reader(std::io::Cursor::new(text), None).unwrap_or_else(|e| panic!("{e}"))
}

/// Runs the `replay` command.
///
/// # Errors
/// [`CommandError`]. Every error but a failure to write the snapshot is returned before the trace
/// is played.
pub(crate) fn run(args: &cli::Replay) -> Result<ReplayReport, CommandError> {
    let mut outputs = [&args.snapshot, &args.save_trace].into_iter().flatten();
    if let Some(path) = outputs.find(|path| is_same_file(path, &args.trace)) {
        return Err(CommandError::OutputIsInput(path.clone()));
    }
    let mut progress = ProgressLine::on_terminal();
    progress.phase("reading the trace");
    let trace =
        Trace::read(&args.trace, args.device_index).map_err(CommandError::in_trace(&args.trace))?;
    let trace = match args.streams.and_then(NonZeroU32::new) {
        Some(streams) => trace.split(streams),
        None => trace,
    };
    let trace = match args.change {
        Some(per_cent) => trace.changed(per_cent, CHANGES),
        None => trace,
    };
    let plan = args.plan.as_deref().map(read_plan).transpose()?;
    for (flag, is_given) in [("--plan", plan.is_some()), ("--slack", args.slack.is_some())] {
        if is_given && args.allocator != Allocator::Pool {
            return Err(CommandError::NeedsPool(flag));
        }
    }
    let place = Place::choose(args.device);
    if args.lag.is_some() && !matches!(place, Ok(Place::Sim(_))) {
        return Err(CommandError::NeedsSim);
    }
    let place = place.map_err(CommandError::Place)?;
    if let Some(path) = &args.save_trace {
        write_whole(path, |out| trace.write_to(out))
            .map_err(|e| CommandError::Output(path.clone(), e))?;
    }
    let budget = args.budget.map(|amount| amount.bytes(trace.peak_live));
    if let Some(asked) = budget.filter(|&asked| asked > place.memory()) {
        return Err(CommandError::Budget { asked, memory: place.memory(), title: place.title() });
    }
    let order = if args.ignore_order { Order::Ignored } else { Order::Told };
    let (plan, allocator, slack) = (plan.as_ref(), args.allocator, args.slack);
    let lag = args.lag.unwrap_or(DEFAULT_LAG);
    let bench = ReplayBench { trace: &trace, place: &place, allocator, order, plan, slack, lag };
    progress.phase("checking:");
    let checked = bench.check(budget, &mut progress).map_err(CommandError::Setup)?;
    let mut report = describe(args, &bench, budget, checked);
    if report.failure.is_none() {
        match bench.measure(budget, args.repeat, &mut progress).map_err(CommandError::Setup)? {
            Ok((timing, rounds)) => (report.timing, report.rounds) = (Some(timing), rounds),
            Err(failure) => report.failure = Some(failure),
        }
    }
    if let Some(path) = &args.snapshot {
        progress.phase("recording:");
        let snapshot = bench.record(budget, &mut progress).map_err(CommandError::Setup)?;
        snapshot.save(path).map_err(|e| CommandError::Output(path.clone(), e))?;
    }
    if args.fit {
        let found = fit::search(&bench, &report, args.repeat, &mut progress)
            .map_err(CommandError::Setup)?;
        report.violations.count += found.violations.count;
        report.violations.first.extend(found.violations.first);
        report.fit = Some(found.fit.map_or(Search::Nothing, Search::Found));
    }
    Ok(report)
}

fn read_plan(path: &Path) -> Result<Arc<Plan>, CommandError> {
    let error = |error| CommandError::Plan { path: path.to_owned(), error };
    let file = File::open(path).map_err(|e| error(PlanFileError::Io(e)))?;
    Plan::read_from(BufReader::new(file)).map(Arc::new).map_err(error)
}

fn describe(
    args: &cli::Replay,
    bench: &ReplayBench<'_>,
    budget: Option<u64>,
    checked: Checked,
) -> ReplayReport {
    let ReplayBench { trace, place, allocator, order, lag, .. } = *bench;
    ReplayReport {
        trace: args.trace.display().to_string(),
        device: place.name(),
        device_title: place.title(),
        lag: matches!(place, Place::Sim(_)).then_some(lag),
        allocator,
        budget,
        ignore_order: order == Order::Ignored,
        operations: trace.operations(),
        allocations: trace.allocations(),
        frees: trace.frees,
        streams: trace.streams,
        split: args.streams,
        plan: checked.plan,
        change: args.change,
        peak_live: trace.peak_live,
        peak_active: trace.peak_active(),
        live_at_end: trace.live_at_end,
        peak_physical: checked.peak_physical,
        failure: checked.failure,
        timing: None,
        rounds: Vec::new(),
        driver_calls: checked.driver_calls,
        accesses_checked: checked.verdict.checked,
        cross_stream_uses: checked.crossings,
        early_completions: checked.early,
        violations: checked.verdict.violations,
        leaked: checked.leaked,
        fit: None,
        of_device: trace.device,
        notes: trace.notes.clone(),
    }
}
