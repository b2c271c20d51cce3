//! A conformance test for [`Resource`] implementations of users.

use crate::{Block, DeviceBuffer, Request, Resource};
use aquifer_core::{BLOCK_ALIGN, DeviceId, MemoryError, PoolStats, Result};
use aquifer_stream::Stream;
use std::{error, fmt, ops::Range};

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
    /// A valid request was refused.
    Refused {
        /// Number of bytes requested.
        bytes: u64,
        /// The error.
        error: MemoryError,
    },
    /// An invalid request was granted.
    Granted {
        /// Number of bytes requested.
        bytes: u64,
        /// The alignment requested.
        align: u64,
    },
    /// A block is shorter than requested.
    TooShort {
        /// Number of bytes requested.
        requested: u64,
        /// Bytes of the block.
        bytes: u64,
    },
    /// A block's address is not a multiple of [`BLOCK_ALIGN`].
    Misaligned {
        /// The block's address.
        address: u64,
    },
    /// A block is on another device.
    OfAnotherDevice {
        /// The source's device.
        expected: DeviceId,
        /// The block's device.
        actual: DeviceId,
    },
    /// Two live blocks overlap.
    Overlap {
        /// The new block.
        new: Range<u64>,
        /// The older block.
        held: Range<u64>,
    },
    /// A live block does not hold the bytes written to it.
    Overwritten {
        /// The block's address.
        address: u64,
    },
    /// Work on a block failed.
    Unusable {
        /// The block's address.
        address: u64,
        /// The error.
        error: MemoryError,
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
                write!(f, "a request for {bytes} bytes was refused: {error}")
            }
            Self::Granted { bytes, align } => {
                write!(f, "a request for {bytes} bytes aligned to {align} was granted")
            }
            Self::TooShort { requested, bytes } => {
                write!(f, "a block of {bytes} bytes where {requested} were requested")
            }
            Self::Misaligned { address } => {
                write!(f, "a block at {address:#x}, which is no multiple of {BLOCK_ALIGN}")
            }
            Self::OfAnotherDevice { expected, actual } => {
                write!(f, "a block of {actual} from {expected}")
            }
            Self::Overlap { new, held } => {
                let (new_end, held_end) = (new.end, held.end);
                write!(
                    f,
                    "a block at {:#x}..{new_end:#x} overlaps one at {:#x}..{held_end:#x}",
                    new.start, held.start
                )
            }
            Self::Overwritten { address } => {
                write!(f, "the live block at {address:#x} does not hold what was written to it")
            }
            Self::Unusable { address, error } => {
                write!(f, "work on the block at {address:#x} failed: {error}")
            }
            Self::Miscounted { expected, told } => {
                write!(f, "{expected} blocks are live, and the statistics tell {told}")
            }
        }
    }
}

impl error::Error for BrokenPromise {}

/// A live block, its fill byte, and the stream that wrote it.
struct FilledBlock<'s> {
    buffer: DeviceBuffer<u8>,
    byte: u8,
    stream: &'s Stream,
}

impl FilledBlock<'_> {
    fn range(&self) -> Range<u64> {
        let start = self.buffer.block().address();
        start..start + self.buffer.len() as u64
    }

    fn check(&self) -> Result<(), BrokenPromise> {
        let address = self.buffer.block().address();
        let mut back = vec![!self.byte; self.buffer.len()];
        let read = self.stream.try_scope(|c| c.download(&self.buffer, &mut back));
        read.map_err(|error| BrokenPromise::Unusable { address, error })?;
        if back.iter().all(|&byte| byte == self.byte) {
            Ok(())
        } else {
            Err(BrokenPromise::Overwritten { address })
        }
    }
}

/// The xorshift generator (Marsaglia, 2003). The same seed yields the same sequence.
struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
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
    if let Err(error) = resource.allocate(first, Request::bytes(0)) {
        return Err(BrokenPromise::Refused { bytes: 0, error });
    }
    let (bytes, align) = (BLOCK_ALIGN, 3);
    if resource.allocate(first, Request::bytes(bytes).align(align)).is_ok() {
        return Err(BrokenPromise::Granted { bytes, align });
    }
    let before = resource.stats().blocks;
    // The seed must not be 0, the generator's only fixed point.
    let mut random = Xorshift(seed | 1);
    let mut live: Vec<FilledBlock<'_>> = Vec::new();
    for round in 0..rounds {
        if live.len() == LIVE || (!live.is_empty() && random.below(3) == 0) {
            let at = random.below(live.len() as u64) as usize;
            live.swap_remove(at).check()?;
        } else {
            let stream = &streams[random.below(streams.len() as u64) as usize];
            // Small requests are the most frequent, as in real programs.
            let most = LARGEST >> random.below(10);
            let bytes = 1 + random.below(most);
            live.push(allocate_filled(resource, stream, bytes, round as u8, &live)?);
        }
        let PoolStats { blocks: told, .. } = resource.stats();
        let expected = before + live.len() as u64;
        if told != expected {
            return Err(BrokenPromise::Miscounted { expected, told });
        }
    }
    live.iter().try_for_each(FilledBlock::check)
}

/// Allocates a block, checks its address, and fills it.
fn allocate_filled<'s>(
    resource: &(impl Resource + ?Sized),
    stream: &'s Stream,
    requested: u64,
    byte: u8,
    live: &[FilledBlock<'_>],
) -> Result<FilledBlock<'s>, BrokenPromise> {
    let block = resource
        .allocate(stream, Request::bytes(requested))
        .map_err(|error| BrokenPromise::Refused { bytes: requested, error })?;
    check_extent(resource.device(), &block, requested)?;
    let address = block.address();
    let buffer = DeviceBuffer::from_block(block)
        .map_err(|declined| BrokenPromise::Unusable { address, error: declined.error })?;
    let mut filled = FilledBlock { buffer, byte, stream };
    let new = filled.range();
    if let Some(other) =
        live.iter().find(|other| other.range().start < new.end && new.start < other.range().end)
    {
        return Err(BrokenPromise::Overlap { new, held: other.range() });
    }
    stream
        .fill(&mut filled.buffer, byte)
        .map_err(|error| BrokenPromise::Unusable { address, error })?;
    Ok(filled)
}

fn check_extent(expected: DeviceId, block: &Block, requested: u64) -> Result<(), BrokenPromise> {
    let (address, bytes, actual) = (block.address(), block.bytes(), block.device());
    if bytes < requested {
        return Err(BrokenPromise::TooShort { requested, bytes });
    }
    if !address.is_multiple_of(BLOCK_ALIGN) {
        return Err(BrokenPromise::Misaligned { address });
    }
    if actual != expected {
        return Err(BrokenPromise::OfAnotherDevice { expected, actual });
    }
    Ok(())
}
