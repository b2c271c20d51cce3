//! The forms of input: this library's own rows, logs of other programs, PyTorch's snapshots, and
//! generated traces.

use super::{
    ExtentTree, HistoryClock, HistoryMark, HistoryPhase, MarkKind, MemoryHistory,
    builder::{HistoryBuilder, InputFacts, Origin, ReadDevice, StreamNames},
    made,
    rmm::{RmmColumns, RmmReader},
};
use crate::{
    pickle::{self, Objects, Value, Word},
    trace::{
        Trace, TraceDevice, TraceError, TraceFormat,
        error::{Fault, Name, SnapshotError},
        events::{Columns, RowAction},
        named_blocks::short,
        skips::{Skips, UNREADABLE},
        snapshot::{Deed, Early, INCOMPLETE, Playback, PlayedEvent, Snapshot, SnapshotParts},
        source::TraceSource,
    },
};
use aquifer_core::event::BlockKind;
use std::{
    cmp::Reverse,
    collections::{BTreeMap, HashMap},
    io::BufRead,
    mem,
    path::Path,
};

impl Trace {
    /// Reads and checks the file at `path`, the standard input for `-`, or [generates](super::made) the
    /// trace that `path` names. `device` selects a device. The default is the one with the most
    /// events.
    ///
    /// # Errors
    /// [`TraceError`] with the first invalid row, also if a device is selected and the trace has
    /// none.
    pub fn read(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        Self::of_devices(read(path, device.map(TraceDevice::Gpu))?)
    }

    /// Reads and checks the contents of a file.
    ///
    /// # Errors
    /// As [`read`](Trace::read).
    pub fn from_reader(
        reader: impl BufRead + 'static,
        device: Option<u32>,
    ) -> Result<Self, TraceError> {
        let device = device.map(TraceDevice::Gpu);
        Self::of_devices(parse(TraceSource::new(reader)?, device)?)
    }

    /// Returns the trace of the first of several devices, which is the selected one, or the one
    /// with the most steps.
    fn of_devices(read: Vec<ReadDevice>) -> Result<Self, TraceError> {
        let blocks = read.iter().map(|device| device.blocks() as u64).sum();
        let Some(ReadDevice { builder, facts }) = read.into_iter().next() else {
            return Err(TraceError::whole(Fault::NoAllocation));
        };
        let device = match facts.device {
            Some(TraceDevice::Host(_)) => {
                return Err(TraceError::whole(Fault::OnlyPinned { blocks }));
            }
            Some(TraceDevice::Gpu(device)) => Some(device),
            None => None,
        };
        let mut trace = builder.into_trace(facts.format).map_err(TraceError::whole)?;
        trace.notes = facts.notes;
        trace.devices = facts.devices.iter().filter_map(TraceDevice::gpu).collect();
        if let (Some(device), 2..) = (device, trace.devices.len()) {
            trace.notes.push(format!(
                "the trace has memory of {} devices, of which device {device} is read; \
                 --device-index picks another",
                trace.devices.len()
            ));
        }
        if trace.devices.len() < facts.devices.len() {
            trace.notes.push("pinned host memory in the trace is left out".to_owned());
        }
        (trace.device, trace.unreadable) = (device, facts.unreadable);
        Ok(trace)
    }
}

impl MemoryHistory {
    /// Reads and checks the file at `path`, the standard input for `-`, or generates the workload
    /// that `path` names. `device` selects a device, or pinned memory. The default is the device
    /// with the most events, and pinned memory only if there is no device.
    ///
    /// # Errors
    /// As [`Trace::read`], but an input with pinned memory alone is no error.
    pub fn read(path: &Path, device: Option<TraceDevice>) -> Result<Self, TraceError> {
        Self::read_each(path, device).and_then(first)
    }

