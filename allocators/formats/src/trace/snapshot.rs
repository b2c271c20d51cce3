//! Memory snapshots, as written by `torch.cuda.memory._dump_snapshot()` and by
//! [`MemorySnapshot`](crate::MemorySnapshot).
//!
//! - `device_traces` is a list of events for each device, oldest first. `alloc`, `free_requested`
//!   and `free_completed` become `a`, `f` and `c`. Events of segments, `oom`, `snapshot` and
//!   user-defined events are skipped.
//! - `segments` has the blocks that are live when the snapshot is taken.
//!
//! The events come from a ring, so the first ones may belong to a program that had already been
//! running. The blocks that existed then are inferred from later events:
//!
//! | observation | state at the start |
//! |---|---|
//! | `free_requested` of an address without an allocation | live, with the event's size, stream |
//! | `free_completed` of such an address | freed, with a use still open |
//! | an active block in `segments` without events | live, or freed with an open use |
//!
//! All of these are allocated before the first event: first the freed ones, then the live ones. An
//! active block at an address whose last event is its completion was allocated after recording
//! stopped, and is left out.
//!
//! Addresses are reused, so each allocation gets a new name. Streams are numbered in order of
//! appearance.

use super::{
    Fault, MAX_BLOCK, SnapshotFacts, Trace, TraceError, TraceFormat,
    builder::Builder,
    error::{Name, SnapshotError, SnapshotPath},
};
use crate::pickle::{self, Objects, Value, Word};
use std::{
    collections::{BTreeMap, HashMap},
    io::BufRead,
    ops::Range,
};

fn missing(place: SnapshotPath, part: &'static str, expected: &'static str) -> SnapshotError {
    SnapshotError::Missing { place, part, expected }
}

/// Reads a snapshot. `device` selects a device. The default is the one with the most events.
///
/// # Errors
/// [`Fault::Snapshot`] with the first error, or any error of a trace.
pub(super) fn read(reader: &mut dyn BufRead, device: Option<u32>) -> Result<Trace, TraceError> {
    parse(reader, device).map_err(TraceError::whole)
}

fn parse(reader: &mut dyn BufRead, device: Option<u32>) -> Result<Trace, Fault> {
    let (objects, root) =
        pickle::read(reader).map_err(|e| Fault::Snapshot(Box::new(SnapshotError::Pickle(e))))?;
    let snapshot =
        Snapshot::of(&objects, root, device).map_err(|e| Fault::Snapshot(Box::new(e)))?;
    let history = snapshot.history().map_err(|e| Fault::Snapshot(Box::new(e)))?;
    history.build(snapshot.device, snapshot.traces.len())
}

/// The part of a snapshot that belongs to one device.
pub(crate) struct Snapshot<'a> {
    pub(crate) objects: &'a Objects,
    segments: &'a [Value],
    pub(crate) traces: &'a [Value],
    pub(crate) device: usize,
    pub(crate) events: &'a [Value],
}

/// An operation on a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Deed {
    Allocate,
    Free,
    Complete,
}

/// The known state of a block.
#[derive(Clone, Copy, Debug)]
struct Life {
    /// A new id per allocation, since addresses are reused.
    id: u64,
    bytes: u64,
    state: Lived,
    /// The event that caused this state.
    since: usize,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Lived {
    Live,
    Freed,
    Done,
}

/// A block that existed before the first event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Early {
    pub(crate) id: u64,
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    /// Whether it had already been freed.
    pub(crate) freed: bool,
    /// Its call stack, if the snapshot has one. Only with details.
    pub(crate) stack: Value,
}

/// An event that is played.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlayedEvent {
    pub(crate) deed: Deed,
    pub(crate) id: u64,
    pub(crate) bytes: u64,
    pub(crate) stream: u64,
    /// The index of the event in the device's trace.
    pub(crate) at: u32,
}

/// Everything that is played.
pub(crate) struct Playback {
    early: Vec<Early>,
    pub(crate) events: Vec<PlayedEvent>,
    skipped: u64,
    /// The bytes that blocks occupy, by their names, as far as the snapshot tells.
    pub(crate) occupied: HashMap<u64, u64>,
}

/// An active block of `segments`.
struct ActiveBlock {
    requested: u64,
    occupied: u64,
    stream: u64,
    freed: bool,
    stack: Value,
}

impl<'a> Snapshot<'a> {
    pub(crate) fn of(
        objects: &'a Objects,
        root: Value,
        device: Option<u32>,
    ) -> Result<Self, SnapshotError> {
        if !objects.is_dict(root) {
            return Err(missing(SnapshotPath::Root, "", "dictionary"));
        }
        let part = |word: Word| {
            let list = objects.get(root, word).and_then(|value| objects.list(value));
            list.ok_or_else(|| missing(SnapshotPath::Root, word.text(), "a list"))
        };
        let (segments, traces) = (part(Word::Segments)?, part(Word::DeviceTraces)?);
        let events = |device: usize| {
            let list = traces.get(device).and_then(|value| objects.list(*value));
            list.ok_or_else(|| missing(SnapshotPath::Trace(device), "", "a list of events"))
        };
        let mut most = (0, 0);
        for device in 0..traces.len() {
            let count = events(device)?.len();
            if count > most.1 {
                most = (device, count);
            }
        }
        let device = match device {
            Some(asked) if (asked as usize) < traces.len() => asked as usize,
            Some(asked) => return Err(SnapshotError::NoDevice { asked, count: traces.len() }),
            None => most.0,
        };
        if most.1 == 0 {
            return Err(SnapshotError::NoTrace);
        }
        Ok(Self { objects, segments, traces, device, events: events(device)? })
    }

