//! A trace for Perfetto's viewer: a counter for each curve, slices for the blocks that hold the
//! most bytes for the longest, and flows from the end of a slice to the next one at its address.
//!
//! The format is a sequence of `TracePacket` messages. Slices of a track have to nest, so blocks
//! that overlap in time are on different tracks, as few as possible.

use super::{curves::CurveSet, data::ReportRun, protobuf::ProtoMessage};
use aquifer_formats::history::MemoryHistory;
use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    io::{self, Write},
};

/// The most blocks that become slices.
const MOST_SLICES: usize = 10_000;
/// The most tracks of slices.
const MOST_TRACKS: u64 = 512;
/// The one sequence of packets.
const SEQUENCE: u64 = 1;
/// Identifiers of tracks: the process, the curves from 2 on, the slices far above.
const PROCESS: u64 = 1;
const FIRST_CURVE: u64 = 2;
const FIRST_LANE: u64 = 1000;

/// Field numbers of Perfetto's messages.
mod field {
    /// `Trace`
    pub(super) const PACKET: u32 = 1;
    /// `TracePacket`
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE_ID: u32 = 10;
    pub(super) const TRACK_EVENT: u32 = 11;
    pub(super) const SEQUENCE_FLAGS: u32 = 13;
    pub(super) const TRACK_DESCRIPTOR: u32 = 60;
    /// `TrackDescriptor`
    pub(super) const UUID: u32 = 1;
    pub(super) const NAME: u32 = 2;
    pub(super) const PROCESS: u32 = 3;
    pub(super) const PARENT: u32 = 5;
    pub(super) const COUNTER: u32 = 8;
    /// `ProcessDescriptor`
    pub(super) const PID: u32 = 1;
    pub(super) const PROCESS_NAME: u32 = 6;
    /// `CounterDescriptor`
    pub(super) const UNIT: u32 = 3;
    /// `TrackEvent`
    pub(super) const ANNOTATION: u32 = 4;
    pub(super) const TYPE: u32 = 9;
    pub(super) const TRACK: u32 = 11;
    pub(super) const EVENT_NAME: u32 = 23;
    pub(super) const COUNTER_VALUE: u32 = 30;
    pub(super) const FLOW: u32 = 47;
    pub(super) const FLOW_END: u32 = 48;
    /// `DebugAnnotation`
    pub(super) const UINT: u32 = 3;
    pub(super) const TEXT: u32 = 6;
    pub(super) const ANNOTATION_NAME: u32 = 10;
}

/// Values of `TrackEvent.Type`.
const SLICE_BEGIN: u64 = 1;
const SLICE_END: u64 = 2;
const COUNTER: u64 = 4;
/// `CounterDescriptor.Unit`: bytes.
const UNIT_BYTES: u64 = 3;
/// `TracePacket.SequenceFlags`: the state of the sequence begins here.
const STATE_CLEARED: u64 = 1;

/// A block that is a slice.
struct Slice {
    block: usize,
    lane: u64,
    /// The flow that ends at its start, and the one that begins at its end.
    flow_in: Option<u64>,
    flow_out: Option<u64>,
}

/// Writes a trace.
///
/// # Errors
/// The error of the writer.
pub(crate) fn write(run: &ReportRun, out: &mut dyn Write) -> io::Result<()> {
    let history = &run.history;
    let process = ProtoMessage::default()
        .number(field::PID, 1)
        .text(field::PROCESS_NAME, &format!("aquifer report: {}", run.name));
    let track =
        ProtoMessage::default().number(field::UUID, PROCESS).message(field::PROCESS, &process);
    let first = ProtoMessage::default()
        .number(field::SEQUENCE_ID, SEQUENCE)
        .number(field::SEQUENCE_FLAGS, STATE_CLEARED)
        .message(field::TRACK_DESCRIPTOR, &track);
    packet(out, &first)?;
    write_curves(run, out)?;
    let slices = choose(history);
    let lanes = slices.iter().map(|slice| slice.lane + 1).max().unwrap_or(0);
    for lane in 0..lanes {
        let track = ProtoMessage::default()
            .number(field::UUID, FIRST_LANE + lane)
            .number(field::PARENT, PROCESS)
            .text(field::NAME, &format!("blocks {}", lane + 1));
        descriptor(out, &track)?;
    }
    slices.iter().try_for_each(|slice| write_slice(history, slice, out))
}

fn write_curves(run: &ReportRun, out: &mut dyn Write) -> io::Result<()> {
    let mut next = FIRST_CURVE;
    for curves in run.analysis.curve_sets() {
        write_set(curves, next, out)?;
        next += curves.series.len() as u64;
    }
    Ok(())
}

/// Writes curves whose tracks have the identifiers from `first` on.
fn write_set(curves: &CurveSet, first: u64, out: &mut dyn Write) -> io::Result<()> {
    for (uuid, series) in (first..).zip(&curves.series) {
        let unit = ProtoMessage::default().number(field::UNIT, UNIT_BYTES);
        let track = ProtoMessage::default()
            .number(field::UUID, uuid)
            .number(field::PARENT, PROCESS)
            .text(field::NAME, series.name())
            .message(field::COUNTER, &unit);
        descriptor(out, &track)?;
    }
    let Some(level) = curves.levels.first() else { return Ok(()) };
    for (uuid, columns) in (first..).zip(&level.columns) {
        let mut before = None;
        for (place, time) in level.times.iter().enumerate() {
            // A merged point is drawn by its extremes, and ends at its last value.
            let values = [columns.least()[place], columns.greatest()[place], columns.last[place]];
            for value in values {
                // A counter has no value for a limit that was removed.
                if before == Some(value) || value.is_nan() {
                    continue;
                }
                before = Some(value);
                let event = ProtoMessage::default()
                    .number(field::TYPE, COUNTER)
                    .number(field::TRACK, uuid)
                    .number(field::COUNTER_VALUE, value as u64);
                track_event(out, nanoseconds(*time), &event)?;
            }
        }
    }
    Ok(())
}

