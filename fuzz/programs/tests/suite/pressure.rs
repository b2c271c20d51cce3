//! The program of pools that take from each other, from seeds and from the committed corpus.

use aquifer_programs::{pressure, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_of_pools_under_one_budget_breaks_a_promise() {
    for seed in 0..80 {
        pressure::run(&seeded(seed, 40 + (seed as usize % 32) * 24));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_pools_under_one_budget() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/pressure");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        pressure::run(
            &fs::read(entry.expect("a readable corpus").path()).expect("a readable program"),
        );
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}

/// A program of a length that its seed decides.
fn program(seed: u64) -> Vec<u8> {
    seeded(seed, 40 + (seed.wrapping_mul(2_654_435_761) as usize >> 7) % 2400)
}

#[test]
fn idle_memory_that_another_stream_used_last_is_given_before_a_request_is_refused() {
    for seed in [7_000_794, 7_002_295, 7_002_216, 1_795_365_888_510_790_596] {
        pressure::run(&program(seed));
    }
}

#[test]
fn idle_memory_beyond_a_lowered_limit_is_given_before_a_stable_block_is_refused() {
    for seed in [7_009_480, 7_001_640] {
        pressure::run(&program(seed));
    }
}
