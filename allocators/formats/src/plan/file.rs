//! Plan files.
//!
//! The crate documentation has the format.

use crate::plan::{
    Plan,
    block::{Lives, PlanBlock, PlanEdge, PlannedBlock},
    error::PlanError,
    error::{MAX_BLOCKS, MAX_TOP},
    reuse,
};
use aquifer_core::BLOCK_ALIGN;
use crc64fast::Digest;
use std::{
    error, fmt,
    io::{self, Read, Write},
};

const MAGIC: [u8; 8] = *b"aqplan\r\n";
const VERSION: u32 = 1;
const HEADER: usize = 24;
const BLOCK: usize = 24;
const EDGE: usize = 8;
const CHECKSUM: usize = 8;
/// The most edges for each block. Each allocation leaves at most three ranges to those after it.
const EDGES: usize = 4;

/// Why a file is not a valid plan.
///
/// ```
/// use aquifer_formats::plan::{Plan, PlanFileError};
/// let error = Plan::read_from(&b"t_us,op,id,bytes,stream\n"[..]).unwrap_err();
/// assert!(matches!(error, PlanFileError::NotAPlan));
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum PlanFileError {
    /// The file cannot be read.
    Io(io::Error),
    /// It does not begin as a plan.
    NotAPlan,
    /// Its version is not known.
    Version {
        /// Its version.
        found: u32,
    },
    /// A number in its header is out of bounds.
    Header {
        /// What the number is.
        name: &'static str,
        /// The number.
        found: u32,
    },
    /// It ends before its end.
    CutOff,
    /// It goes on after its end.
    TooLong,
    /// It was changed since it was written.
    Checksum {
        /// The checksum of its bytes.
        computed: u64,
        /// The checksum that it states.
        stated: u64,
    },
    /// A block is impossible.
    Block(PlanError),
    /// A block has unknown flags, or lies above the last address.
    BlockFields {
        /// The block, counted from 0.
        block: u32,
    },
    /// Two blocks live at the same time and have addresses in common.
    Overlap {
        /// The block that begins first.
        first: u32,
        /// The other one.
        second: u32,
    },
    /// An edge is missing: the one given, between two blocks that have addresses in common.
    MissingEdge(PlanEdge),
    /// An edge is between blocks that need none, or out of order.
    SurplusEdge(PlanEdge),
}

impl fmt::Display for PlanFileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) => e.fmt(f),
            Self::NotAPlan => f.write_str("not a plan: `aquifer plan` makes one"),
            Self::Version { found } => {
                write!(f, "a plan of version {found}; only version {VERSION} is known")
            }
            Self::Header { name, found } => write!(f, "its {name} is {found}, which no plan has"),
            Self::CutOff => f.write_str("cut off: the plan ends before its end"),
            Self::TooLong => f.write_str("the plan goes on after its end"),
            Self::Checksum { computed, stated } => {
                write!(f, "damaged: its checksum is {computed:016x}, and it states {stated:016x}")
            }
            Self::Block(e) => e.fmt(f),
            Self::BlockFields { block } => {
                write!(f, "block {block} lies above {MAX_TOP} bytes, or has unknown flags")
            }
            Self::Overlap { first, second } => {
                write!(f, "blocks {first} and {second} live at the same time and overlap")
            }
            Self::MissingEdge(PlanEdge { before, after }) => write!(
                f,
                "block {after} takes addresses of block {before}, and no edge orders the two"
            ),
            Self::SurplusEdge(PlanEdge { before, after }) => {
                write!(f, "the edge from block {before} to block {after} is not needed")
            }
        }
    }
}

impl error::Error for PlanFileError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Io(e) => Some(e),
            Self::Block(e) => Some(e),
            _ => None,
        }
    }
}

impl Plan {
    /// Writes the plan as a file of version 1. The crate documentation has the format.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_to(&self, mut out: impl Write) -> io::Result<()> {
        out.write_all(&bytes_of(self.blocks(), self.edges()))?;
        out.flush()
    }

    /// Reads a file and checks all of it. Reads at most 896 MiB, and holds as much as the file has.
    ///
    /// # Errors
    /// [`PlanFileError`].
    pub fn read_from(mut file: impl Read) -> Result<Self, PlanFileError> {
        let mut header = Vec::with_capacity(HEADER);
        read(&mut file, HEADER, &mut header)?;
        if header.len() < MAGIC.len() || !header.starts_with(&MAGIC) {
            return Err(PlanFileError::NotAPlan);
        }
        let [version, unit, blocks, edges] = words::<4>(header.get(MAGIC.len()..))?;
        if version != VERSION {
            return Err(PlanFileError::Version { found: version });
        }
        if u64::from(unit) != BLOCK_ALIGN {
            return Err(PlanFileError::Header { name: "unit", found: unit });
        }
        if blocks == 0 || blocks > MAX_BLOCKS {
            return Err(PlanFileError::Header { name: "number of blocks", found: blocks });
        }
        let (blocks, edges) = (blocks as usize, edges as usize);
        if edges > blocks * EDGES {
            return Err(PlanFileError::Header { name: "number of edges", found: edges as u32 });
        }
        let end = HEADER + blocks * BLOCK + edges * EDGE;
        let mut bytes = header;
        // One byte more, which must not be there.
        read(&mut file, end + CHECKSUM + 1 - HEADER, &mut bytes)?;
        if bytes.len() < end + CHECKSUM {
            return Err(PlanFileError::CutOff);
        }
        if bytes.len() > end + CHECKSUM {
            return Err(PlanFileError::TooLong);
        }
        let (body, stated) = bytes.split_at(end);
        let stated = stated.iter().rev().fold(0, |sum, &byte| sum << 8 | u64::from(byte));
        let computed = crc64(body);
        if computed != stated {
            return Err(PlanFileError::Checksum { computed, stated });
        }
        let (blocks, edges) = body[HEADER..].split_at(blocks * BLOCK);
        checked(blocks, edges)
    }
}

