//! A conformance suite for the contract of [`Allocator`].
//!
//! [`check`] runs allocations, frees, growths and shrinks in a seeded random order against any
//! allocator. It keeps a ledger of all blocks and verifies these rules:
//!
//! - live blocks never overlap, have the requested alignment, and have at least the requested size
//! - contents stay unchanged until the block is freed, and growing and shrinking keep the common
//!   prefix
//! - zeroed memory is zero, also after a growth
//! - a block may be freed, grown or shrunk with any size from the requested to the returned one
//! - a failed call changes nothing
//! - an empty block can be allocated with any alignment, freed, grown, and shrunk to
//! - clones are interchangeable ([`check_clone`])
//! - nothing unwinds
//!
//! The first broken rule ends the run with a [`ContractViolation`]. It contains the seed and the
//! operation, so that the run can be repeated.
//!
//! ```
//! use allocator_api2::alloc::Global;
//! use aquifer::conformance::Suite;
//! aquifer::conformance::check(&Global)?;
//! Suite::new().seed(7).operations(200).check_clone(&Global)?;
//! # Ok::<(), aquifer::conformance::ContractViolation>(())
//! ```

mod ledger;
mod suite;
mod violation;

pub use suite::Suite;
pub use violation::{AllocatorCall, ContractFault, ContractViolation};

use allocator_api2::alloc::Allocator;

/// Runs the default [`Suite`] against an allocator.
///
/// # Errors
/// The first [`ContractViolation`].
pub fn check<A: Allocator>(allocator: &A) -> Result<(), ContractViolation> {
    Suite::new().check(allocator)
}

/// Runs the default [`Suite`] against an allocator and clones of it.
///
/// # Errors
/// The first [`ContractViolation`].
pub fn check_clone<A: Allocator + Clone>(allocator: &A) -> Result<(), ContractViolation> {
    Suite::new().check_clone(allocator)
}
