//! The memory figures of each process that uses the library, in a small mapped file.
//!
//! A process maps one file in a folder of its user, and stores the figures of its pools there.
//! Other processes of the user read them. No thread and no server is involved.
//!
//! | module | holds |
//! |---|---|
//! | `layout` | the layout of the file |
//! | `folder` | the folder of the files, and its checks |
//! | `region` | the memory that the file is mapped over, and the lines that caches have claimed |
//! | `state` | whether this process publishes now, and how often a slow path writes |
//! | `publication` | the file of this process, from its creation to its end, and its figures read back |
//! | `sequence` | the protocol by which readers get consistent figures |
//! | `slot` | the figures of one pool, written by slow paths |
//! | `text` | texts in words |
//! | `line` | the figures of one cache, written by its hot path |
//! | `reader` | the figures of all processes |
//! | [`ledger`] | bytes of one memory, shared by the processes of a machine |
//! | `error` | what is wrong with a file |
//!
//! # Invariants
//! - **No decision depends on the file.** Another process of the user can write to it. This process
//!   writes copies of figures, and never reads them back.
//! - **Publication changes nothing for the program.** If it fails, this is reported once on
//!   standard error.
//! - **A child of a fork never writes to its parent's file.** Its first slow path creates a file of
//!   its own. A child that a raw `clone` call creates is not covered, since the C library does not
//!   see it.
//! - **No process number is trusted.** A process holds a lock on its file, which the kernel
//!   releases when it dies.
//!
//! Part of aquifer; promises no stability beyond what aquifer re-exports.

mod error;
pub mod folder;
mod layout;
pub mod ledger;
mod line;
mod publication;
mod reader;
mod region;
mod sequence;
mod slot;
mod state;
pub mod text;

pub use error::{FileFault, StatusError};
pub use line::{CacheFigures, CacheLine};
pub use publication::{disable, resume, start};
pub use reader::{PoolStatus, ProcessStatus, StatusFiles, StatusFolder};
pub use region::{claim_line, is_shown};
pub use slot::{PoolFigures, PoolKind, PoolSlot, SlotDescription, tightest_limit};
pub use state::{PublishTimer, is_published};
