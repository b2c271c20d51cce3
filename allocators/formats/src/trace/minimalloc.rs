//! Problems of minimalloc, a solver for static memory allocation (Moffitt, ASPLOS
//! 2023), and its solutions.
//!
//! A row per buffer, with named columns: `id`, `lower`, `upper` and `size`. A buffer lives from
//! `lower` up to, but not including, `upper`. In the older form these are `buffer` or `buffer_id`,
//! `start` or `begin`, and `end`, which is included. A solution also has `offset`. `alignment`,
//! `hint` and `gaps` are passed over: a buffer counts as used in its gaps.

use super::{
    Fault, TraceError,
    builder::size,
    log_event::{LogAction, LogEvent, LogSink, Skips, UNREADABLE},
};

/// The maximum number of columns.
const MOST: usize = 32;

/// The position of each field in a row.
#[derive(Debug)]
pub(crate) struct ProblemColumns {
    count: usize,
    id: usize,
    lower: usize,
    upper: usize,
    /// What is added to `upper`.
    more: i64,
    size: usize,
    offset: Option<usize>,
    alignment: Option<usize>,
    gaps: Option<usize>,
}

/// A buffer.
#[derive(Debug)]
struct Buffer {
    id: String,
    row: u64,
    bytes: u64,
    offset: Option<u64>,
}

impl ProblemColumns {
    /// Parses a header. Returns `None` if it is not one of this form.
    pub(crate) fn of(header: &str) -> Option<Self> {
        let names: Vec<&str> = header.split(',').collect();
        let at = |wanted: &[&str]| names.iter().position(|name| wanted.contains(name));
        let more = i64::from(at(&["upper"]).is_none());
        Some(Self {
            count: Some(names.len()).filter(|count| *count <= MOST)?,
            id: at(&["id", "buffer", "buffer_id"])?,
            lower: at(&["lower", "begin", "start"])?,
            upper: at(&["upper"]).or_else(|| at(&["end"]))?,
            more,
            size: at(&["size"])?,
            offset: at(&["offset"]),
            alignment: at(&["alignment"]),
            gaps: at(&["gaps"]),
        })
    }

    /// Parses a row: the buffer and its life.
    fn parse(&self, row: u64, text: &str, skips: &mut Skips) -> Result<(Buffer, i64, i64), Fault> {
        let fields: Vec<&str> = text.split(',').collect();
        if fields.len() != self.count {
            return Err(Fault::Fields { found: fields.len(), expected: self.count });
        }
        let time = |name, place: usize| {
            let (text, expected) = (fields[place], "a whole number");
            let time = text.trim().parse::<i64>().ok();
            time.ok_or_else(|| Fault::Field { name, found: text.to_owned(), expected })
        };
        let (lower, upper) = (time("lower", self.lower)?, time("upper", self.upper)?);
        let upper = upper.saturating_add(self.more);
        let bytes = size(fields[self.size].trim())?;
        let offset = match self.offset {
            Some(place) => u64::try_from(time("offset", place)?).ok(),
            None => None,
        };
        if self.alignment.is_some_and(|place| !matches!(fields[place].trim(), "" | "1")) {
            skips.add("alignments");
        }
        if self.gaps.is_some_and(|place| !fields[place].trim().is_empty()) {
            skips.add("gaps in the use of buffers");
        }
        Ok((Buffer { id: fields[self.id].to_owned(), row, bytes, offset }, lower, upper))
    }
}

/// A problem that is being read.
#[derive(Debug)]
pub(super) struct Problem {
    columns: ProblemColumns,
    buffers: Vec<Buffer>,
    /// Times, whether a buffer begins then, and its index. What ends at a time comes before what
    /// begins then.
    events: Vec<(i64, bool, usize)>,
}

impl Problem {
    pub(super) fn new(columns: ProblemColumns) -> Self {
        Self { columns, buffers: Vec::new(), events: Vec::new() }
    }

    /// Takes one row.
    pub(super) fn take(&mut self, row: u64, text: &str, skips: &mut Skips) {
        if text.is_empty() {
            return;
        }
        match self.columns.parse(row, text, skips) {
            Ok((buffer, lower, upper)) if lower < upper => {
                let place = self.buffers.len();
                self.events.extend([(lower, true, place), (upper, false, place)]);
                self.buffers.push(buffer);
            }
            Ok(_) => skips.add("buffers that never live"),
            Err(fault) => skips.add_error(UNREADABLE, Some(row), fault),
        }
    }

    /// Plays the lives of all buffers, in the order of time.
    pub(super) fn play(mut self, sink: &mut LogSink<'_>) -> Result<(), TraceError> {
        self.events.sort_unstable();
        let first = self.events.first().map_or(0, |(time, ..)| *time);
        for (time, begins, place) in self.events {
            let buffer = &self.buffers[place];
            let action = if begins { LogAction::Allocate } else { LogAction::Release };
            let time = time.wrapping_sub(first) as u64 as f64;
            let event = LogEvent {
                address: buffer.offset,
                metadata: &buffer.id,
                ..LogEvent::new(action, buffer.row, time, place as u64, buffer.bytes)
            };
            sink(&event).map_err(|fault| TraceError { row: Some(buffer.row), fault })?;
        }
        Ok(())
    }
}
