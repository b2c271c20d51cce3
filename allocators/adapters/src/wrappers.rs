//! One rule each, laid over another allocator.
//!
//! | wrapper | rule |
//! |---|---|
//! | [`Limit`] | no more live bytes than a [`Budget`](aquifer_core::Budget) grants |
//! | [`Counted`] | live bytes and blocks, their peak, and how many of each call there were |
//! | [`Tagged`] | what is allocated here belongs to one [`Tag`](aquifer_core::Tag), for the pools below |
//! | [`Fallback`] | a second allocator serves what the first refuses |
//! | [`Segregate`] | small blocks come from one allocator, larger ones from another |
//! | [`Guarded`] | canaries around blocks, poison in them |
//! | [`Cached`] | what a thread gives back it gets again, without a call of the allocator below |
//!
//! The first five wrap memory of both kinds: an `Allocator` below makes them one, and a source of
//! [`Opaque`](aquifer_core::Opaque) blocks, such as a device's pool, makes them that. Each has one
//! rule for both, and the opaque kind never becomes an allocator of host memory by it:
//!
//! ```compile_fail,E0277
//! use aquifer_adapters::Limit;
//! use aquifer_core::Opaque;
//! fn on_the_device<M: Opaque>(pool: Limit<M>) -> allocator_api2::vec::Vec<u8, Limit<M>> {
//!     allocator_api2::vec::Vec::new_in(pool)
//! }
//! ```
//!
//! Guards and caches have no opaque kind: the host cannot look at a device's bytes, and a device's
//! pool checks its blocks and is a cache itself.
//!
//! A wrapper that counts bytes hands out blocks of exactly the size that was asked for, even if the
//! allocator below gave more: a block may be given back with any size in between, and so only an
//! exact one can be counted exactly.
//!
//! Nothing here blocks or unwinds, unless the memory below does.

mod blocks;
mod cached;
mod counted;
mod fallback;
mod guarded;
mod limit;
mod owns;
mod segregate;
mod tagged;

pub use cached::{CacheStats, Cached};
pub use counted::Counted;
pub use fallback::Fallback;
pub use guarded::{Finding, Guarded};
pub use limit::Limit;
pub use owns::Owns;
pub use segregate::Segregate;
pub use tagged::Tagged;
