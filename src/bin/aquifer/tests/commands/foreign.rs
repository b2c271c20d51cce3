//! Names of other processes and files that try to command a terminal, or to forge a line: each
//! command shows them, in results and in errors, and none of them acts.

use crate::{
    processes::{Part, Scratch},
    support::{Folder, json, program, text},
};
use aquifer_benches::console::foreign::{is_acting, printable};
use std::{ffi::OsStr, fs, process::Output};

/// A name that colours what follows, begins a line of its own, and turns the order around.
const HOSTILE: &str = "\u{1b}[31m\nforged line\r\u{9b}2J\u{202e}\t\u{7f}";

/// Checks that nothing which is printed acts on a terminal, and no line is forged.
fn check(output: &Output, what: &str) {
    for said in [&output.stdout, &output.stderr].map(|said| text(said)) {
        assert!(!said.chars().any(|c| is_acting(c) && c != '\n'), "{what}: {said:?}");
        assert!(!said.lines().any(|line| line.starts_with("forged")), "{what}: {said}");
    }
}

/// Runs the program, and checks what it prints. It must show what is hostile: in its result if the
/// status is 0, or else in one line on stderr.
fn run<S: AsRef<OsStr>>(arguments: &[S], status: i32) -> Output {
    let output = program().args(arguments).output().expect("the program starts");
    let what: Vec<_> = arguments.iter().map(|of| of.as_ref().to_string_lossy()).collect();
    let what = printable(&what.join(" "));
    check(&output, &what);
    assert_eq!(output.status.code(), Some(status), "{what}: {}", text(&output.stderr));
    let said = if status == 0 { &output.stdout } else { &output.stderr };
    // A long name is cut in its middle.
    assert!(text(said).contains("\\u202e"), "{what}: {}", text(said));
    if status == 2 {
        assert_eq!((text(said).lines().count(), output.stdout.len()), (1, 0), "{what}");
    }
    output
}

const TRACE: &str = "t_us,op,id,bytes,stream\n0,a,1,1000,0\n1,a,2,1000,0\n2,f,1,1000,0\n";

#[test]
fn names_of_files_are_shown_and_do_nothing() {
    let folder = Folder::new();
    let trace = folder.file(&format!("{HOSTILE}.csv"), TRACE);
    let output = |end: &str| folder.path(&format!("{HOSTILE}{end}"));
    let plan = output(".plan");
    run(&["replay", &trace, "--device", "sim"], 0);
    run(&["report", &trace, "--text"], 0);
    run(&["report", &trace, &trace], 0);
    run(&["report", &trace, "-o", &output(".html")], 0);
    run(&["plan", &trace], 0);
    run(&["plan", &trace, "-o", &plan], 0);
    for command in ["replay", "report", "plan"] {
        let value = json(&run(&[command, &trace, "--json"], 0));
        assert!(value.to_string().contains("forged line\\r\u{9b}2J\u{202e}"), "{value}");
    }
    // Each command that reads or writes a file, where that fails.
    let absent = output("/absent");
    run(&["replay", &absent, "--device", "sim"], 2);
    run(&["replay", &trace, "--plan", &absent, "--device", "sim"], 2);
    run(&["replay", &trace, "--plan", &trace, "--device", "sim"], 2);
    run(&["replay", &trace, "--save-trace", &absent, "--device", "sim"], 2);
    run(&["replay", &trace, "--save-trace", &trace, "--device", "sim"], 2);
    run(&["report", &absent], 2);
    run(&["report", &trace, "-o", &absent], 2);
    run(&["report", &trace, "-o", &trace], 2);
    run(&["plan", &absent], 2);
    run(&["plan", &trace, "-o", &absent], 2);
    run(&["plan", &trace, "-o", &trace], 2);
    run(&["stage", &absent, "--device", "sim"], 2);
    run(&["stage", &folder.file(&format!("{HOSTILE}.empty"), ""), "--device", "sim"], 2);
    run(&["metrics", "-o", &absent], 2);
    run(&["metrics", "--listen", HOSTILE], 2);
    run(&["replay", HOSTILE], 2);
    run(&[HOSTILE], 2);
}

#[test]
fn names_within_files_are_shown_and_do_nothing() {
    let folder = Folder::new();
    let column = TRACE.replace("stream\n", "stream,\u{1b}[31m\u{9b}2J\u{202e}forged\n");
    let column = column.replace(",0\n", ",0,x\n");
    let column = folder.file("column.csv", column);
    // Names of tags are encoded as in addresses of pages.
    let name = "%1B[31m%0Aforged%C2%9B2J%E2%80%AE";
    let rows = [1, 2].map(|id| format!("{id},a,{id},60000000,0,{name}\n")).concat();
    let tag = folder.file("tag.csv", format!("t_us,op,id,bytes,stream,tag\n{rows}"));
    let run = |arguments: &[&str]| {
        let output = program().args(arguments).output().expect("the program starts");
        check(&output, arguments[0]);
        [output.stdout, output.stderr].map(|said| text(&said)).concat()
    };
    let replayed = run(&["replay", &column, "--device", "sim"]);
    assert!(replayed.contains("\\u001b[31m\\u009b2J\\u202eforged"), "{replayed}");
    let reported = run(&["report", &tag, "--text"]);
    assert!(reported.contains("\\u001b[31m\\nforged\\u009b2J\\u202e"), "{reported}");
    let failed = run(&["replay", &tag, "--device", "sim", "--budget", "100M"]);
    assert!(failed.contains("out of memory"), "{failed}");
    for trace in [&column, &tag] {
        run(&["replay", trace, "--device", "sim", "--json"]);
        run(&["report", trace, "--json"]);
        run(&["plan", trace]);
    }
}

#[test]
fn names_of_processes_and_ledgers_are_shown_and_do_nothing() {
    let folder = Scratch::new("foreign");
    let mut parts = ["hostile_process", "shared::member_process"]
        .map(|role| Part::start_as(role, &folder, 1, Some(HOSTILE)));
    for part in &mut parts {
        assert_eq!(part.line(), "ready");
    }
    fs::write(folder.0.join(format!("{HOSTILE}.ledger")), "noise").expect("a file");
    fs::write(folder.0.join(format!("{HOSTILE}.status")), "noise").expect("a file");
    let on_folder = |arguments: &[&str]| {
        let mut command = program();
        command.args(arguments).env("AQUIFER_STATUS", &folder.0).env("AQUIFER_LEDGER", &folder.0);
        let output = command.output().expect("the program starts");
        check(&output, &arguments.join(" "));
        text(&output.stdout)
    };
    let said = on_folder(&["top", "--once"]);
    // The command of the member, and the name of a ledger.
    assert!(said.matches("\\u001b[31m\\nforged").count() > 1, "{said}");
    let said = on_folder(&["top", "--json"]);
    let value: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert!(value.to_string().contains("forged line\\r\u{9b}2J\u{202e}"), "{value}");
    assert!(on_folder(&["metrics"]).contains("[31m"));
}
