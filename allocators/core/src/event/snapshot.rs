//! Writes a record of events as a memory snapshot of PyTorch's, for the viewers that people have.
//!
//! What `torch.cuda.memory._dump_snapshot()` writes, <https://pytorch.org/memory_viz> draws when it is dropped there, and
//! `python -m torch.cuda._memory_viz` prints. A [`MemorySnapshot`] is the same of any pool: made of
//! the events of a [`RingSink`](super::RingSink), or by `aquifer replay TRACE --snapshot FILE` of
//! any trace.
//!
//! # The format
//! A pickle of protocol 4 with one dictionary:
//!
//! | key | holds |
//! |---|---|
//! | `device_traces` | for each device, by its ordinal, a list of what happened, the oldest first |
//! | `segments` | the memory that blocks lay in, and the blocks that are there at the end |
//! | `allocator_settings` | names and values: whose memory it is |
//! | `external_annotations` | an empty list |
//!
//! What happened is a dictionary with `action`, `addr`, `size`, `stream`, `time_us`, and
//! `category`, which is the tag:
//!
//! | our [`Action`] | `action` |
//! |---|---|
//! | [`Allocate`](Action::Allocate) | `alloc`, with the bytes that were asked for, as PyTorch tells them |
//! | [`Free`](Action::Free) | `free_requested` |
//! | [`Complete`](Action::Complete) | `free_completed` |
//! | [`Fail`](Action::Fail) | `oom`; `device_free`, which an event does not know, is 0 |
//! | `Grow`, `Reap`, `Move`, `Adopt`, `Finding` | nothing: they have no addresses |
//!
//! `segment_map` is told in front of the first block that lies in 2 MiB no block lay in before, so
//! segments are the memory that blocks have touched, in whole multiples of 2 MiB. It is less than
//! what the pool held: that is in its statistics. What is between blocks is `inactive`. A segment
//! of ours belongs to no stream alone, so each block says its own beside the segment's; PyTorch's
//! tools pass that key over.

mod cover;
mod history;
mod pickle;
mod word;

pub use word::Word;

use super::{Event, Place};
use crate::{DeviceId, Tag};
use cover::Cover;
use history::{History, Live, Told};
use pickle::Pickler;
use std::{
    collections::BTreeMap,
    fs::File,
    io::{self, BufWriter, Write},
    ops::Range,
    panic::Location,
    path::Path,
};

#[cfg(doc)]
use super::Action;

/// Devices that are told, by their ordinals: a list of them begins with the first.
const DEVICES: u32 = 1024;
/// What a block's size is rounded to where there is room behind it.
const UNIT: u64 = 512;

/// A memory snapshot as PyTorch's memory viewer and `_memory_viz.py` read it.
///
/// ```
/// use aquifer_core::event::{Action, MemorySnapshot, Place, Recorder, RingSink};
/// use aquifer_core::{DeviceId, Tag};
/// use std::sync::Arc;
/// let ring = Arc::new(RingSink::new(1 << 10));
/// let recorder = Recorder::new(ring.clone());
/// let place = Place::Device(DeviceId(0));
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
/// use aquifer_core::event::{HeldBlock, MemorySnapshot};
/// use aquifer_core::{DeviceId, Tag};
/// let mut snapshot = MemorySnapshot::default();
/// let block = HeldBlock { address: 0x7f00_0000_0000, bytes: 1000, stream: 1, tag: Tag::NONE, at: None };
/// snapshot.hold(DeviceId(0), block);
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HeldBlock {
    /// Its first address.
    pub address: u64,
    /// Bytes that were asked for.
    pub bytes: u64,
    /// The number of the stream that it belongs to.
    pub stream: u32,
    /// Whose it is.
    pub tag: Tag,
    /// The line that asked for it, if that is known.
    pub at: Option<&'static Location<'static>>,
}

impl MemorySnapshot {
    /// A snapshot of these events, in their order, and of the blocks that are there behind the last
    /// of them. Events of other memory than devices' are passed over.
    #[must_use]
    pub fn of(events: impl IntoIterator<Item = Event>) -> Self {
        let mut snapshot = Self::default();
        for event in events {
            match event.place {
                Place::Device(DeviceId(device)) if device < DEVICES => {
                    snapshot.devices.entry(device).or_default().take(&event);
                }
                _ => {}
            }
        }
        snapshot
    }

    /// Adds a block that is live and may be older than the first event. Where events tell of its
    /// address, or of a live block that it would lie over, they count.
    pub fn hold(&mut self, device: DeviceId, block: HeldBlock) {
        let HeldBlock { address, bytes, stream, tag, at } = block;
        if device.0 < DEVICES {
            let live = Live { bytes, stream, tag, freed: false, at };
            self.devices.entry(device.0).or_default().hold(address, live);
        }
    }

    /// Puts a setting under `allocator_settings`, which the viewer shows as it is.
    pub fn set(&mut self, name: &str, value: impl ToString) {
        self.settings.insert(name.to_owned(), value.to_string());
    }

    /// Writes the snapshot to a file, which is created or truncated.
    ///
    /// # Errors
    /// The operating system's; the file is then cut off.
    pub fn save(&self, path: impl AsRef<Path>) -> io::Result<()> {
        self.write_to(BufWriter::new(File::create(path)?))
    }