    /// As [`read`](Self::read), but without a selected device it returns a history for each device
    /// that has blocks and for the pinned memory of each node. The first is the one that `read`
    /// returns.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn read_each(path: &Path, device: Option<TraceDevice>) -> Result<Vec<Self>, TraceError> {
        finish(read(path, device)?)
    }

    /// Reads and checks the contents of a file.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_reader(
        reader: impl BufRead + 'static,
        device: Option<TraceDevice>,
    ) -> Result<Self, TraceError> {
        Self::each_from_reader(reader, device).and_then(first)
    }

    /// Reads and checks the contents of a file, and returns what [`read_each`](Self::read_each)
    /// does.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn each_from_reader(
        reader: impl BufRead + 'static,
        device: Option<TraceDevice>,
    ) -> Result<Vec<Self>, TraceError> {
        finish(parse(TraceSource::new(reader)?, device)?)
    }
}

fn finish(devices: Vec<ReadDevice>) -> Result<Vec<MemoryHistory>, TraceError> {
    let histories = devices.into_iter().map(|device| device.builder.finish(device.facts));
    histories.collect::<Result<_, _>>().map_err(TraceError::whole)
}

fn first(histories: Vec<MemoryHistory>) -> Result<MemoryHistory, TraceError> {
    histories.into_iter().next().ok_or_else(|| TraceError::whole(Fault::NoAllocation))
}

