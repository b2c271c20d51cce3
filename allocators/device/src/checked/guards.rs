//! Guards and poison: their layout, the fills, and the checks.
#![expect(unsafe_code, reason = "fills device memory")]

use crate::{BLOCK_ALIGN, Block, DeviceBuffer, Request, debugging::Fault};
use aquifer_core::{MemoryError, Result};
use aquifer_stream::{Stream, Timeline, Uses};
use std::{ops::Range, sync::Arc};

/// The byte that fills a block when it is allocated. As a float it is a tiny negative number that
/// no computation yields.
pub const POISON_ALLOCATED: u8 = 0xa5;
/// The byte that fills a block when it is freed. As a pointer it is invalid.
pub const POISON_FREED: u8 = 0xde;
/// The byte that fills the guards before and behind a block.
pub const CANARY: u8 = 0xc3;
/// Bytes of each of the two guards.
pub const GUARD_BYTES: u64 = BLOCK_ALIGN;

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

/// The memory of a block with its guards.
pub(super) struct GuardedBlock {
    memory: DeviceBuffer<u8>,
    layout: GuardLayout,
    pub(super) owner_stream: Arc<Timeline>,
    /// Whether a fault before the block has been reported, and one behind it. They are not reported
    /// again.
    reported: [bool; 2],
}

impl GuardedBlock {
    /// Returns the requested bytes, with those of the guards.
    pub(super) fn requested(&self) -> u64 {
        self.memory.block().bytes()
    }

    pub(super) fn new(
        memory: DeviceBuffer<u8>,
        layout: GuardLayout,
        owner_stream: Arc<Timeline>,
    ) -> Self {
        Self { memory, layout, owner_stream, reported: [false; 2] }
    }

    /// Returns the address of the first guard.
    pub(super) fn address(&self) -> u64 {
        self.memory.block().address()
    }

    /// Fills the block between the guards. Never blocks.
    pub(super) fn fill_body(&self, byte: u8) -> Result<()> {
        fill(self.memory.block(), &self.owner_stream, self.layout.body(), byte)
    }

    /// Adds the faults of the guards. Blocks.
    pub(super) fn inspect(&mut self, reader: &Stream, faults: &mut Vec<Fault>) -> Result<()> {
        let Self { memory, layout, reported, .. } = self;
        let start = layout.front;
        if let Some(part) = layout.before().filter(|_| !reported[0])
            && let Some((at, found)) = first_wrong(memory, reader, part)?
        {
            reported[0] = true;
            faults.push(Fault::Underrun { offset: at.cast_signed() - start.cast_signed(), found });
        }
        if let Some(part) = layout.behind().filter(|_| !reported[1])
            && let Some((at, found)) = first_wrong(memory, reader, part)?
        {
            reported[1] = true;
            faults.push(Fault::Overrun { offset: at - start, found });
        }
        // The reader has been waited for, and no other stream has used this memory.
        let _over = self.memory.block_mut().uses.take();
        Ok(())
    }

    /// Returns the block, which other streams still use by `uses`.
    pub(super) fn into_block(self, uses: Uses) -> Block {
        let mut block = self.memory.into_block();
        block.uses.take_over(&self.owner_stream, uses);
        block
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

/// Returns the offset and the value of the first byte in a guard of `held` that is not [`CANARY`].
/// Reads on `reader`, behind all work queued on the block's own stream. Blocks.
fn first_wrong(
    held: &DeviceBuffer<u8>,
    reader: &Stream,
    guard: Range<u64>,
) -> Result<Option<(u64, u8)>> {
    // Preset to the expected value, so that a symbolic device, which has no contents, shows no
    // fault.
    let mut bytes = [CANARY; GUARD_BYTES as usize];
    let there = held.slice(guard.start as usize..guard.end as usize)?;
    reader.scope(|c| c.download(there, &mut bytes))??;
    let wrong = bytes.iter().position(|&byte| byte != CANARY);
    Ok(wrong.map(|at| (guard.start + at as u64, bytes[at])))
}
