use super::*;
use crate::trace::{Trace, TraceDevice, TraceFormat};
use aquifer_core::event::BlockKind;
use std::{fs, path::Path};

const HEADER: &str = "t_us,op,id,bytes,stream,kind,device,tag,address,thread";

fn history(rows: &str, device: Option<&str>) -> MemoryHistory {
    read(&format!("{HEADER}\n{rows}"), device).unwrap()
}

fn read(text: &str, device: Option<&str>) -> Result<MemoryHistory, crate::trace::TraceError> {
    let device = device.map(|device| device.parse().unwrap());
    MemoryHistory::from_reader(std::io::Cursor::new(text.as_bytes().to_vec()), device)
}

/// Returns the peak of live bytes, in requested sizes.
fn peak(history: &MemoryHistory) -> u64 {
    let (mut live, mut peak) = (0, 0);
    for step in &history.steps {
        match step.action() {
            HistoryAction::Allocate => live += history.blocks.requested[step.index()],
            HistoryAction::Free | HistoryAction::Release => {
                live -= history.blocks.requested[step.index()];
            }
            HistoryAction::Complete | HistoryAction::Mark => {}
        }
        peak = peak.max(live);
    }
    peak
}

/// No two blocks share a byte at the same time, in the order of steps.
fn check_layout(history: &MemoryHistory) {
    let mut used = ExtentTree::default();
    for step in &history.steps {
        let range = history.blocks.range(step.index().min(history.blocks.len() - 1));
        match step.action() {
            HistoryAction::Allocate => {
                assert_eq!(used.remove(range.clone()), 0, "free before");
                used.insert(range.clone());
                assert!(range.end <= history.address_height || history.spans.len() > 1);
            }
            HistoryAction::Complete | HistoryAction::Release => {
                assert_eq!(used.remove(range.clone()), range.end - range.start);
            }
            HistoryAction::Free | HistoryAction::Mark => {}
        }
    }
}

#[test]
fn rows_become_columns_with_addresses_threads_and_marks() {
    let rows = "5,a,1,1000,3,cached,0,kv%2Ccache,0x7f0000000000,1\n\
                6,g,0,2097152,0,cached,0,,0x7f0000000000,1\n\
                7,f,1,1000,3,cached,0,kv%2Ccache,0x7f0000000000,2\n\
                8,x,0,5000,3,cached,0,big,,2\n\
                9,m,0,64,0,cached,0,,,2\n\
                9,v,0,0,0,cached,0,,0x7f0000000000,2\n\
                12,c,1,1000,3,cached,0,kv%2Ccache,0x7f0000000000,1\n\
                13,a,2,77,3,pinned,host:1,,0x10000,1\n\
                15,s,0,2097152,0,cached,0,,0x7f0000000000,1\n";
    let of = history(rows, None);
    let blocks = &of.blocks;
    assert_eq!((blocks.birth[0], blocks.freed[0], blocks.end[0]), (0.0, 2.0, 7.0));
    assert_eq!((blocks.address[0], blocks.bytes[0], blocks.row[0]), (0x7f00_0000_0000, 1000, 2));
    let names = [blocks.stream[0], blocks.tag[0], blocks.thread[0]].map(|name| of.names.get(name));
    assert_eq!(names, ["3", "kv,cache", "1"]);
    let kinds: Vec<_> = of.marks.iter().map(|mark| (mark.kind.name(), mark.bytes)).collect();
    let expected =
        [("grow", 2 << 20), ("fail", 5000), ("move", 64), ("finding", 0), ("release", 2 << 20)];
    assert_eq!(kinds, expected);
    assert_eq!(of.addresses, AddressSource::Recorded);
    assert_eq!(of.mapped_at_start.as_deref(), Some(&[][..]));
    assert_eq!((of.physical_at_start, of.pinned.as_deref()), (Some(0), Some(&[(8.0, 77)][..])));
    assert_eq!((of.devices.len(), of.offset(0x7f00_0000_0010)), (2, 16));
    let actions: Vec<_> = of.steps.iter().map(|step| step.action()).collect();
    assert_eq!((actions[2], actions[6]), (HistoryAction::Free, HistoryAction::Complete));
    let host = history(rows, Some("host:1"));
    assert_eq!((host.device, host.blocks.len()), (Some(TraceDevice::Host(Some(1))), 1));
    assert_eq!(host.pinned, None);
}

