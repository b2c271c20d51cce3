//! Memory snapshots in PyTorch's format, for its viewers.
//!
//! PyTorch's viewers are <https://pytorch.org/memory_viz>, which draws a file that is dropped
//! there, and `python -m torch.cuda._memory_viz`, which prints one. They read what
//! `torch.cuda.memory._dump_snapshot()` writes. A [`MemorySnapshot`] is the same for any pool. It
//! is created from the events of a [`RingSink`](aquifer_core::event::RingSink), or by
//! `aquifer replay TRACE --snapshot FILE` from any trace.
//!
//! # The format
//! A pickle of protocol 4 that contains one dictionary:
//!
//! | key | holds |
//! |---|---|
//! | `device_traces` | for each device, by its ordinal, a list of entries, the oldest first |
//! | `segments` | the memory that contained blocks, and the live blocks at the end |
//! | `allocator_settings` | names and values, including the allocator's name |
//! | `external_annotations` | an empty list |
//!
//! An entry is a dictionary with `action`, `addr`, `size`, `stream`, `time_us`, and `category`,
//! which is the tag:
//!
//! | our [`Action`] | `action` |
//! |---|---|
//! | [`Allocate`](Action::Allocate) | `alloc`, with the requested bytes, as in PyTorch |
//! | [`Free`](Action::Free) | `free_requested` |
//! | [`Complete`](Action::Complete) | `free_completed` |
//! | [`Fail`](Action::Fail) | `oom`, with a `device_free` of 0, which events do not contain |
//! | `Grow`, `Reap`, `Move`, `Adopt`, `Finding` | none: they have no addresses |
//!
//! `segment_map` is written before the first block in 2 MiB that contained no block before. So
//! segments are the memory that blocks have used, in multiples of 2 MiB. This is less than the
//! memory that the pool held, which its statistics report. Memory between blocks is `inactive`. Our
//! segments are not bound to one stream, so each block has its own `stream` in addition to the
//! segment's. PyTorch's tools ignore that key.

mod history;

use crate::pickle::{Pickler, Word};
use aquifer_core::{
    DeviceId, Tag,
    event::{Event, MemoryLocation},
};
use history::{History, LiveBlock, TraceEntry};
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Write},
    ops::Range,
    panic::Location,
    path::Path,
};

#[cfg(doc)]
use aquifer_core::Action;

/// The maximum number of devices, since the list contains every ordinal from 0 on.
const MAX_DEVICES: u32 = 1024;
/// Block sizes are rounded up to this if there is room.
const SIZE_UNIT: u64 = 512;

/// A memory snapshot that PyTorch's memory viewer and `_memory_viz.py` can read.
///
/// ```
/// use aquifer::{
///     DeviceId, Tag, event::{Action, MemoryLocation, MemorySnapshot, Recorder, RingSink},
/// };
/// use std::sync::Arc;
/// let ring = Arc::new(RingSink::new(1 << 10));
/// let recorder = Recorder::new(ring.clone());
/// let place = MemoryLocation::Device(DeviceId(0));
/// recorder.record(recorder.ticket(), recorder.event(Action::Allocate, place, 1, 0x7f00_0000_0000, 1000, Tag::NONE));
///
/// let snapshot = MemorySnapshot::of(ring.take());
/// let mut pickle = Vec::new();
/// snapshot.write_to(&mut pickle)?;                 // or `save("memory.pickle")`
/// assert!(pickle.starts_with(&[0x80, 4]) && pickle.ends_with(b"."));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Default, Debug)]
pub struct MemorySnapshot {
    devices: BTreeMap<u32, History>,
    settings: BTreeMap<String, String>,
}

