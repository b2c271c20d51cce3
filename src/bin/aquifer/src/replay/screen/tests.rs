//! Tests of the screen, line by line.

use super::*;
use crate::replay::{report::Fit, work::Violations};

fn rounds() -> Vec<Round> {
    let first = Tally {
        operations: 24_000,
        driver_calls: 23_192,
        memory_calls: 20_072,
        event_calls: 3_120,
        fences: 1_200,
        stream_waits: 480,
        host_waits: 3,
        moves: 2_980,
        peak_physical: 14 << 30,
    };
    let later =
        Tally { driver_calls: 2_400, memory_calls: 0, event_calls: 2_400, moves: 12, ..first };
    let rounds = [(1234.0, first), (41.25, later), (41.5, later)];
    rounds.map(|(ns, tally)| Round { ns, tally }).to_vec()
}

fn clean() -> ReplayReport {
    ReplayReport {
        trace: "tests/data/serve_mixed.csv.xz".into(),
        device: "sim".into(),
        device_title: "simulated NVIDIA H200".into(),
        lag: Some(DEFAULT_LAG),
        allocator: Allocator::Pool,
        budget: None,
        ignore_order: false,
        operations: 24_000,
        allocations: 12_000,
        frees: 12_000,
        streams: 4,
        split: None,
        peak_live: 13_758_172_979,
        peak_active: 13_790_000_000,
        live_at_end: 0,
        peak_physical: 14_029_946_880,
        failure: None,
        timing: Some(Timing { first: 1234.0, warm: 41.25, rounds: 3 }),
        rounds: rounds(),
        driver_calls: vec![
            ("cuMemCreate", 6690),
            ("cuMemMap", 6690),
            ("cuMemSetAccess", 6690),
            ("cuEventRecord", 3120),
            ("cuMemAddressReserve", 2),
        ],
        accesses_checked: 38_750,
        cross_stream_uses: 1375,
        early_completions: 0,
        violations: Violations::default(),
        leaked: 0,
        plan: None,
        change: None,
        fit: None,
        of_device: None,
        notes: Vec::new(),
    }
}

fn fitted() -> ReplayReport {
    let timing = Timing { first: 8120.0, warm: 5284.0, rounds: 3 };
    let fit = Fit { bytes: 13_891_534_848, timing, rounds: rounds() };
    ReplayReport { fit: Some(Search::Found(fit)), ..clean() }
}

fn refused() -> ReplayReport {
    let said = "out of memory on device 0: 125.85 MiB requested\n\
                \x20 refused by  125.85 MiB asked of the budget of device 0, 11.90 GiB of 12.00 GiB used, 97.00 MiB left\n\
                \x20 held        11.42 GiB live, 412.00 MiB cached, 71.00 MiB pending, 11.90 GiB physical\n\
                \x20 largest     64.00 MiB free in one range\n\
                \x20 holder      11.42 GiB in 311 blocks: \"untagged\"\n\
                \x20 do          free some of the 11.42 GiB that \"untagged\" holds";
    ReplayReport {
        budget: Some(12 << 30),
        peak_physical: 12_784_238_592,
        failure: Some(ReplayFailure { round: 1, operations: 9_120, said: said.into() }),
        timing: None,
        rounds: Vec::new(),
        ..clean()
    }
}

fn refused_later() -> ReplayReport {
    let mut later = refused();
    later.failure.as_mut().unwrap().round = 12;
    later
}

fn objected() -> ReplayReport {
    let first = vec![
        "race: read of block 17 on stream 1 at src/a.rs:10 is not ordered with the write on stream 0 at src/b.rs:20"
            .to_owned(),
        "use after free: read of block 18 on stream 2 at src/a.rs:10".to_owned(),
    ];
    ReplayReport { ignore_order: true, violations: Violations { count: 2750, first }, ..clean() }
}

fn golden(name: &str, report: &ReplayReport) {
    let screen = report.to_screen();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/replay/screen/golden")
        .join(format!("{name}.txt"));
    if std::env::var_os("AQUIFER_BLESS").is_some() {
        std::fs::write(&path, format!("{screen}\n")).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(format!("{screen}\n"), expected, "AQUIFER_BLESS=1 accepts this screen:\n{screen}");
}

#[test]
fn every_kind_of_screen_is_as_it_was_approved() {
    golden("clean", &clean());
    golden("fitted", &fitted());
    golden("refused", &refused());
    golden("refused_later", &refused_later());
    golden("objected", &objected());
}

#[test]
fn no_screen_is_larger_than_a_terminal() {
    let long = "a very/long path/".repeat(9) + "trace.csv.xz";
    let mut worst = refused();
    worst.violations = objected().violations;
    worst.violations.first.extend(std::iter::repeat_n("more\nlines\nof\nwords".repeat(9), 3));
    worst.fit = Some(Search::Nothing);
    worst.live_at_end = u64::MAX;
    worst.early_completions = u64::MAX;
    let second = ReplayReport {
        violations: worst.violations.clone(),
        live_at_end: u64::MAX,
        early_completions: u64::MAX,
        timing: Some(Timing { first: 1e12, warm: 1e12, rounds: 9 }),
        trace: "t".repeat(45),
        ..fitted()
    };
    for report in [clean(), fitted(), refused(), objected(), worst, second] {
        let screen = report.to_screen();
        assert!(screen.lines().count() <= HEIGHT, "{screen}");
        assert!(screen.lines().all(|line| line.chars().count() <= WIDTH), "{screen}");
    }
    let screen = ReplayReport { trace: long, ..clean() }.to_screen();
    assert!(screen.lines().count() <= HEIGHT);
}
