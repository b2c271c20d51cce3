//! The memories of a tag, which are parked and resumed together: of all or of none.
//!
//! Both directions have two steps. The first does what can fail, and can be undone. The second
//! cannot fail. So several tags, also of several devices, can be parked or resumed as one.
//!
//! Parkable blocks and memory of graphs are parked in one way: [`SlotBlocks`] is the state of
//! either, and [`TaggedMemory`] says in what they differ.

use super::{
    saved::{self, RestoredContents, SavedContents, SavedPiece},
    settings::{Park, ParkReport, Phase, QUIESCE_POLL, ResumeReport},
};
use crate::{
    Block, DevicePool,
    base::{
        driver::owner_of_freed,
        pending::{DeferredFree, PartsWork, latest},
    },
    dedicated::{
        DedicatedPool, Span,
        slot_pool::{Capture, SlotRanges},
    },
    pool_core::PoolCore,
};
use aquifer_core::{
    Action, Event, MemoryError, Result, Tag,
    event::{BlockKind, EventTicket},
};
use aquifer_driver::{DeviceRange, Ownership, RawStream};
use aquifer_heap::Range;
use aquifer_stream::{Stream, Timeline, Watch};
use std::{
    collections::BTreeMap,
    fmt, mem,
    ops::DerefMut,
    sync::{Arc, Mutex},
    thread,
    time::Instant,
};

/// The blocks of memory that can be parked, behind the lock of their owner.
#[derive(Default)]
pub(crate) struct SlotBlocks {
    pub(crate) phase: Phase,
    /// Live blocks, by address.
    pub(crate) blocks: BTreeMap<u64, SlotBlock>,
    /// What is in no live block.
    pub(crate) ranges: SlotRanges,
    /// Bytes of memory that are counted as memory of graphs.
    pub(crate) of_graphs: u64,
    /// The contents of the live blocks when they were parked.
    saved: Vec<SavedPiece>,
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
        dedicated.slot_pool_allocated(kind, bytes, requested, tag);
        let live = Ownership::Live { stream: timeline.noted(), generation };
        dedicated.notify_observer(generation, address, bytes, live);
        let (owner_stream, watch) = (timeline.clone(), Some(watch));
        let block = SlotBlock { bytes, requested, tag, owner_stream, generation, capture, watch };
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

