//! Tests of the CUDA driver on a real GPU, through `Arc<dyn Driver>`. What its copies, fills,
//! mappings and graphs leave in memory is compared with the simulator in
//! `fuzz/programs/tests/suite/agree.rs`.
//!
//! Without a GPU each test prints `skipped: …`. With `AQUIFER_REQUIRE_GPU=1` that is a failure.
#![cfg_attr(
    feature = "cuda",
    expect(
        unsafe_code,
        reason = "makes driver calls whose conditions the tests meet, or break on purpose"
    )
)]
#![cfg_attr(
    feature = "cuda",
    expect(
        clippy::unwrap_used,
        clippy::print_stdout,
        reason = "what the tests share is a test too"
    )
)]

#[cfg(feature = "cuda")]
mod codes;
#[path = "../../../../tests/support/gpu.rs"]
mod gpu;
#[cfg(feature = "cuda")]
mod graphs;
#[cfg(feature = "cuda")]
mod ipc;
#[cfg(feature = "cuda")]
mod lend;
#[cfg(feature = "cuda")]
mod order;
#[cfg(feature = "cuda")]
mod pools;
#[cfg(feature = "cuda")]
mod support;

#[cfg(not(feature = "cuda"))]
#[test]
fn the_gpu_is_tested() {
    gpu::skip("built without the feature `cuda`");
}
