//! The contents of parked blocks, in host memory.
#![expect(unsafe_code, reason = "copies between a device and memory of a caller's allocator")]

use super::settings::{HostAllocator, Park};
use crate::pool_core::PoolCore;
use aquifer_core::{MemoryError, Result, SystemError, panics::contain};
use aquifer_driver::Relaxed;
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline};
use std::{
    alloc::Layout,
    ptr::NonNull,
    slice,
    sync::{Arc, atomic::Ordering},
    time::Instant,
};

/// Bytes of host memory that are allocated at once, unless less of a block remains to save. Long
/// enough for a copy to run at the speed of the link, short enough for a pool of pinned memory to
/// find room.
const PIECE: u64 = 64 << 20;
/// If an allocation is refused, its size is halved, down to this.
const SMALLEST: u64 = 1 << 20;
/// A cache line.
const ALIGN: usize = 64;
/// The error for an allocator's refusal, which carries no reason.
const REFUSED: SystemError = SystemError { call: "Allocator::allocate", errno: 12 };

/// Memory that is being resumed. Its saved contents are kept until that is final.
#[derive(Default)]
pub(crate) struct RestoredContents {
    pub(crate) blocks: Vec<Arc<SavedBlock>>,
    /// Bytes of mapped memory.
    pub(crate) taken: u64,
    /// Bytes that were copied back.
    pub(crate) copied: u64,
}

/// The contents of a parked block in pieces of host memory, one behind the other.
pub(crate) struct SavedBlock {
    pub(crate) address: u64,
    pieces: Vec<HostBytes>,
}

impl SavedBlock {
    /// Returns its bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.pieces.iter().map(HostBytes::bytes).sum()
    }

    /// Copies its contents from `offset` on, which has as many bytes.
    pub(super) fn read(&self, offset: u64, mut into: &mut [u8]) {
        let mut skip = offset as usize;
        for piece in &self.pieces {
            // SAFETY: 1. the piece is allocated, and `save` has written all of it. 2. nothing
            // writes to it any more: a block has only contents whose copies are done.
            let all = unsafe { slice::from_raw_parts(piece.start.as_ptr(), piece.layout.size()) };
            let from = &all[skip.min(all.len())..];
            skip -= all.len() - from.len();
            let (part, rest) = into.split_at_mut(from.len().min(into.len()));
            part.copy_from_slice(&from[..part.len()]);
            into = rest;
        }
    }
}

struct HostBytes {
    start: NonNull<u8>,
    layout: Layout,
    from: HostAllocator,
}

// SAFETY: 1. only this value has the memory, and the allocator may be called from any thread.
unsafe impl Send for HostBytes {}
// SAFETY: 1. a shared reference only gives the address and the size.
unsafe impl Sync for HostBytes {}

impl HostBytes {
    fn new(from: &HostAllocator, bytes: u64) -> Option<Self> {
        let layout = Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGN).ok()?;
        // A panic of the caller's allocator counts as a refusal.
        let start = contain(|| from.allocate(layout))?.ok()?.cast();
        Some(Self { start, layout, from: from.clone() })
    }

    fn bytes(&self) -> u64 {
        self.layout.size() as u64
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        // SAFETY: 1. the memory comes from this allocator, with this layout, and is deallocated
        // once. No copy uses it any more: `save` and `restore` wait for theirs.
        contain(|| unsafe { self.from.deallocate(self.start, self.layout) });
    }
}

/// Waits until `until` for `work`, then copies the contents of `ranges` as `how` specifies. Blocks.
///
/// Nothing that writes the ranges may be queued meanwhile.
///
/// # Errors
/// [`MemoryError::TimedOut`]; [`MemoryError::Capturing`] if the device is to be synchronised and a
/// capture is announced; as [`save`].
pub(crate) fn wait_and_save(
    pool: &PoolCore,
    how: &Park,
    work: &[(Arc<Timeline>, u64)],
    until: Option<Instant>,
    ranges: impl Fn() -> Vec<Range>,
) -> Result<Vec<SavedBlock>> {
    if how.synchronizes {
        if pool.dedicated.announced.load(Ordering::Relaxed) > 0 {
            return Err(MemoryError::Capturing { stream: 0 });
        }
        let driver = &*pool.dedicated.driver;
        let _relaxed = Relaxed::enter(driver);
        let waited = driver.device_synchronize(pool.dedicated.device);
        waited.map_err(|e| MemoryError::driver(pool.dedicated.device, e))?;
    }
    for (timeline, epoch) in work {
        if !timeline.wait(*epoch, until)? {
            return Err(MemoryError::TimedOut);
        }
    }
    let ranges = ranges();
    match &how.host {
        Some(host) if !ranges.is_empty() => save(&pool.streams().lease()?, host, &ranges),
        _ => Ok(Vec::new()),
    }
}

/// Copies the blocks at `ranges` to memory of `host`. Each piece is allocated while the copies into
/// earlier pieces run. Blocks until all copies are done, also if it fails.
///
/// No work that writes the ranges may be pending, and no other code may use `stream`.
///
/// # Errors
/// [`MemoryError::System`] if the allocator refuses; the driver's.
fn save(stream: &Stream, host: &HostAllocator, ranges: &[Range]) -> Result<Vec<SavedBlock>> {
    let new = |range: &Range| SavedBlock { address: range.start, pieces: Vec::new() };
    let (mut blocks, mut most): (Vec<_>, _) = (ranges.iter().map(new).collect(), PIECE);
    let copied = stream.scope(|_| {
        for (block, range) in blocks.iter_mut().zip(ranges) {
            let mut at = range.start;
            while at < range.end() {
                let Some(piece) = HostBytes::new(host, (range.end() - at).min(most)) else {
                    if most <= SMALLEST {
                        return Err(MemoryError::System(REFUSED));
                    }
                    most /= 2;
                    continue;
                };
                let (to, bytes) = (piece.start, piece.bytes());
                // Stored before a copy is queued: all pieces outlive the scope, which waits.
                block.pieces.push(piece);
                let _calling = stream.timeline().calling()?;
                // SAFETY: 1. the piece lives until the scope has waited; the range's memory lives
                // until the caller releases it. 2. the caller guarantees that nothing else uses
                // either.
                let queued =
                    unsafe { stream.driver().copy_to_host(stream.raw(), to, at, bytes as usize) };
                queued.map_err(|e| MemoryError::driver(stream.device(), e))?;
                at += bytes;
            }
        }
        Ok(())
    });
    copied??;
    Ok(blocks)
}

/// Copies the contents of blocks back. Blocks until they are there. Returns the copied bytes.
///
/// Nothing else may touch the blocks' ranges, which have memory, and no other code may use
/// `stream`.
///
/// # Errors
/// The driver's.
pub(crate) fn restore(stream: &Stream, blocks: &[Arc<SavedBlock>]) -> Result<u64> {
    let copied = stream.scope(|_| {
        for block in blocks {
            let mut at = block.address;
            for piece in &block.pieces {
                let _calling = stream.timeline().calling()?;
                // SAFETY: 1. the piece outlives the scope; the range has memory. 2. the caller
                // guarantees that nothing else uses either.
                let queued = unsafe {
                    let (from, bytes) = (piece.start, piece.layout.size());
                    stream.driver().copy_to_device(stream.raw(), at, from, bytes)
                };
                queued.map_err(|e| MemoryError::driver(stream.device(), e))?;
                at += piece.bytes();
            }
        }
        Ok(blocks.iter().map(|block| block.bytes()).sum())
    });
    copied?
}
