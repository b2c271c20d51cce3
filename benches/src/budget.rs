//! `aquifer bench budget`: the cost of charges.
//!
//! - A pair is a charge of 64 bytes and its release.
//! - With several threads, each has its own tenant, four levels deep. The levels above are shared.
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
    lap::{Contender, Pace},
    report::BenchReport,
    row::Unit,
    settings::RowSelection,
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer_core::{Budget, Charge, Result, budget::Leased};
use state::BudgetBench;

/// Bytes per charge.
const BYTES: u64 = 64;
/// Bytes that a lease takes at a time.
const GRAIN: u64 = 64 << 10;
/// More than is ever charged here.
const LIMIT: u64 = 1 << 40;
/// Levels of a tree: process, device, pool, tenant.
const NAMES: [&str; 4] = ["process", "device", "pool", "tenant"];
const THREADS: usize = 16;
/// The host's malloc, as named in rows.
const MALLOC: &str = "malloc 64 B";

/// The groups, in the order of measurement and output.
fn groups() -> [RowGroup<BudgetBench>; 3] {
    [
        RowGroup { names: pair_names, measure: pairs },
        RowGroup { names: thread_names, measure: threads },
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
