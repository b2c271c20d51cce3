//! Guards and poison: their layout, the fills, and the checks.
#![expect(unsafe_code, reason = "fills device memory")]

use crate::{BLOCK_ALIGN, Block, DeviceBuffer, Request};
use aquifer_core::{MemoryError, Result};
use aquifer_stream::{Stream, Timeline};
use std::ops::Range;

/// The byte that fills a block when it is allocated. As a float it is a tiny negative number that
/// no computation yields.
pub const POISON_ALLOCATED: u8 = 0xa5;
/// The byte that fills a block when it is freed. As a pointer it is invalid.
pub const POISON_FREED: u8 = 0xde;
/// The byte that fills the guards before and behind a block.
pub const CANARY: u8 = 0xc3;
/// Bytes of each of the two guards.
pub const GUARD_BYTES: u64 = BLOCK_ALIGN;

/// Bytes that are read in one step.
const READ_BYTES: u64 = 16 << 20;

/// The position of a block in the memory held for it.
///
/// ```text
///   held    [ ..... | front | block ............. | tail | .. ]
///           0              `front`        `front + bytes`
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct GuardLayout {
    /// Bytes before the block, a multiple of its alignment. The guard is the last of them.
    pub(super) front: u64,
    /// The block's bytes.
    pub(super) bytes: u64,
    /// Whether there are guards.
    guarded: bool,
}

impl GuardLayout {
    pub(super) fn new(request: &Request, guarded: bool) -> Self {
        let front = if guarded { request.alignment().max(GUARD_BYTES) } else { 0 };
        Self { front, bytes: request.size(), guarded }
    }

    /// Returns the request for the block with its guards.
    pub(super) fn around(&self, request: &Request) -> Request {
        let more = if self.guarded { self.front + GUARD_BYTES } else { 0 };
        // The largest request with guards is far from an overflow.
        Request::bytes(self.bytes + more).align(request.alignment()).tag(request.owner())
    }

    pub(super) fn before(&self) -> Option<Range<u64>> {
        self.guarded.then(|| self.front - GUARD_BYTES..self.front)
    }

    pub(super) fn body(&self) -> Range<u64> {
        self.front..self.front + self.bytes
    }

    pub(super) fn behind(&self) -> Option<Range<u64>> {
        let end = self.front + self.bytes;
        self.guarded.then(|| end..end + GUARD_BYTES)
    }
}

/// Fills a part of `held` in order on its owner stream. Never blocks.
///
/// `held` must have no other stream's use that has not been waited for.
pub(super) fn fill(
    held: &Block,
    owner_stream: &Timeline,
    part: Range<u64>,
    byte: u8,
) -> Result<()> {
    let device = held.device();
    if part.start > part.end || part.end > held.bytes() {
        let (offset, bytes) = (part.start, held.bytes());
        return Err(MemoryError::OutOfBounds {
            offset,
            len: part.end.saturating_sub(offset),
            bytes,
        });
    }
    let _calling = owner_stream.calling()?;
    // SAFETY: 1. The range is a part of a block, which returns to its pool in stream order: the
    // memory stays mapped until the stream's work is done. 2. The block is ordered on its own
    // stream, and other streams' uses are over.
    let filled = unsafe {
        owner_stream.driver().fill(
            owner_stream.raw(),
            held.address() + part.start,
            byte,
            part.end - part.start,
        )
    };
    filled.map_err(|e| MemoryError::driver(device, e))
}

/// Returns the offset and the value of the first byte in a part of `held` that is not `expected`.
/// Reads on `reader`, behind all work queued on the block's own stream. Blocks.
pub(super) fn first_wrong(
    held: &DeviceBuffer<u8>,
    reader: &Stream,
    part: Range<u64>,
    expected: u8,
) -> Result<Option<(u64, u8)>> {
    // Preset to the expected value, so that a symbolic device, which has no contents, shows no
    // fault. A piece without a fault leaves it so for the next.
    let mut bytes = vec![expected; READ_BYTES.min(part.end - part.start) as usize];
    let mut at = part.start;
    while at < part.end {
        let piece = READ_BYTES.min(part.end - at);
        let (from, to) = (at as usize, (at + piece) as usize);
        bytes.truncate(to - from);
        let there = held.slice(from..to)?;
        reader.scope(|c| c.download(there, &mut bytes))??;
        if let Some(wrong) = first_other(&bytes, expected) {
            return Ok(Some((at + wrong as u64, bytes[wrong])));
        }
        at += piece;
    }
    Ok(None)
}

/// Returns the index of the first byte that is not `expected`. A block has none if its first byte
/// is `expected` and each byte equals the next, which is one comparison of memory.
fn first_other(bytes: &[u8], expected: u8) -> Option<usize> {
    const BLOCK: usize = 4096;
    let differs = |block: &[u8]| block[0] != expected || block[1..] != block[..block.len() - 1];
    let start = bytes.chunks(BLOCK).position(differs)? * BLOCK;
    bytes[start..].iter().position(|&byte| byte != expected).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::first_other;

    #[test]
    fn first_other_byte_is_found_at_every_position() {
        for len in [0, 1, 4095, 4096, 4097, 9000] {
            let mut bytes = vec![7; len];
            assert_eq!(first_other(&bytes, 7), None);
            for at in (0..len).rev().step_by(97) {
                bytes[at] = 8;
                assert_eq!(first_other(&bytes, 7), Some(at), "of {len}");
            }
        }
    }
}
