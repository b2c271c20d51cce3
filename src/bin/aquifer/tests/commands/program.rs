//! The program as a person runs it: what it prints where, and how it exits.

use crate::support::{File, aquifer, data, json, number, program, snapshot, text};
use serde_json::Value;
use std::{
    env, fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

fn replay(trace: impl AsRef<Path>, flags: &str) -> Output {
    let mut command = program();
    command.arg("replay").arg(trace.as_ref()).args(flags.split_whitespace());
    command.output().expect("the program starts")
}

const HEADER: &str = "t_us,op,id,bytes,stream\n";

/// Blocks of two streams, one of which another stream uses beyond its free.
const SMALL: &str = "t_us,op,id,bytes,stream\n\
    0,a,1,1000,0\n\
    1,a,2,3000000,1\n\
    2,f,1,1000,0\n\
    2,a,3,500,0\n\
    3,c,1,1000,0\n\
    4,f,2,3000000,1\n\
    4,c,2,3000000,1\n\
    5,a,4,77,1\n";

#[test]
fn what_makes_no_sense_is_one_line_on_stderr_and_status_two() {
    let whole = fs::read(data("resnet_train.csv.xz")).expect("a trace");
    let log = "Thread,Time,Action,Pointer,Size,Stream\n";
    let traces: [(&str, Vec<u8>, &str); 14] = [
        ("empty", Vec::new(), "the file is empty"),
        ("words", b"Dear diary,\n".to_vec(), "row 1: not a trace"),
        ("cut", format!("{HEADER}0,a,1,5,0\n1,f,1,").into(), "row 3: cut off"),
        ("cut.xz", whole[..whole.len() / 2].to_vec(), "cut off"),
        ("fields", format!("{HEADER}0,a,1,5\n").into(), "row 2: 4 fields"),
        ("op", format!("{HEADER}0,z,1,5,0\n").into(), "row 2: op"),
        (
            "unknown",
            format!("{HEADER}0,a,1,5,0\n1,f,2,5,0\n").into(),
            "row 3: block 2 is freed but was never allocated",
        ),
        (
            "free",
            format!("{HEADER}0,a,1,5,0\n1,f,1,5,0\n2,f,1,5,0\n").into(),
            "row 4: block 1 is freed twice",
        ),
        (
            "twice",
            format!("{HEADER}0,a,1,5,0\n1,a,1,5,0\n").into(),
            "row 3: block 1 is allocated twice",
        ),
        (
            "early",
            format!("{HEADER}0,a,1,5,0\n1,c,1,5,0\n").into(),
            "row 3: block 1 is completed before it is freed",
        ),
        ("negative", format!("{HEADER}0,a,1,-5,0\n").into(), "row 2: a block of -5 bytes"),
        (
            "absurd",
            format!("{HEADER}0,a,1,9223372036854775807,0\n").into(),
            "row 2: a block of 9223372036854775807 bytes",
        ),
        ("stream", format!("{HEADER}0,a,1,5,-1\n").into(), "row 2: stream"),
        (
            "rmm",
            format!("{log}1,10:00:00.000001,free,0x10,5,0\n").into(),
            "row 2: the block at 0x10 is freed",
        ),
    ];
    for (name, bytes, expected) in traces {
        let file = File::new(name, bytes);
        refused(&replay(file.path(), "--device sim"), expected, name);
    }
    refused(
        &replay(Path::new("/nowhere/at/all.csv"), ""),
        "/nowhere/at/all.csv: No such file",
        "missing",
    );
    refused(&replay(Path::new("/tmp"), ""), "/tmp", "a folder");
    let small = File::new("small-refused", SMALL);
    for (flags, expected) in [
        ("--device sim --budget 0", "a budget of zero bytes"),
        ("--device sim --budget 0x", "a budget of zero bytes"),
        ("--device sim --budget 1EB", "an amount is bytes"),
        ("--device sim --budget 900T", "is more than the"),
        ("--device sim --budget 99999999x", "is more than the"),
        ("--device sim --budget 1G --fit", "cannot be used with"),
        ("--device gpu", "a device is auto, sim, cuda or cuda:N"),
        ("--device cuda:99", ""),
        ("--device sim --lag=-1", "invalid value '-1'"),
        ("--device sim --lag 1.5", "invalid value '1.5'"),
        ("--device sim --lag far", "invalid value 'far'"),
        ("--device cuda --lag 10", "--lag is for the simulated device only: --device sim"),
        ("--allocator fast", "invalid value 'fast'"),
        ("--repeat 0", "invalid value '0'"),
        ("--repeat often", "invalid value 'often'"),
        ("--jsno", "unexpected argument '--jsno'"),
    ] {
        refused(&replay(small.path(), flags), expected, flags);
    }
    refused(&aquifer::<&str>([]), "a command is needed", "no command");
    refused(&aquifer(["replay"]), "<TRACE>", "no trace");
    refused(&aquifer(["doctor", "--now"]), "unexpected argument '--now'", "doctor");
}

fn refused(output: &Output, expected: &str, what: &str) {
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{what}: {said}");
    assert!(output.stdout.is_empty(), "{what}: {}", text(&output.stdout));
    assert!(
        said.starts_with("aquifer: ") && said.ends_with('\n') && said.lines().count() == 1,
        "{what}: {said:?}"
    );
    assert!(said.contains(expected), "{what}: {said}");
}

#[test]
fn help_and_version_are_no_mistakes() {
    for arguments in [["--help"], ["--version"], ["help"]] {
        let output = aquifer(arguments);
        assert_eq!(output.status.code(), Some(0));
        assert!(!output.stdout.is_empty() && output.stderr.is_empty());
    }
    assert!(text(&aquifer(["replay", "--help"]).stdout).contains("--ignore-order"));
}

/// Fields and their kinds: `n` number, `s` string, `b` boolean, `o` object, `a` array, `?` object
/// or null.
const FIELDS: [(&str, char); 27] = [
    ("trace", 's'),
    ("device", 's'),
    ("lag", 'n'),
    ("allocator", 's'),
    ("ops", 'n'),
    ("allocs", 'n'),
    ("frees", 'n'),
    ("streams", 'n'),
    ("split", 'n'),
    ("changed_per_cent", 'n'),
    ("plan", '?'),
    ("peak_live_bytes", 'n'),
    ("peak_active_bytes", 'n'),
    ("peak_physical_bytes", 'n'),
    ("peak_physical_bytes_of_all_rounds", 'n'),
    ("device_of_trace", 'n'),
    ("notes", 'a'),
    ("completed", 'b'),
    ("failed_round", 'n'),
    ("ns_per_op", 'n'),
    ("driver_calls", 'o'),
    ("accesses_checked", 'n'),
    ("cross_stream_uses", 'n'),
    ("early_completions", 'n'),
    ("violations", 'n'),
    ("leaked_bytes", 'n'),
    ("rounds", 'a'),
];

/// What a search adds.
const FIT: [&str; 4] = ["fit_bytes", "ns_per_op_at_fit", "moves_at_fit", "rounds_at_fit"];

/// Fields that may be null.
const NULL: [&str; 6] =
    ["lag", "failed_round", "changed_per_cent", "device_of_trace", "ns_per_op", "split"];

fn has_fields(value: &Value, further: &[&str]) {
    let object = value.as_object().expect("an object");
    for (name, kind) in FIELDS {
        let field = object.get(name).unwrap_or_else(|| panic!("no {name}: {value}"));
        let right = match kind {
            's' => field.is_string(),
            'b' => field.is_boolean(),
            'o' => field.as_object().is_some_and(|calls| calls.values().all(Value::is_u64)),
            'a' => field.is_array(),
            '?' => field.is_object() || field.is_null(),
            _ => field.is_number() || (field.is_null() && NULL.contains(&name)),
        };
        assert!(right, "{name}: {field}");
    }
    let all = FIELDS.iter().map(|(name, _)| *name).chain(further.iter().copied());
    let mut unexpected: Vec<_> = object.keys().map(String::as_str).collect();
    unexpected.retain(|name| !all.clone().any(|expected| expected == *name));
    assert!(
        unexpected.is_empty() && object.len() == FIELDS.len() + further.len(),
        "{unexpected:?}"
    );
}

#[test]
fn json_has_the_promised_fields_and_no_others() {
    let small = File::new("small-json", SMALL);
    let output = replay(small.path(), "--device sim --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    has_fields(&json(&output), &[]);
    let output = replay(small.path(), "--device sim --json --fit");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    has_fields(&json(&output), &FIT);
}

/// The block that stream 1 allocates has room only where stream 0 freed one, ten operations before.
#[test]
fn what_another_stream_freed_is_ready_after_as_many_operations_as_the_device_lags() {
    let each = |row: fn(u32) -> String| (2..12).map(row).collect::<String>();
    let rows = each(|n| format!("0,a,{n},512,{n}\n"))
        + "0,a,0,67108864,0\n0,f,0,67108864,0\n0,c,0,67108864,0\n"
        + &each(|n| format!("0,f,{n},512,{n}\n0,c,{n},512,{n}\n"))
        + "0,a,1,67108864,1\n0,f,1,67108864,1\n0,c,1,67108864,1\n";
    let file = File::new("lag", format!("{HEADER}{rows}"));
    for (lag, waits) in [(0, false), (10, false), (11, true), (1000, true)] {
        let flags = format!("--device sim --repeat 1 --budget 84MiB --json --lag {lag}");
        let value = json(&replay(file.path(), &flags));
        let round = &value["rounds"][0];
        assert_eq!(value["lag"], lag);
        assert_eq!(number(&round["stream_waits"]) > 0, waits, "{lag}: {round}");
    }
    let screen = text(&replay(file.path(), "--device sim --lag 10").stdout);
    assert!(screen.contains("(simulated), lag 10,"), "{screen}");
}

#[test]
fn the_help_says_how_far_the_device_lags_by_default() {
    let small = File::new("small-lag", SMALL);
    let lag = &json(&replay(small.path(), "--device sim --json"))["lag"];
    assert!(
        text(&aquifer(["replay", "-h"]).stdout).contains(&format!("(default: {lag})")),
        "{lag}"
    );
}

#[test]
fn a_recorded_trace_is_clean_whatever_the_lag() {
    for lag in [0, 10, 100, 1000] {
        recorded("resnet_train.csv.xz", &format!("--device sim --repeat 2 --lag {lag}"));
    }
}

#[test]
fn a_freed_block_is_active_until_its_recorded_use_is_over() {
    let first = "0,a,1,1000,0\n0,f,1,1000,0\n";
    let rest = "0,a,2,700,0\n";
    let done = "0,c,1,1000,0\n";
    for (rows, flags, active) in [
        (format!("{first}{done}{rest}"), "", 1000),
        (format!("{first}{rest}{done}"), "", 1700),
        (format!("{first}{rest}0,a,3,9,0\n{done}0,a,4,800,0\n"), "", 1709),
        // Without its completion, to the end.
        (format!("{first}{rest}"), "", 1700),
        // A single stream has no other that uses it.
        (format!("{first}{rest}{done}"), "--streams 1", 1000),
    ] {
        let file = File::new("active", format!("{HEADER}{rows}"));
        let value = json(&replay(file.path(), &format!("--device sim --json {flags}")));
        let live = if rows.contains("800") { 1509 } else { 1000 };
        assert_eq!(value["peak_live_bytes"], live, "{rows}");
        assert_eq!(value["peak_active_bytes"], active.max(live), "{rows}");
    }
    let file = File::new("active-screen", format!("{HEADER}{first}{rest}{done}"));
    let screen = text(&replay(file.path(), "--device sim").stdout);
    assert!(screen.contains("1,000 bytes; 1.66 KiB live or in use"), "{screen}");
}

#[test]
fn a_trace_that_does_not_fit_says_so_and_exits_with_one() {
    let output = replay(data("resnet_train.csv.xz"), "--device sim --json --budget 0.5x");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let value = json(&output);
    has_fields(&value, &[]);
    assert_eq!((&value["completed"], &value["ns_per_op"]), (&Value::Bool(false), &Value::Null));
    assert_eq!((&value["violations"], &value["leaked_bytes"]), (&0.into(), &0.into()));
    let output = replay(data("resnet_train.csv.xz"), "--device sim --budget 0.5x");
    assert_eq!(output.status.code(), Some(1));
    let screen = text(&output.stdout);
    assert!(screen.contains("completed") && screen.contains("out of memory"), "{screen}");
    on_one_screen(&screen);
}

#[test]
fn a_replay_has_all_rounds_or_names_the_one_that_failed() {
    // Moves near the smallest limit leave gaps, which later rounds may not survive.
    for times in ["1.005x", "1.009x", "1.02x"] {
        let flags = format!("--device sim --json --repeat 8 --budget {times}");
        let output = replay(data("resnet_train.csv.xz"), &flags);
        let value = json(&output);
        has_fields(&value, &[]);
        let rounds = value["rounds"].as_array().unwrap().len();
        let failed = value["failed_round"].as_u64();
        let whole = failed.is_none();
        assert_eq!(output.status.code(), Some(i32::from(!whole)), "{times}");
        assert_eq!(value["completed"], whole, "{times}");
        assert_eq!((rounds, value["ns_per_op"].is_null()), (if whole { 8 } else { 0 }, !whole));
        assert!(failed.is_none_or(|round| (1..=8).contains(&round)), "{times}: {value}");
    }
}

#[test]
fn a_trace_beyond_the_device_fits_into_no_budget() {
    let rows = format!("{HEADER}0,a,1,{0},0\n0,a,2,{0},0\n", 100_u64 << 30);
    let file = File::new("beyond", rows);
    let output = replay(file.path(), "--device sim --fit --json");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let value = json(&output);
    has_fields(&value, &FIT);
    assert_eq!((&value["completed"], &value["fit_bytes"]), (&Value::Bool(false), &Value::Null));
    on_one_screen(&text(&replay(file.path(), "--device sim --fit").stdout));
    assert_eq!(replay(file.path(), "--device sim --budget 1").status.code(), Some(1));
}

fn on_one_screen(screen: &str) {
    assert!(screen.lines().count() <= 24, "{screen}");
    assert!(screen.lines().all(|line| line.chars().count() <= 80), "{screen}");
}

/// What must hold of each recorded trace, on any device and under any allocator.
fn recorded(name: &str, flags: &str) -> Value {
    let output = replay(data(name), &format!("{flags} --json"));
    assert_eq!(
        output.status.code(),
        Some(0),
        "{name} {flags}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
    let value = json(&output);
    has_fields(&value, &[]);
    // Operations, streams, peak, uses across streams.
    let (ops, streams, peak, crossings) = match name {
        "llama_train.csv.xz" => (63_608, 1, 4_076_911_904_u64, 0),
        "resnet_train.csv.xz" => (25_623, 2, 2_450_380_816, 16),
        _ => (24_000, 4, 13_758_172_979, 1375),
    };
    assert_eq!(value["completed"], true);
    assert_eq!(value["ops"], ops);
    assert_eq!(value["streams"], streams);
    assert_eq!(value["peak_live_bytes"], peak);
    assert!(value["peak_physical_bytes"].as_u64() >= Some(peak));
    assert_eq!(value["cross_stream_uses"], crossings);
    assert_eq!(value["violations"], 0);
    assert_eq!(value["leaked_bytes"], 0);
    assert!(value["accesses_checked"].as_u64() >= Some(ops / 2));
    value
}

#[test]
fn recorded_traces_complete_on_the_simulator() {
    for name in ["llama_train.csv.xz", "serve_mixed.csv.xz"] {
        recorded(name, "--device sim");
    }
}

#[test]
fn a_pool_holds_its_slack_beyond_the_peak_of_a_recorded_program() {
    let held = |flags: &str| {
        let value = json(&replay(data("serve_mixed.csv.xz"), flags));
        let of = |name: &str| number(&value[name]);
        assert_eq!((of("leaked_bytes"), &value["completed"]), (0, &Value::Bool(true)), "{value}");
        (of("peak_physical_bytes_of_all_rounds"), of("peak_live_bytes"))
    };
    let (plain, live) = held("--device sim --json --lag 64");
    assert!(plain * 100 > live * 107 && plain * 100 <= live * 117, "{plain} of {live}");
    // Far behind, live blocks pin handles of less than two per cent of the peak.
    for (lag, most) in [("64", 106), ("256", 108)] {
        let (tight, _) = held(&format!("--device sim --json --lag {lag} --slack 6"));
        assert!(tight * 100 <= live * most, "lag {lag}: {tight} of {live}");
    }
}

#[test]
fn a_slack_above_its_maximum_is_refused_by_name() {
    for wrong in ["10001", "-1", "much"] {
        let output = replay(data("llama_train.csv.xz"), &format!("--device sim --slack={wrong}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("--slack <PERCENT>") && said.contains(wrong), "{said}");
    }
}

#[test]
fn the_drivers_own_allocators_replay_beside_the_pool() {
    for allocator in ["async", "direct"] {
        let value = recorded(
            "resnet_train.csv.xz",
            &format!("--device sim --repeat 1 --allocator {allocator}"),
        );
        assert_eq!(value["allocator"], allocator);
    }
}

#[test]
fn the_oracle_objects_when_the_pool_is_not_told_who_uses_what() {
    let output =
        replay(data("serve_mixed.csv.xz"), "--device sim --repeat 1 --ignore-order --json");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    let value = json(&output);
    assert!(value["violations"].as_u64() > Some(0), "{value}");
    assert_eq!(value["completed"], true);
    let screen =
        text(&replay(data("serve_mixed.csv.xz"), "--device sim --repeat 1 --ignore-order").stdout);
    let words = screen.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("the read of row ") || words.contains("the write of row "), "{screen}");
    assert!(!words.contains(".rs:"), "no line of the replay's own source: {screen}");
}

#[test]
fn a_trace_may_come_by_the_standard_input() {
    let small = File::new("small-stdin", SMALL);
    let mut command = program();
    let input = fs::File::open(small.path()).expect("a file");
    let output = command
        .args(["replay", "-", "--device", "sim", "--json"])
        .stdin(input)
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert_eq!(json(&output)["ops"], json(&replay(small.path(), "--device sim --json"))["ops"]);
}

#[test]
fn completions_and_the_manual_name_every_command() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let output = aquifer(["completions", shell]);
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{shell}");
        let script = text(&output.stdout);
        for word in ["replay", "doctor", "ignore-order", "placement", "completions"] {
            assert!(script.contains(word), "{shell}: {word}");
        }
    }
    let bash = File::new("completions.bash", aquifer(["completions", "bash"]).stdout);
    let read = Command::new("bash").arg("-n").arg(bash.path()).output();
    assert!(read.map_or(true, |read| read.status.success()), "a shell can read it");
    let page = text(&aquifer(["man"]).stdout);
    assert!(page.contains(".TH aquifer 1"), "{page}");
    for section in [
        ".SH NAME",
        ".SH AQUIFER REPLAY",
        ".SH AQUIFER BENCH STAGE",
        ".SH AQUIFER REPORT",
        ".SH AQUIFER PLAN",
        ".SH AQUIFER STAGE",
        ".SH AQUIFER DOCTOR",
    ] {
        assert!(page.contains(section), "{section}: {page}");
    }
    assert!(page.contains("ignore\\-order") && !page.contains("AQUIFER HELP"), "{page}");
}

#[test]
fn each_process_records_to_a_file_of_its_own() {
    let small = File::new("small-recorded", SMALL);
    let folder = env::temp_dir().join(format!("aquifer-recorded-{}", std::process::id()));
    fs::create_dir_all(&folder).expect("a folder");
    let record = |name: &str| {
        let mut command = program();
        command.arg("replay").arg(small.path()).args(["--device", "sim", "--repeat", "1"]);
        let mut child = command
            .env("AQUIFER_TRACE", folder.join(name))
            .stdout(Stdio::null())
            .spawn()
            .expect("starts");
        let process = child.id();
        assert!(child.wait().expect("it ends").success());
        process
    };
    let check = |name: String| {
        let output = replay(folder.join(name), "--device sim --json");
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
        let value = json(&output);
        assert!(value["allocs"].as_u64() >= Some(3), "{value}");
    };
    let process = record("of-%p.csv");
    check(format!("of-{process}.csv"));
    let shared = folder.join("shared.csv");
    let own = aquifer_core::event::TraceFile::create(&shared).expect("a trace");
    let process = record("shared.csv");
    check(format!("shared.{process}.csv"));
    let written = fs::read_to_string(&shared).expect("a file");
    assert_eq!(written.lines().count(), 1, "what another process writes is left alone");
    drop(own);
    record("shared.csv");
    check("shared.csv".to_owned());
    fs::remove_dir_all(folder).expect("it goes");
}

#[test]
fn stage_says_that_a_directory_is_one() {
    refused(&aquifer(["stage", "/tmp"]), "/tmp is a directory", "stage");
}

#[test]
fn no_rate_is_told_of_copies_that_move_nothing() {
    let folder = env::temp_dir();
    let folder = folder.to_str().expect("text");
    let output = aquifer([
        "bench", "stage", "--quick", "--device", "sim", "--folder", folder, "--most", "64K",
    ]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = text(&output.stdout);
    assert!(!page.contains("GB/s") && page.contains("simulated"), "{page}");
    let left = fs::read_dir(folder).expect("a folder").filter_map(Result::ok);
    let left = left
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("aquifer-bench-stage-"));
    assert_eq!(left.count(), 0);
}

/// A screen with its figures replaced: what a person always sees.
fn masked(screen: &str) -> String {
    let mut lines = Vec::new();
    for line in screen.lines() {
        let words = line.split_whitespace().map(|word| {
            let bare = word.trim_matches(|c| ",;".contains(c));
            let figure = bare.trim_start_matches('+').starts_with(|c: char| c.is_ascii_digit());
            match bare {
                _ if figure => word.replace(bare, "#"),
                // A faster machine has other units.
                "ns" | "µs" | "ms" | "s" => word.replace(bare, "time"),
                "ns/op" | "µs/op" | "ms/op" | "s/op" => word.replace(bare, "time/op"),
                _ => word.to_owned(),
            }
        });
        lines.push(words.collect::<Vec<_>>().join(" "));
    }
    lines.join("\n") + "\n"
}

#[test]
fn the_screen_is_as_it_was_approved() {
    let small = File::new("small-screen", SMALL);
    let output = replay(small.path(), "--device sim");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let screen = text(&output.stdout).replace(small.path(), "small.csv");
    on_one_screen(&screen);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/small.txt");
    if env::var_os("AQUIFER_BLESS").is_some() {
        fs::write(&path, masked(&screen)).expect("the golden file");
    }
    assert_eq!(
        masked(&screen),
        fs::read_to_string(&path).unwrap_or_default(),
        "AQUIFER_BLESS=1 accepts:\n{screen}"
    );
}

#[test]
fn recorded_traces_are_clean_over_any_number_of_streams() {
    // Uses still cross where there is more than one.
    for (name, crossings) in
        [("llama_train.csv.xz", 0), ("resnet_train.csv.xz", 16), ("serve_mixed.csv.xz", 1375)]
    {
        for streams in [1, 8] {
            let flags = format!("--device sim --json --repeat 1 --streams {streams}");
            let output = replay(data(name), &flags);
            assert_eq!(output.status.code(), Some(0), "{name} {streams}: {}", text(&output.stdout));
            let value = json(&output);
            has_fields(&value, &[]);
            assert_eq!((&value["streams"], &value["split"]), (&streams.into(), &streams.into()));
            assert_eq!((&value["violations"], &value["leaked_bytes"]), (&0.into(), &0.into()));
            let expected = if streams == 1 { 0 } else { crossings };
            assert_eq!(value["cross_stream_uses"], expected, "{name} {streams}");
        }
    }
}

/// No round repeats another exactly: the streams differ in which frees are done at which time.
#[test]
fn streams_that_repeat_a_loop_stop_growing_at_a_fifth_above_the_peak() {
    let output = replay(Path::new("made:sharded"), "--device sim --json --repeat 24");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value = json(&output);
    let bytes = |of: &Value, name: &str| of[name].as_u64().unwrap();
    let (held, peak) =
        (bytes(&value, "peak_physical_bytes_of_all_rounds"), bytes(&value, "peak_live_bytes"));
    assert!(held <= peak / 100 * 120, "{held} of {peak}");
    let rounds = value["rounds"].as_array().unwrap();
    assert_eq!(rounds.len(), 24);
    // Of more than 8,000 operations each. Handles move where the bound leaves no room.
    let calls: u64 = rounds[4..].iter().map(|round| bytes(round, "memory_calls")).sum();
    assert!(calls <= 20 * 200, "{calls} memory calls in twenty rounds");
}

#[test]
fn a_split_trace_has_a_fit_that_holds() {
    let output = replay(
        Path::new("made:steady,length=0.03"),
        "--device sim --repeat 1 --fit --json --streams 4",
    );
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let value = json(&output);
    let (fit, peak) =
        (value["fit_bytes"].as_u64().expect("a fit"), value["peak_live_bytes"].as_u64());
    assert!(Some(fit) >= peak, "{value}");
    let again = replay(
        Path::new("made:steady,length=0.03"),
        &format!("--device sim --repeat 1 --json --streams 4 --budget {fit}"),
    );
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stdout));
}

