//! Follows a plan while its program runs again.
//!
//! # Invariants
//! - Blocks that are live under a cursor have no address in common.
//! - `placed_below` is above the highest block that was placed in this pass.
//! - A block that was placed in a pass and is not stale is the last user of its addresses among the
//!   blocks of this pass, except for blocks above it. So a block from `placed_below` on needs no
//!   other check and no other order than the plan's if its predecessors in the plan are all freed
//!   and not stale: those of this pass, and for addresses that no earlier block of the pass has,
//!   the last ones of the pass before.
//! - Whatever breaks this makes blocks stale, or counts as not placed: a block that comes late, a
//!   block that was cancelled, a jump.
//! - Any other block is placed only if none of the last users of its addresses is live.

use crate::plan::{
    Plan,
    block::PlannedBlock,
    expectation::{Expectation, ExpectedBlock, Key},
    last_users::LastUsers,
};
use aquifer_core::BLOCK_ALIGN;

/// Blocks from the expected one on that may come early.
const AHEAD: u32 = 8;
/// Blocks behind the expected one that may come late.
const BEHIND: u32 = 64;
/// Allocations in a row that match nothing, after which the position is searched for.
const LOST: u32 = 4;
/// Steps in a row with too many misses after which the plan is dropped.
const BAD_STEPS: u32 = 2;

/// What a cursor answers to an allocation.
///
/// See the example of [`PlanCursor`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PlanAnswer {
    /// The block has a place in the plan.
    Hit {
        /// The block of the plan.
        block: u32,
        /// Its offset.
        offset: u64,
        /// Whether it comes in the recorded order, so that all earlier uses of its addresses are
        /// those of the plan. [`PlanCursor::followed`] has those that it has to wait for.
        recorded: bool,
    },
    /// It has none, and needs other memory.
    Stray,
}

/// What a cursor has counted.
///
/// See the example of [`PlanCursor`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct CursorCounters {
    /// Allocations with a place in the plan.
    pub hits: u64,
    /// Allocations without one.
    pub strays: u64,
    /// Strays whose place was still held by another block.
    pub overlaps: u64,
    /// Jumps to another position of the plan.
    pub resynchronisations: u64,
}

/// The state of a block of the plan: the pass in which it was placed last, or 0 for none, and two
/// flags in its lowest bits. One comparison tells whether it was placed in a pass, is freed, and is
/// not stale.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct BlockState(u32);

impl BlockState {
    const LIVE: u32 = 1;
    /// A block that came later, or a block of another stream, may be the last user of its
    /// addresses.
    const STALE: u32 = 2;
    const LAST_PASS: u32 = u32::MAX >> 2;

    /// Returns the state of a block that was placed in a pass, is freed, and is not stale.
    #[inline]
    fn freed(pass: u32) -> Self {
        Self(pass << 2)
    }

    #[inline]
    fn live(pass: u32) -> Self {
        Self(pass << 2 | Self::LIVE)
    }

    #[inline]
    fn is_live(self) -> bool {
        self.0 & Self::LIVE != 0
    }

    /// Returns whether the block is not live, and was not placed in `pass` or later.
    #[inline]
    fn is_waiting(self, pass: u32) -> bool {
        !self.is_live() && self.0 >> 2 < pass
    }

    fn make_stale(&mut self) {
        self.0 |= Self::STALE;
    }
}