/// Reads a file, the standard input for `-`, or generates a workload: each device that has blocks,
/// or one of them. Devices come before pinned memory, and those with more steps before others.
pub(crate) fn read(
    path: &Path,
    device: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, TraceError> {
    match made::read(path) {
        Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
        Some(made) => Ok(vec![made?]),
        None => parse(TraceSource::open(path)?, device),
    }
}

/// As [`read`], of the contents of a file.
pub(crate) fn parse(
    mut source: TraceSource,
    device: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, TraceError> {
    if source.begins_with(pickle::MAGIC)? {
        return of_snapshot(source.bytes(), device).map_err(TraceError::whole);
    }
    let (row, header) = source.next_row()?.ok_or(TraceError::whole(Fault::Empty))?;
    let check = |tells_devices: bool| match device {
        Some(_) if !tells_devices => Err(TraceError::whole(Fault::NoDevices)),
        _ => Ok(()),
    };
    if let Some(columns) = Columns::of(header) {
        check(columns.tells_devices())?;
        return of_events(source, &columns, device);
    }
    let Some(columns) = RmmColumns::of(header) else {
        let fault = Fault::Header { found: header.to_owned() };
        return Err(TraceError { row: Some(row), fault });
    };
    check(columns.tells_devices())?;
    of_rmm(source, columns, device)
}

/// Reads the rows of this library, each device into a builder of its own.
fn of_events(
    mut source: TraceSource,
    columns: &Columns,
    asked: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, TraceError> {
    let mut builders: BTreeMap<TraceDevice, HistoryBuilder> = BTreeMap::new();
    let (mut origin, mut time) = (None, 0);
    while let Some((row, text)) = source.next_row()? {
        let at = |fault| TraceError { row: Some(row), fault };
        let parsed = columns.parse(text).map_err(at)?;
        // Racing threads may write rows whose times go back.
        time = time.max(parsed.t_us.saturating_sub(*origin.get_or_insert(parsed.t_us)));
        let now = (row, time as f64);
        let builder = builders
            .entry(parsed.device)
            .or_insert_with(|| HistoryBuilder::new(StreamNames::Numbers));
        builder.at(now.1);
        let (id, bytes, stream) = (parsed.id, parsed.bytes, parsed.stream);
        let kind = match parsed.action {
            RowAction::Allocate => {
                let origin = Origin {
                    address: parsed.address,
                    kind: columns.tells_kinds().then_some(parsed.kind),
                    occupied: None,
                    tag: builder.texts.intern(&parsed.tag),
                    thread: builder.texts.intern(parsed.thread),
                    stack: 0,
                    metadata: 0,
                };
                builder.allocate(now, id, bytes, stream, &origin).map_err(at)?;
                continue;
            }
            RowAction::Free => {
                builder.free(now, id, bytes, stream).map_err(at)?;
                continue;
            }
            RowAction::Complete => {
                builder.complete(now, id, bytes, stream).map_err(at)?;
                continue;
            }
            RowAction::Limit => {
                builder.limits.push((now.1, Some(bytes).filter(|bytes| *bytes > 0)));
                continue;
            }
            RowAction::Outside => {
                builder.outside.push((now.1, bytes));
                continue;
            }
            RowAction::Grow => MarkKind::Grow,
            RowAction::Release => MarkKind::Release,
            RowAction::Move => MarkKind::Move,
            RowAction::Fail => MarkKind::Fail,
            RowAction::Finding => MarkKind::Finding,
            RowAction::DropPlan => MarkKind::User,
        };
        let text = if parsed.action == RowAction::DropPlan { "plan dropped" } else { &parsed.tag };
        let mark = HistoryMark {
            time: now.1,
            row: short(row),
            kind,
            bytes,
            address: parsed.address,
            device_free: None,
            text: builder.texts.intern(text),
            refused_by: builder.texts.intern(&parsed.refused_by),
        };
        builder.mark(mark).map_err(at)?;
    }
    let facts = InputFacts {
        tells_kinds: columns.tells_kinds(),
        notes: columns.note().into_iter().collect(),
        ..InputFacts::new(TraceFormat::Events, HistoryClock::Microseconds)
    };
    of_devices(builders, &facts, columns.tells_devices(), asked).map_err(TraceError::whole)
}

/// Returns the devices that have blocks, or one of them. `facts` are the same for all.
fn of_devices(
    mut builders: BTreeMap<TraceDevice, HistoryBuilder>,
    facts: &InputFacts,
    tells_devices: bool,
    asked: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, Fault> {
    let pinned = pinned_bytes(&builders);
    builders.retain(|_, builder| builder.blocks() > 0);
    let there: Vec<TraceDevice> = builders.keys().copied().collect();
    if let Some(asked) = asked {
        builders.retain(|device, _| *device == asked);
        if builders.is_empty() {
            return Err(Fault::NoSuchMemory { asked, there });
        }
    }
    let mut builders: Vec<_> = builders.into_iter().collect();
    builders.sort_by_key(|(device, builder)| {
        Reverse((device.gpu().is_some(), builder.block_steps(), Reverse(*device)))
    });
    let with_facts = |(device, builder): (TraceDevice, HistoryBuilder)| {
        let mut facts = facts.clone();
        if tells_devices {
            (facts.device, facts.devices) = (Some(device), there.clone());
            facts.pinned = device.gpu().map(|_| pinned.clone());
        }
        ReadDevice { builder, facts }
    };
    let devices: Vec<_> = builders.into_iter().map(with_facts).collect();
    if devices.is_empty() { Err(Fault::NoAllocation) } else { Ok(devices) }
}

/// Returns the bytes of pinned memory after each change.
fn pinned_bytes(builders: &BTreeMap<TraceDevice, HistoryBuilder>) -> Vec<(f64, u64)> {
    let hosts = builders.iter().filter(|(device, _)| matches!(device, TraceDevice::Host(_)));
    let mut changes: Vec<_> = hosts.flat_map(|(_, builder)| builder.changes()).collect();
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut live = 0_i64;
    let mut levels: Vec<(f64, u64)> = Vec::with_capacity(changes.len());
    for (time, change) in changes {
        live = live.saturating_add(change);
        let level = (time, live.max(0) as u64);
        match levels.last_mut() {
            Some(last) if last.0 == time => *last = level,
            _ => levels.push(level),
        }
    }
    levels
}

/// Reads a log of RAPIDS' memory manager.
fn of_rmm(
    mut source: TraceSource,
    columns: RmmColumns,
    asked: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, TraceError> {
    let tells_devices = columns.tells_devices();
    let RmmReader { builders, skips, .. } = RmmReader::read(columns, &mut source)?;
    let facts = InputFacts {
        notes: skips.note().into_iter().collect(),
        unreadable: skips.count(UNREADABLE),
        ..InputFacts::new(TraceFormat::Rmm, HistoryClock::Microseconds)
    };
    of_devices(builders, &facts, tells_devices, asked)
        .map_err(|fault| skips.explain(TraceError::whole(fault)))
}

/// Reads a memory snapshot of PyTorch.
fn of_snapshot(
    reader: &mut dyn BufRead,
    asked: Option<TraceDevice>,
) -> Result<Vec<ReadDevice>, Fault> {
    let invalid = |error| Fault::Snapshot(Box::new(error));
    let (mut objects, root) =
        pickle::read(reader).map_err(|e| invalid(SnapshotError::Pickle(e)))?;
    let (mut texts, mut stacks) = objects.take_tables();
    let parts = SnapshotParts::of(&objects, root)?;
    let chosen = parts.select(asked)?.device;
    let devices = parts.with_blocks();
    let mut shown = devices.clone();
    if asked.is_some() {
        shown.clear();
    }
    // The one with the most events first, if it has blocks.
    if shown.is_empty() || devices.contains(&chosen) {
        shown.retain(|device| *device != chosen);
        shown.insert(0, chosen);
    }
    let mut read = Vec::with_capacity(shown.len());
    for (&device, left) in shown.iter().zip((0..shown.len()).rev()) {
        let mut builder = HistoryBuilder::new(StreamNames::Handles);
        (builder.texts, builder.stacks) = match left {
            0 => (mem::take(&mut texts), mem::take(&mut stacks)),
            _ => (texts.clone(), stacks.clone()),
        };
        let mut of_device = of_snapshot_device(&parts, device, root, builder)?;
        (of_device.facts.device, of_device.facts.devices) = (Some(device), devices.clone());
        read.push(of_device);
    }
    Ok(read)
}

/// Reads one device of a snapshot, or its pinned memory.
fn of_snapshot_device(
    parts: &SnapshotParts<'_>,
    device: TraceDevice,
    root: Value,
    mut builder: HistoryBuilder,
) -> Result<ReadDevice, Fault> {
    let snapshot = parts.of_device(device);
    let objects = snapshot.objects;
    let mut playback = snapshot.play();
    let clock = SnapshotClock::of(&snapshot);
    play(&snapshot, &mut playback, &clock, &mut builder)?;
    add_phases(&snapshot, root, &clock, &mut playback.skips, &mut builder);
    let host = match snapshot.device {
        TraceDevice::Gpu(_) => parts.pinned(),
        TraceDevice::Host(_) => None,
    };
    let pinned = host.map(|host| {
        let (mut pinned, mut playback) = (HistoryBuilder::new(StreamNames::Handles), host.play());
        play(&host, &mut playback, &clock, &mut pinned)?;
        Ok(pinned_bytes(&BTreeMap::from([(host.device, pinned)])))
    });
    let pinned = pinned.transpose()?;
    let segments: Vec<_> = snapshot.segment_ranges().collect();
    let tells_segments = !segments.is_empty()
        || snapshot.events.iter().any(|&event| segment_change(objects, event).is_some());
    let mapped_at_start = tells_segments.then(|| {
        let mut mapped = ExtentTree::default();
        segments.into_iter().for_each(|range| mapped.insert(range));
        for &event in snapshot.events.iter().rev() {
            let range =
                || Some((number(objects, event, Word::Addr)?, number(objects, event, Word::Size)?));
            let Some((grows, (start, bytes))) = segment_change(objects, event).zip(range()) else {
                continue;
            };
            let range = start..start.saturating_add(bytes);
            if grows {
                mapped.remove(range);
            } else {
                mapped.insert(range);
            }
        }
        mapped.iter().collect()
    });
    let early = if playback.is_still { 0 } else { playback.early().count() };
    let early = (early > 0).then(|| {
        format!("{early} blocks are older than the first event: their origin is not recorded")
    });
    let notes = early.into_iter().chain(playback.notes()).collect();
    if builder.blocks() == 0 {
        return Err(playback.skips.explain(TraceError::whole(Fault::NoAllocation)).fault);
    }
    let new = InputFacts::new(TraceFormat::Snapshot, clock.clock);
    Ok(ReadDevice { builder, facts: InputFacts { mapped_at_start, notes, pinned, ..new } })
}

/// The times of a snapshot's events.
struct SnapshotClock {
    clock: HistoryClock,
    /// The time of the first event.
    first: i64,
}

impl SnapshotClock {
    /// Uses the events' times if they have any. An event without one has that of the event before.
    fn of(snapshot: &Snapshot<'_>) -> Self {
        let time = |&event: &Value| match snapshot.objects.get(event, Word::TimeUs) {
            Some(Value::Int(time)) => Some(time),
            _ => None,
        };
        match snapshot.events.iter().find_map(time) {
            Some(first) => Self { clock: HistoryClock::Microseconds, first },
            None => Self { clock: HistoryClock::Events, first: 0 },
        }
    }

    /// Returns the time of an event that is at `index`, and no earlier than `before`.
    fn time(&self, objects: &Objects, event: Value, index: usize, before: f64) -> f64 {
        let time = match (self.clock, objects.get(event, Word::TimeUs)) {
            (HistoryClock::Microseconds, Some(Value::Int(time))) => {
                time.saturating_sub(self.first) as f64
            }
            (HistoryClock::Microseconds, _) => before,
            (HistoryClock::Events, _) => index as f64,
        };
        time.max(before)
    }
}

/// Plays a snapshot into the builder.
fn play(
    snapshot: &Snapshot<'_>,
    playback: &mut Playback,
    clock: &SnapshotClock,
    builder: &mut HistoryBuilder,
) -> Result<(), Fault> {
    let objects = snapshot.objects;
    let occupied = |id: u64| playback.occupied.get(&id).copied();
    let kind = matches!(snapshot.device, TraceDevice::Host(_)).then_some(BlockKind::Pinned);
    for (place, &Early { id, address, bytes, stream, freed, stack }) in
        (0_u64..).zip(playback.early())
    {
        // Without events, the blocks are the steps.
        let now = if playback.is_still { (place + 1, place as f64) } else { (0, 0.0) };
        if playback.is_still {
            builder.at(now.1);
        }
        let (name, address, occupied) = (Name::Id(id), Some(address), occupied(id));
        let stack = if let Value::Stack(stack) = stack { stack } else { 0 };
        let origin = Origin { address, kind, occupied, tag: 0, thread: 0, stack, metadata: 0 };
        builder.allocate(now, name, bytes, stream, &origin)?;
        if freed {
            builder.free(now, name, bytes, stream)?;
        }
    }
    let mut played = playback.events.iter().peekable();
    let mut time = 0.0;
    for (at, &event) in snapshot.events.iter().enumerate() {
        time = clock.time(objects, event, at, time);
        builder.at(time);
        let now = (at as u64 + 1, time);
        let text = match objects.get(event, Word::UserMetadata) {
            Some(Value::Text(text)) => text,
            _ => 0,
        };
        while let Some(&PlayedEvent { deed, id, bytes, stream, .. }) =
            played.next_if(|played| played.at as usize == at)
        {
            let name = Name::Id(id);
            match deed {
                Deed::Allocate => {
                    let stack = match objects.get(event, Word::Frames) {
                        Some(Value::Stack(stack)) => stack,
                        _ => 0,
                    };
                    let origin = Origin {
                        address: number(objects, event, Word::Addr),
                        kind,
                        occupied: occupied(id),
                        tag: category(objects, event, builder),
                        thread: 0,
                        stack,
                        metadata: text,
                    };
                    builder.allocate(now, name, bytes, stream, &origin)?;
                }
                Deed::Free => builder.free(now, name, bytes, stream)?,
                Deed::Complete => builder.complete(now, name, bytes, stream)?,
                Deed::Annotate => builder.annotate(name, text),
            }
        }
        let kind = match (segment_change(objects, event), objects.get(event, Word::Action)) {
            (Some(true), _) => MarkKind::Grow,
            (Some(false), _) => MarkKind::Release,
            (None, Some(Value::Word(Word::Oom))) => MarkKind::Fail,
            (None, Some(Value::Word(Word::UserDefined | Word::Annotate))) => MarkKind::User,
            _ => continue,
        };
        let (address, bytes) =
            (number(objects, event, Word::Addr), number(objects, event, Word::Size));
        let (address, bytes) = match (kind, address, bytes) {
            (MarkKind::User, _, bytes) => (None, bytes.unwrap_or(0)),
            (MarkKind::Fail, _, Some(bytes)) => (None, bytes),
            (_, Some(address), Some(bytes)) => (Some(address), bytes),
            _ => {
                playback.skips.add(INCOMPLETE);
                continue;
            }
        };
        let text = if kind == MarkKind::User { text } else { 0 };
        let device_free = number(objects, event, Word::DeviceFree);
        let row = short(now.0);
        let refused_by = 0;
        builder.mark(HistoryMark {
            time,
            row,
            kind,
            bytes,
            address,
            device_free,
            text,
            refused_by,
        })?;
    }
    Ok(())
}

/// Adds the phases that the program announced (`record_function`, and the profiler's steps). Each
/// has an entry where it starts and one where it ends. Phases of several threads are in one list,
/// so that an end belongs to the last start of its name.
fn add_phases(
    snapshot: &Snapshot<'_>,
    root: Value,
    clock: &SnapshotClock,
    skips: &mut Skips,
    builder: &mut HistoryBuilder,
) {
    let objects = snapshot.objects;
    let list = objects.get(root, Word::ExternalAnnotations).and_then(|list| objects.list(list));
    let mut open: HashMap<u32, Vec<(f64, u32)>> = HashMap::new();
    let mut depth = 0;
    for &entry in list.unwrap_or_default() {
        let of_other = |device| match snapshot.device {
            TraceDevice::Gpu(own) => device != i64::from(own),
            TraceDevice::Host(_) => false,
        };
        if let Some(Value::Int(device)) = objects.get(entry, Word::Device)
            && of_other(device)
        {
            continue;
        }
        let name = match objects.get(entry, Word::Name) {
            Some(Value::Text(name)) => Some(name),
            Some(Value::Word(word)) => Some(builder.texts.intern(word.text())),
            _ => None,
        };
        let time = match (clock.clock, objects.get(entry, Word::TimeUs)) {
            (HistoryClock::Microseconds, Some(Value::Int(time))) => {
                Some(time.saturating_sub(clock.first) as f64)
            }
            _ => None,
        };
        match (name, time, objects.get(entry, Word::Stage)) {
            (Some(name), Some(begin), Some(Value::Word(Word::Start))) => {
                open.entry(name).or_default().push((begin, depth));
                depth += 1;
            }
            (Some(name), Some(end), Some(Value::Word(Word::End))) => {
                // The ring may have lost the start.
                let start = open.get_mut(&name).and_then(Vec::pop);
                let (begin, depth_of) = start.unwrap_or((f64::NEG_INFINITY, 0));
                depth -= u32::from(start.is_some());
                let end = end.max(begin);
                builder.phases.push(HistoryPhase { name, begin, end, depth: depth_of });
            }
            _ => skips.add("annotations without name, stage or time"),
        }
    }
    for (name, starts) in open {
        let phase = |(begin, depth)| HistoryPhase { name, begin, end: f64::INFINITY, depth };
        builder.phases.extend(starts.into_iter().map(phase));
    }
}

/// Returns the tag of an event. The viewer's name for none is none here.
fn category(objects: &Objects, event: Value, builder: &HistoryBuilder) -> u32 {
    match objects.get(event, Word::Category) {
        Some(Value::Text(text)) if builder.texts.get(text) != "unknown" => text,
        _ => 0,
    }
}

fn number(objects: &Objects, value: Value, word: Word) -> Option<u64> {
    match objects.get(value, word) {
        // Addresses are stored as signed numbers and used as bit patterns.
        Some(Value::Int(number)) => Some(number as u64),
        _ => None,
    }
}

/// Returns whether an event adds physical memory or releases it, if it does either.
fn segment_change(objects: &Objects, event: Value) -> Option<bool> {
    match objects.get(event, Word::Action) {
        Some(Value::Word(Word::SegmentAlloc | Word::SegmentMap)) => Some(true),
        Some(Value::Word(Word::SegmentFree | Word::SegmentUnmap)) => Some(false),
        _ => None,
    }
}
