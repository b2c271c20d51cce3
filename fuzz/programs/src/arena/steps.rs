//! A ring of arenas, one per step, whose blocks devices still read.
#![expect(clippy::panic, reason = "a broken promise ends the program")]

use super::{books::Books, shadow::Shadow};
use crate::program::{Bytes, MAX_OPS, count_operation};
use aquifer_adapters::{Arena, ArenaScope, ArenaSettings, Frames, OnReset};
use aquifer_core::{DeferReuse, MemoryError};

/// Maximum depth of nested scopes.
const MAX_DEPTH: u8 = 4;

/// Runs the program that `bytes` encodes.
pub(crate) fn run(bytes: &mut Bytes<'_>) {
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
        count_operation();
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
