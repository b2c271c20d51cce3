//! The groups of `aquifer bench`, as a person runs them.

use crate::support::{program, text};
use crate::terminal::on_terminal;
use nix::sys::signal::{Signal, kill};
use serde_json::Value;
use std::{
    env,
    os::unix::process::ExitStatusExt,
    process::{Command, Output},
};

/// Whether the program was built with all peers, as these tests were.
const PEERS: bool = cfg!(feature = "peers");

/// The program: the one that was built with these tests, or one that was brought along.
fn bench(flags: &str) -> Output {
    let mut command = program();
    command.arg("bench").args(flags.split_whitespace());
    command.output().expect("the program starts")
}

/// What was measured, with the exit status that goes with it.
fn measured(flags: &str) -> Value {
    let output = bench(flags);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{flags}: {out}{err}");
    assert!(err.is_empty(), "{err}");
    serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
}

/// The command that builds and measures all peers of a group.
fn with_peers(group: &str) -> String {
    format!("cargo run --release -p aquifer-cli --features peers -- bench {group}")
}

/// Checks that a report names this command if peers are missing, and only then.
fn assert_names_missing_peers(report: &Value, group: &str) {
    let left_out = report["left_out"].as_array().expect("a list");
    let told = left_out.iter().find(|left| left["row"] == "more peers");
    assert_eq!(told.is_none(), PEERS, "{left_out:?}");
    assert!(told.is_none_or(|told| text_of(told, "why").ends_with(&with_peers(group))), "{told:?}");
}

/// Every row that a run without `--driver` has.
fn promised() -> Vec<String> {
    let mut names = vec!["malloc pair 64 B".to_owned()];
    let named = |what: &str, sizes: &[&str]| {
        sizes.iter().map(|size| format!("{what}{size}")).collect::<Vec<_>>()
    };
    names.extend(named("pair ", &["256 B", "4 KiB", "64 KiB", "1 MiB", "64 MiB", "1 GiB"]));
    names.extend(named("batch of 64, ", &["256 B", "4 KiB", "64 KiB", "1 MiB", "64 MiB"]));
    names.extend(named("random up to ", &["1 MiB", "64 MiB", "4 GiB"]));
    for (job, scaling) in [("4 KiB", "each"), ("random up to 1 MiB", "random, each")] {
        for threads in ["1 thread", "2 threads", "4 threads", "8 threads", "16 threads"] {
            names.extend(named(&format!("{threads}, {job}, "), &["over all", "each"]));
        }
        names.push(format!("16 threads, {scaling}, over one thread"));
    }
    names.extend(named(
        "",
        &["open a pool", "first allocation, 1 MiB", "grow by 1 GiB", "trim 1 GiB", "move a handle"],
    ));
    names.extend(named(
        "past ",
        &["100 holes", "1,000 holes", "10,000 holes", "100,000 holes", "1,000,000 holes"],
    ));
    names.push("past 1,000,000 holes, over 100".to_owned());
    names
}

