//! The tests of this crate.

mod bump;
mod heap;
mod model;
#[path = "../shadow/mod.rs"]
mod shadow;
