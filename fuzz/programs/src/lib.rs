//! The fuzz targets as ordinary programs.
//!
//! Each of the [`targets`] reads its input as a program of structured operations, executes it beside
//! a model, and panics if an invariant is violated. The tests of this crate run them from seeds,
//! without a fuzzer or a nightly compiler.

pub mod agree;
mod arena;
mod budget;
mod chunks;
mod device;
mod global;
mod graphs;
mod heap;
mod ledger;
mod mixed;
pub mod park;
mod peaks;
mod pinned;
mod placement;
mod plan;
pub mod program;
mod registered;
mod rig;
mod share;
mod stable;
mod stager;
pub mod targets;
