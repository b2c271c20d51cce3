//! Several threads, each with a stream of its own.
//!
//! Two figures each: the time from the first thread's begin to the last one's end over the
//! operations of all, which is what the machine gets done, and the mean of each thread's own time
//! over its own operations, which is what a thread waits. With more threads than processors the
//! second holds what a thread waits for its turn.

use super::{
    Bench,
    lane::{Lane, crew},
    size,
    source::{ASYNC, Async, Pooled, Source, pool},
    work::Work,
};
use crate::bench::{
    lap::{Contender, Outcome},
    row::Unit,
};
use aquifer_core::Result;

/// How many threads.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// The size of pairs, in bytes.
const PAIR: u64 = 4 << 10;
/// The largest of random sizes, in bytes.
const RANDOM: u64 = 1 << 20;

/// What the threads do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Job {
    Pairs,
    Random,
}

impl Job {
    const ALL: [Self; 2] = [Self::Pairs, Self::Random];

    /// What a row calls it.
    fn name(self) -> String {
        match self {
            Self::Pairs => size(PAIR),
            Self::Random => format!("random up to {}", size(RANDOM)),
        }
    }

    /// The row that holds the time of a thread among the most against that of one alone.
    fn scaling(self) -> String {
        let most = THREADS[THREADS.len() - 1];
        match self {
            Self::Pairs => format!("{most} threads, each, over one thread"),
            Self::Random => format!("{most} threads, random, each, over one thread"),
        }
    }

    /// The rows of so many threads: over all, and each.
    fn rows(self, threads: usize) -> [String; 2] {
        let s = if threads == 1 { "" } else { "s" };
        ["over all", "each"].map(|what| format!("{threads} thread{s}, {}, {what}", self.name()))
    }
}

pub(super) fn names(_: &Bench<'_>) -> Vec<String> {
    let of = |job: Job| {
        THREADS.into_iter().flat_map(move |threads| job.rows(threads)).chain([job.scaling()])
    };
    Job::ALL.into_iter().flat_map(of).collect()
}

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    for job in Job::ALL {
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

/// Adds the rows of so many threads, and answers with the pool's outcome; none if there is no room.
fn together(
    bench: &mut Bench<'_>,
    job: Job,
    threads: usize,
    rows: &[String; 2],
) -> Result<Option<Outcome>> {
    let session = bench.session();
    let (pool, peer) = (pool(&session)?, bench.peer(&session)?);
    let works: Vec<_> = match job {
        Job::Pairs => Vec::new(),
        Job::Random => {
            (0..threads as u64).map(|n| Work::random(RANDOM, n, threads as u64)).collect()
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

/// Threads that do a work each, or pairs where there are none. A piece is a work, or as many pairs
/// as make a good lap.
fn crew_of<'a, S>(sources: Vec<S>, works: &'a [Work]) -> Contender<'a>
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