    /// Returns a whole number from a dictionary.
    fn number(&self, value: Value, word: Word, place: SnapshotPath) -> Result<u64, SnapshotError> {
        match self.objects.get(value, word) {
            // Stream handles and addresses are stored as signed numbers and used as bit patterns.
            Some(Value::Int(number)) => Ok(number as u64),
            _ => Err(missing(place, word.text(), "a whole number")),
        }
    }

    fn bytes(&self, value: Value, word: Word, place: SnapshotPath) -> Result<u64, SnapshotError> {
        let bytes = self.number(value, word, place)?;
        match bytes {
            1..=MAX_BLOCK => Ok(bytes),
            _ => Err(missing(place, word.text(), "the size of a block")),
        }
    }

    pub(crate) fn history(&self) -> Result<Playback, SnapshotError> {
        let mut lives: HashMap<u64, Life> = HashMap::new();
        let (early, events) = (Vec::new(), Vec::new());
        let mut history = Playback { early, events, skipped: 0, occupied: HashMap::new() };
        let mut next = 0;
        let mut mint = || {
            next += 1;
            next
        };
        for (at, &event) in self.events.iter().enumerate() {
            let place = SnapshotPath::Event(self.device, at);
            let action = match self.objects.get(event, Word::Action) {
                Some(Value::Word(action)) => action,
                _ => return Err(missing(place, "action", "one that is known")),
            };
            let deed = match action {
                Word::Alloc => Deed::Allocate,
                Word::FreeRequested => Deed::Free,
                Word::FreeCompleted => Deed::Complete,
                Word::Oom => {
                    history.skipped += 1;
                    continue;
                }
                Word::SegmentAlloc
                | Word::SegmentFree
                | Word::SegmentMap
                | Word::SegmentUnmap
                | Word::Snapshot
                | Word::UserDefined
                | Word::WorkspaceSnapshot => continue,
                _ => return Err(missing(place, "action", "one that is known")),
            };
            let address = self.number(event, Word::Addr, place)?;
            let bytes = self.bytes(event, Word::Size, place)?;
            let stream = self.number(event, Word::Stream, place)?;
            let order =
                |done, was, since| SnapshotError::Order { place, address, done, was, since };
            let known = lives.get(&address).copied().filter(|life| life.state != Lived::Done);
            if let (Some(life), true) = (known, deed != Deed::Allocate)
                && life.bytes != bytes
            {
                return Err(SnapshotError::Size { place, address, bytes: (life.bytes, bytes) });
            }
            let (id, state) = match (deed, known.map(|life| (life, life.state))) {
                (Deed::Allocate, None) => (mint(), Lived::Live),
                (Deed::Allocate, Some((life, Lived::Live))) => {
                    return Err(order("allocated", "live", life.since));
                }
                (Deed::Allocate, Some((life, _))) => {
                    return Err(order("allocated", "waiting for its last use", life.since));
                }
                (Deed::Free, Some((life, Lived::Live))) => (life.id, Lived::Freed),
                (Deed::Free, Some((life, _))) => return Err(order("freed", "freed", life.since)),
                (Deed::Complete, Some((life, Lived::Freed))) => (life.id, Lived::Done),
                (Deed::Complete, Some((life, _))) => {
                    return Err(order("completed", "live", life.since));
                }
                (Deed::Free | Deed::Complete, None) => {
                    // The trace contains the block's allocation, so this is a second free and no
                    // block from before the trace.
                    if let Some(done) = lives.get(&address) {
                        let what = if deed == Deed::Free { "freed" } else { "completed" };
                        return Err(order(what, "done", done.since));
                    }
                    let id = mint();
                    let freed = deed == Deed::Complete;
                    let stack = Value::Other;
                    history.early.push(Early { id, address, bytes, stream, freed, stack });
                    (id, if freed { Lived::Done } else { Lived::Freed })
                }
            };
            lives.insert(address, Life { id, bytes, state, since: at });
            // As many events as objects, which are fewer.
            history.events.push(PlayedEvent { deed, id, bytes, stream, at: at as u32 });
        }
        for (address, block) in self.active(&lives, &mut history.occupied)? {
            let ActiveBlock { requested: bytes, occupied, stream, freed, stack } = block;
            let id = mint();
            history.occupied.insert(id, occupied);
            history.early.push(Early { id, address, bytes, stream, freed, stack });
        }
        Ok(history)
    }