#[test]
fn rows_of_limits_are_read_and_those_of_older_files_need_none() {
    let blocks = "5,a,1,1000,3,cached,0,,,1\n9,f,1,1000,3,cached,0,,,1\n";
    let rows = format!(
        "2,l,0,{},0,cached,0,,,1\n2,l,0,77,0,cached,1,,,1\n{blocks}\
         11,l,0,0,0,cached,0,,,1\n12,l,0,4096,0,cached,0,,,1\n",
        1_u64 << 50
    );
    let of = history(&rows, None);
    assert_eq!(of.limits, [(0.0, Some(1 << 50)), (9.0, None), (10.0, Some(4096))]);
    let at = [-1.0, 0.0, 8.9, 9.0, 9.9, 10.0, 99.0].map(|time| of.limit_at(time));
    let (first, last) = (Some(1 << 50), Some(4096));
    assert_eq!(at, [None, first, first, None, None, last, last]);
    assert_eq!((of.blocks.len(), of.marks.len(), of.events), (1, 0, 5));
    let older = history(blocks, None);
    assert_eq!((older.limits.as_slice(), older.limit_at(5.0)), (&[][..], None));

    // A replay passes them over.
    let replayed = |rows: &str| {
        let text = format!("{HEADER}\n{rows}").into_bytes();
        Trace::from_reader(std::io::Cursor::new(text), None).unwrap()
    };
    let (new, old) = (replayed(&rows), replayed(blocks));
    assert_eq!((new.blocks, new.steps, new.peak_live), (old.blocks, old.steps, old.peak_live));
}

#[test]
fn rows_of_what_is_in_use_outside_are_read_and_those_of_older_files_need_none() {
    let blocks = "5,a,1,1000,3,cached,0,,,1\n9,f,1,1000,3,cached,0,,,1\n";
    let rows = format!(
        "2,o,0,{},0,cached,0,,,1\n2,o,0,77,0,cached,1,,,1\n{blocks}11,o,0,0,0,cached,0,,,1\n",
        1_u64 << 50
    );
    let of = history(&rows, None);
    assert_eq!(of.outside, [(0.0, 1 << 50), (9.0, 0)]);
    let at = [-1.0, 0.0, 8.9, 9.0, 99.0].map(|time| of.outside_at(time));
    assert_eq!(at, [None, Some(1 << 50), Some(1 << 50), Some(0), Some(0)]);
    assert_eq!((of.blocks.len(), of.marks.len(), of.events), (1, 0, 4));
    let older = history(blocks, None);
    assert_eq!((older.outside.as_slice(), older.outside_at(5.0)), (&[][..], None));

    // A replay passes them over, compressed or not.
    let text = format!("{HEADER}\n{rows}").into_bytes();
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    std::io::Write::write_all(&mut packed, &text).unwrap();
    let packed = packed.finish().unwrap();
    for text in [text, packed] {
        let trace = Trace::from_reader(std::io::Cursor::new(text.clone()), None).unwrap();
        assert_eq!(trace.blocks.len(), 1);
        let read = MemoryHistory::from_reader(std::io::Cursor::new(text), None).unwrap();
        assert_eq!(read.outside, of.outside);
    }
}

