//! Memory snapshots, as written by `torch.cuda.memory._dump_snapshot()`.
//!
//! - `device_traces` is a list of events for each device, oldest first. `alloc`, `free_requested`
//!   and `free_completed` become `a`, `f` and `c`. Events of segments, `oom`, `snapshot` and
//!   user-defined events are skipped. `annotate` (2.14) attaches text to a live block.
//! - `segments` has the blocks that are live when the snapshot is taken. It is all that
//!   `torch.cuda.memory_snapshot()` returns.
//! - `host_traces` and `host_segments` (2.14) are the same for pinned memory.
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
//! stopped, and is left out. A snapshot without events has such blocks alone, in the order of their
//! addresses.
//!
//! A recording may leave out kinds of events (`skip_actions`, 2.10). What is missing is inferred as
//! late as it can have happened:
//!
//! | left out | inferred |
//! |---|---|
//! | `free_requested` | with the completion |
//! | `free_completed` | with the free, unless `segments` has the block waiting for its last use |
//! | both | when other blocks are allocated at the same addresses, or at the end if `segments` has no block there |
//!
//! What contradicts the events before it, or is unknown, is passed over and counted.
//!
//! Addresses are reused, so each allocation gets a new name. Streams are numbered in order of
//! appearance.

use super::{
    MAX_BLOCK, TraceDevice,
    error::{Fault, SnapshotError, SnapshotPath},
    skips::Skips,
};
use crate::pickle::{Objects, Value, Word};
use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    ops::Range,
};

fn missing(place: SnapshotPath, part: &'static str, expected: &'static str) -> SnapshotError {
    SnapshotError::Missing { place, part, expected }
}

fn invalid(error: SnapshotError) -> Fault {
    Fault::Snapshot(Box::new(error))
}

/// The lists of a snapshot.
pub(crate) struct SnapshotParts<'a> {
    objects: &'a Objects,
    segments: &'a [Value],
    traces: &'a [Value],
    host_segments: &'a [Value],
    host_events: Vec<Value>,
    /// The number of GPUs.
    gpus: usize,
}

/// The part of a snapshot that belongs to one device.
pub(crate) struct Snapshot<'a> {
    pub(crate) objects: &'a Objects,
    /// Segments with their places in the snapshot.
    segments: Vec<(usize, Value)>,
    pub(crate) device: TraceDevice,
    pub(crate) events: Cow<'a, [Value]>,
}

/// An operation on a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Deed {
    Allocate,
    Free,
    Complete,
    /// Text is attached to it.
    Annotate,
}

/// A block that is live, or freed with an open use.
#[derive(Clone, Copy, Debug)]
struct Life {
    /// A new id per allocation, since addresses are reused.
    id: u64,
    bytes: u64,
    stream: u64,
    is_freed: bool,
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
    /// Its call stack, if the snapshot has one.
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
#[derive(Default)]
pub(crate) struct Playback {
    early: Vec<Early>,
    pub(crate) events: Vec<PlayedEvent>,
    /// The bytes that blocks occupy, by their names, as far as the snapshot tells.
    pub(crate) occupied: HashMap<u64, u64>,
    /// Whether the snapshot has no events.
    pub(crate) is_still: bool,
    pub(crate) skips: Skips,
    next: u64,
}

/// The state of a playback.
#[derive(Default)]
struct Player {
    played: Playback,
    /// The blocks that are not complete, by address. They do not overlap.
    lives: BTreeMap<u64, Life>,
    /// Addresses whose last block is complete.
    done: HashSet<u64>,
}

/// The kind of events and blocks without a field that they need.
pub(crate) const INCOMPLETE: &str = "events and blocks without their fields";

impl<'a> SnapshotParts<'a> {
    /// Finds the lists of a snapshot, which may be that of its segments alone.
    pub(crate) fn of(objects: &'a Objects, root: Value) -> Result<Self, Fault> {
        let mut parts = Self {
            objects,
            segments: &[],
            traces: &[],
            host_segments: &[],
            host_events: Vec::new(),
            gpus: 0,
        };
        match objects.list(root) {
            Some(segments) => {
                let is_segment = |&value: &Value| objects.get(value, Word::Blocks).is_some();
                if !segments.iter().all(is_segment) {
                    return Err(invalid(missing(SnapshotPath::Root, "", "dictionary")));
                }
                parts.segments = segments;
            }
            None if objects.is_dict(root) => {
                let mut is_any = false;
                let mut part = |word: Word| match objects.get(root, word) {
                    None | Some(Value::Other) => Ok(&[][..]),
                    Some(value) => {
                        is_any = true;
                        objects.list(value).ok_or_else(|| {
                            invalid(missing(SnapshotPath::Root, word.text(), "a list"))
                        })
                    }
                };
                parts.segments = part(Word::Segments)?;
                parts.traces = part(Word::DeviceTraces)?;
                parts.host_segments = part(Word::HostSegments)?;
                // One list of events, or one for each part of the allocator.
                for &value in part(Word::HostTraces)? {
                    match objects.list(value) {
                        Some(events) => parts.host_events.extend_from_slice(events),
                        None => parts.host_events.push(value),
                    }
                }
                if !is_any {
                    let part = Word::Segments.text();
                    return Err(invalid(missing(SnapshotPath::Root, part, "a list")));
                }
            }
            None => return Err(invalid(missing(SnapshotPath::Root, "", "dictionary"))),
        }
        let last = parts.segments.iter().filter_map(|&segment| parts.device_of(segment)).max();
        let named = last.map_or(0, |last| (last as usize).saturating_add(1));
        let unnamed = usize::from(!parts.segments.is_empty());
        parts.gpus = parts.traces.len().max(named).max(unnamed);
        Ok(parts)
    }

