//! Blocks of a [`RangeSource`]: a user's own, or one of the driver's allocators.
//!
//! Such an allocation costs half a microsecond or more, so its block carries an `Arc` of its
//! allocator. Statistics, open uses and failed frees are handled here.

use super::range::{Dependencies, RangeSource};
use crate::{
    Block, Request,
    base::{
        addresses::FreedAddresses,
        driver::{check_stream_device, is_shortage, notify_observer, owner_of_freed},
        extent::PackedRequest,
        pending::{DeferredFree, PendingUses},
        released::release_or_strand,
        usage::LiveUsage,
    },
    block::{DriverBlock, ReleaseBlock},
    publisher::describe,
    raw_table::RawTable,
    reclaim::Reclaimers,
    request::ValidateRequest,
};
use aquifer_core::{
    Budget, Charge, DeviceId, MemoryError, OpaqueBlock, OutOfMemory, PoolStats, Result,
    budget::HookRegistration,
};
use aquifer_driver::{DeviceRange, Driver, Ownership, site};
use aquifer_status::{PoolFigures, PoolKind, PoolSlot, tightest_limit};
use aquifer_stream::{LastUse, Stream, StreamPool};
use std::{
    fmt,
    mem::ManuallyDrop,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

/// The items of an [`Opaque`](aquifer_core::Opaque) implementation that forward to the field
/// `allocator`, a [`SourceAllocator`]. Statistics are left to the implementation.
macro_rules! forward_to_allocator {
    () => {
        type Stream = aquifer_stream::Stream;
        type Block = $crate::Block;

        fn device(&self) -> aquifer_core::DeviceId {
            self.allocator.device()
        }
        #[track_caller]
        fn allocate(
            &self,
            stream: &aquifer_stream::Stream,
            request: $crate::Request,
        ) -> aquifer_core::Result<$crate::Block> {
            self.allocator.allocate(stream, request)
        }
        fn trim(&self, keep: u64) -> aquifer_core::Result<u64> {
            self.allocator.trim(keep)
        }
    };
}
pub(crate) use forward_to_allocator;

/// A source with its statistics.
pub(crate) struct SourceAllocator<S: RangeSource> {
    pub(crate) source: Arc<S>,
    /// What is charged for the blocks, or for what the source has reserved.
    budget: Option<Budget>,
    /// The registration with the budget of a source that charges what it has reserved. Blocks of
    /// other sources are charged one by one.
    pub(crate) registration: OnceLock<HookRegistration>,
    driver: Arc<dyn Driver>,
    streams: StreamPool,
    observed: bool,
    generations: AtomicU64,
    state: Mutex<State>,
    /// What other processes are shown; `None` for a device that is lost.
    status: Option<PoolSlot>,
    /// A reference to itself, for the notification that a use has ended.
    weak_self: Weak<Self>,
}

/// Notified when the last open use of a freed block has ended. Keeps the allocator alive until
/// then.
struct RetryOnLastUse<S: RangeSource>(Arc<SourceAllocator<S>>);

impl<S: RangeSource> LastUse for RetryOnLastUse<S> {
    fn ended(&self) {
        self.0.retry_deferred();
    }
}

#[derive(Default)]
struct State {
    usage: LiveUsage,
    /// Bytes of freed blocks that the source does not have back yet.
    pending: u64,
    /// Bytes of blocks, live or pending, if that is all that the source holds.
    physical: u64,
    peak_physical: u64,
    failures: u64,
    /// The bytes that the source has last been found to hold, if they include more than the
    /// blocks.
    reserved: Option<u64>,
    /// Freed blocks with open uses, and blocks whose free failed. They stay charged.
    deferred: Vec<DeferredFree>,
    /// Blocks that were converted into raw addresses.
    raw: RawTable,
    freed: FreedAddresses,
}

impl State {
    /// Returns the statistics, with what the source was last found to hold.
    fn stats(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        self.usage.add_to(&mut stats);
        self.usage.peak().set_in(&mut stats);
        (stats.pending, stats.failures) = (self.pending, self.failures);
        (stats.physical, stats.peak_physical) = (self.physical, self.peak_physical);
        if let Some(reserved) = self.reserved {
            stats.physical = reserved;
            stats.peak_physical = stats.peak_physical.max(reserved);
            stats.cached = reserved.saturating_sub(stats.live + stats.pending);
        }
        stats
    }
}

impl<S: RangeSource> SourceAllocator<S> {
    /// Creates an allocator whose figures other processes are shown as those of a pool.
    pub(crate) fn new(
        source: S,
        driver: Arc<dyn Driver>,
        streams: StreamPool,
        budget: Option<Budget>,
        name: &'static str,
    ) -> Arc<Self> {
        // The next pool reports a setting that is invalid.
        let _ = aquifer_status::start();
        let info = driver.device_info(streams.device()).ok();
        let status =
            info.map(|info| PoolSlot::open(describe(&*driver, &info, PoolKind::Source, name)));
        let observed = driver.observer().is_some();
        let allocator = Arc::new_cyclic(|weak_self| Self {
            source: Arc::new(source),
            budget,
            registration: OnceLock::new(),
            driver,
            streams,
            observed,
            generations: AtomicU64::new(1),
            state: Mutex::default(),
            status,
            weak_self: weak_self.clone(),
        });
        allocator.publish(&allocator.state());
        allocator
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn device(&self) -> DeviceId {
        self.streams.device()
    }

    #[track_caller]
    pub(crate) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        if request.size() == 0 {
            return Block::empty(&self.streams, stream, request.owner());
        }
        let checked = request.checked();
        let request = checked.map_err(|error| self.explain_refusal(request.size(), error))?;
        check_stream_device(&*self.driver, self.device(), stream.timeline())?;
        if request.alignment() > self.source.alignment() {
            return Err(MemoryError::BadAlignment { align: request.alignment() });
        }
        let _site = site::enter();
        self.retry_deferred();
        let allocated = self.allocate_with_reclaim(stream, request.size());
        let (address, charge) = match allocated {
            Ok(allocated) => allocated,
            Err(error) => {
                let mut state = self.state();
                state.failures += 1;
                self.publish(&state);
                drop(state);
                return Err(self.explain_refusal(request.size(), error));
            }
        };
        let timeline = stream.timeline().clone();
        let generation = if self.observed {
            let generation = self.generations.fetch_add(1, Ordering::Relaxed);
            let range = DeviceRange { device: self.device(), address, bytes: request.size() };
            notify_observer(
                &self.driver,
                generation,
                range,
                Ownership::Live { stream: stream.timeline().noted(), generation },
            );
            generation
        } else {
            0
        };
        {
            let mut state = self.state();
            state.freed.remove(address);
            state.usage.record_alloc(request.size(), request.size());
            if self.source.reserved().is_none() {
                state.physical += request.size();
                state.peak_physical = state.peak_physical.max(state.physical);
            }
            self.publish(&state);
        }
        let driver_block = DriverBlock {
            releaser: self.clone(),
            timeline,
            streams: self.streams.clone(),
            bytes: request.size(),
            key: 0,
        };
        let packed = PackedRequest::new(request.size(), request.owner());
        let mut block = Block::from_driver_block(address, packed, driver_block, generation);
        if let Some(charge) = charge {
            block.keep_until_free(Box::new(charge));
        }
        Ok(block)
    }

    /// Turns a refusal of `bytes` by the budget or the driver into the error that every pool
    /// returns. Returns other errors unchanged.
    fn explain_refusal(&self, bytes: u64, error: MemoryError) -> MemoryError {
        let device = self.device();
        let mut full = OutOfMemory::new(device.to_string(), bytes);
        // The bytes that the source would have charged, which may be more than the block's.
        let mut missing = bytes;
        match error {
            MemoryError::OutOfBudget(refused) => {
                missing = refused.requested;
                full.refused = Some(refused);
            }
            MemoryError::Driver(refused) if refused.is_out_of_memory() => {
                full.driver = Some(refused);
            }
            // More than any device has.
            MemoryError::TooLarge { requested, limit } if requested <= limit => {}
            other => return other,
        }
        if let (Some(_), Some(budget)) = (full.refused, &self.budget) {
            full.raise = budget.raises(missing, 0);
        }
        full.capacity = self.driver.device_info(device).map_or(0, |info| info.memory);
        let stats = self.stats();
        (full.live, full.cached) = (stats.live, stats.cached);
        (full.pending, full.physical) = (stats.pending, stats.physical);
        MemoryError::OutOfMemory(Box::new(full))
    }

    /// Allocates from the source, and reclaims from others without waiting while it has no memory.
    fn allocate_with_reclaim(&self, stream: &Stream, bytes: u64) -> Result<(u64, Option<Charge>)> {
        let own = self.registration.get();
        let allocate = || {
            let budget = self.budget.as_ref().filter(|_| own.is_none());
            let charge = budget.map(|budget| budget.charge(bytes)).transpose()?;
            Ok((self.source.allocate(stream, bytes)?, charge))
        };
        let mut allocated = allocate();
        let Some(budget) = self.budget.as_ref().filter(|_| allocated.is_err()) else {
            return allocated;
        };
        let mut reclaimers = Reclaimers::new(budget, own, &*self.driver, self.device());
        loop {
            let now = Some(Instant::now());
            let reclaimed = match &allocated {
                Err(MemoryError::OutOfBudget(refused)) => {
                    reclaimers.for_charge(refused.requested, now)
                }
                Err(error) if is_shortage(error) => reclaimers.after_refusal(bytes, now),
                _ => return allocated,
            };
            if reclaimed.is_none() {
                return allocated;
            }
            allocated = allocate();
        }
    }

    /// Returns the bytes in blocks, live or pending.
    pub(crate) fn bytes_in_blocks(&self) -> u64 {
        let state = self.state();
        state.usage.live() + state.pending
    }

    /// Takes the block back that was converted into this address.
    pub(crate) fn take_raw(&self, address: u64) -> Result<Block> {
        let mut state = self.state();
        let block = state.raw.take_unique(address);
        block.unwrap_or_else(|| Err(state.freed.refuse(address)))
    }

    /// Retries to free the deferred blocks.
    fn retry_deferred(&self) {
        let deferred = std::mem::take(&mut self.state().deferred);
        for block in deferred {
            self.deallocate_or_defer(block);
        }
    }

    /// Frees a block, or defers it.
    fn deallocate_or_defer(&self, mut block: DeferredFree) {
        if !block.work.uses.are_over() && block.work.uses.has_open() {
            match self.defer_while_open(block) {
                Some(over) => block = over,
                None => return,
            }
        }
        if give(&*self.source, &block).is_err() {
            block.work.fence_at_once();
            self.state().deferred.push(block);
            return;
        }
        drop(block.until_free);
        let is_reserved = self.source.reserved().is_some();
        let mut state = self.state();
        debug_assert!(state.pending >= block.bytes, "a block is freed that was not pending");
        state.pending -= block.bytes;
        if !is_reserved {
            state.physical -= block.bytes;
        }
        self.publish(&state);
    }

    /// Defers a block until its uses have ended. Returns it if they have ended by now.
    fn defer_while_open(&self, block: DeferredFree) -> Option<DeferredFree> {
        let listener: Option<Arc<dyn LastUse>> =
            self.weak_self.upgrade().map(|allocator| Arc::new(RetryOnLastUse(allocator)) as _);
        // The owner stream may end before the uses do.
        block.work.fence_at_once();
        // The end of a use looks up the block under this lock.
        let mut state = self.state();
        if listener.is_some_and(|listener| !block.work.uses.tell(&listener)) {
            return Some(block);
        }
        state.deferred.push(block);
        None
    }

    pub(crate) fn stats(&self) -> PoolStats {
        aquifer_status::resume();
        // Asked before the lock is taken, since it may call the driver.
        let reserved = self.source.reserved();
        let mut state = self.state();
        state.reserved = reserved;
        self.publish(&state);
        state.stats()
    }

    /// Publishes the statistics. Writes to memory only.
    fn publish(&self, state: &State) {
        if let Some(status) = &self.status {
            status.publish(|| PoolFigures {
                stats: state.stats(),
                limit: self.budget.as_ref().and_then(tightest_limit),
                largest_free: None,
            });
        }
    }

    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        self.retry_deferred();
        self.source.trim(keep)
    }
}

