//! The fuzz program of the global allocator, without a fuzzer.

use std::path::Path;

use aquifer_programs::{global, program};

#[test]
fn seeded_programs_keep_every_promise() {
    for seed in 0..if cfg!(miri) { 10 } else { 500 } {
        let len = if cfg!(miri) { 200 } else { 60 + (seed as usize % 40) * 24 };
        global::run(&program::seeded(seed, len));
    }
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn every_program_of_the_corpus_keeps_every_promise() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("../corpus/global");
    let files: Vec<_> =
        std::fs::read_dir(&corpus).unwrap().map(|file| file.unwrap().path()).collect();
    assert!(!files.is_empty());
    for file in files {
        global::run(&std::fs::read(&file).unwrap());
    }
}
