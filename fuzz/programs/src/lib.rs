//! The fuzz targets as ordinary programs.
//!
//! Each module has a `run` function that reads its input as a program of structured operations,
//! executes it beside a model, and panics if an invariant is violated. The targets in
//! `fuzz/fuzz_targets` only call these functions. The tests of this crate run them from seeds and
//! from the committed corpus, without a fuzzer or a nightly compiler.

pub mod adapters;
pub mod agree;
pub mod arena;
pub mod budget;
pub mod device;
pub mod global;
pub mod graphs;
pub mod heap;
pub mod ledger;
pub mod minimise;
pub mod mixed;
pub mod park;
mod peaks;
pub mod pinned;
pub mod placement;
pub mod plan;
pub mod pressure;
pub mod program;
pub mod registered;
mod rig;
pub mod share;
pub mod stable;
pub mod stager;
pub mod targets;
