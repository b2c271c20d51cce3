//! `aquifer doctor`: what this machine offers, what a program gets of it, and what to fix.
//!
//! | module | contents |
//! |---|---|
//! | `facts` | the data of the driver and the kernel |
//! | `probe` | tests of pinning and copying |
//! | `findings` | the conclusions: what a program gets, and warnings with their fixes |
//! | `places` | the conclusions on host memory of each node and device |
//! | `screen` | the page, and JSON |

mod facts;
mod findings;
mod places;
mod probe;
mod screen;

use crate::{cli, gpu::Gpus};
use facts::Facts;
use findings::{Finding, Kind};
use probe::Probe;

/// The complete report on this machine.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    facts: Facts,
    probes: Vec<Probe>,
    findings: Vec<Finding>,
}

impl Diagnosis {
    /// Reads the facts, runs the probes and draws the conclusions. Takes a second or two, mostly
    /// for the driver's start, and longer with many nodes.
    pub(crate) fn make() -> Self {
        let gpus = Gpus::open();
        let facts = Facts::gather(&gpus);
        // Without data on the host, no memory can be placed on it.
        let probes = match &facts.host {
            Ok(host) => Probe::run_all(host, gpus.as_ref().ok(), &facts),
            Err(_) => Vec::new(),
        };
        let findings = findings::conclude(&facts, &probes);
        Self { facts, probes, findings }
    }

    /// Returns whether there is a warning.
    pub(crate) fn has_warnings(&self) -> bool {
        self.findings.iter().any(|finding| finding.kind == Kind::Warning)
    }

    /// Returns the report in the requested format.
    pub(crate) fn text(&self, args: &cli::Doctor) -> String {
        if args.json { screen::json(self) } else { screen::page(self) }
    }
}
