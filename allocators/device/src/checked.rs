//! Blocks that are checked: where they lie, what is written around them, in them and after them,
//! and who keeps them.
//!
//! With any of [`Debugging`]'s checks on, a pool's blocks take a detour. What the pool hands out is
//! held here, with guards around it; the user has the middle of it. A freed block comes here first,
//! and goes home when it has been looked at:
//!
//! ```text
//!   drop ──▶ other uses done? ──yes──▶ filled with POISON_FREED ──▶ quarantine ──▶ looked at ──▶ home
//!                  │ no                                              ▲ (oldest out first)
//!                  ▼                                                 │
//!               waiting ──── at the next look, when they are ────────┘
//! ```
//!
//! **A drop never blocks**: it queues a fill at most. Looking means to read bytes back, so it
//! blocks until the work queued on the block's stream is done, and happens inside an allocation
//! that finds the quarantine over its bound, under memory pressure, at a trim, a check or the end
//! of the pool.
//!
//! **What the quarantine holds is the pool's own waste**: it gives way, oldest first, before the
//! pool asks anybody else for memory or refuses, and limits of wrappers are no longer charged for
//! it.
//!
//! **Guards cost room**: [`GUARD_BYTES`] behind each block, and before it as many or the block's
//! alignment. A recorder sees the blocks as the pool does: guards included, and freed when they go
//! home.
//!
//! # What is not seen
//! A write of the very byte that is there; one into another live block; reads, but by what they
//! get. A block of a stream that has been retired is not filled at the free, so late writes to it
//! are not seen. A block of a stream whose handle may be gone at any time goes home unseen, and so
//! does one that outlives its pool.

mod finding;
mod guards;
mod leaks;
mod look;
mod ranges;
mod settings;
#[cfg(test)]
mod twice;

pub use finding::{BlockRecord, Fault, Finding};
pub use guards::{CANARY, GUARD_BYTES, POISON_ALLOCATED, POISON_FREED};
pub use leaks::{LeakGroup, LeakReport};
pub(crate) use leaks::{Listed, Listing};
pub use settings::{Debugging, FindingHook};

use crate::{
    Block, DeviceBuffer, Request, Resource,
    backend::{Backed, Deferred, Release},
    block::{Asked, UntilFree},
    home::note,
    pool::Inner,
    raw::FreedAddresses,
    reclaim::is_shortage,
};
use aquifer_core::{
    Action, Budget, DeviceId, MemoryError, PoolStats, Recorder, Reservation, Result,
    budget::Registration, event::Place,
};
use aquifer_driver::{DeviceRange, Driver, KeepAlive, Ownership, RawStream, site};
use aquifer_stream::{Stream, StreamPool, Timeline, Uses};
use guards::Layout;
use ranges::Ranges;
use std::{
    backtrace::Backtrace,
    collections::{BTreeMap, VecDeque},
    fmt,
    mem::ManuallyDrop,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
    time::{Duration, Instant},
};

/// Findings that are kept for [`DevicePool::findings`](crate::DevicePool::findings): the first say
/// most.
const KEPT_FINDINGS: usize = 1024;

/// Where the memory comes from.
#[derive(Debug)]
pub(crate) enum Under {
    /// The caching pool's streams.
    Pool(Arc<Inner>),
    /// An allocation of the driver's for each block.
    Direct(Arc<dyn Resource>),
}

/// The detour of a pool whose blocks are checked.
pub(crate) struct Checked {
    under: Under,
    settings: Debugging,
    driver: Arc<dyn Driver>,
    device: DeviceId,
    streams: StreamPool,
    recorder: Option<Arc<Recorder>>,
    /// Whether a stream may be made to wait for another on the device, when memory is short.
    waits: bool,
    /// How long the host waits for other streams' uses then.
    patience: Duration,
    listing: Arc<Listing>,
    /// What blocks are read back on, while the pool is open.
    reader: Mutex<Option<Reader>>,
    findings: Mutex<Vec<Finding>>,
    state: Mutex<State>,
    registration: OnceLock<Registration>,
}

/// A stream of its own, which takes none of the pool's.
#[derive(Clone)]
struct Reader {
    stream: Stream,
    /// The stream's account among the pool's, which blocks are asked to be in order with.
    _known: Arc<Timeline>,
}