/// A block that is live when a snapshot is taken.
///
/// ```
/// use aquifer_core::{DeviceId, Tag};
/// use aquifer_formats::{HeldBlock, MemorySnapshot};
/// let mut snapshot = MemorySnapshot::default();
/// let block = HeldBlock { address: 0x7f00_0000_0000, bytes: 1000, stream: 1, tag: Tag::NONE, at: None };
/// snapshot.hold(DeviceId(0), block);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldBlock {
    /// The first address.
    pub address: u64,
    /// Requested bytes.
    pub bytes: u64,
    /// The number of the stream that owns the block.
    pub stream: u32,
    /// The tag.
    pub tag: Tag,
    /// The source location of the allocation, if known.
    pub at: Option<&'static Location<'static>>,
}

impl MemorySnapshot {
    /// Creates a snapshot of these events, in their order, and of the blocks that are live after
    /// the last one. Events of other memory than device memory are ignored.
    #[must_use]
    pub fn of(events: impl IntoIterator<Item = Event>) -> Self {
        let mut snapshot = Self::default();
        for event in events {
            match event.place {
                MemoryLocation::Device(DeviceId(device)) if device < MAX_DEVICES => {
                    snapshot.devices.entry(device).or_default().apply(&event);
                }
                _ => {}
            }
        }
        snapshot
    }

    /// Adds a live block that may be older than the first event. It is ignored if the events
    /// mention its address or have a live block that overlaps it.
    #[doc(hidden)]
    pub fn hold(&mut self, device: DeviceId, block: HeldBlock) {
        let HeldBlock { address, bytes, stream, tag, at } = block;
        if device.0 < MAX_DEVICES {
            let live = LiveBlock { bytes, stream, tag, freed: false, at };
            self.devices.entry(device.0).or_default().add_live(address, live);
        }
    }

    /// Adds a setting to `allocator_settings`, which the viewer shows verbatim.
    pub fn set(&mut self, name: &str, value: impl ToString) {
        self.settings.insert(name.to_owned(), value.to_string());
    }

    /// Writes the snapshot to a file, which is created or truncated.
    ///
    /// # Errors
    /// The operating system's error. The file is then incomplete.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.write_to(BufWriter::new(File::create(path)?))
    }

    /// Writes the snapshot as a pickle.
    ///
    /// # Errors
    /// The error of the writer.
    pub fn write_to(&self, out: impl Write) -> io::Result<()> {
        let traces: Vec<_> = self
            .devices
            .iter()
            .map(|(&device, history)| (device, DeviceTrace::of(history)))
            .collect();
        let lists = self.devices.keys().next_back().map_or(0, |last| last + 1);
        let mut pickler = Pickler::begin(out)?;
        pickler.dict(|p| {
            p.word(Word::Segments)?;
            let segments = traces.iter().flat_map(|(device, trace)| {
                trace.segments.iter().map(move |range| (device, range))
            });
            p.list(segments, |p, (device, range)| {
                write_segment(p, *device, range, &self.devices[device])
            })?;
            p.word(Word::DeviceTraces)?;
            p.list(0..lists, |p, device| {
                let trace =
                    traces.iter().find(|(other, _)| *other == device).map(|(_, trace)| trace);
                let categories = trace.is_some_and(DeviceTrace::has_categories);
                p.list(trace.into_iter().flat_map(|trace| &trace.entries), |p, entry| {
                    write_entry(p, entry, categories)
                })
            })?;
            p.memo_text("allocator_settings")?;
            p.dict(|p| {
                p.memo_text("allocator")?;
                p.text(concat!("aquifer ", env!("CARGO_PKG_VERSION")))?;
                self.settings.iter().try_for_each(|(name, value)| {
                    p.text(name)?;
                    p.text(value)
                })
            })?;
            p.memo_text("external_annotations")?;
            p.list::<()>([], |_, ()| Ok(()))
        })?;
        pickler.end()
    }
}

/// The entries of one device, with the segments that contain their blocks.
struct DeviceTrace {
    entries: Vec<TraceEntry>,
    segments: Vec<Range<u64>>,
}

