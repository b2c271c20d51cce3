//! `aquifer doctor`: what this machine offers, what a program gets of it, and what to fix.
//!
//! | module | contents |
//! |---|---|
//! | `facts` | the data of the driver and the kernel, and a conclusion from it |
//! | `probe` | tests of pinning and copying |
//! | `transports` | ways to other processes, devices and machines, by trying each |
//! | `findings` | the conclusions: what a program gets, and warnings with their fixes |
//! | `places` | the conclusions on host memory of each node and device |
//! | `screen` | all of it, as a page and as JSON |

mod facts;
mod findings;
mod places;
mod probe;
mod screen;
mod transports;

use aquifer_benches::console::gpu::Gpus;
use facts::Facts;
use probe::Probe;
pub(crate) use screen::Diagnosis;

/// Reads the facts, runs the probes and draws the conclusions. Takes a second or two, mostly for
/// the driver's start, and longer with many nodes.
pub(crate) fn diagnose() -> Diagnosis {
    let gpus = Gpus::open();
    let facts = Facts::gather(&gpus);
    // Without data on the host, no memory can be placed on it.
    let probes = match &facts.host {
        Ok(host) => Probe::run_all(host, gpus.as_ref().ok(), &facts),
        Err(_) => Vec::new(),
    };
    let findings = findings::conclude(&facts, &probes);
    Diagnosis { facts, probes, findings }
}
