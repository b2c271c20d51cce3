//! What lies around a block and in it, and how it is put there and looked at.
#![expect(unsafe_code, reason = "fills device memory")]

use crate::{BLOCK_ALIGN, Block, DeviceBuffer, Request, request::Sensible};
use aquifer_core::{MemoryError, Result};
use aquifer_stream::{Stream, Timeline};
use std::ops::Range;

/// What a block is filled with when it is given out: as a float it is a tiny negative number that
/// nobody computes.
pub const POISON_ALLOCATED: u8 = 0xa5;
/// What a block is filled with when it is freed: as a pointer it leads nowhere.
pub const POISON_FREED: u8 = 0xde;
/// What the guards before and behind a block consist of.
pub const CANARY: u8 = 0xc3;
/// Bytes of each of the two guards.
pub const GUARD_BYTES: u64 = BLOCK_ALIGN;

/// Bytes that are looked at in one go.
const PIECE: u64 = 16 << 20;

/// How a block lies in the memory that is held for it.
///
/// ```text
///   held    [ ..... | front | block ............. | tail | .. ]
///           0              `front`        `front + bytes`
/// ```
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    /// Bytes before the block, a multiple of its alignment; its guard is the last of them.
    pub(super) front: u64,
    /// The block's bytes.
    pub(super) bytes: u64,
    /// Whether there are guards.
    guarded: bool,
}

impl Layout {
    pub(super) fn new(request: &Request, guarded: bool) -> Self {
        let front = if guarded { request.alignment().max(GUARD_BYTES) } else { 0 };
        Self { front, bytes: request.size(), guarded }
    }

    /// What has to be held for such a block.
    pub(super) fn around(&self, request: &Request) -> Result<Request> {
        let more = if self.guarded { self.front + GUARD_BYTES } else { 0 };
        // The largest request and the guards are far from overflowing.
        let held =
            Request::bytes(self.bytes + more).align(request.alignment()).tag(request.owner());
        held.checked()
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

/// Fills a part of `held` in order on the stream that it belongs to. Never blocks.
///
/// `held` must not be in use by other streams that have not been waited for.
pub(super) fn fill(held: &Block, home: &Timeline, part: Range<u64>, byte: u8) -> Result<()> {
    let device = held.device();
    if part.start > part.end || part.end > held.bytes() {
        let (offset, bytes) = (part.start, held.bytes());
        return Err(MemoryError::OutOfBounds {
            offset,
            len: part.end.saturating_sub(offset),
            bytes,
        });
    }
    let _calling = home.calling()?;
    // SAFETY: 1. a part of a block, which goes home in order with its stream: what is mapped there
    // stays until the stream's work is done. 2. the block is in order with its own stream, and
    // other streams' uses are over.
    let filled = unsafe {
        home.driver().fill(home.raw(), held.address() + part.start, byte, part.end - part.start)
    };
    filled.map_err(|e| MemoryError::driver(device, e))
}

/// The first byte of a part of `held` that is not `expected`: where it is, and what. Reads it on
/// `reader`, behind all that is queued on the block's own stream. Blocks.
pub(super) fn first_wrong(
    held: &DeviceBuffer<u8>,
    reader: &Stream,
    part: Range<u64>,
    expected: u8,
) -> Result<Option<(u64, u8)>> {
    let mut bytes = Vec::new();
    let mut at = part.start;
    while at < part.end {
        let piece = PIECE.min(part.end - at);
        let (from, to) = (at as usize, (at + piece) as usize);
        bytes.clear();
        // As it should be, so that a device without bytes behind its addresses has nothing wrong.
        bytes.resize(to - from, expected);
        let there = held.slice(from..to)?;
        reader.scope(|c| c.download(&there, &mut bytes))??;
        if let Some(wrong) = first_other(&bytes, expected) {
            return Ok(Some((at + wrong as u64, bytes[wrong])));
        }
        at += piece;
    }
    Ok(None)
}

/// Returns the index of the first byte that is not `expected`. Reads whole blocks without a branch
/// for each byte, which compilers vectorize.
fn first_other(bytes: &[u8], expected: u8) -> Option<usize> {
    const BLOCK: usize = 4096;
    let differs = |block: &[u8]| block.iter().fold(0, |bits, &byte| bits | (byte ^ expected)) != 0;
    let start = bytes.chunks(BLOCK).position(differs)? * BLOCK;
    bytes[start..].iter().position(|&byte| byte != expected).map(|at| start + at)
}

#[cfg(test)]
mod tests {
    use super::first_other;

    #[test]
    fn the_first_other_byte_is_found_wherever_it_is() {
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
