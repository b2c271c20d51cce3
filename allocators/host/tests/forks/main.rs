//! Tests of state that threads hold while the process forks, and related tests.
//!
//! They form a separate process because they fork, and a child has only one thread of its parent.

mod inherited;
mod magazines;
mod recording;
#[path = "../suite/rig/mod.rs"]
mod rig;
mod stager_slots;
#[path = "../suite/support/mod.rs"]
mod support;
mod workers;
