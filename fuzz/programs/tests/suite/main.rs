//! The fuzz programs without a fuzzer, from the committed corpora and from a few seeds: the fuzzer
//! tries many more.
//!
//! The programs can share one process: each holds what it needs of the process's state.

mod adapters;
mod agree;
mod arena;
mod budget;
mod device;
mod global;
mod graphs;
mod heap;
mod ledger;
mod minimise;
mod mixed;
mod park;
mod pinned;
mod placement;
mod plan;
mod pressure;
mod registered;
mod regressions;
mod share;
mod stable;
mod stager;