#[test]
fn a_snapshot_of_pytorch_is_replayed_by_device() {
    let snapshots = PathBuf::from(snapshot(""));
    let value = json(&replay(snapshots.join("ring.pickle"), "--device sim --json --fit"));
    has_fields(&value, &FIT);
    let expected = [
        ("ops", 9),
        ("allocs", 5),
        ("streams", 2),
        ("peak_live_bytes", 705_000),
        ("violations", 0),
    ];
    for (name, count) in expected {
        assert_eq!(value[name], count, "{name}");
    }
    assert_eq!(value["device_of_trace"], 0);
    for (flags, device, ops) in [("", 1, 3), ("--device-index 0", 0, 1)] {
        let file = snapshots.join("devices.pickle");
        let value = json(&replay(&file, &format!("--device sim --json {flags}")));
        assert_eq!((&value["device_of_trace"], &value["ops"]), (&device.into(), &ops.into()));
        let screen = text(&replay(&file, &format!("--device sim {flags}")).stdout);
        assert_eq!(screen.contains("recorded on "), device > 0, "{screen}");
        on_one_screen(&screen);
    }
    refused(
        &replay(snapshots.join("devices.pickle"), "--device-index 9"),
        "no device of index 9",
        "no device",
    );
    refused(
        &replay(snapshots.join("broken.action.pickle"), ""),
        "device_traces[0][0]: action is not one that is known",
        "an action",
    );
    refused(
        &replay(data("resnet_train.csv.xz"), "--device-index 0"),
        "no devices to choose from",
        "no field",
    );
    refused(
        &replay(Path::new("made:edge"), "--device-index 0"),
        "no devices to choose from",
        "made",
    );
    let whole = fs::read(snapshots.join("start.pickle")).expect("a snapshot");
    let cut = File::new("cut.pickle", &whole[..whole.len() / 2]);
    refused(&replay(cut.path(), ""), "cut off: the pickle ends before its end", "cut");
}

