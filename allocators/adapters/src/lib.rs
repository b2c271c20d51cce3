//! Arenas and adapters over any allocator. Part of aquifer; promises no stability beyond what
//! aquifer re-exports.
//!
//! | module | holds |
//! |---|---|
//! | [`arena`] | [`Arena`]: a bump allocator over any allocator, with scopes, marks and gates |
//! | [`conformance`] | randomised tests of the contract of any allocator |
//! | [`frames`] | [`Frames`]: a ring of arenas, one for each step in flight |
//! | [`wrappers`] | adapters that add one rule each, such as [`Limit`] |
//!
//! # Composition
//! Every type here takes an [`Allocator`] by value and is an
//! allocator itself. So a stack is written from the outside in. A reference to an allocator
//! (`&pool`) is an allocator too:
//!
//! ```
//! use aquifer::{Arena, Budget, Limit, adapters::CountingAllocator};
//! use allocator_api2::{alloc::Global, vec::Vec};
//!
//! let budget = Budget::new("parser", 1 << 20);
//! let pool = CountingAllocator::new(Limit::new(Global, budget.clone()));
//! let arena = Arena::new_in(&pool);
//! let mut tokens = Vec::new_in(&arena);
//! tokens.extend(0..1000u32);
//! assert_eq!(pool.stats().live, budget.used());
//! ```
//!
//! # Memory that a device may still read
//! If the upstream allocator can hold back a block until queued work is complete
//! ([`DeferReuse`](aquifer_core::DeferReuse)), so can an arena or adapter over it. The guarantee
//! holds through the whole stack, even if a part of the stack is dropped or forgotten.
//!
//! [`Allocator`]: https://docs.rs/allocator-api2/0.2/allocator_api2/alloc/trait.Allocator.html

pub mod arena;
pub mod conformance;
pub mod frames;
pub mod wrappers;

pub use arena::{Arena, ArenaMark, ArenaScope, ArenaSettings, ArenaStats, OnReset};
pub use frames::{Frame, Frames, NextFrame};
pub use wrappers::{CountingAllocator, Fallback, Limit, Owns, Segregate, Tagged};
