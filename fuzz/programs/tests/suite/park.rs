//! The program of parkable memory, from seeds and from the committed corpus.

use aquifer_programs::{park, program::seeded};
use std::{fs, path::Path};

#[test]
fn no_seeded_program_breaks_a_promise_of_parkable_memory() {
    let (mut parks, mut resumes) = (0, 0);
    for seed in 0..200 {
        let (parked, resumed) = park::run(&seeded(seed, 600));
        (parks, resumes) = (parks + parked, resumes + resumed);
    }
    assert!(parks > 400 && resumes > 200, "{parks} parks and {resumes} resumes had blocks to move");
}

#[test]
fn no_program_of_the_corpus_breaks_a_promise_of_parkable_memory() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/park");
    let mut programs = 0;
    for entry in fs::read_dir(corpus).expect("the corpus is committed") {
        park::run(&fs::read(entry.expect("a readable corpus").path()).expect("a readable program"));
        programs += 1;
    }
    assert!(programs > 0, "the corpus is empty");
}
