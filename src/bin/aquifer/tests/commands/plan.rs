//! `aquifer plan` as a person runs it: the plan, the screen, JSON, the check, and errors.

use crate::support::{Folder, data, json, number, program, text};
use aquifer_formats::plan::Plan;
use std::{
    env, fs,
    process::{Output, Stdio},
};

fn plan(arguments: &[&str]) -> Output {
    program().arg("plan").args(arguments).stdin(Stdio::null()).output().expect("the program starts")
}

/// Returns what a screen says, with single spaces.
fn said(screen: &str) -> String {
    screen.split_whitespace().collect::<Vec<_>>().join(" ")
}

const HEADER: &str = "t_us,op,id,bytes,stream\n";

/// Two blocks of 1000 bytes at once, and one of another stream after the first.
const SMALL: &str = "t_us,op,id,bytes,stream\n\
    0,a,1,1000,0\n\
    1,a,2,1000,0\n\
    2,f,1,1000,0\n\
    2,c,1,1000,0\n\
    3,a,3,900,1\n";

fn refused(arguments: &[&str], expected: &str) {
    let output = plan(arguments);
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}: {said}");
    assert!(said.contains(expected), "{arguments:?}: {said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn the_plan_of_a_recorded_program_is_close_to_its_peak_and_the_file_has_it() {
    let folder = Folder::new();
    let (trace, file) = (data("resnet_train.csv.xz"), folder.path("resnet.plan"));
    let output = plan(&[&trace, "-o", &file, "--seconds", "1", "--json"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value = json(&output);
    let [blocks, peak, bound, top, edges] =
        ["blocks", "peak_live_bytes", "lower_bound_bytes", "top_bytes", "edges"]
            .map(|field| number(&value[field]));
    assert_eq!((&value["trace"], blocks), (&trace.clone().into(), 12_813));
    assert!(value["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0), "{value}");
    assert!(peak <= bound && bound <= top && top as f64 <= peak as f64 * 1.005, "{value}");
    // Without a limit nothing says whether it fits.
    assert!(value.get("fits").is_none() && value.get("spare_bytes").is_none(), "{value}");
    let read = Plan::read_from(fs::File::open(&file).expect("the plan")).expect("a plan");
    assert_eq!((read.blocks().len() as u64, read.edges().len() as u64), (blocks, edges));
    assert_eq!((read.lower_bound(), read.top()), (bound, top));
}

#[test]
fn a_check_says_by_the_exit_status_whether_the_plan_fits_and_how_much_is_spare() {
    let folder = Folder::new();
    let trace = folder.path("small.csv");
    fs::write(&trace, SMALL).expect("a trace");
    // 2,000 bytes are live, and they take 2,048.
    for (limit, fits, spare) in [("2048", true, 0), ("3KiB", true, 1024), ("2047", false, -1)] {
        for check in [true, false] {
            let flags = [trace.as_str(), "--limit", limit, "--json", "--check"];
            let output = plan(&flags[..if check { 5 } else { 4 }]);
            let status = i32::from(check && !fits);
            assert_eq!(output.status.code(), Some(status), "{limit}: {}", text(&output.stderr));
            let value = json(&output);
            assert_eq!((&value["fits"], &value["spare_bytes"]), (&fits.into(), &spare.into()));
        }
    }
    let value = json(&plan(&[&trace, "--limit", "1.1x", "--json"]));
    assert_eq!((number(&value["limit_bytes"]), number(&value["spare_bytes"])), (2200, 152));
    let output = plan(&[&trace, "--limit", "2000", "--check"]);
    let screen = text(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{screen}");
    let reason = "no 48 B above 1.95 KiB; no plan fits: the lower bound is above it";
    assert!(said(&screen).contains(reason), "{screen}");
}

#[test]
fn a_plan_is_of_one_device_and_of_a_chosen_one_where_there_are_several() {
    let folder = Folder::new();
    let rows = "t_us,op,id,bytes,stream,kind,device\n\
        0,a,1,107374182400,0,cached,1\n\
        0,a,2,512,0,cached,0\n\
        0,a,3,512,0,cached,0\n\
        0,a,4,4096,0,pinned,host\n";
    let (trace, file) = (folder.path("two.csv"), folder.path("two.plan"));
    fs::write(&trace, rows).expect("a trace");
    let several = "two.csv has memory of devices 0, 1, and a plan is for one: --device-index N";
    for more in [&["--limit", "1GiB", "--check"][..], &["--json"], &["-o", &file]] {
        refused(&[&[&*trace][..], more].concat(), several);
    }
    let gate = ["--limit", "1GiB", "--check", "--device-index"];
    for (device, status) in [("0", 0), ("1", 1)] {
        let output = plan(&[&[&*trace][..], &gate, &[device]].concat());
        assert_eq!(output.status.code(), Some(status), "{}", text(&output.stdout));
        assert!(
            text(&output.stderr).contains("pinned host memory in the trace is left out"),
            "{output:?}"
        );
    }
}

#[test]
fn the_screen_has_the_figures_and_says_whether_a_file_is_written() {
    let folder = Folder::new();
    let (trace, file) = (folder.path("small.csv"), folder.path("small.plan"));
    fs::write(&trace, SMALL).expect("a trace");
    let screen = text(&plan(&[&trace]).stdout);
    for expected in [
        "aquifer plan /",
        "blocks 3 2 streams, 1 edge between streams",
        "peak live 1.95 KiB 2,000 bytes, as requested",
        "lower bound 2.00 KiB 2,048 bytes, in units of 512",
        "plan 2.00 KiB 2,048 bytes, 1.0000 x the lower bound",
        "written no -o FILE writes it",
    ] {
        assert!(said(&screen).contains(expected), "{expected}: {screen}");
    }
    let written = text(&plan(&[&trace, "-o", &file, "--limit", "1MiB"]).stdout);
    assert!(written.contains("written") && written.contains("yes"), "{written}");
    for line in screen.lines().chain(written.lines()) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn equal_traces_give_equal_files() {
    let folder = Folder::new();
    let files = ["a.plan", "b.plan"].map(|name| folder.path(name));
    for file in &files {
        let output = plan(&["made:steady,length=0.2", "-o", file]);
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    let [a, b] = files.map(|file| fs::read(file).expect("a plan"));
    assert!(a == b && a.starts_with(b"aqplan\r\n"));
}

#[test]
fn logs_of_rmm_and_snapshots_of_pytorch_are_planned() {
    let folder = Folder::new();
    let log = folder.path("rmm.csv");
    let rows = "Thread,Time,Action,Pointer,Size,Stream\n\
        7,10:00:00.000001,allocate,0x7f0000000000,1048576,0x0\n\
        7,10:00:00.000003,allocate,0x7f0000200000,4096,0x5581e2a0\n\
        7,10:00:00.000005,free,0x7f0000000000,1048576,0x5581e2a0\n\
        7,10:00:00.000006,allocate,0x7f0000300000,1048576,0x0\n";
    fs::write(&log, rows).expect("a log");
    let value = json(&plan(&[&log, "--json"]));
    assert_eq!(number(&value["top_bytes"]), 1_052_672);
    // Another stream freed the block whose addresses are used again.
    assert_eq!(number(&value["edges"]), 1);
    let snapshot = format!(
        "{}/../../../allocators/formats/tests/data/snapshots/start.pickle.xz",
        env!("CARGO_MANIFEST_DIR")
    );
    let value = json(&plan(&[&snapshot, "--json"]));
    assert!(number(&value["top_bytes"]) >= number(&value["peak_live_bytes"]), "{value}");
}

#[test]
fn what_makes_no_sense_is_one_line_on_stderr_and_status_two() {
    let folder = Folder::new();
    let trace = folder.path("small.csv");
    fs::write(&trace, SMALL).expect("a trace");
    let hostile = |name: &str, rows: &str| {
        let path = folder.path(name);
        fs::write(&path, format!("{HEADER}{rows}")).expect("a trace");
        path
    };
    refused(&[&hostile("zero.csv", "0,a,1,0,0\n")], "row 2: a block of 0 bytes");
    let most = format!("0,a,1,{},0\n", u64::MAX);
    refused(&[&hostile("most.csv", &most)], "row 2: a block of 18446744073709551615 bytes");
    let large = format!("0,a,1,{},0\n", 1_u64 << 40);
    refused(&[&hostile("large.csv", &large)], "block 0 has 1099511627776 bytes; a block of a plan");
    let many: String = (0..3).map(|id| format!("0,a,{id},{},0\n", (1_u64 << 40) - 512)).collect();
    refused(&[&hostile("many.csv", &many)], "are live at once, and a plan has at most");
    refused(&[&folder.path("none.csv")], "none.csv: No such file");
    refused(&[&trace, "--device-index", "1"], "no devices to choose from");
    refused(&[&trace, "--check"], "--limit <BYTES|1.05x>");
    refused(&[&trace, "--limit", "2x3"], "an amount is bytes");
    refused(&[&trace, "--seconds", "0"], "invalid value '0'");
    refused(&[], "<TRACE>");
    refused(&[&trace, "-o", &folder.path("no/such")], "cannot be written");
    // The trace stays, and nothing is left beside it.
    refused(&[&trace, "-o", &trace], "would replace the trace that is read");
    assert_eq!(fs::read_to_string(&trace).expect("the trace"), SMALL);
    let left = fs::read_dir(&folder.0).expect("the folder").count();
    assert_eq!(left, 5);
}

#[test]
fn a_plan_is_replaced_only_by_a_whole_one() {
    let folder = Folder::new();
    let file = folder.path("a.plan");
    fs::write(&file, "before").expect("a file");
    let output = plan(&["made:nothing", "-o", &file]);
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(fs::read_to_string(&file).expect("the file"), "before");
    let output = plan(&["made:edge,length=0.1", "-o", &file]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(Plan::read_from(fs::File::open(&file).expect("the plan")).is_ok());
    assert_eq!(fs::read_dir(&folder.0).expect("the folder").count(), 1);
}

fn replay(arguments: &[&str]) -> Output {
    let mut program = program();
    program.args(["replay", "--device", "sim", "--repeat", "1"]).args(arguments);
    program.stdin(Stdio::null()).output().expect("the program starts")
}

#[test]
fn a_replay_under_its_plan_hits_always_and_fits_into_the_plan_and_a_changed_one_hits_less() {
    let folder = Folder::new();
    let (trace, file) = (data("serve_mixed.csv.xz"), folder.path("serve.plan"));
    let made = plan(&[&trace, "-o", &file, "--seconds", "1", "--json"]);
    let top = number(&json(&made)["top_bytes"]);
    let flags = [trace.as_str(), "--plan", &file, "--json"];
    let budget = (top.next_multiple_of(2 << 20)).to_string();
    let output = replay(&[&flags[..], &["--budget", &budget]].concat());
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value = json(&output);
    let counts = |value: &serde_json::Value| {
        ["hits", "strays", "overlaps", "resynchronisations"]
            .map(|name| number(&value["plan"][name]))
    };
    assert_eq!(counts(&value), [12_000, 0, 0, 0]);
    assert_eq!(number(&value["leaked_bytes"]), 0);
    let memory_calls = value["rounds"][0]["memory_calls"].as_u64();
    assert_eq!(memory_calls, Some(0), "all memory was mapped before");

    let output = replay(&[&flags[..], &["--change", "5"]].concat());
    let value = json(&output);
    let [hits, strays, overlaps, _] = counts(&value);
    assert!(hits > 9_000 && strays > 100 && overlaps <= strays, "{value}");
    assert_eq!(number(&value["leaked_bytes"]), 0);
    let output = replay(&flags[..3]);
    let screen = said(&text(&output.stdout));
    assert!(screen.contains("plan hits 100.0 % 12,000 of 12,000 allocations;"), "{screen}");
}

#[test]
fn a_plan_that_cannot_be_followed_and_a_flag_of_pools_are_errors_of_one_line() {
    let folder = Folder::new();
    let (trace, none) = (folder.path("small.csv"), folder.path("none.plan"));
    fs::write(&trace, SMALL).expect("a trace");
    let wrong = replay(&[&trace, "--plan", &trace]);
    let missing = replay(&[&trace, "--plan", &none]);
    assert!(plan(&[&trace, "-o", &none]).status.success());
    let direct = replay(&[&trace, "--plan", &none, "--allocator", "direct"]);
    let slack = replay(&[&trace, "--slack", "6", "--allocator", "async"]);
    for (output, expected) in [
        (wrong, &*trace),
        (missing, &*none),
        (direct, "--plan is for the pool only"),
        (slack, "--slack is for the pool only"),
    ] {
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
        assert!(said.contains(expected) && said.lines().count() == 1, "{said}");
    }
}
