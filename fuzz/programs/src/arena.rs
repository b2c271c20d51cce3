//! Programs over arenas and over stacks of wrappers.
//!
//! The first byte says which kind: [`stacks`] lays up to four wrappers over each other and
//! allocates from the topmost, [`steps`] runs a ring of arenas with nested scopes and copies that
//! are still on their way, [`pages`] takes and frees runs of pages. Below each lies an allocator
//! that keeps books ([`books`]), refuses when the program says so, and holds freed blocks back
//! until their gates are open. After every operation:
//!
//! - live blocks lie apart, are aligned, and hold what was written into them;
//! - bytes that a device may still read hold what they held, freed or not;
//! - what is zeroed is zero, what grows or shrinks keeps the common part, what is refused is as it
//!   was.
//!
//! In the end everything is given back, with the layout that it was taken with or one that fits as
//! well.

pub mod books;
pub mod pages;
pub mod shadow;
pub mod stacks;
pub mod steps;

use crate::program::Bytes;

/// Runs the program that `bytes` spell.
///
/// # Panics
///
/// When a promise is broken.
pub fn run(bytes: &[u8]) {
    let mut bytes = Bytes::new(bytes);
    match bytes.choice(4) {
        0 | 1 => stacks::run(&mut bytes),
        2 => steps::run(&mut bytes),
        _ => pages::run(&mut bytes),
    }
}
