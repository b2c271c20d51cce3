//! Recorded traces of memory allocations, read and checked for replay.
//!
//! A trace is CSV in one of several forms, or a memory snapshot of PyTorch, plain or compressed by
//! xz, gzip or zstd. [`Trace::read`] detects the form by the first bytes. Each form is read as a
//! [`MemoryHistory`](crate::history::MemoryHistory) is, of which a [`Trace`] keeps what a replay
//! needs: blocks numbered from zero, streams numbered from zero without gaps, and a list of steps.
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
//! | `skips` | what is passed over in files of other programs |
//! | `snapshot` | memory snapshots of PyTorch |
//! | `named_blocks` | the lives of blocks, and the checks |
//! | `changed` | the trace of a changed program, or over another number of streams |
//! | `error` | errors |

mod changed;
mod compressed;
pub(crate) mod error;
pub(crate) mod events;
mod model;
pub(crate) mod named_blocks;
pub(crate) mod skips;
pub(crate) mod snapshot;
pub(crate) mod source;

pub use error::TraceError;
pub use events::BadTraceDevice;
pub use model::{
    MAX_BLOCK, MAX_STREAMS, Trace, TraceAction, TraceBlock, TraceDevice, TraceFormat, TraceStep,
};

#[cfg(test)]
impl Trace {
    /// Parses a trace in a test.
    pub(crate) fn from_rows(rows: &str) -> Self {
        let text = format!("{}\n{rows}", model::EVENTS_HEADER).into_bytes();
        let read = Self::from_reader(std::io::Cursor::new(text), None);
        read.unwrap_or_else(|e| panic!("{e}"))
    }
}

#[cfg(test)]
mod tests;
