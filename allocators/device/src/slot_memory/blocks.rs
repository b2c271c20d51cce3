//! The live blocks of memory in slots, and what becomes of them while they are parked.

use super::{
    ranges::{Capture, SlotRanges},
    saved::SavedBlock,
    settings::Phase,
};
use crate::{
    Block,
    base::{driver::owner_of_freed, pending::DeferredFree},
    dedicated::{DedicatedPool, Span},
};
use aquifer_core::{
    Action, Event, MemoryError, Result, Tag,
    event::{BlockKind, EventTicket},
};
use aquifer_driver::{DeviceRange, Ownership, RawStream};
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline, Watch};
use std::{collections::BTreeMap, mem, sync::Arc};

/// The blocks of memory that can be parked, behind the lock of their owner.
#[derive(Default)]
pub(crate) struct SlotBlocks {
    pub(crate) phase: Phase,
    /// Live blocks, by address.
    pub(crate) blocks: BTreeMap<u64, SlotBlock>,
    /// What is in no live block.
    pub(crate) ranges: SlotRanges,
    /// Blocks freed while being parked or resumed. They are reported to a validating driver at its
    /// end.
    unreported: Vec<(u64, Range)>,
    /// The number of threads that take memory for blocks or return blocks. Their memory is in none
    /// of the lists above.
    pub(crate) operations: u64,
}

/// A live block, as its allocator sees it.
pub(crate) struct SlotBlock {
    pub(crate) bytes: u64,
    pub(crate) requested: u64,
    pub(crate) tag: Tag,
    pub(crate) owner_stream: Arc<Timeline>,
    pub(crate) generation: u64,
    /// The capture it was allocated in.
    pub(crate) capture: Capture,
    /// `None` as soon as its owner drops the block.
    pub(crate) watch: Option<Watch>,
    /// Its contents when it was last parked, unless they were dropped.
    pub(super) saved: Option<Arc<SavedBlock>>,
}

impl SlotBlocks {
    /// Returns an error unless the tag is resident.
    pub(crate) fn check_resident(&self, tag: Tag) -> Result<()> {
        if self.phase == Phase::Resident { Ok(()) } else { Err(MemoryError::Parked { tag }) }
    }

    /// Counts a block that is handed out for work on `stream`, and adds it to the live ones.
    /// Returns its event, to be sent without the lock.
    pub(crate) fn hand_out(
        &mut self,
        dedicated: &DedicatedPool,
        kind: BlockKind,
        stream: &Stream,
        (block, watch): (&Block, Watch),
        capture: Capture,
    ) -> Option<(EventTicket, Event)> {
        let (address, bytes, requested) = (block.address(), block.capacity(), block.bytes());
        let (tag, generation, timeline) = (block.tag(), block.generation(), stream.timeline());
        debug_assert!(self.phase.has_memory(), "a block without memory");
        debug_assert!(
            !self.has_live_in(Range { start: address, len: bytes }),
            "a block over a live one"
        );
        dedicated.slot_block_allocated(kind, bytes, requested, tag);
        let live = Ownership::Live { stream: timeline.noted(), generation };
        dedicated.notify_observer(generation, address, bytes, live);
        let (owner_stream, watch) = (timeline.clone(), Some(watch));
        let saved = None;
        let block =
            SlotBlock { bytes, requested, tag, owner_stream, generation, capture, watch, saved };
        self.blocks.insert(address, block);
        dedicated.event(kind, Action::Allocate, stream.number(), address, requested, tag)
    }

    /// Returns the bytes of the live blocks: allocated and requested.
    pub(crate) fn live(&self) -> (u64, u64) {
        self.blocks.values().fold((0, 0), |(bytes, requested), live| {
            (bytes + live.bytes, requested + live.requested)
        })
    }

    /// Returns the live blocks by address, with their requested sizes and their streams.
    pub(crate) fn list(&self, dedicated: &DedicatedPool) -> Vec<(DeviceRange, RawStream)> {
        let block = |(&address, live): (&u64, &SlotBlock)| {
            let range = DeviceRange { device: dedicated.device, address, bytes: live.requested };
            (range, live.owner_stream.raw())
        };
        self.blocks.iter().map(block).collect()
    }

    /// Returns the ranges of the live blocks by address.
    pub(super) fn live_ranges(&self) -> Vec<Range> {
        self.blocks.iter().map(|(&start, live)| Range { start, len: live.bytes }).collect()
    }

    /// Returns whether a live block overlaps a range.
    fn has_live_in(&self, range: Range) -> bool {
        let below = self.blocks.range(..range.end()).next_back();
        below.is_some_and(|(start, live)| start + live.bytes > range.start)
    }

    /// Takes the watch of a block that its owner drops. To be called before the block's uses are
    /// taken, which invalidates the watch.
    pub(crate) fn begin_release(&mut self, address: u64) {
        if let Some(watch) = self.blocks.get_mut(&address).and_then(|live| live.watch.take()) {
            // Of parked memory. The block's uses can be taken again.
            watch.resume();
            self.operations += 1;
        }
    }

