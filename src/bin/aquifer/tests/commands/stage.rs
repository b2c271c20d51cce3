//! `aquifer stage` and `aquifer bench stage` as a person runs them.

use crate::support::{File, aquifer, program, text};
use crate::terminal::on_terminal;
use nix::sys::signal::{Signal, kill};
use serde_json::{Value, json};
use std::{
    env, fs,
    path::Path,
    process::{self, Child, Stdio},
    thread,
    time::{Duration, Instant},
};

/// Longer than any run takes, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

fn answered(arguments: &[&str]) -> Value {
    let output = aquifer(arguments);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{arguments:?}: {out}{err}");
    assert!(err.is_empty(), "{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// Returns bytes of which neighbours differ.
fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 253) as u8).collect()
}

/// Small enough that little data goes through many slots.
const SMALL: [&str; 8] = ["--workers", "2", "--slot", "64K", "--chunk", "8K", "--direct", "4K"];

#[test]
fn a_file_is_loaded_each_way_and_every_byte_is_right() {
    let file = File::new("stage", contents((3 << 20) + 77));
    let flags = ["stage", file.path(), "--device", "sim", "--json"];
    let value = answered(&[&flags[..], &SMALL].concat());
    assert_eq!((&value["bytes"], &value["wrong_bytes"]), (&json!((3 << 20) + 77), &json!(0)));
    let names = |field: &str, name: &str| -> Vec<String> {
        let rows = value[field].as_array().expect("rows");
        rows.iter().map(|row| row[name].as_str().expect("a name").to_owned()).collect()
    };
    let mut measured = names("rows", "name");
    measured.extend(names("left_out", "row"));
    measured.sort();
    assert_eq!(
        measured,
        [
            "file, O_DIRECT",
            "file, cold page cache",
            "file, warm page cache",
            "pageable memory",
            "pinned memory, the limit"
        ]
    );
    for row in value["rows"].as_array().expect("rows") {
        assert_eq!(row["unit"], "GB/s");
        assert!(row["value"].as_f64() > Some(0.0) && row["ratio"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["peer"], "driver, pageable memory");
    }
    let page = text(&aquifer(["stage", file.path(), "--device", "sim"]).stdout);
    assert!(page.contains("every byte was read back and is right"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
}

#[test]
fn a_file_that_cannot_be_staged_is_told_in_one_line() {
    let empty = File::new("empty", contents(0));
    for (path, said) in [
        ("/nowhere/at all", "/nowhere/at all: No such file"),
        (empty.path(), "has no bytes"),
        ("/", "directory"),
    ] {
        let output = aquifer(["stage", path, "--device", "sim"]);
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{err}");
        assert!(
            err.contains(said) && err.lines().count() == 1 && output.stdout.is_empty(),
            "{err}"
        );
    }
    let wrong = aquifer(["bench", "stage", "--device", "sim", "--slot", "5000"]);
    let err = text(&wrong.stderr);
    assert!(wrong.status.code() == Some(2) && err.contains("a multiple of 4096 bytes"), "{err}");
}

#[test]
fn a_quick_bench_has_every_promised_row_and_no_failure() {
    let flags = [
        "bench", "stage", "--device", "sim", "--quick", "--json", "--slot", "256K", "--chunk",
        "64K",
    ];
    let value = answered(&flags);
    assert_eq!(
        (&value["bench"], &value["device"], &value["quick"]),
        (&json!("stage"), &json!("sim"), &json!(true))
    );
    assert_eq!((&value["failures"], &value["errors"]), (&json!(0), &json!([])));
    let rows = value["rows"].as_array().expect("rows");
    let left: Vec<_> = value["left_out"]
        .as_array()
        .expect("a list")
        .iter()
        .filter_map(|row| row["row"].as_str())
        .collect();
    let mut promised = Vec::new();
    for size in ["4 KiB", "16 KiB", "64 KiB", "128 KiB", "256 KiB", "512 KiB", "1 MiB"] {
        for way in ["upload", "download"] {
            promised.extend([format!("{way} {size}"), format!("{way} {size}, of the limit")]);
        }
    }
    promised.push("both ways 1 MiB".to_owned());
    for size in ["4 KiB", "64 KiB", "1 MiB"] {
        for how in ["warm", "cold", "O_DIRECT"] {
            let name = format!("file {size}, {how}");
            if !left.contains(&name.as_str()) {
                promised.extend([name.clone(), format!("{name}, of the limit")]);
            }
        }
    }
    let names: Vec<_> =
        rows.iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect();
    let beside_pinned = |name: &String| name.ends_with("of the limit") || name.starts_with("both");
    assert!(names.is_sorted_by_key(beside_pinned), "rows with one peer stand together: {names:?}");
    let sorted = |mut names: Vec<String>| {
        names.sort();
        names
    };
    assert_eq!(sorted(names), sorted(promised));
    for row in rows {
        assert_eq!(row["unit"], "µs", "a simulated device has no rate");
        let figure = |field: &str| row[field].as_f64().expect("a figure");
        let (value, peer, ratio) = (figure("value"), figure("peer_value"), figure("ratio"));
        assert!(value > 0.0 && peer > 0.0 && (ratio * peer / value - 1.0).abs() < 1e-2, "{row}");
    }
    let none = aquifer(["bench", "stage", "--device", "sim", "--quick", "--only", "sideload"]);
    assert_eq!(none.status.code(), Some(2));
    assert!(text(&none.stderr).contains("no row's name contains 'sideload'"));
    let some =
        answered(&["bench", "stage", "--device", "sim", "--quick", "--json", "--only", "both"]);
    assert_eq!(some["rows"].as_array().map(Vec::len), Some(1));
}

/// Returns whether a process has a file with contents open in a folder.
fn has_open_file_in(process: &Child, folder: &Path) -> bool {
    let open = fs::read_dir(format!("/proc/{}/fd", process.id()));
    open.into_iter().flatten().flatten().map(|entry| entry.path()).any(|entry| {
        fs::read_link(&entry).is_ok_and(|target| target.starts_with(folder))
            && fs::metadata(&entry).is_ok_and(|found| found.is_file() && found.len() > 0)
    })
}

#[test]
fn a_bench_that_is_killed_half_way_leaves_no_file_behind() {
    let folder = env::temp_dir().join(format!("aquifer-test-killed-{}", process::id()));
    fs::create_dir(&folder).expect("a folder");
    let path = folder.to_str().expect("text");
    let flags =
        ["bench", "stage", "--device", "sim", "--quick", "--only", "warm", "--folder", path];
    let mut command = program();
    command.args(flags);
    let mut bench = command.stdout(Stdio::null()).spawn().expect("the program starts");
    let deadline = Instant::now() + PATIENCE;
    while !has_open_file_in(&bench, &folder) {
        assert!(bench.try_wait().expect("a status").is_none(), "it ended without a file");
        assert!(Instant::now() < deadline, "it writes no file");
    }
    bench.kill().expect("a process");
    let status = bench.wait().expect("a status");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9), "it had ended");
    let left: Vec<_> = fs::read_dir(&folder).expect("a folder").flatten().collect();
    fs::remove_dir_all(&folder).expect("still there");
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn stage_tells_a_terminal_how_far_it_is_and_erases_that() {
    let file = File::new("progress", contents(16 << 20));
    let mut command = program();
    command.args(["stage", file.path(), "--device", "sim"]);
    let (told, status) = on_terminal(command, |id, told| {
        // Only work that takes a while is told of, so it is held up until it is.
        if told.is_empty() {
            kill(id, Signal::SIGSTOP).expect("a process");
            // Longer than the program waits before it tells anything.
            thread::sleep(Duration::from_millis(450));
            kill(id, Signal::SIGCONT).expect("a process");
            thread::sleep(Duration::from_millis(10));
        }
    });
    assert!(status.success());
    let phases = ["copies of memory", "cache is cold", "cache is warm", "past the page cache"];
    assert!(phases.iter().any(|phase| told.contains(phase)) && told.contains(" %"), "{told:?}");
    assert!(told.ends_with("\r\x1b[2K"), "{told:?}");
}
