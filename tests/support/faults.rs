//! Faults that `AddressSanitizer` has to find: each happens in a process of its own, which ends by
//! it.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of a test that fails is a failed test"
)]

use aquifer_core::sanitizer;
use std::{env, process::Command};

/// A fault's name, and what it does.
pub(crate) type Fault = (&'static str, fn());

/// The name of what is no fault.
pub(crate) const NONE: &str = "none";
/// Which fault this process is for.
const NAMED: &str = "AQUIFER_FAULT";
const SO_FAR: &str = "so far nothing was wrong";

/// Says that what was done before is not what ends the process.
pub(crate) fn nothing_was_wrong_so_far() {
    println!("{SO_FAR}");
}

/// The child's half, an ignored test of its own: does what the parent named.
pub(crate) fn run_named(faults: &[Fault]) {
    let named = env::var(NAMED).unwrap();
    let (_, fault) = faults.iter().find(|(name, _)| *name == named).unwrap();
    fault();
}

/// Runs each by the ignored test of this name, and sees that the sanitizer ended all but [`NONE`];
/// the `late` ones not before they had said that nothing was wrong.
pub(crate) fn assert_each_is_found(faults: &[Fault], child: &str, late: &[&str]) {
    if !sanitizer::IS_BUILT_IN {
        return println!("skipped: built without AddressSanitizer, which `ci/asan` builds in");
    }
    for (name, _) in faults {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", child, "--ignored", "--nocapture"]);
        let output = command.env(NAMED, name).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        let found = said.contains("AddressSanitizer: use-after-poison");
        assert_eq!(found, *name != NONE, "{name}: {said}");
        assert_eq!(output.status.success(), *name == NONE, "{name}: {said}");
        let so_far = String::from_utf8_lossy(&output.stdout).contains(SO_FAR);
        assert_eq!(so_far, late.contains(name), "{name}: {said}");
    }
}
