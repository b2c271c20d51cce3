//! `aquifer bench cluster`: placement over the devices of thousands of simulated nodes.
//!
//! Jobs arrive, are placed by one of several schedulers, and end; processes and nodes die. Each
//! scheduler knows what nodes last reported, and holds bytes by asking a node, which may refuse.
//! Each device has the accounting of a [ledger](aquifer_ledger): the files themselves up to
//! [`MOST_LEDGERS`] devices, and beyond that their sums alone, since a machine has no thousands of
//! nodes.
//!
//! The time to place is that of this machine. All other figures are of the simulation: the same for
//! the same seed.

mod nodes;
mod scheduler;
mod world;

use crate::{
    report::BenchReport,
    row::Unit,
    settings::{ClusterOptions, RowSelection},
    sheet::{BenchError, RowGroup, Sheet, measure},
};
use aquifer::Policy;
use aquifer_console::progress::ProgressLine;
use aquifer_core::{MemoryError, Result};
use nodes::{Accounting, DEVICES};
use world::{Figures, Settings, World};

/// Nodes of a cluster, and of a quick run.
const NODES: u32 = 1250;
const QUICK_NODES: u32 = 32;
/// The most devices for which each has the file of its ledger.
const MOST_LEDGERS: usize = 256;
const SCHEDULERS: usize = 4;
const LOAD: u64 = 90;
/// The mean time until a node goes down, in hours.
const NODE_LIVES: f64 = 50.0;
const SECONDS: (u64, u64) = (1200, 1200);
const QUICK_SECONDS: (u64, u64) = (200, 200);
/// Nodes that a request is placed on first, in rows that say so.
const SAMPLE: usize = 32;
/// The results of a policy, as named in rows.
const RESULTS: [&str; 6] = [
    "median time to place",
    "99 % of placements within",
    "utilisation",
    "fairness between tenants (Jain)",
    "longest wait, simulated",
    "messages a placement",
];

/// The state of the benchmark.
struct ClusterBench {
    options: ClusterOptions,
    quick: bool,
    sheet: Sheet,
}

/// Measures the selected rows. Takes some minutes.
///
/// # Errors
/// [`BenchError`], before anything is measured.
pub(crate) fn run(
    options: &ClusterOptions,
    rows: &RowSelection,
) -> std::result::Result<BenchReport, BenchError> {
    let sheet = Sheet::new(rows.only.as_deref());
    let mut bench = ClusterBench { options: options.clone(), quick: rows.quick, sheet };
    let groups = [RowGroup { names, measure: policies_over_nodes }];
    measure(&mut bench, |bench| &mut bench.sheet, &groups, &mut ProgressLine::on_terminal())?;
    let (nodes, seed) = (bench.nodes(), options.seed);
    let accounts = match bench.accounting() {
        Accounting::Ledgers => "a ledger for each device",
        Accounting::Sums => "the sums of a ledger for each device",
    };
    let title = format!("{nodes} nodes of {DEVICES} simulated devices, {accounts}, seed {seed}");
    Ok(bench.sheet.report_of_simulation("cluster", title, rows.quick))
}

impl ClusterBench {
    fn nodes(&self) -> usize {
        self.options.nodes.unwrap_or(if self.quick { QUICK_NODES } else { NODES }) as usize
    }

    fn accounting(&self) -> Accounting {
        if self.nodes() * DEVICES <= MOST_LEDGERS { Accounting::Ledgers } else { Accounting::Sums }
    }
}

/// The policies, with the number of nodes that a request is placed on first.
fn policies() -> [(&'static str, Policy, Option<usize>); 6] {
    [
        ("most free", Policy::MostFree, None),
        ("best fit", Policy::BestFit, None),
        ("round robin", Policy::RoundRobin, None),
        ("affinity", Policy::Affinity, None),
        ("most free of 32 nodes", Policy::MostFree, Some(SAMPLE)),
        ("best fit of 32 nodes", Policy::BestFit, Some(SAMPLE)),
    ]
}

fn names(_: &ClusterBench) -> Vec<String> {
    let of = |(policy, ..): (&str, _, _)| RESULTS.map(|result| format!("{policy}: {result}"));
    policies().into_iter().flat_map(of).collect()
}

fn policies_over_nodes(bench: &mut ClusterBench) -> Result<()> {
    let all = names(bench);
    for ((_, policy, sample), names) in policies().into_iter().zip(all.chunks(RESULTS.len())) {
        if !names.iter().any(|name| bench.sheet.wants(name)) {
            continue;
        }
        let settings = Settings {
            nodes: bench.nodes(),
            schedulers: SCHEDULERS,
            policy,
            sample,
            load: LOAD,
            node_lives: NODE_LIVES,
            seconds: if bench.quick { QUICK_SECONDS } else { SECONDS },
            seed: bench.options.seed,
            accounting: bench.accounting(),
        };
        let refused = |error: aquifer_ledger::LedgerError| MemoryError::BadSetting {
            name: "the ledgers of a cluster",
            value: error.to_string(),
            expected: "a folder for temporary files",
        };
        let Figures { mut times, outcome } = World::new(settings).map_err(refused)?.run();
        times.sort_unstable();
        let within = |hundredths: usize| {
            times.get(times.len() * hundredths / 100).copied().unwrap_or_default() as f64
        };
        let results = [
            (Unit::Us, within(50)),
            (Unit::Us, within(99)),
            (Unit::Percent, outcome.utilisation * 100.0),
            (Unit::Percent, outcome.fairness * 100.0),
            (Unit::Us, outcome.longest_wait as f64 * 1000.0),
            (Unit::Messages, outcome.messages as f64 / outcome.placed.max(1) as f64),
        ];
        for (name, (unit, value)) in names.iter().zip(results) {
            bench.sheet.add(name, unit, value, None);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_that_has_a_name_is_measured() {
        let options = ClusterOptions { nodes: Some(8), seed: 1 };
        let report = run(&options, &RowSelection { only: None, quick: true }).unwrap();
        assert!(report.is_clean(), "{}", report.to_screen());
        let bench = ClusterBench { options, quick: true, sheet: Sheet::new(None) };
        let rows: Vec<_> = report.rows.iter().map(|row| row.name.clone()).collect();
        assert_eq!(rows, names(&bench));
        assert!(report.device_title.contains("8 nodes of 8"), "{}", report.device_title);
    }
}
