//! The workloads of arenas.

use super::sides::{Rewinds, Side};
use crate::lap::{Contender, Failed, Lap};
use allocator_api2::{alloc::Allocator, vec::Vec as AllocVec};
use std::{
    alloc::Layout,
    array,
    cmp::Reverse,
    hint::black_box,
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

/// Scratch memory that is freed together. Its name is its rows'.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Scratch {
    /// A device pool's search for memory, in the form of `trim`: a list by address of the free
    /// ranges of eight caches, a list of the entirely free handles, and the ranges taken with the
    /// first of them.
    Pass,
    /// The global allocator's report, in the form of `stacks`: samples are summed up by their call
    /// stacks.
    Report,
    /// A staging worker's list of the contents of one slot.
    Moves,
}

impl Scratch {
    pub(super) const ALL: [Self; 3] = [Self::Pass, Self::Report, Self::Moves];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Pass => "lists of a pass",
            Self::Report => "lists of a report",
            Self::Moves => "list of a worker",
        }
    }

    pub(super) fn use_once<A: Allocator + Copy>(self, allocator: A) {
        match self {
            Self::Pass => pass(allocator),
            Self::Report => report(allocator),
            Self::Moves => moves(&mut AllocVec::new_in(allocator)),
        }
    }
}

/// A free range: start, bytes, cache, whether it is complete.
type Offer = (u64, u64, usize, bool);

fn pass<A: Allocator + Copy>(allocator: A) {
    let (mut offers, mut live) = (AllocVec::<Offer, A>::new_in(allocator), 0);
    for cache in 0..black_box(8) {
        (0..40).for_each(|at| offers.push((at * 800 + cache * 100, 100, cache as usize, true)));
        live += cache;
    }
    offers.sort_unstable_by_key(|offer| offer.0);
    let mut candidates = AllocVec::new_in(allocator);
    for stretch in offers.chunk_by(|a, b| a.0 + a.1 == b.0) {
        candidates.extend(stretch.iter().step_by(16).map(|offer| (offer.0, stretch.len() as u64)));
    }
    candidates.sort_unstable_by_key(|candidate| Reverse(*candidate));
    let mut taken = AllocVec::new_in(allocator);
    for candidate in candidates.iter().take(8) {
        let from = offers.partition_point(|offer| offer.0 < candidate.0);
        let mut pieces = AllocVec::new_in(allocator);
        offers[from..].iter().take(2).for_each(|offer| pieces.push(*offer));
        taken.push((candidate.0, pieces));
    }
    black_box((&taken, live));
}

/// The call stacks of a hundred samples, from eight places.
fn report<A: Allocator + Copy>(allocator: A) {
    let mut places: AllocVec<(AllocVec<u64, A>, u64), A> = AllocVec::new_in(allocator);
    for sample in 0..black_box(100u64) {
        let frames: [u64; 20] = array::from_fn(|frame| frame as u64 + sample % 8);
        match places.binary_search_by(|(known, _)| known[..].cmp(&frames[..])) {
            Ok(at) => places[at].1 += sample,
            Err(at) => {
                let mut new = AllocVec::with_capacity_in(frames.len(), allocator);
                new.extend_from_slice(&frames);
                places.insert(at, (new, sample));
            }
        }
    }
    places.sort_by_key(|(_, bytes)| Reverse(*bytes));
    black_box(&places);
}

/// Sixteen pieces, each with its host address, device address, offset in the slot, and bytes.
pub(super) fn moves<A: Allocator>(list: &mut AllocVec<[u64; 5], A>) {
    list.clear();
    (0..black_box(16)).for_each(|at| list.push([0, at, at << 16, at << 12, 4096]));
    black_box(&list);
}

/// Returns a contender that runs a round of [`ROUND`] operations for each piece.
pub(super) fn rounds<'a>(mut round: impl FnMut() + 'a) -> Contender<'a> {
    Box::new(move |pieces| {
        let begun = Instant::now();
        (0..pieces).for_each(|_| round());
        lap(begun.elapsed(), pieces * ROUND)
    })
}

/// As [`rounds`], for work outside an arena.
pub(super) fn passes<'a>(mut pass: impl FnMut() + 'a) -> Contender<'a> {
    rounds(move || (0..ROUND).for_each(|_| pass()))
}

fn lap(took: Duration, operations: u64) -> Lap {
    let each = took.as_nanos() as f64 / operations as f64;
    Lap { took, over_all: each, each, failed: Failed::default() }
}
