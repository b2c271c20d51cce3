//! Tests that snapshots written by the library are read back correctly, and meet the assumptions of
//! PyTorch's tools.

use aquifer_core::{
    self as core, DeviceId, Event, Recorder, Tag,
    event::{BlockKind, MemoryLocation, RingSink, TraceFile},
};
use aquifer_device::{DevicePool, PoolConfig, Request};
use aquifer_driver::{Access, sim::Sim};
use aquifer_formats::{
    HeldBlock, MemorySnapshot,
    trace::{Trace, TraceAction, TraceBlock},
};
use std::{
    env, fs, io,
    path::{Path, PathBuf},
    process::{self, Command},
    sync::Arc,
};

fn read(snapshot: &MemorySnapshot) -> Result<Trace, String> {
    Trace::from_reader(io::Cursor::new(snapshot.to_pickle()), None)
        .inspect(Trace::check)
        .map_err(|e| e.to_string())
}

fn scratch(name: &str) -> PathBuf {
    env::temp_dir().join(format!("aquifer-{}-{name}", process::id()))
}

/// Runs `check.py` on the snapshots and returns its output, or `None` without Python.
fn checked(name: &str, snapshots: &[MemorySnapshot]) -> Option<Vec<String>> {
    let files: Vec<_> =
        (0..snapshots.len()).map(|number| scratch(&format!("{name}-{number}.pickle"))).collect();
    for (file, snapshot) in files.iter().zip(snapshots) {
        snapshot.save(file).unwrap();
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots/check.py");
    let output = Command::new("python3").arg(script).args(&files).output();
    files.iter().for_each(|file| drop(fs::remove_file(file)));
    match output {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect())
        }
        Err(e) => {
            println!(
                "skipped: what PyTorch's tools take for granted, since there is no python3: {e}"
            );
            None
        }
    }
}

/// Runs a small program on two streams, one block of which is used beyond its free. Returns the
/// result of `ask` at the end, with some blocks still live.
fn program<T>(config: PoolConfig, ask: impl FnOnce(&DevicePool) -> T) -> T {
    let pool = DevicePool::open(Sim::h200(1).symbolic().driver(), DeviceId(0), config).unwrap();
    let (s, u) = (pool.stream().unwrap(), pool.stream().unwrap());
    let kv = Tag::named("kv");
    let [first, second, third] =
        [100, 5 << 20, 300].map(|bytes| pool.alloc(&s, Request::bytes(bytes).tag(kv)).unwrap());
    let used = second.prepare(&u, Access::Read).unwrap();
    drop((first, second));
    let fourth = pool.alloc(&u, Request::bytes(400)).unwrap();
    assert!(pool.alloc(&u, Request::bytes(1 << 40)).is_err());
    used.finish().unwrap();
    u.synchronize().unwrap();
    pool.trim(0).unwrap();
    let answer = ask(&pool);
    drop((third, fourth));
    answer
}

fn recorded() -> (PoolConfig, Arc<RingSink>) {
    let ring = Arc::new(RingSink::new(1 << 10));
    let mut config = PoolConfig::default();
    config.recorder = Some(Arc::new(Recorder::new(ring.clone())));
    config.wait = std::time::Duration::ZERO;
    (config, ring)
}

#[test]
fn what_a_pool_has_done_is_read_again_as_the_same_program() {
    let (config, ring) = recorded();
    let snapshot = program(config, |pool| pool.snapshot(ring.take()));
    let read = read(&snapshot).unwrap_or_else(|e| panic!("{e}"));

    let path = scratch("as-ours.csv");
    let mut config = PoolConfig::default();
    config.recorder = Some(Arc::new(Recorder::new(Arc::new(TraceFile::create(&path).unwrap()))));
    config.wait = std::time::Duration::ZERO;
    // The rows so far: blocks that are still live have no end.
    let rows = program(config, |_| fs::read(&path).unwrap());
    fs::remove_file(&path).unwrap();
    let same = Trace::from_reader(io::Cursor::new(rows), None).unwrap_or_else(|e| panic!("{e}"));

    assert_eq!((&read.blocks, &read.steps), (&same.blocks, &same.steps));
    assert_eq!((read.streams, read.peak_live, read.live_at_end), (2, same.peak_live, 700));
    assert!(read.blocks.iter().any(|block| block.lingers), "a use outlives its free");
    if let Some(said) = checked("pool", &[snapshot]) {
        // Allocations, frees, completions and the failed request.
        assert_eq!(said, ["9 events, 1 segments, 2 blocks of 700 bytes live"]);
    }
}

