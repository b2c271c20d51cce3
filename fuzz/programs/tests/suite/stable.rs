//! The program of memory that keeps its address, from seeds and from the committed corpus.

use aquifer_programs::{program::seeded, stable};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_breaks_a_promise_of_memory_that_keeps_its_address() {
    for seed in 0..300 {
        stable::run(&seeded(seed, 500));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_memory_that_keeps_its_address() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/stable");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        stable::run(
            &fs::read(entry.expect("a readable corpus").path()).expect("a readable program"),
        );
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
