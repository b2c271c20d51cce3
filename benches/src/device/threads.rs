//! Several threads, each with its own stream.
//!
//! Each job has two results. *Over all* is the time from the first thread's begin to the last one's
//! end, divided by the operations of all threads: the throughput of the machine. *Each* is the mean
//! of each thread's own time per operation: the latency that a thread sees. With more threads than
//! processors it includes the time a thread waits for a processor.

use super::{
    DeviceBench,
    lane::{Lane, crew},
    size,
    source::{ASYNC, Async, Pooled, Source, pool},
    work::WorkPlan,
};
use crate::{
    lap::{Contender, Outcome},
    row::Unit,
};
use aquifer_core::Result;

/// The numbers of threads.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// The size of pairs, in bytes.
const PAIR: u64 = 4 << 10;
/// The maximum of random sizes, in bytes.
const RANDOM: u64 = 1 << 20;

/// The jobs of the threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ThreadJob {
    Pairs,
    Random,
}

impl ThreadJob {
    const ALL: [Self; 2] = [Self::Pairs, Self::Random];

    /// Returns its name in rows.
    fn name(self) -> String {
        match self {
            Self::Pairs => size(PAIR),
            Self::Random => format!("random up to {}", size(RANDOM)),
        }
    }

    /// Returns the row that compares a thread among the most threads with a single thread.
    fn scaling(self) -> String {
        let most = THREADS[THREADS.len() - 1];
        match self {
            Self::Pairs => format!("{most} threads, each, over one thread"),
            Self::Random => format!("{most} threads, random, each, over one thread"),
        }
    }

    /// Returns the rows for this many threads: over all, and each.
    fn rows(self, threads: usize) -> [String; 2] {
        let s = if threads == 1 { "" } else { "s" };
        ["over all", "each"].map(|what| format!("{threads} thread{s}, {}, {what}", self.name()))
    }
}

pub(super) fn names(_: &DeviceBench<'_>) -> Vec<String> {
    let of = |job: ThreadJob| {
        THREADS.into_iter().flat_map(move |threads| job.rows(threads)).chain([job.scaling()])
    };
    ThreadJob::ALL.into_iter().flat_map(of).collect()
}

pub(super) fn measure(bench: &mut DeviceBench<'_>) -> Result<()> {
    for job in ThreadJob::ALL {
        let scaling = bench.sheet.wants(&job.scaling());
        let (mut one, mut most) = (None, None);
        for threads in THREADS {
            let end = threads == 1 || threads == THREADS[THREADS.len() - 1];
            let rows = job.rows(threads);
            if rows.iter().any(|row| bench.sheet.wants(row)) || (scaling && end) {
                let outcome = together(bench, job, threads, &rows)?;
                one = one.or_else(|| outcome.clone());
                most = outcome;
            }
        }
        match (one, most) {
            (Some(one), Some(most)) if scaling => {
                bench.sheet.add(
                    &job.scaling(),
                    Unit::NsPerOperation,
                    most.each,
                    Some(("1 thread", one.each)),
                );
            }
            (Some(_), Some(_)) => {}
            _ => bench.sheet.leave_out(&job.scaling(), "one of its rows is not there".to_owned()),
        }
    }
    Ok(())
}

/// Adds the rows for this many threads and returns the pool's outcome, or `None` without enough
/// memory.
fn together(
    bench: &mut DeviceBench<'_>,
    job: ThreadJob,
    threads: usize,
    rows: &[String; 2],
) -> Result<Option<Outcome>> {
    let session = bench.session();
    let (pool, peer) = (pool(&session)?, bench.peer(&session)?);
    let works: Vec<_> = match job {
        ThreadJob::Pairs => Vec::new(),
        ThreadJob::Random => {
            (0..threads as u64).map(|n| WorkPlan::random(RANDOM, n, threads as u64)).collect()
        }
    };
    let bytes =
        works.iter().map(|work| work.peak / 4 * 5).sum::<u64>().max(threads as u64 * (2 << 20));
    if rows.each_ref().map(|row| bench.has_room(row, bytes, peer.is_some())).contains(&false) {
        return Ok(None);
    }
    let own = (0..threads).map(|_| Pooled::on(&pool)).collect::<Result<Vec<_>>>()?;
    let other = match &peer {
        Some(peer) => Some((0..threads).map(|_| Async::on(peer)).collect::<Result<Vec<_>>>()?),
        None => None,
    };
    let other = other.map(|sources| crew_of(sources, &works));
    let pace = if threads == 1 { bench.pace } else { bench.pace.together() };
    let (own, other) = bench.compete(pace, &rows[0], crew_of(own, &works), other);
    let peer = |figure: fn(&Outcome) -> f64| other.as_ref().map(|other| (ASYNC, figure(other)));
    bench.sheet.add(&rows[0], Unit::NsPerOperation, own.over_all, peer(|o| o.over_all));
    bench.sheet.add(&rows[1], Unit::NsPerOperation, own.each, peer(|o| o.each));
    Ok(Some(own))
}

/// Returns a contender whose threads run one work each, or pairs if `works` is empty. A piece is a
/// work, or as many pairs as make a suitable lap.
fn crew_of<'a, S>(sources: Vec<S>, works: &'a [WorkPlan]) -> Contender<'a>
where
    S: Source + Send + 'a,
    S::Held: Send,
{
    let mut lanes: Vec<_> = sources.into_iter().map(Lane::new).collect();
    match works {
        [] => Box::new(move |pairs| crew(&mut lanes, 2 * pairs, |_, lane| lane.pairs(PAIR, pairs))),
        [first, ..] => {
            let operations = first.operations.len() as u64;
            Box::new(move |times| {
                crew(&mut lanes, operations * times, |number, lane| {
                    lane.play(&works[number], times);
                })
            })
        }
    }
}
