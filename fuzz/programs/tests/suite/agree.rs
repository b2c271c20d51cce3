//! The simulated GPU does what a real one does, on two hundred programs, or on as many others as
//! wanted.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "what the tests share is a test too"
)]

#[path = "../../../../tests/support/gpu.rs"]
mod gpu;

use aquifer_driver::{DeviceId, sim::Sim};
use aquifer_programs::agree::{Outcome, Program};
use std::collections::BTreeSet;

const SEEDS: std::ops::Range<u64> = 0..200;
const DEVICE: DeviceId = DeviceId(0);

/// Runs on a simulated device. Returns the number of violations too.
fn simulated(program: &Program) -> (Outcome, usize) {
    // More than any program holds.
    let sim = Sim::h200(1).capacity(1 << 30);
    let outcome = program.run(&sim.driver(), DEVICE).unwrap();
    (outcome, sim.violations().len())
}

#[test]
fn programs_do_everything_that_there_is_to_do() {
    let calls = SEEDS.step_by(4).flat_map(|seed| simulated(&Program::from_seed(seed)).0.calls);
    let calls: BTreeSet<_> = calls.collect();
    // Those of the operations, and six of the end.
    assert_eq!(calls.len(), 26, "{calls:?}");
}

#[test]
fn without_its_waits_a_program_is_objected_to() {
    let objected = SEEDS.step_by(4).filter(|&seed| {
        let (_, violations) = simulated(&Program::from_seed(seed).careless());
        violations > 0
    });
    let objected = objected.count();
    // Now and then a program orders everything by way of the host.
    assert!(objected >= 45, "{objected} of 50");
}

/// Returns the seeds to compare: [`SEEDS`], or as many as `AQUIFER_AGREE_PROGRAMS` says, from
/// `AQUIFER_AGREE_SEED` on. The seed may be `fresh`: then the clock chooses it.
#[cfg(feature = "cuda")]
fn seeds() -> std::ops::Range<u64> {
    let variable = |name| std::env::var(name).ok();
    let first = match variable("AQUIFER_AGREE_SEED").as_deref() {
        None => SEEDS.start,
        Some("fresh") => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
            now.as_nanos() as u64 >> 16
        }
        Some(text) => text.parse().unwrap_or_else(|why| panic!("AQUIFER_AGREE_SEED={text}: {why}")),
    };
    let count: u64 = match variable("AQUIFER_AGREE_PROGRAMS") {
        None => SEEDS.end,
        Some(text) => {
            text.parse().unwrap_or_else(|why| panic!("AQUIFER_AGREE_PROGRAMS={text}: {why}"))
        }
    };
    println!("{count} programs from seed {first} on");
    first..first + count
}

#[cfg(feature = "cuda")]
#[test]
fn the_gpu_and_the_simulator_agree() {
    use aquifer_driver::{Driver, cuda::CudaDriver};
    let cuda: std::sync::Arc<dyn Driver> = match CudaDriver::open() {
        Ok(driver) => driver,
        Err(reason) => {
            gpu::skip(reason);
            return;
        }
    };
    if !cuda.device_info(DEVICE).unwrap().virtual_memory {
        println!("skipped: the device has no virtual memory management");
        return;
    }
    let differ = |&seed: &u64| {
        let program = Program::from_seed(seed);
        program.run(&cuda, DEVICE).unwrap() != simulated(&program).0
    };
    let differ: Vec<_> = seeds().filter(differ).collect();
    assert!(differ.is_empty(), "the programs of seeds {differ:?} differ");
}

#[cfg(not(feature = "cuda"))]
#[test]
fn the_gpu_and_the_simulator_agree() {
    gpu::skip("built without the feature `cuda`");
}
