//! The search for an order of placement.
//!
//! Blocks are placed one after another, each at the lowest address that is free during its life
//! (greedy by size: Pisarchyk and Lee, "Efficient Memory Management for Deep Neural Net Inference",
//! arXiv 2001.03288, 2020). What matters is the order:
//!
//! 1. Several orders are tried. Large blocks first is nearly always good, and some programs have a
//!    better one.
//! 2. Each of them is the start of a climb: the blocks that lie above the load are promoted, mostly
//!    to half their distance from the front, and all are placed again. A climb goes on from its
//!    last try, which may be worse than the one before, until many tries have improved nothing.
//!
//! The search ends when the top is the load, which no plan is below, or when its tries or its time
//! are spent.

use crate::plan::{block::Lives, occupancy::Occupancy};
use aquifer_core::random::SplitMix64;
use std::time::{Duration, Instant};

/// Tries of a climb without a better top after which the next climb begins.
const PATIENCE: u32 = 32;
/// Blocks that are placed between two looks at the clock.
const STRIDE: usize = 1024;

/// How long a plan may be searched for.
///
/// The result depends on the blocks, the seed and the tries alone, unless the time is spent before
/// the tries are.
///
/// See the example of [`Plan`](crate::plan::Plan).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The time after which no try is begun or continued. The first is always finished.
    pub time: Duration,
    /// The most tries. At least one is made.
    pub tries: u32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Default for PlanOptions {
    /// Returns 64 tries within 4 s.
    fn default() -> Self {
        Self { time: Duration::from_secs(4), tries: 64, seed: 1 }
    }
}

/// The result of a search.
#[derive(Debug)]
pub(crate) struct Placed {
    /// The first unit of each block.
    pub(crate) at: Vec<u32>,
    /// The first unit above all blocks. Saturates.
    pub(crate) top: u32,
    /// The number of finished tries.
    pub(crate) tries: u32,
}

/// What a first order sorts by, the greatest first: size, length of life and end.
type Rank = fn(u32, u32, u32) -> u64;

/// The first orders. Climbs begin in this order too.
const RANKS: [Rank; 5] = [
    // The last to end first.
    |_, _, end| u64::from(end),
    |units, _, _| u64::from(units),
    // By size and the fourth root of life.
    |units, life, _| (f64::from(units) * f64::from(life).sqrt().sqrt()) as u64,
    // By powers of two, and within them by life.
    |units, life, _| u64::from(units.ilog2()) << 32 | u64::from(life),
    // As they were allocated.
    |_, _, _| 0,
];

/// Returns the new place of a promoted block: mostly half as far from the front, and now and then
/// anywhere before.
fn promoted(place: u64, random: &mut PlanRandom) -> u64 {
    if random.below(8) == 0 { random.below(place + 1) } else { place / 2 }
}

/// Searches for a low top. `streams` are the streams of the blocks.
pub(crate) fn search(lives: &Lives, streams: &[u32], options: &PlanOptions) -> Placed {
    let mut tries = Tries {
        lives,
        occupancy: Occupancy::new(lives.len()),
        at: vec![0; lives.len()],
        best: Placed { at: Vec::new(), top: u32::MAX, tries: 0 },
        deadline: Instant::now().checked_add(options.time),
        most: options.tries.max(1),
    };
    let first = |rank: Rank| {
        let mut order: Vec<u32> = (0..lives.len() as u32).collect();
        // Among equals those of one stream come together, so that they take each other's addresses.
        order.sort_by_cached_key(|&block| {
            let (units, life) = (lives.units[block as usize], &lives.slots[block as usize]);
            let rank = rank(units, life.end - life.start, life.end);
            (u64::MAX - rank, streams[block as usize], block)
        });
        order
    };
    // The largest first is the best guess, should there be time for one try only.
    for rank in [RANKS[1], RANKS[0], RANKS[2], RANKS[3], RANKS[4]] {
        if tries.place(&first(rank)).is_none() || tries.is_over() {
            return tries.best;
        }
    }
    let mut random = PlanRandom::new(options.seed);
    // The orders that climbs improve most come first: the last to end, then the largest.
    for rank in RANKS.into_iter().cycle() {
        if tries.climb(first(rank), &mut random).is_none() || tries.is_over() {
            break;
        }
    }
    tries.best
}

/// The tries of a search.
struct Tries<'a> {
    lives: &'a Lives,
    occupancy: Occupancy,
    /// The addresses of the last try.
    at: Vec<u32>,
    best: Placed,
    deadline: Option<Instant>,
    most: u32,
}

impl Tries<'_> {
    /// Places all blocks in this order, and returns the top. Returns `None` if the time is spent
    /// before.
    fn place(&mut self, order: &[u32]) -> Option<u32> {
        self.occupancy.clear();
        let mut top = 0;
        for some in order.chunks(STRIDE) {
            let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
            if late && self.best.tries > 0 {
                return None;
            }
            for &block in some {
                let block = block as usize;
                let units = self.lives.units[block];
                let at = self.occupancy.place(self.lives.slots[block].clone(), units);
                self.at[block] = at;
                top = top.max(at.saturating_add(units));
            }
        }
        if self.best.tries == 0 || top < self.best.top {
            self.best.top = top;
            self.best.at.clone_from(&self.at);
        }
        self.best.tries += 1;
        Some(top)
    }

    fn is_over(&self) -> bool {
        self.best.top <= self.lives.load || self.best.tries >= self.most
    }

    /// Climbs from an order until nothing is gained any more or the search is over. Returns `None`
    /// if the time is spent.
    fn climb(&mut self, mut order: Vec<u32>, random: &mut PlanRandom) -> Option<()> {
        let mut lowest = self.place(&order)?;
        let mut failed = 0;
        let mut places: Vec<(u64, u32)> = Vec::with_capacity(order.len());
        while failed < PATIENCE && !self.is_over() {
            places.clear();
            for (place, &block) in (0..).zip(&order) {
                let end = self.at[block as usize].saturating_add(self.lives.units[block as usize]);
                let place = if end > self.lives.load { promoted(place, random) } else { place };
                places.push((place, block));
            }
            // A stable sort keeps the order of those that stay.
            places.sort_by_key(|&(place, _)| place);
            order.clear();
            order.extend(places.iter().map(|&(_, block)| block));
            let top = self.place(&order)?;
            failed = if top < lowest { 0 } else { failed + 1 };
            lowest = lowest.min(top);
        }
        Some(())
    }
}

/// The random numbers of a search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanRandom(SplitMix64);

impl PlanRandom {
    /// Creates a generator. Equal seeds give equal numbers.
    pub(crate) fn new(seed: u64) -> Self {
        Self(SplitMix64::new(seed))
    }

    /// Returns a number below `bound`, or 0.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        // The upper half of the product: the bias is below `bound` / 2^64.
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }
}