    /// Returns the ranges of the live blocks by address, adjacent ones merged.
    fn live_ranges(&self) -> Vec<Range> {
        saved::merged(self.blocks.iter().map(|(&start, live)| Range { start, len: live.bytes }))
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

    /// Removes a block that its owner has dropped from the live ones, and counts it. Returns it
    /// with the saved contents that end with it, to be dropped outside the lock. Returns `None` for
    /// a block that was never handed out: its maker still owns the range.
    pub(crate) fn take_back(
        &mut self,
        dedicated: &DedicatedPool,
        block: &DeferredFree,
    ) -> Option<(SlotBlock, Vec<SavedPiece>)> {
        let range = Range { start: block.address, len: block.bytes };
        let live = self.blocks.remove(&range.start)?;
        debug_assert_eq!(live.bytes, range.len, "a block has changed its size");
        self.operations -= 1;
        let has_memory = self.phase.has_memory();
        let (bytes, requested) = if has_memory { (range.len, live.requested) } else { (0, 0) };
        dedicated.slot_pool_freed(bytes, requested, live.tag);
        let mut over = Vec::new();
        match self.phase {
            Phase::Resident => {
                let users = block.users();
                let owner = owner_of_freed(&users);
                dedicated.notify_observer(block.generation, range.start, range.len, owner);
            }
            Phase::Parking | Phase::Resuming => self.unreported.push((block.generation, range)),
            Phase::Parked => over = self.drop_saved(range),
        }
        Some((live, over))
    }

    /// Removes the saved contents of a freed range, unless they share a piece with those of a live
    /// block.
    fn drop_saved(&mut self, range: Range) -> Vec<SavedPiece> {
        let saved = mem::take(&mut self.saved);
        let (kept, over) = saved.into_iter().partition(|piece| {
            !piece.touches(range) || piece.ranges().any(|r| self.has_live_in(r))
        });
        self.saved = kept;
        over
    }

    /// Keeps those of `pieces` that hold contents of a live block. Returns the others.
    fn retain_saved(&mut self, pieces: Vec<SavedPiece>) -> Vec<SavedPiece> {
        let (kept, over) =
            pieces.into_iter().partition(|piece| piece.ranges().any(|r| self.has_live_in(r)));
        self.saved = kept;
        over
    }

    /// Releases claimed slots that contain no live block.
    fn remove_empty_slots(&mut self, span: &Span) {
        let grid = span.grid();
        let lives = |slot: &u64| self.has_live_in(grid.slot_range(*slot));
        let empty: Vec<u64> =
            self.ranges.claimed.iter().copied().filter(|slot| !lives(slot)).collect();
        let _ = self.ranges.remove_free_slots(&empty, grid, |_| true);
    }

    /// Refuses uses of all blocks, unless one is open. Returns the work that may be queued for
    /// them.
    fn quiesce(&self, tag: Tag) -> Result<Vec<(Arc<Timeline>, u64)>> {
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
    fn reopen(&mut self, dedicated: &DedicatedPool) {
        self.end_phase(dedicated, Phase::Resident);
        self.blocks.values().filter_map(|live| live.watch.as_ref()).for_each(Watch::resume);
    }

    /// Ends parking or resuming, and reports to a validating driver the blocks that were freed
    /// meanwhile.
    fn end_phase(&mut self, dedicated: &DedicatedPool, next: Phase) {
        for (generation, range) in mem::take(&mut self.unreported) {
            dedicated.notify_observer(generation, range.start, range.len, Ownership::Free);
        }
        debug_assert!(matches!(self.phase, Phase::Parking | Phase::Resuming), "{:?}", self.phase);
        self.phase = next;
    }

    /// Returns an event of each action for each live block, to be sent without the lock.
    fn events(
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
    fn notify(&self, dedicated: &DedicatedPool, owner: impl Fn(&SlotBlock) -> Ownership<'_>) {
        for (&address, live) in &self.blocks {
            dedicated.notify_observer(live.generation, address, live.bytes, owner(live));
        }
    }

    /// Reports to a validating driver that the live blocks have memory again, and which stream may
    /// write them: `on`, or their own if it is `None`.
    fn notify_resident(&self, dedicated: &DedicatedPool, on: Option<&Stream>) {
        self.notify(dedicated, |live| Ownership::Live {
            stream: on.map_or(live.owner_stream.noted(), Stream::raw),
            generation: live.generation,
        });
    }
}

/// Memory of a tag that can be parked. The methods name in what kinds of it differ.
pub(crate) trait TaggedMemory: Send + Sync {
    fn tag(&self) -> Tag;

    fn kind(&self) -> BlockKind;

    fn dedicated(&self) -> &DedicatedPool;

    /// Returns its addresses.
    fn span(&self) -> Result<&Arc<Span>>;

    /// Locks its blocks.
    fn slots(&self) -> Box<dyn DerefMut<Target = SlotBlocks> + '_>;

    /// Returns the work that may use the memory, except for that of live blocks and open uses.
    fn queued_work(&self) -> Vec<(Arc<Timeline>, u64)>;

    /// Refuses uses from now on that need no block.
    fn begin_phase(&self) -> Result<()> {
        let mut slots = self.slots();
        slots.check_resident(self.tag())?;
        slots.phase = Phase::Parking;
        Ok(())
    }

    /// Returns an error if it cannot be parked now.
    fn check_parkable(&self) -> Result<()> {
        Ok(())
    }

    /// Returns whether only a wait for the device covers all work that may use it.
    fn needs_synchronize(&self) -> bool {
        false
    }

    /// Returns whether slots are given up when they are parked without a live block.
    fn gives_up_empty_slots(&self) -> bool {
        true
    }

    /// Counts that memory with this many live bytes is parked.
    fn record_parked(&self, _slots: &mut SlotBlocks, _live: u64) {}

    /// Counts memory that is mapped for a resume, or is no longer mapped.
    fn record_mapped(&self, _bytes: u64, _mapped: bool) {}

    /// Counts that `taken` bytes of memory with this many live bytes are resident again.
    fn record_resumed(&self, _slots: &mut SlotBlocks, _taken: u64, _live: u64) {}
}

impl dyn TaggedMemory {
    /// Returns whether uses are refused.
    pub(super) fn is_parked(&self) -> bool {
        self.slots().phase != Phase::Resident
    }

    /// Returns the bytes of physical memory that are charged for it.
    pub(super) fn charged_bytes(&self) -> u64 {
        self.span().map_or(0, |span| span.charged_bytes())
    }

    /// Moves freed blocks whose uses are done to the free ranges. Makes no driver call.
    pub(crate) fn collect(&self) {
        let (dedicated, kind) = (self.dedicated(), self.kind());
        let (over, events) = {
            let count = |bytes| dedicated.slot_pool_collected(kind, bytes);
            let over = self.slots().ranges.collect(false, count);
            let events = dedicated.completion_events(kind, &over, self.completion_tag());
            (over, events)
        };
        dedicated.send(events);
        dedicated.complete(over);
    }

    /// Returns the tag with which the completion of a freed block is recorded.
    fn completion_tag(&self) -> Tag {
        if self.kind() == BlockKind::Graph { Tag::NONE } else { self.tag() }
    }

    /// Refuses further uses, waits until `until` for those that are queued, and saves the contents.
    /// On failure nothing has changed.
    fn begin_park(
        &self,
        pool: &PoolCore,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<SavedContents> {
        self.span()?;
        let work = self.quiesce(until)?;
        let mut how = how.clone();
        if self.needs_synchronize() {
            how = how.after_all_work();
        }
        let ranges = || self.slots().live_ranges();
        saved::wait_and_save(pool, &how, &work, until, ranges).inspect_err(|_| self.abort_park())
    }

    /// Refuses new blocks and every use of existing ones from now on. Returns the work that must be
    /// over before nothing uses the memory any more. While other threads take memory for blocks,
    /// waits until the deadline.
    ///
    /// # Errors
    /// [`MemoryError::Parked`]; [`MemoryError::Busy`] if a use is open; [`MemoryError::TimedOut`].
    /// In each case nothing has changed.
    fn quiesce(&self, until: Option<Instant>) -> Result<Vec<(Arc<Timeline>, u64)>> {
        self.begin_phase()?;
        let quiesced = loop {
            if let Err(error) = self.check_parkable() {
                break Err(error);
            }
            let slots = self.slots();
            if slots.operations == 0 {
                break slots.quiesce(self.tag());
            }
            drop(slots);
            if until.is_some_and(|until| Instant::now() >= until) {
                break Err(MemoryError::TimedOut);
            }
            thread::sleep(QUIESCE_POLL);
        };
        let mut work = quiesced.inspect_err(|_| self.abort_park())?;
        work.extend(self.queued_work());
        Ok(latest(work))
    }

    /// Allows uses again, after `begin_park`.
    fn abort_park(&self) {
        self.slots().reopen(self.dedicated());
    }

    /// Returns the memory to the driver, after `begin_park`, and adds to the report. Nothing uses
    /// the memory now or later. Mappings that the driver refuses to unmap stay, and do no harm.
    fn finish_park(&self, contents: SavedContents, report: &mut ParkReport) {
        let (Ok(span), dedicated, kind) = (self.span(), self.dedicated(), self.kind()) else {
            return;
        };
        report.copying += contents.took;
        let (over, dropped, held, events) = {
            let slots = &mut **self.slots();
            let over =
                slots.ranges.collect(true, |bytes| dedicated.slot_pool_collected(kind, bytes));
            let mut events = dedicated.completion_events(kind, &over, self.completion_tag());
            events.extend(slots.events(dedicated, kind, &[Action::Free, Action::Complete]));
            let live = slots.live().0;
            for block in slots.blocks.values() {
                dedicated.slot_pool_parked(block.bytes, block.requested, block.tag);
            }
            report.blocks += slots.blocks.len() as u64;
            report.parked += live;
            slots.notify(dedicated, |_| Ownership::Free);
            slots.end_phase(dedicated, Phase::Parked);
            self.record_parked(slots, live);
            if self.gives_up_empty_slots() {
                slots.remove_empty_slots(span);
            }
            let dropped = slots.retain_saved(contents.pieces);
            report.saved += slots.saved.iter().map(SavedPiece::bytes).sum::<u64>();
            let held = span.charged_bytes();
            dedicated.slot_pool_retired(held);
            span.retire(0..u64::MAX, PartsWork::default(), None);
            debug_assert_eq!(span.charged_bytes(), 0, "parked memory is mapped");
            (over, dropped, held, events)
        };
        dedicated.send(events);
        drop(dropped);
        dedicated.complete(over);
        dedicated.release_parked_span(span, held, report);
    }

    /// Maps memory with the saved contents, or does nothing for memory that is resident. Waits
    /// until `until` for another thread that parks or resumes it. On failure everything is still
    /// parked.
    fn begin_resume(
        &self,
        pool: &PoolCore,
        until: Option<Instant>,
    ) -> Result<Option<RestoredContents>> {
        let Ok(span) = self.span() else { return Ok(None) };
        let mut slots = loop {
            let mut slots = self.slots();
            match slots.phase.begin_resume(self.tag()) {
                Ok(true) => break slots,
                Ok(false) => return Ok(None),
                Err(_) if until.is_some_and(|until| Instant::now() < until) => drop(slots),
                Err(error) => return Err(error),
            }
            thread::sleep(QUIESCE_POLL);
        };
        if self.gives_up_empty_slots() {
            slots.remove_empty_slots(span);
        }
        debug_assert_eq!(span.charged_bytes(), 0, "parked memory is mapped");
        let claimed: Vec<u64> = slots.ranges.claimed.iter().copied().collect();
        let (ranges, pieces) = (slots.live_ranges(), mem::take(&mut slots.saved));
        drop(slots);
        let taken = claimed.len() as u64 * span.slot;
        let mut restored = RestoredContents { pieces, taken, ..RestoredContents::default() };
        match self.restore(pool, &claimed, &ranges, until, &mut restored) {
            Ok(()) => Ok(Some(restored)),
            Err(error) => {
                self.park_again(restored.pieces);
                Err(error)
            }
        }
    }

    /// Maps memory for the slots, and copies the contents of the ranges back. On failure nothing is
    /// mapped.
    fn restore(
        &self,
        pool: &PoolCore,
        claimed: &[u64],
        ranges: &[Range],
        until: Option<Instant>,
        restored: &mut RestoredContents,
    ) -> Result<()> {
        let (span, stream) = (self.span()?, pool.streams().lease()?);
        let new = pool.back_slots_until(span, &stream, self.tag(), claimed, until)?;
        debug_assert!(new <= restored.taken, "maps more than it needs");
        debug_assert_eq!(span.charged_bytes(), restored.taken, "a slot has no memory");
        self.dedicated().slot_pool_backed(new, restored.taken - new);
        self.record_mapped(restored.taken, true);
        if !restored.pieces.is_empty() {
            self.slots().notify_resident(self.dedicated(), Some(&stream));
        }
        let began = Instant::now();
        let copied = saved::restore(&stream, &restored.pieces, ranges)
            .inspect_err(|_| self.unmap_again(restored.taken))?;
        (restored.copied, restored.took) = (copied, began.elapsed());
        Ok(())
    }

    /// Returns the memory to the driver again, after `begin_resume`.
    fn abort_resume(&self, restored: RestoredContents) {
        self.unmap_again(restored.taken);
        self.park_again(restored.pieces);
    }

    /// Returns the memory that a resume has mapped to the driver.
    fn unmap_again(&self, taken: u64) {
        let (Ok(span), dedicated) = (self.span(), self.dedicated()) else { return };
        self.slots().notify(dedicated, |_| Ownership::Free);
        self.record_mapped(taken, false);
        dedicated.slot_pool_retired(taken);
        span.retire(0..u64::MAX, PartsWork::default(), None);
        // A refusal is retried by the next caller that reaps. Otherwise the next resume uses what
        // is still mapped.
        let _ = dedicated.reap_span(span);
    }

    /// Ends a resume that has no memory, with the contents as they were saved.
    fn park_again(&self, pieces: Vec<SavedPiece>) {
        let dropped = {
            let mut slots = self.slots();
            slots.end_phase(self.dedicated(), Phase::Parked);
            slots.retain_saved(pieces)
        };
        drop(dropped);
    }

    /// Allows uses again, after `begin_resume`, and adds to the report.
    fn finish_resume(&self, restored: &RestoredContents, report: &mut ResumeReport) {
        let dedicated = self.dedicated();
        let events = {
            let slots = &mut **self.slots();
            debug_assert_eq!(slots.phase, Phase::Resuming, "resumes what is not parked");
            let live = slots.live().0;
            debug_assert!(live <= restored.taken, "live blocks have no memory");
            for block in slots.blocks.values() {
                dedicated.slot_pool_resumed(block.bytes, block.requested, block.tag);
            }
            self.record_resumed(slots, restored.taken, live);
            report.blocks += slots.blocks.len() as u64;
            if restored.pieces.is_empty() {
                // Not before: no stream may use blocks whose resume is undone, and nothing would
                // order the next owners of their bytes behind it.
                slots.notify_resident(dedicated, None);
            }
            restored.add_to(report);
            let events = slots.events(dedicated, self.kind(), &[Action::Allocate]);
            slots.reopen(dedicated);
            events
        };
        dedicated.send(events);
    }
}

/// A park whose contents are saved, and whose memory is still there. From
/// [`DevicePool::begin_park`].
///
/// Dropping it allows uses again, as if nothing had happened.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, Park, PoolConfig, Request, Tag, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("two steps"));
/// let parkable = pool.parkable(tag)?;
/// let block = parkable.alloc(&stream, Request::bytes(4096))?;
/// # #[expect(unsafe_code, reason = "parks what nothing uses")]
/// // SAFETY: 1. and 2. nothing uses the block.
/// let pending = unsafe { pool.begin_park(tag, Park::discard()) }?;
/// assert!(parkable.is_parked());
/// drop(pending);
/// assert!(!parkable.is_parked());
/// # drop(block);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "dropping it makes everything resident again"]
pub struct PendingPark {
    pool: DevicePool,
    parts: Vec<(Arc<dyn TaggedMemory>, SavedContents)>,
    report: ParkReport,
    began: Instant,
}

impl PendingPark {
    pub(super) fn begin(
        pool: &DevicePool,
        memories: Vec<Arc<dyn TaggedMemory>>,
        tag: Tag,
        how: &Park,
        until: Option<Instant>,
    ) -> Result<Self> {
        let (pool, parts) = (pool.clone(), Vec::with_capacity(memories.len()));
        let mut pending = Self { pool, parts, report: ParkReport::of(tag), began: Instant::now() };
        for memory in memories {
            let saved = memory.begin_park(pending.pool.core(), how, until)?;
            pending.parts.push((memory, saved));
        }
        Ok(pending)
    }

    /// Returns the memory to the driver (`cuMemUnmap`, `cuMemRelease`). Never waits for work.
    pub fn commit(mut self) -> ParkReport {
        let mut report = self.report.clone();
        for (memory, saved) in mem::take(&mut self.parts) {
            memory.finish_park(saved, &mut report);
        }
        report.kept.shared = self.pool.core().held_by(report.tag);
        report.took = self.began.elapsed();
        report
    }
}

impl Drop for PendingPark {
    fn drop(&mut self) {
        self.parts.iter().for_each(|(memory, _)| memory.abort_park());
    }
}

impl fmt::Debug for PendingPark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingPark").field("tag", &self.report.tag).finish_non_exhaustive()
    }
}

/// A resume whose memory is mapped and has its contents. From [`DevicePool::begin_resume`].
///
/// Dropping it parks the memory again, with the contents that were saved. That makes driver calls,
/// but copies nothing and waits for no work.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, Park, PoolConfig, Request, Tag, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("two steps"));
/// let parkable = pool.parkable(tag)?;
/// let block = parkable.alloc(&stream, Request::bytes(4096))?;
/// # #[expect(unsafe_code, reason = "parks what nothing uses")]
/// // SAFETY: 1. and 2. nothing uses the block.
/// unsafe { pool.park(tag, Park::discard()) }?;
/// drop(pool.begin_resume(tag, None)?);
/// assert!(parkable.is_parked());
/// assert_eq!(pool.begin_resume(tag, None)?.commit().blocks, 1);
/// # drop(block);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "dropping it parks everything again"]
pub struct PendingResume {
    parts: Vec<(Arc<dyn TaggedMemory>, RestoredContents)>,
    report: ResumeReport,
    began: Instant,
}

impl PendingResume {
    pub(super) fn begin(
        pool: &PoolCore,
        memories: Vec<Arc<dyn TaggedMemory>>,
        tag: Tag,
        until: Option<Instant>,
    ) -> Result<Self> {
        let parts = Vec::with_capacity(memories.len());
        let mut pending = Self { parts, report: ResumeReport::of(tag), began: Instant::now() };
        for memory in memories {
            if let Some(restored) = memory.begin_resume(pool, until)? {
                pending.parts.push((memory, restored));
            }
        }
        Ok(pending)
    }

    /// Allows uses again, and frees the saved contents. Makes no driver call, apart from those of
    /// the host memory's allocator.
    pub fn commit(mut self) -> ResumeReport {
        let mut report = self.report.clone();
        for (memory, restored) in mem::take(&mut self.parts) {
            memory.finish_resume(&restored, &mut report);
        }
        report.took = self.began.elapsed();
        report
    }
}

impl Drop for PendingResume {
    fn drop(&mut self) {
        for (memory, restored) in mem::take(&mut self.parts) {
            memory.abort_resume(restored);
        }
    }
}

impl fmt::Debug for PendingResume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PendingResume").field("tag", &self.report.tag).finish_non_exhaustive()
    }
}

