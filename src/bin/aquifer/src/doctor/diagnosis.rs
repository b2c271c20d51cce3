//! The facts, the probes and the findings together.

use super::{
    facts::Facts,
    finding::{Finding, Kind},
    findings,
    probe::Probe,
};
use crate::ledgers::{self, SharedMemory};
use aquifer_console::gpu::Gpus;
use aquifer_ledger::LedgerError;

/// The complete report on this machine.
#[derive(Debug)]
pub(crate) struct Diagnosis {
    pub(super) facts: Facts,
    pub(super) probes: Vec<Probe>,
    pub(super) findings: Vec<Finding>,
    /// The memories that processes of this user share.
    pub(super) shared: Result<Vec<SharedMemory>, LedgerError>,
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
        Self { facts, probes, findings, shared: ledgers::read() }
    }

    /// Returns whether there is a warning.
    pub(crate) fn has_warnings(&self) -> bool {
        self.findings.iter().any(|finding| finding.kind == Kind::Warning)
    }
}