impl<S: RangeSource> ReleaseBlock for SourceAllocator<S> {
    fn insert_raw(&self, block: Block) -> Option<Block> {
        self.state().raw.insert(block);
        None
    }

    fn release(&self, block: DeferredFree) {
        {
            let mut state = self.state();
            state.freed.insert(block.address);
            state.usage.record_free(block.bytes, block.bytes);
            state.pending += block.bytes;
            self.publish(&state);
        }
        let users = block.users();
        notify_observer(&self.driver, block.generation, range_of(&block), owner_of_freed(&users));
        self.deallocate_or_defer(block);
    }
}

impl<S: RangeSource> Drop for SourceAllocator<S> {
    fn drop(&mut self) {
        self.retry_deferred();
        // Blocks left here have open uses that cannot end any more, or their free was refused.
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        debug_assert_eq!(state.usage.live(), 0, "a live block does not keep its allocator");
        for block in state.deferred.drain(..) {
            if block.work.uses.has_open() {
                // Nothing can free it any more.
                let _still_charged = ManuallyDrop::new(block.until_free);
                continue;
            }
            let (source, budget, bytes) = (self.source.clone(), self.budget.clone(), block.bytes);
            let give_again = move |block: &mut DeferredFree| {
                match give(&*source, block) {
                    Err(MemoryError::Driver(refused)) => return Err(refused),
                    Err(_) => {
                        // The source does not say when it would take it.
                        let _still_charged = ManuallyDrop::new(block.until_free.take());
                    }
                    Ok(()) => {}
                }
                Ok(())
            };
            release_or_strand(&self.driver, block, give_again, move |_| {
                budget.iter().map(|budget| budget.count_stranded(bytes)).collect()
            });
        }
    }
}

fn range_of(block: &DeferredFree) -> DeviceRange {
    DeviceRange {
        device: block.timeline.raw().device(),
        address: block.address,
        bytes: block.bytes,
    }
}

/// Returns a freed block, all of whose uses are stamped, to its source.
fn give(source: &impl RangeSource, freed: &DeferredFree) -> Result<()> {
    source.deallocate(range_of(freed), &Dependencies { freed })
}

impl<S: RangeSource> fmt::Debug for SourceAllocator<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SourceAllocator").field("source", &self.source).finish_non_exhaustive()
    }
}
