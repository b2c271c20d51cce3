//! Bump allocation over any allocator.
//!
//! ```text
//!   Arena ──► Bump ──► next ─┐            a block is one addition and one comparison
//!                            ▼
//!             ┌──────────────┬─────┐   ┌──────────────────────┐
//!   chunks    │ handed out   │     │   │ spare                │   each a block of the allocator below
//!             └──────────────┴─────┘   └──────────────────────┘
//! ```
//!
//! Bookkeeping lies beside the chunks, never in them: chunks may be pinned memory that a device
//! still writes.

mod allocator;
mod bump;
mod chunks;
mod scope;
mod settings;
mod typed;

pub use handle::Arena;
pub use scope::Scope;
pub use settings::{ArenaSettings, ArenaStats, OnReset};

mod handle;

/// Where an arena stood, for [`Arena::rewind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// Chunks in use.
    entered: usize,
    /// Bytes of the last of them that were handed out.
    offset: usize,
    /// The last one's base address.
    base: usize,
}
