//! The plan of a transfer: what it moves, and in which chunks.
//!
//! The parts are treated as one contiguous string of bytes, which is cut into chunks. Workers claim
//! the chunks:
//!
//! ```text
//!   parts    |── a ──|b|c|────────────── d ──────────────────────────────|
//!   chunks   |‒|‒|‒|‒|──|──|──|──|────|────|────|────|───|──|─|‒|‒|‒|
//! ```
//!
//! - The first chunks are short, so that the first copy starts early.
//! - In each round of the workers, the chunk length doubles gradually. So workers that start
//!   together do not call the driver together.
//! - The last chunks are short, so that the end is not delayed by the slowest worker. Each chunk is
//!   at most an equal share of the remaining bytes (guided self-scheduling, Polychronopoulos and
//!   Kuck, 1987).
//! - To the host, a chunk is at most half of that share, since a worker claims two chunks before it
//!   has emptied one.
//! - To the host, the very last chunks are shorter than all others: the link is idle while they are
//!   emptied.

#![expect(unsafe_code, reason = "sends addresses to other threads; holds no unsafe block")]

use super::{Sink, Source};
use std::ptr::NonNull;

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) enum Direction {
    /// To the device.
    Upload,
    /// To the host.
    Download,
}

/// The host end of a part.
#[derive(Clone, Copy, Debug)]
pub(super) enum HostEnd {
    /// Memory that starts at this address.
    Memory(NonNull<u8>),
    /// Bytes of the transfer's source or sink that start at this offset.
    File(u64),
}

// SAFETY: 1. an address of plain elements, which any thread may read or write. The creator of a
// transfer borrows or owns them until the transfer is finished.
unsafe impl Send for HostEnd {}
// SAFETY: 1. as above, and it has no interior mutability.
unsafe impl Sync for HostEnd {}

impl HostEnd {
    /// Returns the position `bytes` further on.
    pub(super) fn skip(self, bytes: u64) -> Self {
        match self {
            // Wrapping arithmetic is enough: the result lies in the part, which is one allocation.
            Self::Memory(start) => {
                let moved = start.as_ptr().wrapping_add(bytes as usize);
                Self::Memory(NonNull::new(moved).unwrap_or(start))
            }
            Self::File(offset) => Self::File(offset + bytes),
        }
    }
}

/// Bytes that are contiguous on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) host: HostEnd,
    /// Address on the device.
    pub(super) device: u64,
    pub(super) bytes: u64,
}

/// A piece of a part that a slot carries, and its position in the slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Move {
    pub(super) host: HostEnd,
    pub(super) device: u64,
    /// Offset from the slot's start.
    pub(super) at: usize,
    pub(super) bytes: usize,
}

/// The source or the sink of a transfer. It outlives the transfer.
#[derive(Clone, Copy)]
pub(super) enum Endpoint {
    Source(NonNull<dyn Source>),
    Sink(NonNull<dyn Sink>),
}

// SAFETY: 1. equivalent to a reference, without its lifetime, to a `Sync` value.
unsafe impl Send for Endpoint {}
// SAFETY: 1. as above.
unsafe impl Sync for Endpoint {}

/// Everything that a transfer moves.
pub(super) struct TransferPlan {
    pub(super) direction: Direction,
    pub(super) endpoint: Option<Endpoint>,
    /// None of them is empty.
    parts: Vec<Part>,
    /// The offset of each part in the string of bytes.
    starts: Vec<u64>,
    /// The boundaries of the chunks, from 0 to the total.
    cuts: Vec<u64>,
}

/// The granularity of a plan's chunks.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChunkSizing {
    /// Minimum bytes of a chunk.
    pub(super) least: u64,
    /// The minimum for the last chunks, if they may be shorter still. Each of them is at most a
    /// sixth of the remaining bytes.
    pub(super) last: Option<u64>,
    /// Maximum bytes of a chunk.
    pub(super) most: u64,
    /// Number of workers that share the chunks.
    pub(super) workers: u64,
    /// Minimum number of shares for each worker.
    pub(super) shares: u64,
}

/// The alignment of chunk starts: the page size of files.
const PAGE: u64 = 4096;

