//! Several threads, each with its own stream.
//!
//! Each job has two results. *Over all* is the time from the first thread's begin to the last one's
//! end, divided by the operations of all threads: the throughput of the machine. *Each* is the mean
//! of each thread's own time per operation: the latency that a thread sees. With more threads than
//! processors it includes the time a thread waits for a processor.

use super::{
    DeviceBench,
    lane::crew_of,
    size,
    source::{ASYNC, Async, Pooled, pool},
    work::WorkPlan,
};
use crate::{lap::Outcome, row::Unit};
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
    let other = other.map(|sources| crew_of(sources, PAIR, &works));
    let pace = if threads == 1 { bench.pace } else { bench.pace.together() };
    let (own, other) = bench.sheet.compete(pace, &rows[0], crew_of(own, PAIR, &works), other);
    let peer = other.as_ref().map(|other| (ASYNC, other));
    bench.sheet.add_crew(rows, Unit::NsPerOperation, &own, peer);
    Ok(Some(own))
}
