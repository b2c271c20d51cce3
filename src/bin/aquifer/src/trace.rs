//! Recorded traces of memory allocations, parsed and checked for replay.
//!
//! A trace is CSV in one of two forms, or a memory snapshot of PyTorch, plain or compressed by xz,
//! gzip or zstd. [`Trace::read`] detects the form by the first bytes. Each form becomes the same
//! [`Trace`]: blocks numbered from zero, streams numbered from zero without gaps, and a list of
//! steps. An impossible step is rejected with its row, so that a replay never has to check one.
//!
//! | module | contents |
//! |---|---|
//! | `source` | bytes to rows: files, truncated files |
//! | `compressed` | xz, gzip and zstd, with a bound on memory |
//! | `events` | the form of this library and its recorder for PyTorch, with named fields |
//! | `rmm` | the log of RAPIDS' memory manager |
//! | `pickle`, `snapshot` | memory snapshots of PyTorch |
//! | `made` | workloads generated from a seed, without a file |
//! | `builder` | rows to steps, and the checks |
//! | `split` | distribution over another number of streams |
//! | `error` | errors |

mod builder;
mod compressed;
mod error;
mod events;
pub(crate) mod made;
mod pickle;
mod rmm;
mod snapshot;
mod source;
mod split;

pub(crate) use builder::Account;
pub(crate) use error::{Fault, TraceError};
pub(crate) use snapshot::SnapshotFacts;

use builder::Builder;
use events::Columns;
use source::TraceSource;
use std::{collections::BTreeMap, fmt, path::Path};

/// The largest valid block size: the address space of a process.
pub(crate) const MAX_BLOCK: u64 = 1 << 47;
/// The maximum number of streams. A driver has a few hundred before it begins to share them.
pub(crate) const MAX_STREAMS: usize = 1024;

/// The form of the input.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// `t_us,op,id,bytes,stream`, with or without `kind`, `device` and `tag`
    Events,
    /// `Thread,Time,Action,Pointer,Size,Stream`
    Rmm,
    /// No file: generated from a seed.
    Made,
    /// A memory snapshot of PyTorch.
    Snapshot,
}

/// One block from its allocation to its last use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    /// The requested size. Never zero, at most [`MAX_BLOCK`].
    pub(crate) bytes: u64,
    /// The stream that it was allocated on.
    pub(crate) stream: u32,
    /// The stream that it was freed on, if it was freed. Nearly always the same.
    pub(crate) freed_on: Option<u32>,
    /// Whether another stream still used it when it was freed: its completion is not in the row
    /// directly after its free.
    pub(crate) lingers: bool,
}

impl Block {
    /// Returns whether a stream other than its own uses it.
    pub(crate) fn crosses(&self) -> bool {
        self.lingers || self.freed_on.is_some_and(|stream| stream != self.stream)
    }
}

/// The kind of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// It is allocated.
    Allocate,
    /// Its owner frees it.
    Free,
    /// Its last use is complete. Only blocks that linger have this step, and not all of them do.
    Complete,
}

/// One step. Two steps are equal regardless of their rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// The kind.
    pub(crate) action: Action,
    /// The index of the block in [`Trace::blocks`].
    pub(crate) block: u32,
    /// The row, or the event of a snapshot, counted from 1.
    pub(crate) row: u32,
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        (self.action, self.block) == (other.action, other.block)
    }
}

impl Eq for Step {}

/// The location of memory in a trace.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Device {
    /// On a device, by its ordinal.
    Gpu(u32),
    /// Pinned on a NUMA node of the host, or on an unknown node.
    Host(Option<u32>),
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(device) => write!(f, "{device}"),
            Self::Host(Some(node)) => write!(f, "host:{node}"),
            Self::Host(None) => f.write_str("host"),
        }
    }
}

/// A valid trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    /// The form of the input.
    pub(crate) format: Format,
    /// Every block, in order of allocation.
    pub(crate) blocks: Vec<Block>,
    /// The steps, in order. Each block is allocated before it is freed, freed at most once, and
    /// completed after that or never.
    pub(crate) steps: Vec<Step>,
    /// The number of streams. Every stream of a block is below it.
    pub(crate) streams: u32,
    /// The peak of live bytes, in requested sizes.
    pub(crate) peak_live: u64,
    /// The number of freed blocks.
    pub(crate) frees: u64,
    /// Bytes of the blocks that are never freed.
    pub(crate) live_at_end: u64,
    /// Rows that a replay cannot repeat: failed requests, and requests of zero bytes.
    pub(crate) skipped: u64,
    /// The file's contents by device, kind and tag, including what is not replayed. Empty if the
    /// file does not record them.
    pub(crate) memory: Vec<(Device, Account)>,
    /// The device of this memory, if the file distinguishes devices.
    pub(crate) device: Option<u32>,
    /// Notes on the file for the reader of the result.
    pub(crate) notes: Vec<String>,
    /// Facts about the snapshot, if the input is one.
    pub(crate) snapshot: Option<SnapshotFacts>,
}