struct State {
    /// By the address that the user has.
    live: BTreeMap<u64, Live>,
    /// All that is held, with [`Debugging::overlap`].
    ranges: Ranges<BlockRecord>,
    /// Freed blocks with uses that are not known to be done.
    waiting: Vec<Freed>,
    /// Freed blocks, oldest first.
    quarantine: VecDeque<Freed>,
    /// Bytes in the quarantine, as they are held.
    quarantined: u64,
    /// Threads that have taken freed blocks out to look at them.
    looking: u32,
    /// Bytes that have gone home so far.
    gone: u64,
    /// Addresses whose blocks have been freed, and that no block has had since.
    freed: FreedAddresses,
    closed: bool,
    /// What the users of the pool hold and have held.
    own: PoolStats,
}

/// A block that its user has.
struct Live {
    record: BlockRecord,
    capacity: u64,
    /// `None` while somebody looks at its guards.
    held: Option<Held>,
    /// It was freed meanwhile.
    freed: Option<Deferred>,
}

/// The memory of a block with its guards.
struct Held {
    memory: DeviceBuffer<u8>,
    layout: Layout,
    home: Arc<Timeline>,
    told: Told,
}

/// What has been reported of a block, and is not again.
#[derive(Clone, Copy, Default)]
struct Told {
    before: bool,
    body: bool,
    behind: bool,
}

/// A block that its user has freed.
struct Freed {
    record: BlockRecord,
    capacity: u64,
    held: Held,
    uses: Uses,
    until_free: UntilFree,
    generation: u64,
    /// It has been filled with [`POISON_FREED`].
    filled: bool,
    /// It could not be read back once.
    refused: bool,
}

impl Under {
    fn allocate(
        &self,
        stream: &Stream,
        held: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        match (self, drawn) {
            (Self::Pool(inner), None) => inner.allocate(stream, held),
            (Self::Pool(inner), Some(drawn)) => inner.allocate_drawing(stream, held, drawn, bytes),
            (Self::Direct(direct), drawn) => {
                Self::draw_and_allocate(direct, stream, held, drawn, bytes)
            }
        }
    }

    /// An allocation of the driver's, for which a reservation makes room.
    pub(crate) fn draw_and_allocate(
        direct: &Arc<dyn Resource>,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        if let Some(drawn) = drawn {
            // The driver's allocations are charged whole: the lease makes room for this one and no
            // more.
            drop(drawn.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes));
        }
        direct.allocate(stream, request)
    }

    fn stats(&self, pool: &Inner) -> PoolStats {
        match self {
            Self::Pool(_) => pool.stats(),
            Self::Direct(direct) => pool.stats_over(direct.stats()),
        }
    }

    /// Bytes held from the driver besides what the pool itself holds.
    pub(crate) fn physical(&self) -> u64 {
        match self {
            Self::Pool(_) => 0,
            Self::Direct(direct) => direct.stats().physical,
        }
    }

    /// Live bytes that do not come through the checks, where a refusal counts them.
    fn live_apart(&self) -> u64 {
        match self {
            Self::Pool(inner) => inner.apart.live(),
            Self::Direct(_) => 0,
        }
    }

    fn trim(&self, pool: &Inner, keep: u64) -> Result<u64> {
        match self {
            Self::Pool(_) => pool.trim(keep),
            Self::Direct(direct) => pool.trim_over(&**direct, keep),
        }
    }
}

impl Checked {
    /// # Errors
    /// The driver's, for the stream that blocks are read back on.
    pub(crate) fn new(
        under: Under,
        settings: Debugging,
        driver: Arc<dyn Driver>,
        streams: StreamPool,
        recorder: Option<Arc<Recorder>>,
        waits: bool,
        patience: Duration,
    ) -> Result<Arc<Self>> {
        let device = streams.device();
        let listing = Arc::new(Listing::new(settings.backtraces));
        let reader = if settings.looks_at_freed() {
            let stream = StreamPool::new(driver.clone(), device, 1).lease()?;
            let alive: KeepAlive = Arc::new(stream.clone());
            let known = streams.timeline(stream.raw(), Some(alive))?;
            Some(Reader { stream, _known: known })
        } else {
            None
        };
        Ok(Arc::new(Self {
            under,
            settings,
            driver,
            device,
            streams,
            recorder,
            waits,
            patience,
            listing,
            reader: Mutex::new(reader),
            findings: Mutex::default(),
            state: Mutex::new(State {
                live: BTreeMap::new(),
                ranges: Ranges::new(),
                waiting: Vec::new(),
                quarantine: VecDeque::new(),
                quarantined: 0,
                looking: 0,
                gone: 0,
                freed: FreedAddresses::default(),
                closed: false,
                own: PoolStats::default(),
            }),
            registration: OnceLock::new(),
        }))
    }

