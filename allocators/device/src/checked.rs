//! Checked blocks: guards, poison, a quarantine, overlap checks and leak reports.
//!
//! With any of [`Debugging`]'s checks enabled, a pool's blocks are allocated here. This module
//! holds the block from the pool, with guards around it, and the user gets the middle of it. A
//! freed block returns here first, and to the pool after it has been read:
//!
//! ```text
//!   drop ──▶ other uses done? ──yes──▶ filled with POISON_FREED ──▶ quarantine ──▶ inspected ──▶ pool
//!                  │ no                                              ▲ (oldest out first)
//!                  ▼                                                 │
//!               waiting ─ at the next collection, if they are ───────┘
//! ```
//!
//! - **A drop never blocks**: it queues a fill at most. Reading bytes back blocks until the work
//!   queued on the block's stream is done. It happens inside an allocation that finds the
//!   quarantine over its bound, under memory pressure, at a trim, a check or the end of the pool.
//! - **The quarantine is released first**: its blocks are released, oldest first, before the pool
//!   reclaims from others or refuses. Wrappers' limits are not charged for them.
//! - **Guards cost memory**: [`GUARD_BYTES`] behind each block, and before it as many or the
//!   block's alignment. A recorder sees the blocks of the pool: with guards, and freed when they
//!   return to the pool.
//!
//! # Limits
//! These are not detected: a write of the byte value that is already there, a write into another
//! live block, and reads, except by the poison that they return. A block of a retired stream is not
//! filled at the free, so late writes to it are not detected. A block of a stream whose handle may
//! become invalid at any time returns without a check, and so does a block that outlives its pool.

mod age_queue;
mod allocate;
mod finding;
mod guards;
mod leaks;
#[cfg(test)]
mod overlap_tests;
mod quarantine;
mod range_set;
mod reclaim;
mod settings;

pub use finding::{Fault, Finding};
pub use guards::{CANARY, GUARD_BYTES, POISON_ALLOCATED, POISON_FREED};
pub use leaks::{LeakGroup, LeakReport};
pub use settings::{Debugging, FindingHook};

