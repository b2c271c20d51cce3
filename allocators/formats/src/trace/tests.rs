//! Tests of what the reader accepts and rejects.

use super::*;
use std::{io::Cursor, path::Path};

const HEADER: &str = "t_us,op,id,bytes,stream\n";

fn parse(text: &str) -> Result<Trace, TraceError> {
    parse_device(text, None)
}

fn file(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data").join(name)
}

#[test]
fn blocks_that_outlive_their_free_are_told_by_a_completion_further_on() {
    let trace = Trace::from_rows(
        "0,a,7,100,0\n1,a,8,50,1\n2,f,7,100,0\n2,c,7,100,0\n3,f,8,50,1\n4,a,9,10,0\n5,c,8,50,1\n",
    );
    assert_eq!(trace.blocks.iter().map(|b| b.lingers).collect::<Vec<_>>(), [false, true, false]);
    // A completion directly after its free adds no step.
    let actions: Vec<_> = trace.steps.iter().map(|s| s.action).collect();
    use TraceAction::{Allocate, Complete, Free};
    assert_eq!(actions, [Allocate, Allocate, Free, Free, Allocate, Complete]);
    assert_eq!(
        (trace.peak_live, trace.live_at_end, trace.frees, trace.operations()),
        (150, 10, 2, 5)
    );
}

#[test]
fn a_free_without_a_completion_lingers_to_the_end() {
    let trace = Trace::from_rows("0,a,1,5,0\n1,f,1,5,0\n");
    assert!(trace.blocks[0].lingers);
    assert_eq!(trace.crossings(), 1);
}

#[test]
fn streams_are_numbered_without_gaps_in_their_own_order() {
    let trace = Trace::from_rows("0,a,1,5,9\n0,a,2,5,3\n0,a,3,5,9\n");
    assert_eq!(trace.streams, 2);
    assert_eq!(trace.blocks.iter().map(|b| b.stream).collect::<Vec<_>>(), [1, 0, 1]);
}

#[test]
fn an_id_may_name_another_block_once_the_first_is_done() {
    let trace = Trace::from_rows("0,a,1,5,0\n0,f,1,5,0\n0,c,1,5,0\n0,a,1,6,0\n");
    assert_eq!(trace.blocks.len(), 2);
}

#[test]
fn line_ends_may_be_those_of_windows() {
    let rows = "t_us,op,id,bytes,stream\r\n0,a,1,5,0\r\n";
    assert_eq!(parse(rows).unwrap().blocks.len(), 1);
}

#[test]
fn the_log_of_rmm_becomes_the_same_trace() {
    let log = "Thread,Time,Action,Pointer,Size,Stream\n\
               4711,09:00:00.000001,allocate,0x7f0000000200,1024,0x0\n\
               4711,09:00:00:000002,allocate,7f0000000600,4096,55d0c0ffee00\n\
               4711,09:00:00.000003,allocate,(nil),0,0x0\n\
               4711,09:00:00.000004,allocate failure,(nil),99999999999999999999,0x0\n\
               4711,09:00:00.000005,free,(nil),0,0x0\n\
               4711,09:00:00.000006,free,0x7f0000000200,1024,0x55d0c0ffee00\n\
               4711,09:00:00.000007,allocate,0x7f0000000200,2048,0x0\n\
               4711,09:00:00.000008,free,7f0000000600,4096,0x55d0c0ffee00\n";
    let trace = parse(log).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!((trace.format, trace.streams), (TraceFormat::Rmm, 2));
    assert_eq!((trace.allocations(), trace.frees, trace.peak_live), (3, 2, 1024 + 4096 + 1024));
    // The first block is freed on another stream than its own, which counts as a use by that stream
    // until then.
    assert_eq!(
        trace.blocks[0],
        TraceBlock { bytes: 1024, stream: 0, freed_on: Some(1), lingers: false }
    );
    assert!(trace.blocks[0].crosses() && !trace.blocks[1].crosses());
}

