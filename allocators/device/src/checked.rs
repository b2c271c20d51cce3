//! Checked blocks: guards, poison and leak reports.
//!
//! With any of [`Debugging`]'s checks enabled, a pool's blocks are allocated here. This module
//! holds the block from the pool, with guards around it, and the user gets the middle of it. A
//! freed block returns here first, and to the pool after its guards have been read:
//!
//! ```text
//!   drop ──▶ waits on the device for other uses ──▶ POISON_FREED ──▶ guards read ──▶ pool
//! ```
//!
//! - **A drop never blocks**: it queues waits and a fill at most. Reading guards back blocks until
//!   the work queued on the block's stream is done. It happens at the next allocation, under memory
//!   pressure, at a trim, a check or the end of the pool.
//! - **Freed blocks are available**: they are released before the pool refuses, and when others
//!   reclaim from it. Wrappers' limits are not charged for them.
//! - **Guards cost memory**: [`GUARD_BYTES`] behind each block, and before it as many or the
//!   block's alignment. Statistics and a recorder see the blocks of the pool: with guards, and for
//!   peaks and a recorder freed when they return to the pool.
//!
//! # Limits
//! These are not detected: a write of the byte value that is already there, a write into another
//! block, a write after the free, and reads, except by the poison that they return. A block of a
//! stream whose handle may become invalid at any time returns without a check, and so does a block
//! that outlives its pool, or that has an open use when it is freed.

mod guards;

pub use guards::{CANARY, GUARD_BYTES, POISON_ALLOCATED, POISON_FREED};

