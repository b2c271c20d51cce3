//! The tests of this crate.

mod elastic;
mod header;
mod panics;
mod planned;
