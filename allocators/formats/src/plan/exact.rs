//! The exact search of a small plan: the lowest top that any placement of its blocks has.
//!
//! After Moffitt, "minimalloc: A Lightweight Memory Allocator for Hardware-Accelerated Machine
//! Learning" (ASPLOS 2024). Blocks are placed from below, depth first, and a top is asked for:
//!
//! - *Canonical solutions.* If there is a placement, there is one in which no block can sink. It is
//!   found by placing blocks in ascending order of their addresses, each at the lowest one above
//!   its placed neighbours. Blocks at the same address, and equal blocks, come in one order only.
//! - *Sections.* Blocks live together in few sections of time. In each, the blocks that are not
//!   placed stack up from the lowest address that each can still have, which bounds the top.
//! - *Dominance.* No block begins where another one could end: that one would fit below.
//! - *Decomposition.* Where no block that is not placed crosses a border between sections, both
//!   sides are searched by themselves.
//!
//! What is good to place first is unknown and matters much: a search that takes too long is stopped
//! and begun again in another random order, with more time.

use crate::plan::{block::Lives, random::PlanRandom};
use std::{cmp::Reverse, ops::Range, time::Instant};

/// The most blocks of an exact search, which also bounds its recursion.
pub(crate) const MOST: usize = 512;
/// The steps of the first attempt. Each attempt may take a twenty-fourth more than the one before.
const STEPS: u64 = 250;
/// Steps between two looks at the clock.
const STRIDE: u64 = 128;

/// The limits of an attempt are reached.
struct Spent;

/// Searches for a top below `best`, which some placement has. `found` is called with each better
/// one, and its addresses. Ends when no lower top exists, or when the steps or the time are spent.
pub(crate) fn lower(
    lives: &Lives,
    mut best: u32,
    (mut steps, deadline): (u64, Option<Instant>),
    random: &mut PlanRandom,
    mut found: impl FnMut(u32, Vec<u32>),
) {
    let sections = Sections::of(lives);
    // No top is below `least`. Attempts ask for it, and in turn for tops above it, which bisect.
    let (mut least, mut failed) = (lives.load, lives.load);
    let mut budget = STEPS;
    for attempt in 0_u64.. {
        if best <= least || steps == 0 {
            return;
        }
        if best - failed <= lives.load / 128 {
            failed = least;
        }
        let cap = if attempt % 2 == 0 { least } else { failed.midpoint(best).min(best - 1) };
        let order = sections.order(lives, attempt / 2, random);
        let mut packing = Packing::new(lives, &sections, &order, cap, budget.min(steps), deadline);
        let all: Vec<u32> = (0..order.len() as u32).collect();
        let result = packing.parts(&all, 0..sections.loads.len(), (0, 0));
        steps = steps.saturating_sub(budget.min(steps) - packing.steps);
        match result {
            Ok(true) => {
                let mut at = vec![0; order.len()];
                for (&block, &least) in order.iter().zip(&packing.least) {
                    at[block as usize] = least;
                }
                best = at.iter().zip(&lives.units).map(|(at, units)| at + units).max().unwrap_or(0);
                found(best, at);
            }
            Ok(false) => (least, failed) = (cap + 1, failed.max(cap + 1)),
            Err(Spent) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => return,
            Err(Spent) => failed = failed.max(cap),
        }
        budget += budget / 24;
    }
}

