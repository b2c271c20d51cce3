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

use aquifer_driver::{
    DeviceId, Driver,
    sim::{Sim, Violation, ViolationKind},
};
use aquifer_programs::agree::{Outcome, Program};
use std::{collections::BTreeSet, sync::Arc};

const SEEDS: std::ops::Range<u64> = 0..200;
const DEVICE: DeviceId = DeviceId(0);

/// Returns the seeds to compare: [`SEEDS`], or as many as `AQUIFER_AGREE_PROGRAMS` says, from
/// `AQUIFER_AGREE_SEED` on. The seed may be `fresh`: then the clock chooses it.
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

/// More than any program holds.
const CAPACITY: u64 = 1 << 30;

/// Runs on a simulated device; says what its oracle has to object to.
fn simulated(program: &Program, sim: &Sim) -> (Outcome, Vec<Violation>) {
    let outcome = program.run(&sim.driver(), DEVICE).unwrap();
    (outcome, sim.violations())
}

/// Programs copy across registrations on purpose; the oracle reports that beside the error.
fn beyond_the_mistakes(violations: &[Violation]) -> Vec<&Violation> {
    violations
        .iter()
        .filter(|violation| violation.kind != ViolationKind::AcrossRegistrations)
        .collect()
}

#[test]
fn programs_do_everything_that_there_is_to_do() {
    let mut calls = BTreeSet::new();
    let mut mistakes = BTreeSet::new();
    for seed in SEEDS {
        let made = simulated(&Program::from_seed(seed), &Sim::h200(1).capacity(CAPACITY)).0.made;
        calls.extend(made.iter().filter(|made| made.mistake.is_none()).map(|made| made.call));
        mistakes.extend(made.iter().filter_map(|made| made.mistake));
    }
    // Those of the operations, and six of the end.
    assert_eq!(calls.len(), 36, "{calls:?}");
    assert_eq!(mistakes.len(), 25, "{mistakes:?}");
}

#[test]
fn programs_are_right_whenever_their_work_runs() {
    let mut across = 0;
    for seed in seeds() {
        let program = Program::from_seed(seed);
        let check = |how: &str, sim: Sim| {
            let (outcome, violations) = simulated(&program, &sim);
            let others = beyond_the_mistakes(&violations);
            assert!(others.is_empty(), "seed {seed}, {how}: {}", others[0]);
            (outcome, violations.len())
        };
        let sim = || Sim::h200(1).capacity(CAPACITY);
        let (eager, mistakes) = check("eager", sim());
        assert!(
            eager.codes.contains(&0) && !eager.codes.contains(&Outcome::SKIPPED),
            "seed {seed}"
        );
        across += mistakes;

        let (late, _) = check("seeded", sim().seeded(seed));
        let differences = eager.differences(&late);
        assert!(differences.is_empty(), "seed {seed}, eager and seeded:\n{differences}");

        let (symbolic, _) = check("symbolic", Sim::h200(1).symbolic().capacity(CAPACITY));
        assert_eq!(eager.codes, symbolic.codes, "seed {seed}:\n{}", eager.differences(&symbolic));
    }
    assert!(across > 0, "no copy across registrations was reported");
}

#[test]
fn everything_is_given_back() {
    for seed in SEEDS.step_by(10) {
        let sim = Sim::h200(1).capacity(CAPACITY);
        simulated(&Program::from_seed(seed), &sim);
        assert!(sim.outstanding().is_empty(), "seed {seed}: {:?}", sim.outstanding());
    }
}

#[test]
fn without_its_waits_a_program_is_objected_to() {
    let careless = |seed: &u64| {
        let program = Program::from_seed(*seed).careless();
        let (_, violations) = simulated(&program, &Sim::h200(1).capacity(CAPACITY));
        !beyond_the_mistakes(&violations).is_empty()
    };
    let objected = SEEDS.step_by(4).filter(careless).count();
    // Now and then a program orders everything by way of the host.
    assert!(objected >= 45, "{objected} of 50");
}

#[cfg(feature = "cuda")]
#[test]
fn the_gpu_and_the_simulator_agree() {
    use aquifer_driver::cuda::CudaDriver;
    let cuda: Arc<dyn Driver> = match CudaDriver::open() {
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
    let mut differ = Vec::new();
    let seeds = seeds();
    let programs = seeds.end - seeds.start;
    for seed in seeds {
        let program = Program::from_seed(seed);
        let simulated = simulated(&program, &Sim::h200(1).capacity(CAPACITY)).0;
        let real = program.run(&cuda, DEVICE).unwrap();
        let differences = real.differences(&simulated);
        if !differences.is_empty() {
            differ.push((seed, differences));
        }
    }
    println!(" cuda   sim  call");
    for (seed, differences) in differ.iter().take(20) {
        print!("seed {seed}:\n{differences}");
    }
    assert!(differ.is_empty(), "{} of {programs} programs differ; see the table", differ.len());
}

#[cfg(not(feature = "cuda"))]
#[test]
fn the_gpu_and_the_simulator_agree() {
    gpu::skip("built without the feature `cuda`");
}
