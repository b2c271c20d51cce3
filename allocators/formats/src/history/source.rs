//! The forms of input: this library's own rows, logs of other programs, PyTorch's snapshots, and
//! generated traces.

use super::{
    ExtentTree, HistoryClock, HistoryMark, HistoryPhase, MarkKind, MemoryHistory,
    builder::{HistoryBuilder, InputFacts, Origin, StreamNames},
};
use crate::{
    pickle::{self, Objects, Value, Word},
    trace::{
        Header, Trace, TraceAction, TraceDevice, TraceError, TraceFormat,
        error::{Fault, Name, SnapshotError},
        events::{Columns, RowAction},
        log::{LogFacts, LogHeader},
        log_event::{LogAction, LogEvent, LogPhase, Skips, UNREADABLE},
        made,
        named_blocks::short,
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
        match made::trace(path) {
            Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
            Some(made) => Ok(vec![of_made(&made?).map_err(TraceError::whole)?]),
            None => parse(TraceSource::open(path)?, device),
        }
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
        parse(TraceSource::new(reader)?, device)
    }
}

fn first(histories: Vec<MemoryHistory>) -> Result<MemoryHistory, TraceError> {
    histories.into_iter().next().ok_or_else(|| TraceError::whole(Fault::NoAllocation))
}

fn parse(
    mut source: TraceSource,
    device: Option<TraceDevice>,
) -> Result<Vec<MemoryHistory>, TraceError> {
    if source.begins_with(pickle::MAGIC)? {
        return of_snapshot(source.bytes(), device).map_err(TraceError::whole);
    }
    let header = Header::read(&mut source)?;
    if device.is_some() && !header.tells_devices() {
        return Err(TraceError::whole(Fault::NoDevices));
    }
    match header {
        Header::Events(columns) => of_events(source, &columns, device),
        Header::Log(header) => of_log(header, source, device),
    }
}

/// Reads the rows of this library, each device into a builder of its own.
fn of_events(
    mut source: TraceSource,
    columns: &Columns,
    asked: Option<TraceDevice>,
) -> Result<Vec<MemoryHistory>, TraceError> {
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
                builder.complete(now.1, id, bytes, stream).map_err(at)?;
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
    let facts = DeviceFacts {
        format: TraceFormat::Events,
        clock: HistoryClock::Microseconds,
        tells_devices: columns.tells_devices(),
        tells_kinds: columns.tells_kinds(),
        notes: columns.note().into_iter().collect(),
        phases: Vec::new(),
    };
    of_devices(builders, facts, asked).map_err(TraceError::whole)
}

/// What is known of an input with rows besides them.
struct DeviceFacts {
    format: TraceFormat,
    clock: HistoryClock,
    tells_devices: bool,
    tells_kinds: bool,
    notes: Vec<String>,
    phases: Vec<LogPhase>,
}

/// Returns the histories of the devices that have blocks, or of one of them.
fn of_devices(
    mut builders: BTreeMap<TraceDevice, HistoryBuilder>,
    facts: DeviceFacts,
    asked: Option<TraceDevice>,
) -> Result<Vec<MemoryHistory>, Fault> {
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
        let is_gpu = matches!(device, TraceDevice::Gpu(_));
        Reverse((is_gpu, builder.block_steps(), Reverse(*device)))
    });
    let finish = |(device, mut builder): (TraceDevice, HistoryBuilder)| {
        for (name, begin, end, depth) in &facts.phases {
            let (name, begin, end, depth) = (builder.texts.intern(name), *begin, *end, *depth);
            builder.phases.push(HistoryPhase { name, begin, end, depth });
        }
        let input = InputFacts { mapped_at_start: None, tells_kinds: facts.tells_kinds };
        let mut history = builder.finish(facts.format, facts.clock, input)?;
        history.notes.extend_from_slice(&facts.notes);
        if facts.tells_devices {
            (history.device, history.devices) = (Some(device), there.clone());
            history.pinned = matches!(device, TraceDevice::Gpu(_)).then(|| pinned.clone());
        }
        Ok(history)
    };
    let histories = builders.into_iter().map(finish).collect::<Result<Vec<_>, _>>()?;
    if histories.is_empty() { Err(Fault::NoAllocation) } else { Ok(histories) }
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

