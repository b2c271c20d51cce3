//! Tests of the snapshot reader. `tests/data/snapshots/make.py` writes the files.

use super::*;
use crate::trace::{Trace, TraceAction, TraceBlock, TraceError, TraceFormat};
use std::{
    io::Cursor,
    path::{Path, PathBuf},
};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots").join(name)
}

fn trace(name: &str, device: Option<u32>) -> Trace {
    let trace = Trace::read(&file(name), device).unwrap_or_else(|e| panic!("{name}: {e}"));
    trace.check();
    trace
}

fn parsed(bytes: &[u8]) -> Result<Trace, TraceError> {
    Trace::from_reader(Cursor::new(bytes.to_vec()), None)
}

/// The note on blocks that existed before the first event.
fn older(blocks: usize) -> String {
    format!("{blocks} blocks are older than the first event: their origin is not recorded")
}

fn block(bytes: u64, stream: u32, freed: bool, lingers: bool) -> TraceBlock {
    TraceBlock { bytes, stream, freed_on: freed.then_some(stream), lingers }
}

#[test]
fn a_snapshot_from_the_start_is_the_trace_that_happened() {
    let same = Trace::from_rows(
        "0,a,1,1000,0\n0,a,2,2000000,1\n0,f,1,1000,0\n0,c,1,1000,0\n0,a,3,3000,0\n0,f,3,3000,0\n0,c,3,3000,0\n\
         0,f,2,2000000,1\n0,c,2,2000000,1\n0,a,4,2000000,1\n",
    );
    for name in
        ["start.pickle", "start.protocol2.pickle", "start.protocol5.pickle", "start.pickle.xz"]
    {
        let read = trace(name, None);
        assert_eq!((&read.blocks, &read.steps), (&same.blocks, &same.steps), "{name}");
        assert_eq!((read.streams, read.peak_live), (2, same.peak_live), "{name}");
        assert_eq!((read.format, read.device), (TraceFormat::Snapshot, Some(0)), "{name}");
        assert!(read.notes.is_empty(), "{name}: {:?}", read.notes);
    }
}

#[test]
fn what_lived_before_the_ring_began_is_put_together_from_its_end() {
    let read = trace("ring.pickle", None);
    // Freed before the trace: completed in it, and never completed. Live before the trace: freed in
    // it, and never freed. Then the events.
    let blocks = [
        block(2000, 0, true, true),
        block(300, 0, true, true),
        block(1000, 1, true, false),
        block(700_000, 1, false, false),
        block(4000, 1, true, false),
    ];
    assert_eq!(read.blocks, blocks);
    assert_eq!(read.notes, [older(4)]);
    assert_eq!((read.peak_live, read.live_at_end), (705_000, 700_000));
    use TraceAction::{Allocate, Complete, Free};
    let actions: Vec<_> = read.steps.iter().map(|step| (step.action, step.block)).collect();
    let before = [(Allocate, 0), (Free, 0), (Allocate, 1), (Free, 1), (Allocate, 2), (Allocate, 3)];
    assert_eq!(actions[..6], before);
    assert_eq!(actions[6..], [(Allocate, 4), (Free, 2), (Complete, 0), (Free, 4)]);
}

#[test]
fn uses_that_outlive_their_free_linger() {
    let read = trace("pending.pickle", None);
    assert_eq!(
        read.blocks,
        [block(1000, 0, true, true), block(2000, 0, true, true), block(50, 1, true, false)]
    );
    assert_eq!(read.peak_live, 3000);
}

#[test]
fn the_device_with_most_events_is_played_unless_another_is_asked_for() {
    for (asked, device, operations) in [(None, 1, 3), (Some(1), 1, 3), (Some(0), 0, 1)] {
        let read = trace("devices.pickle", asked);
        assert_eq!(read.operations(), operations, "{asked:?}");
        assert_eq!((read.device, read.devices.as_slice()), (Some(device), &[0, 1][..]));
    }
    let refused =
        |device| Trace::read(&file("devices.pickle"), Some(device)).unwrap_err().to_string();
    assert_eq!(refused(3), "no device of index 3: the snapshot has 3, counted from 0");
    assert_eq!(
        refused(2),
        "nothing is allocated in it",
        "a device that did nothing and holds nothing"
    );
    let rows = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/resnet_train.csv.xz");
    for other in [rows.as_path(), Path::new("made:edge")] {
        let said = Trace::read(other, Some(0)).unwrap_err().to_string();
        assert_eq!(
            said,
            "it has no devices to choose from: neither a field `device` nor a snapshot of PyTorch's"
        );
    }
}

#[test]
fn older_snapshots_leave_addresses_and_sizes_to_be_counted() {
    let read = trace("old.pickle", None);
    assert_eq!(read.blocks, [block(1024, 0, false, false), block(99, 0, false, false)]);
}

