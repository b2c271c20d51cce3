//! Creation of whole regions: mapped, placed, populated by workers and registered at the same time,
//! by page size and number of workers, compared with the driver for the same bytes.
//!
//! A virtual machine may get its memory from the host only at the first touch, which costs more
//! than anything measured here. As much memory as the largest row needs is therefore touched and
//! freed first.

use super::{PinnedBench, size};
use crate::{
    lap::Pace,
    report::{Failure, LeftOut},
    row::Unit,
};
use aquifer_core::{Budget, MemoryError, Result};
use aquifer_host::{
    region::{Host, PageTier, Pinning, Region, RegionRequest},
    topology::NodeId,
    workers::Workers,
};
use std::{
    num::NonZeroUsize,
    sync::Arc,
    time::{Duration, Instant},
};

const GIB: u64 = 1 << 30;
/// Sizes in bytes, in a full and in a quick run.
const SIZES: [u64; 3] = [GIB, 8 * GIB, 32 * GIB];
const QUICK: [u64; 1] = [64 << 20];
/// The numbers of workers.
const WORKERS: [usize; 6] = [1, 2, 4, 6, 8, 12];
/// Those for the largest size, whose regions take as long as all of a smaller size together.
const FEW: [usize; 2] = [6, 8];
/// Page sizes, and their names in rows.
const TIERS: [(PageTier, &str); 3] = [
    (PageTier::HugeTlb, "2 MiB pages"),
    (PageTier::Transparent, "thp"),
    (PageTier::Base, "base pages"),
];
/// Bytes of one registration, for the row that compares it with the default.
const CHUNK: usize = 256 << 20;

/// The peer.
const DRIVER: &str = "cuMemHostAlloc";

/// One row.
struct Case {
    bytes: u64,
    tier: PageTier,
    pages: &'static str,
    workers: usize,
    registration: usize,
}

impl Case {
    fn name(&self) -> String {
        let chunks = if self.registration == CHUNK { " by 256 MiB" } else { "" };
        let workers = if self.workers == 1 { "worker" } else { "workers" };
        format!("region {}, {}{chunks}, {} {workers}", size(self.bytes), self.pages, self.workers)
    }
}

fn cases(bench: &PinnedBench<'_>, bytes: u64) -> Vec<Case> {
    let few = bytes > 8 * GIB;
    let usual = RegionRequest::REGISTRATION;
    let mut cases = Vec::new();
    for (tier, pages) in TIERS {
        let counts: &[usize] = if few { &FEW } else { &WORKERS };
        // Base pages are slow, so the largest size omits them.
        let wanted = |_: &&usize| tier != PageTier::Base || !few;
        let case = |&workers| Case { bytes, tier, pages, workers, registration: usual };
        cases.extend(counts.iter().filter(wanted).map(case));
        if tier == PageTier::Transparent && bench.has_gpu() && bytes > usual as u64 {
            cases.push(Case { bytes, tier, pages, workers: 8, registration: CHUNK });
        }
    }
    cases
}

