//! Faults that `AddressSanitizer` has to find: each happens in a separate process, which ends
//! because of it.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a helper of a test that fails is a failed test"
)]

use aquifer_core::sanitizer;
use std::{env, process::Command};

/// A fault's name, and the function that commits it.
pub(crate) type Fault = (&'static str, fn());

/// The name of the case without a fault.
pub(crate) const NONE: &str = "none";
/// The environment variable that names the fault of this process.
const NAMED: &str = "AQUIFER_FAULT";
const SO_FAR: &str = "so far nothing was wrong";

/// Prints that the work before was not what ends the process.
pub(crate) fn nothing_was_wrong_so_far() {
    println!("{SO_FAR}");
}

/// The part of the child, called by an ignored test: commits the fault that the parent named.
pub(crate) fn run_named(faults: &[Fault]) {
    let named = env::var(NAMED).unwrap();
    let (_, fault) = faults.iter().find(|(name, _)| *name == named).unwrap();
    fault();
}

/// Runs each fault by the ignored test of this name, and asserts that the sanitizer ended all but
/// [`NONE`]. The `late` ones must have printed before that nothing was wrong.
pub(crate) fn assert_each_is_found(faults: &[Fault], child: &str, late: &[&str]) {
    if !sanitizer::IS_BUILT_IN {
        return println!(
            "skipped: built without AddressSanitizer, which `ci/sanitize address` builds in"
        );
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
