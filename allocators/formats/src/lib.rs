//! Records of the life of memory blocks, in our own format and in those of other libraries.
//!
//! | module | holds |
//! |---|---|
//! | [`rmm`] | [`RmmLog`]: writes the log of RAPIDS' memory manager |
//! | [`snapshot`] | [`MemorySnapshot`]: writes PyTorch's memory snapshots |
//! | `trace` | `Trace`: reads these two and our own format for a replay, with the feature `read` |
//! | `history` | `MemoryHistory`: reads the same for an analysis, with the feature `read` |
//! | [`plan`] | [`Plan`](plan::Plan): a place for each block of a recorded program |
//! | `pickle` | reads Python pickles, which snapshots are |
//! | `names` | interned text and call stacks |
//!
//! [`TraceFile`](aquifer_core::event::TraceFile) writes our own format. Compressed files are read
//! as well, so the feature `read` builds decoders of xz, gzip and zstd.
#![forbid(unsafe_code)]

#[cfg(feature = "read")]
pub mod history;
#[cfg(feature = "read")]
mod names;
#[cfg(feature = "read")]
mod pickle;
pub mod plan;
pub mod rmm;
pub mod snapshot;
#[cfg(feature = "read")]
pub mod trace;

pub use rmm::RmmLog;
pub use snapshot::{HeldBlock, MemorySnapshot};
