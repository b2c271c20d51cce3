//! `aquifer plot` and `aquifer bench --plot`, and the progress line of a bench, as a person runs
//! them.

use crate::support::{Folder, aquifer, program, text};
use crate::terminal::on_terminal;
use nix::sys::signal::{Signal, kill};
use std::{
    fs,
    os::unix::process::ExitStatusExt,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// The arguments of a bench that takes part of a second.
const BENCH: [&str; 5] = ["bench", "budget", "--quick", "--only", "level"];

#[test]
fn a_bench_draws_the_picture_that_its_json_gives() {
    let folder = Folder::new();
    let (picture, run, again) =
        (folder.path("bench.svg"), folder.path("run.json"), folder.path("again.svg"));
    let flags = ["--json", "--note", "beside <other> tests", "--plot", &picture];
    let bench = aquifer([&BENCH[..], &flags].concat());
    assert_eq!(bench.status.code(), Some(0), "{}", text(&bench.stderr));
    assert!(bench.stderr.is_empty());
    fs::write(&run, &bench.stdout).expect("a file");
    let plot = aquifer(["plot", &run, "-o", &again]);
    assert_eq!(plot.status.code(), Some(0), "{}", text(&plot.stderr));
    let (picture, again) =
        (fs::read(picture).expect("a picture"), fs::read(again).expect("another"));
    assert_eq!(picture, again);
    let svg = text(&picture);
    assert!(svg.starts_with("<svg ") && svg.contains("beside &lt;other&gt; tests"), "{svg}");
    assert!(svg.contains("charge + release") && svg.contains("malloc 64 B"), "{svg}");
    assert!(
        text(&plot.stdout).ends_with("again.svg: 11 rows of 1 run\n"),
        "{}",
        text(&plot.stdout)
    );
    assert_eq!(folder.names(), ["again.svg", "bench.svg", "run.json"]);
}

#[test]
fn a_bench_whose_picture_cannot_be_written_is_refused_before_it_measures() {
    let folder = Folder::new();
    let path = folder.path("none/a.svg");
    // All rows at full length would take longer than this test waits.
    let begun = Instant::now();
    let output = aquifer(["bench", "global", "--plot", &path]);
    assert!(begun.elapsed() < Duration::from_secs(20));
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(output.stdout.is_empty() && said.lines().count() == 1, "{said}");
    assert!(said.contains("none/a.svg cannot be written: "), "{said}");
}

#[test]
fn a_plot_that_makes_no_sense_is_one_line_on_stderr_and_writes_nothing() {
    let folder = Folder::new();
    let (run, picture) = (folder.path("run.json"), folder.path("a.svg"));
    for (json, status, expected) in [
        ("{", 2, "run.json: no JSON: "),
        ("{}", 2, "run.json: not a run: `rows` is missing or wrong"),
        (r#"{"bench": "x", "device_name": "y", "rows": [{}]}"#, 2, "row 1: `unit` is missing"),
        (r#"{"bench": "x", "device_name": "y", "rows": []}"#, 1, "there is no row to draw"),
    ] {
        fs::write(&run, json).expect("a file");
        let output = aquifer(["plot", &run, "-o", &picture]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{json}: {said}");
        assert!(said.starts_with("aquifer: ") && said.lines().count() == 1, "{json}: {said}");
        assert!(said.contains(expected) && output.stdout.is_empty(), "{json}: {said}");
    }
    let nothing = aquifer(["plot", &folder.path("no.json"), "-o", &picture]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(text(&nothing.stderr).contains("no.json cannot be read: "));
    assert_eq!(folder.names(), ["run.json"]);
}

#[test]
fn a_bench_tells_a_terminal_how_far_it_is_and_erases_that() {
    let mut command = program();
    command.args(["bench", "budget"]);
    let (told, status) = on_terminal(command, |_, _| {});
    assert!(status.success());
    assert!(told.contains("measuring:") && told.contains(" %"), "{told:?}");
    assert!(told.ends_with("\r\x1b[K"), "{told:?}");
}

#[test]
fn a_bench_that_is_interrupted_leaves_no_file_and_a_visible_cursor() {
    let folder = Folder::new();
    // A shell starts what is in the background with this signal ignored, and tests may be there.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(program().get_program());
    command.args(["bench", "budget", "--plot", &folder.path("a.svg")]);
    let (told, status) = on_terminal(command, |id, told| {
        if told.contains("measuring:") {
            kill(id, Signal::SIGINT).expect("a process");
        }
    });
    assert_eq!(status.signal(), Some(2), "{told:?}");
    assert!(told.contains("measuring:") && !told.contains("\x1b[?25l"), "{told:?}");
    assert!(Path::new(&folder.0).is_dir() && folder.names().is_empty(), "{:?}", folder.names());
}