impl Trace {
    /// Reads and checks the file at `path`, or [generates](made) the trace that it names. `device`
    /// selects a device. The default is the one with the most events.
    ///
    /// # Errors
    /// [`TraceError`] with the first invalid row, also if a device is selected and the trace has
    /// none.
    pub(crate) fn read(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        match made::trace(path) {
            Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
            Some(made) => made,
            None => Self::parse(TraceSource::open(path)?, device),
        }
    }

    /// Parses a trace in a test.
    #[cfg(test)]
    pub(crate) fn from_rows(rows: &str) -> Self {
        let text = format!("{}\n{rows}", events::HEADER).into_bytes();
        let source = TraceSource::new(std::io::Cursor::new(text))
            .and_then(|source| Self::parse(source, None));
        source.unwrap_or_else(|e| panic!("{e}"))
    }

    fn parse(mut source: TraceSource, device: Option<u32>) -> Result<Self, TraceError> {
        if source.begins_with(pickle::MAGIC)? {
            return snapshot::read(source.bytes(), device);
        }
        let columns = match source.next_row()? {
            None => return Err(TraceError::whole(Fault::Empty)),
            Some((_, rmm::HEADER)) => None,
            Some((row, header)) => match Columns::of(header) {
                Some(columns) => Some(columns),
                None => {
                    let fault = Fault::Header { found: header.to_owned() };
                    return Err(TraceError { row: Some(row), fault });
                }
            },
        };
        if device.is_some() && !columns.as_ref().is_some_and(Columns::tells_devices) {
            return Err(TraceError::whole(Fault::NoDevices));
        }
        let Some(columns) = columns else {
            let mut builder = Builder::new();
            while let Some((row, text)) = source.next_row()? {
                rmm::take(text, row, &mut builder)
                    .map_err(|fault| TraceError { row: Some(row), fault })?;
            }
            return builder.finish(Format::Rmm).map_err(TraceError::whole);
        };
        let mut builders = BTreeMap::new();
        while let Some((row, text)) = source.next_row()? {
            columns
                .take(text, row, &mut builders)
                .map_err(|fault| TraceError { row: Some(row), fault })?;
        }
        Self::of_device(builders, &columns, device).map_err(TraceError::whole)
    }

    /// Returns the trace of one of several devices: the selected one, or the one with the most
    /// steps.
    fn of_device(
        mut builders: BTreeMap<Device, Builder>,
        columns: &Columns,
        asked: Option<u32>,
    ) -> Result<Self, Fault> {
        let accounts = |(&device, builder): (&Device, &Builder)| {
            builder
                .accounts()
                .iter()
                .cloned()
                .map(move |account| (device, account))
                .collect::<Vec<_>>()
        };
        let memory: Vec<_> = builders.iter().flat_map(accounts).collect();
        let gpus: Vec<u32> = builders
            .iter()
            .filter_map(|(device, builder)| match device {
                Device::Gpu(device) if builder.blocks() > 0 => Some(*device),
                _ => None,
            })
            .collect();
        let steps =
            |device: &u32| (builders[&Device::Gpu(*device)].steps(), std::cmp::Reverse(*device));
        let chosen = match asked {
            Some(asked) if !gpus.contains(&asked) => {
                Err(Fault::NoSuchDevice { asked, there: gpus.clone() })
            }
            Some(asked) => Ok(asked),
            None => gpus.iter().copied().max_by_key(steps).ok_or(match memory.len() {
                0 => Fault::NoAllocation,
                _ => Fault::OnlyPinned {
                    blocks: memory.iter().map(|(_, account)| account.allocations).sum(),
                },
            }),
        }?;
        let builder = builders.remove(&Device::Gpu(chosen)).ok_or(Fault::NoAllocation)?;
        let mut trace = builder.finish(Format::Events)?;
        if !columns.unknown.is_empty() {
            let names = columns.unknown.join(", ");
            trace.notes.push(format!(
                "fields of the trace that mean nothing here are passed over: {names}"
            ));
        }
        if gpus.len() > 1 {
            let others = gpus.len() - 1;
            trace.notes.push(format!(
                "the trace has memory of {} devices: that of device {chosen} is replayed, that of {others} not; \
                 --device-index picks another",
                gpus.len()
            ));
        }
        let pinned: u64 = memory
            .iter()
            .filter(|(device, _)| matches!(device, Device::Host(_)))
            .map(|(_, account)| account.allocations)
            .sum();
        if pinned > 0 {
            trace.notes.push(format!(
                "{pinned} blocks of pinned host memory in the trace are not replayed"
            ));
        }
        if columns.tells_devices() {
            (trace.memory, trace.device) = (memory, Some(chosen));
        }
        Ok(trace)
    }

    /// Returns what the numbers of its steps count.
    pub(crate) fn unit(&self) -> &'static str {
        match self.format {
            Format::Events | Format::Rmm => "row",
            Format::Made => "step",
            Format::Snapshot => "event",
        }
    }

    /// Returns the number of allocations.
    pub(crate) fn allocations(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Returns the number of allocations and frees.
    pub(crate) fn operations(&self) -> u64 {
        self.allocations() + self.frees
    }

    /// Returns the number of blocks that a stream other than their own uses.
    #[cfg(test)]
    pub(crate) fn crossings(&self) -> u64 {
        self.blocks.iter().filter(|block| block.crosses()).count() as u64
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
