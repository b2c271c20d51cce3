//! The contents of parked blocks, in host memory.
#![expect(unsafe_code, reason = "copies between a device and memory of a caller's allocator")]

use super::settings::{HostAllocator, Park, ResumeReport};
use crate::pool_core::PoolCore;
use aquifer_core::{MemoryError, Result, SystemError, panics::contain};
use aquifer_driver::Relaxed;
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline};
use std::{
    alloc::Layout,
    ptr::NonNull,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

/// Bytes of host memory that are allocated at once, unless less remains to save. Long enough for a
/// copy to run at the speed of the link, short enough for a pool of pinned memory to find room.
const PIECE: u64 = 64 << 20;
/// If an allocation is refused, its size is halved, down to this.
const SMALLEST: u64 = 1 << 20;
/// A cache line.
const ALIGN: usize = 64;
/// The error for an allocator's refusal, which carries no reason.
const REFUSED: SystemError = SystemError { call: "Allocator::allocate", errno: 12 };

/// The contents of memory that is being parked.
#[derive(Default)]
pub(crate) struct SavedContents {
    pub(crate) pieces: Vec<SavedPiece>,
    /// The time of the copies.
    pub(crate) took: Duration,
}

/// Memory that is being resumed. Its saved contents are kept until that is final.
#[derive(Default)]
pub(crate) struct RestoredContents {
    pub(crate) pieces: Vec<SavedPiece>,
    /// Bytes of mapped memory.
    pub(crate) taken: u64,
    /// Bytes that were copied back.
    pub(crate) copied: u64,
    /// The time of the copies.
    pub(crate) took: Duration,
}

impl RestoredContents {
    /// Adds them to a report.
    pub(crate) fn add_to(&self, report: &mut ResumeReport) {
        report.taken += self.taken;
        report.restored += self.copied;
        report.copying += self.took;
    }
}

/// Host memory that holds parts of parked blocks.
pub(crate) struct SavedPiece {
    host: HostBytes,
    parts: Vec<SavedPart>,
}

/// A range of device addresses, and the offset of its contents in the piece.
struct SavedPart {
    range: Range,
    at: u64,
}

struct HostBytes {
    start: NonNull<u8>,
    layout: Layout,
    from: HostAllocator,
}

// SAFETY: 1. only this value has the memory, and the allocator may be called from any thread.
unsafe impl Send for HostBytes {}

impl HostBytes {
    fn new(from: &HostAllocator, bytes: u64) -> Option<Self> {
        let layout = Layout::from_size_align(usize::try_from(bytes).ok()?, ALIGN).ok()?;
        // A panic of the caller's allocator counts as a refusal.
        let start = contain(|| from.allocate(layout))?.ok()?.cast();
        Some(Self { start, layout, from: from.clone() })
    }
}

impl Drop for HostBytes {
    fn drop(&mut self) {
        // SAFETY: 1. the memory comes from this allocator, with this layout, and is deallocated
        // once. No copy uses it any more: `save` and `restore` wait for theirs.
        contain(|| unsafe { self.from.deallocate(self.start, self.layout) });
    }
}

/// Merges adjacent ranges, which are ascending.
pub(crate) fn merged(ranges: impl Iterator<Item = Range>) -> Vec<Range> {
    let mut merged: Vec<Range> = Vec::new();
    for range in ranges {
        match merged.last_mut() {
            Some(last) if last.end() == range.start => last.len += range.len,
            _ => merged.push(range),
        }
    }
    merged
}

impl SavedPiece {
    /// Returns the device addresses whose contents it holds.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = Range> {
        self.parts.iter().map(|part| part.range)
    }

    /// Returns whether it holds any part of a range.
    pub(crate) fn touches(&self, range: Range) -> bool {
        self.ranges().any(|own| own.start < range.end() && range.start < own.end())
    }

    /// Returns its size in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.host.layout.size() as u64
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
) -> Result<SavedContents> {
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
    let (began, ranges) = (Instant::now(), ranges());
    let pieces = match &how.host {
        Some(host) if !ranges.is_empty() => save(&pool.streams().lease()?, host, &ranges)?,
        _ => Vec::new(),
    };
    Ok(SavedContents { pieces, took: began.elapsed() })
}