#[test]
fn a_file_is_as_invalid_as_for_a_replay() {
    let long = "0,a,1,5,0,cached,0,".to_owned() + &"x".repeat(5000);
    let table = [
        "0,a,1,5,0,cached,0,,,",
        "0,a,1,5,0,cached,0,,,\n0,a,1,5,0,cached,0,,,\n",
        "0,f,1,5,0,cached,0,,,\n",
        "0,c,1,5,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,c,1,5,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,f,1,6,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n0,a,1,5,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n0,c,1,5,0,cached,0,,,\n0,c,1,5,0,cached,0,,,\n",
        "0,a,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n0,c,1,5,0,cached,0,,,\n0,f,1,5,0,cached,0,,,\n",
        "0,a,1,0,0,cached,0,,,\n",
        "0,a,1,-3,0,cached,0,,,\n",
        "0,g,0,0,0,cached,0,,,\n",
        "0,l,0,-1,0,cached,0,,,\n",
        "0,o,0,-1,0,cached,0,,,\n",
        "0,o,0,,0,cached,0,,,\n",
        "0,l,0,99999999999999999999,0,cached,0,,,\n",
        "0,a,1,99999999999999999999999,0,cached,0,,,\n",
        "0,a,1,5,0,wrong,0,,,\n",
        "0,a,1,5,0,cached,host:,,,\n",
        "0,a,1,5,0,cached,0,%,,\n",
        "0,a,1,5,0,cached,0,,7f00,\n",
        "0,a,1,5,0,cached,0,,0x,\n",
        "0,a,1,5,0,cached,0,,0xg,\n",
        "0,a,1,5,0,cached,0,,0xffffffffffffffff,\n",
        "0,a,1,5,0,cached,0,,,one\n",
        "0,w,1,5,0,cached,0,,,\n",
        "\0\n",
        "",
        long.as_str(),
    ];
    for rows in table {
        let text = format!("{HEADER}\n{rows}");
        let bytes = std::io::Cursor::new(text.clone().into_bytes());
        let replay = Trace::from_reader(bytes, None).unwrap_err();
        let report = read(&text, None).unwrap_err();
        assert_eq!(
            (replay.to_string(), replay.row()),
            (report.to_string(), report.row()),
            "{rows}"
        );
    }
    for (text, said) in [
        ("", "the file is empty"),
        ("Dear diary\n", "row 1: not a trace"),
        (
            "Thread,Time,Action,Pointer,Size,Stream\n1,10:00:00.000001,free,0x10,5,0\n",
            "row 2: the block at 0x10",
        ),
        ("Thread,Time,Action,Pointer,Size,Stream\n1,10:00,free,0x10,5,0\n", "row 2: Time is"),
    ] {
        let report = read(text, None).unwrap_err().to_string();
        assert!(report.starts_with(said), "{report}");
    }
    let two = read(&format!("{HEADER}\n0,a,1,5,0,cached,0,,,\n"), Some("3")).unwrap_err();
    assert_eq!(two.to_string(), "nothing is allocated on device 3 in it, but on 0");
    let none = read("t_us,op,id,bytes,stream\n0,a,1,5,0\n", Some("0")).unwrap_err();
    assert!(none.to_string().starts_with("it has no devices to choose from"), "{none}");
}

#[test]
fn many_streams_and_tags_with_markup_and_control_characters_are_kept_as_text() {
    let rows = "0,a,1,5,0,cached,0,<script>alert(1)</script>%0A%1B[2J,,\n";
    let of = history(rows, None);
    assert_eq!(of.names.get(of.blocks.tag[0]), "<script>alert(1)</script>\n\u{1b}[2J");
    let rows: String = (0..1025).map(|n| format!("0,a,{n},1,{n},cached,0,,,\n")).collect();
    let error = read(&format!("{HEADER}\n{rows}"), None).unwrap_err().to_string();
    assert_eq!(error, "row 1026: more than 1024 streams");
}

#[test]
fn a_log_of_rmm_has_times_across_midnight_threads_and_failures() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               7,23:59:59.999999,allocate,0x7f0000000000,100,0\n\
               7,23:59:59.999990,allocate,0x7f0000010000,100,0\n\
               9,00:00:01.000000,allocate failure,(nil),999,0x1f0000\n\
               7,00:00:02.000000,free,0x7f0000000000,100,0\n\
               7,00:00:02.000000,allocate,0x7f0000000000,64,0x1f0000\n";
    let of = read(log, None).unwrap();
    assert_eq!((of.format, of.addresses), (TraceFormat::Rmm, AddressSource::Recorded));
    assert_eq!(of.blocks.birth, [0.0, 0.0, 2_000_001.0]);
    assert_eq!(of.blocks.end[0], 2_000_001.0);
    assert_eq!((of.marks[0].kind, of.marks[0].bytes), (MarkKind::Fail, 999));
    assert_eq!(of.names.get(of.blocks.stream[2]), "0x1f0000");
    assert_eq!(of.names.get(of.blocks.thread[0]), "7");
}

