//! A bump allocator over any allocator.
//!
//! ```text
//!   Arena ──► Bump ──► next ─┐            a block is one addition and one comparison
//!                            ▼
//!             ┌──────────────┬─────┐   ┌──────────────────────┐
//!   chunks    │ handed out   │     │   │ spare                │   each a block of the allocator below
//!             └──────────────┴─────┘   └──────────────────────┘
//! ```
//!
//! Metadata is stored outside the chunks, because chunks may be pinned memory that a device still
//! writes.

mod allocator;
mod bump;
mod chunks;
mod scope;
mod settings;
mod typed;

pub use handle::Arena;
pub use scope::ArenaScope;
pub use settings::{ArenaSettings, ArenaStats, OnReset};

mod handle;

/// A position in an arena, for [`Arena::rewind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ArenaMark {
    /// The number of chunks in use.
    in_use: usize,
    /// The allocated bytes in the last of them.
    offset: usize,
    /// The base address of the last of them.
    base: usize,
}