    /// Returns the device of a segment, if it names one.
    fn device_of(&self, segment: Value) -> Option<u32> {
        match self.objects.get(segment, Word::Device) {
            Some(Value::Int(device)) => u32::try_from(device).ok(),
            _ => None,
        }
    }

    fn events(&self, device: u32) -> &'a [Value] {
        let list = self.traces.get(device as usize).and_then(|value| self.objects.list(*value));
        list.unwrap_or_default()
    }

    /// Returns the devices that have events or segments, and how many of each.
    pub(crate) fn devices(&self) -> BTreeMap<TraceDevice, (usize, usize)> {
        let mut devices: BTreeMap<TraceDevice, (usize, usize)> = BTreeMap::new();
        for (device, _) in (0..).zip(self.traces) {
            let events = self.events(device).len();
            if events > 0 {
                devices.entry(TraceDevice::Gpu(device)).or_default().0 = events;
            }
        }
        for &segment in self.segments {
            let device =
                self.device_of(segment).or(if devices.is_empty() { Some(0) } else { None });
            if let Some(device) = device {
                devices.entry(TraceDevice::Gpu(device)).or_default().1 += 1;
            }
        }
        if !self.host_events.is_empty() || !self.host_segments.is_empty() {
            let host = (self.host_events.len(), self.host_segments.len());
            devices.insert(TraceDevice::Host(None), host);
        }
        devices
    }

    /// Returns the devices that have blocks, and pinned memory if there is any.
    pub(crate) fn with_blocks(&self) -> Vec<TraceDevice> {
        let has_blocks = |device: &TraceDevice| self.of_device(*device).play().allocations() > 0;
        self.devices().into_keys().filter(has_blocks).collect()
    }

