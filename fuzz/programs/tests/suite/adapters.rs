//! The fuzz program of wrapped device memory, without a fuzzer.

use std::path::Path;

use aquifer_programs::{adapters, program};

#[test]
fn seeded_programs_keep_every_promise() {
    for seed in 0..250 {
        adapters::run(&program::seeded(seed, 40 + (seed as usize % 32) * 24));
    }
}

#[test]
fn every_program_of_the_corpus_keeps_every_promise() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/adapters");
    let files: Vec<_> =
        std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in files {
        adapters::run(&std::fs::read(&file).unwrap());
    }
}