#[test]
fn a_replay_is_written_as_a_snapshot_that_is_the_same_program() {
    let small = File::new("to-snapshot.csv", SMALL);
    for allocator in ["pool", "async", "direct"] {
        let file = File::new(&format!("{allocator}.pickle"), "");
        let flags =
            format!("--device sim --json --allocator {allocator} --snapshot {}", file.path());
        let (first, again) = (
            json(&replay(small.path(), &flags)),
            json(&replay(file.path(), "--device sim --json")),
        );
        for name in ["ops", "allocs", "streams", "live_at_end_bytes"] {
            assert_eq!(first[name], again[name], "{allocator}: {name}");
        }
        // A backend has a block back, and tells its free, when its last use is over.
        let late = if allocator == "pool" { 0 } else { 500 };
        let peak = |value: &Value| value["peak_live_bytes"].as_u64();
        assert_eq!(peak(&first).map(|bytes| bytes + late), peak(&again), "{allocator}");
        assert_eq!(again["notes"].to_string(), "[]", "{allocator}");
        let script = snapshot("check.py");
        match Command::new("python3").arg(script).arg(file.path()).output() {
            Ok(said) => assert!(said.status.success(), "{allocator}: {}", text(&said.stderr)),
            Err(e) => {
                println!(
                    "skipped: what PyTorch's tools take for granted, since there is no python3: {e}"
                );
            }
        }
    }
    refused(
        &replay(small.path(), "--device sim --snapshot /nowhere/x.pickle"),
        "/nowhere/x.pickle cannot be",
        "path",
    );
}

