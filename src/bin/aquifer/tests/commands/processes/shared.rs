//! Ledgers, which processes share a memory by: their figures are shown, and reading changes none.

use super::{
    MIB,
    metrics::Exposition,
    parts::{Part, Scratch, json, printed, program, say, wait_for_end},
    window::Window,
};
use aquifer_status::ledger::{Ledger, LedgerFigures, Share};
use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};
use serde_json::{Value, json};
use std::{
    fs::{self, File},
    os::unix::fs::symlink,
    time::{Duration, Instant},
};

const GPU: &str = "GPU-0123456789abcdef0123456789abcdef";
const UUID: &str = "01234567-89ab-cdef-0123-456789abcdef";
const CAPACITY: u64 = 96 * MIB;

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn member_process() {
    let scale: u64 = std::env::var("SCALE").unwrap().parse().unwrap();
    let folder = aquifer_status::ledger::folder_of_environment().unwrap().unwrap();
    let share = Share::new().guarantee(scale * 8 * MIB).limit((40 + scale) * MIB);
    let share = share.priority(1 - scale as i32);
    let share = if scale == 1 { share.reserve() } else { share };
    let member = share.join(Ledger::open(&folder, GPU, CAPACITY).unwrap()).unwrap();
    member.claim(scale * 10 * MIB + 1).unwrap();
    member.set_reclaimable(scale * MIB);
    // Others' use is lowered while claims stand still.
    (0..2).for_each(|_| _ = member.measure(|| Some(31 * MIB + 2)));
    say("ready");
    wait_for_end();
}

#[test]
#[ignore = "a part of the other tests, in a process of its own"]
fn waiting_process() {
    let folder = aquifer_status::ledger::folder_of_environment().unwrap().unwrap();
    let member = Share::new().join(Ledger::open(&folder, GPU, CAPACITY).unwrap()).unwrap();
    say("ready");
    // It is killed while it waits.
    let _refused = member.claim_by(90 * MIB, Instant::now() + Duration::from_secs(60));
    wait_for_end();
}

fn start(folder: &Scratch, role: &str, scale: u32) -> Part {
    let mut part = Part::start(&format!("shared::{role}"), folder, scale);
    assert_eq!(part.line(), "ready");
    part
}

fn own(folder: &Scratch) -> LedgerFigures {
    Ledger::existing(&folder.0, GPU).unwrap().figures()
}

/// Returns what JSON must say.
fn expected(own: &LedgerFigures) -> Value {
    let members = own.members.iter().map(|member| {
        json!({
            "pid": member.process,
            "command": member.command,
            "claimed": member.claimed,
            "guarantee": member.guarantee,
            "reserved": member.is_reserved,
            "limit": member.limit,
            "priority": member.priority,
            "reclaimable": member.reclaimable,
            "wanted": member.wanted,
        })
    });
    json!([{
        "name": GPU,
        "kind": "device",
        "device": null,
        "address": null,
        "uuid": UUID,
        "capacity": own.capacity,
        "claimed": own.claimed(),
        "free": own.free(),
        "unaccounted": own.unaccounted,
        "members": members.collect::<Vec<_>>(),
    }])
}

fn check_metrics(text: &str, own: &LedgerFigures) {
    let parsed = Exposition::parse(text);
    let labels = [("ledger", GPU), ("uuid", UUID), ("kind", "device"), ("device", "")];
    for (name, figure) in [
        ("capacity_bytes", own.capacity),
        ("claimed_bytes", own.claimed()),
        ("free_bytes", own.free()),
        ("unaccounted_bytes", own.unaccounted),
        ("members", own.members.len() as u64),
    ] {
        let name = format!("aquifer_ledger_{name}");
        assert_eq!(parsed.value(&name, &labels), figure as f64, "{name}");
    }
    assert_eq!(parsed.count("aquifer_ledger_member_claimed_bytes"), own.members.len());
    for member in &own.members {
        let process = member.process.to_string();
        for (name, figure) in [
            ("claimed_bytes", member.claimed as f64),
            ("guarantee_bytes", member.guarantee as f64),
            ("reserved", f64::from(u8::from(member.is_reserved))),
            ("limit_bytes", member.limit as f64),
            ("priority", f64::from(member.priority)),
            ("reclaimable_bytes", member.reclaimable as f64),
            ("wanted_bytes", member.wanted as f64),
        ] {
            let name = format!("aquifer_ledger_member_{name}");
            let labels = [("pid", &*process), ("ledger", GPU)];
            assert_eq!(parsed.value(&name, &labels), figure, "{name}");
        }
    }
    // Arguments may hold secrets.
    assert!(!text.contains("nocapture"), "{text}");
}