/// The sections of time: runs of slots in which blocks begin and none ends.
struct Sections {
    /// The sections of each block.
    spans: Vec<Range<usize>>,
    /// The units that live at the end of each section.
    loads: Vec<u64>,
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
            loads[span.clone()].iter_mut().for_each(|load| *load += u64::from(units));
        }
        Self { spans, loads }
    }

    /// Returns the blocks in the order in which they are placed at the same address: by the length
    /// of life or size times that, and for two of three kinds by the load first. Up to a
    /// quarter, a half or all of it is added at random.
    fn order(&self, lives: &Lives, kind: u64, random: &mut PlanRandom) -> Vec<u32> {
        let mut order: Vec<u32> = (0..lives.len() as u32).collect();
        order.sort_by_cached_key(|&block| {
            let block = block as usize;
            let life = u64::from(lives.slots[block].end - lives.slots[block].start);
            // Below 2^9 slots, 2^31 units, and 2^11.
            let life = life * (1024 + random.below(256 << (kind / 3 % 3)));
            let area = life * u64::from(lives.units[block]);
            let load = self.loads[self.spans[block].clone()].iter().max().copied().unwrap_or(0);
            Reverse(match kind % 3 {
                0 => (life, area),
                1 => (load, area),
                _ => (load, life),
            })
        });
        order
    }
}

/// An attempt to place all blocks below a top. Blocks are numbered in the order of the attempt.
struct Packing {
    cap: u32,
    /// The steps that are left.
    steps: u64,
    deadline: Option<Instant>,
    units: Vec<u32>,
    spans: Vec<Range<usize>>,
    /// The blocks that live together with each.
    neighbours: Vec<Vec<u32>>,
    /// The last equal block before each.
    twins: Vec<Option<u32>>,
    /// The address of each placed block, and the lowest that is left to each other one.
    least: Vec<u32>,
    is_placed: Vec<bool>,
    /// The number of blocks that are not placed and cross the end of each section.
    crossing: Vec<u32>,
    /// The bound of each section in the step at hand.
    heights: Vec<u32>,
    /// The placed blocks, and what `least` was before each change: both in their order.
    placed: Vec<u32>,
    changes: Vec<(u32, u32)>,
}

