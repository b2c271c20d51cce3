//! The tests of this crate.

mod arena;
mod collections;
mod compose;
mod conformance;
#[path = "../../../../tests/support/faults.rs"]
mod faults;
mod gates;
mod planted;
mod poison;
mod support;
mod wrappers;