/// Appends the next bytes of a file, and fewer at its end.
fn read(file: &mut impl Read, most: usize, to: &mut Vec<u8>) -> Result<(), PlanFileError> {
    file.take(most as u64).read_to_end(to).map_err(PlanFileError::Io)?;
    Ok(())
}

/// Returns numbers of a file.
fn words<const N: usize>(bytes: Option<&[u8]>) -> Result<[u32; N], PlanFileError> {
    let mut words = [0; N];
    let bytes = bytes.filter(|bytes| bytes.len() >= N * 4).ok_or(PlanFileError::CutOff)?;
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks().0) {
        *word = u32::from_le_bytes(*bytes);
    }
    Ok(words)
}

/// Returns the bytes of a file.
fn bytes_of(blocks: &[PlannedBlock], edges: &[PlanEdge]) -> Vec<u8> {
    let size = HEADER + blocks.len() * BLOCK + edges.len() * EDGE + CHECKSUM;
    let mut bytes = Vec::with_capacity(size);
    let mut put = |words: &[u32]| bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    // Sizes and offsets are below 2^32 units, and there are at most MAX_BLOCKS blocks.
    let units = |bytes: u64| (bytes / BLOCK_ALIGN) as u32;
    let [magic, rest] = [0, 4]
        .map(|at| u32::from_le_bytes([MAGIC[at], MAGIC[at + 1], MAGIC[at + 2], MAGIC[at + 3]]));
    put(&[magic, rest, VERSION, BLOCK_ALIGN as u32, blocks.len() as u32, edges.len() as u32]);
    for block in blocks {
        let PlannedBlock { bytes, offset, first, end, stream, shared } = *block;
        put(&[units(bytes), units(offset), first, end, stream, u32::from(shared)]);
    }
    edges.iter().for_each(|edge| put(&[edge.before, edge.after]));
    bytes.extend(crc64(&bytes).to_le_bytes());
    bytes
}

/// Checks the parts of a file.
fn checked(blocks: &[u8], edges: &[u8]) -> Result<Plan, PlanFileError> {
    let (mut planned, mut facts) = (Vec::new(), Vec::new());
    for (block, bytes) in (0..).zip(blocks.as_chunks::<BLOCK>().0) {
        let [units, at, first, end, stream, flags] = words::<6>(Some(bytes))?;
        let (bytes, offset) = (u64::from(units) * BLOCK_ALIGN, u64::from(at) * BLOCK_ALIGN);
        if flags > 1 || offset + bytes > MAX_TOP {
            return Err(PlanFileError::BlockFields { block });
        }
        let shared = flags == 1;
        planned.push(PlannedBlock { bytes, offset, first, end, stream, shared });
        facts.push(PlanBlock { bytes, first, end, stream, shared });
    }
    let lives = Lives::of(&facts).map_err(PlanFileError::Block)?;
    let plan = Plan::of(planned, u64::from(lives.load) * BLOCK_ALIGN)
        .map_err(|reuse::Overlap { first, second }| PlanFileError::Overlap { first, second })?;
    let mut needed = plan.edges().iter().copied();
    for bytes in edges.as_chunks::<EDGE>().0 {
        let [before, after] = words(Some(bytes))?;
        let edge = PlanEdge { before, after };
        match needed.next() {
            Some(needed) if needed == edge => {}
            Some(needed) if (needed.after, needed.before) < (after, before) => {
                return Err(PlanFileError::MissingEdge(needed));
            }
            _ => return Err(PlanFileError::SurplusEdge(edge)),
        }
    }
    match needed.next() {
        Some(edge) => Err(PlanFileError::MissingEdge(edge)),
        None => Ok(plan),
    }
}

/// Returns the checksum of `bytes`.
pub(crate) fn crc64(bytes: &[u8]) -> u64 {
    let mut digest = Digest::new();
    digest.write(bytes);
    digest.sum64()
}

#[cfg(test)]
mod tests;

#[cfg(test)]
mod checksum_tests {
    use super::*;

    #[test]
    fn the_checksum_has_the_published_check_value() {
        assert_eq!(crc64(b"123456789"), 0x995D_C9BB_DF19_39FA);
        assert_eq!(crc64(b""), 0);
    }
}
