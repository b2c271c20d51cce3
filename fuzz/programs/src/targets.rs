//! The fuzz programs by name.

use crate::{
    adapters, agree, arena, budget, device, global, graphs, heap, ledger, mixed, park, pinned,
    placement, plan, pressure, registered, share, stable, stager,
};

/// A fuzz program and its name.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// The name, which is also that of the cargo-fuzz target.
    pub name: &'static str,
    /// Runs the program that the bytes encode. Panics if an invariant is violated.
    pub run: fn(&[u8]),
}

/// All programs, in order of their names.
pub const TARGETS: [Target; 21] = [
    Target { name: "adapters", run: adapters::run },
    Target { name: "agree", run: agree::run },
    Target { name: "arena", run: arena::run },
    Target { name: "budget", run: budget::run },
    Target { name: "checked", run: device::run_checked },
    Target { name: "device", run: |bytes| _ = device::run(bytes) },
    Target { name: "global", run: global::run },
    Target { name: "graphs", run: graphs::run },
    Target { name: "heap", run: heap::run },
    Target { name: "ledger", run: ledger::run },
    Target { name: "mixed", run: mixed::run },
    Target { name: "park", run: |bytes| _ = park::run(bytes) },
    Target { name: "pinned", run: pinned::run },
    Target { name: "placement", run: placement::run },
    Target { name: "plan", run: plan::run },
    Target { name: "pressure", run: pressure::run },
    Target { name: "registered", run: registered::run },
    Target { name: "retaining", run: device::run_retaining },
    Target { name: "share", run: share::run },
    Target { name: "stable", run: stable::run },
    Target { name: "stager", run: stager::run },
];

/// Returns the target with this name.
#[must_use]
pub fn find(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