/// A position in a plan, for a program that runs again.
///
/// - Allocations are matched by size and stream. One that comes in the recorded order costs a few
///   comparisons.
/// - One that comes up to 8 blocks early or 64 blocks late is matched too, and checked against all
///   blocks that live.
/// - After four allocations in a row that match nothing, the last three are looked for in the whole
///   plan, and it goes on behind them.
/// - At its end the plan begins again. A step of the program is one pass, or what
///   [`begin_step`](PlanCursor::begin_step) says.
/// - A plan of which more than a fifth misses in each of two steps in a row is dropped.
///
/// An allocation in the recorded order allocates no memory.
///
/// ```
/// use aquifer_formats::plan::{NEVER, Plan, PlanAnswer, PlanBlock, PlanCursor, PlanOptions};
/// let block = |bytes, first, end| PlanBlock { bytes, first, end, stream: 0, shared: false };
/// let plan = Plan::make(&[block(1000, 0, 2), block(512, 1, NEVER)], &PlanOptions::default())?;
/// let mut cursor = PlanCursor::new(plan);
/// let hit = |block, offset| PlanAnswer::Hit { block, offset, recorded: true };
/// assert_eq!(cursor.allocate(1000, 0), hit(0, 0));
/// // A block of this size is not in the plan.
/// assert_eq!(cursor.allocate(7000, 0), PlanAnswer::Stray);
/// assert_eq!(cursor.allocate(500, 0), hit(1, 1024));
/// assert!(cursor.free(0));
/// assert_eq!((cursor.counters().hits, cursor.counters().strays), (2, 1));
/// # Ok::<(), aquifer_formats::plan::PlanError>(())
/// ```
#[derive(Debug)]
pub struct PlanCursor {
    plan: Plan,
    expectation: Expectation,
    states: Vec<BlockState>,
    last_users: LastUsers,
    live: u32,
    /// The pass, counted from 1.
    pass: u32,
    /// Whether [`PlanCursor::followed`] is about a block in the recorded order.
    is_recorded: bool,
    /// The block that was placed last, and the last users of its addresses if it does not come in
    /// the recorded order.
    last: u32,
    followed: Vec<u32>,
    /// The lowest block that is expected.
    expected: u32,
    placed_below: u32,
    /// Allocations in a row that matched nothing, and the last three such, the latest last.
    unknown_in_row: u32,
    unknown: [Option<Key>; 3],
    step_allocations: u64,
    step_strays: u64,
    bad_steps: u32,
    counters: CursorCounters,
}

impl PlanCursor {
    /// Creates a cursor at the first block.
    #[must_use]
    pub fn new(plan: Plan) -> Self {
        let blocks = plan.blocks().len();
        Self {
            expectation: Expectation::of(plan.blocks()),
            plan,
            states: vec![BlockState::default(); blocks],
            last_users: LastUsers::new(blocks),
            live: 0,
            pass: 1,
            is_recorded: true,
            last: 0,
            followed: Vec::new(),
            expected: 0,
            placed_below: 0,
            unknown_in_row: 0,
            unknown: [None; 3],
            step_allocations: 0,
            step_strays: 0,
            bad_steps: 0,
            counters: CursorCounters::default(),
        }
    }

    /// Returns the plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Returns what has been counted.
    pub fn counters(&self) -> CursorCounters {
        self.counters
    }

    /// Returns the number of live blocks.
    pub fn live(&self) -> u32 {
        self.live
    }

    /// Returns whether the plan was dropped. Every further allocation is a stray.
    pub fn is_dropped(&self) -> bool {
        self.bad_steps >= BAD_STEPS
    }

    /// Returns the place of a block of `bytes` on `stream`. The block lives until it is
    /// [freed](PlanCursor::free).
    #[inline]
    pub fn allocate(&mut self, bytes: u64, stream: u32) -> PlanAnswer {
        self.allocate_expected(bytes, stream).unwrap_or_else(|| self.allocate_any(bytes, stream))
    }

    /// As [`PlanCursor::allocate`], if this is the expected block and it comes in the recorded
    /// order within a step. Otherwise returns `None`, and nothing has changed. A caller that frees
    /// blocks late asks this first, and frees what it can only if the answer is `None`.
    #[inline]
    pub fn allocate_expected(&mut self, bytes: u64, stream: u32) -> Option<PlanAnswer> {
        let (block, next) = (self.expected, self.expectation.block(self.expected)?);
        let is_next = next.bytes == bytes.checked_next_multiple_of(BLOCK_ALIGN)?
            && next.stream == stream
            && self.is_waiting(block)
            && !self.is_dropped()
            && !self.ends_step()
            && self.is_in_order(block, next);
        if !is_next {
            return None;
        }
        let offset = next.offset;
        self.step_allocations += 1;
        Some(self.place(block, offset, true))
    }

