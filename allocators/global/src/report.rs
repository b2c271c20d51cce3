//! Reports of all figures.

mod exit;

pub(crate) use exit::request;
pub use exit::{BadReportTo, ReportTo, report_at_exit};

use crate::{
    account::{self, Consumer, Stats},
    not_installed::NOT_INSTALLED,
    route::{is_installed, unrouted},
};
use aquifer_core::Bytes;
use std::fmt;

/// Number of tags in a report.
const LARGEST: usize = 20;

/// A report: totals, the cap, and the largest consumers.
///
/// ```
/// use aquifer::{Global, global};
/// #[global_allocator]
/// static GLOBAL: Global = Global::new();
/// let report = global::report();
/// assert!(report.stats.live > 0);
/// println!("{report}");
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Report {
    /// Whether [`Global`](crate::Global) is the program's global allocator. If not, the figures
    /// only include explicit allocations from it.
    pub installed: bool,
    /// The figures of the process.
    pub stats: Stats,
    /// The cap in bytes, `u64::MAX` if there is none.
    pub cap: u64,
    /// The 20 largest tags ([`top`](crate::top)).
    pub top: Vec<Consumer>,
}

/// Returns the current figures. Memory for the report itself is allocated after the totals are
/// taken.
#[must_use]
pub fn report() -> Report {
    let stats = account::stats();
    unrouted(|| Report {
        installed: is_installed(),
        stats,
        cap: account::cap(),
        top: account::top(LARGEST),
    })
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Stats {
            live,
            peak,
            allocations,
            frees,
            refusals,
            routed,
            routed_allocations,
            route_refusals,
        } = self.stats;
        if !self.installed {
            writeln!(f, "{NOT_INSTALLED}: most allocations are not counted")?;
        }
        write!(
            f,
            "live {}, peak {}, {allocations} allocations, {frees} frees",
            Bytes(live),
            Bytes(peak)
        )?;
        if self.cap != u64::MAX {
            write!(f, "\ncap {}", Bytes(self.cap))?;
        }
        if refusals > 0 {
            write!(f, "\n{refusals} refused by the cap")?;
        }
        if routed_allocations > 0 || route_refusals > 0 {
            let live = Bytes(routed);
            write!(
                f,
                "\nroutes: live {live}, {routed_allocations} allocations, {route_refusals} refused"
            )?;
        }
        for Consumer { tag, held, allocated } in &self.top {
            let name = tag.name();
            match held {
                Some(held) => write!(
                    f,
                    "\n  {name}: live {} in {} blocks, peak {}",
                    Bytes(held.live),
                    held.blocks,
                    Bytes(held.peak)
                )?,
                None => write!(f, "\n  {name}:")?,
            }
            let comma = if held.is_some() { "," } else { "" };
            write!(
                f,
                "{comma} {} allocated in {} blocks",
                Bytes(allocated.bytes),
                allocated.allocations
            )?;
        }
        Ok(())
    }
}