#[test]
fn figures_of_a_ledger_equal_its_own_and_a_killed_member_is_gone() {
    let folder = Scratch::new("ledger");
    let mut parts: Vec<Part> =
        (1..3).map(|scale| start(&folder, "member_process", scale)).collect();
    let before = own(&folder);
    assert_eq!((before.members.len(), before.claimed()), (2, 30 * MIB + 2));
    assert_eq!((before.unaccounted, before.free()), (MIB, 65 * MIB - 2));
    for _ in 0..2 {
        let own = own(&folder);
        assert_eq!(json(&folder, &[])["shared"], expected(&own));
        check_metrics(&printed(&folder, &["metrics"]), &own);
        parts.pop().unwrap().kill();
    }
    assert!(own(&folder).members.is_empty());
    assert_eq!(json(&folder, &[])["shared"][0]["members"], json!([]));
}

#[test]
fn reading_a_ledger_changes_no_byte_and_waits_for_no_lock() {
    let folder = Scratch::new("ledger-reading");
    let _part = start(&folder, "member_process", 1);
    let path = folder.0.join(format!("{GPU}.ledger"));
    let (bytes, files) = (fs::read(&path).unwrap(), folder.files());
    // The right to join, which a stopped process may have.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: 4096,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    assert_eq!(json(&folder, &[])["shared"], expected(&own(&folder)));
    check_metrics(&printed(&folder, &["metrics"]), &own(&folder));
    assert_eq!((fs::read(&path).unwrap(), folder.files()), (bytes, files));
}

#[test]
fn a_damaged_ledger_is_named_and_hides_no_other() {
    let folder = Scratch::new("ledger-damaged");
    let _part = start(&folder, "member_process", 1);
    fs::write(folder.0.join("broken.ledger"), "noise").unwrap();
    symlink("/etc/passwd", folder.0.join("foreign.ledger")).unwrap();
    let all = json(&folder, &[]);
    assert_eq!(all["shared"], expected(&own(&folder)));
    let errors = all["errors"].as_array().unwrap();
    assert_eq!(errors.len(), 2, "{errors:?}");
    for (error, name) in errors.iter().zip(["broken", "foreign"]) {
        let start = format!("{name}: the ledger cannot be used: ");
        assert!(error.as_str().unwrap().starts_with(&start), "{error}");
    }
    let page = printed(&folder, &["top", "--once"]);
    assert!(page.contains("\nunreadable: broken: ") && page.contains("shared GPU-01234567: "));
    let text = printed(&folder, &["metrics"]);
    check_metrics(&text, &own(&folder));
    let parsed = Exposition::parse(&text);
    for (name, is_readable) in [(GPU, 1.0), ("broken", 0.0), ("foreign", 0.0)] {
        assert_eq!(parsed.value("aquifer_ledger_readable", &[("ledger", name)]), is_readable);
    }

    let output = program(&folder.0, &["top", "--json"]).env("AQUIFER_LEDGER", "of").output();
    let all: Value = serde_json::from_slice(&output.unwrap().stdout).unwrap();
    assert!(all["errors"][0].as_str().unwrap().contains("AQUIFER_LEDGER is of"), "{all}");
    let output = program(&folder.0, &["metrics"]).env("AQUIFER_LEDGER", "of").output();
    let parsed = Exposition::parse(&String::from_utf8(output.unwrap().stdout).unwrap());
    assert_eq!(parsed.value("aquifer_ledger_folder_readable", &[]), 0.0);
}

#[test]
fn more_ledgers_and_members_than_the_bound_are_counted() {
    let folder = Scratch::new("ledger-bounds");
    let _parts: Vec<Part> = (1..3).map(|scale| start(&folder, "member_process", scale)).collect();
    drop(Ledger::open(&folder.0, "pinned-memory", CAPACITY).unwrap());
    let parsed = Exposition::parse(&printed(&folder, &["metrics", "--most-pools", "1"]));
    assert_eq!(parsed.value("aquifer_ledgers_left_out", &[]), 1.0);
    assert_eq!(parsed.value("aquifer_ledger_members_left_out", &[]), 1.0);
    let claimed = parsed.value("aquifer_ledger_member_claimed_bytes", &[("ledger", GPU)]);
    assert_eq!(claimed, (20 * MIB + 1) as f64);
    assert_eq!(parsed.value("aquifer_ledger_claimed_bytes", &[]), (30 * MIB + 2) as f64);
}

#[test]
fn a_member_that_waits_is_seen_at_80_columns_until_it_is_killed() {
    let folder = Scratch::new("ledger-live");
    let _part = start(&folder, "member_process", 1);
    let mut waiting = start(&folder, "waiting_process", 1);
    let window = Window::open(&folder, &["--interval", "100ms"], 80, 24);
    let screen = window.wait("a member that waits", |screen| {
        screen.contains("shared GPU-01234567: 10.0 MiB of 96.0 MiB claimed, 65.0 MiB free")
            && screen.lines().any(|line| line.trim_end().ends_with("90.0 MiB"))
    });
    assert!(screen.contains("WAITS FOR") && screen.contains("PHYSICAL"), "{screen}");
    let waits = waiting.child.id().to_string();
    assert!(screen.lines().any(|line| line.trim_start().starts_with(&waits)), "{screen}");
    waiting.kill();
    window.wait("its end", |screen| {
        !screen.lines().any(|line| line.trim_start().starts_with(&waits))
    });
}