    /// Returns the ranges of the device's segments, as far as they name them.
    pub(crate) fn segment_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let own = |&&segment: &&Value| match self.objects.get(segment, Word::Device) {
            Some(Value::Int(device)) => device == self.device as i64,
            _ => true,
        };
        let number = |value, word| match self.objects.get(value, word) {
            Some(Value::Int(number)) => Some(number as u64),
            _ => None,
        };
        self.segments.iter().filter(own).filter_map(move |&segment| {
            let start = number(segment, Word::Address)?;
            let blocks =
                self.objects.get(segment, Word::Blocks).and_then(|list| self.objects.list(list))?;
            let bytes = blocks
                .iter()
                .try_fold(0_u64, |sum, &block| sum.checked_add(number(block, Word::Size)?))?;
            Some(start..start.checked_add(bytes)?)
        })
    }

    /// Returns the active blocks of the device without events, by address. Adds the bytes that the
    /// others occupy to `occupied`.
    fn active(
        &self,
        lives: &HashMap<u64, Life>,
        occupied: &mut HashMap<u64, u64>,
    ) -> Result<BTreeMap<u64, ActiveBlock>, SnapshotError> {
        let mut untold = BTreeMap::new();
        for (at, &segment) in self.segments.iter().enumerate() {
            let place = SnapshotPath::Segment(at);
            // Snapshots of a single device do not name it.
            let device = match self.objects.get(segment, Word::Device) {
                Some(_) => self.number(segment, Word::Device, place)?,
                None => self.device as u64,
            };
            if device != self.device as u64 {
                continue;
            }
            let blocks =
                self.objects.get(segment, Word::Blocks).and_then(|value| self.objects.list(value));
            let blocks = blocks.ok_or_else(|| missing(place, "blocks", "a list"))?;
            let stream = self.number(segment, Word::Stream, place)?;
            // Older snapshots have no block addresses; they follow from the sizes.
            let mut next = self.number(segment, Word::Address, place)?;
            for (which, &block) in blocks.iter().enumerate() {
                let place = SnapshotPath::Block(at, which);
                let bytes = self.bytes(block, Word::Size, place)?;
                let address = match self.objects.get(block, Word::Address) {
                    Some(_) => self.number(block, Word::Address, place)?,
                    None => next,
                };
                next = address.wrapping_add(bytes);
                let freed = match self.objects.get(block, Word::State) {
                    Some(Value::Word(Word::ActiveAllocated)) => false,
                    Some(Value::Word(Word::ActivePendingFree | Word::ActiveAwaitingFree)) => true,
                    Some(Value::Word(Word::Inactive)) => continue,
                    _ => return Err(missing(place, "state", "one that is known")),
                };
                if let Some(life) = lives.get(&address) {
                    if life.state != Lived::Done && bytes >= life.bytes {
                        occupied.insert(life.id, bytes);
                    }
                    continue;
                }
                let asked = match self.objects.get(block, Word::RequestedSize) {
                    Some(_) => self.bytes(block, Word::RequestedSize, place)?,
                    None => bytes,
                };
                // A segment of this library has blocks of several streams, so each block names its
                // own.
                let stream = match self.objects.get(block, Word::Stream) {
                    Some(_) => self.number(block, Word::Stream, place)?,
                    None => stream,
                };
                let stack = self.objects.get(block, Word::Frames).unwrap_or(Value::Other);
                let (requested, occupied) = (asked, bytes.max(asked));
                let block = ActiveBlock { requested, occupied, stream, freed, stack };
                if untold.insert(address, block).is_some() {
                    return Err(missing(place, "address", "that of one block"));
                }
            }
        }
        Ok(untold)
    }
}

impl Playback {
    /// Returns the blocks that existed before the first event, in the order in which they are
    /// allocated: freed blocks first, so that live bytes never exceed their real peak.
    pub(crate) fn early(&self) -> impl Iterator<Item = &Early> {
        let of = |freed| self.early.iter().filter(move |early| early.freed == freed);
        of(true).chain(of(false))
    }

    fn build(self, device: usize, devices: usize) -> Result<Trace, Fault> {
        let mut builder = Builder::new();
        for &Early { id, bytes, stream, freed, .. } in self.early() {
            builder.allocate(0, Name::Id(id), bytes, stream)?;
            if freed {
                builder.free(0, Name::Id(id), bytes, stream)?;
            }
        }
        for (row, PlayedEvent { deed, id, bytes, stream, .. }) in (1..).zip(self.events) {
            match deed {
                Deed::Allocate => builder.allocate(row, Name::Id(id), bytes, stream)?,
                Deed::Free => builder.free(row, Name::Id(id), bytes, stream)?,
                Deed::Complete => builder.complete(row, Name::Id(id), bytes, stream)?,
            }
        }
        (0..self.skipped).for_each(|_| builder.skip());
        let mut trace = builder.finish(TraceFormat::Snapshot)?;
        trace.snapshot = Some(SnapshotFacts {
            device,
            devices,
            blocks_at_start: self.early.len() as u64,
            bytes_at_start: self.early.iter().fold(0, |sum, early| sum.saturating_add(early.bytes)),
        });
        Ok(trace)
    }
}

#[cfg(test)]
mod tests;