    /// Has others under this budget ask for what it holds back.
    pub(crate) fn register(self: &Arc<Self>, budget: &Budget) {
        if self.settings.looks_at_freed() {
            let _only_once = self.registration.set(budget.on_need(self));
        }
    }

    pub(crate) fn under(&self) -> &Under {
        &self.under
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.device
    }

    /// Bytes that have been freed and are not given out again yet.
    pub(crate) fn held_back(&self) -> u64 {
        let state = self.state();
        state.quarantined + state.waiting.iter().map(|freed| freed.capacity).sum::<u64>()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block with all that is asked for around it. The request has been checked.
    #[track_caller]
    pub(crate) fn allocate(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        let allocated_at = site::current();
        let layout = Layout::new(&request, self.settings.canaries);
        let around = layout.around(&request)?;
        self.settle();
        self.keep_bound();
        let held = loop {
            match self.under.allocate(stream, around, drawn, request.size()) {
                Ok(held) => break held,
                Err(error) if is_shortage(&error) && self.give_way(around.size()) > 0 => {}
                // In the user's figures.
                Err(MemoryError::OutOfMemory(mut error)) => {
                    error.requested = request.size();
                    let users = self.state().own.live + self.under.live_apart();
                    let held_back = error.live.saturating_sub(users);
                    error.live -= held_back;
                    error.pending += held_back;
                    return Err(MemoryError::OutOfMemory(error));
                }
                Err(error) => return Err(error),
            }
        };
        let (start, capacity, generation, home) =
            (held.address(), held.capacity(), held.generation(), held.home());
        let mut record = BlockRecord {
            address: start + layout.front,
            bytes: request.size(),
            tag: request.owner(),
            number: 0,
            stream: stream_of(&home),
            of_pool: home.number(),
            born: Instant::now(),
            allocated_at,
            freed_at: None,
            allocated_by: self.backtrace(),
            freed_by: None,
        };
        if let Err(other) = self.number(start, start + capacity, &mut record) {
            // It cannot go home: what it lies over is somebody's.
            let _kept = ManuallyDrop::new(held);
            let (address, held) = (record.address, other.address);
            self.report(Fault::Overlap { held: Box::new(other) }, record);
            return Err(MemoryError::BlockOverlap { address, held });
        }
        let filled = self.fill_new(&held, &home, &layout, generation);
        let held =
            filled.and_then(|()| DeviceBuffer::from_alloc(around.size() as usize, |_| Ok(held)));
        let memory = match held {
            Ok(memory) => memory,
            Err(error) => {
                self.forget_range(start);
                return Err(error);
            }
        };
        let address = record.address;
        let bytes = if self.settings.canaries { request.size() } else { capacity };
        let held = Some(Held { memory, layout, home: home.clone(), told: Told::default() });
        {
            let mut state = self.state();
            let own = &mut state.own;
            own.live += capacity;
            own.requested += request.size();
            own.blocks += 1;
            own.allocations += 1;
            own.peak_live = own.peak_live.max(own.live);
            own.peak_requested = own.peak_requested.max(own.requested);
            state.freed.forget(address);
            state.live.insert(address, Live { record, capacity, held, freed: None });
        }
        let backed =
            Backed { ledger: self.clone(), timeline: home, streams: self.streams.clone(), bytes };
        Ok(Block::backed(address, Asked::new(request.size(), request.owner()), backed, generation))
    }

    /// Gives a block its number and its place among what is held, or answers with what is there
    /// already.
    fn number(&self, start: u64, end: u64, record: &mut BlockRecord) -> Result<(), BlockRecord> {
        record.number = self.listing.number();
        let mut state = self.state();
        if self.settings.overlap {
            state.ranges.enter(start, end, record.clone()).map_err(|held| held.clone())
        } else {
            Ok(())
        }
    }

    fn forget_range(&self, start: u64) {
        if self.settings.overlap {
            self.state().ranges.leave(start);
        }
    }

    fn fill_new(
        &self,
        held: &Block,
        home: &Timeline,
        layout: &Layout,
        generation: u64,
    ) -> Result<()> {
        for guard in [layout.before(), layout.behind()].into_iter().flatten() {
            guards::fill(held, home, guard.clone(), CANARY)?;
            let address = held.address() + guard.start;
            let range =
                DeviceRange { device: self.device, address, bytes: guard.end - guard.start };
            let readers = self.reader().map(|reader| reader.stream.raw());
            note(&self.driver, generation, range, Ownership::Guard { users: readers.as_slice() });
        }
        if self.settings.poison {
            guards::fill(held, home, layout.body(), POISON_ALLOCATED)?;
        }
        Ok(())
    }

    fn backtrace(&self) -> Option<Arc<Backtrace>> {
        self.settings.backtraces.then(|| Arc::new(Backtrace::force_capture()))
    }

    /// A block that its user has freed. Never blocks.
    fn freed(&self, live: Live, deferred: Deferred) {
        let Live { record, capacity, held: Some(held), .. } = live else { return };
        let Deferred { uses, until_free, generation, .. } = deferred;
        let mut freed = Freed {
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
        let kept = self.settings.looks_at_freed() || (waits && self.settings.fills_freed());
        let kept = kept && can_be_used(&freed.held.home);
        // While it is the user's still: to a driver that checks, its stream has no business there
        // any more afterwards.
        if !waits {
            self.fill_freed(&mut freed);
        }
        if kept && !self.state().closed {
            self.note_kept(&freed, None);
        }
        // Without debugging the memory would be free now; limits of wrappers are not to notice the
        // difference.
        let over = if kept && !waits { freed.until_free.take() } else { None };
        drop(over);
        let goes = {
            let mut state = self.state();
            if !kept || state.closed {
                Some(freed)
            } else if waits {
                state.waiting.push(freed);
                None
            } else {
                state.keep(freed);
                None
            }
        };
        if let Some(freed) = goes {
            self.go_home(freed);
        }
    }

    /// Tells a driver that checks who may still touch a freed block: other streams whose uses are
    /// open, the pool's reader, and `filler`. The stream that it belonged to may not.
    fn note_kept(&self, freed: &Freed, filler: Option<&Timeline>) {
        let mut users: Vec<RawStream> = freed.uses.iter().map(|u| u.on().raw()).collect();
        users.extend(filler.map(Timeline::raw));
        users.extend(self.reader().map(|reader| reader.stream.raw()));
        let address = freed.held.memory.block().address();
        let range = DeviceRange { device: self.device, address, bytes: freed.capacity };
        // Whatever call this happens in. A plain drop has no line, and is named by the one that the
        // block came from.
        let _named = site::enter_as(freed.record.freed_at);
        note(&self.driver, freed.generation, range, Ownership::Pending { users: &users });
    }

    /// Fills a freed block whose uses are done. A refusal leaves it as it is: late writes to it are
    /// not seen then.
    fn fill_freed(&self, freed: &mut Freed) {
        let Held { memory, layout, home, .. } = &freed.held;
        if self.settings.fills_freed() && can_be_used(home) {
            let _named = freed.name_site();
            freed.filled = guards::fill(memory.block(), home, layout.body(), POISON_FREED).is_ok();
        }
    }

    /// The same for one that has been kept until its uses were done.
    fn fill_kept(&self, freed: &mut Freed) {
        if self.settings.fills_freed() && can_be_used(&freed.held.home) {
            let home = freed.held.home.clone();
            self.note_kept(freed, Some(&home));
            self.fill_freed(freed);
            self.note_kept(freed, None);
        }
    }

    /// Gives the memory back to the pool, with the uses that are not over and what is to end when
    /// they are.
    fn go_home(&self, freed: Freed) {
        let Freed { record, held, uses, until_free, capacity, .. } = freed;
        let _named = site::enter_as(record.freed_at);
        let mut block = held.memory.into_block();
        self.forget_range(block.address());
        block.uses.take_over(&held.home, uses);
        if let Some(mut things) = until_free {
            block.extras_mut().until_free.get_or_insert_default().append(&mut things);
        }
        drop(block);
        self.state().gone += capacity;
    }

    /// Counts peaks of what the users hold from now.
    pub(crate) fn reset_peaks(&self) {
        let own = &mut self.state().own;
        own.peak_live = own.live;
        own.peak_requested = own.requested;
    }

    /// What the users hold, over what the pool holds: `apart` beside the checks, and through them
    /// what is told here.
    pub(crate) fn stats(&self, pool: &Inner) -> PoolStats {
        let own = self.state().own;
        let mut apart = PoolStats::default();
        pool.apart.add_to(&mut apart);
        let mut stats = self.under.stats(pool);
        // What comes through the checks, is held and has no owner is held back.
        stats.pending += (stats.live - apart.live).saturating_sub(own.live);
        stats.live = own.live + apart.live;
        stats.requested = own.requested + apart.requested;
        stats.peak_requested = own.peak_requested + apart.peak_requested;
        stats.peak_live = own.peak_live + apart.peak_live;
        stats.blocks = own.blocks + apart.blocks;
        stats.allocations = own.allocations + apart.allocations;
        stats.frees = own.frees + apart.frees;
        stats
    }

    /// Whether a block at this address has been freed, and none has been there since.
    pub(crate) fn was_freed(&self, address: u64) -> bool {
        self.state().freed.has(address)
    }

    /// What numbers the blocks, and lists those that do not come through here, if leaks are to be
    /// reported.
    pub(crate) fn listing(&self) -> Option<&Arc<Listing>> {
        self.settings.leaks.then_some(&self.listing)
    }

    /// Everything found so far, as far as it is kept.
    pub(crate) fn findings(&self) -> Vec<Finding> {
        self.findings.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The live blocks, if they are to be reported.
    pub(crate) fn leaks(&self) -> Option<LeakReport> {
        let live = |live: &Live| live.freed.is_none().then(|| live.record.clone());
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
            if findings.len() < KEPT_FINDINGS {
                findings.push(finding.clone());
            }
        }
        if let Some(recorder) = &self.recorder {
            let BlockRecord { address, bytes, tag, of_pool: stream, .. } = finding.block;
            let place = Place::Device(self.device);
            let event = recorder.event(Action::Finding, place, stream, address, bytes, tag);
            recorder.record(recorder.ticket(), event);
        }
        if let Some(hook) = &self.settings.hook {
            // It may be called from a drop, which must not unwind. Whoever panics has been told so
            // by the panic's own message.
            let _panicked = catch_unwind(AssertUnwindSafe(|| hook(&finding)));
        }
        finding
    }

    fn reader(&self) -> Option<Reader> {
        self.reader.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// The number of a stream by which findings name it: the driver's own, which violations of the
/// simulated GPU name it by too. One that the driver tells none of, since it captures, is named by
/// its number in its pool.
pub(crate) fn stream_of(stream: &Timeline) -> u64 {
    stream.id().unwrap_or_else(|| u64::from(stream.number()))
}

/// Whether work may be queued on the stream later, when no call of its owner's is in progress. One
/// that has been retired refuses it by itself.
fn can_be_used(home: &Timeline) -> bool {
    !home.fences_at_once()
}

impl Freed {
    /// Names calls that are made for it by the line that freed it, or the one that it came from.
    fn name_site(&self) -> site::Entered {
        site::enter_as(self.record.freed_at.or(Some(self.record.allocated_at)))
    }
}

impl State {
    fn keep(&mut self, freed: Freed) {
        self.quarantined += freed.capacity;
        self.quarantine.push_back(freed);
    }
}

impl Release for Checked {
    fn release(&self, deferred: Deferred) {
        let (freed_at, freed_by) = (site::entered(), self.backtrace());
        let goes = {
            let mut state = self.state();
            let address = deferred.address;
            let Some(live) = state.live.get_mut(&address) else { return };
            live.record.freed_at = freed_at;
            live.record.freed_by = freed_by;
            let (capacity, bytes, looked_at) =
                (live.capacity, live.record.bytes, live.held.is_none());
            let own = &mut state.own;
            own.live -= capacity;
            own.requested -= bytes;
            own.blocks -= 1;
            own.frees += 1;
            state.freed.note(address);
            if looked_at {
                // Whoever looks at it goes on with this.
                if let Some(live) = state.live.get_mut(&address) {
                    live.freed = Some(deferred);
                }
                None
            } else {
                state.live.remove(&address).map(|live| (live, deferred))
            }
        };
        if let Some((live, deferred)) = goes {
            self.freed(live, deferred);
        }
    }
}

impl fmt::Debug for Checked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checked")
            .field("settings", &self.settings)
            .field("under", &self.under)
            .finish_non_exhaustive()
    }
}
