//! `aquifer bench global`: the overhead of accounting, tags and routes for an allocation and its
//! free, over three allocators, and compared with similar crates.
//!
//! A program has one global allocator, so all of them are called explicitly through `GlobalAlloc`.
//!
//! | name | configuration |
//! |---|---|
//! | `bare` | the allocator itself |
//! | `off` | the library over it, without counting |
//! | `on` | with the account of the process |
//! | `tags` | with the tag of each block, in the scope of a tag |
//! | `route` | `on`, while a route is registered, and in its scope with blocks below its limit |
//!
//! Times are medians of laps in which all contenders take turns. `adds` is the median of the
//! difference to `bare` in the same turn, with a distribution-free 95 % confidence interval (order
//! statistics).

mod source;

use super::{
    device::{
        lane::{Lane, crew},
        work::{SplitMix, WorkPlan},
    },
    lap::{Contender, Outcome, Pace, contest},
    report::BenchReport,
    row::{Unit, size},
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use crate::{cli, figures::median, progress::Progress};
use aquifer_core::{Result, Tag, tagged};
use aquifer_global::{RouteId, route};
use source::{
    By, CAP, JEMALLOC, MIMALLOC, OVER_JEMALLOC, OVER_MIMALLOC, OVER_SYSTEM, Ours, STATS_ALLOC,
    SYSTEM, TRACKING, grouped, routed, track,
};
use std::{
    alloc::GlobalAlloc,
    mem,
    sync::{Mutex, PoisonError},
};

/// Turns per contest, in a full and in a quick run.
const LAPS: [usize; 2] = [21, 3];
/// The numbers of threads.
const THREADS: [usize; 5] = [1, 2, 4, 8, 16];
/// The largest block of the mix, and its limit of live bytes per thread.
const MIX: (u64, u64) = (32 << 10, 4 << 20);
/// Blocks that are handed over at a time.
const HANDED: usize = 64;

/// The job of each thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum GlobalJob {
    /// Allocates and frees this many bytes.
    Pairs(u64),
    /// Blocks of random sizes, freed in another order.
    Mix,
    /// Allocates, and frees the blocks of another thread: of this many bytes, or of random sizes
    /// for 0.
    Handed(u64),
}

const JOBS: [GlobalJob; 8] = [
    GlobalJob::Pairs(64),
    GlobalJob::Pairs(1 << 10),
    GlobalJob::Pairs(32 << 10),
    GlobalJob::Mix,
    GlobalJob::Handed(64),
    GlobalJob::Handed(1 << 10),
    GlobalJob::Handed(32 << 10),
    GlobalJob::Handed(0),
];

impl GlobalJob {
    fn name(self) -> String {
        match self {
            Self::Pairs(bytes) => size(bytes),
            Self::Mix => "mix".to_owned(),
            Self::Handed(0) => "mix handed".to_owned(),
            Self::Handed(bytes) => format!("{} handed", size(bytes)),
        }
    }

    /// Returns the numbers of threads it runs with.
    fn threads(self) -> impl Iterator<Item = usize> {
        let least = if matches!(self, Self::Handed(_)) { 2 } else { 1 };
        THREADS.into_iter().filter(move |&threads| threads >= least)
    }
}

/// The allocators to wrap.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Inner {
    System,
    Mimalloc,
    Jemalloc,
}

const INNERS: [Inner; 3] = [Inner::System, Inner::Mimalloc, Inner::Jemalloc];

impl Inner {
    fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Mimalloc => "mimalloc",
            Self::Jemalloc => "jemalloc",
        }
    }
}

/// Rows of one contest after `bare`. Those of the system's allocator include similar crates.
const OWN: [&str; 5] = ["off", "on", "tags", "on adds", "tags adds"];
const BESIDE: [(&str, &str); 3] =
    [("on", "stats_alloc"), ("on", "cap"), ("tags", "tracking-allocator")];
const ROUTED: [&str; 3] = ["route", "in its scope", "route adds"];

fn row(inner: Inner, job: GlobalJob, threads: usize, what: &str) -> String {
    format!("{}, {} ×{threads}, {what}", inner.name(), job.name())
}