#[test]
fn blocks_older_than_the_ring_are_told_with_their_lines_where_leaks_are_looked_for() {
    for leaks in [false, true] {
        let (mut config, ring) = recorded();
        config.debug.leaks = leaks;
        let snapshot = program(config, |pool| {
            drop(ring.take());
            let other = pool.stream().unwrap();
            drop(pool.alloc(&other, Request::bytes(50)).unwrap());
            pool.snapshot(ring.take())
        });
        let read = read(&snapshot).unwrap_or_else(|e| panic!("{e}"));
        let told = if leaks { (true, 700, 3) } else { (false, 0, 1) };
        let is_older = |note: &String| note.starts_with("2 blocks are older than the first event");
        assert_eq!((read.notes.iter().any(is_older), read.live_at_end, read.streams), told);
        let bytes = snapshot.to_pickle();
        let text = String::from_utf8_lossy(&bytes);
        assert_eq!(text.contains("snapshots.rs"), leaks, "the line that asked for them");
        checked("leaks", &[snapshot]);
    }
}

#[test]
fn a_device_that_did_nothing_has_an_empty_trace_between_those_that_did() {
    let event = |device, action| Event {
        at_ns: 5_000,
        action,
        place: MemoryLocation::Device(DeviceId(device)),
        thread: 1,
        stream: 7,
        address: 1 << 46,
        bytes: 1000,
        kind: BlockKind::Cached,
        tag: Tag::NONE,
        refused_by: Tag::NONE,
    };
    let of = |place| Event { place, ..event(0, core::Action::Allocate) };
    let snapshot = MemorySnapshot::of([
        event(2, core::Action::Allocate),
        event(0, core::Action::Allocate),
        event(2, core::Action::Free),
        // These are not part of the snapshot.
        of(MemoryLocation::Host(Some(1))),
        of(MemoryLocation::Global),
        of(MemoryLocation::Device(DeviceId(u32::MAX))),
    ]);
    let read = read(&snapshot).unwrap();
    assert_eq!((read.device, read.devices.as_slice()), (Some(2), &[0, 2][..]));
    assert_eq!(
        read.blocks,
        [TraceBlock { bytes: 1000, stream: 0, freed_on: Some(0), lingers: true }]
    );
    checked("devices", &[snapshot]);
}

/// Generates events of blocks at a few addresses that sometimes overlap. One of `lost` events is
/// missing.
fn torn(seed: u64, lost: u64) -> Vec<Event> {
    let mut state = seed;
    let mut below = |most: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let (mut slots, mut told) = ([None; 12], Vec::new());
    for at in 0..300 {
        let slot = below(12);
        let (action, bytes, stream) = match slots[slot as usize] {
            None => (core::Action::Allocate, 1 + below(3 << 20), 1 + below(3)),
            Some((core::Action::Allocate, bytes, stream)) => (core::Action::Free, bytes, stream),
            Some((_, bytes, stream)) => (core::Action::Complete, bytes, stream),
        };
        slots[slot as usize] =
            (action != core::Action::Complete).then_some((action, bytes, stream));
        let tag = [Tag::NONE, Tag::named("weights")][below(2) as usize];
        let (place, stream) = (MemoryLocation::Device(DeviceId(0)), stream as u32);
        let address = (1 << 46) + slot * (3 << 20);
        let event = Event {
            at_ns: at * 1000,
            action,
            place,
            thread: 1,
            stream,
            address,
            bytes,
            kind: BlockKind::Cached,
            tag,
            refused_by: Tag::NONE,
        };
        if below(lost) > 0 {
            told.push(event);
        }
    }
    told
}

#[test]
fn a_record_with_events_missing_is_told_as_something_that_can_have_happened() {
    let mut snapshots = Vec::new();
    for seed in 0..40 {
        let events = torn(seed, [2, 5, 50][seed as usize % 3]);
        let mut snapshot = MemorySnapshot::of(events);
        for slot in 0..12 {
            // Blocks as a pool would report them, but contradicting the events: over another block,
            // and at addresses with events.
            let address = (1 << 46) + slot * (2 << 20);
            let block = HeldBlock { address, bytes: 4 << 20, stream: 9, tag: Tag::NONE, at: None };
            snapshot.hold(DeviceId(0), block);
        }
        let trace = read(&snapshot).unwrap_or_else(|e| panic!("{seed}: {e}"));
        assert!(trace.allocations() > 0);
        snapshots.push(snapshot);
    }
    checked("torn", &snapshots);
}

#[test]
fn a_whole_record_is_told_without_making_anything_up() {
    for seed in 0..20 {
        let events = torn(seed, u64::MAX);
        let trace = read(&MemorySnapshot::of(events.iter().copied())).unwrap();
        let count = |action| events.iter().filter(|event| event.action == action).count() as u64;
        assert!(!trace.notes.iter().any(|note| note.contains("older")), "{:?}", trace.notes);
        assert_eq!(trace.allocations(), count(core::Action::Allocate));
        assert_eq!(trace.frees, count(core::Action::Free));
        let ended = trace.steps.iter().filter(|step| step.action == TraceAction::Complete).count();
        let at_once =
            trace.blocks.iter().filter(|block| block.freed_on.is_some() && !block.lingers).count();
        assert_eq!((ended + at_once) as u64, count(core::Action::Complete));
    }
}