    /// Selects a device. The default is the one with the most events, or without any, with the most
    /// segments. It is pinned memory only if there is nothing else.
    pub(crate) fn select(&self, asked: Option<TraceDevice>) -> Result<Snapshot<'a>, Fault> {
        let devices = self.devices();
        let there = || devices.keys().copied().collect();
        let device = match asked {
            Some(TraceDevice::Gpu(asked)) if asked as usize >= self.gpus => {
                return Err(invalid(SnapshotError::NoDevice { asked, count: self.gpus }));
            }
            Some(asked @ TraceDevice::Host(_)) if !devices.contains_key(&asked) => {
                return Err(Fault::NoSuchMemory { asked, there: there() });
            }
            Some(asked) => asked,
            None => {
                let rank = |(device, counts): &(&TraceDevice, &(usize, usize))| {
                    let is_gpu = matches!(device, TraceDevice::Gpu(_));
                    (is_gpu, **counts, std::cmp::Reverse(**device))
                };
                let most = devices.iter().max_by_key(rank);
                *most.ok_or_else(|| invalid(SnapshotError::NoTrace))?.0
            }
        };
        Ok(self.of_device(device))
    }

    /// Returns the pinned memory, if there is any.
    pub(crate) fn pinned(&self) -> Option<Snapshot<'a>> {
        let host = TraceDevice::Host(None);
        self.devices().contains_key(&host).then(|| self.of_device(host))
    }

    /// Returns the part of a device, or of pinned memory.
    pub(crate) fn of_device(&self, device: TraceDevice) -> Snapshot<'a> {
        let (segments, events) = match device {
            TraceDevice::Gpu(device) => {
                // Snapshots of a single device do not name it.
                let own = |&segment: &Value| self.device_of(segment).is_none_or(|of| of == device);
                let segments = self.segments.iter().copied().enumerate();
                let segments = segments.filter(|(_, segment)| own(segment)).collect();
                (segments, Cow::Borrowed(self.events(device)))
            }
            TraceDevice::Host(_) => {
                let segments = self.host_segments.iter().copied().enumerate().collect();
                (segments, Cow::Owned(self.host_events.clone()))
            }
        };
        Snapshot { objects: self.objects, segments, device, events }
    }
}