use crate::{
    Block, DeviceBuffer, Request,
    base::{
        driver::notify_observer,
        extent::UntilFree,
        freed_addresses::FreedAddresses,
        live_blocks::LiveBlockList,
        pending::{DeferredFree, PendingWork},
        record::BlockRecord,
        usage::LiveUsage,
    },
    block::ReleaseBlock,
};
use age_queue::AgeQueue;
use aquifer_core::{
    Action, Budget, DeviceId, PoolStats, Recorder, Reservation, Result, budget::HookRegistration,
    event::MemoryLocation,
};
use aquifer_driver::{DeviceRange, Driver, KeepAlive, Ownership, RawStream, site};
use aquifer_stream::{Stream, StreamPool, Timeline, Uses};
use guards::GuardLayout;
use range_set::RangeSet;
use std::{
    backtrace::Backtrace,
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// Number of findings kept for [`DevicePool::findings`](crate::DevicePool::findings). The first are
/// the most informative.
const MAX_FINDINGS: usize = 1024;

/// A source of blocks that can be checked.
pub(crate) trait BlockSource: fmt::Debug + Send + Sync {
    /// Allocates a block for the request, which contains the `bytes` of a user. Draws new memory
    /// from `drawn` first, which goes down by `bytes` or more.
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block>;

    /// Returns the statistics of the pool.
    fn stats(&self) -> PoolStats;

    /// Returns the part of the statistics that concerns memory beside the checks.
    fn unchecked_stats(&self) -> PoolStats;

    /// Returns the bytes held from the driver besides those of the pool itself.
    fn physical(&self) -> u64 {
        0
    }

    /// Returns the unchecked live bytes that the error of a refused request counts.
    fn unchecked_live(&self) -> u64 {
        0
    }

    /// Gives free memory back until at most `keep` bytes are held. Returns the bytes.
    fn trim(&self, keep: u64) -> Result<u64>;

    /// Gives memory back for others, as [`Reclaim::reclaim`](aquifer_core::budget::Reclaim).
    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {}
}

/// The allocation path of a pool whose blocks are checked.
pub(crate) struct CheckedPool {
    source: Arc<dyn BlockSource>,
    settings: Debugging,
    driver: Arc<dyn Driver>,
    device: DeviceId,
    streams: StreamPool,
    recorder: Option<Arc<Recorder>>,
    /// Whether a stream may be made to wait for another on the device when memory is short.
    waits: bool,
    /// How long the host waits for other streams' uses if not.
    pub(crate) wait: Duration,
    listing: Arc<LiveBlockList>,
    /// The stream that blocks are read back on, while the pool is open.
    reader: Mutex<Option<Reader>>,
    findings: Mutex<Vec<Finding>>,
    state: Mutex<State>,
    registration: OnceLock<HookRegistration>,
}

/// A stream of its own, which takes none of the pool's.
#[derive(Clone)]
struct Reader {
    stream: Stream,
    /// The stream's timeline in the pool's stream pool, which orders blocks with it.
    _known: Arc<Timeline>,
}

struct State {
    /// Live blocks by their user address.
    live: BTreeMap<u64, CheckedBlock>,
    /// All held ranges, with [`Debugging::overlap`].
    ranges: RangeSet<BlockRecord>,
    /// Freed blocks with uses that are not known to be done.
    waiting: Vec<QuarantinedBlock>,
    /// Freed blocks by age.
    quarantine: AgeQueue<QuarantinedBlock>,
    /// Bytes in the quarantine, with guards.
    quarantined: u64,
    /// Number of threads that have removed freed blocks from the lists to read them.
    inspecting: u32,
    /// Bytes returned to the pool so far.
    returned: u64,
    /// Addresses of freed blocks that no later block has had.
    freed: FreedAddresses,
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

/// The memory of a block with its guards.
struct GuardedBlock {
    memory: DeviceBuffer<u8>,
    layout: GuardLayout,
    owner_stream: Arc<Timeline>,
    reported: ReportedFaults,
}

/// Faults of a block that have been reported, and are not reported again.
#[derive(Clone, Copy, Default)]
struct ReportedFaults {
    before: bool,
    body: bool,
    behind: bool,
}

/// A block that its user has freed.
struct QuarantinedBlock {
    record: BlockRecord,
    capacity: u64,
    held: GuardedBlock,
    uses: Uses,
    until_free: UntilFree,
    generation: u64,
    /// Whether it has been filled with [`POISON_FREED`].
    filled: bool,
    /// Whether one attempt to read it back has failed.
    refused: bool,
}

impl CheckedPool {
    /// Creates the checks, with a stream to read blocks back on if they need one. What users have
    /// is counted in `own`.
    ///
    /// # Errors
    /// The driver's, for that stream.
    pub(crate) fn new(
        source: Arc<dyn BlockSource>,
        settings: Debugging,
        driver: Arc<dyn Driver>,
        streams: StreamPool,
        recorder: Option<Arc<Recorder>>,
        own: LiveUsage,
        (waits, wait): (bool, Duration),
    ) -> Result<Arc<Self>> {
        let device = streams.device();
        let listing = Arc::new(LiveBlockList::new(settings.backtraces));
        let reader = if settings.inspects_freed() {
            let stream = StreamPool::new(driver.clone(), device, 1).lease()?;
            let alive: KeepAlive = Arc::new(stream.clone());
            let known = streams.timeline(stream.raw(), Some(alive))?;
            Some(Reader { stream, _known: known })
        } else {
            None
        };
        Ok(Arc::new(Self {
            source,
            settings,
            driver,
            device,
            streams,
            recorder,
            waits,
            wait,
            listing,
            reader: Mutex::new(reader),
            findings: Mutex::default(),
            state: Mutex::new(State {
                live: BTreeMap::new(),
                ranges: RangeSet::new(),
                waiting: Vec::new(),
                quarantine: AgeQueue::new(),
                quarantined: 0,
                inspecting: 0,
                returned: 0,
                freed: FreedAddresses::default(),
                closed: false,
                own,
            }),
            registration: OnceLock::new(),
        }))
    }

    /// Registers the quarantine as a reclaimer of `budget`.
    pub(crate) fn register(self: &Arc<Self>, budget: &Budget) {
        if self.settings.inspects_freed() {
            let _only_once = self.registration.set(budget.on_need(self));
        }
    }

    pub(crate) fn source(&self) -> &dyn BlockSource {
        &*self.source
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// Returns the bytes that have been freed and not been returned to the pool.
    pub(crate) fn held_back(&self) -> u64 {
        let state = self.state();
        state.quarantined + state.waiting.iter().map(|freed| freed.capacity).sum::<u64>()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_range(&self, start: u64) {
        if self.settings.overlap {
            self.state().ranges.remove(start);
        }
    }

    fn backtrace(&self) -> Option<Arc<Backtrace>> {
        self.settings.backtraces.then(|| Arc::new(Backtrace::force_capture()))
    }

    /// Processes a block that its user has freed. Never blocks.
    fn quarantine_freed(&self, live: CheckedBlock, deferred: DeferredFree) {
        let CheckedBlock { record, capacity, held: Some(held), .. } = live else { return };
        let DeferredFree { work: PendingWork { uses, .. }, until_free, generation, .. } = deferred;
        let mut freed = QuarantinedBlock {
            record,
            capacity,
            held,
            uses,
            until_free,
            generation,
            filled: false,
            refused: false,
        };
        let waits = !freed.uses.is_empty();
        let retained = self.settings.inspects_freed() || (waits && self.settings.fills_freed());
        let retained = retained && is_usable(&freed.held.owner_stream);
        // Filled before the observer learns of the free: afterwards the owner stream may not use
        // the block.
        if !waits {
            self.fill_freed(&mut freed);
        }
        if retained && !self.state().closed {
            self.notify_quarantined(&freed, None);
        }
        // Without debugging the memory would be free now, and charges of wrappers must end at the
        // same time.
        let over = if retained && !waits { freed.until_free.take() } else { None };
        drop(over);
        let leaves = {
            let mut state = self.state();
            if !retained || state.closed {
                Some(freed)
            } else if waits {
                state.waiting.push(freed);
                None
            } else {
                state.enqueue(freed);
                None
            }
        };
        if let Some(freed) = leaves {
            self.return_block(freed);
        }
    }

    /// Reports to the driver's observer which streams may still use a freed block: other streams
    /// with open uses, the reader, and `filler`. The owner stream may not.
    fn notify_quarantined(&self, freed: &QuarantinedBlock, filler: Option<&Timeline>) {
        let mut users: Vec<RawStream> = freed.uses.iter().map(|u| u.on().noted()).collect();
        users.extend(filler.map(Timeline::noted));
        users.extend(self.reader().map(|reader| reader.stream.raw()));
        let address = freed.held.memory.block().address();
        let range = DeviceRange { device: self.device, address, bytes: freed.capacity };
        // Calls are attributed to the line of the free. A plain drop has no line, so the line of
        // the allocation is used.
        let _named = site::enter_as(freed.record.freed_at);
        notify_observer(
            &self.driver,
            freed.generation,
            range,
            Ownership::Pending { users: &users },
        );
    }

    /// Fills a freed block whose uses are done. If the driver refuses, late writes to it are not
    /// detected.
    fn fill_freed(&self, freed: &mut QuarantinedBlock) {
        let GuardedBlock { memory, layout, owner_stream, .. } = &freed.held;
        if self.settings.fills_freed() && is_usable(owner_stream) {
            let _named = freed.name_site();
            freed.filled =
                guards::fill(memory.block(), owner_stream, layout.body(), POISON_FREED).is_ok();
        }
    }

    /// As [`CheckedPool::fill_freed`], for a block that was kept until its uses were done.
    fn fill_quarantined(&self, freed: &mut QuarantinedBlock) {
        if self.settings.fills_freed() && is_usable(&freed.held.owner_stream) {
            let owner_stream = freed.held.owner_stream.clone();
            self.notify_quarantined(freed, Some(&owner_stream));
            self.fill_freed(freed);
            self.notify_quarantined(freed, None);
        }
    }

    /// Returns the memory to the pool, with the uses that are not over and the values to be dropped
    /// when they are.
    fn return_block(&self, freed: QuarantinedBlock) {
        let QuarantinedBlock { record, held, uses, until_free, capacity, .. } = freed;
        let _named = site::enter_as(record.freed_at);
        let mut block = held.memory.into_block();
        self.forget_range(block.address());
        block.uses.take_over(&held.owner_stream, uses);
        if let Some(mut things) = until_free {
            block.meta_mut().until_free.get_or_insert_default().append(&mut things);
        }
        drop(block);
        self.state().returned += capacity;
    }

    /// Returns the users' statistics. Dedicated memory is counted beside the checks, and all other
    /// blocks with the counters here.
    pub(crate) fn stats(&self) -> PoolStats {
        let mut users = self.source.unchecked_stats();
        let peak = {
            let state = self.state();
            state.own.add_to(&mut users);
            state.own.peak()
        };
        let mut stats = self.source.stats();
        // Memory that is held through the checks and has no user is pending.
        let live = users.live.min(stats.live);
        stats.pending += stats.live - live;
        (stats.live, stats.requested) = (live, users.requested);
        peak.set_in(&mut stats);
        (stats.blocks, stats.allocations) = (users.blocks, users.allocations);
        stats.frees = users.frees;
        stats
    }

    /// Returns whether a block at this address has been freed, and no block has been there since.
    pub(crate) fn was_freed(&self, address: u64) -> bool {
        self.state().freed.contains(address)
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
        if let Some(recorder) = &self.recorder {
            let BlockRecord { address, bytes, tag, of_pool: stream, .. } = finding.block;
            let place = MemoryLocation::Device(self.device);
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

impl QuarantinedBlock {
    /// Attributes calls for this block to the line that freed it, or else to the line that
    /// allocated it.
    fn name_site(&self) -> site::Entered {
        site::enter_as(self.record.freed_at.or(Some(self.record.allocated_at)))
    }
}

impl State {
    fn enqueue(&mut self, freed: QuarantinedBlock) {
        self.quarantined += freed.capacity;
        self.quarantine.push(freed);
    }

    /// Accounts for a block that a thread has removed from the quarantine to read it.
    fn begin_inspection(&mut self, freed: &QuarantinedBlock) {
        self.quarantined -= freed.capacity;
        self.inspecting += 1;
    }

    /// Returns a block that has been read to its place in the quarantine.
    fn end_inspection(&mut self, age: u64, freed: QuarantinedBlock) {
        self.quarantined += freed.capacity;
        self.quarantine.put_back(age, freed);
        self.inspecting -= 1;
    }
}

impl ReleaseBlock for CheckedPool {
    fn release(&self, deferred: DeferredFree) {
        let (freed_at, freed_by) = (site::entered(), self.backtrace());
        let leaves = {
            let mut state = self.state();
            let address = deferred.address;
            let Some(live) = state.live.get_mut(&address) else { return };
            live.record.freed_at = freed_at;
            live.record.freed_by = freed_by;
            let (capacity, bytes, inspected) =
                (live.capacity, live.record.bytes, live.held.is_none());
            state.own.record_free(capacity, bytes);
            state.freed.insert(address);
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
            self.quarantine_freed(live, deferred);
        }
    }
}

impl fmt::Debug for CheckedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CheckedPool")
            .field("settings", &self.settings)
            .field("under", &self.source)
            .finish_non_exhaustive()
    }
}