    /// Writes the pickle.
    ///
    /// # Errors
    /// The writer's.
    pub fn write_to(&self, out: impl Write) -> io::Result<()> {
        let drawn: Vec<_> =
            self.devices.iter().map(|(&device, history)| (device, Drawn::of(history))).collect();
        let lists = self.devices.keys().next_back().map_or(0, |last| last + 1);
        let mut pickler = Pickler::begin(out)?;
        pickler.dict(|p| {
            p.word(Word::Segments.text())?;
            let segments = drawn.iter().flat_map(|(device, drawn)| {
                drawn.segments.iter().map(move |range| (device, range))
            });
            p.list(segments, |p, (device, range)| {
                segment(p, *device, range, &self.devices[device])
            })?;
            p.word(Word::DeviceTraces.text())?;
            p.list(0..lists, |p, device| {
                let drawn =
                    drawn.iter().find(|(other, _)| *other == device).map(|(_, drawn)| drawn);
                let categories = drawn.is_some_and(Drawn::has_categories);
                p.list(drawn.into_iter().flat_map(|d| &d.told), |p, told| {
                    entry(p, told, categories)
                })
            })?;
            p.word("allocator_settings")?;
            p.dict(|p| {
                p.word("allocator")?;
                p.text(concat!("aquifer ", env!("CARGO_PKG_VERSION")))?;
                self.settings.iter().try_for_each(|(name, value)| {
                    p.text(name)?;
                    p.text(value)
                })
            })?;
            p.word("external_annotations")?;
            p.list::<()>([], |_, ()| Ok(()))
        })?;
        pickler.end()
    }
}

/// The events of one device with the segments that they lie in.
struct Drawn {
    told: Vec<Told>,
    segments: Vec<Range<u64>>,
}

impl Drawn {
    fn of(history: &History) -> Self {
        let mut cover = Cover::default();
        for range in history.early() {
            cover.add(range);
        }
        let mut told = Vec::with_capacity(history.told().len());
        for one in history.told() {
            if one.action == Word::Alloc {
                for gap in cover.add(&(one.address..one.address.saturating_add(one.bytes))) {
                    let (address, bytes) = (gap.start, gap.end - gap.start);
                    told.push(Told {
                        action: Word::SegmentMap,
                        address,
                        bytes,
                        tag: Tag::NONE,
                        ..*one
                    });
                }
            }
            told.push(*one);
        }
        Self { told, segments: cover.ranges().collect() }
    }

    /// Whether tags are told. The viewer wants something that has none beside what has one.
    fn has_categories(&self) -> bool {
        let tagged = self.told.iter().filter(|told| told.tag != Tag::NONE).count();
        tagged > 0 && tagged < self.told.len()
    }
}

/// Something that happened.
fn entry<W: Write>(p: &mut Pickler<W>, told: &Told, categories: bool) -> io::Result<()> {
    p.dict(|p| {
        p.word(Word::Action.text())?;
        p.word(told.action.text())?;
        if told.action == Word::Oom {
            p.word("device_free")?;
            p.int(0)?;
        } else {
            p.word(Word::Addr.text())?;
            p.int(told.address)?;
        }
        p.word(Word::Size.text())?;
        p.int(told.bytes)?;
        p.word(Word::Stream.text())?;
        p.int(told.stream.into())?;
        p.word("time_us")?;
        p.int(told.at_ns / 1000)?;
        if categories {
            p.word("category")?;
            // The viewer's own name for what has none.
            p.word(if told.tag == Tag::NONE { "unknown" } else { told.tag.name() })?;
        }
        Ok(())
    })
}

/// A segment with its blocks and what is between them.
fn segment<W: Write>(
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
        let size = live.bytes.checked_next_multiple_of(UNIT).map_or(room, |size| size.min(room));
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
        p.word(name)?;
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
        p.word("segment_type")?;
        p.word("large")?;
        p.word("segment_pool_id")?;
        p.pair(0, 0)?;
        p.word("is_expandable")?;
        p.truth(true)?;
        p.word("frames")?;
        p.list::<()>([], |_, ()| Ok(()))?;
        p.word(Word::Blocks.text())?;
        p.list(parts, |p, (address, size, live)| {
            p.dict(|p| {
                number(p, Word::Address.text(), address)?;
                number(p, Word::Size.text(), size)?;
                number(p, Word::RequestedSize.text(), live.map_or(0, |live| live.bytes))?;
                p.word(Word::State.text())?;
                p.word(match live {
                    None => Word::Inactive.text(),
                    Some(Live { freed: true, .. }) => Word::ActivePendingFree.text(),
                    Some(_) => Word::ActiveAllocated.text(),
                })?;
                if let Some(live) = live {
                    number(p, Word::Stream.text(), live.stream.into())?;
                }
                p.word("frames")?;
                p.list(live.and_then(|live| live.at.map(|at| (at, live.tag))), |p, (at, tag)| {
                    p.dict(|p| {
                        p.word("filename")?;
                        p.text(at.file())?;
                        number(p, "line", at.line().into())?;
                        p.word("name")?;
                        p.word(tag.name())
                    })
                })
            })
        })
    })
}