/// Copies `ranges` to memory of `host`. Each piece is allocated while the copies into earlier
/// pieces run. Blocks until all copies are done, also if it fails.
///
/// No work that writes the ranges may be pending, and no other code may use `stream`.
///
/// # Errors
/// [`MemoryError::System`] if the allocator refuses; the driver's.
fn save(stream: &Stream, host: &HostAllocator, ranges: &[Range]) -> Result<Vec<SavedPiece>> {
    let mut left: u64 = ranges.iter().map(|range| range.len).sum();
    let mut ranges = ranges.iter().copied();
    let (mut rest, mut most) = (Range { start: 0, len: 0 }, PIECE);
    let mut pieces = Vec::new();
    let copied = stream.scope(|_| {
        while left > 0 {
            let Some(host) = HostBytes::new(host, left.min(most)) else {
                if most <= SMALLEST {
                    return Err(MemoryError::System(REFUSED));
                }
                most /= 2;
                continue;
            };
            let (bytes, start) = (host.layout.size() as u64, host.start);
            let (mut parts, mut at) = (Vec::new(), 0);
            while at < bytes {
                if rest.len == 0 {
                    let Some(next) = ranges.next() else { break };
                    rest = next;
                }
                let range = Range { start: rest.start, len: rest.len.min(bytes - at) };
                parts.push(SavedPart { range, at });
                at += range.len;
                rest = Range { start: range.end(), len: rest.len - range.len };
            }
            left -= bytes;
            // Stored before a copy is queued: all pieces outlive the scope, which waits.
            pieces.push(SavedPiece { host, parts });
            let parts = pieces.last().map_or(&[][..], |piece| &piece.parts);
            for SavedPart { range, at } in parts {
                let _calling = stream.timeline().calling()?;
                // SAFETY: 1. the bytes at `at` lie in the piece, which lives until the scope has
                // waited; the range's memory lives until the caller releases it. 2. the caller
                // guarantees that nothing else uses either.
                let queued = unsafe {
                    let to = start.add(*at as usize);
                    stream.driver().copy_to_host(stream.raw(), to, range.start, range.len as usize)
                };
                queued.map_err(|e| MemoryError::driver(stream.device(), e))?;
            }
        }
        Ok(())
    });
    copied??;
    Ok(pieces)
}

/// Copies back the contents of `ranges` that `pieces` hold. The ranges are disjoint and ascending.
/// Blocks until the contents are there. Returns the copied bytes.
///
/// Nothing else may touch the ranges, and no other code may use `stream`.
///
/// # Errors
/// The driver's. The pieces are unchanged.
pub(crate) fn restore(stream: &Stream, pieces: &[SavedPiece], ranges: &[Range]) -> Result<u64> {
    let copied = stream.scope(|_| {
        let mut bytes = 0;
        for (piece, part) in
            pieces.iter().flat_map(|piece| piece.parts.iter().map(move |part| (piece, part)))
        {
            let first = ranges.partition_point(|range| range.end() <= part.range.start);
            let within = ranges[first..].iter().take_while(|range| range.start < part.range.end());
            for range in within {
                let start = range.start.max(part.range.start);
                let end = range.end().min(part.range.end());
                let at = part.at + (start - part.range.start);
                let _calling = stream.timeline().calling()?;
                // SAFETY: 1. the source lies within the part and so within the piece, which
                // outlives the scope; the range has memory. 2. the caller guarantees that nothing
                // else uses either.
                let queued = unsafe {
                    let from = piece.host.start.add(at as usize);
                    stream.driver().copy_to_device(
                        stream.raw(),
                        start,
                        from,
                        (end - start) as usize,
                    )
                };
                queued.map_err(|e| MemoryError::driver(stream.device(), e))?;
                bytes += end - start;
            }
        }
        Ok(bytes)
    });
    copied?
}
