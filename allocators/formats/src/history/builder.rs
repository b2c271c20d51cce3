//! Converts rows to the columns of a history, or to a trace for a replay, and rejects impossible ones.

use super::{
    BlockColumns, HistoryAction, HistoryClock, HistoryMark, HistoryPhase, HistoryStep, MarkKind,
    MemoryHistory, NameTable, StackTable, layout,
};
use crate::trace::{
    MAX_STREAMS, Trace, TraceAction, TraceBlock, TraceDevice, TraceFormat, TraceStep,
    error::{Fault, Name},
    named_blocks::{NamedBlocks, short},
};
use aquifer_core::event::BlockKind;
use std::{collections::HashMap, ops::Range};

/// The limit of live bytes: the axis of packed addresses has room for as many, and `f64` counts
/// them exactly.
const MAX_LIVE: u64 = 1 << 53;

/// How streams are named.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamNames {
    /// By number.
    Numbers,
    /// By handle.
    Handles,
}

/// A history under construction.
#[derive(Debug)]
pub(crate) struct HistoryBuilder {
    lives: NamedBlocks,
    blocks: BlockColumns,
    steps: Vec<HistoryStep>,
    /// The row of each step. Only a trace has them.
    step_rows: Vec<u32>,
    marks: Vec<HistoryMark>,
    /// Phases, in any order. They may lie outside of the history.
    pub(crate) phases: Vec<HistoryPhase>,
    /// Each change of the limit.
    pub(crate) limits: Vec<(f64, Option<u64>)>,
    /// Each change of what is in use outside.
    pub(crate) outside: Vec<(f64, u64)>,
    stream_names: StreamNames,
    streams: HashMap<u64, u32>,
    /// The names and numbers of the streams, in order of appearance.
    stream_order: Vec<(u64, u32)>,
    /// The streams that freed blocks of others, by block.
    freed_elsewhere: HashMap<u32, u32>,
    pub(crate) texts: NameTable,
    pub(crate) stacks: StackTable,
    live: u64,
    end: f64,
    events: u64,
    /// Blocks whose address is not known.
    without_address: u64,
}

/// The fields of an allocation that do not concern its checks.
#[derive(Debug)]
pub(crate) struct Origin {
    pub(crate) address: Option<u64>,
    pub(crate) kind: Option<BlockKind>,
    /// The bytes that it occupies, if the input tells.
    pub(crate) occupied: Option<u64>,
    pub(crate) tag: u32,
    pub(crate) thread: u32,
    pub(crate) stack: u32,
    pub(crate) metadata: u32,
}

/// What is known about the input besides its rows.
#[derive(Clone, Debug)]
pub(crate) struct InputFacts {
    pub(crate) format: TraceFormat,
    pub(crate) clock: HistoryClock,
    /// The device whose memory this is, and all that have blocks, if the input distinguishes them.
    pub(crate) device: Option<TraceDevice>,
    pub(crate) devices: Vec<TraceDevice>,
    /// The ranges that were mapped before the first event.
    pub(crate) mapped_at_start: Option<Vec<Range<u64>>>,
    /// Whether rows name the kinds of blocks.
    pub(crate) tells_kinds: bool,
    pub(crate) notes: Vec<String>,
    /// Rows that could not be read.
    pub(crate) unreadable: u64,
    pub(crate) pinned: Option<Vec<(f64, u64)>>,
}

impl InputFacts {
    /// The facts of an input of which nothing else is known.
    pub(crate) fn new(format: TraceFormat, clock: HistoryClock) -> Self {
        let (device, devices, mapped_at_start, pinned) = (None, Vec::new(), None, None);
        let (tells_kinds, notes, unreadable) = (false, Vec::new(), 0);
        Self {
            format,
            clock,
            device,
            devices,
            mapped_at_start,
            tells_kinds,
            notes,
            unreadable,
            pinned,
        }
    }
}

/// The blocks of one device, from which a history or a trace is made.
pub(crate) struct ReadDevice {
    pub(crate) builder: HistoryBuilder,
    pub(crate) facts: InputFacts,
}

impl ReadDevice {
    /// Returns the number of its blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.builder.blocks()
    }
}

