//! Slots that are wholly free, and that no captured work has used, are given back to the driver:
//! those between parkable blocks, and what programs that run their work once before they capture it
//! leave free.

use super::{SlotMemory, captures::SlotState, settings::Phase};
use crate::{
    backing::window::Grid,
    base::{
        lists::WeakList,
        pending::{self, PartsWork, StreamDeps},
        released::Released,
    },
    pool_core::PoolHook,
};
use aquifer_core::{MemoryError, Result, Tag, event::BlockKind};
use aquifer_heap::Range;
use aquifer_stream::Timeline;
use std::sync::{Arc, MutexGuard, atomic::Ordering};

/// The memories in slots of a pool. Each lives as long as it is referenced.
#[derive(Default)]
pub(crate) struct SlotMemories(WeakList<SlotMemory>);

impl SlotMemories {
    /// Adds a memory.
    pub(crate) fn add(&self, new: &Arc<SlotMemory>) {
        self.0.add(new);
    }

    /// Adds the parkable memory of a tag and returns it. If another thread was faster, returns that
    /// thread's instead.
    pub(crate) fn add_parkable(&self, new: Arc<SlotMemory>) -> Arc<SlotMemory> {
        let tag = new.tag;
        self.0.find_or_add(new, |memory| !memory.is_of_graphs() && memory.tag == tag)
    }

    /// Returns the parkable memory of a tag.
    pub(crate) fn parkable(&self, tag: Tag) -> Option<Arc<SlotMemory>> {
        self.of(tag).into_iter().find(|memory| memory.kind == BlockKind::Parkable)
    }

    /// Returns all memory that is parked with a tag.
    pub(crate) fn of(&self, tag: Tag) -> Vec<Arc<SlotMemory>> {
        let mut all = self.0.all();
        all.retain(|memory| memory.tag == Some(tag));
        all
    }

    /// Copies saved contents, if there are any.
    pub(crate) fn read_saved(&self, address: u64, into: &mut [u8]) -> bool {
        let mut all = self.0.all().into_iter();
        let found = all.find_map(|memory| memory.saved_at(address, into.len() as u64));
        found.inspect(|(saved, offset)| saved.read(*offset, into)).is_some()
    }

    /// Returns an error if memory of the tag is parked.
    pub(crate) fn check_resident(&self, tag: Tag) -> Result<()> {
        let parked = self.of(tag).iter().any(|memory| memory.is_parked());
        if parked { Err(MemoryError::Parked { tag }) } else { Ok(()) }
    }
}

impl PoolHook for SlotMemories {
    /// Graphs poll when they need memory: the fences of captured work fail.
    fn poll(&self) -> Result<()> {
        let parkable = self.0.all().into_iter().filter(|memory| !memory.is_of_graphs());
        parkable.into_iter().try_for_each(|memory| memory.poll_fences())
    }

    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        self.0.all().iter().flat_map(|memory| memory.releasable_work()).collect()
    }

    fn free_bytes(&self) -> u64 {
        self.0.all().iter().map(|memory| memory.releasable_bytes()).sum()
    }

    fn release_before_growth(&self, bytes: u64) {
        let mut missing = bytes;
        for memory in self.0.all() {
            if missing > 0 && memory.is_of_graphs() && memory.releasable_bytes() > 0 {
                missing = missing.saturating_sub(memory.release_slots(missing).bytes);
            }
        }
    }

    fn release_free(&self) -> Released {
        let mut released = Released::default();
        self.0.all().iter().for_each(|memory| released += memory.release_slots(u64::MAX));
        released
    }
}

impl SlotMemory {
    pub(crate) fn retain_free(&self) {
        self.retains_free.store(true, Ordering::Relaxed);
    }

    /// Returns the state, if there are slots that could be given back.
    fn state_to_release(&self) -> Option<MutexGuard<'_, SlotState>> {
        let may = !self.retains_free.load(Ordering::Relaxed);
        let state = may.then(|| self.state())?;
        let has = state.slots.ranges.claimed.len() > state.captured.len();
        (has && state.slots.phase == Phase::Resident).then_some(state)
    }

    /// Returns the bytes of the slots that contain no live block and that no captured work has
    /// used. Work may still run in them.
    fn releasable_bytes(&self) -> u64 {
        let (state, grid) = (self.state_to_release(), self.grid());
        state.map_or(0, |state| state.uncaptured_slots(grid).count() as u64 * grid.slot)
    }

    /// Returns the work after which slots that no captured work has used could be given back.
    fn releasable_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        let Some(state) = self.state_to_release() else { return Vec::new() };
        let (ranges, grid) = (&state.slots.ranges, self.grid());
        let is_uncaptured =
            |range: Range| grid.slots_within(range).any(|slot| !state.captured.contains(&slot));
        let free = ranges.free.iter().filter(|(range, _)| is_uncaptured(*range));
        free.flat_map(|(_, deps)| deps.iter().cloned()).chain(ranges.pending_work()).collect()
    }

    /// Returns slots to the driver that contain no live block and no running work, and that no
    /// captured work has used: the highest, until there are `wanted` bytes. Their addresses stay
    /// reserved.
    pub(crate) fn release_slots(&self, wanted: u64) -> Released {
        let mut released = Released::default();
        if self.state_to_release().is_none() {
            return released;
        }
        // Work that cannot be polled counts as running. That of graphs may be captured.
        let polled = self.poll_fences();
        if !self.is_of_graphs() {
            released.add_refusal(polled);
        }
        if let Some(state) = self.state_to_release()
            && self.retire_slots(state, wanted)
        {
            released += self.dedicated.reap_span(&self.span);
        }
        released
    }

    /// Makes slots retiring that are wholly free and that no captured work has used: the highest
    /// whose work is done, until there are `wanted` bytes. Returns whether there are any.
    fn retire_slots(&self, mut state: MutexGuard<'_, SlotState>, wanted: u64) -> bool {
        let grid = self.grid();
        let done = state.uncaptured_slots(grid).filter(|(_, deps)| pending::is_done(deps));
        let slots: Vec<u64> = done.map(|(slot, _)| slot).collect();
        let most = usize::try_from(wanted.div_ceil(grid.slot)).unwrap_or(usize::MAX);
        let highest = &slots[slots.len().saturating_sub(most)..];
        // All of them: the lock is held since they were found free, with their work done.
        let removed = state.slots.ranges.remove_free_slots(highest, grid, pending::is_done);
        // Accounted and reported before another thread can unmap them.
        self.dedicated.slots_retired(self.kind, removed.len() as u64 * grid.slot);
        self.observe(removed.iter().map(|&slot| grid.slot_range(slot)), false);
        for &slot in &removed {
            self.span.retire(slot..slot + 1, PartsWork::default(), None);
        }
        !removed.is_empty()
    }
}

impl SlotState {
    /// An iterator over the slots that are wholly free and that no captured work has used.
    fn uncaptured_slots(&self, grid: Grid) -> impl Iterator<Item = (u64, &StreamDeps)> {
        self.slots.ranges.empty_slots(grid).filter(|(slot, _)| !self.captured.contains(slot))
    }
}