impl Snapshot<'_> {
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

    /// Returns a whole number, or 0 if there is none.
    fn number_or_zero(&self, value: Value, word: Word) -> u64 {
        self.number(value, word, SnapshotPath::Root).unwrap_or(0)
    }

    /// Plays all events, and finds the blocks that existed before them.
    pub(crate) fn play(&self) -> Playback {
        let mut player = Player::default();
        let has = |word| {
            let is =
                |&event: &Value| self.objects.get(event, Word::Action) == Some(Value::Word(word));
            self.events.iter().any(is)
        };
        let (has_requests, has_completions) = (has(Word::FreeRequested), has(Word::FreeCompleted));
        let pending = self.pending();
        for (at, &event) in self.events.iter().enumerate() {
            let place = SnapshotPath::Event(self.device, at);
            let deed = match self.objects.get(event, Word::Action) {
                Some(Value::Word(Word::Alloc)) => Deed::Allocate,
                Some(Value::Word(Word::FreeRequested)) => Deed::Free,
                Some(Value::Word(Word::FreeCompleted)) => Deed::Complete,
                Some(Value::Word(Word::Annotate)) => Deed::Annotate,
                Some(Value::Word(
                    Word::Oom
                    | Word::SegmentAlloc
                    | Word::SegmentFree
                    | Word::SegmentMap
                    | Word::SegmentUnmap
                    | Word::Snapshot
                    | Word::UserDefined
                    | Word::WorkspaceSnapshot,
                )) => continue,
                _ => {
                    let fault = invalid(missing(place, "action", "one that is known"));
                    player.played.skips.add_error("events of unknown actions", None, fault);
                    continue;
                }
            };
            // As many events as objects, which are fewer.
            let now = at as u32;
            let address = match self.number(event, Word::Addr, place) {
                Ok(address) => address,
                Err(error) => {
                    player.played.skips.add_error(INCOMPLETE, None, invalid(error));
                    continue;
                }
            };
            let bytes = self.bytes(event, Word::Size, place);
            let stream = self.number_or_zero(event, Word::Stream);
            match (deed, bytes) {
                (Deed::Annotate, _) => player.annotate(now, address),
                (_, Err(error)) => player.played.skips.add_error(INCOMPLETE, None, invalid(error)),
                (Deed::Allocate, Ok(bytes)) => player.allocate(now, address, bytes, stream),
                (Deed::Free, Ok(bytes)) => {
                    let completes = !has_completions && !pending.contains(&address);
                    player.free(now, address, bytes, stream, completes);
                }
                (Deed::Complete, Ok(bytes)) => {
                    player.complete(now, address, bytes, stream, has_requests);
                }
            }
        }
        self.add_active(&mut player, !has_requests && !has_completions);
        player.played.is_still = self.events.is_empty();
        player.played
    }

    /// Returns the addresses of the blocks that are freed and have an open use at the end.
    fn pending(&self) -> HashSet<u64> {
        let blocks = self.segments.iter().filter_map(|&(_, segment)| {
            self.objects.get(segment, Word::Blocks).and_then(|list| self.objects.list(list))
        });
        let is_pending = |&&block: &&Value| {
            let state = self.objects.get(block, Word::State);
            let pending = [Word::ActivePendingFree, Word::ActiveAwaitingFree];
            pending.into_iter().any(|word| state == Some(Value::Word(word)))
        };
        let pending = blocks.flatten().filter(is_pending);
        pending.map(|&block| self.number_or_zero(block, Word::Address)).collect()
    }

    /// Returns the ranges of the segments, as far as they name them.
    pub(crate) fn segment_ranges(&self) -> impl Iterator<Item = Range<u64>> {
        let number = |value, word| match self.objects.get(value, word) {
            Some(Value::Int(number)) => Some(number as u64),
            _ => None,
        };
        self.segments.iter().filter_map(move |&(_, segment)| {
            let start = number(segment, Word::Address)?;
            let blocks =
                self.objects.get(segment, Word::Blocks).and_then(|list| self.objects.list(list))?;
            let bytes = blocks
                .iter()
                .try_fold(0_u64, |sum, &block| sum.checked_add(number(block, Word::Size)?))?;
            Some(start..start.checked_add(bytes)?)
        })
    }

    /// Adds the active blocks of the segments that have no events, and what the others occupy.
    /// Without any frees in the events, ends the blocks that are not active any more.
    fn add_active(&self, player: &mut Player, has_no_frees: bool) {
        let mut untold: BTreeMap<u64, Early> = BTreeMap::new();
        let mut occupied: HashMap<u64, u64> = HashMap::new();
        let last = self.events.len().saturating_sub(1) as u32;
        for &(at, segment) in &self.segments {
            let blocks =
                self.objects.get(segment, Word::Blocks).and_then(|value| self.objects.list(value));
            let Some(blocks) = blocks else {
                let error = missing(SnapshotPath::Segment(at), "blocks", "a list");
                player.played.skips.add_error(INCOMPLETE, None, invalid(error));
                continue;
            };
            let stream = self.number_or_zero(segment, Word::Stream);
            // Older snapshots have no block addresses; they follow from the sizes.
            let mut next = self.number(segment, Word::Address, SnapshotPath::Segment(at)).ok();
            for (which, &block) in blocks.iter().enumerate() {
                let place = SnapshotPath::Block(at, which);
                let parsed = self.bytes(block, Word::Size, place).and_then(|bytes| {
                    let own = self.number(block, Word::Address, place);
                    Ok((own.or_else(|error| next.ok_or(error))?, bytes))
                });
                let (address, bytes) = match parsed {
                    Ok(parsed) => parsed,
                    Err(error) => {
                        next = None;
                        player.played.skips.add_error(INCOMPLETE, None, invalid(error));
                        continue;
                    }
                };
                next = Some(address.wrapping_add(bytes));
                let freed = match self.objects.get(block, Word::State) {
                    Some(Value::Word(Word::ActiveAllocated)) => false,
                    Some(Value::Word(Word::ActivePendingFree | Word::ActiveAwaitingFree)) => true,
                    Some(Value::Word(Word::Inactive)) => {
                        if has_no_frees {
                            player.end_overlapping(last, address, bytes);
                        }
                        continue;
                    }
                    _ => {
                        let fault = invalid(missing(place, "state", "one that is known"));
                        player.played.skips.add_error("blocks in unknown states", None, fault);
                        continue;
                    }
                };
                if let Some(life) = player.lives.get(&address) {
                    if bytes >= life.bytes {
                        player.played.occupied.insert(life.id, bytes);
                    }
                    continue;
                }
                if player.done.contains(&address) {
                    continue;
                }
                let requested = self.bytes(block, Word::RequestedSize, place).unwrap_or(bytes);
                // A segment of this library has blocks of several streams, so each block names its
                // own.
                let own = self.number(block, Word::Stream, place);
                let (id, stream) = (player.played.mint(), own.unwrap_or(stream));
                let stack = self.objects.get(block, Word::Frames).unwrap_or(Value::Other);
                let early = Early { id, address, bytes: requested, stream, freed, stack };
                if untold.insert(address, early).is_some() {
                    player.played.skips.add("blocks at the address of another");
                }
                occupied.insert(id, bytes.max(requested));
            }
        }
        for early in untold.into_values() {
            player.played.occupied.insert(early.id, occupied[&early.id]);
            player.played.early.push(early);
        }
    }
}