impl HistoryBuilder {
    pub(crate) fn new(stream_names: StreamNames) -> Self {
        Self {
            lives: NamedBlocks::default(),
            blocks: BlockColumns::default(),
            steps: Vec::new(),
            step_rows: Vec::new(),
            marks: Vec::new(),
            phases: Vec::new(),
            limits: Vec::new(),
            outside: Vec::new(),
            stream_names,
            streams: HashMap::new(),
            stream_order: Vec::new(),
            freed_elsewhere: HashMap::new(),
            texts: NameTable::default(),
            stacks: StackTable::default(),
            live: 0,
            end: 0.0,
            events: 0,
            without_address: 0,
        }
    }

    /// Returns the number of allocated blocks.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of steps that concern blocks.
    pub(crate) fn block_steps(&self) -> usize {
        self.steps.len() - self.marks.len()
    }

    /// Counts an event, at this time.
    pub(crate) fn at(&mut self, time: f64) {
        self.events += 1;
        self.end = self.end.max(time);
    }

    pub(crate) fn allocate(
        &mut self,
        (row, time): (u64, f64),
        id: Name,
        bytes: u64,
        stream: u64,
        origin: &Origin,
    ) -> Result<(), Fault> {
        let block = index(self.blocks.len())?;
        self.lives.check_new(id)?;
        let occupied = origin.occupied.unwrap_or(bytes).max(bytes);
        let Some(live) = self.live.checked_add(occupied).filter(|live| *live <= MAX_LIVE) else {
            return Err(Fault::AbsurdSize { found: bytes.to_string() });
        };
        let stream = self.stream(stream)?;
        self.live = live;
        self.lives.allocate(id, block, bytes, row);
        let address = origin.address.filter(|start| start.checked_add(occupied).is_some());
        self.without_address += u64::from(address.is_none());
        let blocks = &mut self.blocks;
        if origin.occupied.is_some() && blocks.is_exact.is_empty() {
            blocks.is_exact = vec![false; blocks.len()];
        }
        if origin.occupied.is_some() || !blocks.is_exact.is_empty() {
            blocks.is_exact.push(origin.occupied.is_some());
        }
        blocks.birth.push(time);
        blocks.freed.push(f64::INFINITY);
        blocks.end.push(f64::INFINITY);
        blocks.address.push(address.unwrap_or(0));
        blocks.bytes.push(occupied);
        blocks.requested.push(bytes);
        blocks.stream.push(stream);
        blocks.thread.push(origin.thread);
        blocks.tag.push(origin.tag);
        blocks.stack.push(origin.stack);
        blocks.kind.push(origin.kind);
        blocks.metadata.push(origin.metadata);
        blocks.row.push(short(row));
        debug_assert_eq!(blocks.len(), blocks.row.len(), "columns are as long as each other");
        debug_assert!(blocks.is_exact.is_empty() || blocks.is_exact.len() == blocks.len());
        self.step(HistoryAction::Allocate, block, row);
        Ok(())
    }

    pub(crate) fn free(
        &mut self,
        (row, time): (u64, f64),
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        let stream = self.stream(stream)?;
        let block = self.lives.free(id, bytes, row)?;
        debug_assert!(self.blocks.freed[block as usize].is_infinite(), "a block is freed once");
        self.blocks.freed[block as usize] = time;
        if stream != self.blocks.stream[block as usize] {
            self.freed_elsewhere.insert(block, stream);
        }
        self.step(HistoryAction::Free, block, row);
        Ok(())
    }

    pub(crate) fn complete(
        &mut self,
        (row, time): (u64, f64),
        id: Name,
        bytes: u64,
        stream: u64,
    ) -> Result<(), Fault> {
        self.stream(stream)?;
        let block = self.lives.complete(id, bytes)?;
        let place = block as usize;
        debug_assert!(self.blocks.freed[place].is_finite(), "it was freed before");
        let freed = HistoryStep::new(HistoryAction::Free, block);
        match self.steps.last_mut() {
            // The completion directly follows the free: no other stream used it.
            Some(last) if *last == freed => {
                *last = HistoryStep::new(HistoryAction::Release, block);
                self.blocks.end[place] = self.blocks.freed[place];
            }
            _ => {
                self.blocks.end[place] = time;
                self.step(HistoryAction::Complete, block, row);
            }
        }
        debug_assert!(self.live >= self.blocks.bytes[place], "the block is counted as live");
        self.live -= self.blocks.bytes[place];
        Ok(())
    }