impl DedicatedPool {
    /// Releases the slots of a parked span, which are retiring. `held` bytes of it were charged.
    pub(crate) fn release_parked_span(&self, span: &Arc<Span>, held: u64, report: &mut ParkReport) {
        let before = self.held().stuck();
        let reaped = self.reap_span(span);
        // Another thread may have unmapped some of it concurrently. So the report counts what is
        // left, including what was unmapped but not released.
        let unreleased = self.held().stuck().saturating_sub(before);
        let stuck = span.retiring_bytes() + unreleased;
        report.released += held.saturating_sub(stuck);
        report.kept.refused += stuck;
        report.kept.refusal = report.kept.refusal.take().or(reaped.refused);
    }
}

impl PoolCore {
    /// Maps memory for all of `slots`, or for none. If there is a deadline and nothing else makes
    /// room, waits for the budget until then. Returns the bytes that are new.
    pub(crate) fn back_slots_until(
        &self,
        span: &Arc<Span>,
        stream: &Stream,
        tag: Tag,
        slots: &[u64],
        until: Option<Instant>,
    ) -> Result<u64> {
        let back = |reserved| self.back_slots(span, stream.timeline(), tag, slots, reserved);
        match back(None) {
            Err(MemoryError::OutOfMemory(refused))
                if until.is_some() && refused.refused.is_some() =>
            {
                let bytes = slots.len() as u64 * span.slot;
                match self.budget().reserve_by(bytes, until) {
                    Ok(reserved) => back(Some(&Mutex::new(reserved))),
                    Err(_) => Err(MemoryError::OutOfMemory(refused)),
                }
            }
            outcome => outcome,
        }
    }
}
