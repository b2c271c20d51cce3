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
//! 3. For few blocks, the exact search of [`exact`] goes on from there.
//!
//! Should the time be too short for the first try, blocks are placed as an allocator would: each in
//! the smallest gap when it begins.
//!
//! The search ends when the top is the load, which no plan is below, or when its tries or its time
//! are spent.

use crate::plan::{block::Lives, exact, occupancy::Occupancy, random::PlanRandom};
use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

/// Tries of a climb without a better top after which the next climb begins.
const PATIENCE: u32 = 32;
/// Blocks that are placed between two looks at the clock.
const STRIDE: usize = 1024;
/// The most tries before an exact search.
const TRIES: u32 = 64;
/// Steps of an exact search for the last of these and each further try of the options.
const STEPS: u64 = 1 << 22;

/// How long a plan may be searched for.
///
/// The result depends on the blocks, the seed and the tries alone, unless the time is spent before
/// the tries are.
///
/// See the example of [`Plan`](crate::plan::Plan).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PlanOptions {
    /// The time after which no try is begun or continued. If it is too short for the first, blocks
    /// are placed in one pass over time, which is not counted.
    pub time: Duration,
    /// The most tries. At least one is made. For up to 512 blocks, an exact search takes the place
    /// of the 65th try and all after it, and has four million steps for the 64th and each later
    /// one.
    pub tries: u32,
    /// The seed of the random numbers.
    pub seed: u64,
}

impl Default for PlanOptions {
    /// Returns 64 tries within 4 s.
    fn default() -> Self {
        Self { time: Duration::from_secs(4), tries: TRIES, seed: 1 }
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
    let is_small = lives.len() <= exact::MOST;
    let mut tries = Tries {
        lives,
        occupancy: Occupancy::new(lives.len()),
        at: vec![0; lives.len()],
        best: Placed { at: Vec::new(), top: u32::MAX, tries: 0 },
        deadline: Instant::now().checked_add(options.time),
        most: options.tries.clamp(1, if is_small { TRIES } else { u32::MAX }),
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
        if tries.is_over() || tries.place(&first(rank)).is_none() {
            break;
        }
    }
    if tries.best.tries == 0 {
        return in_order(lives);
    }
    let mut random = PlanRandom::new(options.seed);
    // The orders that climbs improve most come first: the last to end, then the largest.
    for rank in RANKS.into_iter().cycle() {
        if tries.is_over() || tries.climb(first(rank), &mut random).is_none() {
            break;
        }
    }
    if is_small && options.tries >= TRIES {
        let limits = (u64::from(options.tries - TRIES + 1) * STEPS, tries.deadline);
        let best = &mut tries.best;
        exact::lower(lives, best.top, limits, &mut random, |top, at| {
            (best.top, best.at) = (top, at);
        });
    }
    tries.best
}

/// Places each block in the smallest gap that is free when it begins.
fn in_order(lives: &Lives) -> Placed {
    let mut ends: Vec<u32> = (0..lives.len() as u32).collect();
    ends.sort_unstable_by_key(|&block| lives.slots[block as usize].end);
    let mut ends = ends.into_iter().peekable();
    let (mut at, mut top) = (vec![0; lives.len()], 0_u32);
    // Where gaps below the top end, by where they start; where they start, by size.
    let (mut gaps, mut sizes) = (BTreeMap::new(), BTreeSet::new());
    for (block, &units) in lives.units.iter().enumerate() {
        while let Some(ended) = ends.next_if(|&b| lives.slots[b as usize].end as usize <= block) {
            let mut start = at[ended as usize];
            let mut end = u32::saturating_add(start, lives.units[ended as usize]);
            if let Some((&before, _)) =
                gaps.range(..start).next_back().filter(|gap| *gap.1 == start)
            {
                gaps.remove(&before);
                sizes.remove(&(start - before, before));
                start = before;
            }
            if let Some(after) = gaps.remove(&end) {
                sizes.remove(&(after - end, end));
                end = after;
            }
            gaps.insert(start, end);
            sizes.insert((end - start, start));
        }
        let start = match sizes.range((units, 0)..).next().copied() {
            Some((size, start)) => {
                sizes.remove(&(size, start));
                gaps.remove(&start);
                if size > units {
                    gaps.insert(start + units, start + size);
                    sizes.insert((size - units, start + units));
                }
                start
            }
            None => {
                let start = top;
                top = top.saturating_add(units);
                start
            }
        };
        at[block] = start;
    }
    Placed { at, top, tries: 1 }
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
            if late {
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
