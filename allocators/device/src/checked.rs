//! Checked blocks: guards, poison and leak reports.
//!
//! With any of [`Debugging`]'s checks enabled, a pool's blocks are allocated here. This module
//! holds the block from the pool, with guards around it, and the user gets the middle of it. A
//! freed block returns here first, and to the pool after its guards have been read:
//!
//! ```text
//!   drop ──▶ other uses done? ──yes──▶ filled with POISON_FREED ──▶ guards read ──▶ pool
//!                  │ no                  ▲
//!                  ▼                     │
//!               waiting ── at the next release, if they are
//! ```
//!
//! - **A drop never blocks**: it queues a fill at most. Reading guards back blocks until the work
//!   queued on the block's stream is done. It happens at the next allocation, under memory
//!   pressure, at a trim, a check or the end of the pool.
//! - **Freed blocks are available**: they are released before the pool refuses, and when others
//!   reclaim from it. Wrappers' limits are not charged for them.
//! - **Guards cost memory**: [`GUARD_BYTES`] behind each block, and before it as many or the
//!   block's alignment. A recorder sees the blocks of the pool: with guards, and freed when they
//!   return to the pool.
//!
//! # Limits
//! These are not detected: a write of the byte value that is already there, a write into another
//! block, a write after the free, and reads, except by the poison that they return. A block of a
//! stream whose handle may become invalid at any time returns without a check, and so does a block
//! that outlives its pool.

mod guards;
mod reports;
mod settings;

pub use guards::{CANARY, GUARD_BYTES, POISON_ALLOCATED, POISON_FREED};
pub use reports::{Fault, Finding, LeakGroup, LeakReport};
pub use settings::{Debugging, FindingHook};

