//! Pairs in a cache full of free holes, all too small for the requested block.
//!
//! Blocks of random sizes are allocated between blocks that stay, and are freed in random order.
//! Each row has ten times as many as the one before. The largest holes are one unit shorter than
//! the block and belong to the same size class, so a search through a free list has to pass them.
//!
//! ```text
//!   ┌──────┬────┬───┬────┬────────┬────┬─ ─ ─┬──────────────────────────┐
//!   │ hole │live│ … │live│  hole  │live│ …   │ free: where the pair goes │
//!   └──────┴────┴───┴────┴────────┴────┴─ ─ ─┴──────────────────────────┘
//! ```

use super::{
    DeviceBench,
    lane::Lane,
    source::{ASYNC, Async, Pooled, Source, pool},
    work::RandomChoice,
};
use crate::console::figures::Count;
use crate::{
    lap::{Failed, Outcome, contest},
    row::Unit,
};
use aquifer_core::Result;
use std::time::{Duration, Instant};

/// The numbers of holes.
const LEVELS: [u64; 5] = [100, 1_000, 10_000, 100_000, 1_000_000];
/// The granule of sizes, in bytes.
const UNIT: u64 = 512;
/// Units of a block between holes: the smallest block that does not share a slab.
const LIVE: u64 = 33;
/// Sizes of holes, in units. The last is the largest.
const HOLES: std::ops::Range<u64> = 33..127;
/// The requested size, in units.
const PAIR: u64 = 127;
/// The time limit of the driver's allocator for all rows, and again for freeing the rest. Its cost
/// per call may grow with the number of live blocks.
const PATIENCE: Duration = Duration::from_secs(8);

fn name(holes: u64) -> String {
    format!("past {} holes", Count(holes))
}

/// Returns the name of the row that compares the most holes with the fewest.
fn flat() -> String {
    let [fewest, .., most] = LEVELS;
    format!("past {} holes, over {}", Count(most), Count(fewest))
}

/// Returns the bytes that `holes` holes and the blocks between them need, with some room for the
/// pairs.
fn needed(holes: u64) -> u64 {
    holes * UNIT * (LIVE + (HOLES.start + HOLES.end) / 2) / 100 * 101 + (64 << 20)
}

pub(super) fn names(_: &DeviceBench<'_>) -> Vec<String> {
    LEVELS.map(name).into_iter().chain([flat()]).collect()
}

pub(super) fn measure(bench: &mut DeviceBench<'_>) -> Result<()> {
    let wants_flat = bench.sheet.wants(&flat());
    let wanted = |bench: &DeviceBench<'_>, level: u64| {
        bench.sheet.wants(&name(level))
            || (wants_flat && [LEVELS[0], LEVELS[LEVELS.len() - 1]].contains(&level))
    };
    let mut levels = LEVELS.to_vec();
    levels.retain(|&level| wanted(bench, level));
    levels.retain(|&level| bench.has_room(&name(level), needed(level), false));

    let session = bench.session();
    let own = {
        let pool = pool(&session)?;
        let mut cache = Cache::make(Pooled::on(&pool)?, &levels, None);
        let outcomes = cache.levels(bench, &levels, None);
        let failed = cache.clear(None);
        bench.sheet.note("holes", failed);
        outcomes
    };
    // The pool has released everything by now. There is memory for one of the two only.
    let other = match bench.peer(&session)? {
        None => Vec::new(),
        Some(peer) => {
            let until = Some(Instant::now() + PATIENCE);
            let mut cache = Cache::make(Async::on(&peer)?, &levels, until);
            let outcomes = cache.levels(bench, &levels, until);
            // What is left after the time limit is freed when the process ends.
            let failed = cache.clear(Some(Instant::now() + PATIENCE));
            bench.sheet.note("holes (peer)", failed);
            for level in &levels[outcomes.len()..] {
                let why = format!("its rows take more than {} s", PATIENCE.as_secs());
                bench.sheet.leave_out(&name(*level), format!("the peer's figure only: {why}"));
            }
            outcomes
        }
    };
    for (place, (&level, outcome)) in levels.iter().zip(&own).enumerate() {
        let peer = other.get(place).map(|other| (ASYNC, other.each));
        bench.sheet.add(&name(level), Unit::NsPerPair, outcome.each, peer);
    }
    if let (true, [first, .., last], [fewest, .., most]) = (wants_flat, &levels[..], &own[..])
        && [*first, *last] == [LEVELS[0], LEVELS[LEVELS.len() - 1]]
    {
        let against = format!("{} holes", Count(*first));
        bench.sheet.add(&flat(), Unit::NsPerPair, most.each, Some((&against, fewest.each)));
    } else {
        bench.sheet.leave_out(&flat(), "one of its rows is not there".to_owned());
    }
    Ok(())
}

