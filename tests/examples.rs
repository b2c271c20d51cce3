//! Every example runs to its end, with a GPU or without.
#![cfg(not(miri))]

use std::{env, fs, path::Path, process::Command};

/// `cargo test` builds the examples beside its tests: `target/PROFILE/deps/THIS` and `target/PROFILE/examples/NAME`.
#[test]
fn every_example_runs_to_its_end() {
    let this = env::current_exe().expect("a test has a file");
    let built = this.parent().and_then(Path::parent).expect("in a folder of cargo's").join("examples");
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let mut ran = 0;
    for entry in fs::read_dir(sources).expect("examples beside the manifest") {
        let source = entry.expect("a readable folder").path();
        let name = source.file_stem().expect("a file with a name");
        let example = built.join(name);
        assert!(example.exists(), "{} is not built: run all of `cargo test`", example.display());
        let output = Command::new(&example).output().expect("a program");
        assert!(
            output.status.success(),
            "{}: {}\n{}",
            example.display(),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        ran += 1;
    }
    assert!(ran >= 9, "only {ran} examples");
}
