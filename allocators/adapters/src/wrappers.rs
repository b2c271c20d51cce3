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
//! A wrapper that counts bytes hands out blocks of exactly the size that was asked for, even if the allocator below
//! gave more: a block may be given back with any size in between, and so only an exact one can be counted exactly.
//!
//! Nothing here blocks or unwinds, unless the allocator below does.

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