fn write_slice(history: &MemoryHistory, slice: &Slice, out: &mut dyn Write) -> io::Result<()> {
    let (blocks, block) = (&history.blocks, slice.block);
    let tag = history.names.get(blocks.tag[block]);
    let name = if tag.is_empty() { "block" } else { tag };
    let number = |name: &str, value: u64| {
        ProtoMessage::default().text(field::ANNOTATION_NAME, name).number(field::UINT, value)
    };
    let text = |name: &str, value: &str| {
        ProtoMessage::default().text(field::ANNOTATION_NAME, name).text(field::TEXT, value)
    };
    let mut begin = ProtoMessage::default()
        .number(field::TYPE, SLICE_BEGIN)
        .number(field::TRACK, FIRST_LANE + slice.lane)
        .text(field::EVENT_NAME, name)
        .message(field::ANNOTATION, &number("bytes", blocks.requested[block]))
        .message(field::ANNOTATION, &text("address", &format!("{:#x}", blocks.address[block])))
        .message(field::ANNOTATION, &text("stream", history.names.get(blocks.stream[block])));
    if let Some(frame) = history.stacks.get(blocks.stack[block]).first() {
        begin = begin.message(field::ANNOTATION, &text("at", history.names.get(*frame)));
    }
    for (flow, field) in [(slice.flow_out, field::FLOW), (slice.flow_in, field::FLOW_END)] {
        if let Some(flow) = flow {
            begin = begin.fixed(field, flow);
        }
    }
    let [from, until] = life(history, block).map(nanoseconds);
    track_event(out, from, &begin)?;
    let end = ProtoMessage::default()
        .number(field::TYPE, SLICE_END)
        .number(field::TRACK, FIRST_LANE + slice.lane);
    track_event(out, until, &end)
}

/// Returns the time from the allocation of a block until its bytes could be reused.
fn life(history: &MemoryHistory, block: usize) -> [f64; 2] {
    [history.blocks.birth[block], history.blocks.end[block].min(history.end)]
}

/// Chooses the blocks with the most bytes times life, in order of allocation, and their tracks.
fn choose(history: &MemoryHistory) -> Vec<Slice> {
    let weight = |block: &usize| {
        let [from, until] = life(history, *block);
        (until - from) * history.blocks.bytes[*block] as f64
    };
    let mut chosen: Vec<usize> = (0..history.blocks.len()).collect();
    let by_weight = |a: &usize, b: &usize| weight(b).total_cmp(&weight(a)).then(a.cmp(b));
    if chosen.len() > MOST_SLICES {
        chosen.select_nth_unstable_by(MOST_SLICES, by_weight);
        chosen.truncate(MOST_SLICES);
    }
    chosen.sort_unstable();
    // Free lanes, the lowest first, and lanes in use by the time at which they are free.
    let mut idle: BinaryHeap<Reverse<u64>> = (0..MOST_TRACKS).map(Reverse).collect();
    let mut busy: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
    let mut slices: Vec<Slice> = Vec::with_capacity(chosen.len());
    let mut last_at: HashMap<u64, usize> = HashMap::new();
    for block in chosen {
        let [from, until] = life(history, block).map(nanoseconds);
        while let Some(&Reverse((free_at, lane))) = busy.peek()
            && free_at <= from
        {
            busy.pop();
            idle.push(Reverse(lane));
        }
        // A block that lives beside as many others has no track.
        let Some(Reverse(lane)) = idle.pop() else { continue };
        busy.push(Reverse((until.max(from.saturating_add(1)), lane)));
        let mut slice = Slice { block, lane, flow_in: None, flow_out: None };
        if let Some(before) = last_at.insert(history.blocks.address[block], slices.len())
            && history.blocks.end[slices[before].block] <= history.blocks.birth[block]
        {
            let flow = slices.len() as u64 + 1;
            (slices[before].flow_out, slice.flow_in) = (Some(flow), Some(flow));
        }
        slices.push(slice);
    }
    slices
}

fn descriptor(out: &mut dyn Write, track: &ProtoMessage) -> io::Result<()> {
    let of = ProtoMessage::default()
        .number(field::SEQUENCE_ID, SEQUENCE)
        .message(field::TRACK_DESCRIPTOR, track);
    packet(out, &of)
}

fn track_event(out: &mut dyn Write, at_ns: u64, event: &ProtoMessage) -> io::Result<()> {
    let of = ProtoMessage::default()
        .number(field::TIMESTAMP, at_ns)
        .number(field::SEQUENCE_ID, SEQUENCE)
        .message(field::TRACK_EVENT, event);
    packet(out, &of)
}

fn packet(out: &mut dyn Write, packet: &ProtoMessage) -> io::Result<()> {
    out.write_all(ProtoMessage::default().message(field::PACKET, packet).as_bytes())
}

/// Converts a time. The number of an event counts as a microsecond.
fn nanoseconds(time: f64) -> u64 {
    // The cast saturates.
    (time * 1000.0) as u64
}
