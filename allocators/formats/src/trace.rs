//! Recorded traces of memory allocations, read and checked for replay.
//!
//! A trace is CSV in one of several forms, or a memory snapshot of PyTorch, plain or compressed by
//! xz, gzip or zstd. [`Trace::read`] detects the form by the first bytes. Each form becomes the
//! same [`Trace`]: blocks numbered from zero, streams numbered from zero without gaps, and a list
//! of steps.
//!
//! A replay never has to check a step. An impossible one in this library's own form is rejected
//! with its row. Files of other programs are read as they really end: what is impossible or
//! unknown in them is passed over, and [`Trace::notes`] has the counts by kind in one line. They
//! are refused only if nothing is left.
//!
//! | module | contents |
//! |---|---|
//! | `model` | the trace itself |
//! | `source` | bytes to rows: files, truncated files |
//! | `compressed` | xz, gzip and zstd, with a bound on memory |
//! | `events` | the form of this library and its recorder for PyTorch, with named fields |
//! | `log`, `log_event` | logs of other programs in one form, and what is passed over in them |
//! | `rmm` | the log of RAPIDS' memory manager |
//! | `raft` | samples of RAFT's and cuVS's resources |
//! | `minimalloc` | problems of minimalloc |
//! | `snapshot` | memory snapshots of PyTorch |
//! | [`made`] | workloads generated from a seed, without a file |
//! | `builder`, `named_blocks` | rows to steps, and the checks |
//! | `changed` | the trace of a changed program, or over another number of streams |
//! | `error` | errors |

pub(crate) mod builder;
mod changed;
mod compressed;
pub(crate) mod error;
pub(crate) mod events;
pub(crate) mod log;
pub(crate) mod log_event;
pub mod made;
mod minimalloc;
mod model;
pub(crate) mod named_blocks;
mod raft;
mod rmm;
pub(crate) mod snapshot;
pub(crate) mod source;

pub use error::TraceError;
pub use events::BadTraceDevice;
pub use model::{
    MAX_BLOCK, MAX_STREAMS, SnapshotFacts, Trace, TraceAccount, TraceAction, TraceBlock,
    TraceDevice, TraceFormat, TraceStep,
};

use crate::pickle;
use builder::Builder;
use error::Fault;
use events::Columns;
use log::LogHeader;
use source::TraceSource;
use std::{collections::BTreeMap, io::BufRead, path::Path};

impl Trace {
    /// Reads and checks the file at `path`, the standard input for `-`, or [generates](made) the
    /// trace that `path` names. `device` selects a device. The default is the one with the most
    /// events.
    ///
    /// # Errors
    /// [`TraceError`] with the first invalid row, also if a device is selected and the trace has
    /// none.
    pub fn read(path: &Path, device: Option<u32>) -> Result<Self, TraceError> {
        match made::trace(path) {
            Some(_) if device.is_some() => Err(TraceError::whole(Fault::NoDevices)),
            Some(made) => made,
            None => Self::parse(TraceSource::open(path)?, device),
        }
    }

    /// Reads and checks the contents of a file.
    ///
    /// # Errors
    /// As [`read`](Trace::read).
    pub fn from_reader(
        reader: impl BufRead + 'static,
        device: Option<u32>,
    ) -> Result<Self, TraceError> {
        Self::parse(TraceSource::new(reader)?, device)
    }

    /// Parses a trace in a test.
    #[cfg(test)]
    pub(crate) fn from_rows(rows: &str) -> Self {
        let text = format!("{}\n{rows}", model::EVENTS_HEADER).into_bytes();
        let source = TraceSource::new(std::io::Cursor::new(text))
            .and_then(|source| Self::parse(source, None));
        source.unwrap_or_else(|e| panic!("{e}"))
    }

    fn parse(mut source: TraceSource, device: Option<u32>) -> Result<Self, TraceError> {
        if source.begins_with(pickle::MAGIC)? {
            return snapshot::read(source.bytes(), device);
        }
        let header = Header::read(&mut source)?;
        if device.is_some() && !header.tells_devices() {
            return Err(TraceError::whole(Fault::NoDevices));
        }
        let columns = match header {
            Header::Events(columns) => columns,
            Header::Log(header) => return log::trace(header, &mut source, device),
        };
        let mut builders = BTreeMap::new();
        while let Some((row, text)) = source.next_row()? {
            columns
                .take(text, row, &mut builders)
                .map_err(|fault| TraceError { row: Some(row), fault })?;
        }
        let facts =
            (TraceFormat::Events, columns.tells_devices(), columns.note().into_iter().collect());
        Self::of_device(builders, facts, device).map_err(TraceError::whole)
    }

    /// Returns the trace of one of several devices: the selected one, or the one with the most
    /// steps. `facts` are the form, whether it distinguishes devices, and notes.
    fn of_device(
        mut builders: BTreeMap<TraceDevice, Builder>,
        facts: (TraceFormat, bool, Vec<String>),
        asked: Option<u32>,
    ) -> Result<Self, Fault> {
        let (format, tells_devices, notes) = facts;
        let accounts = |(&device, builder): (&TraceDevice, &Builder)| {
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
                TraceDevice::Gpu(device) if builder.blocks() > 0 => Some(*device),
                _ => None,
            })
            .collect();
        let steps = |device: &u32| {
            (builders[&TraceDevice::Gpu(*device)].steps(), std::cmp::Reverse(*device))
        };
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
        let builder = builders.remove(&TraceDevice::Gpu(chosen)).ok_or(Fault::NoAllocation)?;
        let mut trace = builder.finish(format)?;
        trace.notes.extend(notes);
        if gpus.len() > 1 {
            trace.notes.push(format!(
                "the trace has memory of {} devices, of which device {chosen} is read; \
                 --device-index picks another",
                gpus.len()
            ));
        }
        let pinned: u64 = memory
            .iter()
            .filter(|(device, _)| matches!(device, TraceDevice::Host(_)))
            .map(|(_, account)| account.allocations)
            .sum();
        if pinned > 0 {
            trace
                .notes
                .push(format!("{pinned} blocks of pinned host memory in the trace are left out"));
        }
        if tells_devices {
            (trace.memory, trace.device, trace.devices) = (memory, Some(chosen), gpus);
        }
        Ok(trace)
    }
}

/// The first row of a file.
#[derive(Debug)]
pub(crate) enum Header {
    /// Of this library's own form.
    Events(Columns),
    /// Of another program's.
    Log(LogHeader),
}

impl Header {
    /// Reads the first row.
    pub(crate) fn read(source: &mut TraceSource) -> Result<Self, TraceError> {
        let (row, header) = source.next_row()?.ok_or(TraceError::whole(Fault::Empty))?;
        let form = Columns::of(header).map(Self::Events);
        form.or_else(|| LogHeader::of(header).map(Self::Log)).ok_or_else(|| {
            let fault = Fault::Header { found: header.to_owned() };
            TraceError { row: Some(row), fault }
        })
    }

    /// Returns whether the rows distinguish devices.
    pub(crate) fn tells_devices(&self) -> bool {
        match self {
            Self::Events(columns) => columns.tells_devices(),
            Self::Log(header) => header.tells_devices(),
        }
    }
}

#[cfg(test)]
mod tests;