#[test]
fn what_cannot_have_happened_is_refused_with_its_row() {
    let rmm = "Thread,Time,Action,Pointer,Size,Stream\n";
    let table = [
        ("", "the file is empty"),
        ("hello\n", "row 1: not a trace"),
        (HEADER, "nothing is allocated"),
        ("t_us,op,id,bytes,stream\n0,a,1,5,0", "row 2: cut off"),
        ("t_us,op,id,bytes,stream", "row 1: cut off"),
        ("t_us,op,id,bytes,stream\n0,a,1,5\n", "row 2: 4 fields where 5 belong"),
        ("t_us,op,id,bytes,stream\n0,a,1,5,0,0\n", "row 2: 6 fields where 5 belong"),
        ("t_us,op,id,bytes,stream\n\n", "row 2: 1 fields where 5 belong"),
        ("t_us,op,id,bytes,stream\nx,a,1,5,0\n", "row 2: t_us is \"x\""),
        (
            "t_us,op,id,bytes,stream\n0,z,1,5,0\n",
            "row 2: op is \"z\", not a, f, c, g, s, m, x, v, l, o or p",
        ),
        ("t_us,op,id,bytes,stream\n0,a,one,5,0\n", "row 2: id is \"one\""),
        ("t_us,op,id,bytes,stream\n0,a,1,5,-1\n", "row 2: stream is \"-1\""),
        ("t_us,op,id,bytes,stream\n0,a,1,5,+1\n", "row 2: stream is \"+1\""),
        ("t_us,op,id,bytes,stream\n0,a,1,-5,0\n", "row 2: a block of -5 bytes"),
        ("t_us,op,id,bytes,stream\n0,a,1,0,0\n", "row 2: a block of 0 bytes"),
        ("t_us,op,id,bytes,stream\n0,a,1,5.5,0\n", "row 2: bytes is \"5.5\""),
        (
            "t_us,op,id,bytes,stream\n0,a,1,140737488355329,0\n",
            "row 2: a block of 140737488355329 bytes",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,99999999999999999999,0\n",
            "row 2: a block of 99999999999999999999",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,a,1,5,0\n",
            "row 3: block 1 is allocated twice, first in row 2",
        ),
        ("t_us,op,id,bytes,stream\n0,f,1,5,0\n", "row 2: block 1 is freed but was never allocated"),
        (
            "t_us,op,id,bytes,stream\n0,c,1,5,0\n",
            "row 2: block 1 is completed but was never allocated",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,c,1,5,0\n",
            "row 3: block 1 is completed before it is freed",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,f,1,5,0\n0,f,1,5,0\n",
            "row 4: block 1 is freed twice, first in row 3",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,f,1,5,0\n0,c,1,5,0\n0,f,1,5,0\n",
            "row 5: block 1 is freed twice, first in row 3",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,f,1,5,0\n0,c,1,5,0\n0,c,1,5,0\n",
            "row 5: block 1 is completed twice",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,f,1,6,0\n",
            "row 3: block 1 has 6 bytes here and 5 in row 2",
        ),
        (
            "t_us,op,id,bytes,stream\n0,a,1,5,0\n0,f,1,5,0\n0,a,1,5,0\n",
            "row 4: block 1 is allocated again, but its free in row 3",
        ),
        ("t_us,op,id,bytes,stream\n0,a,1,5,0\0\n", "row 2: not a row of text"),
    ];
    for (text, expected) in table {
        let said = parse(text).expect_err(text).to_string();
        assert!(said.starts_with(expected), "{text:?}: {said}");
        assert!(!said.contains('\n'), "one line: {said:?}");
    }
    let table = [
        ("1,09:00:00.000001,allocate,0x10,5\n", "row 2: 5 fields where 6 belong"),
        ("1,9 o'clock,allocate,0x10,5,0\n", "row 2: Time is"),
        ("1,09:00:00.000001,alloc,0x10,5,0\n", "row 2: Action is"),
        ("1,09:00:00.000001,allocate,zz,5,0\n", "row 2: Pointer is"),
        ("1,09:00:00.000001,allocate,(nil),5,0\n", "row 2: Pointer is"),
        ("1,09:00:00.000001,allocate,0x10,-5,0\n", "row 2: a block of -5 bytes"),
        ("1,09:00:00.000001,allocate,0x10,5,mine\n", "row 2: Stream is"),
        (
            "1,09:00:00.000001,free,0x10,5,0\n",
            "row 2: the block at 0x10 is freed but was never allocated",
        ),
    ];
    for (row, expected) in table {
        let said = parse(&format!("{rmm}{row}")).expect_err(row).to_string();
        assert!(said.starts_with(expected), "{row:?}: {said}");
    }
}

#[test]
fn a_file_that_is_no_text_is_refused_without_reading_it_all() {
    let endless = std::io::BufReader::new(std::io::repeat(b'x'));
    let said = Trace::from_reader(endless, None).expect_err("no end").to_string();
    assert_eq!(said, "row 1: not a row of text");
}