impl Player {
    fn push(&mut self, at: u32, deed: Deed, life: &Life) {
        let &Life { id, bytes, stream, .. } = life;
        self.played.events.push(PlayedEvent { deed, id, bytes, stream, at });
    }

    fn allocate(&mut self, at: u32, address: u64, bytes: u64, stream: u64) {
        self.end_overlapping(at, address, bytes);
        let life = Life { id: self.played.mint(), bytes, stream, is_freed: false };
        self.done.remove(&address);
        self.lives.insert(address, life);
        self.push(at, Deed::Allocate, &life);
    }

    /// Ends the blocks in a range, whose frees were not recorded.
    fn end_overlapping(&mut self, at: u32, address: u64, bytes: u64) {
        let end = address.saturating_add(bytes);
        while let Some((&start, &life)) = self.lives.range(..end).next_back()
            && start.saturating_add(life.bytes) > address
        {
            self.played.skips.add("frees that are missing");
            if !life.is_freed {
                self.push(at, Deed::Free, &life);
            }
            self.push(at, Deed::Complete, &life);
            self.lives.remove(&start);
            self.done.insert(start);
        }
    }

    /// Returns a block that is freed or completed. It may be older than the first event.
    fn ended(&mut self, address: u64, bytes: u64, stream: u64, was_freed: bool) -> Option<Life> {
        if let Some(&life) = self.lives.get(&address) {
            if life.bytes != bytes {
                self.played.skips.add("sizes of frees that differ from the allocation's");
            }
            return Some(Life { stream, ..life });
        }
        // The trace contains the block's allocation, so this is a second free and no block from
        // before the trace.
        if self.done.contains(&address) {
            self.played.skips.add("frees of freed blocks");
            return None;
        }
        let id = self.played.mint();
        let stack = Value::Other;
        self.played.early.push(Early { id, address, bytes, stream, freed: was_freed, stack });
        Some(Life { id, bytes, stream, is_freed: was_freed })
    }

    fn free(&mut self, at: u32, address: u64, bytes: u64, stream: u64, completes: bool) {
        let Some(life) = self.ended(address, bytes, stream, false) else { return };
        if life.is_freed {
            self.played.skips.add("frees of freed blocks");
            return;
        }
        self.push(at, Deed::Free, &life);
        self.lives.insert(address, Life { is_freed: true, ..life });
        if completes {
            self.complete(at, address, life.bytes, stream, true);
        }
    }

    fn complete(&mut self, at: u32, address: u64, bytes: u64, stream: u64, has_requests: bool) {
        let Some(life) = self.ended(address, bytes, stream, has_requests) else { return };
        if !life.is_freed {
            self.played.skips.add("requests of frees that are missing");
            self.push(at, Deed::Free, &life);
        }
        self.push(at, Deed::Complete, &life);
        self.lives.remove(&address);
        self.done.insert(address);
    }

    fn annotate(&mut self, at: u32, address: u64) {
        if let Some((&start, &life)) = self.lives.range(..=address).next_back()
            && address - start < life.bytes
        {
            self.push(at, Deed::Annotate, &life);
        }
    }
}

impl Playback {
    fn mint(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Returns the blocks that existed before the first event, in the order in which they are
    /// allocated: freed blocks first, so that live bytes never exceed their real peak.
    pub(crate) fn early(&self) -> impl Iterator<Item = &Early> {
        let of = |freed| self.early.iter().filter(move |early| early.freed == freed);
        of(true).chain(of(false))
    }

    /// Returns the number of blocks.
    fn allocations(&self) -> u64 {
        let is_allocation = |event: &&PlayedEvent| event.deed == Deed::Allocate;
        (self.early.len() + self.events.iter().filter(is_allocation).count()) as u64
    }

    /// Returns what is said about it.
    pub(crate) fn notes(&self) -> Vec<String> {
        let still = "the snapshot has no events: its blocks are shown as allocations, by address";
        self.is_still.then(|| still.to_owned()).into_iter().chain(self.skips.note()).collect()
    }
}

#[cfg(test)]
mod tests;
