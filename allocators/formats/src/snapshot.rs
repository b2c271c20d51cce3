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
//! Segments are the memory that blocks have used, in multiples of 2 MiB, and exist from the first
//! entry on. This is less than the memory that the pool held, which its statistics report. Memory
//! between blocks is `inactive`. Our segments are not bound to one stream, so each block has its
//! own `stream` in addition to the segment's. PyTorch's tools ignore that key.
//!
//! # What is missing in the events
//! A ring keeps only the last events, so earlier ones are missing, and a ring that was emptied
//! during writes may lack some in between. A viewer replays a snapshot backwards from its end and
//! stops at the first inconsistency, so missing entries are reconstructed:
//!
//! - A free or a completion of an address that no earlier event named is written as it is: the
//!   block was live, or freed, before the first event.
//! - Before an allocation over a block that is still live, the end of that block is written.
//! - Before a completion of a block that was not freed, its free is written.
//! - Any other event of an unknown block is dropped.

mod pickler;

use aquifer_core::{Action, DeviceId, Event, Tag, event::MemoryLocation};
use pickler::Pickler;
use std::{
    collections::{BTreeMap, HashSet},
    fs, io,
    ops::Range,
    panic::Location,
    path::Path,
};

/// The maximum number of devices, since the list contains every ordinal from 0 on.
const MAX_DEVICES: u32 = 1024;
/// Block sizes are rounded up to this if there is room.
const SIZE_UNIT: u64 = 512;
/// The granularity of segments, which is that of mapped memory.
const GRANULARITY: u64 = 2 << 20;

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
/// let pickle = MemorySnapshot::of(ring.take()).to_pickle();      // or `save("memory.pickle")`
/// assert!(pickle.starts_with(&[0x80, 4]) && pickle.ends_with(b"."));
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

impl HeldBlock {
    fn range(&self) -> Range<u64> {
        self.address..self.address.saturating_add(self.bytes)
    }
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
        if device.0 < MAX_DEVICES {
            self.devices.entry(device.0).or_default().hold(block, false);
        }
    }

    /// Adds a setting to `allocator_settings`, which the viewer shows verbatim.
    pub fn set(&mut self, name: &str, value: impl ToString) {
        self.settings.insert(name.to_owned(), value.to_string());
    }

    /// Writes the snapshot to a file, which is created or truncated.
    ///
    /// # Errors
    /// The operating system's error. The file may then be incomplete.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        fs::write(path, self.to_pickle())
    }

    /// Returns the snapshot as a pickle.
    #[must_use]
    pub fn to_pickle(&self) -> Vec<u8> {
        let mut pickler = Pickler::new();
        pickler.dict(|p| {
            p.word("segments");
            let of_device = |(device, history): (_, &'_ History)| {
                history.segments().into_iter().map(move |range| (device, range))
            };
            p.list(self.devices.iter().flat_map(of_device), |p, (device, range)| {
                write_segment(p, *device, range, &self.devices[device]);
            });
            p.word("device_traces");
            let lists = self.devices.keys().next_back().map_or(0, |last| last + 1);
            p.list(0..lists, |p, device| {
                let entries = self.devices.get(&device).map_or(&[][..], |of| &of.entries);
                // The viewer expects entries without a tag next to entries with one.
                let tagged = entries.iter().filter(|entry| entry.block.tag != Tag::NONE).count();
                let categories = tagged > 0 && tagged < entries.len();
                p.list(entries, |p, entry| write_entry(p, entry, categories));
            });
            p.word("allocator_settings");
            p.dict(|p| {
                p.word("allocator");
                p.text(concat!("aquifer ", env!("CARGO_PKG_VERSION")));
                for (name, value) in &self.settings {
                    p.text(name);
                    p.text(value);
                }
            });
            p.word("external_annotations");
            p.list::<()>([], |_, ()| {});
        });
        pickler.end()
    }
}

/// An entry of a snapshot.
#[derive(Clone, Copy, Debug)]
struct TraceEntry {
    action: &'static str,
    at_ns: u64,
    block: HeldBlock,
}

