//! A conformance test for [`Resource`] implementations of users.

use crate::{Block, DeviceBuffer, Request, Resource};
use aquifer_core::{BLOCK_ALIGN, MemoryError, Result, random::SplitMix64};
use aquifer_driver::DeviceRange;
use aquifer_stream::Stream;
use std::{error, fmt};

/// The largest request, in bytes.
const LARGEST: u64 = 64 << 10;
/// Maximum number of live blocks.
const LIVE: usize = 16;

/// A violation of the contract of [`Resource`].
///
/// See [`conformance`] for an example.
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BrokenPromise {
    /// A valid request was refused, or work on its block.
    Refused {
        /// Number of bytes requested.
        bytes: u64,
        /// The error.
        error: MemoryError,
    },
    /// A request with an invalid alignment was granted.
    Granted {
        /// The alignment requested.
        align: u64,
    },
    /// A block is shorter than requested, its address is not a multiple of [`BLOCK_ALIGN`], or it
    /// is on another device than its source.
    Unfit {
        /// Number of bytes requested.
        requested: u64,
        /// The block.
        block: DeviceRange,
    },
    /// Two live blocks overlap.
    Overlap {
        /// The new block.
        new: DeviceRange,
        /// The older block.
        held: DeviceRange,
    },
    /// A live block does not hold the bytes written to it.
    Overwritten {
        /// The block.
        block: DeviceRange,
    },
    /// The number of live blocks is wrong.
    Miscounted {
        /// Number of live blocks.
        expected: u64,
        /// Number of blocks in the statistics.
        told: u64,
    },
}

impl fmt::Display for BrokenPromise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { bytes, error } => {
                write!(f, "a request for {bytes} bytes, or work on its block, was refused: {error}")
            }
            Self::Granted { align } => write!(f, "a request aligned to {align} was granted"),
            Self::Unfit { requested, block } => {
                let block = place(block);
                write!(f, "the block at {block} does not serve a request for {requested} bytes")
            }
            Self::Overlap { new, held } => {
                write!(f, "the block at {} overlaps the live one at {}", place(new), place(held))
            }
            Self::Overwritten { block } => {
                let block = place(block);
                write!(f, "the live block at {block} does not hold what was written to it")
            }
            Self::Miscounted { expected, told } => {
                write!(f, "{expected} blocks are live, but the statistics say {told}")
            }
        }
    }
}

impl error::Error for BrokenPromise {}

fn place(&DeviceRange { device, address, bytes }: &DeviceRange) -> String {
    format!("{address:#x} of {bytes} bytes on {device}")
}

/// A live block, its fill byte, and the stream that wrote it.
struct FilledBlock<'s> {
    buffer: DeviceBuffer<u8>,
    byte: u8,
    stream: &'s Stream,
}

impl FilledBlock<'_> {
    fn range(&self) -> DeviceRange {
        DeviceRange { bytes: self.buffer.len() as u64, ..extent(self.buffer.block()) }
    }

    fn check(&self) -> Result<(), BrokenPromise> {
        let mut back = vec![!self.byte; self.buffer.len()];
        let read = self.stream.try_scope(|c| c.download(&self.buffer, &mut back));
        read.map_err(|error| BrokenPromise::Refused { bytes: self.range().bytes, error })?;
        let is_whole = back.iter().all(|&byte| byte == self.byte);
        is_whole.then_some(()).ok_or(BrokenPromise::Overwritten { block: self.range() })
    }
}

fn extent(block: &Block) -> DeviceRange {
    DeviceRange { device: block.device(), address: block.address(), bytes: block.bytes() }
}

/// Checks that `resource` keeps the contract of [`Resource`]. Returns the first violation.
///
/// Runs `rounds` allocations and frees of random sizes, up to 64 KiB and 16 at a time, on random
/// streams of `streams`. Writes every block and reads it back before its free.
///
/// The memory must have contents: that of a GPU, or of a simulated one that is not symbolic.
/// Wrappers can be checked like sources. Blocks. No block is live afterwards.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, device::conformance, sim::Sim};
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// conformance(&pool, &[pool.stream()?, pool.stream()?], 200, 42)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The first violation.
pub fn conformance(
    resource: &(impl Resource + ?Sized),
    streams: &[Stream],
    rounds: u32,
    seed: u64,
) -> Result<(), BrokenPromise> {
    let Some(first) = streams.first() else { return Ok(()) };
    let empty = resource.allocate(first, Request::bytes(0));
    empty.map_err(|error| BrokenPromise::Refused { bytes: 0, error })?;
    let align = 3;
    if resource.allocate(first, Request::bytes(BLOCK_ALIGN).align(align)).is_ok() {
        return Err(BrokenPromise::Granted { align });
    }
    let before = resource.stats().blocks;
    let mut random = SplitMix64::new(seed);
    let mut below = |bound: u64| random.next_u64() % bound;
    let mut live: Vec<FilledBlock<'_>> = Vec::new();
    for round in 0..rounds {
        if live.len() == LIVE || (!live.is_empty() && below(3) == 0) {
            let at = below(live.len() as u64) as usize;
            live.swap_remove(at).check()?;
        } else {
            let stream = &streams[below(streams.len() as u64) as usize];
            // Small requests are the most frequent, as in real programs.
            let most = LARGEST >> below(10);
            let bytes = 1 + below(most);
            live.push(allocate_filled(resource, stream, bytes, round as u8, &live)?);
        }
        let (expected, told) = (before + live.len() as u64, resource.stats().blocks);
        if told != expected {
            return Err(BrokenPromise::Miscounted { expected, told });
        }
    }
    live.iter().try_for_each(FilledBlock::check)
}

/// Allocates a block, checks where it lies, and fills it.
fn allocate_filled<'s>(
    resource: &(impl Resource + ?Sized),
    stream: &'s Stream,
    requested: u64,
    byte: u8,
    live: &[FilledBlock<'_>],
) -> Result<FilledBlock<'s>, BrokenPromise> {
    let refused = |error| BrokenPromise::Refused { bytes: requested, error };
    let block = resource.allocate(stream, Request::bytes(requested)).map_err(refused)?;
    let new = extent(&block);
    let is_aligned = new.address.is_multiple_of(BLOCK_ALIGN);
    if new.bytes < requested || !is_aligned || new.device != resource.device() {
        return Err(BrokenPromise::Unfit { requested, block: new });
    }
    let ends = |range: DeviceRange| range.address + range.bytes;
    let mut held = live.iter().map(FilledBlock::range);
    if let Some(held) = held.find(|held| held.address < ends(new) && new.address < ends(*held)) {
        return Err(BrokenPromise::Overlap { new, held });
    }
    let buffer = DeviceBuffer::from_block(block).map_err(|declined| refused(declined.error))?;
    let mut filled = FilledBlock { buffer, byte, stream };
    stream.fill(&mut filled.buffer, byte).map_err(refused)?;
    Ok(filled)
}