/// Reads a log of another program, each device into a builder of its own.
fn of_log(
    header: LogHeader,
    mut source: TraceSource,
    asked: Option<TraceDevice>,
) -> Result<Vec<MemoryHistory>, TraceError> {
    let mut builders: BTreeMap<TraceDevice, HistoryBuilder> = BTreeMap::new();
    let facts = header.read(&mut source, &mut |event| {
        let &LogEvent { row, time, bytes, stream, .. } = event;
        let builder = builders
            .entry(event.device)
            .or_insert_with(|| HistoryBuilder::new(StreamNames::Handles));
        builder.at(time);
        let (now, id) = ((row, time), event.name());
        match event.action {
            LogAction::Allocate => {
                let origin = Origin {
                    address: event.address,
                    kind: event.kind(),
                    occupied: None,
                    tag: builder.texts.intern(event.tag),
                    thread: builder.texts.intern(event.thread),
                    stack: 0,
                    metadata: builder.texts.intern(event.metadata),
                };
                builder.allocate(now, id, bytes, stream, &origin)
            }
            LogAction::Release => {
                builder.free(now, id, bytes, stream)?;
                builder.complete(time, id, bytes, stream)
            }
            LogAction::Fail => builder.mark(HistoryMark {
                time,
                row: short(row),
                kind: MarkKind::Fail,
                bytes,
                address: None,
                device_free: None,
                text: 0,
                refused_by: 0,
            }),
            LogAction::Nothing => Ok(()),
        }
    })?;
    let LogFacts { format, tells_times, tells_devices, phases, notes, skips } = facts;
    let clock = if tells_times { HistoryClock::Microseconds } else { HistoryClock::Events };
    let facts = DeviceFacts { format, clock, tells_devices, tells_kinds: false, notes, phases };
    let unreadable = skips.count(UNREADABLE);
    let mut histories = of_devices(builders, facts, asked)
        .map_err(|fault| skips.explain(TraceError::whole(fault)))?;
    histories.iter_mut().for_each(|history| history.unreadable = unreadable);
    Ok(histories)
}

/// Converts a generated trace. Its steps are its clock.
fn of_made(trace: &Trace) -> Result<MemoryHistory, Fault> {
    let mut builder = HistoryBuilder::new(StreamNames::Numbers);
    for (step, place) in trace.steps.iter().zip(0_u64..) {
        let block = trace.blocks[step.block as usize];
        let (now, id) = ((place + 1, place as f64), Name::Id(step.block.into()));
        builder.at(now.1);
        match step.action {
            TraceAction::Allocate => {
                let (address, kind, occupied) = (None, None, None);
                let origin =
                    Origin { address, kind, occupied, tag: 0, thread: 0, stack: 0, metadata: 0 };
                builder.allocate(now, id, block.bytes, block.stream.into(), &origin)?;
            }
            TraceAction::Free => {
                let stream = block.freed_on.unwrap_or(block.stream).into();
                builder.free(now, id, block.bytes, stream)?;
                if !block.lingers {
                    builder.complete(now.1, id, block.bytes, stream)?;
                }
            }
            TraceAction::Complete => {
                builder.complete(now.1, id, block.bytes, block.stream.into())?;
            }
        }
    }
    builder.finish(TraceFormat::Made, HistoryClock::Events, InputFacts::default())
}

/// Reads a memory snapshot of PyTorch.
fn of_snapshot(
    reader: &mut dyn BufRead,
    asked: Option<TraceDevice>,
) -> Result<Vec<MemoryHistory>, Fault> {
    let invalid = |error| Fault::Snapshot(Box::new(error));
    let (mut objects, root) =
        pickle::read_with_details(reader).map_err(|e| invalid(SnapshotError::Pickle(e)))?;
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
    let mut histories = Vec::with_capacity(shown.len());
    for (&device, left) in shown.iter().zip((0..shown.len()).rev()) {
        let mut builder = HistoryBuilder::new(StreamNames::Handles);
        (builder.texts, builder.stacks) = match left {
            0 => (mem::take(&mut texts), mem::take(&mut stacks)),
            _ => (texts.clone(), stacks.clone()),
        };
        let mut history = of_snapshot_device(&parts, device, root, builder)?;
        (history.device, history.devices) = (Some(device), devices.clone());
        histories.push(history);
    }
    Ok(histories)
}

/// Returns the history of one device of a snapshot, or of its pinned memory.
fn of_snapshot_device(
    parts: &SnapshotParts<'_>,
    device: TraceDevice,
    root: Value,
    mut builder: HistoryBuilder,
) -> Result<MemoryHistory, Fault> {
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
    drop(snapshot);
    let facts = InputFacts { mapped_at_start, tells_kinds: false };
    let finished = builder.finish(TraceFormat::Snapshot, clock.clock, facts);
    let notes = playback.notes();
    let finished = finished.map_err(|fault| playback.skips.explain(TraceError::whole(fault)).fault);
    let mut history = finished?;
    if early > 0 {
        history.notes.push(format!(
            "{early} blocks are older than the first event: their origin is not recorded"
        ));
    }
    history.notes.extend(notes);
    history.pinned = pinned;
    Ok(history)
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
                Deed::Complete => builder.complete(time, name, bytes, stream)?,
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
