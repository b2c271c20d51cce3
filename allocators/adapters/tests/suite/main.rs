//! The tests of this crate.

mod arena;
mod arena_model;
mod cached;
mod collections;
mod compose;
mod conformance;
#[path = "../../../../tests/support/faults.rs"]
mod faults;
mod gates;
mod guarded;
mod pages;
mod poison;
mod support;
mod wrappers;