impl DeviceTrace {
    fn of(history: &History) -> Self {
        let mut segments = SegmentRanges::default();
        for range in history.preexisting() {
            segments.add(range);
        }
        let mut entries = Vec::with_capacity(history.entries().len());
        for entry in history.entries() {
            if entry.action == Word::Alloc {
                for gap in segments.add(&(entry.address..entry.address.saturating_add(entry.bytes)))
                {
                    let (address, bytes) = (gap.start, gap.end - gap.start);
                    entries.push(TraceEntry {
                        action: Word::SegmentMap,
                        address,
                        bytes,
                        tag: Tag::NONE,
                        ..*entry
                    });
                }
            }
            entries.push(*entry);
        }
        Self { entries, segments: segments.ranges().collect() }
    }

    /// Returns whether to write tags. The viewer expects entries without a tag next to entries with
    /// one.
    fn has_categories(&self) -> bool {
        let tagged = self.entries.iter().filter(|entry| entry.tag != Tag::NONE).count();
        tagged > 0 && tagged < self.entries.len()
    }
}

/// Writes one entry of a trace.
fn write_entry<W: Write>(
    p: &mut Pickler<W>,
    entry: &TraceEntry,
    categories: bool,
) -> io::Result<()> {
    p.dict(|p| {
        p.word(Word::Action)?;
        p.word(entry.action)?;
        if entry.action == Word::Oom {
            p.memo_text("device_free")?;
            p.int(0)?;
        } else {
            p.word(Word::Addr)?;
            p.int(entry.address)?;
        }
        p.word(Word::Size)?;
        p.int(entry.bytes)?;
        p.word(Word::Stream)?;
        p.int(entry.stream.into())?;
        p.memo_text("time_us")?;
        p.int(entry.at_ns / 1000)?;
        if categories {
            p.memo_text("category")?;
            // The viewer's own name for a missing category.
            p.memo_text(if entry.tag == Tag::NONE { "unknown" } else { entry.tag.name() })?;
        }
        Ok(())
    })
}

/// Writes a segment with its blocks and the gaps between them.
fn write_segment<W: Write>(
    p: &mut Pickler<W>,
    device: u32,
    range: &Range<u64>,
    history: &History,
) -> io::Result<()> {
    let (mut parts, mut at) = (Vec::new(), range.start);
    let mut blocks = history.live_in(range.clone()).peekable();
    let (mut allocated, mut active, mut requested, mut stream) = (0, 0, 0, None);
    while let Some((address, live)) = blocks.next() {
        if at < address {
            parts.push((at, address - at, None));
        }
        let room = blocks.peek().map_or(range.end, |(next, _)| *next) - address;
        let size =
            live.bytes.checked_next_multiple_of(SIZE_UNIT).map_or(room, |size| size.min(room));
        parts.push((address, size, Some(live)));
        at = address + size;
        active += size;
        allocated += if live.freed { 0 } else { size };
        requested += live.bytes;
        stream.get_or_insert(live.stream);
    }
    if at < range.end {
        parts.push((at, range.end - at, None));
    }
    let number = |p: &mut Pickler<W>, name, value| {
        p.memo_text(name)?;
        p.int(value)
    };
    p.dict(|p| {
        number(p, Word::Device.text(), device.into())?;
        number(p, Word::Address.text(), range.start)?;
        number(p, "total_size", range.end - range.start)?;
        number(p, "allocated_size", allocated)?;
        number(p, "active_size", active)?;
        number(p, Word::RequestedSize.text(), requested)?;
        number(p, Word::Stream.text(), stream.unwrap_or(0).into())?;
        p.memo_text("segment_type")?;
        p.memo_text("large")?;
        p.memo_text("segment_pool_id")?;
        p.pair(0, 0)?;
        p.memo_text("is_expandable")?;
        p.boolean(true)?;
        p.memo_text("frames")?;
        p.list::<()>([], |_, ()| Ok(()))?;
        p.word(Word::Blocks)?;
        p.list(parts, |p, (address, size, live)| {
            p.dict(|p| {
                number(p, Word::Address.text(), address)?;
                number(p, Word::Size.text(), size)?;
                number(p, Word::RequestedSize.text(), live.map_or(0, |live| live.bytes))?;
                p.word(Word::State)?;
                p.memo_text(match live {
                    None => Word::Inactive.text(),
                    Some(LiveBlock { freed: true, .. }) => Word::ActivePendingFree.text(),
                    Some(_) => Word::ActiveAllocated.text(),
                })?;
                if let Some(live) = live {
                    number(p, Word::Stream.text(), live.stream.into())?;
                }
                p.memo_text("frames")?;
                p.list(live.and_then(|live| live.at.map(|at| (at, live.tag))), |p, (at, tag)| {
                    p.dict(|p| {
                        p.memo_text("filename")?;
                        p.text(at.file())?;
                        number(p, "line", at.line().into())?;
                        p.memo_text("name")?;
                        p.memo_text(tag.name())
                    })
                })
            })
        })
    })
}