/// A stream's cache with blocks that become holes, and blocks that stay between them.
struct Cache<S: Source> {
    lane: Lane<S>,
    /// In the order of their frees, from the end.
    holes: Vec<S::Held>,
    stay: Vec<S::Held>,
    /// The number of freed holes.
    freed: u64,
}

impl<S: Source> Cache<S> {
    /// Creates a cache with holes for the largest of `levels`, or for as many as time allows.
    fn make(source: S, levels: &[u64], until: Option<Instant>) -> Self {
        let count = levels.last().copied().unwrap_or(0);
        let mut cache =
            Self { lane: Lane::new(source), holes: Vec::new(), stay: Vec::new(), freed: 0 };
        cache.holes.reserve(count as usize);
        cache.stay.reserve(count as usize);
        // One allocation of the whole size first, so that the memory exists and blocks are placed
        // in the order of their requests.
        if let Some(whole) = cache.lane.take(needed(count)) {
            cache.lane.give(whole);
        }
        let mut sizes = RandomChoice::new(count);
        for made in 0..count {
            if made % 1024 == 0 && over(until) {
                break;
            }
            let units = HOLES.start + sizes.below(HOLES.end - HOLES.start);
            let (hole, stay) = (cache.lane.take(units * UNIT), cache.lane.take(LIVE * UNIT));
            cache.holes.extend(hole);
            cache.stay.extend(stay);
        }
        sizes.shuffle(&mut cache.holes);
        cache
    }

    /// Measures pairs for each number of holes, as far as time allows.
    fn levels(
        &mut self,
        bench: &mut DeviceBench<'_>,
        levels: &[u64],
        until: Option<Instant>,
    ) -> Vec<Outcome> {
        let mut outcomes = Vec::new();
        for &level in levels {
            while self.freed < level && !(self.freed.is_multiple_of(1024) && over(until)) {
                let Some(hole) = self.holes.pop() else { break };
                self.lane.give(hole);
                self.freed += 1;
            }
            if self.freed < level {
                break;
            }
            let lane = &mut self.lane;
            let pairs = |count| lane.lap(count, &mut |lane| lane.pairs(PAIR * UNIT, count));
            let outcome = contest(bench.pace, vec![Box::new(pairs)]).pop().unwrap_or_default();
            bench.sheet.note(&name(level), outcome.failed.clone());
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Frees all that is left, as far as time allows, and returns the calls that failed outside the
    /// laps.
    fn clear(mut self, until: Option<Instant>) -> Failed {
        for (place, held) in self.holes.drain(..).chain(self.stay.drain(..)).enumerate() {
            if place.is_multiple_of(1024) && over(until) {
                break;
            }
            self.lane.give(held);
        }
        self.lane.rest();
        self.lane.failed()
    }
}

fn over(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() >= until)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::console::place::{DeviceChoice, Place};
    use crate::lap::Pace;

    #[test]
    fn no_hole_holds_the_pair_and_a_larger_number_of_them_has_the_smaller_in_it() {
        let place = Place::choose(DeviceChoice::Sim).unwrap();
        let mut bench = DeviceBench::new(&place, Pace::QUICK, None, false).unwrap();
        let session = bench.session();
        let pool = pool(&session).unwrap();
        let mut cache = Cache::make(Pooled::on(&pool).unwrap(), &[10, 1000], None);
        let (before, grown) = (pool.stats(), pool.stats().growths);
        assert_eq!((cache.levels(&mut bench, &[10, 1000], None).len(), cache.freed), (2, 1000));
        let after = pool.stats();
        assert_eq!(before.blocks - after.blocks, 1000);
        assert_eq!(after.growths, grown, "there was room for all of it before");
        // Behind all blocks: every hole is between two blocks that stay, or before the first.
        let last = cache.stay.iter().map(|block| block.address() + block.capacity()).max();
        let pair = cache.lane.take(PAIR * UNIT).unwrap();
        assert!(Some(pair.address()) >= last);
        // A block of the largest hole size fits into a hole.
        let fits = cache.lane.take((HOLES.end - 1) * UNIT).unwrap();
        assert!(Some(fits.address()) < last);
        cache.lane.give(pair);
        cache.lane.give(fits);
        assert_eq!(cache.clear(None), Failed::default());
        assert_eq!(pool.stats().blocks, 0);
    }

    #[test]
    fn what_there_is_no_time_for_is_not_measured() {
        let place = Place::choose(DeviceChoice::Sim).unwrap();
        let mut bench = DeviceBench::new(&place, Pace::QUICK, None, false).unwrap();
        let session = bench.session();
        let pool = pool(&session).unwrap();
        let late = Some(Instant::now());
        let mut cache = Cache::make(Pooled::on(&pool).unwrap(), &[100], late);
        assert!(cache.holes.is_empty() && cache.levels(&mut bench, &[100], late).is_empty());
    }
}
