//! A recorded life of device memory, ready to be lived again.
//!
//! A trace comes as CSV in one of two forms or as a memory snapshot of PyTorch's, plain or
//! compressed by xz, gzip or zstd; [`Trace::read`] tells them apart by their first bytes. All
//! become the same [`Trace`]: blocks numbered from zero, streams numbered from zero without gaps,
//! and a list of steps. Whatever cannot have happened is refused with the row at fault, so that a
//! replay never has to ask whether a step makes sense.
//!
//! | module | holds |
//! |---|---|
//! | `source` | bytes to rows: files, cut ends |
//! | `compressed` | xz, gzip and zstd, within a bound of memory |
//! | `events` | the form whose header names the fields, which this library and the recorder for PyTorch write |
//! | `rmm` | the log of RAPIDS' memory manager |
//! | `pickle`, `snapshot` | memory snapshots of PyTorch's |
//! | `made` | workloads that are made from a seed, with no file behind them |
//! | `builder` | rows to steps, and what cannot have happened |
//! | `split` | the same over another number of streams |
//! | `error` | how that is said |

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
pub(crate) use snapshot::Facts;

use builder::Builder;
use events::Columns;
use source::Source;
use std::{collections::BTreeMap, fmt, path::Path};

/// The largest block that is believed: all addresses that a process has.
pub(crate) const MAX_BLOCK: u64 = 1 << 47;
/// The most streams that are believed. A driver has a few hundred before it begins to share them.
pub(crate) const MAX_STREAMS: usize = 1024;

/// Which form the file had.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Format {
    /// `t_us,op,id,bytes,stream`, with or without `kind`, `device` and `tag`
    Events,
    /// `Thread,Time,Action,Pointer,Size,Stream`
    Rmm,
    /// No file: made from a seed.
    Made,
    /// A memory snapshot of PyTorch's.
    Snapshot,
}

/// One block from its allocation to its last use.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Block {
    /// As asked for; never zero, at most [`MAX_BLOCK`].
    pub(crate) bytes: u64,
    /// The stream that it was allocated on.
    pub(crate) stream: u32,
    /// The stream that it was freed on, if it was; nearly always the same.
    pub(crate) freed_on: Option<u32>,
    /// Whether another stream still used it when it was freed: its completion is not the row
    /// behind its free.
    pub(crate) lingers: bool,
}

impl Block {
    /// Whether a stream other than its own uses it.
    pub(crate) fn crosses(&self) -> bool {
        self.lingers || self.freed_on.is_some_and(|stream| stream != self.stream)
    }
}

/// What happens to a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Action {
    /// It is allocated.
    Allocate,
    /// Its owner frees it.
    Free,
    /// Its last use is done. Only blocks that linger have this step, and not all of them.
    Complete,
}

/// One thing that happens. Two are equal wherever they stand.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    /// What.
    pub(crate) action: Action,
    /// To which of [`Trace::blocks`].
    pub(crate) block: u32,
    /// The row that says so, or the event of a snapshot, counted from 1.
    pub(crate) row: u32,
}

impl PartialEq for Step {
    fn eq(&self, other: &Self) -> bool {
        (self.action, self.block) == (other.action, other.block)
    }
}

impl Eq for Step {}

/// Where memory of a trace is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) enum Device {
    /// On a device, by its ordinal.
    Gpu(u32),
    /// Pinned on a NUMA node of the host, or on one that is not known.
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

/// A trace that makes sense.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Trace {
    /// Where it came from.
    pub(crate) format: Format,
    /// Every block, in order of allocation.
    pub(crate) blocks: Vec<Block>,
    /// What happens, in order. Each block is allocated before it is freed, once, and completed
    /// after that or never.
    pub(crate) steps: Vec<Step>,
    /// How many streams there are; every stream of a block is below it.
    pub(crate) streams: u32,
    /// The most bytes asked for that were allocated and not freed at once.
    pub(crate) peak_live: u64,
    /// How many blocks are freed.
    pub(crate) frees: u64,
    /// Bytes of the blocks that are not.
    pub(crate) live_at_end: u64,
    /// Rows that tell of something a replay cannot repeat: requests that failed, requests for
    /// nothing.
    pub(crate) skipped: u64,
    /// What is in the file by device, kind and tag, also what is not replayed; nothing where it
    /// does not say.
    pub(crate) memory: Vec<(Device, Account)>,
    /// The device whose memory this is, where the file tells devices apart.
    pub(crate) device: Option<u32>,
    /// What a reader of the result should know about the file.
    pub(crate) notes: Vec<String>,
    /// More about a snapshot, if it was one.
    pub(crate) snapshot: Option<Facts>,
}

impl Trace {
    /// Reads and checks the file at `path`, or makes the trace that it [asks for](made). `device`:
    /// which of a snapshot's devices; the one with most events by default.
    ///
    /// # Errors
    /// [`TraceError`] with the first row that is at fault; also where a device is asked for and
    /// there are none.
    pub(crate) fn read(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        match made::trace(path) {
            Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
            Some(made) => made,
            None => Self::parse(Source::open(path)?, device),
        }
    }

    /// A trace that a test has written down.
    #[cfg(test)]
    pub(crate) fn from_rows(rows: &str) -> Self {
        let text = format!("{}\n{rows}", events::HEADER).into_bytes();
        let source =
            Source::new(std::io::Cursor::new(text)).and_then(|source| Self::parse(source, None));
        source.unwrap_or_else(|e| panic!("{e}"))
    }

    fn parse(mut source: Source, device: Option<u32>) -> Result<Self, TraceError> {
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

    /// The trace of one device of several: of the one that is asked for, or of the one with most
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

    /// What the numbers of its steps count.
    pub(crate) fn unit(&self) -> &'static str {
        match self.format {
            Format::Events | Format::Rmm => "row",
            Format::Made => "step",
            Format::Snapshot => "event",
        }
    }

    /// How many blocks are allocated.
    pub(crate) fn allocations(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Allocations and frees.
    pub(crate) fn operations(&self) -> u64 {
        self.allocations() + self.frees
    }

    /// Blocks that a stream other than their own uses.
    #[cfg(test)]
    pub(crate) fn crossings(&self) -> u64 {
        self.blocks.iter().filter(|block| block.crosses()).count() as u64
    }
}

#[cfg(test)]
mod recorded;
#[cfg(test)]
mod tests;