#[test]
fn blocks_without_addresses_are_placed_at_the_lowest_offset_with_room() {
    let rows = "t_us,op,id,bytes,stream\n0,a,1,100,0\n0,a,2,50,0\n0,a,3,10,0\n1,f,1,100,0\n1,c,1,100,0\n\
                2,f,2,50,1\n3,a,4,120,0\n4,a,5,60,0\n5,a,6,40,0\n6,c,2,50,0\n7,a,7,45,0\n";
    let of = read(rows, None).unwrap();
    assert_eq!(of.addresses, AddressSource::Packed);
    assert_eq!(of.blocks.address, [0, 100, 150, 160, 0, 60, 100]);
    assert_eq!(of.address_height, 280);
    assert!(of.notes[0].contains("first fit"), "{:?}", of.notes);
    check_layout(&of);
}

#[test]
fn a_recorded_free_without_a_completion_is_pending_even_if_there_is_no_completion_at_all() {
    let of =
        history("0,a,1,9,0,cached,0,,,1\n4,f,1,9,0,cached,0,,,1\n5,a,2,9,0,cached,0,,,1\n", None);
    assert_eq!((of.blocks.freed[0], of.blocks.end[0]), (4.0, f64::INFINITY));
    assert_eq!((of.steps[1].action(), of.address_height), (HistoryAction::Free, 18));
    assert!(of.notes.iter().all(|note| !note.contains("completions")), "{:?}", of.notes);
}

#[test]
fn frees_without_any_completion_count_as_complete() {
    let of = read("t_us,op,id,bytes,stream\n0,a,1,9,0\n4,f,1,9,0\n5,a,2,9,0\n", None).unwrap();
    assert_eq!((of.blocks.end[0], of.address_height), (4.0, 9));
    assert!(of.notes[0].contains("no completions"), "{:?}", of.notes);
}

#[test]
fn addresses_too_far_apart_for_an_axis_are_packed_and_far_ones_become_spans() {
    let far = history("0,a,1,5,0,cached,0,,0x0,\n0,a,2,5,0,cached,0,,0xffff000000000000,\n", None);
    assert_eq!((far.addresses, far.spans.len()), (AddressSource::Recorded, 2));
    assert_eq!(far.offset(0xffff_0000_0000_0001), far.spans[1].at + 1);
    let rows: String =
        (0..2000_u64).map(|n| format!("0,a,{n},5,0,cached,0,,{:#x},\n", n << 50)).collect();
    let wide = history(&rows, None);
    assert_eq!(wide.addresses, AddressSource::Packed);
    assert!(wide.notes[0].contains("too far apart"), "{:?}", wide.notes);
}

#[test]
fn every_recorded_and_generated_trace_has_the_peak_that_its_replay_has() {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data");
    for name in ["serve_mixed", "resnet_train", "llama_train"] {
        let path = data.join(format!("{name}.csv.xz"));
        let (of, trace) =
            (MemoryHistory::read(&path, None).unwrap(), Trace::read(&path, None).unwrap());
        assert_eq!(peak(&of), trace.peak_live, "{name}");
        assert_eq!((of.blocks.len(), of.format), (trace.blocks.len(), trace.format));
        check_layout(&of);
    }
    for workload in &made::WORKLOADS {
        let name = format!("made:{},length=0.05", workload.name);
        let (of, trace) = (
            MemoryHistory::read(name.as_ref(), None).unwrap(),
            Trace::read(name.as_ref(), None).unwrap(),
        );
        assert_eq!(peak(&of), trace.peak_live, "{name}");
        assert_eq!((of.clock, of.blocks.len()), (HistoryClock::Events, trace.blocks.len()));
        check_layout(&of);
    }
}

#[test]
fn every_snapshot_is_read_as_for_a_replay_and_every_broken_one_is_refused_alike() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    let (mut good, mut bad) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if !path.to_str().unwrap().contains(".pickle") {
            continue;
        }
        match (MemoryHistory::read(&path, None), Trace::read(&path, None)) {
            (Ok(of), Ok(trace)) => {
                assert_eq!(peak(&of), trace.peak_live, "{}", path.display());
                assert_eq!(of.blocks.len(), trace.blocks.len());
                assert_eq!(of.addresses, AddressSource::Recorded);
                good += 1;
            }
            (Err(report), Err(replay)) => {
                assert_eq!(report.to_string(), replay.to_string(), "{}", path.display());
                bad += 1;
            }
            // A history of pinned memory alone is one.
            (Ok(of), Err(_)) if of.device == Some(TraceDevice::Host(None)) => {}
            (report, replay) => panic!("{}: {report:?} {replay:?}", path.display()),
        }
    }
    assert!(good >= 20 && bad >= 6, "{good} {bad}");
}

