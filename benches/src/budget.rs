//! `aquifer bench budget`: the cost of charges.
//!
//! - A pair is a charge of 64 bytes and its release.
//! - With several threads, each has its own tenant, four levels deep. The levels above are shared.
//! - A hand-over is the time from the release that makes room until the waiter has its bytes.
//! - A reclaim is the time from the refusal of a charge until it is granted, by one of two
//!   reclaimers that have made offers.
//!
//! No device is used, except by the rows of `parked`: the time to move the memory of a tag out of a
//! GPU and back.

mod parked;
mod state;

use crate::console::{
    place::{DeviceChoice, Place},
    progress::ProgressLine,
};
use crate::{
    device::{
        lane::crew_of,
        source::{CallSource, Malloc, Source},
    },
    lap::{Contender, Pace, repeat},
    report::BenchReport,
    row::Unit,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer_core::{
    Budget, Charge, OutOfBudget, Result,
    budget::{Leased, Offer, Reclaim},
};
use state::BudgetBench;
use std::{
    future::Future,
    hint::black_box,
    pin::pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

/// Bytes per charge.
const BYTES: u64 = 64;
/// Bytes that a lease takes at a time.
const GRAIN: u64 = 64 << 10;
/// More than is ever charged here.
const LIMIT: u64 = 1 << 40;
/// Levels of a tree: process, device, pool, tenant.
const NAMES: [&str; 4] = ["process", "device", "pool", "tenant"];
const THREADS: usize = 16;
/// Waits per round in rows where no thread sleeps.
const WAITS: u32 = 64;
/// The host's malloc, as named in rows.
const MALLOC: &str = "malloc 64 B";

/// The groups, in the order of measurement and output.
fn groups() -> [RowGroup<BudgetBench>; 5] {
    [
        RowGroup { names: pair_names, measure: pairs },
        RowGroup { names: reserve_names, measure: reserves },
        RowGroup { names: thread_names, measure: threads },
        RowGroup { names: wait_names, measure: waits },
        RowGroup { names: parked::names, measure: parked::measure },
    ]
}

/// Measures the selected rows. Takes some seconds.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(rows: &RowSelection) -> std::result::Result<BenchReport, BenchError> {
    let place = Place::choose(DeviceChoice::Sim).map_err(BenchError::Place)?;
    let pace = Pace::of(rows.quick);
    let mut bench = BudgetBench { pace, sheet: Sheet::new(rows.only.as_deref()) };
    measure(&mut bench, |bench| &mut bench.sheet, &groups(), &mut ProgressLine::on_terminal())?;
    bench.sheet.report("budget", &place, rows.quick)
}

impl BudgetBench {
    /// Adds a row of pairs, compared with malloc.
    fn beside_malloc<'c>(&mut self, name: &str, own: Contender<'c>) {
        if self.sheet.wants(name) {
            let malloc = Some(pairs_of(vec![Malloc]));
            let (own, malloc) = self.sheet.compete(self.pace, name, own, malloc);
            let malloc = malloc.map(|malloc| (MALLOC, malloc.over_all * 2.0));
            self.sheet.add(name, Unit::NsPerPair, own.over_all * 2.0, malloc);
        }
    }
}

/// Creates a tree with this many levels, and returns its lowest level.
fn tree(levels: usize) -> Budget {
    let mut names = NAMES[NAMES.len() - levels..].iter().copied();
    let root = Budget::new(names.next().unwrap_or(NAMES[0]), LIMIT);
    names.fold(root, |above, name| above.child(name, LIMIT))
}

/// Returns a contender that runs pairs on one thread per source.
pub(super) fn pairs_of<'a, S>(sources: Vec<S>) -> Contender<'a>
where
    S: Source + Send + 'a,
    S::Held: Send,
{
    crew_of(sources, BYTES, &[])
}

/// Charges to a budget.
fn charged(budget: Budget) -> impl Source<Held = Charge> + Send {
    CallSource(move |bytes| budget.charge(bytes))
}

/// Charges to a lease.
fn leased(budget: Budget) -> impl Source<Held = Leased> + Send {
    let lease = budget.lease(GRAIN);
    CallSource(move |bytes| lease.charge(bytes))
}

fn levels(levels: usize) -> String {
    format!("{levels} level{}", if levels == 1 { "" } else { "s" })
}

