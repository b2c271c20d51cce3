//! Tests of staged transfers from sources and to sinks: files, and sources that read less than
//! requested, fail or panic.

use crate::rig::{KIB, Rig, SLOT, pattern};
use aquifer_host::{FileSource, ReadMode, Sink, Source, StageError};
use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

type Accident = fn() -> io::Result<usize>;
/// Returns whether an error is the one expected for a fault.
type Told = fn(&StageError) -> bool;

/// A source of patterned bytes in odd pieces, with faults.
struct Odd {
    bytes: Vec<u8>,
    /// The fault happens at a read of this byte.
    at: u64,
    accident: Accident,
    reads: AtomicU64,
    align: usize,
}

impl Odd {
    fn new(bytes: usize) -> Self {
        let reads = AtomicU64::new(0);
        Self { bytes: pattern(bytes, 8), at: u64::MAX, accident: || Ok(0), reads, align: 1 }
    }
}

impl Source for Odd {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
        if (offset..offset + into.len() as u64).contains(&self.at) {
            return (self.accident)();
        }
        let reads = self.reads.fetch_add(1, Ordering::Relaxed);
        if reads % 3 == 1 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        if self.align > 1 {
            let phase = into.as_ptr().addr() % self.align;
            assert_eq!(
                phase as u64,
                offset % self.align as u64,
                "bytes lie as they lie in the source"
            );
        }
        let some = into.len().min(3001);
        self.bytes[..].read_at(offset, &mut into[..some])
    }

    fn alignment(&self) -> usize {
        self.align
    }
}

#[test]
fn a_source_may_read_less_than_it_was_asked_for_and_be_interrupted() {
    for align in [1, 512, 4096, 3] {
        let rig = Rig::new();
        let source = Odd { align: if align == 3 { 1 } else { align }, ..Odd::new(10 * SLOT) };
        let bytes = 8 * SLOT + 11;
        let mut x = rig.operand(bytes);
        rig.stager.scope(|s| s.read(&source, 1234, &mut x).map(drop)).unwrap().unwrap();
        assert!(rig.bytes(&x) == source.bytes[1234..1234 + bytes], "aligned to {align}");
        // A column: 700 bytes of each row of 4000.
        let rows = 100;
        let mut column = rig.operand(rows * 700);
        let ranges = (0..rows as u64).map(|row| row * 4000 + 300..row * 4000 + 1000);
        rig.stager
            .scope(|s| s.read_ranges(&source, ranges, &mut column).map(drop))
            .unwrap()
            .unwrap();
        let expected: Vec<_> = (0..rows)
            .flat_map(|row| source.bytes[row * 4000 + 300..row * 4000 + 1000].to_vec())
            .collect();
        assert!(rig.bytes(&column) == expected, "aligned to {align}");
        // Through a ticket.
        let whole = source.bytes[..bytes].to_vec();
        let ticket = rig.stager.read(Arc::new(source), 0, x).unwrap();
        let x = ticket.wait().unwrap();
        assert!(rig.bytes(&x) == whole);
        drop((x, column));
        rig.assert_all_given_back();
    }
}

#[test]
fn a_fault_of_a_source_is_reported_and_ends_only_its_transfer() {
    let accidents: [(Accident, Told); 3] = [
        (
            || Err(io::ErrorKind::PermissionDenied.into()),
            |told| matches!(told, StageError::Source { error, .. } if error.kind() == io::ErrorKind::PermissionDenied),
        ),
        (|| panic!("on purpose"), |told| matches!(told, StageError::SourcePanicked { .. })),
        (|| Ok(0), |told| matches!(told, StageError::SourceEnded { .. })),
    ];
    for (accident, is_told) in accidents {
        for at in [0, 3 * SLOT as u64, 8 * SLOT as u64 - 1] {
            let rig = Rig::new();
            let source = Odd { at, accident, ..Odd::new(8 * SLOT) };
            let (mut x, mut y) = (rig.operand(8 * SLOT), rig.operand(8 * SLOT));
            let up = pattern(8 * SLOT, 2);
            let answer = rig.stager.scope(|s| {
                let bad = s.read(&source, 0, &mut x).unwrap();
                let good = s.upload(&up, &mut y).unwrap();
                good.wait().unwrap();
                assert!(is_told(&bad.wait().unwrap_err()), "{bad:?}");
            });
            assert!(is_told(&answer.unwrap_err()));
            assert!(rig.bytes(&y) == up);
            drop((x, y));
            rig.assert_all_given_back();
        }
    }
}