#[test]
fn a_snapshot_has_times_stacks_segments_and_failures() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    let of = MemoryHistory::read(&folder.join("start.pickle"), None).unwrap();
    assert_eq!(of.clock, HistoryClock::Microseconds);
    assert_eq!(of.stacks.len(), 2, "all events share one stack");
    let frames: Vec<_> = of.stacks.get(1).iter().map(|frame| of.names.get(*frame)).collect();
    let expected = ["forward at /home/user/model.py:17", "torch::autograd::Engine::execute"];
    assert_eq!(frames, expected);
    // The one segment of the end has no event, so it was there from the start.
    let segment = 0x7f00_0020_0000..0x7f00_0020_0000 + 2_000_384;
    assert_eq!(of.mapped_at_start, Some(vec![segment]));
    assert_eq!(of.physical_at_start, Some(2_000_384));
    let fail = of.marks.iter().find(|mark| mark.kind == MarkKind::Fail).unwrap();
    assert_eq!((fail.bytes, fail.device_free), (1 << 40, Some(4096)));
    // The last block is in the final segments, which tell what it occupies.
    assert_eq!(of.blocks.is_exact.last(), Some(&true));
    assert_eq!(of.blocks.bytes.last().map(|bytes| bytes % 512), Some(0));
    let ring = MemoryHistory::read(&folder.join("ring.pickle"), None).unwrap();
    assert!(ring.notes.iter().any(|note| note.contains("older than the first event")));
}

#[test]
fn a_snapshot_of_2_14_has_phases_texts_of_blocks_and_pinned_memory() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    let of = MemoryHistory::read(&folder.join("modern.pickle"), None).unwrap();
    let phases: Vec<_> = of
        .phases
        .iter()
        .map(|phase| (of.names.get(phase.name), phase.begin, phase.end, phase.depth))
        .collect();
    let expected = [
        ("ProfilerStep#1", 0.0, 5.0, 0),
        ("forward", 8.0, 20.0, 0),
        ("attention", 9.0, 15.0, 1),
        ("backward", 22.0, 40.0, 0),
    ];
    assert_eq!(phases, expected);
    // A block's own text is kept; others have that of their first annotation.
    let texts: Vec<_> = of.blocks.metadata.iter().map(|text| of.names.get(*text)).collect();
    assert_eq!(texts, ["weights", "saved for backward"]);
    let marks = of.marks.iter().filter(|mark| mark.kind == MarkKind::User);
    let marks: Vec<_> = marks.map(|mark| (mark.time, of.names.get(mark.text))).collect();
    assert_eq!(marks, [(20.0, "saved for backward"), (25.0, "pinned down")]);
    // The block of the host's segments was there from the start.
    let pinned = [(0.0, 4096), (12.0, 12_288), (33.0, 4096)];
    assert_eq!(of.pinned.as_deref(), Some(&pinned[..]));
    let host = TraceDevice::Host(None);
    assert_eq!(of.devices, [TraceDevice::Gpu(0), host]);
    let said =
        "passed over: events of unknown actions (1), annotations without name, stage or time (1)";
    assert!(of.notes.iter().any(|note| note == said), "{:?}", of.notes);
    for (name, asked) in [("modern.pickle", Some(host)), ("pinned.pickle", None)] {
        let of = MemoryHistory::read(&folder.join(name), asked).unwrap();
        assert_eq!((of.device, of.blocks.requested.as_slice()), (Some(host), &[4096, 8192][..]));
        assert!(of.blocks.kind.iter().all(|kind| *kind == Some(BlockKind::Pinned)));
    }
}

#[test]
fn a_snapshot_without_events_is_a_history_whose_steps_are_its_blocks() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    for name in ["live.pickle", "still.pickle"] {
        let of = MemoryHistory::read(&folder.join(name), None).unwrap();
        assert_eq!((of.clock, of.end, of.events), (HistoryClock::Events, 2.0, 3), "{name}");
        assert_eq!(of.blocks.birth, [0.0, 1.0, 2.0], "{name}");
        assert_eq!(
            (peak(&of), of.devices.as_slice()),
            (5700, &[TraceDevice::Gpu(0)][..]),
            "{name}"
        );
        assert_eq!(of.stacks.get(of.blocks.stack[1]).len(), 2, "{name}");
        assert!(of.notes.iter().any(|note| note.contains("no events")), "{:?}", of.notes);
    }
}

