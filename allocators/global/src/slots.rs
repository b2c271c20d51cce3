//! The slot of each thread, in which it counts, and the account that all slots share.

pub(crate) mod charged;
mod slot;
pub(crate) mod tag_cells;

#[cfg(test)]
pub(crate) use slot::SLOTS;
pub(crate) use slot::{SHARED, Slot, claim, recall, slots, totals};