fn beside(inner: Inner, job: GlobalJob, threads: usize, (who, peer): (&str, &str)) -> String {
    let peer = peer.split('-').next().unwrap_or(peer);
    row(inner, job, threads, &format!("{who}/{peer}"))
}

fn contests() -> impl Iterator<Item = (Inner, GlobalJob, usize)> {
    let of = |inner| {
        JOBS.into_iter()
            .flat_map(move |job| job.threads().map(move |threads| (inner, job, threads)))
    };
    INNERS.into_iter().flat_map(of)
}

fn names_of((inner, job, threads): (Inner, GlobalJob, usize)) -> Vec<String> {
    let mut names = vec![row(inner, job, threads, "bare")];
    names.extend(OWN.map(|who| row(inner, job, threads, who)));
    if inner == Inner::System {
        names.extend(BESIDE.map(|pair| beside(inner, job, threads, pair)));
    }
    names
}

fn names_of_routed((inner, job, threads): (Inner, GlobalJob, usize)) -> Vec<String> {
    ROUTED.map(|who| row(inner, job, threads, who)).into()
}

/// The groups, in the order of measurement. A route stays registered, so the group that needs one
/// comes last.
const GROUPS: [RowGroup<GlobalBench>; 2] = [
    RowGroup {
        names: |_| contests().flat_map(names_of).collect(),
        measure: |bench| bench.unrouted(),
    },
    RowGroup {
        names: |_| contests().flat_map(names_of_routed).collect(),
        measure: |bench| bench.routed(),
    },
];

/// Measures the selected rows. Takes some minutes.
///
/// # Errors
/// [`Mistake`], before anything is measured.
pub(crate) fn run(args: &cli::BenchGlobal) -> std::result::Result<BenchReport, BenchError> {
    let pace = if args.rows.quick {
        Pace::QUICK.turns(LAPS[1])
    } else {
        Pace::FULL.together().turns(LAPS[0])
    };
    let mut bench = GlobalBench { pace, sheet: Sheet::new(args.rows.only.as_deref()) };
    measure(&mut bench, |bench| &mut bench.sheet, &GROUPS, &mut Progress::on_terminal())?;
    Ok(bench.sheet.report_of_host("global", args.rows.quick))
}

/// The state of a benchmark.
struct GlobalBench {
    pace: Pace,
    sheet: Sheet,
}

impl GlobalBench {
    fn wants(&self, names: &[String]) -> bool {
        names.iter().any(|name| self.sheet.wants(name))
    }

    fn unrouted(&mut self) -> Result<()> {
        for contest in
            contests().filter(|&contest| self.wants(&names_of(contest))).collect::<Vec<_>>()
        {
            match contest.0 {
                Inner::System => self.over(contest, &SYSTEM, &OVER_SYSTEM),
                Inner::Mimalloc => self.over(contest, &MIMALLOC, &OVER_MIMALLOC),
                Inner::Jemalloc => self.over(contest, &JEMALLOC, &OVER_JEMALLOC),
            }
        }
        Ok(())
    }

    fn over<A: GlobalAlloc + Sync>(
        &mut self,
        (inner, job, threads): (Inner, GlobalJob, usize),
        bare: &'static A,
        ours: &'static Ours<A>,
    ) {
        let plan = Plan::new(job, threads);
        let tag = Tag::named("bench");
        let mut contenders = vec![
            plan.contender(bare, Around::Nothing),
            plan.contender(&ours.uncounted, Around::Nothing),
            plan.contender(&ours.counted, Around::Nothing),
            plan.contender(&ours.tracked, Around::Tag(tag)),
        ];
        if inner == Inner::System {
            track();
            contenders.push(plan.contender(&STATS_ALLOC, Around::Nothing));
            contenders.push(plan.contender(&CAP, Around::Nothing));
            contenders.push(plan.contender(&TRACKING, Around::Group));
        }
        let name = |who: &str| row(inner, job, threads, who);
        let outcomes = contest(self.pace, contenders);
        let [bare, off, on, tags, peers @ ..] = outcomes.as_slice() else { return };
        for (who, outcome) in [("bare", bare), ("off", off), ("on", on), ("tags", tags)] {
            self.sheet.note(&name(who), outcome.failed.clone());
        }
        let peer = Some(("bare", bare.each));
        self.sheet.add(&name("bare"), Unit::NsPerPair, bare.each, None);
        self.sheet.add(&name("off"), Unit::NsPerPair, off.each, peer);
        self.sheet.add(&name("on"), Unit::NsPerPair, on.each, peer);
        self.sheet.add(&name("tags"), Unit::NsPerPair, tags.each, peer);
        self.adds(&name("on adds"), bare, on);
        self.adds(&name("tags adds"), bare, tags);
        for (pair, peer) in BESIDE.into_iter().zip(peers) {
            let own = if pair.0 == "tags" { tags } else { on };
            let name = beside(inner, job, threads, pair);
            self.sheet.note(&name, peer.failed.clone());
            self.sheet.add(&name, Unit::NsPerPair, own.each, Some((pair.1, peer.each)));
        }
    }

