//! `aquifer doctor`: what this machine offers, what a program would get of it, and what to mend.
//!
//! | module | holds |
//! |---|---|
//! | `facts` | what the driver and the kernel say |
//! | `probe` | what pinning and copying really do |
//! | `findings` | what follows: what a program gets, and warnings with their fixes |
//! | `places` | the same for host memory: what each node and device gets, and why not more |
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

/// What was found out.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    facts: Facts,
    probes: Vec<Probe>,
    findings: Vec<Finding>,
}

impl Diagnosis {
    /// Looks, probes and concludes. Takes a second or two, most of it the driver's start; on many
    /// nodes, longer.
    pub(crate) fn make() -> Self {
        let gpus = Gpus::open();
        let facts = Facts::gather(&gpus);
        // Where the host cannot be read nothing can be placed on it either.
        let probes = match &facts.host {
            Ok(host) => Probe::run_all(host, gpus.as_ref().ok(), &facts),
            Err(_) => Vec::new(),
        };
        let findings = findings::conclude(&facts, &probes);
        Self { facts, probes, findings }
    }

    /// Whether a warning stands.
    pub(crate) fn has_warnings(&self) -> bool {
        self.findings.iter().any(|finding| finding.kind == Kind::Warning)
    }

    /// The text that was asked for.
    pub(crate) fn text(&self, args: &cli::Doctor) -> String {
        if args.json { screen::json(self) } else { screen::page(self) }
    }
}
