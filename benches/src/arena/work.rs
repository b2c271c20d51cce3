//! The workloads of arenas.

use super::sides::{Rewinds, Side};
use crate::lap::{Contender, Failed, Lap};
use std::{
    alloc::Layout,
    time::{Duration, Instant},
};

/// Operations per round, after which the arena is empty again.
const ROUND: u64 = 1000;
/// Numbers per new arena.
const FRESH: u64 = 100;
/// Numbers between two resets, and above a mark.
const FEW: u64 = 10;
/// Pushes per vector.
const PUSHES: u32 = 100;

const TEXT: &str = "the quick brown fox jumps over t";
const NUMBERS: [u32; 16] = [7; 16];

/// A repeated workload. Its name is its row's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ArenaWork {
    Values,
    Records,
    Mixed,
    Strings,
    Slices,
    Boxes,
    Growth,
    Reset,
    Fresh,
}

impl ArenaWork {
    pub(super) const ALL: [Self; 9] = [
        Self::Values,
        Self::Records,
        Self::Mixed,
        Self::Strings,
        Self::Slices,
        Self::Boxes,
        Self::Growth,
        Self::Reset,
        Self::Fresh,
    ];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Values => "8 B objects",
            Self::Records => "36 B objects",
            Self::Mixed => "blocks of 8 to 512 B",
            Self::Strings => "strings of up to 31 B",
            Self::Slices => "slices of up to 15 u32",
            Self::Boxes => "box, dropped at once",
            Self::Growth => "vector of 100 u32",
            Self::Reset => "10 objects, reset",
            Self::Fresh => "new arena, 100 objects",
        }
    }

    /// Returns a contender that runs rounds of it in `side`.
    pub(super) fn on<'a, S: Side + 'a>(self, mut side: S) -> Contender<'a> {
        rounds(move || self.round(&mut side))
    }

    fn round<S: Side>(self, side: &mut S) {
        match self {
            Self::Values => (0..ROUND).for_each(|at| side.value(at)),
            Self::Records => (0..ROUND).for_each(|at| side.record([at as u32; 9])),
            Self::Mixed => (0..ROUND).for_each(|at| side.block(mixed(at))),
            Self::Strings => (0..ROUND).for_each(|at| side.text(&TEXT[..at as usize & 31])),
            Self::Slices => (0..ROUND).for_each(|at| side.slice(&NUMBERS[..at as usize & 15])),
            Self::Boxes => (0..ROUND).for_each(|at| side.boxed(at)),
            Self::Growth => (0..ROUND).for_each(|_| side.pushes(PUSHES)),
            Self::Reset => (0..ROUND).for_each(|_| {
                (0..FEW).for_each(|at| side.value(at));
                side.reset();
            }),
            Self::Fresh => (0..ROUND).for_each(|_| side.afresh(FRESH)),
        }
        side.reset();
    }
}

/// Workloads that return to an earlier state, which bumpalo cannot do.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Return {
    Mark,
    Scopes,
}

impl Return {
    pub(super) const ALL: [Self; 2] = [Self::Mark, Self::Scopes];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mark => "mark, 10 objects, rewind",
            Self::Scopes => "scope in a scope, 10 each",
        }
    }

    pub(super) fn on<'a, S: Rewinds + 'a>(self, mut side: S) -> Contender<'a> {
        // One allocation stays below, as in a real program.
        side.value(0);
        rounds(move || match self {
            Self::Mark => (0..ROUND).for_each(|_| side.marked(FEW)),
            Self::Scopes => (0..ROUND).for_each(|_| side.nested(FEW)),
        })
    }
}

/// Returns a block's layout by its index in the round. The sizes are pseudo-random.
#[inline]
fn mixed(at: u64) -> Layout {
    let size = 8 + (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 55) as usize % 505;
    // The layout is always valid.
    Layout::from_size_align(size, 8).unwrap_or(Layout::new::<u64>())
}

/// Returns a contender that runs a round of [`ROUND`] operations for each piece.
fn rounds<'a>(mut round: impl FnMut() + 'a) -> Contender<'a> {
    Box::new(move |pieces| {
        let begun = Instant::now();
        (0..pieces).for_each(|_| round());
        lap(begun.elapsed(), pieces * ROUND)
    })
}

fn lap(took: Duration, operations: u64) -> Lap {
    let each = took.as_nanos() as f64 / operations as f64;
    Lap { took, over_all: each, each, failed: Failed::default() }
}