#[test]
fn what_makes_no_sense_is_refused_with_its_place() {
    let table = [
        ("list", "not a memory snapshot: the pickle holds no dictionary"),
        ("harm", "not a memory snapshot: the pickle holds no dictionary"),
        ("keys", "no device trace: torch.cuda.memory._record_memory_history() has to be called"),
        ("empty", "no device trace: torch.cuda.memory._record_memory_history() has to be called"),
        ("action", "device_traces[0][0]: action is not one that is known"),
        ("size", "device_traces[0][0]: size is not the size of a block"),
    ];
    for (name, expected) in table {
        let said =
            Trace::read(&file(&format!("broken.{name}.pickle")), None).expect_err(name).to_string();
        assert!(said.starts_with(expected) && !said.contains('\n'), "{name}: {said}");
    }
}

#[test]
fn what_contradicts_the_events_before_it_is_passed_over_and_counted() {
    // The bytes that are live at the end, and what is said.
    let table = [
        ("event", 1, "events and blocks without their fields (1)"),
        ("twice", 0, "frees of freed blocks (1)"),
        ("order", 0, "requests of frees that are missing (1)"),
        ("reuse", 2, "frees that are missing (1)"),
        ("sizes", 0, "sizes of frees that differ from the allocation's (1)"),
        ("state", 1, "blocks in unknown states (1)"),
    ];
    for (name, live, expected) in table {
        let read = trace(&format!("broken.{name}.pickle"), None);
        assert_eq!(read.notes, [format!("passed over: {expected}")], "{name}");
        assert_eq!(read.live_at_end, live, "{name}");
    }
}

#[test]
fn a_snapshot_without_events_has_its_live_blocks_as_allocations_by_address() {
    for name in ["live.pickle", "still.pickle"] {
        let read = trace(name, None);
        // Freed blocks come first, so that live bytes never exceed their real peak.
        let blocks =
            [block(90, 0, true, true), block(5000, 0, false, false), block(700, 0, false, false)];
        assert_eq!((read.blocks.as_slice(), read.live_at_end), (&blocks[..], 5700), "{name}");
        assert!(read.notes.iter().any(|note| note.contains("no events")), "{:?}", read.notes);
    }
}

#[test]
fn a_recording_without_some_kinds_of_events_is_the_program_as_far_as_it_can_be_known() {
    use TraceAction::{Allocate, Free};
    let whole = [
        (Allocate, 1000),
        (Allocate, 2000),
        (Free, 1000),
        (Allocate, 600),
        (Free, 2000),
        (Allocate, 2500),
        (Free, 600),
    ];
    for (name, expected) in [
        ("requests", "requests of frees that are missing (3)"),
        ("completions", ""),
        ("frees", "frees that are missing (3)"),
    ] {
        let read = trace(&format!("skipped.{name}.pickle"), None);
        let bytes = |block: u32| read.blocks[block as usize].bytes;
        let steps: Vec<_> =
            read.steps.iter().map(|step| (step.action, bytes(step.block))).collect();
        assert_eq!(steps, whole, "{name}");
        assert_eq!((read.crossings(), read.live_at_end), (0, 2500), "{name}");
        let notes =
            if expected.is_empty() { vec![] } else { vec![format!("passed over: {expected}")] };
        assert_eq!(read.notes, notes, "{name}");
    }
    // Without allocations, the first free of an address tells of a block that was there.
    let read = trace("skipped.allocations.pickle", None);
    assert_eq!((read.live_at_end, read.frees), (0, 2));
    assert_eq!(read.notes, [older(2), "passed over: frees of freed blocks (2)".to_owned()]);
}

#[test]
fn pinned_memory_of_a_snapshot_is_not_replayed_and_is_named() {
    let read = trace("modern.pickle", None);
    assert_eq!((read.blocks.len(), read.live_at_end), (2, 2000));
    assert_eq!(
        read.notes,
        [
            "passed over: events of unknown actions (1), annotations without name, stage or time (1)",
            "pinned host memory in the trace is left out"
        ]
    );
    let said = Trace::read(&file("pinned.pickle"), None).unwrap_err().to_string();
    assert!(
        said.starts_with("no device memory is allocated in it; its 2 blocks are pinned"),
        "{said}"
    );
}

