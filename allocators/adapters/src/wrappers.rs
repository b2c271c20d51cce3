//! One rule each, laid over another allocator.
//!
//! | wrapper | rule |
//! |---|---|
//! | [`Limit`] | no more live bytes than a [`Budget`](aquifer_core::Budget) grants |
//! | [`Counted`] | live bytes and blocks, their peak, and how many of each call there were |
//! | [`Tagged`] | what is allocated here belongs to one [`Tag`](aquifer_core::Tag), for the pools below |
//! | [`Fallback`] | a second allocator serves what the first refuses |
//!
//! A wrapper that counts bytes hands out blocks of exactly the size that was asked for, even if the allocator below
//! gave more: a block may be given back with any size in between, and so only an exact one can be counted exactly.
//!
//! Nothing here blocks or unwinds, unless the allocator below does.

mod counted;
mod fallback;
mod limit;
mod owns;
mod tagged;

pub use counted::Counted;
pub use fallback::Fallback;
pub use limit::Limit;
pub use owns::Owns;
pub use tagged::Tagged;