use crate::{
    Adoption, Block, DeviceBuffer, Request,
    base::{
        addresses::FreedAddresses,
        driver::{is_shortage, notify_observer},
        extent::{PackedRequest, UntilFree},
        pending::{DeferredFree, PendingUses, PendingWork},
        record::{BlockRecord, LiveBlockList},
        released::reclaim_cost,
        usage::LiveUsage,
        waits::{deadline, has_passed},
    },
    block::{DriverBlock, ReleaseBlock},
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
    collections::{BTreeMap, VecDeque},
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

/// What to do with a freed block that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum OnUnread {
    /// It stays for one more attempt, and is released after that.
    Keep,
    /// It is released, and that is reported.
    Release,
}

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
    freed: VecDeque<FreedBlock>,
    /// Number of threads that have removed freed blocks from the list to read them.
    inspecting: u32,
    /// Bytes returned to the pool so far.
    returned: u64,
    /// Addresses of freed blocks that no later block has had.
    freed_addresses: FreedAddresses,
    closed: bool,
    /// Statistics of the users' blocks.
    own: LiveUsage,
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
    /// Whether its uses are over and it has been filled.
    settled: bool,
    /// Whether one attempt to read it back has failed.
    refused: bool,
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
                freed: VecDeque::new(),
                inspecting: 0,
                returned: 0,
                freed_addresses: FreedAddresses::default(),
                closed: false,
                own: core.live_usage(0),
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

    /// Returns the bytes that have been freed and not been returned to the pool.
    fn held_back(&self) -> u64 {
        self.state().freed.iter().map(|freed| freed.capacity).sum()
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
        self.release_freed(false, OnUnread::Keep);
        let held = loop {
            match self.core.allocate_unchecked(stream, around, drawn, request.size()) {
                Ok(held) => break held,
                Err(error)
                    if is_shortage(&error)
                        && self.reclaim_freed(deadline(self.core.config.wait)) > 0 => {}
                // Reports the user's sizes, not those with guards.
                Err(MemoryError::OutOfMemory(mut error)) => {
                    error.requested = request.size();
                    let held_back = error.live.saturating_sub(self.users().live);
                    error.live -= held_back;
                    error.pending += held_back;
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
            state.own.record_alloc(capacity, request.size());
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
        let settled = uses.is_empty();
        let mut freed = FreedBlock {
            record,
            capacity,
            held,
            uses,
            until_free,
            generation,
            settled,
            refused: false,
        };
        let needed = self.settings.canaries || !settled && self.settings.poison;
        let retained = needed && is_usable(&freed.held.owner_stream);
        // Filled before the observer learns of the free: afterwards the owner stream may not use
        // the block.
        if settled {
            self.fill_freed(&freed);
        }
        if retained && !self.state().closed {
            self.notify_retained(&freed, None);
        }
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        let over = if retained && settled { freed.until_free.take() } else { None };
        drop(over);
        let leaves = {
            let mut state = self.state();
            if retained && !state.closed {
                state.freed.push_back(freed);
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
    /// with open uses, the reader, and `filler`. The owner stream may not.
    fn notify_retained(&self, freed: &FreedBlock, filler: Option<&Timeline>) {
        let mut users: Vec<RawStream> = freed.uses.iter().map(|u| u.on().noted()).collect();
        users.extend(filler.map(Timeline::noted));
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

    /// Fills a freed block whose uses are over. If the driver refuses, reads of it return no
    /// poison.
    fn fill_freed(&self, freed: &FreedBlock) {
        if self.settings.poison && is_usable(&freed.held.owner_stream) {
            let _named = freed.name_site();
            let _ = freed.held.fill_body(POISON_FREED);
        }
    }

    /// Completes the free of a block that was kept until its last use was over.
    fn settle(&self, freed: &mut FreedBlock) {
        debug_assert!(
            !freed.settled && freed.uses.is_empty(),
            "a free is completed twice or early"
        );
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        drop(freed.until_free.take());
        if self.settings.poison && is_usable(&freed.held.owner_stream) {
            self.notify_retained(freed, Some(&freed.held.owner_stream));
            self.fill_freed(freed);
            self.notify_retained(freed, None);
        }
        freed.settled = true;
    }

    /// Returns the memory to the pool, with the uses that are not over and the values to be dropped
    /// when they are.
    fn return_block(&self, freed: FreedBlock) {
        let FreedBlock { record, held, uses, until_free, capacity, .. } = freed;
        let _named = site::enter_as(record.freed_at);
        let mut block = held.into_block(uses);
        if let Some(mut things) = until_free {
            block.meta_mut().until_free.get_or_insert_default().append(&mut things);
        }
        drop(block);
        self.state().returned += capacity;
    }

    /// Reads freed blocks whose uses are over and returns them to the pool. Polls the uses of the
    /// others. With `order`, the owner stream waits for stamped uses on the device, which ends
    /// them. Returns the faults. Blocks until the work before the frees is done.
    fn release_freed(&self, order: bool, on_unread: OnUnread) -> Vec<Finding> {
        let freed = {
            let mut state = self.state();
            if state.freed.is_empty() {
                return Vec::new();
            }
            state.inspecting += 1;
            mem::take(&mut state.freed)
        };
        let (mut still, mut found) = (VecDeque::new(), Vec::new());
        for mut freed in freed {
            if !freed.settled {
                // After a refusal the block stays on the list, and the next call tries again.
                let _ = freed.uses.poll();
                let (owner_stream, address) = (&freed.held.owner_stream, freed.record.address);
                if !freed.uses.are_over()
                    && order
                    && freed.uses.order_before(owner_stream, address).is_ok()
                {
                    freed.uses.clear();
                }
                if freed.uses.is_empty() {
                    self.settle(&mut freed);
                }
            }
            if freed.settled && self.is_read(&mut freed, on_unread, &mut found) {
                self.return_block(freed);
            } else {
                still.push_back(freed);
            }
        }
        let mut state = self.state();
        still.append(&mut state.freed);
        state.freed = still;
        state.inspecting -= 1;
        found
    }

    /// Reads the guards of a freed block, and adds its faults. Returns whether it can be released.
    fn is_read(
        &self,
        freed: &mut FreedBlock,
        on_unread: OnUnread,
        found: &mut Vec<Finding>,
    ) -> bool {
        let (faults, read) = self.inspect(&mut freed.held);
        found.extend(faults.into_iter().map(|fault| self.report(fault, freed.record.clone())));
        let keeps = on_unread == OnUnread::Keep;
        let leaves = match read {
            Ok(()) => true,
            // A lost device cannot be read.
            Err(MemoryError::DeviceLost { .. }) => !keeps,
            Err(_) if keeps && !freed.refused => false,
            Err(error) => {
                found.push(self.report(Fault::Unchecked { error }, freed.record.clone()));
                true
            }
        };
        freed.refused |= !leaves;
        leaves
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

    /// Releases freed blocks. Returns their bytes. Blocks. If no block's uses are over, other
    /// streams' uses are waited for on the device, or by the host until `deadline` if streams may
    /// not wait for each other.
    fn reclaim_freed(&self, deadline: Option<Instant>) -> u64 {
        let waits = self.core.config.adoption == Adoption::Wait;
        let before = self.state().returned;
        let returned = || self.state().returned - before;
        self.release_freed(false, OnUnread::Release);
        if returned() == 0 {
            if !waits {
                self.wait_for_uses(deadline);
            }
            self.release_freed(waits, OnUnread::Release);
        }
        // Blocks that other threads are reading are returned as well.
        while returned() == 0 && self.state().inspecting > 0 {
            thread::sleep(INSPECTION_POLL);
        }
        returned()
    }

    /// Waits for stamped uses of freed blocks.
    fn wait_for_uses(&self, deadline: Option<Instant>) {
        let uses: Vec<_> =
            self.state().freed.iter().flat_map(|freed| freed.uses.stamped()).collect();
        for (on, epoch) in uses {
            // After a refusal the block stays on the list.
            let _ = on.wait(epoch, deadline);
        }
    }

    /// Checks the guards of live blocks and of freed ones that have not returned to the pool.
    /// Returns the faults that were not reported before. Blocks until the work queued on the
    /// blocks' own streams is done.
    pub(crate) fn check(&self) -> Result<Vec<Finding>> {
        let mut found = self.release_freed(false, OnUnread::Keep);
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
        self.release_freed(false, OnUnread::Keep);
        self.core.trim(keep)
    }

    /// Checks and releases all freed blocks, and reports live ones. Blocks.
    pub(crate) fn close(&self) {
        self.state().closed = true;
        self.wait_for_uses(None);
        self.release_freed(false, OnUnread::Release);
        // Blocks with open uses return to the pool with them, where they stay pending.
        let waiting = mem::take(&mut self.state().freed);
        waiting.into_iter().for_each(|freed| self.return_block(freed));
        for group in self.leaks().unwrap_or_default().groups() {
            for block in &group.blocks {
                self.report(Fault::Leak, block.clone());
            }
        }
        let reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(reader);
    }

    /// Returns what users have. Dedicated memory is counted beside the checks, and all other blocks
    /// with the counters here.
    fn users(&self) -> PoolStats {
        let mut users = PoolStats::default();
        self.core.dedicated.add_live_to(&mut users);
        let state = self.state();
        state.own.add_to(&mut users);
        state.own.peak().set_in(&mut users);
        users
    }

    /// Returns the users' statistics.
    pub(crate) fn stats(&self) -> PoolStats {
        let users = self.users();
        let mut stats = self.core.stats();
        // Memory that is held through the checks and has no user is pending.
        let live = users.live.min(stats.live);
        stats.pending += stats.live - live;
        (stats.live, stats.requested) = (live, users.requested);
        (stats.peak_live, stats.peak_requested) = (users.peak_live, users.peak_requested);
        (stats.blocks, stats.allocations) = (users.blocks, users.allocations);
        stats.frees = users.frees;
        stats
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
        let bytes = self.held_back();
        Offer { bytes, cost: reclaim_cost(0, Duration::ZERO, bytes, Duration::from_nanos(1300)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if has_passed(deadline) {
            return;
        }
        let mut given = 0;
        while given < bytes {
            match self.reclaim_freed(deadline) {
                0 => break,
                more => given += more,
            }
        }
        Reclaim::reclaim(&*self.core, bytes, deadline);
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
            let (capacity, bytes, inspected) =
                (live.capacity, live.record.bytes, live.held.is_none());
            state.own.record_free(capacity, bytes);
            state.freed_addresses.insert(address);
            if inspected {
                // The thread that reads the guards continues with the free.
                if let Some(live) = state.live.get_mut(&address) {
                    live.freed = Some(deferred);
                }
                None
            } else {
                state.live.remove(&address).map(|live| (live, deferred))
            }
        };
        if let Some((live, deferred)) = leaves {
            self.process_freed(live, deferred);
        }
    }
}
