//! The program of pools that take from each other, from seeds and from the committed corpus.

use aquifer_programs::{pressure, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_of_pools_under_one_budget_breaks_a_promise() {
    for seed in 0..600 {
        pressure::run(&seeded(seed, 40 + (seed as usize % 32) * 24));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_pools_under_one_budget() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/pressure");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        pressure::run(&fs::read(entry.expect("a readable corpus").path()).expect("a readable program"));
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