/// An annotation for each start or end, of a few names: phases are within the history and in order,
/// and each entry is in one or counted.
#[test]
fn annotations_in_any_order_become_phases_within_bounds() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    let bytes = fs::read(folder.join("modern.pickle")).unwrap();
    let mut read = 0;
    for at in 0..bytes.len() {
        let values = [0, 0x28, 0x4b, 0x53, 0x7f, 0x94, 0xff, bytes[at] ^ 1];
        for with in values.into_iter().skip(at % 3).step_by(3) {
            let mut changed = bytes.clone();
            changed[at] = with;
            let Ok(of) = MemoryHistory::from_reader(std::io::Cursor::new(changed), None) else {
                continue;
            };
            let within = of
                .phases
                .iter()
                .all(|phase| 0.0 <= phase.begin && phase.begin <= phase.end && phase.end <= of.end);
            assert!(within, "{at} {with}: {:?}", of.phases);
            assert!(of.phases.is_sorted_by(|a, b| a.begin <= b.begin), "{at} {with}");
            assert_eq!(of.blocks.metadata.len(), of.blocks.len());
            read += 1;
        }
    }
    assert!(read > bytes.len(), "{read}");
}

#[test]
fn a_snapshot_cut_anywhere_is_an_error_and_one_with_any_byte_changed_is_no_crash() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/snapshots");
    let bytes = fs::read(folder.join("start.pickle")).unwrap();
    let of = |bytes: Vec<u8>| MemoryHistory::from_reader(std::io::Cursor::new(bytes), None);
    for end in 0..bytes.len() {
        assert!(of(bytes[..end].to_vec()).is_err(), "{end}");
    }
    let mut read = 0;
    for at in 0..bytes.len() {
        for with in [0, 0x28, 0x71, 0x7f, 0x94, 0xff].into_iter().skip(at % 2).step_by(2) {
            let mut changed = bytes.clone();
            changed[at] = with;
            read += u32::from(of(changed).is_ok());
        }
    }
    assert!(read > 0, "a change of a frame's name leaves a snapshot");
}

#[test]
fn stacks_in_cycles_of_any_type_and_huge_counts_are_read_or_refused_within_bounds() {
    let event = |frames: &[u8]| {
        let text = |text: &str| [&[0x8c, text.len() as u8], text.as_bytes()].concat();
        let mut pickle = b"\x80\x04}(".to_vec();
        pickle.extend(text("segments"));
        pickle.extend(b"]");
        pickle.extend(text("device_traces"));
        pickle.extend(b"]](}(");
        for (key, value) in [("action", text("alloc")), ("addr", b"K\x00".to_vec())] {
            pickle.extend(text(key));
            pickle.extend(value);
        }
        pickle.extend(text("size"));
        pickle.extend(b"K\x05");
        pickle.extend(text("stream"));
        pickle.extend(b"K\x00");
        pickle.extend(text("frames"));
        pickle.extend(frames);
        pickle.extend(b"ueau.");
        MemoryHistory::from_reader(std::io::Cursor::new(pickle), None)
    };
    // An empty list; one that holds itself; numbers; a dictionary; a set; one without names.
    for frames in [&b"]"[..], b"]\x94h\x00a", b"](K\x01K\x02e", b"}", b"\x8f", b"](}}}e"] {
        let of = event(frames).unwrap_or_else(|e| panic!("{frames:?}: {e}"));
        assert_eq!((of.blocks.len(), of.blocks.requested[0]), (1, 5), "{frames:?}");
    }
    // Text of 2⁶³ bytes, a negative length, a memo that is not there, more after the end.
    for frames in [
        &b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7fabc"[..],
        b"X\xff\xff\xff\xff",
        b"j\xff\xff\xff\x7f",
        b"].",
    ] {
        let error = event(frames).unwrap_err().to_string();
        assert!(error.starts_with("byte "), "{frames:?}: {error}");
    }
}