impl TransferPlan {
    /// Cuts the parts into chunks.
    pub(super) fn new(
        direction: Direction,
        endpoint: Option<Endpoint>,
        all: impl IntoIterator<Item = Part>,
        sizing: ChunkSizing,
    ) -> Self {
        let (mut parts, mut starts, mut total) = (Vec::<Part>::new(), Vec::new(), 0);
        for part in all {
            if part.bytes == 0 {
                continue;
            }
            starts.push(total);
            total += part.bytes;
            parts.push(part);
        }
        let phase = match parts.first() {
            Some(Part { host: HostEnd::File(offset), .. }) => offset % PAGE,
            Some(Part { host: HostEnd::Memory(start), .. }) => start.addr().get() as u64 % PAGE,
            None => 0,
        };
        Self { direction, endpoint, parts, starts, cuts: cut(total, phase, sizing) }
    }

    pub(super) fn total(&self) -> u64 {
        self.cuts.last().copied().unwrap_or(0)
    }

    pub(super) fn chunks(&self) -> usize {
        self.cuts.len() - 1
    }

    /// Returns a cursor at the start of a chunk.
    pub(super) fn chunk(&self, which: usize) -> Cursor {
        let (at, end) = (self.cuts[which], self.cuts[which + 1]);
        debug_assert!(at < end, "chunk {which} is empty");
        let part = self.starts.partition_point(|&start| start <= at) - 1;
        Cursor { part, at, end }
    }

    /// Fills the list of a slot with the next part of a chunk, as much as a slot of `room` bytes
    /// holds.
    ///
    /// Returns the number of bytes. Pieces of a source keep their offset modulo `align` in the
    /// slot.
    pub(super) fn load(
        &self,
        cursor: &mut Cursor,
        room: usize,
        align: usize,
        into: &mut Vec<Move>,
    ) -> u64 {
        into.clear();
        let (mut filled, mut loaded) = (0, 0);
        while cursor.at < cursor.end {
            let part = &self.parts[cursor.part];
            let skipped = cursor.at - self.starts[cursor.part];
            let host = part.host.skip(skipped);
            let at = match host {
                HostEnd::Memory(_) => filled,
                HostEnd::File(offset) => {
                    let phase = (offset % align as u64) as usize;
                    let base = filled / align * align + phase;
                    if base < filled { base + align } else { base }
                }
            };
            if at >= room {
                break;
            }
            let left = (part.bytes - skipped).min(cursor.end - cursor.at);
            let bytes = left.min((room - at) as u64);
            into.push(Move { host, device: part.device + skipped, at, bytes: bytes as usize });
            cursor.at += bytes;
            loaded += bytes;
            filled = at + bytes as usize;
            if skipped + bytes == part.bytes {
                cursor.part += 1;
            }
        }
        debug_assert!(filled <= room, "{filled} bytes in a slot of {room}");
        debug_assert!(cursor.at <= cursor.end, "the cursor has left its chunk");
        loaded
    }
}

/// A position in a chunk.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cursor {
    part: usize,
    at: u64,
    end: u64,
}

impl Cursor {
    pub(super) fn is_at_end(&self) -> bool {
        self.at == self.end
    }
}

/// Transfers of more than this many minimum chunks begin with longer chunks. Workers that start
/// together finish their first chunks together, and each chunk costs the driver a copy and an
/// event.
const LONG: u64 = 128;

/// Each of the last chunks is at most this fraction (1 / `LAST`) of the remaining bytes.
const LAST: u64 = 6;

