//! Tests of the three uses that the library was required for: a `Vec` through `allocator_api2`, a
//! pool installed as the pinned staging allocator, and a program of `cargo fuzz`.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use crate::{
    alone,
    support::{MIB, assert_silent, runtime},
};
use allocator_api2::vec::Vec as ApiVec;
use aquifer::{DeviceBuffer, MemoryError, PinnedBuf, PinnedPool, StagerConfig, sim::Sim, staging};
use aquifer_programs::{
    program::{operations, seeded},
    targets,
};
use std::{env, process::Command, ptr::NonNull};

/// Set in a process that runs one test, in which no other one has installed a staging allocator.
const OWN_PROCESS: &str = "AQUIFER_TEST_OWN_PROCESS";

/// Returns whether the pool reports this live memory as pinned.
fn is_pinned<T>(pool: &PinnedPool, held: &[T]) -> bool {
    pool.is_pinned(NonNull::from(held).cast()) == Some(true)
}

/// Runs a test of this file in another process, which runs nothing else.
fn assert_passes_in_its_own_process(test: &str) {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", &format!("used_by::{test}"), "--test-threads=1", "--nocapture"]);
    command.env(OWN_PROCESS, "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && said.contains("1 passed");
    assert!(passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_vec_through_allocator_api2_lives_in_pinned_memory_and_goes_up_from_where_it_lies() {
    let _alone = alone();
    let sim = Sim::h200(1).stepped();
    let rt = runtime(&sim);
    let pinned = rt.pinned_near(0);

    let mut v: ApiVec<u32, _> = ApiVec::with_capacity_in(16, pinned.allocator());
    v.extend((0..MIB as u32 / 4).map(|i| i ^ 0x5a5a));
    assert!(is_pinned(pinned, &v), "it has grown, in pinned memory");

    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let mut x: DeviceBuffer<u32> = pool.buffer(&s, v.len()).unwrap();
    let flight = s.upload(v, &mut x).unwrap();
    assert_eq!(
        sim.pending(s.raw()),
        1,
        "the copy is on its way, and nobody copied it anywhere else"
    );
    let v = flight.wait().unwrap();

    let mut back = ApiVec::new_in(pinned.allocator());
    back.resize(v.len(), 0);
    let back = s.download(&x, back).unwrap().wait().unwrap();
    assert_eq!(back, v);
    drop((v, back));
    assert_eq!(pinned.stats().memory.requested, 0);
    assert_silent(&sim);
}

#[test]
fn a_pool_that_is_set_as_the_pinned_staging_allocator_serves_stagers_buffers_and_any_librarys_vectors()
 {
    if env::var_os(OWN_PROCESS).is_none() {
        return assert_passes_in_its_own_process(
            "a_pool_that_is_set_as_the_pinned_staging_allocator_serves_stagers_buffers_and_any_librarys_vectors",
        );
    }
    let sim = Sim::h200(1);
    let rt = runtime(&sim);
    staging::install(rt.pinned_near(0).clone()).unwrap();
    let again = staging::install(rt.pinned_near(0).clone());
    assert!(matches!(again, Err(MemoryError::AlreadySet { by, .. }) if by.file() == file!()));
    let pinned = staging::installed().unwrap();

    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/llama_train.csv.xz");
    let text: Vec<u8> = staging::route(|| std::fs::read(path)).unwrap();
    assert!(is_pinned(pinned, &text), "a vector of the standard library's");
    let buffer = PinnedBuf::<f32>::new(1 << 10).unwrap();
    assert!(is_pinned(pinned, &buffer));

    let pool = rt.device(0).unwrap();
    let s = pool.stream().unwrap();
    let before = pinned.stats().memory.live;
    let mut config = StagerConfig::default();
    (config.slot, config.alone, config.direct) = (MIB, 0, 0);
    let stager = rt.stager(0, config).unwrap();
    let pageable = vec![3u8; 5 * MIB];
    let (mut x, mut back): (DeviceBuffer<u8>, _) =
        (pool.buffer(&s, pageable.len()).unwrap(), vec![0; 5 * MIB]);
    stager.scope(|stage| stage.upload(&pageable, &mut x).map(drop)).unwrap().unwrap();
    stager.scope(|stage| stage.download(&x, &mut back).map(drop)).unwrap().unwrap();
    assert!(back == pageable);
    assert!(pinned.stats().memory.live >= before + 2 * MIB as u64, "its slots");

    // The process keeps what is installed, whatever is dropped.
    drop((x, stager, s, rt));
    assert!(is_pinned(pinned, &text) && is_pinned(pinned, &buffer));
    assert!(is_pinned(pinned, &PinnedBuf::<u8>::new(MIB).unwrap()));
    assert_silent(&sim);
}

#[test]
fn a_program_of_cargo_fuzz_runs_for_a_hundred_thousand_operations() {
    let _alone = alone();
    let device = targets::find("device").unwrap();
    let mut seed = 0;
    while operations() < 100_000 {
        (device.run)(&seeded(seed, 1200));
        seed += 1;
    }
    assert!(seed < 100_000, "most programs have more than one operation");
}