#[test]
fn a_pickle_that_is_broken_is_refused_with_its_byte() {
    let table: [(&[u8], &str); 9] = [
        (b"\x80\x04", "byte 2: cut off"),
        (b"\x80\x06.", "byte 0: pickle protocol 6; 5 is the newest"),
        (b"\x80\x04P", "byte 2: 0x50 is no instruction"),
        (b"\x80\x04.", "byte 2: the pickle takes what it has not put"),
        (b"\x80\x04K\x01K\x02a.", "byte 6: the pickle puts items into what holds none"),
        (b"\x80\x04h\x07.", "byte 2: memo 7 is asked for"),
        (b"\x80\x04X\xff\xff\xff\xff", "byte 2: a number that is none"),
        (b"\x80\x04}(K\x01u.", "byte 6: the pickle takes what it has not put"),
        (b"\x80\x04}..", "byte 4: the pickle ends here"),
    ];
    for (bytes, expected) in table {
        let said = parsed(bytes).expect_err(expected).to_string();
        assert!(said.starts_with(expected), "{bytes:?}: {said}");
    }
    // An impossible length must not allocate memory.
    let said = parsed(b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc").unwrap_err().to_string();
    assert!(said.starts_with("byte 2: cut off"), "{said}");
}

#[test]
fn a_file_that_ends_anywhere_is_an_error() {
    for name in ["start.pickle", "ring.pickle", "start.protocol2.pickle", "start.pickle.xz"] {
        let whole = std::fs::read(file(name)).unwrap();
        for cut in 0..whole.len() {
            let said = parsed(&whole[..cut]).map(|_| ()).expect_err("cut").to_string();
            assert!(!said.is_empty() && !said.contains('\n'), "{name} {cut}: {said}");
        }
    }
}

#[test]
fn a_file_with_any_byte_changed_is_read_or_refused_and_no_crash() {
    for name in ["start.pickle", "ring.pickle", "start.protocol2.pickle", "devices.pickle"] {
        let whole = std::fs::read(file(name)).unwrap();
        for at in 0..whole.len() {
            for change in [0x01, 0x10, 0x80, 0xff].into_iter().skip(at % 4).step_by(4) {
                let mut damaged = whole.clone();
                damaged[at] ^= change;
                if let Err(e) = parsed(&damaged) {
                    assert!(!e.to_string().contains('\n'), "{name} {at}: {e}");
                }
            }
            // Also with one byte missing, or one too many.
            let (head, tail) = whole.split_at(at);
            let _ = parsed(&[head, &tail[1..]].concat());
            let _ = parsed(&[head, b"(", tail].concat());
        }
    }
}

/// A writer of protocol 4 with the layout of Python's pickler: strings are shared by memo.
#[derive(Default)]
struct Writer {
    bytes: Vec<u8>,
    memo: HashMap<&'static str, u32>,
    memos: u32,
}

impl Writer {
    fn text(&mut self, text: &'static str) {
        if let Some(number) = self.memo.get(text) {
            self.bytes.push(b'j');
            self.bytes.extend(number.to_le_bytes());
            return;
        }
        self.bytes.extend([0x8c, text.len() as u8]);
        self.bytes.extend(text.as_bytes());
        self.memo.insert(text, self.memos);
        self.memoize();
    }

    fn memoize(&mut self) {
        self.bytes.push(0x94);
        self.memos += 1;
    }

    fn int(&mut self, value: u64) {
        self.bytes.extend([0x8a, 9]);
        self.bytes.extend(value.to_le_bytes());
        self.bytes.push(0);
    }

    fn list<T>(&mut self, items: &[T], mut item: impl FnMut(&mut Self, &T)) {
        self.bytes.push(b']');
        self.memoize();
        self.bytes.push(b'(');
        items.iter().for_each(|one| item(self, one));
        self.bytes.push(b'e');
    }

    fn dict(&mut self, fields: &[(&'static str, u64)], word: (&'static str, &'static str)) {
        self.bytes.push(b'}');
        self.memoize();
        self.bytes.push(b'(');
        self.text(word.0);
        self.text(word.1);
        for (name, value) in fields {
            self.text(name);
            self.int(*value);
        }
        self.bytes.push(b'u');
    }

    fn snapshot(mut self, events: &[Event], segments: &[Event]) -> Vec<u8> {
        self.bytes.extend([0x80, 4, b'}']);
        self.memoize();
        self.bytes.push(b'(');
        self.text("device_traces");
        self.list(&[()], |w, ()| {
            w.list(events, |w, event| {
                let fields =
                    [("addr", event.address), ("size", event.bytes), ("stream", event.stream)];
                w.dict(&fields, ("action", event.action));
            });
        });
        self.text("segments");
        self.list(segments, |w, block| {
            w.dict(
                &[("address", block.address), ("stream", block.stream)],
                ("segment_type", "large"),
            );
            // One more key, written as Python writes a single entry.
            w.text("blocks");
            w.list(&[()], |w, ()| {
                let size = block.bytes.next_multiple_of(512);
                let fields =
                    [("address", block.address), ("size", size), ("requested_size", block.bytes)];
                w.dict(&fields, ("state", block.action));
            });
            w.bytes.push(b's');
        });
        self.bytes.extend(b"u.");
        self.bytes
    }
}

/// An event, or a remaining block with its state.
#[derive(Clone, Copy)]
struct Event {
    action: &'static str,
    address: u64,
    bytes: u64,
    stream: u64,
}

/// Blocks allocated and freed at a few addresses on three streams. Some uses outlive the free.
fn life(seed: u64, events: usize) -> Vec<Event> {
    let mut state = seed;
    let mut below = |most: u64| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % most
    };
    let mut slots: [Option<Event>; 12] = [None; 12];
    let (mut told, mut streams) = (Vec::new(), 0);
    while told.len() < events {
        let slot = below(12) as usize;
        let event = match slots[slot] {
            None => Event {
                action: "alloc",
                address: (1 << 46) + slot as u64 * 4096,
                bytes: 1 + below(4000),
                // Numbered in order of appearance.
                stream: below(3).min(streams),
            },
            Some(last) if last.action == "alloc" => Event { action: "free_requested", ..last },
            Some(last) => Event { action: "free_completed", ..last },
        };
        slots[slot] = (event.action != "free_completed").then_some(event);
        streams = streams.max(event.stream + 1);
        told.push(event);
        // Most blocks are complete when they are freed.
        if event.action == "free_requested" && below(4) > 0 {
            told.push(Event { action: "free_completed", ..event });
            slots[slot] = None;
        }
    }
    told
}

/// Names blocks by the order of their allocation.
fn rows(events: &[Event]) -> String {
    let mut names = HashMap::new();
    let mut text = String::new();
    let mut next = 0;
    for event in events {
        let op = match event.action {
            "alloc" => {
                next += 1;
                names.insert(event.address, next);
                'a'
            }
            "free_requested" => 'f',
            _ => 'c',
        };
        let Event { address, bytes, stream, .. } = event;
        text += &format!("0,{op},{},{bytes},{stream}\n", names[address]);
    }
    text
}

/// Returns the last event of each block that is not complete.
fn left(events: &[Event]) -> Vec<Event> {
    let mut there = BTreeMap::new();
    for event in events {
        let state = match event.action {
            "alloc" => "active_allocated",
            "free_requested" => "active_pending_free",
            _ => {
                there.remove(&event.address);
                continue;
            }
        };
        there.insert(event.address, Event { action: state, ..*event });
    }
    there.into_values().collect()
}

#[test]
fn a_trace_written_as_a_snapshot_is_read_as_the_same() {
    for seed in 0..64 {
        let events = life(seed, 300);
        let read = parsed(&Writer::default().snapshot(&events, &left(&events)))
            .unwrap_or_else(|e| panic!("{seed}: {e}"));
        let same = Trace::from_rows(&rows(&events));
        assert!(read.blocks == same.blocks && read.steps == same.steps, "{seed}");
        assert_eq!((read.peak_live, read.streams), (same.peak_live, same.streams), "{seed}");
    }
}

/// Returns the live bytes after each allocation and free.
fn live(steps: impl Iterator<Item = (bool, u64)>, start: u64) -> Vec<u64> {
    let mut live = start;
    steps
        .map(|(allocated, bytes)| {
            live = if allocated { live + bytes } else { live - bytes };
            live
        })
        .collect()
}

#[test]
fn a_ring_that_begins_anywhere_has_the_same_bytes_live_from_there_on() {
    for seed in 0..32 {
        let events = life(seed, 200);
        let segments = left(&events);
        for cut in (0..events.len() - 1).step_by(7) {
            let (gone, kept) = events.split_at(cut);
            let read = parsed(&Writer::default().snapshot(kept, &segments));
            let read = read.unwrap_or_else(|e| panic!("{seed} {cut}: {e}"));
            let before = left(gone);
            let has_note = read.notes.contains(&older(before.len()));
            assert_eq!(has_note, !before.is_empty(), "{seed} {cut}");
            let start =
                before.iter().filter(|b| b.action == "active_allocated").map(|b| b.bytes).sum();
            let told = kept.iter().filter(|event| event.action != "free_completed");
            let expected = live(told.map(|event| (event.action == "alloc", event.bytes)), start);
            let steps = read.steps.iter().filter(|step| step.action != TraceAction::Complete);
            let all = steps.map(|step| {
                (step.action == TraceAction::Allocate, read.blocks[step.block as usize].bytes)
            });
            let all = live(all, 0);
            assert_eq!(all[all.len() - expected.len()..], expected, "{seed} {cut}");
            assert_eq!(
                read.peak_live,
                expected.iter().copied().max().unwrap_or(0).max(start),
                "{seed} {cut}"
            );
        }
    }
}
