//! Logs and problems of other programs, in one form.
//!
//! Each form has a reader that turns its rows into [`LogEvent`]s that are possible one after
//! another: no block is freed that does not live, and none is allocated in the place of another.
//! What contradicts that is corrected or passed over, and counted.

use super::{
    Fault, Trace, TraceDevice, TraceError, TraceFormat,
    builder::Builder,
    log_event::{LogAction, LogEvent, LogPhase, LogSink, Skips, UNREADABLE},
    minimalloc::{Problem, ProblemColumns},
    raft::RaftReader,
    rmm::{RmmColumns, RmmReader},
    source::TraceSource,
};
use aquifer_core::event::BlockKind;
use std::collections::BTreeMap;

/// The header of a log, which says how its rows are read.
#[derive(Debug)]
pub(crate) enum LogHeader {
    /// Of RAPIDS' memory manager.
    Rmm(RmmColumns),
    /// Of RAFT's or cuVS's resources.
    Raft(RaftReader),
    /// Of a problem of minimalloc.
    Minimalloc(ProblemColumns),
}

/// What is known of a log besides its events.
#[derive(Debug)]
pub(crate) struct LogFacts {
    pub(crate) format: TraceFormat,
    /// Whether its times are microseconds.
    pub(crate) tells_times: bool,
    /// Whether its rows distinguish devices.
    pub(crate) tells_devices: bool,
    pub(crate) phases: Vec<LogPhase>,
    pub(crate) notes: Vec<String>,
    pub(crate) skips: Skips,
}

impl LogHeader {
    /// Parses a header. Returns `None` if it is that of no log.
    pub(crate) fn of(header: &str) -> Option<Self> {
        RmmColumns::of(header)
            .map(Self::Rmm)
            .or_else(|| RaftReader::of(header).map(Self::Raft))
            .or_else(|| ProblemColumns::of(header).map(Self::Minimalloc))
    }

    /// Returns whether the rows distinguish devices.
    pub(crate) fn tells_devices(&self) -> bool {
        match self {
            Self::Rmm(columns) => columns.tells_devices(),
            Self::Raft(_) => true,
            Self::Minimalloc(_) => false,
        }
    }

    /// Reads the rows after the header.
    pub(crate) fn read(
        self,
        source: &mut TraceSource,
        sink: &mut LogSink<'_>,
    ) -> Result<LogFacts, TraceError> {
        let tells_devices = self.tells_devices();
        let mut skips = Skips::default();
        let (mut phases, mut notes) = (Vec::new(), Vec::new());
        let (format, tells_times) = match self {
            Self::Rmm(columns) => {
                let mut reader = RmmReader::new(columns);
                each_row(source, &mut skips, false, |row, text, skips| {
                    reader.take(row, text, skips, sink)
                })?;
                (TraceFormat::Rmm, true)
            }
            Self::Raft(mut reader) => {
                each_row(source, &mut skips, false, |row, text, skips| {
                    reader.take(row, text, skips, sink)
                })?;
                (phases, notes) = reader.finish();
                (TraceFormat::Raft, true)
            }
            Self::Minimalloc(columns) => {
                let mut problem = Problem::new(columns);
                let take = |row, text: &str, skips: &mut Skips| {
                    problem.take(row, text, skips);
                    Ok(())
                };
                // Problems are written by hand too, where the last line may have no end.
                each_row(source, &mut skips, true, take)?;
                problem.play(sink)?;
                (TraceFormat::Minimalloc, false)
            }
        };
        notes.extend(skips.note());
        Ok(LogFacts { format, tells_times, tells_devices, phases, notes, skips })
    }
}

/// Calls `take` with each whole row, and with one that is cut off if it is wanted. Counts the
/// others.
fn each_row(
    source: &mut TraceSource,
    skips: &mut Skips,
    takes_cut_row: bool,
    mut take: impl FnMut(u64, &str, &mut Skips) -> Result<(), Fault>,
) -> Result<(), TraceError> {
    loop {
        match source.next_row() {
            Ok(None) => return Ok(()),
            Ok(Some((row, text))) => {
                take(row, text, skips).map_err(|fault| TraceError { row: Some(row), fault })?;
            }
            Err(TraceError { row: Some(row), fault: Fault::CutRow }) if takes_cut_row => {
                let took = take(row, source.cut_row(), skips);
                took.map_err(|fault| TraceError { row: Some(row), fault })?;
            }
            Err(TraceError { row, fault: fault @ Fault::CutRow }) => {
                skips.add_error("rows cut off at the end", row, fault);
            }
            Err(TraceError { row, fault: fault @ Fault::NoText }) => {
                skips.add_error(UNREADABLE, row, fault);
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads a log for a replay.
pub(super) fn trace(
    header: LogHeader,
    source: &mut TraceSource,
    device: Option<u32>,
) -> Result<Trace, TraceError> {
    let mut builders: BTreeMap<TraceDevice, Builder> = BTreeMap::new();
    let facts = header.read(source, &mut |event| {
        let &LogEvent { row, bytes, stream, .. } = event;
        let builder = builders.entry(event.device).or_insert_with(Builder::new);
        let id = event.name();
        match event.action {
            LogAction::Allocate => {
                let kind = event.kind().unwrap_or(BlockKind::Cached);
                builder.allocate_as(row, id, bytes, stream, kind, event.tag)
            }
            LogAction::Release => {
                builder.free(row, id, bytes, stream)?;
                builder.complete(row, id, bytes, stream)
            }
            LogAction::Fail | LogAction::Nothing => {
                builder.skip();
                Ok(())
            }
        }
    })?;
    let LogFacts { format, tells_devices, notes, skips, .. } = facts;
    let unreadable = skips.count(UNREADABLE);
    Trace::of_device(builders, (format, tells_devices, notes), device)
        .map(|trace| Trace { unreadable, ..trace })
        .map_err(|fault| skips.explain(TraceError::whole(fault)))
}
