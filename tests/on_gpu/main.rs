//! Tests on real GPUs: the simulator proves order and charges, and these tests check bytes and the
//! device's own figures.
//!
//! They form a separate process, which a host with GPUs runs without the other tests. Those on a
//! GPU run one at a time in it. `fleet` needs two GPUs.
//!
//! Without a GPU each of them prints that it was skipped, and fails with `AQUIFER_REQUIRE_GPU=1`.
#![cfg(feature = "cuda")]

mod contents;
mod device;
#[path = "../support/first_gpu.rs"]
mod first_gpu;
mod fleet;
mod giving_way;
mod graphs;
#[path = "../support/itself.rs"]
mod itself;
mod park;
mod parts;
mod pinned;
mod pressure;
mod sharing;
mod stable;
mod stager;
mod trading;
