//! The printed table, and JSON.

use super::{
    HOSTILE,
    parts::{Part, Scratch, json, printed, program, refused, run},
};
use serde_json::Value;
use std::{fs, os::unix::fs::PermissionsExt, path::Path, process::Stdio, thread, time::Duration};

/// The figures of a pool in the order in which a process says them.
const FIELDS: [&str; 20] = [
    "live",
    "requested",
    "cached",
    "pending",
    "physical",
    "graphs",
    "peak_live",
    "peak_requested",
    "peak_physical",
    "blocks",
    "allocations",
    "frees",
    "failures",
    "growths",
    "reaped",
    "moves",
    "adoptions",
    "fences",
    "stream_waits",
    "host_waits",
];

pub(super) fn of_pool(pool: &Value) -> Vec<u64> {
    FIELDS.iter().map(|name| pool[*name].as_u64().unwrap_or_else(|| panic!("{pool}"))).collect()
}

fn process(all: &Value, process: u32) -> &Value {
    let found = all["processes"].as_array().unwrap().iter().find(|row| row["pid"] == process);
    found.unwrap_or_else(|| panic!("no {process}: {all}"))
}

#[test]
fn figures_equal_those_of_each_process_and_reading_removes_no_file() {
    let folder = Scratch::new("figures");
    let mut parts: Vec<Part> =
        (1..4).map(|scale| Part::start("device_process", &folder, scale)).collect();
    let mut pinned = Part::start("pinned_process", &folder, 1);
    let own: Vec<_> = parts.iter_mut().map(Part::figures).collect();
    let own_pinned = pinned.figures();
    let all = json(&folder, &[]);
    assert_eq!(all["errors"].as_array().unwrap().len(), 0);
    assert_eq!(all["seconds_between_readings"], Value::Null);
    for (part, own) in parts.iter().zip(&own) {
        let row = process(&all, part.child.id());
        assert_eq!((&row["state"], row["pools"].as_array().unwrap().len()), (&"alive".into(), 1));
        let pool = &row["pools"][0];
        assert_eq!(&of_pool(pool), own);
        assert_eq!((&pool["kind"], &pool["device"]), (&"device".into(), &0.into()));
        // A simulated device is no device of this machine.
        assert_eq!(pool["address"], Value::Null);
        assert_eq!(pool["limit"], 512_u64 << 20);
        assert_eq!((&row["device"]["live"], &row["host"]["live"]), (&own[0].into(), &0.into()));
        assert!(row["command"].as_str().unwrap().contains("device_process"));
    }
    let row = process(&all, pinned.child.id());
    assert_eq!(of_pool(&row["pools"][0]), own_pinned);
    assert_eq!(
        (&row["host"]["physical"], &row["device"]["pools"]),
        (&own_pinned[4].into(), &0.into())
    );
    let outside = all["devices"].as_array().unwrap().iter().map(|device| &device["processes"]);
    assert!(outside.into_iter().all(|processes| *processes == 0), "{all}");

    let page = printed(&folder, &["top"]);
    for part in &parts {
        assert!(page.contains(&format!("{} commands", part.child.id())), "{page}");
    }
    assert!(page.starts_with("4 processes in ") && page.contains("pinned"), "{page}");
    assert!(page.contains("device 0: NVIDIA H200 (simulated)"), "{page}");

    parts[1].kill();
    let dead = parts[1].child.id();
    // What has died is neither shown nor removed, unless that is asked for.
    let all = json(&folder, &[]);
    let (shown, folded) = (all["processes"].as_array().unwrap().len(), &all["dead"]);
    assert_eq!((shown, folded, &all["swept"]), (3, &1.into(), &0.into()));
    let page = printed(&folder, &["top", "--once"]);
    assert!(page.starts_with("3 processes, 1 dead in ") && !page.contains("[dead]"), "{page}");
    printed(&folder, &["metrics"]);
    assert_eq!(folder.files(), 4);
    for _ in 0..2 {
        let all = json(&folder, &["--dead"]);
        assert_eq!(
            (process(&all, dead)["state"].as_str(), &all["swept"]),
            (Some("dead"), &0.into())
        );
        assert_eq!(of_pool(&process(&all, dead)["pools"][0]), own[1]);
    }
    assert!(printed(&folder, &["top", "--once", "--dead"]).contains("[dead] "));
    let all = json(&folder, &["--dead", "--sweep"]);
    assert_eq!((process(&all, dead)["state"].as_str(), &all["swept"]), (Some("dead"), &1.into()));
    assert_eq!(folder.files(), 3);
    let all = json(&folder, &[]);
    assert_eq!((all["processes"].as_array().unwrap().len(), &all["swept"]), (3, &0.into()));
    drop((parts, pinned));
    assert_eq!(folder.files(), 0);
}