#[test]
fn the_three_recorded_programs_are_read_as_they_were() {
    // streams, allocations, frees, operations, peak, completions that are late or missing
    let table = [
        ("llama_train.csv.xz", 1, 31_805, 31_803, 63_608, 4_076_911_904, 0),
        ("resnet_train.csv.xz", 2, 12_813, 12_810, 25_623, 2_450_380_816, 16),
        ("serve_mixed.csv.xz", 4, 12_000, 12_000, 24_000, 13_758_172_979, 1375),
    ];
    for (name, streams, allocations, frees, operations, peak, crossings) in table {
        let trace = Trace::read(&file(name), None).unwrap_or_else(|e| panic!("{name}: {e}"));
        trace.check();
        assert_eq!(
            (
                trace.streams,
                trace.allocations(),
                trace.frees,
                trace.operations(),
                trace.peak_live,
                trace.crossings()
            ),
            (streams, allocations, frees, operations, peak, crossings),
            "{name}"
        );
    }
}

#[test]
fn a_damaged_compressed_file_is_an_error_and_no_crash() {
    let small = "../../allocators/formats/tests/data/snapshots/start.pickle.xz";
    for (name, parts) in [("resnet_train.csv.xz", 8), (small, usize::MAX)] {
        let right = Trace::read(&file(name), None).unwrap();
        let whole = std::fs::read(file(name)).unwrap();
        for at in (0..whole.len()).step_by((whole.len() / parts).max(1)) {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            let read = Trace::from_reader(Cursor::new(damaged), None);
            // Decoders ignore byte 30, the first byte of the compressed data.
            assert!(read.is_err() || at == 30 && read.is_ok_and(|got| got == right), "{name} {at}");
        }
    }
}

const WIDE: &str = "t_us,op,id,bytes,stream,kind,device,tag";

fn wide(rows: &str, device: Option<u32>) -> Result<Trace, TraceError> {
    parse_device(&format!("{WIDE}\n{rows}"), device)
}

#[test]
fn a_header_says_where_each_field_stands_and_what_it_does_not_know_is_noted() {
    let plain = Trace::from_rows("0,a,1,100,3\n1,f,1,100,3\n2,c,1,100,3\n");
    let shuffled =
        parse("colour,bytes,id,op,stream,t_us\nred,100,1,a,3,0\n,100,1,f,3,1\n,100,1,c,3,2\n")
            .unwrap();
    assert_eq!((&shuffled.blocks, &shuffled.steps), (&plain.blocks, &plain.steps));
    assert_eq!(
        shuffled.notes,
        ["fields of the trace that mean nothing here are passed over: colour"]
    );
    assert!(plain.notes.is_empty() && plain.device.is_none());
}

#[test]
fn devices_have_streams_of_their_own_and_one_of_them_is_replayed() {
    let rows = "0,a,1,100,1,cached,0,\n0,a,2,200,1,cached,3,\n0,a,3,50,1,pinned,host:1,\n1,f,2,200,1,cached,3,\n\
                1,c,2,200,1,cached,3,\n2,a,4,7,9,stable,3,a%2Cb%25\n3,g,0,99,0,cached,3,\n3,x,0,99,0,cached,0,\n";
    let trace = wide(rows, None).unwrap();
    assert_eq!(
        (trace.device, trace.devices.as_slice(), trace.streams, trace.allocations()),
        (Some(3), &[0, 3][..], 2, 2)
    );
    assert_eq!(trace.notes.len(), 2, "{:?}", trace.notes);
    let other = wide(rows, Some(0)).unwrap();
    assert_eq!((other.device, other.streams, other.allocations()), (Some(0), 1, 1));
}

