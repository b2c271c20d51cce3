//! The heap's fuzz program, without a fuzzer.

use std::path::Path;

use aquifer_programs::{heap, program};

#[test]
fn seeded_programs_keep_every_promise() {
    for seed in 0..250 {
        // Short programs as well as those that reach the limit.
        heap::run(&program::seeded(seed, 16 + (seed as usize % 64) * 24));
    }
}

#[test]
fn every_program_of_the_corpus_keeps_every_promise() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/heap");
    let files: Vec<_> =
        std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(files.iter().any(|file| {
        file.file_name().is_some_and(|name| name.to_string_lossy().starts_with("seed-"))
    }));
    for file in files {
        heap::run(&std::fs::read(&file).unwrap());
    }
}