use crate::{
    Block, DeviceBuffer, Request,
    base::{
        addresses::FreedAddresses,
        driver::{is_shortage, notify_observer},
        extent::{PackedRequest, UntilFree},
        pending::{DeferredFree, PendingUses, PendingWork},
        record::{BlockRecord, LiveBlockList},
        released::reclaim_cost,
        waits::has_passed,
    },
    block::{DriverBlock, ReleaseBlock},
    debugging::{Debugging, Fault, Finding, LeakReport},
    pool_core::PoolCore,
};
use aquifer_core::{
    Action, DeviceId, MemoryError, PoolStats, Reservation, Result,
    budget::{HookRegistration, Offer, Reclaim},
    event::MemoryLocation,
};
use aquifer_driver::{DeviceRange, KeepAlive, Ownership, RawStream, site};
use aquifer_stream::{Stream, StreamPool, Timeline, Uses};
use guards::{GuardLayout, GuardedBlock};
use std::{
    collections::BTreeMap,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Number of findings kept for [`DevicePool::findings`](crate::DevicePool::findings). The first are
/// the most informative.
const MAX_FINDINGS: usize = 1024;

/// Pause between two checks whether another thread is done.
const INSPECTION_POLL: Duration = Duration::from_micros(50);

/// The allocation path of a pool whose blocks are checked.
pub(crate) struct CheckedPool {
    core: Arc<PoolCore>,
    settings: Debugging,
    listing: Arc<LiveBlockList>,
    /// The stream that blocks are read back on, while the pool is open.
    reader: Mutex<Option<Reader>>,
    findings: Mutex<Vec<Finding>>,
    state: Mutex<CheckedState>,
    registration: OnceLock<HookRegistration>,
}

/// A stream of its own, which takes none of the pool's.
#[derive(Clone)]
struct Reader {
    stream: Stream,
    /// The stream's timeline in the pool's stream pool, which orders blocks with it.
    _known: Arc<Timeline>,
}

struct CheckedState {
    /// Live blocks by their user address.
    live: BTreeMap<u64, CheckedBlock>,
    /// Freed blocks that have not returned to the pool, oldest first.
    freed: Vec<FreedBlock>,
    /// Number of threads that have removed freed blocks from the list to read them.
    inspecting: u32,
    /// Number of blocks returned to the pool so far.
    returned: u64,
    /// Addresses of freed blocks that no later block has had.
    freed_addresses: FreedAddresses,
    closed: bool,
}

/// A live block.
struct CheckedBlock {
    record: BlockRecord,
    capacity: u64,
    /// `None` while a thread reads its guards.
    held: Option<GuardedBlock>,
    /// Set if it was freed during that time.
    freed: Option<DeferredFree>,
}

/// A block that its user has freed.
struct FreedBlock {
    record: BlockRecord,
    capacity: u64,
    held: GuardedBlock,
    uses: Uses,
    until_free: UntilFree,
    generation: u64,
}

impl CheckedPool {
    /// Creates the checks, with a stream to read blocks back on if they need one.
    ///
    /// # Errors
    /// The driver's, for that stream.
    pub(crate) fn new(core: &Arc<PoolCore>, settings: Debugging) -> Result<Arc<Self>> {
        let streams = core.streams();
        let listing = Arc::new(LiveBlockList::new(settings.backtraces));
        let reader = if settings.canaries {
            let stream = StreamPool::new(core.driver.clone(), streams.device(), 1).lease()?;
            let alive: KeepAlive = Arc::new(stream.clone());
            let known = streams.timeline(stream.raw(), Some(alive))?;
            Some(Reader { stream, _known: known })
        } else {
            None
        };
        Ok(Arc::new(Self {
            core: core.clone(),
            settings,
            listing,
            reader: Mutex::new(reader),
            findings: Mutex::default(),
            state: Mutex::new(CheckedState {
                live: BTreeMap::new(),
                freed: Vec::new(),
                inspecting: 0,
                returned: 0,
                freed_addresses: FreedAddresses::default(),
                closed: false,
            }),
            registration: OnceLock::new(),
        }))
    }

    /// Registers the freed blocks as a reclaimer of the pool's budget.
    pub(crate) fn register(self: &Arc<Self>) {
        if self.settings.canaries {
            let _only_once = self.registration.set(self.core.budget.on_need(self));
        }
    }

    /// Counts freed blocks that have not returned to the pool as such in its statistics.
    pub(crate) fn count_freed(&self, stats: &mut PoolStats) {
        for freed in &self.state().freed {
            stats.live = stats.live.saturating_sub(freed.capacity);
            stats.pending += freed.capacity;
            stats.requested = stats.requested.saturating_sub(freed.held.requested());
            stats.blocks = stats.blocks.saturating_sub(1);
            stats.frees += 1;
        }
    }

    fn device(&self) -> DeviceId {
        self.core.info.device
    }

    fn state(&self) -> MutexGuard<'_, CheckedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates a block with its guards. The request has been checked.
    #[track_caller]
    pub(crate) fn allocate(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        let allocated_at = site::current();
        let layout = GuardLayout::new(&request, self.settings.canaries);
        let around = layout.around(&request);
        self.release_freed();
        let held = loop {
            match self.core.allocate_unchecked(stream, around, drawn, request.size()) {
                Ok(held) => break held,
                Err(error) if is_shortage(&error) && self.reclaim_freed() => {}
                // Reports the user's size, not that with guards.
                Err(MemoryError::OutOfMemory(mut error)) => {
                    error.requested = request.size();
                    return Err(MemoryError::OutOfMemory(error));
                }
                Err(error) => return Err(error),
            }
        };
        let (capacity, generation, owner_stream) =
            (held.capacity(), held.generation(), held.home());
        let address = held.address() + layout.front;
        let range = (address, request.size());
        let record = self.listing.record(range, request.owner(), &owner_stream, allocated_at);
        debug_assert!(layout.front + request.size() <= capacity, "a block has no room for guards");
        debug_assert!(address.is_multiple_of(request.alignment()), "a block is not aligned");
        self.fill_new(&held, &owner_stream, &layout, generation)?;
        let memory = DeviceBuffer::from_alloc(around.size() as usize, |_| Ok(held))?;
        let bytes = if self.settings.canaries { request.size() } else { capacity };
        let held = Some(GuardedBlock::new(memory, layout, owner_stream.clone()));
        {
            let mut state = self.state();
            state.freed_addresses.remove(address);
            let block = CheckedBlock { record, capacity, held, freed: None };
            let before = state.live.insert(address, block);
            debug_assert!(before.is_none(), "two live blocks at one address");
        }
        let driver_block = DriverBlock {
            releaser: self.clone(),
            timeline: owner_stream,
            streams: self.core.streams().clone(),
            bytes,
            key: 0,
        };
        Ok(Block::from_driver_block(
            address,
            PackedRequest::new(request.size(), request.owner()),
            driver_block,
            generation,
        ))
    }

    fn fill_new(
        &self,
        held: &Block,
        owner_stream: &Timeline,
        layout: &GuardLayout,
        generation: u64,
    ) -> Result<()> {
        for guard in [layout.before(), layout.behind()].into_iter().flatten() {
            guards::fill(held, owner_stream, guard.clone(), CANARY)?;
            let address = held.address() + guard.start;
            let range =
                DeviceRange { device: self.device(), address, bytes: guard.end - guard.start };
            let readers = self.reader().map(|reader| reader.stream.raw());
            notify_observer(
                &self.core.driver,
                generation,
                range,
                Ownership::Guard { users: readers.as_slice() },
            );
        }
        if self.settings.poison {
            guards::fill(held, owner_stream, layout.body(), POISON_ALLOCATED)?;
        }
        Ok(())
    }

    /// Processes a block that its user has freed. Never blocks.
    fn process_freed(&self, live: CheckedBlock, deferred: DeferredFree) {
        let CheckedBlock { record, capacity, held: Some(held), .. } = live else { return };
        let DeferredFree { work: PendingWork { uses, .. }, until_free, generation, .. } = deferred;
        let mut freed = FreedBlock { record, capacity, held, uses, until_free, generation };
        let stream = &freed.held.owner_stream;
        let is_checked = self.settings.canaries || self.settings.poison;
        // Filled and read behind all uses, which the stream waits for on the device. The observer
        // learns of the free afterwards: from then on the stream may not use the block.
        let is_ordered = is_checked
            && is_usable(stream)
            && freed.uses.order_before(stream, freed.record.address).is_ok();
        if is_ordered && self.settings.poison {
            let _named = freed.name_site();
            // If the driver refuses, reads of it return no poison.
            let _ = freed.held.fill_body(POISON_FREED);
        }
        let is_retained = is_ordered && self.settings.canaries;
        if is_retained && !self.state().closed {
            self.notify_retained(&freed);
        }
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        let over =
            if is_retained && freed.uses.is_empty() { freed.until_free.take() } else { None };
        drop(over);
        let leaves = {
            let mut state = self.state();
            if is_retained && !state.closed {
                state.freed.push(freed);
                None
            } else {
                Some(freed)
            }
        };
        if let Some(freed) = leaves {
            self.return_block(freed);
        }
    }

    /// Reports to the driver's observer which streams may still use a freed block: other streams
    /// with uses, and the reader. The owner stream may not.
    fn notify_retained(&self, freed: &FreedBlock) {
        let mut users: Vec<RawStream> = freed.uses.iter().map(|u| u.on().noted()).collect();
        users.extend(self.reader().map(|reader| reader.stream.raw()));
        let range = DeviceRange {
            device: self.device(),
            address: freed.held.address(),
            bytes: freed.capacity,
        };
        // Calls are attributed to the line of the free. A plain drop has no line, so the line of
        // the allocation is used.
        let _named = site::enter_as(freed.record.freed_at);
        notify_observer(
            &self.core.driver,
            freed.generation,
            range,
            Ownership::Pending { users: &users },
        );
    }

    /// Returns the memory to the pool, with the uses that are not over and the values to be dropped
    /// when they are.
    fn return_block(&self, freed: FreedBlock) {
        let FreedBlock { record, held, uses, until_free, .. } = freed;
        let _named = site::enter_as(record.freed_at);
        let mut block = held.into_block(uses);
        if let Some(mut things) = until_free {
            block.meta_mut().until_free.get_or_insert_default().append(&mut things);
        }
        drop(block);
        self.state().returned += 1;
    }

    /// Reads freed blocks and returns them to the pool. Returns their faults. Blocks until the work
    /// before the frees is done.
    fn release_freed(&self) -> Vec<Finding> {
        let freed = {
            let mut state = self.state();
            if state.freed.is_empty() {
                return Vec::new();
            }
            state.inspecting += 1;
            mem::take(&mut state.freed)
        };
        let mut found = Vec::new();
        for mut freed in freed {
            let (mut faults, read) = self.inspect(&mut freed.held);
            match read {
                // A lost device cannot be read.
                Ok(()) | Err(MemoryError::DeviceLost { .. }) => {}
                Err(error) => faults.push(Fault::Unchecked { error }),
            }
            found.extend(faults.into_iter().map(|fault| self.report(fault, freed.record.clone())));
            self.return_block(freed);
        }
        self.state().inspecting -= 1;
        found
    }

    /// Reads the guards of a block while the pool is open. Returns the faults. Blocks.
    fn inspect(&self, held: &mut GuardedBlock) -> (Vec<Fault>, Result<()>) {
        let mut faults = Vec::new();
        let read = match self.reader() {
            Some(reader) => held.inspect(&reader.stream, &mut faults),
            None => Ok(()),
        };
        (faults, read)
    }

    /// Releases freed blocks, and waits until another thread has returned those that it reads.
    /// Returns whether there were any. Blocks.
    fn reclaim_freed(&self) -> bool {
        let before = self.state().returned;
        self.release_freed();
        let is_waiting = || {
            let state = self.state();
            state.returned == before && state.inspecting > 0
        };
        while is_waiting() {
            thread::sleep(INSPECTION_POLL);
        }
        self.state().returned > before
    }

    /// Checks the guards of live blocks and of freed ones that have not returned to the pool.
    /// Returns the faults that were not reported before. Blocks until the work queued on the
    /// blocks' own streams is done.
    pub(crate) fn check(&self) -> Result<Vec<Finding>> {
        let mut found = self.release_freed();
        let numbers: Vec<(u64, u64)> = {
            let state = self.state();
            let live = |(&address, live): (&u64, &CheckedBlock)| (address, live.record.number);
            if self.settings.canaries { state.live.iter().map(live).collect() } else { Vec::new() }
        };
        for (address, number) in numbers {
            found.append(&mut self.inspect_live(address, number)?);
        }
        Ok(found)
    }

    /// Reports the faults of a live block's guards. Its user may free it during the check: the free
    /// is then processed afterwards.
    fn inspect_live(&self, address: u64, number: u64) -> Result<Vec<Finding>> {
        let taken = {
            let mut state = self.state();
            let live = state.live.get_mut(&address).filter(|live| live.record.number == number);
            let live =
                live.filter(|l| l.held.as_ref().is_some_and(|held| is_usable(&held.owner_stream)));
            live.and_then(|live| Some((live.held.take()?, live.record.clone())))
        };
        // The block is gone, or another thread reads it.
        let Some((mut held, record)) = taken else { return Ok(Vec::new()) };
        let (faults, read) = self.inspect(&mut held);
        let freed = {
            let mut state = self.state();
            if let Some(live) = state.live.get_mut(&address) {
                live.held = Some(held);
                live.freed
                    .take()
                    .and_then(|deferred| Some((state.live.remove(&address)?, deferred)))
            } else {
                None
            }
        };
        if let Some((live, deferred)) = freed {
            self.process_freed(live, deferred);
        }
        let found = faults.into_iter().map(|fault| self.report(fault, record.clone())).collect();
        read.map(|()| found)
    }

    /// Gives free memory back to the driver, also that of freed blocks, until the pool holds at
    /// most `keep` bytes.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        self.release_freed();
        self.core.trim(keep)
    }

    /// Checks and releases all freed blocks, and reports live ones. Blocks.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.release_freed();
        for group in self.leaks().unwrap_or_default().groups() {
            for block in &group.blocks {
                self.report(Fault::Leak, block.clone());
            }
        }
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reader);
    }

    /// Returns whether a block at this address has been freed, and no block has been there since.
    pub(crate) fn was_freed(&self, address: u64) -> bool {
        self.state().freed_addresses.contains(address)
    }

    /// Returns the listing of blocks that bypass the checks, if leaks are reported.
    pub(crate) fn listing(&self) -> Option<&Arc<LiveBlockList>> {
        self.settings.leaks.then_some(&self.listing)
    }

    /// Returns the findings kept so far.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the live blocks, if leaks are reported.
    pub(crate) fn leaks(&self) -> Option<LeakReport> {
        let live = |live: &CheckedBlock| live.freed.is_none().then(|| live.record.clone());
        self.settings.leaks.then(|| {
            let mut records: Vec<_> = self.state().live.values().filter_map(live).collect();
            records.append(&mut self.listing.records());
            LeakReport::of(records.into_iter())
        })
    }

    fn report(&self, fault: Fault, block: BlockRecord) -> Finding {
        let finding = Finding { fault, block };
        {
            let mut findings = self.findings.lock().unwrap_or_else(PoisonError::into_inner);
            if findings.len() < MAX_FINDINGS {
                findings.push(finding.clone());
            }
        }
        if let Some(recorder) = &self.core.config.recorder {
            let BlockRecord { address, bytes, tag, of_pool: stream, .. } = finding.block;
            let place = MemoryLocation::Device(self.device());
            let event = recorder.event(Action::Finding, place, stream, address, bytes, tag);
            recorder.record(recorder.ticket(), event);
        }
        if let Some(hook) = &self.settings.hook {
            // The hook may be called from a drop, which must not unwind. The panic's own message
            // has been printed.
            let _panicked = catch_unwind(AssertUnwindSafe(|| hook(&finding)));
        }
        finding
    }

    fn reader(&self) -> Option<Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Returns whether work may be queued on the stream outside of its owner's calls. A retired stream