    /// Removes a block that its owner has dropped from the live ones, and counts it. Returns it, to
    /// be dropped outside the lock. Returns `None` for a block that was never handed out: its maker
    /// still owns the range.
    pub(crate) fn take_back(
        &mut self,
        dedicated: &DedicatedPool,
        block: &DeferredFree,
    ) -> Option<SlotBlock> {
        let range = Range { start: block.address, len: block.bytes };
        let live = self.blocks.remove(&range.start)?;
        debug_assert_eq!(live.bytes, range.len, "a block has changed its size");
        self.operations -= 1;
        let has_memory = self.phase.has_memory();
        let (bytes, requested) = if has_memory { (range.len, live.requested) } else { (0, 0) };
        dedicated.record_block_free(bytes, requested, live.tag);
        match self.phase {
            Phase::Resident => {
                let users = block.users();
                let owner = owner_of_freed(&users);
                dedicated.notify_observer(block.generation, range.start, range.len, owner);
            }
            Phase::Parking | Phase::Resuming => self.unreported.push((block.generation, range)),
            Phase::Parked => {}
        }
        Some(live)
    }

    /// Keeps saved contents with their blocks. Returns those whose blocks are gone.
    pub(super) fn keep_saved(&mut self, saved: Vec<SavedBlock>) -> Vec<SavedBlock> {
        let mut over = Vec::new();
        for contents in saved {
            match self.blocks.get_mut(&contents.address) {
                Some(live) => live.saved = Some(Arc::new(contents)),
                None => over.push(contents),
            }
        }
        over
    }

    /// Takes the contents of the last park, to be dropped outside the lock.
    pub(super) fn take_saved(&mut self) -> Vec<Arc<SavedBlock>> {
        self.blocks.values_mut().filter_map(|live| live.saved.take()).collect()
    }

    /// Returns the saved contents of the live block that has `bytes` bytes at `address`, and where
    /// in them these are.
    pub(super) fn saved_at(&self, address: u64, bytes: u64) -> Option<(Arc<SavedBlock>, u64)> {
        let (&start, live) = self.blocks.range(..=address).next_back()?;
        let offset = address - start;
        let is_inside = live.bytes.checked_sub(offset).is_some_and(|rest| bytes <= rest);
        Some((live.saved.clone().filter(|_| is_inside)?, offset))
    }

    /// Releases claimed slots that contain no live block.
    pub(super) fn remove_empty_slots(&mut self, span: &Span) {
        let grid = span.grid();
        let lives = |slot: &u64| self.has_live_in(grid.slot_range(*slot));
        let empty: Vec<u64> =
            self.ranges.claimed.iter().copied().filter(|slot| !lives(slot)).collect();
        let _ = self.ranges.remove_free_slots(&empty, grid, |_| true);
    }

    /// Refuses uses of all blocks, unless one is open. Returns the work that may be queued for
    /// them.
    pub(super) fn quiesce(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
        debug_assert_eq!(self.phase, Phase::Parking, "new uses are not refused");
        self.ranges.check_closed()?;
        let mut work = Vec::new();
        for (&address, live) in &self.blocks {
            // A block being dropped would be counted in `operations`, which is 0.
            let Some(watch) = &live.watch else { continue };
            work.extend(watch.park(address, tag)?);
            work.push((live.owner_stream.clone(), live.owner_stream.open()));
        }
        Ok(work)
    }

    /// Allows uses again.
    pub(super) fn reopen(&mut self, dedicated: &DedicatedPool) {
        self.end_phase(dedicated, Phase::Resident);
        self.blocks.values().filter_map(|live| live.watch.as_ref()).for_each(Watch::resume);
    }

    /// Ends parking or resuming, and reports to a validating driver the blocks that were freed
    /// meanwhile.
    pub(super) fn end_phase(&mut self, dedicated: &DedicatedPool, next: Phase) {
        for (generation, range) in mem::take(&mut self.unreported) {
            dedicated.notify_observer(generation, range.start, range.len, Ownership::Free);
        }
        debug_assert!(matches!(self.phase, Phase::Parking | Phase::Resuming), "{:?}", self.phase);
        self.phase = next;
    }

    /// Returns an event of each action for each live block, to be sent without the lock.
    pub(super) fn events(
        &self,
        dedicated: &DedicatedPool,
        kind: BlockKind,
        actions: &[Action],
    ) -> Vec<(EventTicket, Event)> {
        let of = |(&address, live): (&u64, &SlotBlock)| {
            let (stream, requested, tag) = (live.owner_stream.number(), live.requested, live.tag);
            let event = move |&action: &Action| {
                dedicated.event(kind, action, stream, address, requested, tag)
            };
            actions.iter().filter_map(event)
        };
        self.blocks.iter().flat_map(of).collect()
    }

    /// Reports to a validating driver who owns the live blocks.
    pub(super) fn notify(
        &self,
        dedicated: &DedicatedPool,
        owner: impl Fn(&SlotBlock) -> Ownership<'_>,
    ) {
        for (&address, live) in &self.blocks {
            dedicated.notify_observer(live.generation, address, live.bytes, owner(live));
        }
    }

    /// Reports to a validating driver that the live blocks have memory again, and which stream may
    /// write them: `on`, or their own if it is `None`.
    pub(super) fn notify_resident(&self, dedicated: &DedicatedPool, on: Option<&Stream>) {
        self.notify(dedicated, |live| Ownership::Live {
            stream: on.map_or(live.owner_stream.noted(), Stream::raw),
            generation: live.generation,
        });
    }
}
