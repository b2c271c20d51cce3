//! The tests of this crate.

mod header;
mod panics;
mod planned;
