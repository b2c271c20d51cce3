//! A pool that can serve every request, on one thread and on several.

use super::{PinnedBench, size, source::Pinned};
use crate::console::place::Session;
use crate::{
    device::{
        lane::{self, crew_of},
        source::{Malloc, Source},
        work::WorkPlan,
    },
    lap::{Contender, Pace, contest},
    row::Unit,
};
use aquifer_core::{Budget, Result};
use aquifer_host::{PinnedConfig, PinnedPool};

/// Sizes of pairs, in bytes.
const PAIRS: [u64; 7] = [64, 1 << 10, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20];
/// Maxima of random sizes, in bytes.
const RANDOM: [u64; 3] = [64 << 10, 1 << 20, 64 << 20];
/// Limit of live bytes in a random row, over all threads, in a full and in a quick run.
const LIVE: [u64; 2] = [1 << 30, 128 << 20];
/// The numbers of threads.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// The jobs of the threads: pairs of one size, and random sizes up to a maximum, in bytes.
const JOBS: [PinnedJob; 4] = [
    PinnedJob { random: false, bytes: 4 << 10 },
    PinnedJob { random: false, bytes: 1 << 20 },
    PinnedJob { random: true, bytes: 64 << 10 },
    PinnedJob { random: true, bytes: 1 << 20 },
];

/// The peer of rows in which it gets the same sizes.
const SAME: &str = "malloc";
/// The reference row, and its name as a peer.
const MALLOC: (&str, &str) = ("malloc pair 64 B", "malloc 64 B");

/// Pairs in pinned memory of a simulated device, whose oracle sees every free. The other rows are
/// of the pool alone.
const CHECKED: &str = "pair 64 B, simulated";

fn pair_name(bytes: u64) -> String {
    format!("pair {}", size(bytes))
}

pub(super) fn pair_names(bench: &PinnedBench<'_>) -> Vec<String> {
    let simulated = (!bench.has_gpu()).then_some(CHECKED);
    let names = simulated.into_iter().chain([MALLOC.0]).map(str::to_owned);
    names.chain(PAIRS.map(pair_name)).collect()
}

/// All sizes and the reference take turns in one contest, so that their ratios are from the same
/// time.
pub(super) fn pairs(bench: &mut PinnedBench<'_>) -> Result<()> {
    if !bench.has_gpu() && bench.sheet.wants(CHECKED) {
        simulated_pairs(bench)?;
    }
    let mut contenders: Vec<Contender<'_>> = vec![lane::pairs(Malloc, 64)];
    let mut sizes = Vec::new();
    let mut pools = Vec::new();
    for bytes in PAIRS {
        let name = pair_name(bytes);
        if bench.sheet.wants(&name) && bench.has_room(&name, 2 * bytes) {
            let pool = bench.pool(2 * bytes)?;
            contenders.push(lane::pairs(Pinned::on(&pool), bytes));
            pools.push(pool);
            sizes.push(name);
        }
    }
    let mut outcomes = contest(bench.pace, contenders).into_iter();
    let malloc = outcomes.next().unwrap_or_default();
    bench.sheet.note(MALLOC.0, malloc.failed);
    bench.sheet.add(MALLOC.0, Unit::NsPerPair, malloc.each, None);
    for (name, own) in sizes.into_iter().zip(outcomes) {
        bench.sheet.note(&name, own.failed);
        bench.sheet.add(&name, Unit::NsPerPair, own.each, Some((MALLOC.1, malloc.each)));
    }
    Ok(())
}

fn simulated_pairs(bench: &mut PinnedBench<'_>) -> Result<()> {
    let Session { driver, device, .. } = bench.place.begin_stepped(true);
    let host = bench.host.clone().with_driver(driver, device);
    let pool = PinnedPool::new(&host, &Budget::unlimited("bench"), PinnedConfig::default())?;
    let own = lane::pairs(Pinned::on(&pool), 64);
    let (own, peer) = bench.sheet.compete(bench.pace, CHECKED, own, Some(lane::pairs(Malloc, 64)));
    let peer = peer.unwrap_or_default();
    bench.sheet.add(CHECKED, Unit::NsPerPair, own.each, Some((MALLOC.1, peer.each)));
    Ok(())
}

fn live(bench: &PinnedBench<'_>) -> u64 {
    LIVE[usize::from(bench.pace == Pace::QUICK)]
}

fn random_name(bytes: u64) -> [String; 2] {
    ["random", "waste, random"].map(|what| format!("{what} up to {}", size(bytes)))
}