#[test]
fn what_cannot_be_a_trace_is_refused_whatever_it_is() {
    let long = "9".repeat(5000);
    let many = "x,".repeat(40);
    let table = [
        ("0,a,1,5,0,cached,0\n", "row 2: 7 fields where 8 belong"),
        ("0,a,1,5,0,cached,0,,\n", "row 2: 9 fields where 8 belong"),
        ("0,a,1,5,0,cached,0,\n0,a,2,5,0,cached,0,", "row 3: cut off"),
        ("0,a,1,5,0,cached,0,\n0,a,2\n", "row 3: 3 fields"),
        ("0,a,1,5,0,heap,0,\n", "row 2: kind is \"heap\""),
        ("0,a,1,5,0,,0,\n", "row 2: kind is \"\""),
        ("0,a,1,5,0,cached,-1,\n", "row 2: device is \"-1\""),
        ("0,a,1,5,0,cached,+1,\n", "row 2: device is \"+1\""),
        ("0,a,1,5,0,cached,,\n", "row 2: device is \"\""),
        ("0,a,1,5,0,cached,4294967296,\n", "row 2: device is \"4294967296\""),
        ("0,a,1,5,0,pinned,host:,\n", "row 2: device is"),
        ("0,a,1,5,0,pinned,hostile,\n", "row 2: device is"),
        ("0,a,1,5,0,cached,0,%\n", "row 2: tag is \"%\""),
        ("0,a,1,5,0,cached,0,%4\n", "row 2: tag is"),
        ("0,a,1,5,0,cached,0,%zz\n", "row 2: tag is"),
        ("0,a,1,5,0,cached,0,%+1\n", "row 2: tag is"),
        ("0,a,1,5,0,cached,0,%FF\n", "row 2: tag is"),
        ("0,a,1,5,0,cached,0,%\u{fc}\n", "row 2: tag is"),
        ("0,f,1,5,0,cached,0,\n", "row 2: block 1 is freed but was never allocated"),
        ("0,c,1,5,0,cached,0,\n", "row 2: block 1 is completed but was never allocated"),
        (
            "0,a,1,5,0,cached,0,\n0,f,1,5,0,cached,1,\n",
            "row 3: block 1 is freed but was never allocated",
        ),
        ("0,a,1,5,0,cached,0,\n0,a,1,5,0,cached,0,\n", "row 3: block 1 is allocated twice"),
        ("0,a,1,5,0,pinned,host,\n0,a,1,5,0,pinned,host,\n", "row 3: block 1 is allocated twice"),
        (
            "0,a,1,5,0,pinned,host,\n",
            "no device memory is allocated in it; its 1 blocks are pinned",
        ),
        ("0,g,0,5,0,cached,0,\n", "nothing is allocated"),
        ("0,g,0,0,0,cached,0,\n", "row 2: a block of 0 bytes"),
        ("0,g,0,-1,0,cached,0,\n", "row 2: a block of -1 bytes"),
        ("0,g,0,x,0,cached,0,\n", "row 2: bytes is \"x\""),
        ("-1,a,1,5,0,cached,0,\n", "row 2: t_us is \"-1\""),
        ("99999999999999999999,a,1,5,0,cached,0,\n", "row 2: t_us is"),
        ("0,a,99999999999999999999,5,0,cached,0,\n", "row 2: id is"),
        ("0,a,-1,5,0,cached,0,\n", "row 2: id is"),
        ("0,a,1,5,99999999999999999999,cached,0,\n", "row 2: stream is"),
        (
            "0,a,1,18446744073709551615,0,cached,0,\n",
            "row 2: a block of 18446744073709551615 bytes",
        ),
        ("0,a,1,1e9,0,cached,0,\n", "row 2: bytes is"),
        ("0,a,1, 5,0,cached,0,\n", "row 2: bytes is"),
        ("0,A,1,5,0,cached,0,\n", "row 2: op is \"A\""),
        ("0,,1,5,0,cached,0,\n", "row 2: op is \"\""),
        ("\0\n", "row 2: not a row of text"),
        ("0,a,1,5,0,cached,0,\0\n", "row 2: not a row of text"),
        ("\n", "row 2: 1 fields"),
        ("\r\n", "row 2: 1 fields"),
        (",,,,,,,\n", "row 2: t_us is \"\""),
        (long.as_str(), "row 2: not a row of text"),
        (many.as_str(), "row 2: cut off"),
    ];
    for (rows, expected) in table {
        let said = wide(rows, None).expect_err(rows).to_string();
        assert!(said.starts_with(expected), "{rows:?}: {said}");
        assert!(!said.contains('\n') && said.len() < 400, "one line: {said:?}");
    }
    let headers = [
        "t_us,op,id,bytes\n0,a,1,5\n",
        "t_us,op,id,bytes,stream,stream\n0,a,1,5,0,0\n",
        " t_us,op,id,bytes,stream\n0,a,1,5,0\n",
        "T_US,OP,ID,BYTES,STREAM\n0,a,1,5,0\n",
        "0,a,1,5,0\n",
        ",\n",
    ];
    for text in headers {
        let said = parse(text).expect_err(text).to_string();
        assert!(said.starts_with("row 1: not a trace"), "{text:?}: {said}");
    }
    let wider = format!(
        "t_us,op,id,bytes,stream,{}x\n",
        (0..40).map(|n| format!("c{n},")).collect::<String>()
    );
    assert!(parse(&wider).expect_err("too wide").to_string().starts_with("row 1: not a trace"));
    let said =
        wide("0,a,1,5,0,cached,2,\n0,a,2,5,0,cached,4,\n", Some(3)).expect_err("no such device");
    assert_eq!(said.to_string(), "nothing is allocated on device 3 in it, but on 2, 4");
    assert!(
        parse_device("t_us,op,id,bytes,stream\n0,a,1,5,0\n", Some(0)).is_err(),
        "it has no devices"
    );
}