    /// Attaches text to a block that has none.
    pub(crate) fn annotate(&mut self, id: Name, text: u32) {
        if let Some(block) = self.lives.block(id)
            && let Some(metadata @ 0) = self.blocks.metadata.get_mut(block as usize)
        {
            *metadata = text;
        }
    }

    /// Adds a mark.
    pub(crate) fn mark(&mut self, mark: HistoryMark) -> Result<(), Fault> {
        let place = index(self.marks.len())?;
        self.marks.push(mark);
        self.step(HistoryAction::Mark, place, 0);
        Ok(())
    }

    fn step(&mut self, action: HistoryAction, index: u32, row: u64) {
        self.steps.push(HistoryStep::new(action, index));
        self.step_rows.push(short(row));
        debug_assert_eq!(self.steps.len(), self.step_rows.len(), "each step has a row");
    }

    /// Returns the name of a stream.
    fn stream(&mut self, stream: u64) -> Result<u32, Fault> {
        if let Some(&name) = self.streams.get(&stream) {
            return Ok(name);
        }
        if self.streams.len() >= MAX_STREAMS {
            return Err(Fault::TooManyStreams);
        }
        let name = match self.stream_names {
            StreamNames::Handles if stream > u64::from(u16::MAX) => format!("{stream:#x}"),
            _ => stream.to_string(),
        };
        let name = self.texts.intern(&name);
        self.streams.insert(stream, name);
        self.stream_order.push((stream, name));
        Ok(name)
    }

    /// Returns each change of the allocated bytes as its time and the difference.
    pub(crate) fn changes(&self) -> impl Iterator<Item = (f64, i64)> {
        self.steps.iter().filter_map(|step| {
            let block = step.index();
            match step.action() {
                // Sizes are at most MAX_BLOCK.
                HistoryAction::Allocate => {
                    Some((self.blocks.birth[block], self.blocks.requested[block] as i64))
                }
                HistoryAction::Free | HistoryAction::Release => {
                    Some((self.blocks.freed[block], -(self.blocks.requested[block] as i64)))
                }
                HistoryAction::Complete | HistoryAction::Mark => None,
            }
        })
    }

    /// Completes all frees if the input has no completion at all. Returns whether it has none.
    fn free_at_once(&mut self) -> bool {
        let is = |action| move |step: &HistoryStep| step.action() == action;
        let has = |action| self.steps.iter().any(is(action));
        if has(HistoryAction::Complete) || has(HistoryAction::Release) || !has(HistoryAction::Free)
        {
            return false;
        }
        for step in self.steps.iter_mut().filter(|step| is(HistoryAction::Free)(step)) {
            let block = step.index();
            self.blocks.end[block] = self.blocks.freed[block];
            // The index is that of a step.
            *step = HistoryStep::new(HistoryAction::Release, block as u32);
        }
        true
    }

    /// Returns what a replay needs. Streams have small numbers: the program's own are kept in their
    /// order, and handles have them in the order of appearance.
    pub(crate) fn into_trace(mut self, format: TraceFormat) -> Result<Trace, Fault> {
        if self.blocks.is_empty() {
            return Err(Fault::NoAllocation);
        }
        if matches!(self.stream_names, StreamNames::Numbers) {
            self.stream_order.sort_unstable();
        }
        let streams = self.stream_order.iter().zip(0_u32..);
        let streams: HashMap<u32, u32> =
            streams.map(|((_, name), number)| (*name, number)).collect();
        debug_assert_eq!(streams.len(), self.stream_order.len(), "no two streams share a name");
        let sizes = self.blocks.requested.iter().zip(&self.blocks.stream);
        let mut blocks: Vec<_> = sizes
            .map(|(&bytes, name)| TraceBlock {
                bytes,
                stream: streams[name],
                freed_on: None,
                lingers: false,
            })
            .collect();
        let mut steps = Vec::with_capacity(self.steps.len() - self.marks.len());
        for (step, row) in self.steps.into_iter().zip(self.step_rows) {
            // The index is that of a step.
            let block = step.index() as u32;
            let action = match step.action() {
                HistoryAction::Allocate => TraceAction::Allocate,
                HistoryAction::Free | HistoryAction::Release => {
                    let freed = &mut blocks[step.index()];
                    debug_assert!(freed.freed_on.is_none(), "a block is freed once");
                    let elsewhere = self.freed_elsewhere.get(&block).map(|name| streams[name]);
                    freed.freed_on = Some(elsewhere.unwrap_or(freed.stream));
                    // Another stream may use the block until its completion is seen.
                    freed.lingers = step.action() == HistoryAction::Free;
                    TraceAction::Free
                }
                HistoryAction::Complete => {
                    debug_assert!(blocks[step.index()].lingers, "its use outlived its free");
                    TraceAction::Complete
                }
                HistoryAction::Mark => continue,
            };
            steps.push(TraceStep { action, block, row });
        }
        // At most MAX_STREAMS.
        Ok(Trace::of_steps(format, blocks, steps, streams.len() as u32))
    }