pub(super) fn random_names(_: &PinnedBench<'_>) -> Vec<String> {
    RANDOM.into_iter().flat_map(random_name).collect()
}

/// Random sizes, and their rounding waste, measured once at the peak of live bytes.
pub(super) fn random(bench: &mut PinnedBench<'_>) -> Result<()> {
    for bytes in RANDOM {
        let [name, waste] = random_name(bytes);
        let work = WorkPlan::random_within(bytes, 0, live(bench));
        // Twice the peak, so that the pool never has to grow, as one that has run for a while.
        let needed = 2 * work.peak + (64 << 20);
        if !(bench.sheet.wants(&name) || bench.sheet.wants(&waste))
            || !bench.has_room(&name, needed)
        {
            continue;
        }
        let pool = bench.pool(needed)?;
        let (own, peer) = bench.sheet.compete(
            bench.pace,
            &name,
            lane::plays(Pinned::on(&pool), &work),
            Some(lane::plays(Malloc, &work)),
        );
        let peer = peer.unwrap_or_default();
        bench.sheet.add(&name, Unit::NsPerOperation, own.each, Some((SAME, peer.each)));
        bench.sheet.add(&waste, Unit::Percent, wasted(&Pinned::on(&pool), &pool, &work)?, None);
    }
    Ok(())
}

/// Returns the rounding of live blocks in per cent of the requested bytes, over the first blocks of
/// `work` up to its peak.
fn wasted(source: &Pinned, pool: &PinnedPool, work: &WorkPlan) -> Result<f64> {
    let (mut held, mut bytes) = (Vec::new(), 0);
    for step in work.operations.iter().filter(|step| step.allocates) {
        bytes += step.bytes;
        if bytes > work.peak {
            break;
        }
        held.push(source.take(step.bytes).map_err(|refused| *refused)?);
    }
    let memory = pool.stats().memory;
    for block in held {
        source.give(block).map_err(|refused| *refused)?;
    }
    Ok((memory.live as f64 / memory.requested.max(1) as f64 - 1.0) * 100.0)
}

/// A job of several threads.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct PinnedJob {
    random: bool,
    bytes: u64,
}

impl PinnedJob {
    /// Returns the rows for this many threads: over all, and each.
    fn rows(self, threads: usize) -> [String; 2] {
        let s = if threads == 1 { "" } else { "s" };
        let what = if self.random { "random up to " } else { "" };
        ["over all", "each"]
            .map(|of| format!("{threads} thread{s}, {what}{}, {of}", size(self.bytes)))
    }
}

pub(super) fn thread_names(_: &PinnedBench<'_>) -> Vec<String> {
    let of = |job: PinnedJob| THREADS.into_iter().flat_map(move |threads| job.rows(threads));
    JOBS.into_iter().flat_map(of).collect()
}

pub(super) fn threads(bench: &mut PinnedBench<'_>) -> Result<()> {
    for job in JOBS {
        for threads in THREADS {
            let rows = job.rows(threads);
            if rows.iter().any(|row| bench.sheet.wants(row)) {
                together(bench, job, threads, &rows)?;
            }
        }
    }
    Ok(())
}

/// Adds the rows for this many threads on one pool.
fn together(
    bench: &mut PinnedBench<'_>,
    job: PinnedJob,
    threads: usize,
    rows: &[String; 2],
) -> Result<()> {
    let works: Vec<_> = if job.random {
        let limit = live(bench) / threads as u64;
        (0..threads as u64).map(|n| WorkPlan::random_within(job.bytes, n, limit)).collect()
    } else {
        Vec::new()
    };
    let live = works.iter().map(|work| work.peak).sum::<u64>().max(threads as u64 * job.bytes);
    let needed = 2 * live + (64 << 20);
    if rows.each_ref().map(|row| bench.has_room(row, needed)).contains(&false) {
        return Ok(());
    }
    let pool = bench.pool(needed)?;
    let pace = if threads == 1 { bench.pace } else { bench.pace.together() };
    let own = crew_of((0..threads).map(|_| Pinned::on(&pool)).collect(), job.bytes, &works);
    let peer = crew_of((0..threads).map(|_| Malloc).collect(), job.bytes, &works);
    let (own, peer) = bench.sheet.compete(pace, &rows[0], own, Some(peer));
    bench.sheet.add_crew(rows, Unit::NsPerOperation, &own, peer.as_ref().map(|peer| (SAME, peer)));
    Ok(())
}