impl Packing {
    fn new(
        lives: &Lives,
        sections: &Sections,
        order: &[u32],
        cap: u32,
        steps: u64,
        deadline: Option<Instant>,
    ) -> Self {
        let units: Vec<u32> = order.iter().map(|&block| lives.units[block as usize]).collect();
        let spans = order.iter().map(|&block| sections.spans[block as usize].clone());
        let spans: Vec<Range<usize>> = spans.collect();
        let meets = |a: usize, b: usize| {
            a != b && spans[a].start < spans[b].end && spans[b].start < spans[a].end
        };
        let count = units.len();
        let equal = |a: usize, b: usize| units[a] == units[b] && spans[a] == spans[b];
        let neighbours = |a| (0..count).filter(|&b| meets(a, b)).map(|b| b as u32).collect();
        let twin = |a| (0..a).rfind(|&b| equal(a, b)).map(|b| b as u32);
        let mut crossing = vec![0; sections.loads.len()];
        for span in &spans {
            crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count += 1);
        }
        Self {
            cap,
            steps,
            deadline,
            neighbours: (0..count).map(neighbours).collect(),
            twins: (0..count).map(twin).collect(),
            least: vec![0; count],
            is_placed: vec![false; count],
            heights: vec![0; crossing.len()],
            crossing,
            placed: Vec::with_capacity(count),
            changes: Vec::new(),
            units,
            spans,
        }
    }

    /// Places the blocks of `rest` that are not placed, in each part of the sections by itself.
    /// Returns whether that is possible at `last`, an address and a block, or after it.
    fn parts(
        &mut self,
        rest: &[u32],
        sections: Range<usize>,
        last: (u32, u32),
    ) -> Result<bool, Spent> {
        let mut start = sections.start;
        for end in sections.start + 1..=sections.end {
            if end < sections.end && self.crossing[end - 1] > 0 {
                continue;
            }
            let part = start..end;
            let is_left = |&block: &u32| {
                !self.is_placed[block as usize] && part.contains(&self.spans[block as usize].start)
            };
            let blocks: Vec<u32> = rest.iter().copied().filter(is_left).collect();
            if !blocks.is_empty() && !self.part(&blocks, start..end, last)? {
                return Ok(false);
            }
            start = end;
        }
        Ok(true)
    }

    /// Places blocks, none of which is placed, in their sections.
    fn part(
        &mut self,
        rest: &[u32],
        sections: Range<usize>,
        last: (u32, u32),
    ) -> Result<bool, Spent> {
        self.steps = self.steps.checked_sub(1).ok_or(Spent)?;
        if self.steps.is_multiple_of(STRIDE) && self.deadline.is_some_and(|at| Instant::now() >= at)
        {
            return Err(Spent);
        }
        let Some((ceiling, order)) = self.bound(rest, sections.clone(), last) else {
            return Ok(false);
        };
        let mark = (self.placed.len(), self.changes.len());
        for &block in &order {
            let at = self.least[block as usize];
            let waits =
                self.twins[block as usize].is_some_and(|twin| !self.is_placed[twin as usize]);
            if at >= ceiling || (at, block) < last || waits {
                continue;
            }
            let is_covered = self.place(block);
            if self.parts(&order, sections.clone(), (at, block))? {
                return Ok(true);
            }
            self.undo(mark);
            // With nothing left to lie above it, it is in nobody's way.
            if !is_covered {
                break;
            }
        }
        Ok(false)
    }

    /// Returns the lowest address at which one of the blocks can end, and the blocks in the order
    /// of the lowest address that each can still have. Returns `None` if a section would be too
    /// high.
    fn bound(
        &mut self,
        rest: &[u32],
        sections: Range<usize>,
        last: (u32, u32),
    ) -> Option<(u32, Vec<u32>)> {
        let end = |block: u32, from: u32| {
            self.least[block as usize].max(from).saturating_add(self.units[block as usize])
        };
        let mut ceiling = u32::MAX;
        let mut lowest = Vec::with_capacity(rest.len());
        for &block in rest {
            let at = self.least[block as usize];
            ceiling = ceiling.min(end(block, 0));
            // One that was passed over lies on a neighbour that comes after it.
            let at = if (at, block) < last {
                let left = self.neighbours[block as usize].iter();
                let left = left.filter(|&&other| !self.is_placed[other as usize]);
                left.map(|&other| end(other, last.0)).min()?
            } else {
                at
            };
            lowest.push((at, block));
        }
        if ceiling <= last.0 {
            return None;
        }
        lowest.sort_unstable();
        self.heights[sections].fill(0);
        for &(at, block) in &lowest {
            let units = self.units[block as usize];
            let mut most = 0;
            for height in &mut self.heights[self.spans[block as usize].clone()] {
                *height = (*height).max(at).saturating_add(units);
                most = most.max(*height);
            }
            if most > self.cap {
                return None;
            }
        }
        Some((ceiling, lowest.into_iter().map(|(_, block)| block).collect()))
    }

    /// Places a block. Returns whether a block that is not placed lives together with it.
    fn place(&mut self, block: u32) -> bool {
        let span = &self.spans[block as usize];
        self.crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count -= 1);
        self.is_placed[block as usize] = true;
        self.placed.push(block);
        let end = self.least[block as usize] + self.units[block as usize];
        let mut is_covered = false;
        for &other in &self.neighbours[block as usize] {
            if !self.is_placed[other as usize] {
                is_covered = true;
                let least = &mut self.least[other as usize];
                if *least < end {
                    self.changes.push((other, std::mem::replace(least, end)));
                }
            }
        }
        is_covered
    }

    /// Takes back what was placed and changed after a mark.
    fn undo(&mut self, (placed, changes): (usize, usize)) {
        for block in self.placed.drain(placed..) {
            self.is_placed[block as usize] = false;
            let span = &self.spans[block as usize];
            self.crossing[span.start..span.end - 1].iter_mut().for_each(|count| *count += 1);
        }
        for (block, least) in self.changes.drain(changes..).rev() {
            self.least[block as usize] = least;
        }
    }
}
