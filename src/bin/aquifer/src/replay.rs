//! `aquifer replay`: lives through a recorded trace again.
//!
//! | module | holds |
//! |---|---|
//! | `engine` | what each row of a trace means |
//! | `uses` | uses by other streams that outlive the free of their block |
//! | `work` | what is done with memory: declared to the simulator's oracle, or nothing |
//! | `stamp` | the same on real bytes |
//! | `tally` | what a round cost in calls, waits and concurrency |
//! | `bench` | one pass over a trace: with checks, for time, or for what it costs besides |
//! | `record` | the same for a memory snapshot |
//! | `fit` | the search for the smallest budget |
//! | `report`, `screen` | what was found, in JSON and for a person |
//!
//! # How time is taken
//! A pass of its own plays the trace with nothing but the allocator's calls: no write, no read, no
//! oracle. It is timed as a whole, by two looks at the clock, and divided by the allocations and
//! frees in it; a clock read for each call would cost as much as the call. So the figure holds the
//! replay's own loop too, two to four nanoseconds an operation, and uses across streams, which are
//! not counted as operations. On the simulator it also holds the simulator's work in each
//! driver call, which has nothing to do with what a driver would need: that is what the modelled
//! driver time is for.
//!
//! # How calls and waits are counted
//! A third pass plays as many rounds as are timed and counts, for each of them, what the driver was
//! asked and who had to wait. On the simulator its streams have the reads and writes of the checked
//! pass to do, and its device falls behind by some tens of them, so that the last use of a free
//! block is often still to come and reuse has to be ordered, as under a program that its GPU
//! bounds. On a GPU the streams have nothing to do, so waits are as few as they can be. A round
//! ends when its last blocks are freed and its last uses are over. What the waits cost the streams
//! is said in `tally`.

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

pub(crate) use report::Report;

use crate::{
    cli,
    place::{NoPlace, Place},
    progress::Progress,
    trace::{Trace, TraceError},
};
use aquifer_core::{Bytes, MemoryError};
use bench::{Bench, Checked};
use engine::Order;
use report::{Round, Search};
use std::{fmt, io, num::NonZeroU32, path::PathBuf};

/// Why there is nothing to report.
#[derive(Debug)]
pub(crate) enum Mistake {
    /// The trace makes no sense.
    Trace {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        error: TraceError,
    },
    /// The device that was asked for is not there.
    Place(NoPlace),
    /// A budget beyond the device.
    Budget {
        /// Bytes asked for.
        asked: u64,
        /// Bytes that the device has.
        memory: u64,
        /// The device, in words.
        title: String,
    },
    /// The allocator or its streams could not be had.
    Setup(MemoryError),
    /// A file that cannot be written.
    Snapshot(PathBuf, io::Error),
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trace { path, error } => {
                let comma = if error.row.is_some() { ", " } else { ": " };
                write!(f, "{}{comma}{error}", path.display())
            }
            Self::Place(e) => e.fmt(f),
            Self::Budget { asked, memory, title } => {
                write!(
                    f,
                    "a budget of {asked} bytes ({}) is more than the {} of the {title}",
                    Bytes(*asked),
                    Bytes(*memory)
                )
            }
            Self::Setup(e) => write!(f, "the replay cannot begin: {e}"),
            Self::Snapshot(path, e) => write!(f, "{} cannot be written: {e}", path.display()),
        }
    }
}

impl std::error::Error for Mistake {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Trace { error, .. } => Some(error),
            Self::Place(e) => Some(e),
            Self::Setup(e) => Some(e),
            Self::Snapshot(_, e) => Some(e),
            Self::Budget { .. } => None,
        }
    }
}

/// Does what was asked for.
///
/// # Errors
/// [`Mistake`], before anything is played but for a snapshot that cannot be written.
pub(crate) fn run(args: &cli::Replay) -> Result<Report, Mistake> {
    let trace = Trace::read(&args.trace, args.device_index)
        .map_err(|error| Mistake::Trace { path: args.trace.clone(), error })?;
    let trace = match args.streams.and_then(NonZeroU32::new) {
        Some(streams) => trace.split(streams),
        None => trace,
    };
    let place = Place::choose(args.device).map_err(Mistake::Place)?;
    let budget = args.budget.map(|amount| amount.bytes(trace.peak_live));
    if let Some(asked) = budget.filter(|&asked| asked > place.memory()) {
        return Err(Mistake::Budget { asked, memory: place.memory(), title: place.title() });
    }
    let order = if args.ignore_order { Order::Ignored } else { Order::Told };
    let bench = Bench { trace: &trace, place: &place, allocator: args.allocator, order };
    let mut progress = Progress::on_terminal();
    progress.phase("checking:");
    let checked = bench.check(budget, &mut progress).map_err(Mistake::Setup)?;
    progress.phase("timing:");
    let timed = match &checked.failure {
        None => bench.time(budget, args.repeat, &mut progress).map_err(Mistake::Setup)?,
        Some(_) => None,
    };
    let mut report = describe(args, &bench, budget, checked);
    if let Some(timed) = timed {
        progress.phase("counting:");
        let tallies = bench.count(budget, args.repeat, &mut progress).map_err(Mistake::Setup)?;
        report.rounds = Round::all(&timed.each, &tallies.unwrap_or_default());
        report.timing = Some(timed.timing);
    }
    if let Some(path) = &args.snapshot {
        progress.phase("recording:");
        let snapshot = bench.record(budget, &mut progress).map_err(Mistake::Setup)?;
        snapshot.save(path).map_err(|e| Mistake::Snapshot(path.clone(), e))?;
    }
    if args.fit {
        let found =
            fit::search(&bench, &report, args.repeat, &mut progress).map_err(Mistake::Setup)?;
        report.violations.count += found.violations.count;
        report.violations.first.extend(found.violations.first);
        report.fit = Some(found.fit.map_or(Search::Nothing, Search::Found));
    }
    Ok(report)
}

fn describe(
    args: &cli::Replay,
    bench: &Bench<'_>,
    budget: Option<u64>,
    checked: Checked,
) -> Report {
    let Bench { trace, place, allocator, order } = *bench;
    Report {
        trace: args.trace.display().to_string(),
        device: place.name(),
        device_named: args.device != cli::DeviceChoice::Auto,
        device_title: place.title(),
        allocator,
        budget,
        ignore_order: order == Order::Ignored,
        operations: trace.operations(),
        allocations: trace.allocations(),
        frees: trace.frees,
        streams: trace.streams,
        split: args.streams,
        snapshot: trace.snapshot,
        device_index: args.device_index,
        peak_live: trace.peak_live,
        live_at_end: trace.live_at_end,
        peak_physical: checked.peak_physical,
        failure: checked.failure,
        timing: None,
        rounds: Vec::new(),
        driver_calls: checked.driver_calls,
        modelled_driver_ns: checked.modelled_driver_ns,
        accesses_checked: checked.verdict.checked,
        cross_stream_uses: checked.crossings,
        early_completions: checked.early,
        violations: checked.verdict.violations,
        leaked: checked.leaked,
        fit: None,
        memory: trace.memory.clone(),
        of_device: trace.device,
        notes: trace.notes.clone(),
    }
}
