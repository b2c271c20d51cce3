//! Pairs in a cache full of free holes, none of which holds the block that is asked for.
//!
//! Blocks of random sizes lie between blocks that stay, and are freed in random order: ten times as
//! many with each row. The largest holes are one unit shorter than the block, in the same class of
//! sizes, so that whoever walks a list of what is free walks past them.
//!
//! ```text
//!   ┌──────┬────┬───┬────┬────────┬────┬─ ─ ─┬──────────────────────────┐
//!   │ hole │live│ … │live│  hole  │live│ …   │ free: where the pair goes │
//!   └──────┴────┴───┴────┴────────┴────┴─ ─ ─┴──────────────────────────┘
//! ```

use super::{
    Bench,
    lane::Lane,
    source::{ASYNC, Async, Pooled, Source, pool},
    work::SplitMix,
};
use crate::{
    bench::{
        lap::{Failed, Outcome, contest},
        row::Unit,
    },
    figures::Count,
};
use aquifer_core::Result;
use std::time::{Duration, Instant};

/// How many holes.
const LEVELS: [u64; 5] = [100, 1_000, 10_000, 100_000, 1_000_000];
/// The granule of sizes, in bytes.
const UNIT: u64 = 512;
/// What keeps holes apart: the smallest block that does not share a slab with others.
const LIVE: u64 = 33;
/// Sizes of holes, in units: the last is the largest.
const HOLES: std::ops::Range<u64> = 33..127;
/// What is asked for, in units.
const PAIR: u64 = 127;
/// How long the driver's allocator may take for all rows, and to free what is left. Nobody promises
/// that its calls do not grow with what is live.
const PATIENCE: Duration = Duration::from_secs(8);

fn name(holes: u64) -> String {
    format!("past {} holes", Count(holes))
}

/// The row that holds the most holes against the fewest.
fn flat() -> String {
    let [fewest, .., most] = LEVELS;
    format!("past {} holes, over {}", Count(most), Count(fewest))
}

/// Bytes that so many holes, and what is between them, take; and some room for the pairs.
fn needed(holes: u64) -> u64 {
    holes * UNIT * (LIVE + (HOLES.start + HOLES.end) / 2) / 100 * 101 + (64 << 20)
}

pub(super) fn names(_: &Bench<'_>) -> Vec<String> {
    LEVELS.map(name).into_iter().chain([flat()]).collect()
}

pub(super) fn measure(bench: &mut Bench<'_>) -> Result<()> {
    let wants_flat = bench.sheet.wants(&flat());
    let wanted = |bench: &Bench<'_>, level: u64| {
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
    // The pool has given everything back by now: there is room for one of the two only.
    let other = match bench.peer(&session)? {
        None => Vec::new(),
        Some(peer) => {
            let until = Some(Instant::now() + PATIENCE);
            let mut cache = Cache::make(Async::on(&peer)?, &levels, until);
            let outcomes = cache.levels(bench, &levels, until);
            // What is left after that long goes with the process.
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

/// A stream's cache, with blocks that are to become holes and blocks that stay between them.
struct Cache<S: Source> {
    lane: Lane<S>,
    /// In the order in which they are freed, from the end.
    holes: Vec<S::Held>,
    stay: Vec<S::Held>,
    /// How many have been freed.
    freed: u64,
}

impl<S: Source> Cache<S> {
    /// With holes for the largest of `levels`, or for as many as there is time for.
    fn make(source: S, levels: &[u64], until: Option<Instant>) -> Self {
        let count = levels.last().copied().unwrap_or(0);
        let mut cache =
            Self { lane: Lane::new(source), holes: Vec::new(), stay: Vec::new(), freed: 0 };
        cache.holes.reserve(count as usize);
        cache.stay.reserve(count as usize);
        // In one piece first, so that the memory is there and holes and blocks lie as they are
        // asked for.
        if let Some(whole) = cache.lane.take(needed(count)) {
            cache.lane.give(whole);
        }
        let mut sizes = SplitMix::new(count);
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

    /// Pairs past each number of holes, as far as they come in time.
    fn levels(
        &mut self,
        bench: &mut Bench<'_>,
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
            let pairs = |count| lane.lap(count, |lane| lane.pairs(PAIR * UNIT, count));
            let outcome = contest(bench.pace, vec![Box::new(pairs)]).pop().unwrap_or_default();
            bench.sheet.note(&name(level), outcome.failed.clone());
            outcomes.push(outcome);
        }
        outcomes
    }

    /// Frees all that is left, as far as there is time for it, and says what was refused outside
    /// the laps.
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
    use crate::{bench::lap::Pace, cli::DeviceChoice, place::Place};

    #[test]
    fn no_hole_holds_the_pair_and_a_larger_number_of_them_has_the_smaller_in_it() {
        let place = Place::choose(DeviceChoice::Sim).unwrap();
        let mut bench = Bench::new(&place, Pace::QUICK, None, false).unwrap();
        let session = bench.session();
        let pool = pool(&session).unwrap();
        let mut cache = Cache::make(Pooled::on(&pool).unwrap(), &[10, 1000], None);
        let (before, grown) = (pool.stats(), pool.stats().growths);
        assert_eq!((cache.levels(&mut bench, &[10, 1000], None).len(), cache.freed), (2, 1000));
        let after = pool.stats();
        assert_eq!(before.blocks - after.blocks, 1000);
        assert_eq!(after.growths, grown, "there was room for all of it before");
        // Behind everything: every hole lies between two blocks that stay, or before the first.
        let last = cache.stay.iter().map(|block| block.address() + block.capacity()).max();
        let pair = cache.lane.take(PAIR * UNIT).unwrap();
        assert!(Some(pair.address()) >= last);
        // A block as long as the largest holes finds one.
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
        let mut bench = Bench::new(&place, Pace::QUICK, None, false).unwrap();
        let session = bench.session();
        let pool = pool(&session).unwrap();
        let late = Some(Instant::now());
        let mut cache = Cache::make(Pooled::on(&pool).unwrap(), &[100], late);
        assert!(cache.holes.is_empty() && cache.levels(&mut bench, &[100], late).is_empty());
    }
}