#[test]
fn what_is_replayed_is_saved_as_a_trace_that_is_the_same_program() {
    let small = File::new("to-save.csv", SMALL);
    for trace in [small.path(), "made:sharded,length=0.1"] {
        let file = File::new("saved.csv", "");
        let flags = format!("--device sim --json --streams 3 --save-trace {}", file.path());
        let (first, again) =
            (json(&replay(trace, &flags)), json(&replay(file.path(), "--device sim --json")));
        for name in ["ops", "allocs", "streams", "peak_live_bytes", "cross_stream_uses"] {
            assert_eq!(first[name], again[name], "{trace}: {name}");
        }
        assert_eq!(first["peak_physical_bytes"], again["peak_physical_bytes"], "{trace}");
    }
    for output in ["--save-trace", "--snapshot"] {
        let flags = format!("--device sim {output} {}", small.path());
        refused(&replay(small.path(), &flags), "would replace the trace that is read", "input");
        let folder = Path::new(small.path()).parent().expect("a folder").display();
        let other_name = small.path().replace(&format!("{folder}/"), &format!("{folder}/./"));
        let flags = format!("--device sim {output} {other_name}");
        refused(&replay(small.path(), &flags), "would replace the trace that is read", "input");
        let flags = format!("--device sim {output} /nowhere/x");
        refused(&replay(small.path(), &flags), "/nowhere/x cannot be written", "path");
    }
}

