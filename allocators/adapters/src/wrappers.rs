//! Adapters that each add one rule to another allocator.
//!
//! | wrapper | rule |
//! |---|---|
//! | [`Limit`] | live bytes are bounded by a [`Budget`](aquifer_core::Budget) |
//! | [`CountingAllocator`] | counts live bytes and blocks, their peak, and the calls of each kind |
//! | [`Tagged`] | attributes allocations to one [`Tag`](aquifer_core::Tag) in the pools below |
//! | [`Fallback`] | a second allocator serves requests that the first refuses |
//! | [`Segregate`] | small blocks come from one allocator, larger ones from another |
//!
//! They wrap both kinds of memory. Over an `Allocator` they are allocators. Over a source
//! of [`Opaque`](aquifer_core::Opaque) blocks, such as a device pool, they are such a source. An
//! opaque source never becomes an allocator of host memory:
//!
//! ```compile_fail,E0277
//! use aquifer::{Limit, Opaque};
//! fn on_the_device<M: Opaque>(pool: Limit<M>) -> allocator_api2::vec::Vec<u8, Limit<M>> {
//!     allocator_api2::vec::Vec::new_in(pool)
//! }
//! ```
//!
//! An adapter that counts bytes returns blocks of exactly the requested size, even if the upstream
//! allocator returned more. A block may be freed with any size between both, so only equal sizes
//! can be counted exactly.
//!
//! No adapter blocks or unwinds, unless the upstream allocator does.

mod blocks;
mod counted;
mod fallback;
mod limit;
mod owns;
mod segregate;
mod tagged;

pub use counted::CountingAllocator;
pub use fallback::Fallback;
pub use limit::Limit;
pub use owns::Owns;
pub use segregate::Segregate;
pub use tagged::Tagged;