#[test]
fn two_readings_tell_what_happened_in_a_second() {
    let folder = Scratch::new("rates");
    let mut part = Part::start("device_process", &folder, 1);
    let before = part.figures();
    let reader = program(&folder.0, &["top", "--json", "--interval", "2s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    // The first reading is over by then; if it is not, the growth is in none of them.
    thread::sleep(Duration::from_millis(1000));
    part.go();
    let after = part.figures();
    let output = reader.wait_with_output().unwrap();
    let all: Value = serde_json::from_slice(&output.stdout).unwrap();
    let seconds = all["seconds_between_readings"].as_f64().unwrap();
    assert!(seconds >= 2.0, "{seconds}");
    let pool = &process(&all, part.child.id())["pools"][0];
    let grown = (after[13] - before[13]) as f64;
    let rate = pool["growths_per_s"].as_f64().unwrap();
    assert!(grown > 0.0 && (rate * seconds - grown).abs() < 1e-6, "{rate} in {seconds} s: {grown}");
    assert_eq!(pool["moves_per_s"], 0.0);
}

#[test]
fn hostile_names_are_harmless_in_the_table_and_in_json() {
    let folder = Scratch::new("hostile");
    let name = "\u{1b}]0;title\u{7}\n\u{9b}31m<b>";
    let mut part = Part::start_as("hostile_process", &folder, 1, Some(name));
    assert_eq!(part.line(), "ready");
    let text = printed(&folder, &["top", "--once", "--json"]);
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'), "{text:?}");
    let all: Value = serde_json::from_str(&text).unwrap();
    let row = process(&all, part.child.id());
    assert!(row["command"].as_str().unwrap().starts_with(name), "{row}");
    assert_eq!(row["pools"][0]["name"], HOSTILE);
    // An address that is none is of no device.
    assert!(all["devices"].as_array().unwrap().iter().all(|d| d["processes"] == 0), "{all}");
    assert_eq!(row["device"]["physical"], (u64::MAX >> 1) + 6);

    let page = printed(&folder, &["top", "--once"]);
    assert!(!page.chars().any(|c| (c.is_control() && c != '\n') || c == '\u{202e}'), "{page:?}");
    assert!(page.contains("\\u001b[31m\\u009b2J<b>") && !page.contains("\nforged"), "{page}");
}

#[test]
fn folders_are_shown_empty_or_refused_with_the_reason() {
    let folder = Scratch::new("folders");
    let all = json(&folder, &[]);
    assert_eq!(all["processes"].as_array().unwrap().len(), 0);
    assert!(printed(&folder, &["top"]).starts_with("0 processes in "));
    let absent = Scratch(folder.0.join("absent"));
    assert!(printed(&absent, &["top", "--once"]).starts_with("0 processes in "));

    fs::write(folder.0.join("1.status"), "no status").unwrap();
    let all = json(&folder, &[]);
    assert!(all["errors"][0].as_str().unwrap().contains("it is no status file"), "{all}");
    assert!(printed(&folder, &["top"]).contains("unreadable: "));
    assert_eq!(folder.files(), 1);

    let file = Scratch(folder.0.join("1.status"));
    refused(&run(&file, &["top", "--once"]), "it is no folder");
    refused(&run(&file, &["metrics"]), "it is no folder");
    fs::set_permissions(&folder.0, fs::Permissions::from_mode(0o755)).unwrap();
    for arguments in [&["top"][..], &["top", "--json"], &["metrics"], &["metrics", "-o", "/x"]] {
        refused(&run(&folder, arguments), "others may enter it");
    }
    let output = program(Path::new("of"), &["top"]).output().unwrap();
    refused(&output, "AQUIFER_STATUS is of");
}