#[test]
fn every_round_says_what_it_asked_of_the_driver() {
    let file = "made:steady,length=0.1";
    let value = json(&replay(Path::new(file), "--device sim --json --repeat 20"));
    let rounds = value["rounds"].as_array().expect("rounds");
    assert_eq!(rounds.len(), 20);
    let fields = [
        "ns_per_op",
        "driver_calls",
        "memory_calls",
        "event_calls",
        "fences",
        "stream_waits",
        "host_waits",
        "moves",
    ];
    for (number, round) in rounds.iter().enumerate() {
        assert!(fields.iter().all(|field| round[field].is_number()), "{round}");
        let [all, memory, event] =
            ["driver_calls", "memory_calls", "event_calls"].map(|f| round[f].as_u64());
        assert!(memory.zip(event).map(|(memory, event)| memory + event) <= all, "{round}");
        // On one stream, after the first two rounds: nothing new is asked.
        assert!(number < 2 || all == Some(0), "round {number}: {round}");
    }
    assert!(rounds[0]["memory_calls"].as_u64() > Some(0));
    let screen = text(&replay(Path::new(file), "--device sim --repeat 20").stdout);
    assert!(screen.contains("in round 20: 0 memory, 0 event calls"), "{screen}");
    on_one_screen(&screen);
}

