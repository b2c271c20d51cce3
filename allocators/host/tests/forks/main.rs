//! The tests of what threads have in hand while the process forks, and the rest of their topics.
//!
//! A process of its own: its tests fork, and a child has no thread of its parent but one.

mod magazines;
mod recording;
#[path = "../suite/rig/mod.rs"]
mod rig;
mod stager_slots;
#[path = "../suite/support/mod.rs"]
mod support;
mod workers;
