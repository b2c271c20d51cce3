//! The tools of the workloads: a portable random generator, and blocks that write their own rows.

use super::super::builder::{HistoryBuilder, Origin, StreamNames};
use crate::trace::error::{Fault, Name};
use aquifer_core::random::SplitMix64;

/// A live block of a workload.
#[derive(Debug)]
pub(super) struct MadeBlock {
    id: u64,
    /// The size in the trace, after scaling.
    bytes: u64,
    stream: u64,
}

/// Writes the rows of a workload.
pub(super) struct Maker {
    pub(super) builder: HistoryBuilder,
    random: SplitMix64,
    scale: f64,
    length: f64,
    next: u64,
    steps: u64,
    /// Bytes that are allocated and not freed.
    pub(super) live: u64,
}

impl Maker {
    pub(super) fn new(seed: u64, scale: f64, length: f64) -> Self {
        let random = SplitMix64::new(seed);
        let builder = HistoryBuilder::new(StreamNames::Numbers);
        Self { builder, random, scale, length, next: 1, steps: 0, live: 0 }
    }

    /// Begins the next step. Returns its number and its time.
    fn step(&mut self) -> (u64, f64) {
        let time = self.steps as f64;
        self.steps += 1;
        self.builder.at(time);
        (self.steps, time)
    }

    /// Returns `steps` multiplied by the requested length.
    pub(super) fn steps(&self, steps: u64) -> u64 {
        ((steps as f64 * self.length) as u64).max(1)
    }

    /// Returns `bytes` multiplied by the requested scale.
    pub(super) fn scaled(&self, bytes: u64) -> u64 {
        ((bytes as f64 * self.scale) as u64).max(1)
    }

    /// Returns a number below `most`, which must not be zero.
    pub(super) fn below(&mut self, most: u64) -> u64 {
        self.random.next_u64() % most.max(1)
    }

    /// Returns a number from `low` to `high`, inclusive.
    pub(super) fn between(&mut self, low: u64, high: u64) -> u64 {
        low + self.below(high - low + 1)
    }

    /// Returns a size from `low` up to nearly `low << doublings`. Each doubling is equally likely.
    /// Uses no logarithms, whose last bits differ between machines.
    pub(super) fn spread(&mut self, low: u64, doublings: u64) -> u64 {
        let base = low << self.below(doublings);
        base + self.below(base)
    }

    /// Allocates `bytes`, which are scaled.
    pub(super) fn allocate(&mut self, bytes: u64, stream: u64) -> Result<MadeBlock, Fault> {
        let bytes = self.scaled(bytes);
        let (now, id) = (self.step(), self.next);
        self.next += 1;
        let (address, kind, occupied) = (None, None, None);
        let origin = Origin { address, kind, occupied, tag: 0, thread: 0, stack: 0, metadata: 0 };
        self.builder.allocate(now, Name::Id(id), bytes, stream, &origin)?;
        self.live += bytes;
        Ok(MadeBlock { id, bytes, stream })
    }

    /// Frees a block that no other stream uses.
    pub(super) fn free(&mut self, held: MadeBlock) -> Result<(), Fault> {
        let stream = held.stream;
        self.free_on(held, stream)
    }

    /// Frees a block on a stream: its own, or one that has used it until now.
    pub(super) fn free_on(&mut self, held: MadeBlock, stream: u64) -> Result<(), Fault> {
        let (now, id) = (self.step(), Name::Id(held.id));
        self.builder.free(now, id, held.bytes, stream)?;
        self.builder.complete(now, id, held.bytes, stream)?;
        debug_assert!(self.live >= held.bytes, "the block is counted as live");
        self.live -= held.bytes;
        Ok(())
    }

    /// Frees a block that another stream still uses, until [`Maker::complete`].
    pub(super) fn free_in_use(&mut self, held: MadeBlock) -> Result<MadeBlock, Fault> {
        let now = self.step();
        self.builder.free(now, Name::Id(held.id), held.bytes, held.stream)?;
        self.live -= held.bytes;
        Ok(held)
    }

    /// Ends the use of a freed block by another stream.
    pub(super) fn complete(&mut self, held: MadeBlock) -> Result<(), Fault> {
        let now = self.step();
        self.builder.complete(now, Name::Id(held.id), held.bytes, held.stream)
    }

    /// Frees all blocks in reverse order.
    pub(super) fn free_all(
        &mut self,
        held: impl IntoIterator<Item = MadeBlock, IntoIter: DoubleEndedIterator>,
    ) -> Result<(), Fault> {
        held.into_iter().rev().try_for_each(|held| self.free(held))
    }

    /// Frees a random block.
    pub(super) fn free_any(&mut self, held: &mut Vec<MadeBlock>) -> Result<(), Fault> {
        if held.is_empty() {
            return Ok(());
        }
        let pick = self.below(held.len() as u64) as usize;
        let held = held.swap_remove(pick);
        self.free(held)
    }
}
