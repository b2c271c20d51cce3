//! The exact search of a small plan: the lowest top that any placement of its blocks has.
//!
//! A top is asked for, and blocks are placed from below, depth first:
//!
//! - *Sections.* Blocks live together in few sections of time. Each has a floor: the lowest address
//!   at which one of its blocks that are not placed can still begin. Floor and the units of these
//!   blocks bound the top.
//! - *The lowest gap.* In a section whose floor is the lowest of all, each block that can begin
//!   there is tried, and then none: the floor rises to the next address at which one of its blocks
//!   can begin. So each placement is tried once at most, and each one in which no block can sink is
//!   among them: if there is any placement, there is such a one. Of equal blocks, one is tried. A
//!   block that lifts no other one, wherever it lies, is not tried elsewhere.
//! - *What is decided first.* A section with one such block at most. Otherwise half of the attempts
//!   go on in the section with the fewest, and the others with the first such block of their order,
//!   in its section with the fewest.
//! - *Decomposition.* Where no block that is not placed crosses a border between sections, both
//!   sides are searched by themselves.
//!
//! What is good to place first is unknown and matters much: a search that takes too long is stopped
//! and begun again in another random order, with more time.
//!
//! Sections, orders and decomposition are those of Moffitt, "minimalloc: A Lightweight Memory
//! Allocator for Hardware-Accelerated Machine Learning" (ASPLOS 2024), and the lowest gap is a
//! usual choice for packing strips: Martello, Monaci and Vigo, "An Exact Approach to the
//! Strip-Packing Problem" (INFORMS Journal on Computing, 2003).

use crate::plan::{block::Lives, random::PlanRandom};
use std::{cmp::Reverse, ops::Range, time::Instant};

/// The most blocks of an exact search, which also bounds its recursion.
pub(crate) const MOST: usize = 512;
/// The steps of the first attempt. Each attempt may take 1/32 more than the one before.
const STEPS: u64 = 2000;
/// Steps between two looks at the clock.
const STRIDE: u64 = 128;

/// The limits of an attempt are reached.
struct Spent;

/// Searches for a top below `best`, which some placement has. `found` is called with each better
/// one, and its addresses. Ends when no lower top exists, or when the steps or the time are spent.
pub(crate) fn lower(
    lives: &Lives,
    best: u32,
    (mut steps, deadline): (u64, Option<Instant>),
    random: &mut PlanRandom,
    mut found: impl FnMut(u32, Vec<u32>),
) {
    let sections = Sections::of(lives);
    let mut tops = Tops { least: lives.load, failed: lives.load, best };
    let mut budget = STEPS;
    for attempt in 0_u64.. {
        if tops.best <= tops.least || steps == 0 {
            return;
        }
        let cap = if attempt % 2 == 0 { tops.least } else { tops.between(lives.load / 128) };
        let order = sections.order(lives, attempt / 4, random);
        let blocks = Blocks::new(lives, &sections, &order);
        let mut packing = Packing::new(&blocks, &sections.loads, cap);
        (packing.steps, packing.deadline) = (budget.min(steps), deadline);
        packing.is_in_order = attempt / 2 % 2 == 0;
        let result = packing.parts(0..sections.loads.len());
        steps -= budget.min(steps) - packing.steps;
        match result {
            Ok(true) => {
                let mut at = vec![0; order.len()];
                for (&block, &placed) in order.iter().zip(&packing.at) {
                    at[block as usize] = placed;
                }
                let top = at.iter().zip(&lives.units).map(|(at, units)| at + units).max();
                tops.best = top.unwrap_or(0);
                found(tops.best, at);
            }
            Ok(false) => tops.least = cap + 1,
            Err(Spent) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => return,
            Err(Spent) => tops.failed = tops.failed.max(cap),
        }
        budget += budget / 32;
    }
}

/// The tops that are asked for: the least in every other attempt, and others by bisection.
struct Tops {
    /// No top is lower.
    least: u32,
    /// The highest that attempts spent their steps on. A later attempt may find it or a lower one.
    failed: u32,
    best: u32,
}

