//! The examples in the documentation of the crates that `aquifer` re-exports from.
//!
//! A reader finds these examples in the documentation of `aquifer` and depends on nothing else, so
//! they import from `aquifer`. The crates are below it and cannot test them. `build.rs` collects
//! them from the sources, and `cargo test -p aquifer-documentation` tests them, with those of items
//! that are not re-exported. The crates have `doctest = false`.

#[cfg(doctest)]
include!(concat!(env!("OUT_DIR"), "/examples.rs"));