#[test]
fn made_traces_are_listed_and_replayed_like_a_file() {
    let output = aquifer(["replay", "made:"]);
    assert_eq!((output.status.code(), output.stderr.len()), (Some(0), 0));
    assert!(text(&output.stdout).contains("growing-kv"));
    let rows = json(&aquifer(["replay", "made:", "--json"]));
    for row in rows.as_array().expect("a list") {
        let name = format!("made:{},length=0.1", row["name"].as_str().expect("a name"));
        let output = replay(Path::new(&name), "--device sim --json --repeat 1");
        assert_eq!(output.status.code(), Some(0), "{name}: {}", text(&output.stdout));
        let value = json(&output);
        has_fields(&value, &[]);
        assert_eq!(
            (&value["violations"], &value["leaked_bytes"]),
            (&0.into(), &0.into()),
            "{name}"
        );
    }
    refused(
        &replay(Path::new("made:fast"), ""),
        "made:fast: no workload is called",
        "an unknown workload",
    );
    refused(&replay(Path::new("made:edge,scale=0"), ""), "scale is \"0\"", "a wrong option");
}

#[test]
fn the_log_of_rmm_is_replayed() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
        7,10:00:00.000001,allocate,0x7f0000000000,1048576,0x0\n\
        7,10:00:00.000002,allocate,(nil),0,0x0\n\
        7,10:00:00:000003,allocate,0x7f0000200000,4096,0x5581e2a0\n\
        7,10:00:00.000004,allocate failure,(nil),99999999999,0x0\n\
        7,10:00:00.000005,free,0x7f0000000000,1048576,0x5581e2a0\n\
        7,10:00:00.000006,free,0x7f0000200000,4096,0x5581e2a0\n";
    let file = File::new("rmm-log", log);
    let output = replay(file.path(), "--device sim --json");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let value = json(&output);
    let expected = [
        ("ops", 4),
        ("streams", 2),
        ("cross_stream_uses", 1),
        ("violations", 0),
        ("leaked_bytes", 0),
    ];
    for (name, count) in expected {
        assert_eq!(value[name], count, "{name}");
    }
}

