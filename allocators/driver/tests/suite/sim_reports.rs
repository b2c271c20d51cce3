//! Tests of violations that no test takes: they are printed on standard error, or returned as the
//! exit status.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]
#![expect(unsafe_code, reason = "forks")]

use aquifer_driver::{
    Access, DeviceId, DeviceRange,
    sim::{OnViolation, Sim},
};
use nix::libc;
use std::{
    env,
    process::{Command, Output},
    sync::OnceLock,
};

/// Queues a write on one stream and an unordered read on another.
fn race(sim: &Sim) {
    let driver = sim.driver();
    let (a, b) = (
        driver.stream_create(DeviceId(0), 0).unwrap(),
        driver.stream_create(DeviceId(0), 0).unwrap(),
    );
    let range = DeviceRange {
        device: DeviceId(0),
        address: driver.mem_alloc(DeviceId(0), 64).unwrap(),
        bytes: 64,
    };
    sim.access(a, range, Access::Write, None).unwrap();
    sim.access(b, range, Access::Read, None).unwrap();
}

/// Returns the first place of `text` in this file, as a report names it.
fn site(text: &str) -> String {
    let before = include_str!("sim_reports.rs").lines().position(|line| line.contains(text));
    format!("sim_reports.rs:{}", before.unwrap() + 1)
}

/// Runs `child` in a separate process.
fn run(what: &str, variable: Option<&str>) -> (Output, String) {
    let mut command = Command::new(env::current_exe().unwrap());
    command
        .args(["--exact", "sim_reports::child", "--nocapture", "--include-ignored"])
        .env("SIM_REPORTS_CHILD", what);
    command.env_remove("AQUIFER_SIM_VIOLATIONS");
    if let Some(value) = variable {
        command.env("AQUIFER_SIM_VIOLATIONS", value);
    }
    let output = command.output().unwrap();
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    (output, text)
}

/// The programs of the other tests, each run in a separate process.
#[test]
#[ignore = "run by the others, in processes of their own"]
fn child() {
    static KEPT: OnceLock<Sim> = OnceLock::new();
    let Ok(what) = env::var("SIM_REPORTS_CHILD") else { return };
    let what = what.as_str();
    let sim = match what {
        "quiet by the program" => Sim::h200(1).on_violation(OnViolation::Quiet),
        "exit by the program" => Sim::h200(1).on_violation(OnViolation::Exit(7)),
        _ => Sim::h200(1),
    };
    race(&sim);
    match what {
        "taken" => assert_eq!(sim.violations().len(), 1),
        "forgotten" => KEPT.set(sim.clone()).unwrap(),
        "reported" => assert!(sim.report() && !sim.report()),
        "one more" => {
            assert_eq!(sim.violations().len(), 1);
            race(&sim);
            let range = DeviceRange { device: DeviceId(0), address: 4096, bytes: 64 };
            let stream = sim.driver().stream_create(DeviceId(0), 0).unwrap();
            sim.access(stream, range, Access::Read, None).unwrap();
        }
        _ => {}
    }
    drop(sim);
    eprintln!("dropped");
    if what == "forks" {
        // SAFETY: 1. The child only ends, as a program does that calls `exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: 1. The exit functions that run are those of the simulator and of the standard
            // library, which need no other thread.
            unsafe { libc::exit(0) }
        }
        let mut status = 0;
        // SAFETY: 1. The pointer is valid for the call.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        eprintln!("the child's status is {}", libc::WEXITSTATUS(status));
    }
}

#[test]
fn a_child_of_a_fork_exits_with_its_own_status() {
    let (output, text) = run("forks", None);
    assert_eq!(output.status.code(), Some(86), "{text}");
    assert!(text.contains("the child's status is 0"), "{text}");
    assert_eq!(text.matches("exit status 86").count(), 1, "{text}");
}

#[test]
fn violations_not_taken_fail_the_program_and_are_printed_with_the_test_and_both_lines() {
    let (output, text) = run("dropped", None);
    assert_eq!(output.status.code(), Some(86), "{text}");
    let told = "aquifer: the simulated GPU found 1 violation in sim_reports::child\n";
    assert!(text.contains(told), "{text}");
    assert!(text.contains("exit status 86, because the simulated GPU found violations"), "{text}");
    assert!(text.contains("unordered read after write"), "{text}");
    for access in ["Access::Write, None", "Access::Read, None"] {
        assert_eq!(text.matches(&site(access)).count(), 1, "{text}");
    }
    assert!(text.find("violation").unwrap() < text.find("dropped").unwrap(), "{text}");
}

#[test]
fn a_machine_that_is_never_dropped_reports_when_the_process_ends() {
    let (output, text) = run("forgotten", None);
    assert_eq!(output.status.code(), Some(86), "{text}");
    assert!(text.find("dropped").unwrap() < text.find("1 violation").unwrap(), "{text}");
}

#[test]
fn violations_taken_or_printed_are_not_printed_again() {
    let (output, text) = run("taken", None);
    assert!(output.status.success() && !text.contains("violation"), "{text}");
    assert_eq!(run("reported", None).1.matches("1 violation").count(), 1);
    let (_, text) = run("one more", None);
    assert!(text.contains("1 violation in sim_reports::child\n  use of unmapped"), "{text}");
    assert!(!text.contains("unordered"), "{text}");
}

#[test]
fn the_environment_chooses_where_the_program_does_not() {
    for (value, is_told) in [("quiet", false), ("report", true)] {
        let (output, text) = run("dropped", Some(value));
        assert!(output.status.success(), "{text}");
        assert_eq!(text.contains("violation"), is_told, "{text}");
    }
    for (value, status) in [("exit", 86), ("exit=3", 3)] {
        for what in ["dropped", "forgotten"] {
            let (output, text) = run(what, Some(value));
            assert_eq!(output.status.code(), Some(status), "{what}: {text}");
            assert!(text.contains("1 violation"), "{text}");
        }
        assert!(
            run("taken", Some(value)).0.status.success(),
            "what a test takes decides no status"
        );
    }
    let (output, text) = run("quiet by the program", Some("exit"));
    assert!(output.status.success() && !text.contains("violation"), "{text}");
    assert_eq!(run("exit by the program", Some("quiet")).0.status.code(), Some(7));
}

#[test]
fn an_invalid_environment_value_is_reported_once_and_hides_nothing() {
    let (output, text) = run("dropped", Some("loud"));
    assert_eq!(output.status.code(), Some(86), "{text}");
    assert_eq!(
        text.matches("AQUIFER_SIM_VIOLATIONS is \"loud\"; it can be report").count(),
        1,
        "{text}"
    );
    assert!(text.contains("1 violation"), "{text}");
}
