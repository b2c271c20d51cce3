//! The program of budgets, from seeds and from the committed corpus.

use aquifer_programs::{budget, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_breaks_a_promise_of_budgets() {
    for seed in 0..150 {
        budget::run(&seeded(seed, 1200));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_budgets() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/budget");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        budget::run(
            &fs::read(entry.expect("a readable corpus").path()).expect("a readable program"),
        );
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
