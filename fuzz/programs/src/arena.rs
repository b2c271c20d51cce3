//! Programs over a ring of arenas, one per step, with nested scopes, whose blocks devices still
//! read.
//!
//! The arenas are over an allocator that tracks its blocks ([`books`]), fails when the program says
//! so, and holds freed blocks back until their gates are open. Invariants after every operation:
//!
//! - live blocks do not overlap, are aligned, and have the contents that were written;
//! - bytes that a device may still read keep their contents, freed or not;
//! - zeroed memory is zero, grown or shrunk blocks keep the common part, and a failed operation
//!   changes nothing.
//!
//! At the end everything is freed with the layout that it was allocated with, or with another one
//! that fits.
#![expect(clippy::panic, reason = "a broken promise ends the program")]

pub(crate) mod books;
mod shadow;

use crate::program::{Bytes, MAX_OPS};
use aquifer_adapters::{Arena, ArenaScope, ArenaSettings, Frames, OnReset};
use aquifer_core::{DeferReuse, MemoryError};
use books::Books;
use shadow::Shadow;

/// Maximum depth of nested scopes.
const MAX_DEPTH: u8 = 4;

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &[u8]) {
    let bytes = &mut Bytes::new(bytes);
    let books = Books::default();
    let on_reset =
        [OnReset::KeepLargest, OnReset::KeepAll, OnReset::Merge][usize::from(bytes.choice(3))];
    let limit = 2000 << bytes.choice(6);
    let settings = ArenaSettings::new()
        .first_chunk(100)
        .max_chunk(100 << bytes.choice(6))
        .limit(limit)
        .on_reset(on_reset);
    let count = 1 + usize::from(bytes.choice(3));
    let mut frames = Frames::with_settings_in(count, settings, books.clone());
    // What devices read of each frame. The blocks of a step are dropped with it.
    let mut steps: Vec<Shadow> = (0..count).map(|_| Shadow::default()).collect();
    let mut ops = 0;
    for turn in 0.. {
        if bytes.is_empty() || ops >= MAX_OPS {
            break;
        }
        let own = &mut steps[turn % count];
        let was_held = own.is_held();
        let mut frame = match frames.next() {
            Ok(frame) => {
                assert!(!was_held, "a step began while the one in its frame was still read");
                frame
            }
            Err(error) => {
                assert!(was_held && error == MemoryError::TimedOut, "{error}");
                own.open_all();
                let Ok(frame) = frames.next() else { panic!("every gate is open") };
                frame
            }
        };
        own.forget();
        let stats = frame.arena().stats();
        assert_eq!(stats.allocated, 0);
        assert!(stats.capacity <= limit + 3 * stats.chunks);
        in_arena(frame.arena_mut(), own, &books, bytes, &mut ops);
        steps.iter().for_each(Shadow::check);
    }
    // The arenas are dropped while devices still read their memory.
    steps.iter_mut().for_each(Shadow::forget);
    drop(frames);
    steps.iter().for_each(Shadow::check);
    steps.iter_mut().for_each(Shadow::open_all);
    books.refuse(0);
    assert_eq!(books.reap(), (0, 0), "something was not given back");
}

/// Performs a step: operations and scopes.
fn in_arena(
    arena: &mut Arena<Books>,
    own: &mut Shadow,
    books: &Books,
    bytes: &mut Bytes<'_>,
    ops: &mut usize,
) {
    loop {
        some(&&*arena, own, books, bytes, ops);
        if bytes.is_empty() || *ops >= MAX_OPS || bytes.choice(3) == 0 {
            return;
        }
        let before = arena.stats().allocated;
        let held = arena.scope(|scope| in_scope(scope, own, books, bytes, ops, 1));
        let after = arena.stats().allocated;
        assert!(
            after == before || held && after > before,
            "{before} before the scope, {after} after it"
        );
    }
}

/// Performs a scope. Returns whether a device reads something in it.
fn in_scope(
    scope: &mut ArenaScope<'_, Books>,
    outer: &Shadow,
    books: &Books,
    bytes: &mut Bytes<'_>,
    ops: &mut usize,
    depth: u8,
) -> bool {
    let mut own = Shadow::default();
    let mut held = false;
    loop {
        held |= some(&&*scope, &mut own, books, bytes, ops);
        if bytes.is_empty() || *ops >= MAX_OPS || depth == MAX_DEPTH || bytes.choice(3) == 0 {
            break;
        }
        held |= scope.scope(|inner| in_scope(inner, &own, books, bytes, ops, depth + 1));
        own.check();
    }
    outer.check();
    own.open_all();
    held
}

/// Performs a few operations. Returns whether a device reads something.
fn some<A: DeferReuse>(
    arena: &A,
    own: &mut Shadow,
    books: &Books,
    bytes: &mut Bytes<'_>,
    ops: &mut usize,
) -> bool {
    let mut held = false;
    for _ in 0..bytes.choice(12) {
        *ops += 1;
        match bytes.choice(12) {
            0 => {
                own.defer(arena, bytes);
                held = true;
            }
            1 => own.open_one(bytes),
            2 => books.refuse(u32::from(bytes.choice(5))),
            _ => own.step(arena, bytes),
        }
    }
    held
}
