//! Whether a source of device memory keeps what every [`Resource`] promises: for those that users
//! write.

use crate::{Block, DeviceBuffer, Request, Resource};
use aquifer_core::{BLOCK_ALIGN, DeviceId, MemoryError, PoolStats, Result};
use aquifer_stream::Stream;
use std::{error, fmt, ops::Range};

/// The largest request, in bytes.
const LARGEST: u64 = 64 << 10;
/// The most blocks that are live at once.
const LIVE: usize = 16;

/// A promise that a [`Resource`] has broken.
///
/// Its example is that of [`conformance`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum BrokenPromise {
    /// A request that should be granted was refused.
    Refused {
        /// Bytes that were asked for.
        bytes: u64,
        /// Why.
        error: MemoryError,
    },
    /// A request that makes no sense was granted.
    Granted {
        /// The bytes that were asked for.
        bytes: u64,
        /// The alignment that was asked for.
        align: u64,
    },
    /// A block is shorter than was asked for.
    TooShort {
        /// Bytes that were asked for.
        requested: u64,
        /// Bytes of the block.
        bytes: u64,
    },
    /// A block does not lie at a multiple of [`BLOCK_ALIGN`].
    Misaligned {
        /// Where it lies.
        address: u64,
    },
    /// A block is another device's.
    OfAnotherDevice {
        /// The source's device.
        expected: DeviceId,
        /// The block's.
        actual: DeviceId,
    },
    /// Two live blocks share bytes.
    Overlap {
        /// The new one.
        new: Range<u64>,
        /// The one that was there.
        held: Range<u64>,
    },
    /// A live block does not hold what was written to it.
    Overwritten {
        /// Where it lies.
        address: u64,
    },
    /// Work on the block failed.
    Unusable {
        /// Where it lies.
        address: u64,
        /// Why.
        error: MemoryError,
    },
    /// The count of live blocks is wrong.
    Miscounted {
        /// Blocks that are live.
        expected: u64,
        /// Blocks that the statistics tell.
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

/// A live block, the byte that fills it, and the stream that wrote it.
struct Filled<'s> {
    buffer: DeviceBuffer<u8>,
    byte: u8,
    stream: &'s Stream,
}

impl Filled<'_> {
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

/// The xorshift generator (Marsaglia, 2003): the same program for the same seed.
struct Xorshift(u64);

impl Xorshift {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Runs `rounds` allocations and frees of random sizes, up to 64 KiB and 16 at a time, on `streams`
/// in turn, writes every block and reads it back before its free. Returns the first promise that
/// `resource` breaks.
///
/// It needs memory whose bytes are there: a GPU's or a simulated one's, but for a symbolic one.
/// Wrappers of one's own are checked like sources. Blocks; nothing is live afterwards.
///
/// ```
/// use aquifer_device::{DevicePool, PoolConfig, conformance};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// conformance(&pool, &[pool.stream()?, pool.stream()?], 200, 42)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The first broken promise.
pub fn conformance(
    resource: &(impl Resource + ?Sized),
    streams: &[Stream],
    rounds: u32,
    seed: u64,
) -> Result<(), BrokenPromise> {
    let Some(first) = streams.first() else { return Ok(()) };
    for (bytes, align) in [(0, BLOCK_ALIGN), (BLOCK_ALIGN, 3)] {
        if resource.allocate(first, Request::bytes(bytes).align(align)).is_ok() {
            return Err(BrokenPromise::Granted { bytes, align });
        }
    }
    let before = resource.stats().blocks;
    // Zero is the generator's only fixed point.
    let mut random = Xorshift(seed | 1);
    let mut live: Vec<Filled<'_>> = Vec::new();
    for round in 0..rounds {
        if live.len() == LIVE || (!live.is_empty() && random.below(3) == 0) {
            let at = random.below(live.len() as u64) as usize;
            live.swap_remove(at).check()?;
        } else {
            let stream = &streams[random.below(streams.len() as u64) as usize];
            // Small ones are the most frequent, as in programs.
            let most = LARGEST >> random.below(10);
            let bytes = 1 + random.below(most);
            live.push(take(resource, stream, bytes, round as u8, &live)?);
        }
        let PoolStats { blocks: told, .. } = resource.stats();
        let expected = before + live.len() as u64;
        if told != expected {
            return Err(BrokenPromise::Miscounted { expected, told });
        }
    }
    live.iter().try_for_each(Filled::check)
}

/// Allocates a block, checks where it lies, and fills it.
fn take<'s>(
    resource: &(impl Resource + ?Sized),
    stream: &'s Stream,
    requested: u64,
    byte: u8,
    live: &[Filled<'_>],
) -> Result<Filled<'s>, BrokenPromise> {
    let block = resource
        .allocate(stream, Request::bytes(requested))
        .map_err(|error| BrokenPromise::Refused { bytes: requested, error })?;
    check_place(resource.device(), &block, requested)?;
    let address = block.address();
    let buffer = DeviceBuffer::from_block(block)
        .map_err(|declined| BrokenPromise::Unusable { address, error: declined.error })?;
    let mut filled = Filled { buffer, byte, stream };
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

fn check_place(expected: DeviceId, block: &Block, requested: u64) -> Result<(), BrokenPromise> {
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
