//! Tests that files of other programs are read as they really end, and that what is passed over is
//! said in one line.

use aquifer_formats::{
    history::{MarkKind, MemoryHistory},
    trace::{Trace, TraceDevice, TraceError, TraceFormat},
};
use std::{io::Cursor, path::Path};

const RMM: &str = "Thread,Time,Action,Pointer,Size,Stream\n";

fn trace(text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
    Trace::from_reader(Cursor::new(text.as_ref().to_vec()), None).inspect(Trace::check)
}

fn history(text: impl AsRef<[u8]>) -> Result<MemoryHistory, TraceError> {
    MemoryHistory::from_reader(Cursor::new(text.as_ref().to_vec()), None)
}

/// Returns the trace and the history of a log, which say the same of it.
fn both(text: impl AsRef<[u8]>) -> (Trace, MemoryHistory) {
    let text = text.as_ref();
    let shown = || String::from_utf8_lossy(text).into_owned();
    let trace = trace(text).unwrap_or_else(|e| panic!("{}: {e}", shown()));
    let history = history(text).unwrap_or_else(|e| panic!("{}: {e}", shown()));
    assert_eq!((trace.format, trace.blocks.len()), (history.format, history.blocks.len()));
    let of = |notes: &[String]| notes.iter().find(|note| note.contains("passed over")).cloned();
    assert_eq!(of(&trace.notes), of(&history.notes));
    let births = history.blocks.birth.windows(2).all(|pair| pair[0] <= pair[1]);
    assert!(births, "{}", shown());
    (trace, history)
}

/// Returns what is said to be passed over.
fn passed_over(notes: &[String]) -> &str {
    let notes: Vec<_> =
        notes.iter().filter_map(|note| note.strip_prefix("passed over: ")).collect();
    assert!(notes.len() < 2 && notes.iter().all(|note| !note.contains('\n')), "{notes:?}");
    notes.first().copied().unwrap_or("")
}

fn sample(name: &str) -> Vec<u8> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/logs");
    std::fs::read(folder.join(name)).unwrap()
}

#[test]
fn logs_of_rmm_are_read_as_they_end_and_what_is_passed_over_is_counted() {
    let row = |second: u32, action: &str, address: u32, bytes: u64| {
        format!("7,10:00:{second:02}.000000,{action},{address:#x},{bytes},0\n")
    };
    let a = |second, address, bytes| row(second, "allocate", address, bytes);
    let f = |second, address, bytes| row(second, "free", address, bytes);
    let whole = a(0, 0x10, 100) + &a(1, 0x20, 50) + &f(2, 0x10, 100);
    // What is in the log, the note, and the bytes that are live at the end.
    let table = [
        (whole.clone(), "", 50),
        (whole.clone() + "7,10:00:03.000000,allocate,0x30,10", "rows cut off at the end (1)", 50),
        (f(0, 0x90, 8) + &f(0, 0x90, 8) + &whole, "frees of unknown blocks (2)", 50),
        (whole.clone() + &f(3, 0x10, 100), "frees of unknown blocks (1)", 50),
        (
            whole.clone() + &f(3, 0x20, 49),
            "sizes of frees that differ from the allocation's (1)",
            0,
        ),
        (whole.clone() + &f(3, 0x20, 0), "", 0),
        (
            whole.clone() + &a(3, 0x20, 7),
            "frees that are missing before their address is allocated again (1)",
            7,
        ),
        (
            whole.clone() + RMM + &a(4, 0x20, 9) + &f(5, 0x10, 100),
            "headers of later runs (1), blocks that an earlier run left, taken as freed at its end (1), \
             frees of unknown blocks (1)",
            9,
        ),
        (
            whole.clone() + "\n7,10:00:03.0,allocate,0x30,1,0\n" + &a(4, 0x40, 1),
            "rows that cannot be read (2)",
            51,
        ),
        (
            whole.clone() + &"x".repeat(9000) + "\n" + &a(4, 0x40, 1),
            "rows that cannot be read (1)",
            51,
        ),
        (whole.clone() + &"\0".repeat(9000), "rows that cannot be read (1)", 50),
    ];
    for (rows, note, live) in table {
        for mark in ["", "\u{feff}"] {
            let (trace, history) = both(format!("{mark}{RMM}{rows}"));
            assert_eq!(passed_over(&trace.notes), note, "{rows}");
            assert_eq!((trace.live_at_end, trace.format), (live, TraceFormat::Rmm), "{rows}");
            let ends = history.blocks.end.iter().filter(|end| end.is_infinite()).count();
            assert_eq!(ends, usize::from(live > 0) + usize::from(live == 51), "{rows}");
        }
    }
}

#[test]
fn a_log_of_which_nothing_is_left_is_refused_with_its_first_error() {
    for (rows, expected) in [
        ("", "nothing is allocated in it"),
        ("7,10:00:00.000000,free,0x10,5,0\n", "row 2: the block at 0x10 is freed but was never"),
        ("7,10:00:00.000000,allocate,0x10,5,0", "row 2: cut off"),
        ("Dear diary\n", "row 2: 1 fields where 6 belong"),
        ("7,10:00:00.000000,allocate,0x10,five,0\n", "row 2: bytes is \"five\""),
    ] {
        let text = format!("{RMM}{rows}");
        let errors = [trace(&text).map(|_| ()), history(&text).map(|_| ())];
        for error in errors.map(Result::unwrap_err) {
            assert!(error.to_string().starts_with(expected), "{rows}: {error}");
        }
    }
}