#[test]
fn a_quick_run_has_every_promised_row_and_no_failure() {
    let value = measured("device --device sim --quick --json");
    let said = |name: &str| {
        value[name].as_str().unwrap_or_else(|| panic!("no {name}: {value}")).to_owned()
    };
    assert_eq!((said("bench"), said("device")), ("device".into(), "sim".into()));
    assert_eq!(said("version"), env!("CARGO_PKG_VERSION"));
    assert!(said("device_name").contains("H200") && said("driver").starts_with("simulated, CUDA "));
    let date = said("date");
    assert!(date.len() == 20 && date.ends_with('Z') && date.starts_with("20"), "{date}");
    assert!(value["host_cpus"].as_u64() >= Some(1));
    assert!(value["host_cpu"].is_string() || value["host_cpu"].is_null());
    assert_eq!(value["quick"], true);
    assert_eq!((&value["failures"], value["errors"].as_array()), (&0.into(), Some(&Vec::new())));
    assert_eq!(value["left_out"].as_array(), Some(&Vec::new()));

    let rows = value["rows"].as_array().expect("rows");
    let names: Vec<_> =
        rows.iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect();
    assert_eq!(names, promised());
    for row in rows {
        let name = row["name"].as_str().expect("a name");
        let number = |field: &str| row[field].as_f64().filter(|&figure| figure > 0.0);
        assert!(number("value").is_some(), "{row}");
        assert_eq!(row.as_object().map(|row| row.len()), Some(6), "{row}");
        let peer = match name {
            _ if name.starts_with("pair ") => Some("malloc 64 B"),
            _ if name.ends_with("over one thread") => Some("1 thread"),
            _ if name.ends_with("over 100") => Some("100 holes"),
            _ => None,
        };
        assert_eq!(row["peer"].as_str(), peer, "{row}");
        assert_eq!(row["peer_value"].is_null(), peer.is_none(), "{row}");
        assert_eq!(row["ratio"].is_null(), peer.is_none(), "{row}");
        if let (Some(value), Some(peer)) = (number("value"), number("peer_value")) {
            let ratio = number("ratio").expect("a ratio");
            assert!((ratio * peer / value - 1.0).abs() < 1e-3, "{row}");
        }
        let unit = match name {
            _ if name.contains("pair") || name.starts_with("past") => "ns/pair",
            "open a pool" | "first allocation, 1 MiB" => "µs",
            "grow by 1 GiB" | "trim 1 GiB" => "ms/GiB",
            "move a handle" => "µs/handle",
            _ => "ns/op",
        };
        assert_eq!(row["unit"], unit, "{row}");
    }
    // One yardstick for all.
    let malloc = &rows[0]["value"];
    assert!(rows[1..7].iter().all(|row| row["peer_value"] == *malloc), "{value}");
}