#[test]
fn a_source_that_ends_says_where() {
    let rig = Rig::new();
    let bytes = vec![1u8; 3 * SLOT];
    let mut x = rig.operand(2 * SLOT);
    let answer = rig.stager.scope(|s| s.read(&bytes, 2 * SLOT as u64, &mut x).map(drop));
    let StageError::SourceEnded { offset, missing } = answer.unwrap_err() else {
        panic!("another error")
    };
    assert!(offset >= 3 * SLOT as u64 && missing > 0);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_file_is_read_from_anywhere_through_the_cache_and_past_it() {
    let path = std::env::temp_dir().join(format!("aquifer-stager-{}", std::process::id()));
    let bytes = pattern(600 * KIB + 1234, 9);
    std::fs::write(&path, &bytes).unwrap();
    for mode in [ReadMode::Cached, ReadMode::Direct] {
        let rig = Rig::new();
        let file = FileSource::open(&path, mode).unwrap();
        assert!(mode == ReadMode::Direct || file.mode() == ReadMode::Cached);
        assert_eq!(file.len().unwrap(), bytes.len() as u64);
        file.drop_cache().unwrap();
        for (from, to) in [
            (0, bytes.len()),
            (1, 5000),
            (4096, 4096 + SLOT),
            (511, 400_000),
            (599_000, bytes.len()),
        ] {
            let mut x = rig.operand(to - from);
            rig.stager.scope(|s| s.read(&file, from as u64, &mut x).map(drop)).unwrap().unwrap();
            assert!(rig.bytes(&x) == bytes[from..to], "{mode:?} {from}..{to}");
        }
        rig.assert_all_given_back();
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn a_file_system_without_direct_reads_is_read_all_the_same() {
    // Files of the kernel have no direct reads.
    let source = FileSource::open("/proc/self/stat", ReadMode::Direct).unwrap();
    let mut bytes = [0; 4096];
    assert!(source.read_at(0, &mut bytes).unwrap() > 0);
    assert_eq!(source.mode(), ReadMode::Cached);
}

/// A sink that takes bytes in odd pieces, with faults.
struct Taken {
    bytes: Mutex<Vec<u8>>,
    at: u64,
    accident: Accident,
    writes: AtomicU64,
}

impl Sink for Taken {
    fn write_at(&self, offset: u64, from: &[u8]) -> io::Result<usize> {
        if (offset..offset + from.len() as u64).contains(&self.at) {
            return (self.accident)();
        }
        if self.writes.fetch_add(1, Ordering::Relaxed) % 3 == 1 {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let (offset, some) = (offset as usize, from.len().min(3001));
        let mut bytes = self.bytes.lock().map_err(|_| io::ErrorKind::Other)?;
        bytes[offset..offset + some].copy_from_slice(&from[..some]);
        Ok(some)
    }
}

#[test]
fn device_memory_is_written_to_a_file() {
    let rig = Rig::new();
    let bytes = pattern(7 * SLOT + 5, 3);
    let mut x = rig.operand(bytes.len());
    rig.stager.scope(|s| s.upload(&bytes, &mut x).map(drop)).unwrap().unwrap();
    let path = std::env::temp_dir().join(format!("aquifer-sink-{}", std::process::id()));
    let file = std::fs::File::create(&path).unwrap();
    rig.stager.scope(|s| s.write(&x, &file, 100).map(drop)).unwrap().unwrap();
    let x = rig.stager.write(x, Arc::new(file), 9 * SLOT as u64).unwrap().wait().unwrap();
    let written = std::fs::read(&path).unwrap();
    std::fs::remove_file(&path).unwrap();
    assert_eq!(written.len(), 9 * SLOT + bytes.len());
    assert!(written[100..100 + bytes.len()] == bytes && written[9 * SLOT..] == bytes);
    drop(x);
    rig.assert_all_given_back();
}

#[test]
fn a_fault_of_a_sink_is_reported() {
    let accidents: [(Accident, Told); 4] = [
        (|| Ok(1), |_| false),
        (
            || Ok(0),
            |told| matches!(told, StageError::Sink { error, .. } if error.kind() == io::ErrorKind::WriteZero),
        ),
        (
            || Err(io::ErrorKind::StorageFull.into()),
            |told| matches!(told, StageError::Sink { error, .. } if error.kind() == io::ErrorKind::StorageFull),
        ),
        (|| panic!("on purpose"), |told| matches!(told, StageError::SourcePanicked { .. })),
    ];
    for (which, (accident, is_told)) in accidents.into_iter().enumerate() {
        let rig = Rig::new();
        let bytes = pattern(8 * SLOT, 3);
        let mut x = rig.operand(bytes.len());
        rig.stager.scope(|s| s.upload(&bytes, &mut x).map(drop)).unwrap().unwrap();
        let at = if which == 0 { u64::MAX } else { 5 * SLOT as u64 };
        let taken = Mutex::new(vec![0; bytes.len()]);
        let sink = Taken { bytes: taken, at, accident, writes: AtomicU64::new(0) };
        match rig.stager.scope(|s| s.write(&x, &sink, 0).map(drop)).and_then(|taken| taken) {
            Ok(()) => assert!(which == 0 && *sink.bytes.lock().unwrap() == bytes),
            Err(error) => assert!(is_told(&error), "{error}"),
        }
        drop(x);
        rig.assert_all_given_back();
    }
}

#[test]
fn a_source_that_panics_when_asked_for_its_alignment_is_read_without_one() {
    struct Rude(Vec<u8>);
    impl Source for Rude {
        fn read_at(&self, offset: u64, into: &mut [u8]) -> io::Result<usize> {
            self.0.read_at(offset, into)
        }
        fn alignment(&self) -> usize {
            panic!("on purpose");
        }
    }
    let rig = Rig::new();
    let source = Rude(pattern(5 * SLOT, 3));
    let mut x = rig.operand(5 * SLOT);
    rig.stager.scope(|s| s.read(&source, 0, &mut x).map(drop)).unwrap().unwrap();
    assert!(rig.bytes(&x) == source.0);
    drop(x);
    rig.assert_all_given_back();
}