fn parse_device(text: &str, device: Option<u32>) -> Result<Trace, TraceError> {
    Trace::from_reader(Cursor::new(text.as_bytes().to_vec()), device)
}

/// Returns the same rows compressed by each program.
fn packed() -> [(&'static str, Vec<u8>); 3] {
    use std::io::{Read, Write};
    let xz = std::fs::read(file("resnet_train.csv.xz")).unwrap();
    let mut rows = Vec::new();
    compressed::reader(&xz, Cursor::new(xz.clone())).read_to_end(&mut rows).unwrap();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(&rows).unwrap();
    let gz = gz.finish().unwrap();
    let zst =
        ruzstd::encoding::compress_to_vec(&rows[..], ruzstd::encoding::CompressionLevel::Fastest);
    [("gz", gz), ("xz", xz), ("zst", zst)]
}

fn unpacked(bytes: Vec<u8>) -> Result<Trace, TraceError> {
    Trace::from_reader(Cursor::new(bytes), None)
}

#[test]
fn a_compressed_trace_is_read_whatever_it_is_called_and_in_several_parts() {
    let plain = Trace::read(&file("resnet_train.csv.xz"), None).unwrap_or_else(|e| panic!("{e}"));
    for (name, bytes) in packed() {
        let read = unpacked(bytes.clone()).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert!(read == plain, "{name}");
        // Two concatenated parts decode to all rows twice, including the header.
        let said = unpacked([bytes.clone(), bytes].concat()).expect_err(name).to_string();
        assert!(said.contains("t_us is \"t_us\""), "{name}: {said}");
    }
}

#[test]
fn a_compressed_trace_that_is_cut_or_damaged_is_an_error() {
    for (name, whole) in packed() {
        for cut in (0..whole.len()).step_by(whole.len() / 8 + 1) {
            let said = unpacked(whole[..cut].to_vec()).expect_err(name).to_string();
            assert!(!said.is_empty() && !said.contains('\n'), "{name} cut at {cut}: {said}");
        }
        let mut refused = 0;
        let places = (0..whole.len()).step_by(whole.len() / 8 + 1);
        for at in places.clone() {
            let mut damaged = whole.clone();
            damaged[at] ^= 0x55;
            refused += usize::from(unpacked(damaged).is_err());
        }
        // Some header fields of gzip do not affect the contents.
        assert!(refused + 2 >= places.count(), "{name}: {refused}");
    }
}

#[test]
fn a_compressed_trace_that_asks_for_gigabytes_of_memory_is_refused() {
    // A stream header, and the header of a block with a dictionary of 3 GiB.
    let mut xz = vec![0xFD, b'7', b'z', b'X', b'Z', 0, 0, 1, 0x69, 0x22, 0xDE, 0x36];
    let block = [2, 0, 0x21, 1, 39, 0, 0, 0];
    xz.extend(block);
    xz.extend(crc32(&block).to_le_bytes());
    xz.extend([0; 80]);
    let said = unpacked(xz).expect_err("xz").to_string();
    assert!(said.contains("bytes of memory") && said.contains("134217728"), "{said}");
    // A frame with a window of 3.75 TiB.
    let zst = vec![0x28, 0xB5, 0x2F, 0xFD, 0, 0xFF, 0, 0, 0, 0];
    let said = unpacked(zst).expect_err("zst").to_string();
    assert!(said.contains("bytes of memory"), "{said}");
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| {
            (crc >> 1) ^ (0xEDB8_8320 & (crc & 1).wrapping_neg())
        })
    };
    !bytes.iter().fold(!0, step)
}
