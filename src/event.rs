//! Events: one record for every operation on memory, and the sinks that receive them.
//!
//! | sink | effect |
//! |---|---|
//! | [`RingSink`] | keeps the last events in memory, without a lock |
//! | [`TraceFile`] | writes a row in our own format, which `aquifer replay` reads |
//! | [`RmmLog`] | writes a row in the format of RAPIDS' memory manager |
//! | [`TracingSink`] | passes it to the program's logging |
//!
//! A [`MemorySnapshot`] writes the events of a ring for PyTorch's memory viewer. A [`LineLog`] is a
//! file for a sink of your own. [Watching](crate::guide::watching) has examples.

pub use aquifer_core::event::{
    Action, BlockKind, Event, EventSink, LineLog, MemoryLocation, Recorder, RingSink, TraceFile,
    TracingSink,
};
pub use aquifer_formats::{MemorySnapshot, RmmLog};
