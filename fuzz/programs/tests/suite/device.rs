//! The device program, from seeds and from the committed corpus.

use aquifer_programs::{device, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_breaks_a_promise_of_the_device_pool() {
    for seed in 0..400 {
        device::run(&seeded(seed, 600));
    }
}

#[test]
fn a_pool_that_is_told_what_to_keep_keeps_its_promises_in_seeded_programs() {
    for seed in 0..200 {
        device::run_retaining(&seeded(seed, 600));
    }
}

#[test]
fn a_pool_that_checks_its_blocks_keeps_its_promises_and_finds_nothing_in_seeded_programs() {
    for seed in 0..60 {
        device::run_checked(&seeded(seed, 600));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_the_device_pool() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/device");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        device::run(
            &fs::read(entry.expect("a readable corpus").path()).expect("a readable program"),
        );
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
