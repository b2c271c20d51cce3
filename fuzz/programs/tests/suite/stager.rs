//! The stager's fuzz program, without a fuzzer.

use std::path::Path;

use aquifer_programs::{program, stager};

#[test]
fn seeded_programs_keep_every_promise() {
    for seed in 0..150 {
        stager::run(&program::seeded(seed, 40 + (seed as usize % 16) * 24));
    }
}

#[test]
fn every_program_of_the_corpus_keeps_every_promise() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/stager");
    let files: Vec<_> =
        std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in files {
        stager::run(&std::fs::read(&file).unwrap());
    }
}
