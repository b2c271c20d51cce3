//! Recorded histories of memory, read for analysis: every block with its life, address and origin,
//! and what the pool did meanwhile.
//!
//! [`MemoryHistory::read`] accepts every input of [`Trace::read`](crate::trace::Trace::read) and is
//! as strict. A [`Trace`](crate::trace::Trace) has what a replay needs; a history also has times,
//! addresses, threads, tags, call stacks and physical memory, as far as the input records them.
//!
//! | module | contents |
//! |---|---|
//! | `model` | the history itself, in columns |
//! | `builder` | rows to columns, and the checks |
//! | `source` | the forms of input |
//! | `layout` | recorded addresses as spans, and first fit for inputs without addresses |
//! | `rmm` | the log of RAPIDS' memory manager |
//! | [`made`] | workloads generated from a seed, without a file |
//! | `extents` | ranges of an address space |

mod builder;
mod extents;
mod layout;
pub mod made;
mod model;
mod rmm;
mod source;

pub use crate::names::{InternTable, NameTable, StackTable};
pub use extents::ExtentTree;
pub use model::{
    AddressSource, AddressSpan, BlockColumns, HistoryAction, HistoryClock, HistoryMark,
    HistoryPhase, HistoryStep, MarkKind, MemoryHistory,
};

#[cfg(test)]
mod tests;