#[test]
fn the_smallest_budget_holds_when_it_is_asked_for() {
    let output = replay(data("resnet_train.csv.xz"), "--device sim --repeat 1 --fit --json");
    assert_eq!(output.status.code(), Some(0), "{}{}", text(&output.stdout), text(&output.stderr));
    let value = json(&output);
    let fit = value["fit_bytes"].as_u64().expect("a fit");
    let peak = value["peak_live_bytes"].as_u64().expect("a peak");
    assert!(fit >= peak && fit as f64 <= 1.05 * peak as f64, "{fit} for {peak}");
    let output = replay(
        data("resnet_train.csv.xz"),
        &format!("--device sim --repeat 1 --json --budget {fit}"),
    );
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stdout));
    assert!(json(&output)["peak_physical_bytes"].as_u64() <= Some(fit));
}

#[test]
fn doctor_answers_with_or_without_a_gpu() {
    let output = aquifer(["doctor"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = text(&output.stdout);
    for section in ["driver", "nodes", "pages", "probe", "you get", "warning"] {
        assert!(page.lines().any(|line| line.starts_with(section)), "{section}: {page}");
    }
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    let output = aquifer(["doctor", "--json"]);
    assert_eq!(output.status.code(), Some(0));
    let value = json(&output);
    for field in ["driver", "facts", "gets", "not_more", "warnings"] {
        assert!(!value[field].is_null(), "{field}: {value}");
    }
    for about in ["driver", "nodes", "probe"] {
        let facts = value["facts"].as_array().expect("a list");
        assert!(facts.iter().any(|fact| fact["about"] == about), "{about}: {value}");
    }
    let warnings = value["warnings"].as_array().expect("a list");
    assert!(
        warnings
            .iter()
            .all(|w| w["says"].is_string() && w["fix"].as_str().is_some_and(|fix| !fix.is_empty()))
    );
    // What is warned of may have changed since.
    let strict = aquifer(["doctor", "--strict", "--json"]);
    let warned = json(&strict)["warnings"].as_array().is_some_and(|warnings| !warnings.is_empty());
    assert_eq!(strict.status.code(), Some(i32::from(warned)));
}

#[test]
fn every_trace_completes_on_a_gpu() {
    let value = json(&aquifer(["doctor", "--json"]));
    if value["driver"]["present"] != true {
        assert!(
            env::var("AQUIFER_REQUIRE_GPU").as_deref() != Ok("1"),
            "AQUIFER_REQUIRE_GPU=1 and no GPU: {value}"
        );
        println!("skipped: {}", value["driver"]["reason"]);
        return;
    }
    for name in ["llama_train.csv.xz", "resnet_train.csv.xz", "serve_mixed.csv.xz"] {
        for allocator in ["pool", "async"] {
            let value = recorded(name, &format!("--device cuda --allocator {allocator}"));
            assert_eq!(value["device"], "cuda:0");
        }
    }
}