impl Tops {
    /// Returns a top below the best, between it and those that failed. Where they are no further
    /// apart than this, it begins again from the least.
    fn between(&mut self, apart: u32) -> u32 {
        self.failed = self.failed.max(self.least);
        if self.best.saturating_sub(self.failed) <= apart {
            self.failed = self.least;
        }
        self.failed.midpoint(self.best).min(self.best - 1)
    }
}

/// The sections of time: runs of slots in which blocks begin and none ends.
struct Sections {
    /// The sections of each block.
    spans: Vec<Range<usize>>,
    /// The units that live at the end of each section.
    loads: Vec<u32>,
}

impl Sections {
    fn of(lives: &Lives) -> Self {
        let mut ends: Vec<u32> = lives.slots.iter().map(|life| life.end).collect();
        ends.sort_unstable();
        ends.dedup();
        let section = |slot: u32| ends.partition_point(|&end| end <= slot);
        let spans = lives.slots.iter().map(|life| section(life.start)..section(life.end - 1) + 1);
        let spans: Vec<_> = spans.collect();
        let mut loads = vec![0; ends.len()];
        for (span, &units) in spans.iter().zip(&lives.units) {
            loads[span.clone()].iter_mut().for_each(|load| *load += units);
        }
        Self { spans, loads }
    }

    /// Returns the blocks in the order in which they are tried at the same address: by the sections
    /// of life or size times that, and for two of three kinds by the load first. Up to a
    /// quarter, a half or all of it is added at random.
    fn order(&self, lives: &Lives, kind: u64, random: &mut PlanRandom) -> Vec<u32> {
        let mut order: Vec<u32> = (0..lives.len() as u32).collect();
        order.sort_by_cached_key(|&block| {
            let block = block as usize;
            // Below 2^10 sections, 2^31 units, and 2^11.
            let life =
                self.spans[block].len() as u64 * (1024 + random.below(256 << (kind / 3 % 3)));
            let area = life * u64::from(lives.units[block]);
            let load = self.loads[self.spans[block].clone()].iter().max().copied();
            let load = u64::from(load.unwrap_or(0));
            Reverse(match kind % 3 {
                0 => (life, area),
                1 => (load, area),
                _ => (load, life),
            })
        });
        order
    }
}

/// The blocks of an attempt, numbered in its order.
struct Blocks {
    units: Vec<u32>,
    spans: Vec<Range<usize>>,
    /// The blocks of each section.
    members: Vec<Vec<u32>>,
    /// The blocks that live together with each.
    neighbours: Vec<Vec<u32>>,
    /// The last equal block before each.
    twins: Vec<Option<u32>>,
}

impl Blocks {
    fn new(lives: &Lives, sections: &Sections, order: &[u32]) -> Self {
        let units: Vec<u32> = order.iter().map(|&block| lives.units[block as usize]).collect();
        let spans = order.iter().map(|&block| sections.spans[block as usize].clone());
        let spans: Vec<Range<usize>> = spans.collect();
        let mut members = vec![Vec::new(); sections.loads.len()];
        for (block, span) in (0..).zip(&spans) {
            members[span.clone()].iter_mut().for_each(|blocks| blocks.push(block));
        }
        let meets = |a: usize, b: usize| {
            a != b && spans[a].start < spans[b].end && spans[b].start < spans[a].end
        };
        let count = units.len();
        let equal = |a: usize, b: usize| units[a] == units[b] && spans[a] == spans[b];
        let neighbours = |a| (0..count).filter(|&b| meets(a, b)).map(|b| b as u32).collect();
        let twin = |a| (0..a).rfind(|&b| equal(a, b)).map(|b| b as u32);
        Self {
            neighbours: (0..count).map(neighbours).collect(),
            twins: (0..count).map(twin).collect(),
            members,
            units,
            spans,
        }
    }
}

