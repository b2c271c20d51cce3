//! Python pickles, as far as memory snapshots need them.
//!
//! The crate serde-pickle cannot read snapshots of gigabytes: it keeps every string, copies an
//! object for each use of its memo, bounds neither, and refuses the calls that PyTorch's own
//! pickler writes.

mod details;
mod reader;
mod word;

pub(crate) use reader::{MAGIC, Objects, PickleError, read};
pub(crate) use word::{Value, Word};
