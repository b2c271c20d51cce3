//! What the allocator contract says, asked of a running allocator.
//!
//! [`check`] runs a battery of allocations, frees, growths and shrinkages in a seeded random order
//! against any allocator, and beside it keeps a ledger of what must be true:
//!
//! - live blocks never overlap, are aligned as asked and at least as long;
//! - contents stay until the block is given back; growing and shrinking keep the common prefix;
//! - zeroed means zero, after a growth as well;
//! - a block may be given back, grown or shrunk with any size from the one asked for to the one
//!   returned;
//! - a call that fails changes nothing;
//! - a block of no bytes can be had, aligned, and given back, grown and shrunk to;
//! - clones are interchangeable ([`check_clone`]);
//! - nothing unwinds.
//!
//! The first thing that is not true ends the run with a [`Violation`], which names the seed and the
//! operation, so that the same run can be had again.
//!
//! ```
//! use aquifer_adapters::{Arena, conformance};
//! let arena = Arena::new();
//! conformance::check(&&arena)?;
//! conformance::Suite::new().seed(7).operations(200).check_clone(&&arena)?;
//! # Ok::<(), conformance::Violation>(())
//! ```

mod ledger;
mod random;
mod suite;
mod violation;

pub use suite::Suite;
pub use violation::{Call, Fault, Violation};

use allocator_api2::alloc::Allocator;

/// Runs the default [`Suite`] against an allocator.
///
/// # Errors
/// The first [`Violation`].
pub fn check<A: Allocator>(allocator: &A) -> Result<(), Violation> {
    Suite::new().check(allocator)
}

/// Runs the default [`Suite`] against an allocator and its clones, in turn.
///
/// # Errors
/// The first [`Violation`].
pub fn check_clone<A: Allocator + Clone>(allocator: &A) -> Result<(), Violation> {
    Suite::new().check_clone(allocator)
}