/// An attempt to place all blocks below a top.
struct Packing<'a> {
    blocks: &'a Blocks,
    cap: u32,
    /// The steps that are left.
    steps: u64,
    deadline: Option<Instant>,
    /// Whether the first block in order decides where to go on, rather than the fewest choices.
    is_in_order: bool,
    /// The address of each placed block.
    at: Vec<u32>,
    is_placed: Vec<bool>,
    /// The lowest address that is left to each block: the highest floor of its sections.
    least: Vec<u32>,
    /// The floor of each section, and its units that are not placed: at most `cap` together. Where
    /// nothing is left, the floor says nothing.
    floors: Vec<u32>,
    left: Vec<u32>,
    /// The number of blocks that are not placed and cross the end of each section.
    crossing: Vec<u32>,
    /// The placed blocks, and what `least` and `floors` were before each change, in their order.
    placed: Vec<u32>,
    leasts: Vec<(u32, u32)>,
    raised: Vec<(usize, u32)>,
}

impl<'a> Packing<'a> {
    fn new(blocks: &'a Blocks, loads: &[u32], cap: u32) -> Self {
        let count = blocks.units.len();
        let mut crossing = vec![0; loads.len()];
        for span in &blocks.spans {
            crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count += 1);
        }
        Self {
            blocks,
            cap,
            steps: 0,
            deadline: None,
            is_in_order: false,
            at: vec![0; count],
            is_placed: vec![false; count],
            least: vec![0; count],
            floors: vec![0; loads.len()],
            left: loads.to_vec(),
            crossing,
            placed: Vec::with_capacity(count),
            leasts: Vec::new(),
            raised: Vec::new(),
        }
    }

    /// Places the blocks that are not placed, in each part of the sections by itself. Returns
    /// whether that is possible.
    fn parts(&mut self, sections: Range<usize>) -> Result<bool, Spent> {
        let mut start = sections.start;
        for end in sections.start + 1..=sections.end {
            if end < sections.end && self.crossing[end - 1] > 0 {
                continue;
            }
            if self.left[start..end].iter().any(|&left| left > 0) && !self.part(start..end)? {
                return Ok(false);
            }
            start = end;
        }
        Ok(true)
    }

    /// Places the blocks that are not placed, of which there is one at least.
    fn part(&mut self, sections: Range<usize>) -> Result<bool, Spent> {
        loop {
            self.steps = self.steps.checked_sub(1).ok_or(Spent)?;
            if self.steps.is_multiple_of(STRIDE)
                && self.deadline.is_some_and(|at| Instant::now() >= at)
            {
                return Err(Spent);
            }
            let open = sections.clone().filter(|&section| self.left[section] > 0);
            let Some(floor) = open.map(|section| self.floors[section]).min() else {
                return Ok(true);
            };
            let section = self.narrowest(sections.clone(), floor);
            let choices: Vec<u32> = self.fitting(section, floor).collect();
            let mark = (self.placed.len(), self.leasts.len(), self.raised.len());
            for &block in &choices {
                let fits = self.place(block, floor);
                // All others have to begin above it in any case: it is in nobody's way.
                let lifts_none = fits && self.leasts.len() == mark.1;
                if fits && self.parts(sections.clone())? {
                    return Ok(true);
                }
                self.undo(mark);
                if lifts_none {
                    return Ok(false);
                }
            }
            match self.next(section, floor) {
                Some(next) if self.raise(section, next) => {}
                _ => return Ok(false),
            }
        }
    }

    /// Returns the blocks that can lie at the floor of a section, which is the lowest of all.
    fn fitting(&self, section: usize, floor: u32) -> impl Iterator<Item = u32> {
        self.blocks.members[section].iter().copied().filter(move |&block| {
            let block = block as usize;
            let waits =
                || self.blocks.twins[block].is_some_and(|twin| !self.is_placed[twin as usize]);
            !self.is_placed[block] && self.least[block] == floor && !waits()
        })
    }

    /// Returns the section at the floor in which to go on.
    fn narrowest(&self, sections: Range<usize>, floor: u32) -> usize {
        let at_floor = |&section: &usize| self.left[section] > 0 && self.floors[section] == floor;
        let counted = |section| (self.fitting(section, floor).count(), section);
        let fewest = sections.clone().filter(at_floor).map(counted).min();
        let (choices, fewest) = fewest.unwrap_or((0, sections.start));
        if !self.is_in_order || choices <= 1 {
            return fewest;
        }
        let first = sections.filter(at_floor).filter_map(|one| self.fitting(one, floor).next());
        let span = first.min().map(|block| self.blocks.spans[block as usize].clone());
        span.and_then(|span| span.map(counted).min()).map_or(fewest, |(_, section)| section)
    }

    /// Returns the next address above its floor at which a block of a section can begin, where
    /// none lies at the floor. Returns `None` if none can begin higher, or the section would be too
    /// high.
    fn next(&self, section: usize, floor: u32) -> Option<u32> {
        let is_left = |block: &&u32| !self.is_placed[**block as usize];
        let above = |&block: &u32| {
            if self.least[block as usize] > floor {
                return Some(self.least[block as usize]);
            }
            // It lies on another one, which is not in this section.
            let others = self.blocks.neighbours[block as usize].iter().filter(is_left);
            let others = others.map(|&other| other as usize);
            let others = others.filter(|&other| !self.blocks.spans[other].contains(&section));
            others.map(|other| self.least[other] + self.blocks.units[other]).min()
        };
        let next = self.blocks.members[section].iter().filter(is_left).filter_map(above).min()?;
        (next <= self.cap - self.left[section]).then_some(next)
    }

    /// Places a block at the floor of its sections. Returns whether no section is too high then.
    fn place(&mut self, block: u32, floor: u32) -> bool {
        let index = block as usize;
        let (span, units) = (self.blocks.spans[index].clone(), self.blocks.units[index]);
        self.crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count -= 1);
        self.is_placed[index] = true;
        self.at[index] = floor;
        self.placed.push(block);
        for section in span.clone() {
            self.raised.push((section, self.floors[section]));
            self.floors[section] = floor + units;
            self.left[section] -= units;
        }
        self.lift(&self.blocks.neighbours[index], span, floor + units)
    }

    /// Raises the floor of a section. Returns whether no section is too high then.
    fn raise(&mut self, section: usize, floor: u32) -> bool {
        self.lift(&self.blocks.members[section], section..section + 1, floor)
    }

    /// Lifts those of the blocks that are not placed to an address, and with them the floors of
    /// these sections and of theirs. Returns whether no section is too high then.
    fn lift(&mut self, blocks: &'a [u32], mut sections: Range<usize>, to: u32) -> bool {
        for &block in blocks {
            let (index, span) = (block as usize, &self.blocks.spans[block as usize]);
            if !self.is_placed[index] && self.least[index] < to {
                self.leasts.push((block, std::mem::replace(&mut self.least[index], to)));
                sections = sections.start.min(span.start)..sections.end.max(span.end);
            }
        }
        for section in sections {
            let left =
                self.blocks.members[section].iter().filter(|&&one| !self.is_placed[one as usize]);
            let Some(floor) = left.map(|&block| self.least[block as usize]).min() else { continue };
            if floor > self.cap - self.left[section] {
                return false;
            }
            if floor > self.floors[section] {
                self.raised.push((section, std::mem::replace(&mut self.floors[section], floor)));
            }
        }
        true
    }

    /// Takes back what was placed and changed after a mark.
    fn undo(&mut self, (placed, leasts, raised): (usize, usize, usize)) {
        for (section, floor) in self.raised.drain(raised..).rev() {
            self.floors[section] = floor;
        }
        for (block, least) in self.leasts.drain(leasts..).rev() {
            self.least[block as usize] = least;
        }
        for block in self.placed.drain(placed..) {
            self.is_placed[block as usize] = false;
            let span = self.blocks.spans[block as usize].clone();
            self.left[span.clone()]
                .iter_mut()
                .for_each(|l| *l += self.blocks.units[block as usize]);
            self.crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count += 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Tops, lower};
    use crate::plan::{block::Lives, random::PlanRandom};
    use std::ops::Range;

    const STEPS: u64 = 1 << 20;

    /// Blocks of these units that live in these slots, in some of which no block begins.
    fn lives(blocks: &[(u32, Range<u32>)]) -> Lives {
        let (units, slots): (Vec<u32>, Vec<_>) = blocks.iter().cloned().unzip();
        let live = |slot| blocks.iter().filter(move |(_, slots)| slots.contains(&slot));
        let loads = slots.iter().map(|life| live(life.start).map(|(units, _)| units).sum());
        let load = loads.max().unwrap_or(0);
        Lives { units, slots, load }
    }

    /// Returns the lowest top that the search finds below one.
    fn found_below(lives: &Lives, best: u32, seed: u64) -> u32 {
        let mut found = best;
        lower(lives, best, (STEPS, None), &mut PlanRandom::new(seed), |top, at| {
            for (a, life) in lives.slots.iter().enumerate() {
                assert!(at[a] + lives.units[a] <= top);
                for (b, other) in lives.slots.iter().enumerate().skip(a + 1) {
                    let apart = at[a] + lives.units[a] <= at[b] || at[b] + lives.units[b] <= at[a];
                    assert!(apart || life.end <= other.start || other.end <= life.start);
                }
            }
            found = top;
        });
        found
    }

    /// Returns the lowest top of the blocks that are left above those that are placed, lower than
    /// `best` if there is one: some order of the lowest placements has it.
    fn lowest(lives: &Lives, at: &mut Vec<(usize, u32)>, best: u32) -> u32 {
        let end = |&(block, at): &(usize, u32)| at + lives.units[block];
        let top = at.iter().map(end).max().unwrap_or(0);
        if top >= best || at.len() == lives.len() {
            return top.min(best);
        }
        let mut best = best;
        for block in 0..lives.len() {
            if at.iter().any(|&(other, _)| other == block) {
                continue;
            }
            let meets = |&&(other, _): &&(usize, u32)| {
                let (a, b) = (&lives.slots[block], &lives.slots[other]);
                a.start < b.end && b.start < a.end
            };
            // Addresses ascend, so that nothing is left below.
            let place = at.iter().filter(meets).map(end).max().unwrap_or(0);
            if at.last().is_none_or(|&(_, before)| before <= place) {
                at.push((block, place));
                best = lowest(lives, at, best);
                at.pop();
            }
        }
        best
    }

    #[test]
    fn tops_between_stay_below_the_best_also_where_it_is_below_one_that_failed() {
        let mut tops = Tops { least: 10, failed: 90, best: 40 };
        assert_eq!(tops.between(0), 25);
        (tops.failed, tops.best) = (39, 40);
        assert_eq!((tops.between(0), tops.between(1)), (39, 25));
        (tops.least, tops.best) = (39, 40);
        assert_eq!(tops.between(0), 39);
    }

    #[test]
    fn a_block_that_is_alone_in_a_section_may_have_to_lie_higher() {
        let lives = lives(&[(3, 3..4), (1, 3..9), (1, 8..12), (1, 8..9), (1, 8..10), (2, 9..11)]);
        assert_eq!((lives.load, lowest(&lives, &mut Vec::new(), 9)), (4, 4));
        for seed in 1..6 {
            assert_eq!(found_below(&lives, 5, seed), 4);
        }
    }

    /// Programs that fill all addresses again after each block that ends, until the rest end in
    /// turn.
    #[test]
    fn no_top_is_called_impossible_that_some_placement_has() {
        let mut random = PlanRandom::new(1);
        for seed in 0..20_000 {
            let (mut blocks, mut live, mut now) = (Vec::new(), Vec::new(), 0);
            let (count, mut free) = (5 + random.below(4) as usize, 3 + random.below(3));
            while !live.is_empty() || blocks.len() < count {
                while free > 0 && blocks.len() < count {
                    let units = 1 + random.below(free.min(3));
                    free -= units;
                    live.push(blocks.len());
                    blocks.push((units as u32, now..now));
                    now += 1;
                }
                let ended = live.swap_remove(random.below(live.len() as u64) as usize);
                blocks[ended].1.end = now;
                free += u64::from(blocks[ended].0);
                now += random.below(2) as u32;
            }
            let lives = lives(&blocks);
            let best = lowest(&lives, &mut Vec::new(), u32::MAX);
            assert_eq!(found_below(&lives, best + 1, seed), best, "{lives:?}");
        }
    }
}