    /// Places a block that may come in any order.
    #[inline(never)]
    fn allocate_any(&mut self, bytes: u64, stream: u32) -> PlanAnswer {
        self.count_step();
        if self.is_dropped() {
            self.counters.strays += 1;
            return PlanAnswer::Stray;
        }
        if self.skip_placed() == self.states.len() as u32
            && (self.live as usize) < self.states.len()
        {
            self.begin_pass(0);
            // Some block is not live, and so it waits.
            self.skip_placed();
        }
        let bytes = bytes.checked_next_multiple_of(BLOCK_ALIGN).unwrap_or(0);
        let next = self.expectation.block(self.expected);
        let is_next = next.is_some_and(|next| next.bytes == bytes && next.stream == stream);
        let found = if is_next {
            Ok(self.expected)
        } else {
            self.search(self.expectation.key(bytes, stream))
        };
        let placed = match found.and_then(|block| self.place_if_free(block)) {
            Err(Miss::Unknown) => {
                self.unknown_in_row += 1;
                self.unknown =
                    [self.unknown[1], self.unknown[2], self.expectation.key(bytes, stream)];
                match self.resynchronise() {
                    Some(block) => self.place_if_free(block),
                    None => Err(Miss::Unknown),
                }
            }
            // Its place is held, but the position is known.
            placed => {
                self.unknown_in_row = 0;
                placed
            }
        };
        placed.unwrap_or_else(|miss| {
            self.step_strays += 1;
            self.counters.strays += 1;
            self.counters.overlaps += u64::from(miss == Miss::Overlap);
            PlanAnswer::Stray
        })
    }

    /// Returns the blocks that the block of the last hit has to follow: all of their uses have to
    /// come before its own.
    ///
    /// Of a block in the recorded order these are the blocks of its [edges](crate::plan::Plan::edges),
    /// and, when the plan is followed again, those of the pass before that no stream orders. Of any
    /// other they are all last users of its addresses.
    #[inline]
    pub fn followed(&self) -> &[u32] {
        if self.is_recorded { self.expectation.unordered(self.last) } else { &self.followed }
    }

    /// Frees a block of the plan: later blocks may have its addresses. Returns whether it was live;
    /// nothing happens if not.
    #[inline]
    pub fn free(&mut self, block: u32) -> bool {
        let Some(state) = self.states.get_mut(block as usize) else { return false };
        let was_live = state.is_live();
        state.0 &= !BlockState::LIVE;
        self.live -= u32::from(was_live);
        was_live
    }

    /// Takes a hit back, because the block cannot be used: it counts as an overlap, and as freed.
    /// No later block relies on the plan's order behind it.
    pub fn cancel(&mut self, block: u32) {
        if self.free(block) {
            self.states[block as usize].make_stale();
            self.counters.hits -= 1;
            self.counters.strays += 1;
            self.counters.overlaps += 1;
            self.step_strays += 1;
        }
    }

    /// Tells that a stream of the plan is another one of the program from here on. No later block
    /// relies on the plan's order behind earlier ones of this stream.
    pub fn replace_stream(&mut self, stream: u32) {
        let blocks = self.states.iter_mut().zip(self.plan.blocks());
        blocks
            .filter(|(_, block)| block.stream == stream)
            .for_each(|(state, _)| state.make_stale());
    }

    /// An iterator over the blocks that are expected next, of which the first in the recorded
    /// order.
    pub fn expected(&self) -> impl Iterator<Item = &PlannedBlock> {
        // At the end of the plan it begins again.
        let is_over = self.expected as usize >= self.states.len();
        let (from, pass) =
            if is_over { (0, self.pass + 1) } else { (self.expected as usize, self.pass) };
        let waiting = self.states[from..].iter().zip(&self.plan.blocks()[from..]);
        let waiting = waiting.filter(move |(state, _)| state.is_waiting(pass));
        waiting.map(|(_, block)| block).take(AHEAD as usize)
    }

    /// Tells that a step of the program begins, which is what the plan describes: the first block
    /// is expected next.
    pub fn begin_step(&mut self) {
        self.end_step();
        if self.placed_below > 0 || self.expected > 0 {
            self.begin_pass(0);
        }
    }

    /// Returns whether the next allocation begins a step. Without word from the program, a step is
    /// as many as the plan has.
    #[inline]
    fn ends_step(&self) -> bool {
        self.step_allocations >= self.states.len() as u64
    }

    /// Counts an allocation.
    fn count_step(&mut self) {
        if self.ends_step() {
            self.end_step();
        }
        self.step_allocations += 1;
    }

    fn end_step(&mut self) {
        if self.step_allocations > 0 && !self.is_dropped() {
            let is_bad = self.step_strays * 5 > self.step_allocations;
            self.bad_steps = if is_bad { self.bad_steps + 1 } else { 0 };
        }
        (self.step_allocations, self.step_strays) = (0, 0);
    }

    /// Expects all blocks again, from `block` on.
    fn begin_pass(&mut self, block: u32) {
        if self.pass == BlockState::LAST_PASS {
            // After as many passes the count begins again, and no block counts as placed.
            self.states
                .iter_mut()
                .for_each(|state| state.0 &= BlockState::LIVE | BlockState::STALE);
            self.pass = 1;
        }
        self.pass += 1;
        (self.expected, self.placed_below) = (block, 0);
    }

