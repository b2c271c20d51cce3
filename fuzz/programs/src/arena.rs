//! Programs over arenas and over stacks of wrappers.
//!
//! The first byte selects the kind: [`stacks`] stacks up to four wrappers and allocates from the
//! outermost, and [`steps`] runs a ring of arenas with nested scopes and pending copies. Both are
//! over an allocator that tracks its blocks ([`books`]), fails when the program says so, and holds
//! freed blocks back until their gates are open. Invariants after every operation:
//!
//! - live blocks do not overlap, are aligned, and have the contents that were written;
//! - bytes that a device may still read keep their contents, freed or not;
//! - zeroed memory is zero, grown or shrunk blocks keep the common part, and a failed operation
//!   changes nothing.
//!
//! At the end everything is freed with the layout that it was allocated with, or with another one
//! that fits.

pub(crate) mod books;
pub(crate) mod shadow;
pub(crate) mod stacks;
pub(crate) mod steps;

use crate::program::Bytes;

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    match bytes.choice(4) {
        0 | 1 => stacks::run(&mut bytes),
        _ => steps::run(&mut bytes),
    }
}
