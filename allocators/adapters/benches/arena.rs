//! What an arena costs on this machine, beside bumpalo's on bumpalo's own kind of work, and beside `malloc`.
//!
//! ```text
//! cargo bench -p aquifer-adapters --bench arena                   every row, with the ratio to bumpalo in the same run
//! cargo bench -p aquifer-adapters --bench arena -- --count strings ours     one side of one row, to be counted:
//! valgrind --tool=callgrind --toggle-collect='*::measured' target/release/deps/arena-* --count strings bumpalo
//! ```
//!
//! Each round of a row fills an arena by [`OPERATIONS`] operations and resets it, so that after the first rounds both
//! arenas have one chunk that serves all; *fresh* makes and drops the arena in each round. Sides alternate within a row,
//! and the ratio is that of the smallest times: what others do on the machine only adds.
#![expect(clippy::print_stdout, reason = "a benchmark shows what it found")]

use allocator_api2::{boxed::Box, vec::Vec};
use aquifer_adapters::{Arena, ArenaSettings};
use bumpalo::Bump;
use std::{error::Error, hint::black_box, time::Instant};

/// Operations of one round.
const OPERATIONS: usize = 10_000;
/// Rounds of each side.
const ROUNDS: usize = 400;

/// What both sides can do. Each method stands for one operation of a row; all are inlined into the round.
#[expect(clippy::mut_from_ref, reason = "each call hands out a block of its own")]
trait Side {
    const NAME: &'static str;
    fn fresh() -> Self;
    fn reset(&mut self);
    fn value(&self, value: u64) -> &mut u64;
    fn record(&self, value: [u32; 9]) -> &mut [u32; 9];
    fn byte(&self, value: u8) -> &mut u8;
    fn slice(&self, source: &[u32]) -> &mut [u32];
    fn filled(&self, len: usize) -> &mut [u64];
    fn string(&self, source: &str) -> &mut str;
    fn pushes(&self, count: usize) -> Vec<u32, impl allocator_api2::alloc::Allocator>;
    fn boxed(&self, value: u64);
}

macro_rules! side {
    ($t:ty, $name:literal, $fresh:expr, $reset:expr) => {
        impl Side for $t {
            const NAME: &'static str = $name;
            fn fresh() -> Self {
                $fresh
            }
            #[inline]
            fn reset(&mut self) {
                $reset(self)
            }
            #[inline]
            fn value(&self, value: u64) -> &mut u64 {
                self.alloc(value)
            }
            #[inline]
            fn record(&self, value: [u32; 9]) -> &mut [u32; 9] {
                self.alloc(value)
            }
            #[inline]
            fn byte(&self, value: u8) -> &mut u8 {
                self.alloc(value)
            }
            #[inline]
            fn slice(&self, source: &[u32]) -> &mut [u32] {
                self.alloc_slice_copy(source)
            }
            #[inline]
            fn filled(&self, len: usize) -> &mut [u64] {
                self.alloc_slice_fill_with(len, |at| at as u64)
            }
            #[inline]
            fn string(&self, source: &str) -> &mut str {
                self.alloc_str(source)
            }
            #[inline]
            fn pushes(&self, count: usize) -> Vec<u32, impl allocator_api2::alloc::Allocator> {
                push(Vec::new_in(self), count)
            }
            #[inline]
            fn boxed(&self, value: u64) {
                drop(black_box(Box::new_in(value, self)));
            }
        }
    };
}

side!(
    Arena,
    "ours",
    Arena::with_settings_in(ArenaSettings::new(), allocator_api2::alloc::Global),
    |arena: &mut Arena| {
        // Without gates there is nothing that could fail.
        let _reset = arena.reset();
    }
);
side!(Bump, "bumpalo", Bump::with_capacity(4 << 10), Bump::reset);

#[inline]
fn push<A: allocator_api2::alloc::Allocator>(mut list: Vec<u32, A>, count: usize) -> Vec<u32, A> {
    for at in 0..count {
        list.push(at as u32);
    }
    list
}

/// One kind of work.
#[derive(Clone, Copy)]
enum Row {
    Values,
    Records,
    Mixed,
    Slices,
    Filled,
    Strings,
    Pushes,
    Boxes,
    Fresh,
}

const ROWS: [(&str, Row); 9] = [
    ("values", Row::Values),
    ("records", Row::Records),
    ("mixed", Row::Mixed),
    ("slices", Row::Slices),
    ("filled", Row::Filled),
    ("strings", Row::Strings),
    ("pushes", Row::Pushes),
    ("boxes", Row::Boxes),
    ("fresh", Row::Fresh),
];

