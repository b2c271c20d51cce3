//! Physical memory behind a pool's addresses.
//!
//! A pool has one range of addresses and a set of physical handles. Addresses are cheap and handles
//! are memory, so handles are moved to where they are needed: those of live blocks stay, and those
//! under free ranges can be unmapped and mapped elsewhere.

pub(crate) mod handle;
pub(crate) mod mapped;
pub(crate) mod options;
pub(crate) mod shared_free;
pub(crate) mod slots;
pub(crate) mod window;