fn sizes(bench: &PinnedBench<'_>) -> &'static [u64] {
    if bench.pace == Pace::QUICK { &QUICK } else { &SIZES }
}

fn close_name(bytes: u64) -> String {
    format!("region {} ended", size(bytes))
}

pub(super) fn names(bench: &PinnedBench<'_>) -> Vec<String> {
    let mut names = Vec::new();
    for &bytes in sizes(bench) {
        names.extend(cases(bench, bytes).iter().map(Case::name));
        names.push(close_name(bytes));
    }
    names
}

pub(super) fn measure(bench: &mut PinnedBench<'_>) -> Result<()> {
    let node = bench.host.topology.node_of_device(bench.place.info()).ok().flatten();
    let wanted = |bytes: &u64| {
        let mut names = cases(bench, *bytes).iter().map(Case::name).collect::<Vec<_>>();
        names.push(close_name(*bytes));
        *bytes <= bench.room && names.iter().any(|name| bench.sheet.wants(name))
    };
    if let Some(&most) = sizes(bench).iter().rev().find(|bytes| wanted(bytes)) {
        touch(bench, node, most)?;
    }
    for &bytes in sizes(bench) {
        let cases: Vec<_> = cases(bench, bytes)
            .into_iter()
            .filter(|case| bench.sheet.wants(&case.name()))
            .collect();
        let close = close_name(bytes);
        if cases.is_empty() && !bench.sheet.wants(&close) {
            continue;
        }
        let what = format!("region {}", size(bytes));
        if bytes > bench.room {
            let why = format!(
                "needs {} of {}",
                aquifer_core::Bytes(bytes),
                aquifer_core::Bytes(bench.room)
            );
            bench.sheet.left_out.push(LeftOut { row: what, why });
            continue;
        }
        let driver = if bench.has_gpu() { Some(driver(bench, bytes)?) } else { None };
        let peer = driver.map(|(made, _)| (DRIVER, rate(made, bytes)));
        let mut ended = Vec::new();
        for case in cases {
            let outcome = match missing(bench, node, &case) {
                Some((row, why)) => Err(LeftOut { row, why }),
                None => ready(bench, node, &case)?.map_err(|why| LeftOut { row: case.name(), why }),
            };
            match outcome {
                Ok((made, gone)) => {
                    bench.sheet.add(&case.name(), Unit::GbPerSecond, rate(made, bytes), peer);
                    ended.push(gone);
                }
                // Once for all rows with the same reason.
                Err(left) if bench.sheet.left_out.contains(&left) => {}
                Err(left) => bench.sheet.left_out.push(left),
            }
        }
        if ended.is_empty() && bench.sheet.wants(&close) {
            let workers = processors().clamp(1, 8);
            let case =
                Case { bytes, tier: PageTier::Base, pages: "", workers, registration: CHUNK };
            ended.extend(ready(bench, node, &case)?.ok().map(|(_, gone)| gone));
        }
        if let Some(&gone) = ended.iter().min() {
            let peer = driver.map(|(_, freed)| ("cuMemFreeHost", rate(freed, bytes)));
            bench.sheet.add(&close, Unit::GbPerSecond, rate(gone, bytes), peer);
        }
    }
    Ok(())
}

/// Returns nanoseconds per 10⁹ bytes.
fn rate(took: Duration, bytes: u64) -> f64 {
    took.as_nanos() as f64 * 1e9 / bytes as f64
}

/// Returns the number of repetitions. Operations that take seconds have little noise.
fn laps(bytes: u64) -> usize {
    if bytes > 8 * GIB { 1 } else { 3 }
}

fn request(node: Option<NodeId>, bytes: u64) -> RegionRequest {
    let mut request = RegionRequest::bytes(bytes as usize);
    request.node = node;
    request
}

/// Touches this much memory, so that the machine gets it.
fn touch(bench: &PinnedBench<'_>, node: Option<NodeId>, bytes: u64) -> Result<()> {
    let mut request = request(node, bytes);
    request.pinning = Pinning::Off;
    drop(Region::new(&bench.host, &Budget::unlimited("bench"), &request)?);
    Ok(())
}

/// Returns what this machine lacks for a row, and the affected rows.
fn missing(bench: &PinnedBench<'_>, node: Option<NodeId>, case: &Case) -> Option<(String, String)> {
    let region = format!("region {}", size(case.bytes));
    let there = processors();
    if case.workers > there {
        return Some((
            format!("{region}, more than {there} workers"),
            format!("{there} processors here"),
        ));
    }
    if case.tier != PageTier::HugeTlb {
        return None;
    }
    let page: u64 = 2 << 20;
    let free = bench.host.topology.free_huge_pages(node, page).ok().flatten();
    let (needed, free) = (case.bytes / page, free.unwrap_or(0));
    let why = format!("{needed} of them needed, {free} in the pool");
    (free < needed).then(|| (format!("{region}, {}", case.pages), why))
}

fn processors() -> usize {
    crate::host::processors() as usize
}

/// Returns the best times until a region is ready, and until it is freed. The inner error says why
/// there is no such region here.
fn ready(
    bench: &PinnedBench<'_>,
    node: Option<NodeId>,
    case: &Case,
) -> Result<std::result::Result<(Duration, Duration), String>> {
    let kernel = bench.host.kernel.clone();
    let count = NonZeroUsize::new(case.workers).unwrap_or(NonZeroUsize::MIN);
    let workers = Workers::with_threads(&bench.host.topology, kernel, count);
    let host = Host { workers: Arc::new(workers), ..bench.host.clone() };
    let mut request = request(node, case.bytes);
    request.pages = case.tier;
    request.registration = case.registration;
    if bench.has_gpu() {
        request.pinning = Pinning::Required;
    }
    let mut best = (Duration::MAX, Duration::MAX);
    for _ in 0..laps(case.bytes) {
        let begun = Instant::now();
        let region = Region::new(&host, &Budget::unlimited("bench"), &request)?;
        let made = begun.elapsed();
        let report = region.report();
        if report.pages != case.tier {
            let why =
                report.shortfalls.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ");
            return Ok(Err(why));
        }
        let begun = Instant::now();
        region.close()?;
        best = (best.0.min(made), best.1.min(begun.elapsed()));
    }
    Ok(Ok(best))
}

/// Returns the same for memory allocated by the driver.
fn driver(bench: &mut PinnedBench<'_>, bytes: u64) -> Result<(Duration, Duration)> {
    let told = |e| MemoryError::driver(bench.device, e);
    let mut best = (Duration::MAX, Duration::MAX);
    // From 8 GiB on, each repetition takes seconds.
    for _ in 0..if bytes > GIB { 1 } else { 3 } {
        let begun = Instant::now();
        let address = bench.driver.host_alloc(bench.device, bytes as usize, false).map_err(told)?;
        let made = begun.elapsed();
        let begun = Instant::now();
        #[expect(unsafe_code, reason = "gives back what the driver allocated")]
        // SAFETY: 1. this driver just allocated it. 2. it was never used.
        let freed = unsafe { bench.driver.host_free(bench.device, address) };
        let freed = freed.map(|()| begun.elapsed()).map_err(told);
        match freed {
            Ok(gone) => best = (best.0.min(made), best.1.min(gone)),
            Err(e) => {
                bench.sheet.failures.push(Failure {
                    row: DRIVER.to_owned(),
                    count: 1,
                    said: e.to_string(),
                });
                break;
            }
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::{
        place::{DeviceChoice, Place},
        progress::ProgressLine,
    };
    use aquifer_driver::sim::Sim;

    fn as_if_real(sim: &Sim) -> Place {
        let driver = sim.driver();
        let info = driver.device_info(aquifer_core::DeviceId(0)).unwrap();
        Place::Cuda { driver, info }
    }

    fn measured<'a>(place: &'a Place, only: Option<&str>) -> PinnedBench<'a> {
        let mut bench = PinnedBench::new(place, Pace::QUICK, only).unwrap();
        bench.measure(&mut ProgressLine::silent()).unwrap();
        bench
    }

    #[test]
    fn every_row_is_measured_or_left_out_with_its_reason_without_a_gpu() {
        let place = Place::choose(DeviceChoice::Sim).unwrap();
        let bench = measured(&place, Some("region"));
        assert!(bench.sheet.failures.is_empty(), "{:?}", bench.sheet.failures);
        let bytes = QUICK[0];
        for case in cases(&bench, bytes) {
            let name = case.name();
            let row = bench.sheet.rows.iter().find(|row| row.name == name);
            let too_many = format!("region {}, more than {} workers", size(bytes), processors());
            let why = bench
                .sheet
                .left_out
                .iter()
                .find(|left| name.starts_with(&left.row) || left.row == too_many);
            assert!(row.is_some() || why.is_some(), "{name}");
            assert!(row.is_none_or(|row| row.value() > 0.0 && row.peer.is_none()), "{row:?}");
        }
        assert!(bench.sheet.rows.len() >= 2, "base pages, and the end: {:?}", bench.sheet.rows);
        let mut left = bench.sheet.left_out.clone();
        left.dedup();
        assert_eq!(left, bench.sheet.left_out, "each reason once");
    }

    #[test]
    fn with_a_gpu_the_driver_stands_beside_each_row_and_nothing_is_left() {
        let sim = Sim::h200(1).symbolic();
        sim.oracle(false);
        let place = as_if_real(&sim);
        let bench = measured(&place, Some("base pages, 1 worker"));
        let [row] = &bench.sheet.rows[..] else {
            panic!("{:?} {:?}", bench.sheet.rows, bench.sheet.failures)
        };
        assert_eq!(row.peer.as_ref().unwrap().name, DRIVER);
        let ended = measured(&place, Some("ended"));
        assert_eq!(ended.sheet.rows[0].peer.as_ref().unwrap().name, "cuMemFreeHost");
        assert!(sim.outstanding().host_allocations + sim.outstanding().registrations == 0);
    }

    #[test]
    fn no_two_rows_have_one_name_and_each_fits_the_page() {
        let sim = Sim::h200(1).symbolic();
        let place = as_if_real(&sim);
        let mut bench = PinnedBench::new(&place, Pace::QUICK, None).unwrap();
        bench.pace = Pace::FULL;
        let mut all = names(&bench);
        assert!(all.iter().all(|name| name.chars().count() <= 41), "{all:?}");
        let count = all.len();
        all.sort();
        all.dedup();
        assert_eq!(all.len(), count);
    }
}