    fn routed(&mut self) -> Result<()> {
        let Some(to) = routed() else {
            for name in contests().flat_map(names_of_routed) {
                self.sheet.leave_out(&name, "no route can be registered".to_owned());
            }
            return Ok(());
        };
        for contest in
            contests().filter(|&contest| self.wants(&names_of_routed(contest))).collect::<Vec<_>>()
        {
            match contest.0 {
                Inner::System => self.with_route(contest, to, &SYSTEM, &OVER_SYSTEM),
                Inner::Mimalloc => self.with_route(contest, to, &MIMALLOC, &OVER_MIMALLOC),
                Inner::Jemalloc => self.with_route(contest, to, &JEMALLOC, &OVER_JEMALLOC),
            }
        }
        Ok(())
    }

    fn with_route<A: GlobalAlloc + Sync>(
        &mut self,
        (inner, job, threads): (Inner, GlobalJob, usize),
        to: RouteId,
        bare: &'static A,
        ours: &'static Ours<A>,
    ) {
        let plan = Plan::new(job, threads);
        let contenders = vec![
            plan.contender(bare, Around::Nothing),
            plan.contender(&ours.counted, Around::Nothing),
            plan.contender(&ours.counted, Around::Scope(to)),
        ];
        let outcomes = contest(self.pace, contenders);
        let [bare, out, within] = outcomes.as_slice() else { return };
        let name = |who: &str| row(inner, job, threads, who);
        let peer = Some(("bare", bare.each));
        self.sheet.note(&name("route"), out.failed.clone());
        self.sheet.add(&name("route"), Unit::NsPerPair, out.each, peer);
        self.sheet.note(&name("in its scope"), within.failed.clone());
        self.sheet.add(&name("in its scope"), Unit::NsPerPair, within.each, peer);
        self.adds(&name("route adds"), bare, out);
    }

    /// Adds the difference between two contenders in the same turn.
    fn adds(&mut self, name: &str, bare: &Outcome, own: &Outcome) {
        let more: Vec<_> = own.laps.iter().zip(&bare.laps).map(|(own, bare)| own - bare).collect();
        let interval = interval(&more);
        self.sheet.add_within(name, Unit::NsPerPair, median(more).unwrap_or_default(), interval);
    }
}

/// Returns the 95 % confidence interval of the median.
fn interval(figures: &[f64]) -> [f64; 2] {
    let mut sorted = figures.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len() as f64;
    // The rank, from 1, of the lower bound: the median is below it in 2.5 of 100 cases, by the
    // normal approximation to the binomial distribution.
    let rank = ((count - 1.96 * count.sqrt()) / 2.0).max(1.0) as usize;
    let at = |place: Option<usize>| {
        place.and_then(|place| sorted.get(place)).copied().unwrap_or_default()
    };
    [at(rank.checked_sub(1)), at(sorted.len().checked_sub(rank))]
}

/// The scope that a lap runs in.
#[derive(Clone, Copy)]
enum Around {
    Nothing,
    Tag(Tag),
    Scope(RouteId),
    /// A group of `tracking-allocator`.
    Group,
}

impl Around {
    fn run(self, work: impl FnOnce()) {
        match self {
            Self::Nothing => work(),
            Self::Tag(tag) => tagged(tag, work),
            // No block reaches this limit.
            Self::Scope(to) => route(to, 1 << 40, work),
            Self::Group => grouped(work),
        }
    }
}

