//! The program of graphs, from seeds and from the committed corpus.

use aquifer_programs::{graphs, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_breaks_a_promise_of_graphs() {
    for seed in 0..300 {
        graphs::run(&seeded(seed, 500));
    }
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_graphs() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/graphs");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        graphs::run(
            &fs::read(entry.expect("a readable corpus").path()).expect("a readable program"),
        );
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