    /// Returns whether a block was not placed in this pass and is not live.
    #[inline]
    fn is_waiting(&self, block: u32) -> bool {
        self.states[block as usize].is_waiting(self.pass)
    }

    /// Moves to the next block that is not placed, and returns it.
    fn skip_placed(&mut self) -> u32 {
        let blocks = self.states.len() as u32;
        while self.expected < blocks && !self.is_waiting(self.expected) {
            self.expected += 1;
        }
        self.expected
    }

    /// Returns a block of a size and stream near the expected one whose place is free: one that was
    /// left out before, or one of the next.
    fn search(&mut self, key: Option<Key>) -> Result<u32, Miss> {
        let key = key.ok_or(Miss::Unknown)?;
        let mut miss = Miss::Unknown;
        let from = self.expected.saturating_sub(BEHIND);
        let to = self.expected.saturating_add(AHEAD);
        for at in 0..self.expectation.blocks_from(key, from).len() {
            let block = self.expectation.blocks_from(key, from)[at];
            if block >= to {
                break;
            }
            if self.is_waiting(block) {
                if self.is_free(block) {
                    return Ok(block);
                }
                miss = Miss::Overlap;
            }
        }
        Err(miss)
    }

    /// Returns whether no live block has addresses of this one, whose last users are then those in
    /// `followed`.
    fn is_free(&mut self, block: u32) -> bool {
        self.followed.clear();
        self.last_users.of(block, self.plan.blocks(), &mut self.followed);
        !self.followed.iter().any(|&user| self.states[user as usize].is_live())
    }

    /// Returns whether a block comes in the recorded order, so that no live block can have its
    /// addresses, and the order of the plan is the order of all their uses.
    #[inline]
    fn is_in_order(&self, number: u32, block: &ExpectedBlock) -> bool {
        let are_freed = |earlier: &[u32], pass| {
            let freed = BlockState::freed(pass);
            earlier.iter().all(|&earlier| self.states[earlier as usize] == freed)
        };
        number >= self.placed_below
            && are_freed(self.expectation.predecessors(block), self.pass)
            && (self.pass == 1
                || are_freed(self.expectation.predecessors_in_loop(block), self.pass - 1))
    }

    /// Makes a block live, if no live block has its addresses.
    fn place_if_free(&mut self, block: u32) -> Result<PlanAnswer, Miss> {
        let Some(expected) = self.expectation.block(block) else { return Err(Miss::Unknown) };
        let (offset, recorded) = (expected.offset, self.is_in_order(block, expected));
        if !recorded && !self.is_free(block) {
            // It is not expected again.
            self.expected = self.expected.max(block + 1);
            return Err(Miss::Overlap);
        }
        if self.placed_below > block + 1 {
            // It comes late: blocks after it are no longer the last users of its addresses.
            for &later in self.followed.iter().filter(|&&later| later > block) {
                self.states[later as usize].make_stale();
            }
        }
        Ok(self.place(block, offset, recorded))
    }

    /// Makes a block live.
    #[inline]
    fn place(&mut self, block: u32, offset: u64, recorded: bool) -> PlanAnswer {
        self.states[block as usize] = BlockState::live(self.pass);
        self.live += 1;
        self.last_users.record(block);
        (self.last, self.is_recorded) = (block, recorded);
        self.placed_below = self.placed_below.max(block + 1);
        self.expected = self.expected.max(block + 1);
        self.unknown_in_row = 0;
        self.counters.hits += 1;
        PlanAnswer::Hit { block, offset, recorded }
    }

    /// If the position is lost, looks for the last three allocations in the plan, moves there and
    /// returns the last of them.
    fn resynchronise(&mut self) -> Option<u32> {
        if self.unknown_in_row < LOST {
            return None;
        }
        let [Some(first), Some(second), Some(third)] = self.unknown else { return None };
        let block = self.expectation.after([first, second, third], self.expected)?;
        self.counters.resynchronisations += 1;
        self.unknown_in_row = 0;
        if block >= self.expected {
            self.expected = block;
        } else {
            self.begin_pass(block);
        }
        Some(block).filter(|&block| self.is_waiting(block))
    }
}

/// Why an allocation has no place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Miss {
    /// No such block is expected.
    Unknown,
    /// Its place is held.
    Overlap,
}
