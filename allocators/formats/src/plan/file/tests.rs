use super::*;
use crate::plan::{error::NEVER, search::PlanOptions};

fn plan() -> Plan {
    let block = |bytes, first, end, stream| PlanBlock { bytes, first, end, stream, shared: true };
    let blocks = [block(1000, 0, 2, 0), block(512, 1, NEVER, 0), block(900, 3, NEVER, 1)];
    Plan::make(&blocks, &PlanOptions::default()).unwrap()
}

fn read(bytes: &[u8]) -> Result<Plan, PlanFileError> {
    Plan::read_from(bytes)
}

/// Returns the file of a plan with another word, and the checksum that belongs to it.
fn with(at: usize, word: u32) -> Vec<u8> {
    let mut bytes = bytes_of(plan().blocks(), plan().edges());
    bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
    let end = bytes.len() - CHECKSUM;
    let sum = crc64(&bytes[..end]);
    bytes[end..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

#[test]
fn a_plan_is_read_as_it_was_written() {
    let bytes = bytes_of(plan().blocks(), plan().edges());
    assert_eq!(bytes.len(), HEADER + 3 * BLOCK + EDGE + CHECKSUM);
    assert_eq!(&bytes[..12], b"aqplan\r\n\x01\0\0\0");
    assert_eq!(read(&bytes).unwrap(), plan());
}

#[test]
fn a_file_that_is_cut_anywhere_is_refused() {
    let bytes = bytes_of(plan().blocks(), plan().edges());
    for end in 0..bytes.len() {
        let error = read(&bytes[..end]).unwrap_err();
        let expected = if end < MAGIC.len() {
            matches!(error, PlanFileError::NotAPlan)
        } else {
            matches!(error, PlanFileError::CutOff)
        };
        assert!(expected, "{end}: {error:?}");
    }
    assert!(matches!(read(&[&bytes[..], &[0]].concat()), Err(PlanFileError::TooLong)));
}

#[test]
fn a_changed_bit_anywhere_is_refused() {
    let bytes = bytes_of(plan().blocks(), plan().edges());
    for bit in 0..bytes.len() * 8 {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let error = read(&changed).unwrap_err();
        if bit / 8 >= HEADER {
            assert!(matches!(error, PlanFileError::Checksum { .. }), "{bit}: {error:?}");
        }
        assert!(!error.to_string().contains('\n'), "{error}");
    }
}

#[test]
fn headers_without_sense_are_refused_before_anything_is_read() {
    let huge = |at, word| {
        let file = with(at, word);
        // What follows the header does not matter.
        read(&file[..HEADER]).unwrap_err()
    };
    assert!(matches!(huge(0, 7), PlanFileError::NotAPlan));
    assert!(matches!(huge(8, 2), PlanFileError::Version { found: 2 }));
    for (at, name) in [(12, "unit"), (16, "number of blocks"), (20, "number of edges")] {
        for found in [u32::MAX, if at == 20 { 13 } else { 0 }] {
            match huge(at, found) {
                PlanFileError::Header { name: n, found: f } => assert_eq!((n, f), (name, found)),
                error => panic!("{at} {found}: {error}"),
            }
        }
    }
    // The most that a header may state is not reserved before it is there.
    assert!(matches!(huge(16, MAX_BLOCKS), PlanFileError::CutOff));
}

#[test]
fn blocks_without_sense_are_refused_whatever_the_checksum_says() {
    let block = |number: usize, word: usize| HEADER + number * BLOCK + word * 4;
    for (at, word, expected) in [
        (block(0, 0), 0, "block 0 has no bytes"),
        (block(1, 0), 1 << 31, "block 1 has 1099511627776 bytes"),
        (block(2, 0), u32::MAX, "block 2 has 2199023255040 bytes"),
        (block(2, 1), u32::MAX, "block 2 lies above"),
        (block(1, 2), 0, "block 1 does not begin after"),
        (block(0, 3), 0, "block 0 does not end after"),
        (block(0, 3), NEVER, "blocks 0 and 2 live at the same time and overlap"),
        (block(1, 1), 1, "blocks 0 and 1 live at the same time and overlap"),
        (block(1, 5), 2, "block 1 lies above 2199023255040 bytes, or has unknown flags"),
        (HEADER + 3 * BLOCK + 4, 1, "the edge from block 0 to block 1 is not needed"),
        (HEADER + 3 * BLOCK, 1, "block 2 takes addresses of block 0, and no edge"),
        (HEADER + 3 * BLOCK, u32::MAX, "block 2 takes addresses of block 0, and no edge"),
        (HEADER + 3 * BLOCK + 4, 3, "block 2 takes addresses of block 0, and no edge"),
    ] {
        let error = read(&with(at, word)).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{at}: {error}");
    }
}

#[test]
fn a_reader_that_fails_is_told() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("unplugged"))
        }
    }
    assert_eq!(Plan::read_from(Broken).unwrap_err().to_string(), "unplugged");
}
