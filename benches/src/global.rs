//! `aquifer bench global`: the overhead of accounting, tags and routes for an allocation and its
//! free, over three allocators, and compared with similar crates.
//!
//! | module | contents |
//! |---|---|
//! | `plan` | the work of the threads |
//! | `wrapped` | the library over an allocator, in each configuration |
//! | `source` | calls of an allocator by hand, and a route |
//! | `peers`, `tracking` | mimalloc, jemalloc and similar crates, with the feature `peers` |
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

#[cfg(feature = "peers")]
mod peers;
mod plan;
mod source;
#[cfg(feature = "peers")]
mod tracking;
mod wrapped;

use crate::console::{figures::median, progress::ProgressLine};
use crate::{
    lap::{Outcome, Pace, contest},
    report::BenchReport,
    row::Unit,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer_core::{Result, Tag};
use aquifer_global::RouteId;
#[cfg(feature = "peers")]
use peers::similar;
use plan::{Around, GlobalJob, Plan};
use source::routed;
use wrapped::{Layer, OVER_SYSTEM, Wrapped};

/// Turns per contest, in a full and in a quick run.
const LAPS: [usize; 2] = [21, 3];

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

    /// Returns the allocator with this library over it, or `None` if this program was built without
    /// it.
    fn wrapped(self) -> Option<&'static dyn Wrapped> {
        match self {
            Self::System => Some(&OVER_SYSTEM),
            #[cfg(feature = "peers")]
            Self::Mimalloc => Some(&peers::OVER_MIMALLOC),
            #[cfg(feature = "peers")]
            Self::Jemalloc => Some(&peers::OVER_JEMALLOC),
            #[cfg(not(feature = "peers"))]
            Self::Mimalloc | Self::Jemalloc => None,
        }
    }
}

/// Returns the contenders of the crates in [`BESIDE`]: none, since this program was built without
/// them.
#[cfg(not(feature = "peers"))]
fn similar(_: &Plan) -> Vec<crate::lap::Contender<'_>> {
    Vec::new()
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
/// [`BenchError`], before anything is measured.
pub(crate) fn run(rows: &RowSelection) -> std::result::Result<BenchReport, BenchError> {
    let pace =
        if rows.quick { Pace::QUICK.turns(LAPS[1]) } else { Pace::FULL.together().turns(LAPS[0]) };
    let mut bench = GlobalBench { pace, sheet: Sheet::new(rows.only.as_deref()) };
    measure(&mut bench, |bench| &mut bench.sheet, &GROUPS, &mut ProgressLine::on_terminal())?;
    Ok(bench.sheet.report_of_host("global", rows.quick))
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
            match contest.0.wrapped() {
                Some(wrapped) => self.over(contest, wrapped),
                None => self.sheet.lack_peers(&names_of(contest)),
            }
        }
        Ok(())
    }

    fn over(
        &mut self,
        (inner, job, threads): (Inner, GlobalJob, usize),
        wrapped: &'static dyn Wrapped,
    ) {
        let plan = Plan::new(job, threads);
        let tag = Tag::named("bench");
        let mut contenders = vec![
            wrapped.contender(&plan, Layer::Bare, Around::Nothing),
            wrapped.contender(&plan, Layer::Uncounted, Around::Nothing),
            wrapped.contender(&plan, Layer::Counted, Around::Nothing),
            wrapped.contender(&plan, Layer::Tracked, Around::Tag(tag)),
        ];
        if inner == Inner::System {
            let similar = similar(&plan);
            if similar.is_empty() {
                self.sheet.lack_peers(&BESIDE.map(|pair| beside(inner, job, threads, pair)));
            }
            contenders.extend(similar);
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
            match contest.0.wrapped() {
                Some(wrapped) => self.with_route(contest, to, wrapped),
                None => self.sheet.lack_peers(&names_of_routed(contest)),
            }
        }
        Ok(())
    }

    fn with_route(
        &mut self,
        (inner, job, threads): (Inner, GlobalJob, usize),
        to: RouteId,
        wrapped: &'static dyn Wrapped,
    ) {
        let plan = Plan::new(job, threads);
        let contenders = vec![
            wrapped.contender(&plan, Layer::Bare, Around::Nothing),
            wrapped.contender(&plan, Layer::Counted, Around::Nothing),
            wrapped.contender(&plan, Layer::Counted, Around::Scope(to)),
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