fn pair_names(_: &BudgetBench) -> Vec<String> {
    let by_level = (1..=NAMES.len()).map(|n| format!("charge + release, {}", levels(n)));
    by_level.chain(["charge + release, leased".to_owned()]).collect()
}

fn pairs(bench: &mut BudgetBench) -> Result<()> {
    let names = pair_names(bench);
    for (name, n) in names.iter().zip(1..=NAMES.len()) {
        bench.beside_malloc(name, pairs_of(vec![charged(tree(n))]));
    }
    bench.beside_malloc(&names[NAMES.len()], pairs_of(vec![leased(tree(NAMES.len()))]));
    Ok(())
}

fn reserve_names(_: &BudgetBench) -> Vec<String> {
    vec![
        "reserve, draw, release, 4 levels".to_owned(),
        "refused by the root, 4 levels".to_owned(),
        "charge + release with a guarantee".to_owned(),
    ]
}

fn reserves(bench: &mut BudgetBench) -> Result<()> {
    let names = reserve_names(bench);
    let (lowest, full) = (tree(NAMES.len()), tree(NAMES.len()));
    // Reserves bytes, draws all of them and releases them, as a pair.
    let reserving = CallSource(move |bytes| lowest.reserve(bytes)?.draw(bytes));
    bench.beside_malloc(&names[0], pairs_of(vec![reserving]));
    let root =
        std::iter::successors(full.parent(), Budget::parent).last().unwrap_or_else(|| full.clone());
    let _most = root.charge(LIMIT / 2)?;
    // Refuses every charge, as intended here.
    let refusing = CallSource(move |bytes| {
        black_box(&full.charge(LIMIT - bytes));
        Ok::<_, OutOfBudget>(())
    });
    bench.beside_malloc(&names[1], pairs_of(vec![refusing]));
    let guaranteed = tree(NAMES.len());
    guaranteed.set_guarantee(GRAIN)?;
    bench.beside_malloc(&names[2], pairs_of(vec![charged(guaranteed)]));
    Ok(())
}

fn thread_names(_: &BudgetBench) -> Vec<String> {
    let all = ["1 level", "4 levels", "leased"];
    let of = |what| ["over all", "each"].map(|how| format!("{THREADS} threads, {what}, {how}"));
    all.into_iter().flat_map(of).collect()
}

fn threads(bench: &mut BudgetBench) -> Result<()> {
    let names = thread_names(bench);
    let wanted = |bench: &BudgetBench, at: usize| {
        names[2 * at..2 * at + 2].iter().any(|n| bench.sheet.wants(n))
    };
    let pool = tree(NAMES.len() - 1);
    let tenants = || (0..THREADS).map(|_| pool.child(NAMES[NAMES.len() - 1], LIMIT));
    let alone = tree(1);
    let crews: [&dyn Fn() -> Contender<'static>; 3] = [
        &|| pairs_of((0..THREADS).map(|_| charged(alone.clone())).collect()),
        &|| pairs_of(tenants().map(charged).collect()),
        &|| pairs_of(tenants().map(leased).collect()),
    ];
    for (at, make) in crews.into_iter().enumerate() {
        if wanted(bench, at) {
            let rows = [&names[2 * at], &names[2 * at + 1]].map(Clone::clone);
            let (own, _) = bench.sheet.compete(bench.pace.together(), &rows[0], make(), None);
            bench.sheet.add_crew(&rows, Unit::NsPerPair, &own, None);
        }
    }
    Ok(())
}

fn wait_names(_: &BudgetBench) -> Vec<String> {
    vec![
        "in line, granted, taken, by a future".to_owned(),
        "hand-over to a thread that sleeps".to_owned(),
        "refused, reclaimed, granted, 4 levels".to_owned(),
    ]
}

fn waits(bench: &mut BudgetBench) -> Result<()> {
    let names = wait_names(bench);
    if bench.sheet.wants(&names[0]) {
        let [ns] = repeat(bench.pace, polled)?;
        bench.sheet.add(&names[0], Unit::NsPerPair, ns, None);
    }
    if bench.sheet.wants(&names[1]) {
        let [ns] = repeat(bench.pace, slept)?;
        bench.sheet.add(&names[1], Unit::Us, ns, None);
    }
    if bench.sheet.wants(&names[2]) {
        let [ns] = repeat(bench.pace, reclaimed)?;
        bench.sheet.add(&names[2], Unit::Us, ns, None);
    }
    Ok(())
}