    pub(crate) fn finish(mut self, facts: InputFacts) -> Result<MemoryHistory, Fault> {
        if self.blocks.is_empty() {
            return Err(Fault::NoAllocation);
        }
        self.step_rows = Vec::new();
        self.lives = NamedBlocks::default();
        let end = self.end;
        self.phases.retain(|phase| phase.begin <= end && phase.end >= 0.0);
        for phase in &mut self.phases {
            (phase.begin, phase.end) = (phase.begin.max(0.0), phase.end.min(end));
        }
        self.phases.sort_by(|a, b| {
            a.begin.total_cmp(&b.begin).then((a.depth, a.name).cmp(&(b.depth, b.name)))
        });
        let mut notes = Vec::new();
        // The recorder of this library, which names kinds, and PyTorch's write completions: a block
        // without one is still in use.
        if facts.format == TraceFormat::Events && !facts.tells_kinds && self.free_at_once() {
            notes.push(
                "the input has no completions: freed bytes count as reusable at once".to_owned(),
            );
        }
        let physical =
            |mark: &&HistoryMark| matches!(mark.kind, MarkKind::Grow | MarkKind::Release);
        let has_physical = self.marks.iter().any(|mark| physical(&mark));
        let segment = |mark: &HistoryMark| {
            let start = mark.address?;
            Some(start..start.checked_add(mark.bytes)?)
        };
        let segments: Option<Vec<_>> = self.marks.iter().filter(physical).map(segment).collect();
        let mapped_at_start = match (facts.mapped_at_start, &segments) {
            (Some(mapped), Some(_)) => Some(mapped),
            (None, Some(segments)) if !segments.is_empty() => Some(Vec::new()),
            _ => None,
        };
        let mapped = mapped_at_start.iter().flatten().cloned();
        let mapped = mapped.chain(segments.into_iter().flatten());
        let recorded =
            if self.without_address > 0 { None } else { layout::recorded(&self.blocks, mapped) };
        let is_recorded = recorded.is_some();
        let axis = recorded.unwrap_or_else(|| {
            notes.push(if self.without_address == self.blocks.len() as u64 {
                "no addresses in the input: blocks are placed by first fit".to_owned()
            } else if self.without_address > 0 {
                format!(
                    "{} blocks have no address in the input: all are placed by first fit",
                    self.without_address
                )
            } else {
                "the addresses are too far apart for a picture: blocks are placed by first fit"
                    .to_owned()
            });
            layout::packed(&mut self.blocks, &self.steps)
        });
        let physical_at_start = match &mapped_at_start {
            Some(mapped) => Some(mapped.iter().fold(0_u64, |sum, range| {
                sum.saturating_add(range.end.saturating_sub(range.start))
            })),
            None => has_physical.then_some(0),
        };
        notes.extend(facts.notes);
        Ok(MemoryHistory {
            format: facts.format,
            device: facts.device,
            devices: facts.devices,
            notes,
            unreadable: facts.unreadable,
            clock: facts.clock,
            end: self.end,
            events: self.events,
            blocks: self.blocks,
            marks: self.marks,
            phases: self.phases,
            limits: self.limits,
            outside: self.outside,
            steps: self.steps,
            names: self.texts,
            stacks: self.stacks,
            addresses: axis.source,
            spans: axis.spans,
            address_height: axis.height,
            physical_at_start,
            mapped_at_start: mapped_at_start.filter(|_| is_recorded),
            pinned: facts.pinned,
            tells_kinds: facts.tells_kinds,
        })
    }
}

/// Returns the index of a new block or mark.
fn index(count: usize) -> Result<u32, Fault> {
    let index = u32::try_from(count).ok().filter(|index| *index < HistoryStep::MOST);
    index.ok_or(Fault::TooManyBlocks)
}