/// refuses work by itself.
fn is_usable(owner_stream: &Timeline) -> bool {
    !owner_stream.fences_at_once()
}

impl FreedBlock {
    /// Attributes calls for this block to the line that freed it, or else to the line that
    /// allocated it.
    fn name_site(&self) -> site::Entered {
        site::enter_as(self.record.freed_at.or(Some(self.record.allocated_at)))
    }
}

impl Reclaim for CheckedPool {
    fn name(&self) -> &'static str {
        "freed blocks of a checked pool"
    }

    fn offer(&self) -> Offer {
        let bytes = self.state().freed.iter().map(|freed| freed.capacity).sum();
        Offer { bytes, cost: reclaim_cost(0, Duration::ZERO, bytes, Duration::from_nanos(1300)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if has_passed(deadline) {
            return;
        }
        // Reading the guards waits for as much, and without a limit.
        let owners: Vec<_> =
            self.state().freed.iter().map(|freed| freed.held.owner_stream.clone()).collect();
        let is_done = |on: &Arc<Timeline>| on.wait(on.open(), deadline) == Ok(true);
        if owners.iter().all(is_done) && self.reclaim_freed() {
            Reclaim::reclaim(&*self.core, bytes, deadline);
        }
    }

    fn waits(&self) -> bool {
        true
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.device()))
    }
}

impl ReleaseBlock for CheckedPool {
    fn release(&self, deferred: DeferredFree) {
        let (freed_at, freed_by) = (site::entered(), self.listing.backtrace());
        let leaves = {
            let mut state = self.state();
            let address = deferred.address;
            let Some(live) = state.live.get_mut(&address) else { return };
            live.record.freed_at = freed_at;
            live.record.freed_by = freed_by;
            if live.held.is_none() {
                // The thread that reads the guards continues with the free.
                live.freed = Some(deferred);
                state.freed_addresses.insert(address);
                None
            } else {
                state.freed_addresses.insert(address);
                state.live.remove(&address).map(|live| (live, deferred))
            }
        };
        if let Some((live, deferred)) = leaves {
            self.process_freed(live, deferred);
        }
    }
}