/// A block that exists at the end.
#[derive(Clone, Copy, Debug)]
struct LiveBlock {
    block: HeldBlock,
    /// Whether it is freed and only pending on a use.
    freed: bool,
}

/// The history of the blocks of one device. Existing blocks never overlap.
#[derive(Clone, Default, Debug)]
struct History {
    entries: Vec<TraceEntry>,
    live: BTreeMap<u64, LiveBlock>,
    /// Every address that an entry names.
    known_addresses: HashSet<u64>,
    /// The ranges of all blocks that ever existed.
    used: Vec<Range<u64>>,
}

impl History {
    /// Processes the next event.
    fn apply(&mut self, event: &Event) {
        let Event { at_ns, action, stream, address, bytes, tag, .. } = *event;
        let block = HeldBlock { address, bytes, stream, tag, at: None };
        match action {
            Action::Fail => self.entries.push(TraceEntry { action: "oom", at_ns, block }),
            Action::Allocate if bytes > 0 => {
                for live in self.overlapping(&block.range()) {
                    self.end(live, at_ns);
                }
                self.insert(LiveBlock { block, freed: false });
                self.push("alloc", at_ns, block);
            }
            Action::Free => {
                self.hold(block, false);
                if let Some(live) = self.live.get_mut(&address)
                    && !live.freed
                {
                    live.freed = true;
                    let block = live.block;
                    self.push("free_requested", at_ns, block);
                }
            }
            Action::Complete => {
                self.hold(block, true);
                if let Some(&live) = self.live.get(&address) {
                    self.end(live, at_ns);
                }
            }
            // All others are of no use to a viewer, since they have no addresses.
            _ => {}
        }
    }

    /// Adds a block that may have existed before the first event, unless events contradict it: they
    /// name its address, or have a block that overlaps it.
    fn hold(&mut self, block: HeldBlock, freed: bool) {
        let is_possible = block.bytes > 0
            && !self.known_addresses.contains(&block.address)
            && self.overlapping(&block.range()).is_empty();
        if is_possible {
            self.insert(LiveBlock { block, freed });
        }
    }

    fn insert(&mut self, live: LiveBlock) {
        debug_assert!(self.overlapping(&live.block.range()).is_empty(), "blocks are disjoint");
        self.used.push(live.block.range());
        self.live.insert(live.block.address, live);
    }

    fn overlapping(&self, range: &Range<u64>) -> Vec<LiveBlock> {
        let before = self.live.range(..range.end).rev().map(|(_, &live)| live);
        // Existing blocks are disjoint, so the first one that ends before the range is the last to
        // visit.
        before.take_while(|live| live.block.range().end > range.start).collect()
    }

    /// Records the end of a block, and its free if that was not seen.
    fn end(&mut self, LiveBlock { block, freed }: LiveBlock, at_ns: u64) {
        if !freed {
            self.push("free_requested", at_ns, block);
        }
        self.push("free_completed", at_ns, block);
        let removed = self.live.remove(&block.address);
        debug_assert!(removed.is_some_and(|live| live.block == block), "the block was live");
    }

    fn push(&mut self, action: &'static str, at_ns: u64, block: HeldBlock) {
        self.known_addresses.insert(block.address);
        self.entries.push(TraceEntry { action, at_ns, block });
    }

    /// Returns the aligned ranges that contain all blocks. They are disjoint, and the lowest comes
    /// first.
    fn segments(&self) -> Vec<Range<u64>> {
        let mut used = self.used.clone();
        used.sort_unstable_by_key(|range| range.start);
        let mut segments = Vec::<Range<u64>>::new();
        for range in used {
            let start = range.start / GRANULARITY * GRANULARITY;
            let end = range.end.div_ceil(GRANULARITY).saturating_mul(GRANULARITY);
            match segments.last_mut() {
                Some(last) if start <= last.end => last.end = last.end.max(end),
                _ => segments.push(start..end),
            }
        }
        debug_assert!(segments.iter().all(|range| range.start < range.end));
        segments
    }
}

