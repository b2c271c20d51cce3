//! Python pickles, as far as memory snapshots need them.
//!
//! The crate serde-pickle cannot read snapshots of gigabytes: it keeps every string, copies an
//! object for each use of its memo, bounds neither, and refuses the calls that PyTorch's own
//! pickler writes.

#[cfg(feature = "read")]
mod details;
#[cfg(feature = "read")]
mod reader;
mod word;
mod writer;

#[cfg(feature = "read")]
pub(crate) use reader::{MAGIC, Objects, PickleError, read, read_with_details};
#[cfg(feature = "read")]
pub(crate) use word::Value;
pub(crate) use word::Word;
pub(crate) use writer::Pickler;
