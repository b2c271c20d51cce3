//! What memory is made of, below the caches: physical handles and their charges, the table of
//! slots, the search for a window of them, and lists of free ranges.

pub(crate) mod handle;
pub(crate) mod shared_free;
pub(crate) mod slots;
pub(crate) mod window;
