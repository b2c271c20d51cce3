//! Arenas and wrappers over any allocator, and the suite that any allocator must pass.
//!
//! | module | holds |
//! |---|---|
//! | [`arena`] | [`Arena`]: bump allocation over any allocator, with scopes, marks and gates |
//! | [`frames`] | [`Frames`]: a ring of arenas, one for each step in flight |
//! | [`pages`] | [`PageArena`]: runs of pages by their offset in one block, with bounds-checked views |
//! | [`wrappers`] | [`Limit`], [`Counted`], [`Tagged`], [`Fallback`], [`Segregate`], [`Guarded`], [`Cached`]: one rule each, laid over another allocator |
//! | [`conformance`] | what the allocator contract says, asked of a running allocator at random |
//!
//! # How they compose
//! Everything here takes an [`Allocator`](allocator_api2::alloc::Allocator) by value and is one, so
//! that a stack is written from the outside in, and a borrowed allocator (`&pool`) is an allocator
//! too:
//!
//! ```
//! use aquifer_adapters::{Arena, Counted, Limit};
//! use aquifer_core::Budget;
//! use allocator_api2::{alloc::Global, vec::Vec};
//!
//! let budget = Budget::new("parser", 1 << 20);
//! let pool = Counted::new(Limit::new(Global, budget.clone()));
//! let arena = Arena::new_in(&pool);
//! let mut tokens = Vec::new_in(&arena);
//! tokens.extend(0..1000u32);
//! assert_eq!(pool.stats().live, budget.used());
//! ```
//!
//! # Memory that a device may still read
//! Where the allocator below can hold a block back until queued work is done
//! ([`DeferReuse`](aquifer_core::DeferReuse)), an arena or a wrapper over it can too: the promise
//! reaches through the whole stack, and it holds when any part of the stack is dropped or
//! forgotten.

pub mod arena;
pub mod conformance;
pub mod frames;
pub mod pages;
pub mod wrappers;

pub use arena::{Arena, ArenaSettings, ArenaStats, Mark, OnReset, Scope};
pub use frames::{Frame, Frames, NextFrame};
pub use pages::{PageArena, Pages};
pub use wrappers::{Cached, Counted, Fallback, Guarded, Limit, Owns, Segregate, Tagged};