/// The work of the threads, generated before it is timed.
struct Plan {
    job: GlobalJob,
    threads: usize,
    /// One work per thread, for the mix.
    works: Vec<WorkPlan>,
    /// Sizes of the blocks that are handed over at a time.
    batch: Vec<u64>,
}

impl Plan {
    fn new(job: GlobalJob, threads: usize) -> Self {
        let works = match job {
            GlobalJob::Mix => {
                (0..threads as u64).map(|n| WorkPlan::random_within(MIX.0, n, MIX.1)).collect()
            }
            _ => Vec::new(),
        };
        let mut numbers = SplitMix::new(1);
        let batch = match job {
            GlobalJob::Handed(0) => (0..HANDED).map(|_| 1 + numbers.below(MIX.0)).collect(),
            GlobalJob::Handed(bytes) => vec![bytes; HANDED],
            _ => Vec::new(),
        };
        Self { job, threads, works, batch }
    }

    /// Returns a contender that uses an allocator in all threads. A piece is a pair, a work, or a
    /// batch.
    fn contender<'a, A: GlobalAlloc + Sync>(
        &'a self,
        allocator: &'static A,
        around: Around,
    ) -> Contender<'a> {
        let mut lanes: Vec<_> = (0..self.threads).map(|_| Lane::new(By(allocator))).collect();
        match self.job {
            GlobalJob::Pairs(bytes) => Box::new(move |pairs| {
                crew(&mut lanes, pairs, |_, lane| around.run(|| lane.pairs(bytes, pairs)))
            }),
            GlobalJob::Mix => {
                let pairs = self.works.first().map_or(1, |work| work.operations.len() as u64 / 2);
                Box::new(move |times| {
                    crew(&mut lanes, pairs * times, |number, lane| {
                        around.run(|| lane.play(&self.works[number], times));
                    })
                })
            }
            GlobalJob::Handed(_) => Box::new(move |times| self.hand_on(&mut lanes, times, around)),
        }
    }

    /// Each thread allocates a batch, hands it to the next thread, and frees the batch it received.
    fn hand_on<A: GlobalAlloc + Sync>(
        &self,
        lanes: &mut [Lane<By<A>>],
        times: u64,
        around: Around,
    ) -> super::lap::Lap {
        let boxes: Vec<_> =
            lanes.iter().map(|_| Mutex::new(Vec::with_capacity(4 * HANDED))).collect();
        let open = |number: usize| boxes[number].lock().unwrap_or_else(PoisonError::into_inner);
        let lap = crew(lanes, times * HANDED as u64, |number, lane| {
            let next = (number + 1) % boxes.len();
            let mut handed = Vec::with_capacity(4 * HANDED);
            let mut fresh = Vec::with_capacity(HANDED);
            around.run(|| {
                for _ in 0..times {
                    fresh.extend(self.batch.iter().filter_map(|&bytes| lane.take(bytes)));
                    open(next).append(&mut fresh);
                    mem::swap(&mut handed, &mut *open(number));
                    handed.drain(..).for_each(|held| lane.give(held));
                }
            });
        });
        // The batches handed over last.
        if let Some(lane) = lanes.first_mut() {
            boxes
                .iter()
                .enumerate()
                .for_each(|(number, _)| open(number).drain(..).for_each(|held| lane.give(held)));
        }
        lap
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_interval_of_a_median_is_by_rank() {
        let figures: Vec<_> = (1..=21).rev().map(f64::from).collect();
        assert_eq!(interval(&figures), [6.0, 16.0]);
        assert_eq!(interval(&[3.0, 1.0, 2.0]), [1.0, 3.0]);
        assert_eq!(interval(&[]), [0.0, 0.0]);
    }

    #[test]
    fn every_row_has_a_name_of_its_own_that_fits_the_page() {
        let names: Vec<_> =
            contests().flat_map(|of| [names_of(of), names_of_routed(of)].concat()).collect();
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        let long = names.iter().find(|name| name.chars().count() > 41);
        assert!(long.is_none(), "{long:?}");
    }
}
