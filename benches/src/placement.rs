//! `aquifer bench placement`: the cost of choosing a device and holding bytes on it.
//!
//! A pair is a request for 1 MiB and the drop of its lease, over simulated devices of equal size.
//! The peer is the simple hand-written version: a vector of the free bytes of each device behind a
//! lock, of which the largest is chosen. It has no budgets, hints or health checks.
//!
//! The first rows measure a whole [runtime](start).

mod start;
mod state;

use crate::console::{
    place::{DeviceChoice, Place as Machine},
    progress::ProgressLine,
};
use crate::{
    budget::pairs_of,
    device::source::{CallSource, Source},
    lap::{Contender, Pace},
    report::BenchReport,
    row::Unit,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer::{
    DeviceId, Group as Shards, Lease, PlacementRequest, Placer, Policy, Runtime,
    placement::{Candidate, key_of},
};
use aquifer_core::Result;
use state::{PlacementBench, over, simulated};
use std::{
    convert::Infallible,
    sync::{Mutex, PoisonError},
};

/// Bytes per request, as given to the lanes.
const BYTES: u64 = 1 << 20;
/// The budget of each device, more than is ever leased here.
const LIMIT: u64 = 8 << 30;
const DEVICES: [u32; 3] = [1, 8, 64];
const GROUPS: [usize; 2] = [4, 8];
const THREADS: usize = 16;
/// The hand-written peer, as named in rows.
const BY_HAND: &str = "Mutex<Vec<free>>";

/// The groups, in the order of measurement and output.
fn groups() -> [RowGroup<PlacementBench>; 4] {
    [
        RowGroup { names: start::names, measure: start::measure },
        RowGroup { names: single_names, measure: singles },
        RowGroup { names: shard_names, measure: shards },
        RowGroup { names: thread_names, measure: threads },
    ]
}

/// Measures the selected rows. Takes most of a minute.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(rows: &RowSelection) -> std::result::Result<BenchReport, BenchError> {
    let machine = Machine::choose(DeviceChoice::Sim).map_err(BenchError::Place)?;
    let pace = Pace::of(rows.quick);
    let mut bench = PlacementBench { pace, sheet: Sheet::new(rows.only.as_deref()) };
    measure(&mut bench, |bench| &mut bench.sheet, &groups(), &mut ProgressLine::on_terminal())?;
    bench.sheet.report("placement", &machine, rows.quick)
}

impl PlacementBench {
    /// Adds a row compared with the hand-written peer over as many devices.
    fn beside_by_hand(&mut self, name: &str, own: Contender<'_>, devices: u32) {
        let by_hand = ByHand::new(devices);
        let peer = Some(pairs_of(vec![&by_hand]));
        let (own, peer) = self.sheet.compete(self.pace, name, own, peer);
        let peer = peer.map(|peer| (BY_HAND, peer.over_all * 2.0));
        self.sheet.add(name, Unit::NsPerPair, own.over_all * 2.0, peer);
    }
}

fn policies() -> [(&'static str, Policy); 9] {
    let last = |_: &PlacementRequest, devices: &[Candidate<'_>]| {
        devices.iter().rev().map(|d| d.device).collect()
    };
    [
        ("most free", Policy::MostFree),
        ("least loaded", Policy::LeastLoaded),
        ("best fit", Policy::BestFit),
        ("best compute", Policy::BestCompute),
        ("round robin", Policy::RoundRobin),
        ("weighted", Policy::weighted([(DeviceId(0), 3)])),
        ("affinity", Policy::Affinity),
        ("near the caller", Policy::Near),
        ("custom", Policy::custom("the last", last)),
    ]
}

/// Creates a runtime over this many idle devices.
fn runtime(devices: u32) -> Result<Runtime> {
    Runtime::builder().driver(simulated(devices)).device_budget(LIMIT).build()
}

/// Placement requests of one thread.
fn placing(placer: Placer) -> impl Source<Held = Lease> + Send {
    let request = PlacementRequest::bytes(BYTES).key(key_of(b"a session"));
    CallSource(move |_| placer.place(&request))
}

/// The hand-written peer.
struct ByHand(Mutex<Vec<u64>>);

impl ByHand {
    fn new(devices: u32) -> Self {
        Self(Mutex::new(vec![LIMIT; devices as usize]))
    }
}

impl Source for &ByHand {
    type Held = (usize, u64);
    type Refused = Infallible;

    #[inline]
    fn take(&self, bytes: u64) -> std::result::Result<(usize, u64), Infallible> {
        let mut free = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let most = (0..free.len()).max_by_key(|&device| free[device]).unwrap_or_default();
        free[most] -= bytes;
        Ok((most, bytes))
    }

    #[inline]
    fn give(&self, (device, bytes): (usize, u64)) -> std::result::Result<(), Infallible> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)[device] += bytes;
        Ok(())
    }
}