#[test]
fn a_quick_run_over_pinned_memory_has_every_promised_row_and_no_failure() {
    let mut promised = vec!["pair 64 B, simulated".to_owned(), "malloc pair 64 B".to_owned()];
    let sizes = ["64 B", "1 KiB", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB"];
    promised.extend(sizes.iter().map(|size| format!("pair {size}")));
    for size in ["64 KiB", "1 MiB", "64 MiB"] {
        promised.extend([format!("random up to {size}"), format!("waste, random up to {size}")]);
    }
    for job in ["4 KiB", "1 MiB", "random up to 64 KiB", "random up to 1 MiB"] {
        for threads in ["1 thread", "2 threads", "4 threads", "8 threads", "16 threads"] {
            promised.extend(["over all", "each"].map(|of| format!("{threads}, {job}, {of}")));
        }
    }
    let value = measured("pinned --device sim --quick --json");
    assert_eq!((value["bench"].as_str(), &value["failures"]), (Some("pinned"), &0.into()));
    let rows = value["rows"].as_array().expect("rows");
    let named = |field: &str| {
        let all = value[field].as_array().expect("an array").iter();
        all.map(|row| row["name"].as_str().or(row["row"].as_str()).expect("a name").to_owned())
    };
    // A small machine leaves some out, and says so.
    let left_out: Vec<_> = named("left_out").collect();
    promised.retain(|name| !left_out.contains(name));
    // Whole regions are by the workers that the machine has.
    let (regions, others): (Vec<_>, Vec<_>) =
        named("rows").partition(|name| name.starts_with("region"));
    assert_eq!(others, promised);
    assert!(regions.iter().any(|name| name.ends_with("1 worker")), "{regions:?}");
    for row in rows {
        let (name, value) =
            (row["name"].as_str().expect("a name"), row["value"].as_f64().expect("a value"));
        if name.starts_with("waste") {
            assert!(row["unit"] == "%" && (0.0..3.0).contains(&value), "{row}");
        } else {
            assert!(value > 0.0, "{row}");
        }
        let same = name.starts_with("random") || name.contains("thread");
        let peer =
            if name.starts_with("pair") { Some("malloc 64 B") } else { same.then_some("malloc") };
        assert_eq!(row["peer"].as_str(), peer, "{row}");
    }
}

#[test]
fn a_quick_run_over_the_global_allocator_has_every_promised_row_and_no_failure() {
    let rows = |threads: usize, jobs: &[&str]| {
        let value = measured(&format!("global --quick --json --only ×{threads},"));
        assert_eq!((value["bench"].as_str(), &value["failures"]), (Some("global"), &0.into()));
        let (mut counted, mut routed) = (Vec::new(), Vec::new());
        let inners = ["system", "mimalloc", "jemalloc"];
        for inner in if PEERS { &inners[..] } else { &inners[..1] } {
            for job in jobs {
                let named = |what: &str| format!("{inner}, {job} ×{threads}, {what}");
                counted.extend(["bare", "off", "on", "tags", "on adds", "tags adds"].map(named));
                if PEERS && *inner == "system" {
                    counted.extend(["on/stats_alloc", "on/cap", "tags/tracking"].map(named));
                }
                routed.extend(["route", "in its scope", "route adds"].map(named));
            }
        }
        let rows = value["rows"].as_array().expect("rows").clone();
        let names: Vec<_> =
            rows.iter().map(|row| row["name"].as_str().expect("a name").to_owned()).collect();
        assert_eq!(names, [counted, routed].concat());
        assert_names_missing_peers(&value, "global");
        rows
    };
    let pairs = ["64 B", "1 KiB", "32 KiB", "mix"];
    let handed = ["64 B handed", "1 KiB handed", "32 KiB handed", "mix handed"];
    for row in rows(1, &pairs).into_iter().chain(rows(2, &[pairs, handed].concat())) {
        let (name, value) =
            (row["name"].as_str().expect("a name"), row["value"].as_f64().expect("a value"));
        assert_eq!(row["unit"], "ns/pair", "{row}");
        if name.ends_with("adds") {
            let interval = row["interval"].as_array().expect("an interval");
            let [least, most] = interval.as_slice() else { panic!("{row}") };
            assert!(least.as_f64() <= Some(value) && Some(value) <= most.as_f64(), "{row}");
        } else {
            assert!(value > 0.0 && row["interval"].is_null(), "{row}");
        }
        let peer = match name.rsplit(", ").next().expect("who") {
            "bare" | "on adds" | "tags adds" | "route adds" => None,
            "on/stats_alloc" => Some("stats_alloc"),
            "on/cap" => Some("cap"),
            "tags/tracking" => Some("tracking-allocator"),
            _ => Some("bare"),
        };
        assert_eq!(row["peer"].as_str(), peer, "{row}");
    }
}

#[test]
fn a_quick_run_over_arenas_has_every_promised_row_and_no_failure() {
    let works = [
        "8 B objects",
        "36 B objects",
        "blocks of 8 to 512 B",
        "strings of up to 31 B",
        "slices of up to 15 u32",
        "box, dropped at once",
        "vector of 100 u32",
        "10 objects, reset",
        "new arena, 100 objects",
    ];
    let returns = ["mark, 10 objects, rewind", "scope in a scope, 10 each"];
    let with_pinned = |names: &[&str]| -> Vec<String> {
        names.iter().flat_map(|name| [(*name).to_owned(), format!("{name}, pinned")]).collect()
    };
    let beside = |peer: &str| works.map(|name| format!("{name}, beside {peer}"));
    let mut promised: Vec<_> =
        with_pinned(&works).into_iter().map(|name| (name, "bumpalo")).collect();
    // What has no peer comes first: these rows too, if theirs is not built.
    let mut promised_alone = Vec::new();
    if PEERS {
        promised.extend(beside("bump-scope").map(|name| (name, "bump-scope")));
        promised.extend(with_pinned(&returns).into_iter().map(|name| (name, "bump-scope")));
    } else {
        promised_alone = with_pinned(&returns);
    }
    promised.extend(beside("malloc").map(|name| (name, "malloc")));
    promised.extend(returns.map(|name| (format!("{name}, beside malloc"), "malloc")));
    let value = measured("arena --device sim --quick --json");
    assert_eq!((value["bench"].as_str(), &value["failures"]), (Some("arena"), &0.into()));
    let rows = value["rows"].as_array().expect("rows");
    assert_names_missing_peers(&value, "arena");
    let (alone, rows) = rows.split_at(promised_alone.len());
    let found: Vec<_> = alone.iter().map(|row| text_of(row, "name")).collect();
    assert_eq!(found, promised_alone);
    for row in alone {
        assert!(row["value"].as_f64() > Some(0.0) && row["peer"].is_null(), "{row}");
    }
    let found: Vec<_> =
        rows.iter().map(|row| (text_of(row, "name"), text_of(row, "peer"))).collect();
    let promised: Vec<_> =
        promised.into_iter().map(|(name, peer)| (name, peer.to_owned())).collect();
    assert_eq!(found, promised);
    assert!(
        rows.iter()
            .all(|row| row["value"].as_f64() > Some(0.0) && row["peer_value"].as_f64() > Some(0.0))
    );
}

fn text_of(row: &Value, field: &str) -> String {
    row[field].as_str().expect("text").to_owned()
}

#[test]
fn a_page_without_all_peers_says_in_one_line_how_to_get_them() {
    if PEERS {
        return;
    }
    for (group, flags) in [("global", "global --quick"), ("arena", "arena --quick --device sim")] {
        let name = if group == "global" { "jemalloc" } else { "bump-scope" };
        let output = bench(&format!("{flags} --only {name}"));
        let page = text(&output.stdout);
        assert_eq!(output.status.code(), Some(0), "{page}{}", text(&output.stderr));
        let said = format!("more peers: {}", with_peers(group));
        assert_eq!(page.lines().last(), Some(&*said), "{page}");
        assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
    }
}

#[test]
fn a_page_is_for_people() {
    let output = bench("device --device sim --quick --only pair");
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let page = text(&output.stdout);
    assert!(page.starts_with("aquifer bench device: NVIDIA H200 (simulated)\n"), "{page}");
    assert!(page.contains("beside malloc 64 B") && page.contains("pair 1 GiB"), "{page}");
    assert!(!page.contains("random"), "{page}");
    assert!(page.lines().all(|line| line.chars().count() <= 80), "{page}");
}

#[test]
fn only_what_is_asked_for_is_measured() {
    let value = measured("device --device sim --quick --json --only 16");
    let rows = value["rows"].as_array().expect("rows").iter().map(|row| text_of(row, "name"));
    // Also those over a row that nobody has asked for.
    let expected: Vec<_> = promised().into_iter().filter(|name| name.contains("16")).collect();
    assert_eq!(rows.collect::<Vec<_>>(), expected);
}

#[test]
fn what_makes_no_sense_is_one_line_on_stderr_and_status_two() {
    for (flags, expected) in [
        ("", "'aquifer bench' requires a subcommand"),
        ("memory", "unrecognized subcommand 'memory'"),
        ("device --device gpu", "a device is auto, sim, cuda or cuda:N"),
        ("device --device cuda:99", ""),
        ("device --device sim --driver", "--driver times the calls of a GPU's driver"),
        ("device --device sim --only", "a value is required for '--only <PATTERN>'"),
        (
            "device --device sim --only pear",
            "no row's name contains 'pear'; there are pair 1 GiB; batch of 64,",
        ),
        ("device --device sim --only driver", "no row's name contains 'driver'"),
        (
            "device --quikc",
            "unexpected argument '--quikc' found; tip: a similar argument exists: '--quick'",
        ),
        ("device now", "unexpected argument 'now'"),
        (
            "pinned --only pear",
            "no row's name contains 'pear'; there are pair 64 MiB; waste, random up to",
        ),
    ] {
        let output = bench(flags);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{flags}: {said}");
        assert!(output.stdout.is_empty(), "{flags}");
        assert!(said.starts_with("aquifer: ") && said.lines().count() == 1, "{flags}: {said:?}");
        assert!(said.contains(expected), "{flags}: {said}");
    }
}

#[test]
fn a_bench_tells_a_terminal_how_far_it_is_and_erases_that() {
    let mut command = program();
    command.args(["bench", "budget", "--only", "levels"]);
    let (told, status) = on_terminal(command, |_, _| {});
    assert!(status.success());
    assert!(told.contains("measuring:") && told.contains(" %"), "{told:?}");
    assert!(told.ends_with("\r\x1b[2K"), "{told:?}");
}

#[test]
fn a_bench_that_is_interrupted_leaves_a_visible_cursor() {
    // A shell starts what is in the background with this signal ignored, and tests may be there.
    let mut command = Command::new("env");
    command.arg("--default-signal=INT").arg(program().get_program());
    command.args(["bench", "budget"]);
    let (told, status) = on_terminal(command, |id, told| {
        if told.contains("measuring:") {
            kill(id, Signal::SIGINT).expect("a process");
        }
    });
    assert_eq!(status.signal(), Some(2), "{told:?}");
    assert!(told.contains("measuring:") && !told.contains("\x1b[?25l"), "{told:?}");
}