/// A reclaimer of unneeded charged bytes, with a given cost.
struct Spare {
    held: Mutex<Option<Charge>>,
    cost: Duration,
}

impl Spare {
    fn set(&self, held: Option<Charge>) {
        let before =
            std::mem::replace(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner), held);
        drop(before);
    }
}

impl Reclaim for Spare {
    fn name(&self) -> &'static str {
        "a cache"
    }

    fn offer(&self) -> Offer {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        Offer { bytes: held.as_ref().map_or(0, Charge::bytes), cost: self.cost }
    }

    fn reclaim(&self, _: u64, _: Option<Instant>) {
        self.set(None);
    }
}

/// Returns the time from the refusal of a charge until it is granted by the cheaper of two
/// reclaimers.
fn reclaimed() -> Result<[f64; 1]> {
    let tenant = tree(NAMES.len());
    let spare = |cost| Arc::new(Spare { held: Mutex::new(None), cost });
    let (dear, cheap) = (spare(Duration::from_secs(1)), spare(Duration::ZERO));
    let _registered = [tenant.on_need(&dear), tenant.on_need(&cheap)];
    dear.set(Some(tenant.charge(LIMIT / 2)?));
    let mut took = Duration::ZERO;
    for _ in 0..WAITS {
        cheap.set(Some(tenant.charge(LIMIT / 2)?));
        let begun = Instant::now();
        black_box(tenant.charge(BYTES).is_err());
        tenant.make_room(BYTES, None, None);
        let charge = tenant.charge(BYTES)?;
        took += begun.elapsed();
        drop(charge);
    }
    Ok([took.as_nanos() as f64 / f64::from(WAITS)])
}

/// Returns the time of a charge that enters the wait queue and gets its bytes when it is polled
/// again.
fn polled() -> Result<[f64; 1]> {
    let tenant = tree(NAMES.len());
    let mut context = Context::from_waker(Waker::noop());
    let begun = Instant::now();
    for _ in 0..WAITS {
        let most = tenant.charge(LIMIT)?;
        let mut waiting = pin!(tenant.charge_async(BYTES));
        black_box(waiting.as_mut().poll(&mut context).is_pending());
        drop(most);
        if let Poll::Ready(charge) = waiting.poll(&mut context) {
            drop(charge?);
        }
    }
    Ok([begun.elapsed().as_nanos() as f64 / f64::from(WAITS)])
}

/// Returns the time from a release until the waiting thread continues.
fn slept() -> Result<[f64; 1]> {
    let tenant = tree(NAMES.len());
    let most = tenant.charge(LIMIT)?;
    let took = thread::scope(|scope| {
        let waiter = scope.spawn(|| {
            let charge = tenant.charge_by(BYTES, None);
            (Instant::now(), charge)
        });
        while tenant.waiting() == 0 {
            thread::yield_now();
        }
        // The waiter is in the queue; give it time to fall asleep.
        thread::sleep(Duration::from_micros(200));
        let begun = Instant::now();
        drop(most);
        let (ended, charge) = waiter.join().ok()?;
        charge.ok().map(|_| ended.duration_since(begun))
    });
    Ok([took.unwrap_or_default().as_nanos() as f64])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_that_has_a_name_is_measured_or_left_out_for_want_of_a_gpu() {
        let report = run(&RowSelection { only: None, quick: true }).unwrap();
        assert!(report.is_clean(), "{}", report.to_screen());
        let bench = BudgetBench { pace: Pace::QUICK, sheet: Sheet::new(None) };
        let names: Vec<_> = groups().iter().flat_map(|group| (group.names)(&bench)).collect();
        let (measured, left_out) = (report.rows.iter(), report.left_out.iter());
        let told: Vec<_> = measured
            .map(|row| row.name.clone())
            .chain(left_out.map(|left| left.row.clone()))
            .collect();
        assert_eq!(told, names);
        assert!(
            report.left_out.iter().all(|left| left.why.contains("simulated")),
            "those that need a GPU"
        );
        assert!(report.rows.iter().all(|row| row.ns > 0.0));
    }
}
