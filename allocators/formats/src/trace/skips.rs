//! What a reader passes over in the files of other programs.
//!
//! Such files are read as they really end: cut off by a kill, begun late, written by two programs.
//! A reader refuses what is not its format at all. Everything else that it cannot use is passed
//! over and counted by kind.

use super::error::{Fault, TraceError};

/// The kind of rows that do not have the form of their log.
pub(crate) const UNREADABLE: &str = "rows that cannot be read";

/// Counts of what was passed over, by kind.
#[derive(Default, Debug)]
pub(crate) struct Skips {
    counts: Vec<(&'static str, u64)>,
    /// The first error, for an input of which nothing is left.
    first: Option<TraceError>,
}

impl Skips {
    /// Counts one. The kinds are few.
    pub(crate) fn add(&mut self, kind: &'static str) {
        match self.counts.iter_mut().find(|(there, _)| *there == kind) {
            Some((_, count)) => *count += 1,
            None => self.counts.push((kind, 1)),
        }
    }

    /// Counts one with its error.
    pub(crate) fn add_error(&mut self, kind: &'static str, row: Option<u64>, fault: Fault) {
        self.add(kind);
        self.first.get_or_insert(TraceError { row, fault });
    }

    /// Returns the count of one kind.
    pub(crate) fn count(&self, kind: &str) -> u64 {
        self.counts.iter().find(|(there, _)| *there == kind).map_or(0, |(_, count)| *count)
    }

    /// Returns the counts in one line, if anything was passed over.
    pub(crate) fn note(&self) -> Option<String> {
        let counts: Vec<_> =
            self.counts.iter().map(|(kind, count)| format!("{kind} ({count})")).collect();
        (!counts.is_empty()).then(|| format!("passed over: {}", counts.join(", ")))
    }

    /// Returns the error of an input in which nothing is allocated: the first one that was passed
    /// over, since that is the reason.
    pub(crate) fn explain(self, error: TraceError) -> TraceError {
        match (error.fault, self.first) {
            (Fault::NoAllocation, Some(first)) => first,
            (fault, _) => TraceError { row: error.row, fault },
        }
    }
}
