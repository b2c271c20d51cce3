//! Tests that every example runs to its end, with a GPU or without one. `cargo test` builds them
//! beside this test.
//!
//! The test forms a separate process: `cargo test --test` runs the other tests without building the
//! examples.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{self, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Where each of the library's ten main tasks is shown: a `Vec` and a map in pinned memory; a
/// kernel on a device buffer; two streams; a copy in safe code; two tenants; placement; the global
/// allocator with tags and a route; a ring of frames; stream code without a GPU.
const TASKS: [&str; 10] = [
    "collections",
    "collections",
    "kernel",
    "two_streams",
    "in_flight",
    "tenants",
    "placement",
    "global_allocator",
    "frames",
    "on_a_laptop",
];

/// The time limit of an example. All of them run at once.
const LONGEST: Duration = Duration::from_secs(300);

/// Returns the names of the files under `examples/`.
fn listed() -> Vec<String> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut names: Vec<String> = paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

/// Returns `target/PROFILE/examples`. This test lies in `target/PROFILE/deps`.
fn built() -> PathBuf {
    let test = env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().join("examples")
}

/// Runs a program to its end, and returns its output as an error if it failed.
fn run(program: &Path, arguments: &[&Path]) -> Result<(), String> {
    let mut command = Command::new(program);
    command.args(arguments);
    for variable in ["AQUIFER_TRACE", "AQUIFER_BYPASS", "AQUIFER_DEBUG", "AQUIFER_NUMA"] {
        command.env_remove(variable);
    }
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("{e}; `cargo test` builds examples, `cargo test --test` does not"))?;
    let deadline = Instant::now() + LONGEST;
    // They print one or two lines, which fit into a pipe.
    while child.try_wait().map_err(|e| e.to_string())?.is_none() {
        if Instant::now() > deadline {
            child.kill().map_err(|e| e.to_string())?;
            return Err(format!("still running after {} s", LONGEST.as_secs()));
        }
        thread::sleep(Duration::from_millis(5));
    }
    let output = child.wait_with_output().map_err(|e| e.to_string())?;
    let said = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        return Err(format!(
            "{}\n{said}{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        ));
    }
    if said.trim().is_empty() { Err("it shows nothing".into()) } else { Ok(()) }
}

#[test]
fn every_example_runs_to_its_end() {
    let names = listed();
    for task in TASKS {
        assert!(names.iter().any(|name| name == task), "where has {task} gone? {names:?}");
    }
    let cookbook = include_str!("../src/guide/cookbook.md").lines();
    let recipes: Vec<_> = cookbook
        .filter_map(|line| line.strip_prefix("cargo run --example "))
        .map(|rest| rest.split(' ').next().unwrap())
        .collect();
    assert!(recipes.len() >= 7, "where have the recipes gone? {recipes:?}");
    for recipe in recipes {
        assert!(names.iter().any(|name| name == recipe), "the cookbook runs {recipe}: {names:?}");
    }
    let failed: Vec<String> = thread::scope(|scope| {
        let runs: Vec<_> = names
            .iter()
            .map(|name| (name, scope.spawn(move || run(&built().join(name), &[]))))
            .collect();
        let ended = runs.into_iter().map(|(name, run)| (name, run.join().unwrap()));
        ended.filter_map(|(name, run)| Some(format!("{name}: {}", run.err()?))).collect()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn a_checkpoint_with_numbers_near_2_to_the_64_is_refused_with_its_error() {
    let folder = env::temp_dir().join(format!("aquifer-hostile-{}", process::id()));
    fs::create_dir(&folder).unwrap();
    let shard = folder.join("hostile.safetensors");
    let text = |offsets: [u64; 2], shape: &[u64]| {
        format!(r#"{{"x.down.weight":{{"data_offsets":{offsets:?},"shape":{shape:?}}}}}"#)
    };
    let most = u64::MAX;
    for (length, text, expected) in [
        (Some(most), String::new(), "a header of 18446744073709551615 bytes"),
        // The sum with the eight bytes before it is 0 modulo 2^64.
        (Some(most - 7), String::new(), "a header of 18446744073709551608 bytes"),
        (None, text([0, most], &[1, 1]), "are not in the file"),
        (None, text([most, 3], &[1, 1]), "are not in the file"),
        (None, text([0, 16], &[most, 1]), "elements in 16 bytes"),
        (None, text([0, 16], &[1 << 32, 1 << 32]), "elements in 16 bytes"),
        (None, text([0, 16], &[most, 0]), "elements in 16 bytes"),
    ] {
        let length = length.unwrap_or(text.len() as u64);
        fs::write(&shard, [&length.to_le_bytes()[..], text.as_bytes(), &[7; 16]].concat()).unwrap();
        let said = run(&built().join("load_safetensors"), &[&folder]).unwrap_err();
        assert!(said.starts_with("exit status: 1\n") && said.contains(expected), "{text}: {said}");
    }
    // The control: an empty tensor has any other number of rows.
    let whole = text([0, 0], &[most, 0]);
    let bytes = [&(whole.len() as u64).to_le_bytes()[..], whole.as_bytes()].concat();
    fs::write(&shard, bytes).unwrap();
    run(&built().join("load_safetensors"), &[&folder]).unwrap();
    fs::remove_dir_all(&folder).unwrap();
}
