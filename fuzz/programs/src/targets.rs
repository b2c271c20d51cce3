//! The fuzz programs by name.

use crate::{
    agree, arena, budget, chunks, device, global, graphs, heap, ledger, mixed, park, pinned,
    placement, plan, program::run, registered, share, stable, stager,
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
    Target { name: "agree", run: agree::run },
    Target { name: "arena", run: arena::run },
    Target { name: "budget", run: run::<budget::World> },
    Target { name: "checked", run: |bytes| device::run_as(bytes, true, false) },
    Target { name: "chunks", run: run::<chunks::World> },
    Target { name: "device", run: run::<device::World> },
    Target { name: "global", run: global::run },
    Target { name: "graphs", run: run::<graphs::World> },
    Target { name: "heap", run: heap::run },
    Target { name: "ledger", run: run::<ledger::World> },
    Target { name: "mixed", run: mixed::run },
    Target { name: "park", run: |bytes| _ = park::run(bytes) },
    Target { name: "pinned", run: run::<pinned::Machine> },
    Target { name: "placement", run: run::<placement::World> },
    Target { name: "plan", run: plan::run },
    Target { name: "pressure", run: mixed::run_calm },
    Target { name: "registered", run: run::<registered::Machine> },
    Target { name: "retaining", run: |bytes| device::run_as(bytes, false, true) },
    Target { name: "share", run: run::<share::World> },
    Target { name: "stable", run: run::<stable::World> },
    Target { name: "stager", run: run::<stager::Machine> },
];

/// Returns the target with this name.
#[must_use]
pub fn find(name: &str) -> Option<Target> {
    TARGETS.into_iter().find(|target| target.name == name)
}