impl Row {
    fn about(self) -> &'static str {
        match self {
            Self::Values => "a u64",
            Self::Records => "a record of 36 B",
            Self::Mixed => "a byte, then a u64",
            Self::Slices => "a copied slice of 0 to 15 u32",
            Self::Filled => "a filled slice of 0 to 15 u64",
            Self::Strings => "a string of 0 to 31 B",
            Self::Pushes => "a push on vectors of 100 u32",
            Self::Boxes => "a box, dropped at once",
            Self::Fresh => "a new arena, 100 u64 in it, dropped",
        }
    }
}

const TEXT: &str = "the quick brown fox jumps over t";
const NUMBERS: [u32; 16] = [7; 16];

/// One round of a row; the arena comes back full.
#[inline]
fn round<S: Side>(side: &S, row: Row) {
    match row {
        Row::Values => (0..OPERATIONS).for_each(|at| {
            black_box(side.value(at as u64));
        }),
        Row::Records => (0..OPERATIONS).for_each(|at| {
            black_box(side.record([at as u32; 9]));
        }),
        Row::Mixed => (0..OPERATIONS / 2).for_each(|at| {
            black_box(side.byte(at as u8));
            black_box(side.value(at as u64));
        }),
        Row::Slices => (0..OPERATIONS).for_each(|at| {
            black_box(side.slice(&NUMBERS[..at & 15]));
        }),
        Row::Filled => (0..OPERATIONS).for_each(|at| {
            black_box(side.filled(at & 15));
        }),
        Row::Strings => (0..OPERATIONS).for_each(|at| {
            black_box(side.string(&TEXT[..at & 31]));
        }),
        Row::Pushes => (0..OPERATIONS / 100).for_each(|_| drop(black_box(side.pushes(black_box(100))))),
        Row::Boxes => (0..OPERATIONS).for_each(|at| side.boxed(at as u64)),
        Row::Fresh => (0..OPERATIONS / 100).for_each(|_| {
            let fresh = S::fresh();
            (0..100).for_each(|at| {
                black_box(fresh.value(at));
            });
        }),
    }
}

/// What callgrind is told to count.
#[inline(never)]
fn measured<S: Side>(side: &mut S, row: Row) {
    round(side, row);
    side.reset();
}

/// ns of one operation.
fn timed<S: Side>(side: &mut S, row: Row) -> f64 {
    let begun = Instant::now();
    measured(side, row);
    begun.elapsed().as_nanos() as f64 / OPERATIONS as f64
}

/// The yardstick: as many boxes of the process's own allocator, kept until the end as those of an arena are.
#[expect(clippy::vec_box, reason = "the boxes are what is measured")]
fn malloc(kept: &mut std::vec::Vec<std::boxed::Box<u64>>) -> f64 {
    let begun = Instant::now();
    for at in 0..OPERATIONS {
        kept.push(black_box(std::boxed::Box::new(at as u64)));
    }
    kept.clear();
    begun.elapsed().as_nanos() as f64 / OPERATIONS as f64
}

fn count<S: Side>(row: Row) {
    let mut side = S::fresh();
    // The chunks are there before the counting begins.
    (0..4).for_each(|_| measured(&mut side, row));
}

fn main() -> Result<(), std::boxed::Box<dyn Error>> {
    let arguments: std::vec::Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--count") {
        let name = arguments.get(at + 1).ok_or("a row is missing")?;
        let (_, row) = ROWS.iter().find(|(row, _)| row == name).ok_or("no such row")?;
        match arguments.get(at + 2).map(String::as_str) {
            Some("ours") => count::<Arena>(*row),
            Some("bumpalo") => count::<Bump>(*row),
            _ => return Err("which side: ours or bumpalo".into()),
        }
        return Ok(());
    }
    println!(
        "{:<38} {:>8} {:>8} {:>8} {:>7}",
        "ns, the least of all rounds",
        Arena::NAME,
        Bump::NAME,
        "malloc",
        "ratio"
    );
    let mut kept = std::vec::Vec::with_capacity(OPERATIONS);
    for (_, row) in ROWS {
        let (mut ours, mut theirs) = (Arena::fresh(), Bump::fresh());
        let mut least = [f64::INFINITY; 3];
        for _ in 0..ROUNDS {
            least[0] = least[0].min(timed(&mut ours, row));
            least[1] = least[1].min(timed(&mut theirs, row));
            least[2] = least[2].min(malloc(&mut kept));
        }
        let [ours, theirs, malloc] = least;
        println!("{:<38} {ours:>8.2} {theirs:>8.2} {malloc:>8.2} {:>7.2}", row.about(), ours / theirs);
    }
    Ok(())
}
