//! Tests that generated traces have the stated properties and never change.

use super::*;
use crate::trace::{Trace, TraceAction, TraceBlock};
use std::fmt::Write as _;

fn made(text: &str) -> Trace {
    Trace::read(Path::new(text), None).unwrap_or_else(|e| panic!("{text}: {e}"))
}

/// FNV-1a over everything that a replay uses.
fn digest(trace: &Trace) -> u64 {
    let mut text = String::new();
    for block in &trace.blocks {
        write!(text, "{} {} {:?} {};", block.bytes, block.stream, block.freed_on, block.lingers)
            .unwrap();
    }
    for step in &trace.steps {
        write!(text, "{:?} {};", step.action, step.block).unwrap();
    }
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[test]
fn every_workload_is_the_same_each_time_and_everywhere() {
    // Name, streams, operations, peak, digest.
    let table = [
        ("growing-kv", 1, 24_080, 4_865_523_712, 0x0fe9_f7f7_95fe_b962),
        ("near-limit", 1, 24_000, 4_294_966_603, 0x4c32_1b15_b9e0_1cc2),
        ("phases", 4, 34_656, 4_017_313_380, 0x6fd2_a8a8_c409_e316),
        ("pinned", 1, 16_040, 1_874_067_943, 0x90e1_a284_9673_cd0f),
        ("idle-streams", 16, 14_400, 1_341_923_061, 0xc30b_016f_8aca_276e),
        ("dying-streams", 40, 16_000, 1_610_573_301, 0x350e_921f_38dd_7be8),
        ("edge", 1, 12_064, 2_151_681_024, 0xc1f1_e6d7_0e48_3c2b),
        ("steady", 1, 30_912, 3_000_786_944, 0x25d1_a2b1_f0ae_49c0),
        ("sharded", 2, 8_568, 1_249_513_792, 0x5b60_677e_ad8e_ddf6),
    ];
    assert_eq!(table.len(), WORKLOADS.len());
    for ((name, streams, operations, peak, expected), workload) in table.into_iter().zip(&WORKLOADS)
    {
        assert_eq!(name, workload.name);
        let trace = made(&format!("made:{name}"));
        trace.check();
        assert_eq!(
            (trace.streams, trace.operations(), trace.peak_live, digest(&trace)),
            (streams, operations, peak, expected),
            "{name}: {:#018x}",
            digest(&trace)
        );
        assert_eq!(
            digest(&trace),
            digest(&made(&format!("made:{name},seed=1,scale=1,length=1"))),
            "{name}"
        );
    }
}

#[test]
fn a_seed_makes_another_of_the_same_kind_and_a_scale_a_larger_one() {
    for workload in &WORKLOADS {
        let plain = made(&format!("made:{}", workload.name));
        let scaled = made(&format!("made:{},scale=2", workload.name));
        let ratio = scaled.peak_live as f64 / plain.peak_live as f64;
        assert!((1.9..2.1).contains(&ratio), "{}: {ratio}", workload.name);
        let long = made(&format!("made:{},length=2", workload.name));
        assert!(long.operations() > plain.operations() * 3 / 2, "{}", workload.name);
        // A workload whose steps are all the same draws no random numbers.
        if !matches!(workload.name, "steady" | "edge") {
            let other = made(&format!("made:{},seed=2", workload.name));
            assert_ne!(digest(&plain), digest(&other), "{}", workload.name);
        }
    }
}

#[test]
fn no_option_makes_a_trace_that_cannot_be_played() {
    for workload in &WORKLOADS {
        for options in
            ["scale=0.001", "scale=64", "length=0.001", "seed=18446744073709551615,scale=0.5"]
        {
            let trace = made(&format!("made:{},{options}", workload.name));
            assert!(trace.operations() > 0, "{} {options}", workload.name);
        }
    }
}

#[test]
fn the_sizes_are_such_that_a_search_takes_seconds() {
    for workload in &WORKLOADS {
        let trace = made(&format!("made:{}", workload.name));
        assert!(
            (1 << 30..8 << 30).contains(&trace.peak_live),
            "{}: {}",
            workload.name,
            trace.peak_live
        );
        assert!(
            (5000..60_000).contains(&trace.operations()),
            "{}: {}",
            workload.name,
            trace.operations()
        );
    }
}

#[test]
fn near_limit_stays_near_its_limit() {
    let trace = made("made:near-limit");
    let (mut live, mut near, mut steps) = (0_u64, 0, 0);
    for step in &trace.steps {
        let bytes = trace.blocks[step.block as usize].bytes;
        match step.action {
            TraceAction::Allocate => live += bytes,
            TraceAction::Free => live -= bytes,
            TraceAction::Complete => {}
        }
        if step.action == TraceAction::Allocate {
            steps += 1;
            near += u64::from(live > trace.peak_live / 20 * 19);
        }
    }
    assert!(near > steps * 3 / 4, "{near} of {steps}");
}

#[test]
fn streams_that_die_leave_nothing_and_do_not_come_back() {
    let trace = made("made:dying-streams");
    let mut last = vec![0; trace.streams as usize];
    for (at, step) in trace.steps.iter().enumerate() {
        let block = trace.blocks[step.block as usize];
        last[block.stream as usize] = at;
        if let (TraceAction::Free, Some(on)) = (step.action, block.freed_on) {
            last[on as usize] = at;
        }
    }
    assert_eq!(trace.live_at_end, 0);
    // The streams end one after another, long before the trace does.
    assert!(last.is_sorted(), "{last:?}");
    assert!(last[0] < trace.steps.len() / 8);
    assert!(trace.blocks.iter().any(TraceBlock::crosses));
}

#[test]
fn what_cannot_be_made_is_told_in_one_line() {
    let table = [
        ("made:fast", "no workload is called \"fast\""),
        ("made:pinned,sead=1", "\"sead=1\" is no option"),
        ("made:pinned,", "\"\" is no option"),
        ("made:pinned,seed=-1", "seed is \"-1\", not a whole number"),
        ("made:pinned,scale=0", "scale is \"0\", not a factor"),
        ("made:pinned,length=NaN", "length is \"NaN\", not a factor"),
    ];
    for (text, expected) in table {
        let said = Trace::read(Path::new(text), None).expect_err(text).to_string();
        assert!(said.starts_with(expected) && !said.contains('\n'), "{text}: {said}");
    }
    assert!(read(Path::new("./made:pinned")).is_none(), "a file");
    assert!(asks_for_list(Path::new("made:")) && !asks_for_list(Path::new("made:pinned")));
}

#[test]
fn what_is_written_is_read_as_the_same_blocks_and_steps() {
    for workload in &WORKLOADS {
        for change in [None, Some(20)] {
            let name = format!("made:{},length=0.1", workload.name);
            let trace = Trace::read(name.as_ref(), None).unwrap();
            let trace = change.map_or(trace.clone(), |per_cent| trace.changed(per_cent, 1));
            let mut rows = Vec::new();
            trace.write_to(&mut rows).unwrap();
            let read = Trace::from_reader(std::io::Cursor::new(rows), None).unwrap();
            assert_eq!(read.steps, trace.steps, "{name} {change:?}");
            assert_eq!(read.blocks, trace.blocks, "{name} {change:?}");
        }
    }
}