fn single_names(_: &PlacementBench) -> Vec<String> {
    let name = |devices| {
        move |(policy, _): (&str, _)| format!("place + drop, {policy}, {}", over(devices))
    };
    DEVICES.into_iter().flat_map(|devices| policies().into_iter().map(name(devices))).collect()
}

fn singles(bench: &mut PlacementBench) -> Result<()> {
    let mut names = single_names(bench).into_iter();
    for devices in DEVICES {
        let rt = runtime(devices)?;
        for (_, policy) in policies() {
            let Some(name) = names.next().filter(|name| bench.sheet.wants(name)) else { continue };
            bench.beside_by_hand(&name, pairs_of(vec![placing(rt.placer(policy))]), devices);
        }
    }
    Ok(())
}

fn shard_names(_: &PlacementBench) -> Vec<String> {
    GROUPS.into_iter().map(|shards| format!("a group of {shards} on peers, {}", over(8))).collect()
}

fn shards(bench: &mut PlacementBench) -> Result<()> {
    let rt = runtime(8)?;
    for (name, shards) in shard_names(bench).into_iter().zip(GROUPS) {
        if bench.sheet.wants(&name) {
            let group = Shards::of(shards, PlacementRequest::bytes(BYTES)).on_peers();
            let placer = rt.placer(Policy::MostFree);
            let own = pairs_of(vec![CallSource(move |_| placer.place_group(&group))]);
            bench.beside_by_hand(&name, own, 8);
        }
    }
    Ok(())
}

fn thread_names(_: &PlacementBench) -> Vec<String> {
    let name = |(policy, _): (&str, _)| {
        ["over all", "each"].map(|how| format!("{THREADS} threads, {policy}, {}, {how}", over(8)))
    };
    let all = policies().into_iter().flat_map(name);
    all.chain(
        ["over all", "each"].map(|how| format!("{THREADS} threads, {BY_HAND}, {}, {how}", over(8))),
    )
    .collect()
}

fn threads(bench: &mut PlacementBench) -> Result<()> {
    let names = thread_names(bench);
    let (rt, by_hand) = (runtime(8)?, ByHand::new(8));
    let mut crews: Vec<Contender<'_>> = Vec::new();
    for (_, policy) in policies() {
        let placer = rt.placer(policy);
        crews.push(pairs_of((0..THREADS).map(|_| placing(placer.clone())).collect()));
    }
    crews.push(pairs_of((0..THREADS).map(|_| &by_hand).collect()));
    for (at, crew) in crews.into_iter().enumerate() {
        let rows = [&names[2 * at], &names[2 * at + 1]].map(Clone::clone);
        if rows.iter().any(|row| bench.sheet.wants(row)) {
            let (own, _) = bench.sheet.compete(bench.pace.together(), &rows[0], crew, None);
            bench.sheet.add_crew(&rows, Unit::NsPerPair, &own, None);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_that_has_a_name_is_measured() {
        let report = run(&RowSelection { only: None, quick: true }).unwrap();
        assert!(report.is_clean(), "{}", report.to_screen());
        let bench = PlacementBench { pace: Pace::QUICK, sheet: Sheet::new(None) };
        let left_out = |name: &String| report.left_out.iter().any(|left| left.row == *name);
        let mut names: Vec<_> = groups().iter().flat_map(|group| (group.names)(&bench)).collect();
        names.retain(|name| !left_out(name));
        assert!(report.left_out.len() <= 1, "only what needs a GPU");
        assert_eq!(report.rows.iter().map(|row| row.name.clone()).collect::<Vec<_>>(), names);
        assert!(report.rows.iter().all(|row| row.ns > 0.0));
    }
}
