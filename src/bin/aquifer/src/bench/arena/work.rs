//! What is done in an arena.

use super::sides::{Rewinds, Side};
use crate::bench::lap::{Contender, Failed, Lap};
use allocator_api2::{alloc::Allocator, boxed::Box as AllocBox, vec::Vec as AllocVec};
use std::{
    alloc::Layout,
    hint::black_box,
    time::{Duration, Instant},
};

/// Operations of a round, after which the arena is empty again.
const ROUND: u64 = 1000;
/// Numbers in a new arena.
const FRESH: u64 = 100;
/// Numbers between a reset and the next, and above a mark.
const FEW: u64 = 10;
/// Pushes onto a vector.
const PUSHES: u32 = 100;

const TEXT: &str = "the quick brown fox jumps over t";
const NUMBERS: [u32; 16] = [7; 16];

/// Something that is done over and over. Its name is its row's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Work {
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

impl Work {
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

    /// Rounds of it in `side`.
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

/// What goes back to where it was, which bumpalo does not.
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
        // Something stays below, as it does in a program.
        side.value(0);
        rounds(move || match self {
            Self::Mark => (0..ROUND).for_each(|_| side.marked(FEW)),
            Self::Scopes => (0..ROUND).for_each(|_| side.nested(FEW)),
        })
    }
}

/// A block's layout, by its place in the round: sizes that have nothing to do with each other.
#[inline]
fn mixed(at: u64) -> Layout {
    let size = 8 + (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 55) as usize % 505;
    // Neither is ever wrong.
    Layout::from_size_align(size, 8).unwrap_or(Layout::new::<u64>())
}

/// What is needed for a moment and goes together. Its name is its rows'.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scratch {
    /// A look for memory in a handful of places: what is free in each is collected, and then all of it.
    Pass,
    /// A report: samples are copied, brought into order, and summed up by what they have in common.
    Report,
    /// Records that a thread makes for itself, each in a place of its own, and follows.
    Metadata,
}

impl Scratch {
    pub(super) const ALL: [Self; 3] = [Self::Pass, Self::Report, Self::Metadata];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pass => "scratch of a pass",
            Self::Report => "scratch of a report",
            Self::Metadata => "metadata of a worker",
        }
    }

    pub(super) fn use_once<A: Allocator + Copy>(self, allocator: A) {
        match self {
            Self::Pass => pass(allocator),
            Self::Report => report(allocator),
            Self::Metadata => metadata(allocator),
        }
    }
}

fn pass<A: Allocator + Copy>(allocator: A) {
    let mut all: AllocVec<[u64; 3], A> = AllocVec::new_in(allocator);
    for place in 0..8u64 {
        let mut found = AllocVec::new_in(allocator);
        (0..black_box(40)).for_each(|at| found.push([at, place, 0]));
        all.extend_from_slice(&found);
    }
    black_box(&all);
}

/// Call stacks of a hundred samples, of eight places.
fn report<A: Allocator + Copy>(allocator: A) {
    let mut samples = AllocVec::new_in(allocator);
    for sample in 0..black_box(100u64) {
        let mut frames = AllocVec::with_capacity_in(20, allocator);
        frames.extend((0..20).map(|frame| frame + sample % 8));
        samples.push((frames, sample));
    }
    samples.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    let mut places = AllocVec::new_in(allocator);
    for of_one in samples.chunk_by(|a, b| a.0 == b.0) {
        places.push(of_one.iter().map(|&(_, bytes)| bytes).sum::<u64>());
    }
    black_box(&places);
}

fn metadata<A: Allocator + Copy>(allocator: A) {
    let mut records = AllocVec::new_in(allocator);
    for record in 0..black_box(100u64) {
        records.push(AllocBox::new_in([record; 6], allocator));
    }
    black_box(records.iter().map(|record| record[5]).sum::<u64>());
}

/// A contender that runs a round of [`ROUND`] operations for each piece.
pub(super) fn rounds<'a>(mut round: impl FnMut() + 'a) -> Contender<'a> {
    Box::new(move |pieces| {
        let begun = Instant::now();
        (0..pieces).for_each(|_| round());
        lap(begun.elapsed(), pieces * ROUND)
    })
}

/// As [`rounds`], of what is no arena's.
pub(super) fn passes<'a>(mut pass: impl FnMut() + 'a) -> Contender<'a> {
    rounds(move || (0..ROUND).for_each(|_| pass()))
}

fn lap(took: Duration, operations: u64) -> Lap {
    let each = took.as_nanos() as f64 / operations as f64;
    Lap { took, over_all: each, each, failed: Failed::default() }
}
