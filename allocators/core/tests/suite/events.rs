//! Tests that event records arrive complete, in order, and only at their sink.
#![expect(clippy::unwrap_used, reason = "a support function that fails is a failed test")]

use aquifer_core::{
    Action, DeviceId, Event, EventSink, Recorder, Tag,
    event::{BlockKind, MemoryLocation, NullSink, RingSink, TraceFile},
};
use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::Arc,
    thread,
};

const PLACE: MemoryLocation = MemoryLocation::Device(DeviceId(0));

fn tell(recorder: &Recorder, action: Action, address: u64, bytes: u64) {
    let ticket = recorder.ticket();
    recorder.record(ticket, recorder.event(action, PLACE, 3, address, bytes, Tag::NONE));
}

#[test]
fn a_full_ring_drops_the_oldest_and_counts_them() {
    let ring = Arc::new(RingSink::new(2));
    let recorder = Recorder::new(ring.clone());
    for address in 1..=5 {
        tell(&recorder, Action::Allocate, address, 1);
    }
    assert_eq!(ring.dropped(), 3);
    assert_eq!(ring.take().iter().map(|e| e.address).collect::<Vec<_>>(), [4, 5]);
}

#[test]
fn a_ring_of_nothing_keeps_nothing_and_counts_all() {
    let ring = RingSink::new(0);
    ring.record(&Recorder::new(Arc::new(NullSink)).event(Action::Free, PLACE, 0, 0, 0, Tag::NONE));
    assert_eq!((ring.dropped(), ring.take().len()), (1, 0));
}

#[test]
fn a_ring_keeps_the_order_of_tickets_and_waits_for_one_that_is_out_no_longer_than_there_is_room() {
    let ring = Arc::new(RingSink::new(4));
    let recorder = Recorder::new(ring.clone());
    let addresses = || ring.take().iter().map(|event| event.address).collect::<Vec<_>>();
    let event = |address| recorder.event(Action::Free, PLACE, 0, address, 0, Tag::NONE);
    let (first, second, third) = (recorder.ticket(), recorder.ticket(), recorder.ticket());
    recorder.record(third, event(3));
    recorder.record(first, event(1));
    assert_eq!((addresses(), ring.dropped()), (vec![1], 0), "the second is still out");
    recorder.record(second, event(2));
    assert_eq!((addresses(), ring.dropped()), (vec![2, 3], 0));

    let lost = recorder.ticket();
    (5..=7).for_each(|address| recorder.record(recorder.ticket(), event(address)));
    assert_eq!((addresses(), ring.dropped()), (vec![], 0));
    (8..=9).for_each(|address| recorder.record(recorder.ticket(), event(address)));
    assert_eq!((addresses(), ring.dropped()), (vec![6, 7, 8, 9], 2));
    recorder.record(lost, event(4));
    assert_eq!((addresses(), ring.dropped()), (vec![], 2), "its place is long another's");
}

#[test]
fn of_two_recorders_with_one_ring_nothing_is_lost() {
    let ring = Arc::new(RingSink::new(8));
    let recorders = [Recorder::new(ring.clone()), Recorder::new(ring.clone())];
    (1..=6).for_each(|address| tell(&recorders[address as usize % 2], Action::Grow, address, 0));
    assert_eq!(
        ring.take().iter().map(|event| event.address).collect::<Vec<_>>(),
        [1, 2, 3, 4, 5, 6]
    );
}

/// All fields of an event are equal, so one assembled from two events would be noticed.
#[test]
fn a_ring_drained_while_threads_fill_it_returns_whole_events_and_counts_the_others() {
    let (threads, each) = (3u64, if cfg!(miri) { 60 } else { 20_000 });
    let ring = Arc::new(RingSink::new(if cfg!(miri) { 8 } else { 64 }));
    let recorder = Recorder::new(ring.clone());
    let check = |events: Vec<Event>| {
        for event in &events {
            assert_eq!((event.bytes, event.stream), (event.address + 1, event.address as u32));
        }
        events.len() as u64
    };
    let mut seen = thread::scope(|s| {
        let fill = |from: u64| {
            for at in from..from + each {
                let event = recorder.event(Action::Free, PLACE, at as u32, at, at + 1, Tag::NONE);
                recorder.record(recorder.ticket(), event);
            }
        };
        let fillers: Vec<_> =
            (0..threads).map(|thread| s.spawn(move || fill(thread * each))).collect();
        let mut seen = 0;
        while fillers.iter().any(|filler| !filler.is_finished()) {
            seen += check(ring.take());
        }
        seen
    });
    // A place whose slot was busy is skipped one round later.
    let last = (0..64).map(|at| {
        recorder.event(Action::Free, PLACE, at, u64::from(at), u64::from(at) + 1, Tag::NONE)
    });
    last.for_each(|event| recorder.record(recorder.ticket(), event));
    seen += check(ring.take());
    assert_eq!(seen + ring.dropped(), threads * each + 64);
}