#[test]
fn midnight_adds_a_day_once_however_late_a_row_is() {
    let at = |times: &[&str]| {
        let row =
            |(place, time): (usize, &&str)| format!("7,{time},allocate,{:#x},1,0\n", place + 1);
        let rows: String = times.iter().enumerate().map(row).collect();
        history(format!("{RMM}{rows}")).unwrap().blocks.birth
    };
    let late = ["23:59:59.999990", "00:00:00.000005", "23:59:59.999998", "00:00:00.000020"];
    assert_eq!(at(&late), [0.0, 15.0, 15.0, 30.0]);
    // Two midnights, and rows that are a little late within a day.
    let day = 86_400e6;
    let long = [
        "20:00:00.000000",
        "19:59:59.999999",
        "04:00:00.000000",
        "12:00:00.000000",
        "23:00:00.000000",
        "01:00:00.000000",
    ];
    assert_eq!(
        at(&long),
        [0.0, 0.0, day / 3.0, day * 2.0 / 3.0, day * 27.0 / 24.0, day * 29.0 / 24.0]
    );
    // A quiet log: more than half a day passes within one.
    assert_eq!(at(&["02:00:00.000000", "20:00:00.000000"]), [0.0, day * 0.75]);
    // A later run begins on the next day, however little its time is below that of the first.
    let runs = format!(
        "{RMM}7,10:00:00.000000,allocate,0x1,1,0\n{RMM}7,09:00:00.000000,allocate,0x1,1,0\n"
    );
    assert_eq!(history(runs).unwrap().blocks.birth, [0.0, day * 23.0 / 24.0]);
}

#[test]
fn logs_of_rmm_before_0_15_have_devices_and_locations() {
    let (trace, history) = both(sample("rmm_0.14.csv"));
    assert_eq!((trace.device, trace.allocations(), trace.frees), (Some(0), 2, 1));
    assert_eq!((trace.blocks[0].bytes, trace.live_at_end), (80, 112));
    assert_eq!(history.devices, [TraceDevice::Gpu(0), TraceDevice::Gpu(1)]);
    let blocks = &history.blocks;
    assert_eq!((blocks.birth[1], blocks.freed[0]), (394_510.0, 2_490.0));
    assert_eq!(history.names.get(blocks.tag[0]), "/home/user/driver.py:683");
    assert_eq!(passed_over(&history.notes), "");
    let other =
        MemoryHistory::from_reader(Cursor::new(sample("rmm_0.14.csv")), Some(TraceDevice::Gpu(1)));
    let other = other.unwrap();
    assert_eq!(other.names.get(other.blocks.tag[0]), "/home/user/a,b.py:7");
    assert_eq!(other.names.get(other.blocks.stream[0]), "0x55d0c0ffee00");
}

#[test]
fn an_error_about_a_row_of_a_log_quotes_the_field_that_is_wrong() {
    let text = String::from_utf8(sample("rmm_0.14.csv")).unwrap();
    // Of every row, since the error is told where nothing is left.
    let text = text.replace("\nAlloc,0,", "\nAlloc,-1,").replace("\nAlloc,1,", "\nAlloc,-1,");
    let error = Trace::from_reader(Cursor::new(text), None).unwrap_err().to_string();
    assert!(error.contains("Device ID is \"-1\", not the number of a device"), "{error}");
}

/// A byte of a log is changed, taken out or put in, or the log is cut: what is left is read or
/// refused, and the trace and the history agree.
#[test]
fn a_log_with_any_byte_changed_or_missing_is_read_or_refused_alike() {
    let log = format!(
        "{RMM}7,23:59:59.999999,allocate,0x10,100,0\n7,00:00:00.000001,allocate failure,(nil),9,0\n\
         7,00:00:00.000002,free,0x10,100,0x1f\n{RMM}7,10:00:00.000000,allocate,0x10,5,0\n"
    );
    let samples = [log.into_bytes(), sample("rmm_0.14.csv")];
    let mut read = 0;
    for whole in samples {
        for at in 0..whole.len() {
            let mut variants =
                vec![whole[..at].to_vec(), [&whole[..at], &whole[at + 1..]].concat()];
            variants.extend([b'0', b'9', b',', b'\n', b'"', b'-', 0xff].map(|byte| {
                let mut changed = whole.clone();
                changed[at] = byte;
                changed
            }));
            for text in variants {
                match (trace(&text), history(&text)) {
                    (Ok(trace), Ok(history)) => {
                        let live = trace.blocks.iter().filter(|block| block.freed_on.is_none());
                        let held = history.blocks.freed.iter().filter(|freed| freed.is_infinite());
                        if trace.device.is_none() {
                            assert_eq!(live.count(), held.count());
                        }
                        let fails = history.marks.iter().all(|mark| mark.kind == MarkKind::Fail);
                        assert!(fails && history.notes.iter().all(|note| !note.contains('\n')));
                        read += 1;
                    }
                    (Err(trace), Err(history)) => {
                        assert!(!trace.to_string().is_empty() && !history.to_string().is_empty());
                    }
                    (trace, history) => {
                        panic!("{trace:?} {history:?}: {}", String::from_utf8_lossy(&text))
                    }
                }
            }
        }
    }
    assert!(read > 1000, "{read}");
}