/// The granularity of segments, which is that of mapped memory.
const GRANULARITY: u64 = 2 << 20;

/// Disjoint ranges that do not touch each other, by start.
#[derive(Clone, Default, Debug)]
struct SegmentRanges(BTreeMap<u64, u64>);

impl SegmentRanges {
    /// Adds the aligned units that contain this range. Returns the newly covered ranges.
    fn add(&mut self, range: &Range<u64>) -> Vec<Range<u64>> {
        let (mut start, mut end) = (
            range.start / GRANULARITY * GRANULARITY,
            range.end.div_ceil(GRANULARITY).saturating_mul(GRANULARITY),
        );
        debug_assert!(start.is_multiple_of(GRANULARITY) && start <= range.start);
        let mut gaps = Vec::new();
        let mut at = start;
        // Ranges that end at `start` or later. The last one that begins before it may be among
        // them.
        let first = self
            .0
            .range(..=start)
            .next_back()
            .filter(|(_, to)| **to >= start)
            .map(|(from, _)| *from);
        let touching: Vec<_> =
            self.0.range(first.unwrap_or(start)..=end).map(|(from, to)| (*from, *to)).collect();
        for (from, to) in touching {
            if at < from {
                gaps.push(at..from);
            }
            at = at.max(to);
            (start, end) = (start.min(from), end.max(to));
            self.0.remove(&from);
        }
        if at < end {
            gaps.push(at..end);
        }
        debug_assert!(start <= range.start && range.end <= end, "the range is covered");
        self.0.insert(start, end);
        gaps
    }

    /// An iterator over the ranges, lowest first.
    fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.0.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_new_range_is_returned_once_and_neighbours_are_merged() {
        let mut state = 1_u64;
        let mut below = |most: u64| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % most
        };
        for _ in 0..200 {
            let (mut segments, mut grains) = (SegmentRanges::default(), BTreeSet::new());
            for _ in 0..20 {
                let start = below(40) * (GRANULARITY / 2) + below(GRANULARITY / 2);
                let range = start..start + 1 + below(5 * GRANULARITY);
                let added: Vec<_> = segments
                    .add(&range)
                    .into_iter()
                    .flat_map(|gap| gap.step_by(GRANULARITY as usize))
                    .collect();
                let new: Vec<_> = (range.start / GRANULARITY..range.end.div_ceil(GRANULARITY))
                    .map(|grain| grain * GRANULARITY)
                    .filter(|grain| grains.insert(*grain))
                    .collect();
                assert_eq!(added, new);
            }
            let ranges: Vec<_> = segments.ranges().collect();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            let all: Vec<_> =
                ranges.into_iter().flat_map(|range| range.step_by(GRANULARITY as usize)).collect();
            assert_eq!(all, grains.into_iter().collect::<Vec<_>>());
        }
    }
}