#[test]
fn events_of_many_threads_arrive_in_the_order_of_their_tickets() {
    // Each event carries its position as its address.
    let each = if cfg!(miri) { 25 } else { 500 };
    let ring = Arc::new(RingSink::new(4 * each));
    let recorder = Recorder::new(ring.clone());
    let order = std::sync::Mutex::new(0u64);
    thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..each {
                    let (ticket, place) = {
                        let mut order = order.lock().unwrap();
                        *order += 1;
                        (recorder.ticket(), *order)
                    };
                    thread::yield_now();
                    recorder.record(
                        ticket,
                        recorder.event(Action::Free, PLACE, 0, place, 0, Tag::NONE),
                    );
                }
            });
        }
    });
    let events: Vec<Event> = ring.take();
    assert_eq!(events.len(), 4 * each);
    assert!(events.iter().zip(1..).all(|(event, place)| event.address == place));
}

#[test]
#[cfg_attr(miri, ignore = "writes a file")]
fn a_trace_file_tells_blocks_at_one_address_apart() {
    let path = env::temp_dir().join(format!("aquifer-trace-{}.csv", process::id()));
    let recorder = Recorder::new(Arc::new(TraceFile::create(&path).unwrap()));
    tell(&recorder, Action::Allocate, 0x1000, 100);
    tell(&recorder, Action::Free, 0x1000, 100);
    tell(&recorder, Action::Complete, 0x1000, 100);
    tell(&recorder, Action::Grow, 0, 5);
    tell(&recorder, Action::Allocate, 0x1000, 200);
    tell(&recorder, Action::Free, 0x2000, 1);
    recorder.sink().flush();
    let text = fs::read_to_string(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let rows = bodies(&text);
    assert!(
        text.starts_with("t_us,op,id,bytes,stream,kind,device,tag,address,thread,refused_by\n")
    );
    let told = ["a,1,100,3", "f,1,100,3", "c,1,100,3", "g,0,5,3", "a,2,200,3"];
    let address = |row: &str| if row.starts_with('g') { "" } else { "0x1000" };
    assert_eq!(rows, told.map(|row| format!("{row},cached,0,,{}", address(row))));
}

fn file(name: &str) -> PathBuf {
    env::temp_dir().join(format!("aquifer-{name}-{}.csv", process::id()))
}

fn rows(path: &Path) -> Vec<String> {
    bodies(&fs::read_to_string(path).unwrap())
}

/// Returns the rows without their times and threads, which differ from run to run.
fn bodies(text: &str) -> Vec<String> {
    let body = |row: &str| {
        // No budget has refused here.
        let (row, thread) = row.strip_suffix(',').unwrap().rsplit_once(',').unwrap();
        assert!(thread.parse::<u32>().unwrap() > 0, "{row}");
        row.split_once(',').unwrap().1.to_owned()
    };
    text.lines().skip(1).map(body).collect()
}

#[test]
#[cfg_attr(miri, ignore = "writes a file")]
fn a_trace_file_says_kind_device_and_tag_of_every_block() {
    let path = file("kinds");
    let recorder = Recorder::new(Arc::new(TraceFile::create(&path).unwrap()));
    let tag = Tag::named("kv, 100 %\nof \u{85}\u{fc}");
    let places = [
        MemoryLocation::Device(DeviceId(7)),
        MemoryLocation::Host(Some(1)),
        MemoryLocation::Host(None),
        MemoryLocation::Global,
    ];
    for (place, kind) in places.into_iter().zip(BlockKind::ALL) {
        let event = recorder.event(Action::Allocate, place, 4, 0x1000, 64, tag).of_kind(kind);
        recorder.record(recorder.ticket(), event);
    }
    let long = Tag::named(&"\u{fc}".repeat(600));
    recorder.record(recorder.ticket(), recorder.event(Action::Fail, PLACE, 0, 0, 9, long));
    // A move of nothing is no event, and a finding may be about no bytes.
    tell(&recorder, Action::Move, 0x3000, 4096);
    tell(&recorder, Action::Move, 0x3000, 0);
    tell(&recorder, Action::Finding, 0x4000, 0);
    // A limit, and none any more.
    tell(&recorder, Action::Limit, 0, 1 << 50);
    tell(&recorder, Action::Limit, 0, u64::MAX);
    // What is in use outside, and nothing any more.
    tell(&recorder, Action::Outside, 0, 1 << 50);
    tell(&recorder, Action::Outside, 0, 0);
    // Imported memory has no bytes of its own.
    tell(&recorder, Action::Allocate, 0x2000, 0);
    tell(&recorder, Action::Free, 0x2000, 0);
    let told = rows(&path);
    fs::remove_file(&path).unwrap();
    let name = "kv%2C 100 %25%0Aof %C2%85\u{fc}";
    let expected = [
        format!("a,1,64,4,cached,7,{name},0x1000"),
        format!("a,2,64,4,stable,host:1,{name},0x1000"),
        format!("a,3,64,4,reserved,host,{name},0x1000"),
        format!("x,0,9,0,cached,0,{},", "\u{fc}".repeat(512)),
        "m,0,4096,3,cached,0,,0x3000".to_owned(),
        "v,0,0,3,cached,0,,0x4000".to_owned(),
        format!("l,0,{},3,cached,0,,", 1_u64 << 50),
        "l,0,0,3,cached,0,,".to_owned(),
        format!("o,0,{},3,cached,0,,", 1_u64 << 50),
        "o,0,0,3,cached,0,,".to_owned(),
    ];
    assert_eq!(told, expected);
}

#[test]
#[cfg_attr(miri, ignore = "writes a file")]
fn a_block_ends_in_the_trace_when_another_has_its_address() {
    let path = file("again");
    let recorder = Recorder::new(Arc::new(TraceFile::create(&path).unwrap()));
    tell(&recorder, Action::Allocate, 0x1000, 1);
    tell(&recorder, Action::Complete, 0x1000, 1);
    tell(&recorder, Action::Free, 0x1000, 1);
    tell(&recorder, Action::Free, 0x1000, 1);
    tell(&recorder, Action::Allocate, 0x1000, 2);
    tell(&recorder, Action::Allocate, 0x1000, 3);
    let told = rows(&path);
    fs::remove_file(&path).unwrap();
    let expected = ["a,1,1,3", "f,1,1,3", "c,1,1,3", "a,2,2,3", "f,2,2,3", "c,2,2,3", "a,3,3,3"];
    // The end of the previous block comes before the next block.
    assert_eq!(told, expected.map(|row| format!("{row},cached,0,,0x1000")));
}

#[test]
#[cfg_attr(miri, ignore = "writes files")]
fn two_trace_files_under_one_name_lose_nothing_and_one_that_is_done_is_replaced() {
    let path = file("twice");
    let files: Vec<_> = (0..3).map(|_| Arc::new(TraceFile::create(&path).unwrap())).collect();
    let paths: Vec<_> = files.iter().map(|file| file.path()).collect();
    for (file, bytes) in files.into_iter().zip(1..) {
        tell(&Recorder::new(file), Action::Allocate, 0x1000, bytes);
    }
    let stem = path.file_stem().unwrap().to_str().unwrap();
    let beside = |part: &str| path.with_file_name(format!("{stem}.{}{part}.csv", process::id()));
    assert_eq!(paths, [path.clone(), beside(""), beside(".2")]);
    for (path, bytes) in paths.iter().zip(1..) {
        assert_eq!(rows(path), [format!("a,1,{bytes},3,cached,0,,0x1000")]);
    }
    let again = TraceFile::create(&path).unwrap();
    assert_eq!((again.path(), rows(&path)), (path.clone(), Vec::new()));
    paths.iter().for_each(|path| fs::remove_file(path).unwrap());

    let template = file("of-%p");
    let named = TraceFile::create(&template).unwrap().path();
    assert_eq!(named, file(&format!("of-{}", process::id())));
    fs::remove_file(named).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "writes a file")]
fn events_behind_a_ticket_that_never_comes_are_written_when_the_recorder_is_dropped() {
    let path = file("dropped");
    let recorder = Recorder::new(Arc::new(TraceFile::create(&path).unwrap()));
    let (lost, late) = (recorder.ticket(), recorder.ticket());
    tell(&recorder, Action::Allocate, 0x1000, 1);
    assert_eq!(rows(&path).len(), 0);
    recorder.flush();
    assert_eq!(rows(&path).len(), 1);
    recorder.record(late, recorder.event(Action::Allocate, PLACE, 0, 0x2000, 2, Tag::NONE));
    assert_eq!(rows(&path).len(), 2, "whose turn was passed over comes all the same");
    let before = recorder.ticket();
    tell(&recorder, Action::Free, 0x1000, 1);
    drop((lost, before, recorder));
    assert_eq!(rows(&path).len(), 3);
    fs::remove_file(&path).unwrap();
}

#[test]
#[cfg_attr(miri, ignore = "opens a file")]
fn a_trace_that_cannot_be_begun_is_an_error() {
    assert!(TraceFile::create(Path::new("/dev/full")).is_err());
    assert!(TraceFile::create(Path::new("/no/such/folder/trace.csv")).is_err());
}