/// Cuts `total` bytes whose first byte lies `phase` bytes after the start of a page.
fn cut(total: u64, phase: u64, sizing: ChunkSizing) -> Vec<u64> {
    let ChunkSizing { least, last, most, workers, shares } = sizing;
    let workers = workers.max(1);
    let first = (total / LONG).clamp(least, most.min(2 * least).max(least));
    let (mut cuts, mut at) = (vec![0], 0);
    while at < total {
        let left = total - at;
        let before = cuts.len() as u64 - 1;
        let round = first.saturating_mul(1 << (before / workers).min(32));
        let ramp = round.saturating_add((round / workers).saturating_mul(before % workers));
        let want = ramp.min(left / (shares * workers).max(1)).clamp(least, most);
        let want = last.map_or(want, |last| want.min((left / LAST).max(last)));
        let end = (at + want + phase) / PAGE * PAGE;
        let end = end.saturating_sub(phase);
        // A remainder of less than half the minimum joins the chunk before it, if that chunk may be
        // so long.
        let rest = total.saturating_sub(end);
        at = if end <= at || rest == 0 || (rest < last.unwrap_or(least) / 2 && left <= most) {
            total.min(at + most)
        } else {
            end
        };
        cuts.push(at);
    }
    cuts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sizing() -> ChunkSizing {
        ChunkSizing { least: 256 << 10, last: None, most: 4 << 20, workers: 8, shares: 2 }
    }

    fn lengths(cuts: &[u64]) -> Vec<u64> {
        cuts.windows(2).map(|ends| ends[1] - ends[0]).collect()
    }

    #[test]
    fn chunks_cover_everything_once_and_none_is_longer_than_a_slot() {
        let ends =
            [0, 1, 4095, 4096, 4097, 255 << 10, 256 << 10, (1 << 20) + 7, 33 << 20, (1 << 30) + 1];
        for total in ends {
            for phase in [0, 1, 2048, 4095] {
                let cuts = cut(total, phase, sizing());
                assert_eq!((cuts[0], *cuts.last().unwrap()), (0, total));
                assert!(cuts.is_sorted_by(|a, b| a < b), "{cuts:?}");
                let lengths = lengths(&cuts);
                assert!(lengths.iter().all(|&len| len <= 4 << 20), "{lengths:?}");
                let inner = &cuts[1..cuts.len().max(2) - 1];
                assert!(
                    inner.iter().all(|cut| (cut + phase) % PAGE == 0),
                    "{total} {phase} {cuts:?}"
                );
            }
        }
    }

    #[test]
    fn the_first_and_the_last_chunks_are_short() {
        for shares in [1, 2] {
            let lengths = lengths(&cut(1 << 30, 0, ChunkSizing { shares, ..sizing() }));
            assert!(
                lengths[..8].iter().all(|&len| (512 << 10..1 << 20).contains(&len)),
                "{lengths:?}"
            );
            assert!(lengths[..16].is_sorted_by(|a, b| a < b), "no two are as long: {lengths:?}");
            assert!(lengths.iter().filter(|&&len| len == 4 << 20).count() > 200);
            assert!(lengths.iter().rev().take(4).all(|&len| len <= 384 << 10), "{lengths:?}");
        }
    }

    #[test]
    fn last_chunks_may_be_shorter_than_the_minimum() {
        let (least, last) = (2 << 20, 512 << 10);
        let lengths =
            lengths(&cut(64 << 20, 0, ChunkSizing { least, last: Some(last), ..sizing() }));
        let (long, short) = lengths.split_at(lengths.iter().position(|&len| len < least).unwrap());
        assert!(long.iter().all(|&len| len >= least) && long.len() > 20, "{lengths:?}");
        assert!(
            short.iter().all(|&len| len <= least && len >= last) && short.len() < 14,
            "{lengths:?}"
        );
        let mut left: u64 = short.iter().sum();
        for &len in short {
            assert!(len <= (left / 6).max(last + last / 2), "{lengths:?}");
            left -= len;
        }
    }

    #[test]
    fn short_transfer_is_cut_into_minimum_chunks() {
        for total in [512 << 10, 1 << 20, 2 << 20, 4 << 20] {
            let lengths = lengths(&cut(total, 0, sizing()));
            assert_eq!(lengths.len() as u64, total / (256 << 10), "{lengths:?}");
        }
    }

    #[test]
    fn slot_holds_many_small_parts_each_at_its_offset_in_a_page() {
        let part = |offset, device, bytes| Part { host: HostEnd::File(offset), device, bytes };
        let parts =
            [part(10, 0, 100), part(110, 100, 5), part(9000, 5000, 50), part(20_000, 5050, 9000)];
        let plan = TransferPlan::new(Direction::Upload, None, parts, sizing());
        assert_eq!((plan.parts.len(), plan.total(), plan.chunks()), (4, 9155, 1));
        let (mut cursor, mut moves) = (plan.chunk(0), Vec::new());
        assert_eq!(plan.load(&mut cursor, 16_384, 4096, &mut moves), 9155);
        assert!(cursor.is_at_end());
        let placed: Vec<_> = moves.iter().map(|one| (one.at, one.bytes, one.device)).collect();
        assert_eq!(placed, [(10, 100, 0), (110, 5, 100), (808, 50, 5000), (3616, 9000, 5050)]);
        // A smaller slot is loaded several times.
        let (mut cursor, mut moved) = (plan.chunk(0), 0);
        while !cursor.is_at_end() {
            let loaded = plan.load(&mut cursor, 4096, 512, &mut moves);
            assert!(loaded > 0 && moves.iter().all(|one| one.at + one.bytes <= 4096));
            assert!(moves.is_sorted_by(|a, b| a.at + a.bytes <= b.at));
            moved += loaded;
        }
        assert_eq!(moved, 9155);
    }
}