/// Writes one entry of a trace.
fn write_entry(p: &mut Pickler, entry: &TraceEntry, categories: bool) {
    let TraceEntry { action, at_ns, block } = *entry;
    p.dict(|p| {
        p.word("action");
        p.word(action);
        match action {
            "oom" => number(p, "device_free", 0),
            _ => number(p, "addr", block.address),
        }
        number(p, "size", block.bytes);
        number(p, "stream", block.stream.into());
        number(p, "time_us", at_ns / 1000);
        if categories {
            p.word("category");
            // The viewer's own name for a missing category.
            p.word(if block.tag == Tag::NONE { "unknown" } else { block.tag.name() });
        }
    });
}

/// Writes a segment with its blocks and the gaps between them.
fn write_segment(p: &mut Pickler, device: u32, range: Range<u64>, history: &History) {
    // Each with its address and size.
    let (mut parts, mut at) = (Vec::new(), range.start);
    let (mut allocated, mut active, mut requested, mut stream) = (0, 0, 0, None);
    let mut blocks = history.live.range(range.clone()).peekable();
    while let Some((&address, live)) = blocks.next() {
        if at < address {
            parts.push((at, address - at, None));
        }
        let room = blocks.peek().map_or(range.end, |(next, _)| **next) - address;
        let size = live.block.bytes.checked_next_multiple_of(SIZE_UNIT);
        let size = size.map_or(room, |size| size.min(room));
        debug_assert!(size >= live.block.bytes, "a block ends before the next one");
        parts.push((address, size, Some(live)));
        at = address + size;
        active += size;
        allocated += if live.freed { 0 } else { size };
        requested += live.block.bytes;
        stream.get_or_insert(live.block.stream);
    }
    if at < range.end {
        parts.push((at, range.end - at, None));
    }
    p.dict(|p| {
        number(p, "device", device.into());
        number(p, "address", range.start);
        number(p, "total_size", range.end - range.start);
        number(p, "allocated_size", allocated);
        number(p, "active_size", active);
        number(p, "requested_size", requested);
        number(p, "stream", stream.unwrap_or(0).into());
        p.word("segment_type");
        p.word("large");
        p.word("segment_pool_id");
        p.pair(0, 0);
        p.word("is_expandable");
        p.yes();
        p.word("frames");
        p.list::<()>([], |_, ()| {});
        p.word("blocks");
        p.list(parts, |p, (address, size, live)| write_part(p, address, size, live));
    });
}

/// Writes a block of a segment, or a gap.
fn write_part(p: &mut Pickler, address: u64, size: u64, live: Option<&LiveBlock>) {
    p.dict(|p| {
        number(p, "address", address);
        number(p, "size", size);
        number(p, "requested_size", live.map_or(0, |live| live.block.bytes));
        p.word("state");
        p.word(match live {
            None => "inactive",
            Some(LiveBlock { freed: true, .. }) => "active_pending_free",
            Some(_) => "active_allocated",
        });
        if let Some(live) = live {
            number(p, "stream", live.block.stream.into());
        }
        p.word("frames");
        let location = live.and_then(|live| Some((live.block.at?, live.block.tag)));
        p.list(location, |p, (at, tag)| {
            p.dict(|p| {
                p.word("filename");
                p.text(at.file());
                number(p, "line", at.line().into());
                p.word("name");
                p.word(tag.name());
            });
        });
    });
}

fn number(p: &mut Pickler, name: &'static str, value: u64) {
    p.word(name);
    p.int(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_the_units_that_contain_blocks_and_neighbours_are_one() {
        let unit = |n: u64| n * GRANULARITY;
        let used =
            vec![unit(9)..unit(9) + 1, unit(3) - 1..unit(4) + 1, unit(2)..unit(2) + 5, 0..unit(1)];
        let history = History { used, ..History::default() };
        assert_eq!(history.segments(), [0..unit(1), unit(2)..unit(5), unit(9)..unit(10)]);
    }
}
