//! The core of a pool: what all of its parts need, and nothing of its features.
//!
//! Features, such as memory of graphs, stand above the core. What they have to do within the core's
//! slow paths they register as a [`PoolHook`].

pub(crate) mod allocate;
pub(crate) mod caches;
mod events;
pub(crate) mod fences;
mod give_back;
mod stats;

use crate::{
    Adoption, Block, PoolConfig, Request,
    base::{
        addresses::{AddressDirectory, DIRECT_CACHES},
        lists::AppendList,
        record::{CommittedBytes, LiveBlockList},
        released::Released,
        usage::LiveUsage,
    },
    dedicated::DedicatedPool,
    mapped_memory::MappedMemory,
    peaks::{CacheList, PoolPeaks},
    publisher::PoolPublisher,
    retention::Retention,
    sharing_policy::SharingPolicy,
    stream_cache::{StreamCache, close::IdleCache},
};
use aquifer_core::{
    Budget, DeviceId, PoolStats, Result,
    budget::{Holding, HookRegistration, Leased},
    error::TenantHolding,
    scratch::Scratch,
};
use aquifer_driver::{DeviceInfo, Driver};
use aquifer_stream::{Stream, StreamPool, Timeline};
use std::{
    any::Any,
    fmt, iter,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Keys under which pools attach their caches to streams. A key is never reused.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

/// The bit of [`PoolCore::full_path_reasons`] for the last hook's reason. The others are counted
/// below it.
const LAST_HOOK: u32 = 1 << 31;

/// The shared core of a pool: what all of its parts need. Features keep what is theirs in hooks.
pub(crate) struct PoolCore {
    key: u64,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) info: DeviceInfo,
    streams: StreamPool,
    /// The memory of the caches, and what no cache has.
    pub(crate) memory: MappedMemory,
    pub(crate) budget: Budget,
    /// Dedicated memory: stable blocks and reserved elements.
    pub(crate) dedicated: Arc<DedicatedPool>,
    pub(crate) config: PoolConfig,
    /// All caches of the pool, also idle ones.
    caches: Arc<CacheList>,
    /// The peaks of live bytes.
    pub(crate) peaks: Arc<PoolPeaks>,
    /// Scratch memory for lists of caches.
    pub(crate) scratch: Scratch,
    idle_caches: Mutex<Vec<IdleCache>>,
    /// The caches by number, as far as the directory has their numbers. They exist until the pool
    /// closes.
    numbered_caches: Box<[OnceLock<&'static StreamCache>]>,
    /// Finds the cache of a raw address.
    pub(crate) directory: Arc<AddressDirectory>,
    /// Whether the driver has an observer, which needs the owner of each block.
    observed: bool,
    /// Number of reasons to take the full allocation path: another source of blocks, an observer
    /// or recorder, the limit of a tag, announced captures.
    full_path_reasons: AtomicU32,
    /// The features that take part, in the order of their first use.
    hooks: AppendList<Box<dyn PoolHook>>,
    /// The feature that takes part after all others, and allocates alone while it has the only
    /// reason for the full path.
    last_hook: OnceLock<Box<dyn PoolHook>>,
    generations: AtomicU64,
    pub(crate) counters: Counters,
    /// What other processes are shown.
    pub(crate) status: PoolPublisher,
    /// The limit that the recorder was told last: `u64::MAX` for none.
    recorded_limit: Mutex<Option<u64>>,
    /// What the recorder was told last to be in use outside of the pool.
    recorded_outside: Mutex<Option<u64>>,
    pub(crate) sharing_policy: SharingPolicy,
    pub(crate) retention: Retention,
    /// Live blocks that come from elsewhere than the caches, listed if leaks are reported.
    pub(crate) listing: OnceLock<Arc<LiveBlockList>>,
    /// The pool's registration as a reclaimer.
    pub(crate) registration: OnceLock<HookRegistration>,
}

/// Counters of the slow path.
#[derive(Default, Debug)]
pub(crate) struct Counters {
    pub(crate) reaped: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) growths: AtomicU64,
    pub(crate) moves: AtomicU64,
    pub(crate) adoptions: AtomicU64,
    pub(crate) fences: AtomicU64,
    pub(crate) stream_waits: AtomicU64,
    pub(crate) host_waits: AtomicU64,
}

impl Counters {
    pub(crate) fn add_to(&self, stats: &mut PoolStats) {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        stats.reaped += read(&self.reaped);
        stats.failures += read(&self.failures);
        stats.growths += read(&self.growths);
        stats.moves += read(&self.moves);
        stats.adoptions += read(&self.adoptions);
        stats.fences += read(&self.fences);
        stats.stream_waits += read(&self.stream_waits);
        stats.host_waits += read(&self.host_waits);
    }
}

/// Adds to a counter.
pub(crate) fn count(counter: &AtomicU64, by: u64) {
    if by > 0 {
        counter.fetch_add(by, Ordering::Relaxed);
    }
}

/// What a feature does within the slow paths of a pool's core.
///
/// A feature that changes allocations also registers a [full-path
/// reason](PoolCore::add_full_path_reason): the fast path calls no hook.
pub(crate) trait PoolHook: Any + Send + Sync {
    /// Charges the bytes of a request to the limit of its tag, if the tag has one.
    fn charge(
        &self,
        _core: &PoolCore,
        _stream: &Stream,
        _request: &Request,
    ) -> Result<Option<Leased>> {
        Ok(None)
    }

    /// Allocates a block from elsewhere than the pool's caches, if the request belongs there. The
    /// request has been checked.
    fn allocate(
        &self,
        _core: &PoolCore,
        _stream: &Stream,
        _request: Request,
    ) -> Result<Option<Block>> {
        Ok(None)
    }

    /// Adds what the feature holds besides dedicated memory. Called with no lock held.
    fn add_to(&self, _stats: &mut PoolStats) {}

    /// Returns what each tag holds besides dedicated memory.
    fn holdings(&self) -> Vec<Holding> {
        Vec::new()
    }

    /// Ends the feature when the pool is closed. Blocks may live.
    fn close(&self) {}

    /// Polls the work that freed blocks depend on. Never blocks.
    fn poll(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the work that freed blocks depend on, except for open uses.
    fn freed_work(&self) -> Vec<(Arc<Timeline>, u64)> {
        Vec::new()
    }

    /// Returns the bytes that [`PoolHook::release_free`] releases once their work is done. Makes no
    /// driver call.
    fn free_bytes(&self) -> u64 {
        0
    }

    /// Returns up to `bytes` of free memory to the driver that nothing is likely to need, before
    /// that much new memory is taken. Makes no driver call if there is none.
    fn release_before_growth(&self, _bytes: u64) {}

    /// Returns free memory to the driver.
    fn release_free(&self) -> Released {
        Released::default()
    }

    /// Returns unused charges to budgets of live bytes.
    fn release_charges(&self) {}

    /// Returns the live bytes of each tenant and limited tag, most first.
    fn tenant_holdings(&self) -> Vec<TenantHolding> {
        Vec::new()
    }
}

impl PoolCore {
    /// Creates the core of a pool on the first device of `accessors`, whose mappings all of them
    /// can access.
    pub(crate) fn new(
        driver: Arc<dyn Driver>,
        info: DeviceInfo,
        budget: Budget,
        config: PoolConfig,
        memory: MappedMemory,
        accessors: Arc<[DeviceId]>,
    ) -> Arc<Self> {
        let observed = driver.observer().is_some();
        let slow = config.bypass || config.debug.is_on() || observed || config.recorder.is_some();
        let sharing = config.adoption != Adoption::Never;
        let status = PoolPublisher::new(&*driver, &info);
        let caches = Arc::<CacheList>::default();
        let peaks = PoolPeaks::new(caches.clone(), !config.bypass);
        let (live, parent) = (LiveUsage::of_pool(peaks.clone(), 0), status.slot().clone());
        let held = memory.held().of_other_part();
        let dedicated = DedicatedPool::new(&driver, &info, &config, accessors, live, held, parent);
        Arc::new(Self {
            key: NEXT_KEY.fetch_add(1, Ordering::Relaxed),
            streams: StreamPool::new(driver.clone(), info.device, config.streams),
            dedicated,
            driver,
            info,
            memory,
            budget,
            caches,
            peaks,
            scratch: Scratch::new(),
            idle_caches: Mutex::default(),
            numbered_caches: iter::repeat_with(OnceLock::new).take(DIRECT_CACHES).collect(),
            directory: Arc::default(),
            observed,
            full_path_reasons: AtomicU32::new(u32::from(slow)),
            hooks: AppendList::new(),
            last_hook: OnceLock::new(),
            generations: AtomicU64::new(1),
            counters: Counters::default(),
            status,
            recorded_limit: Mutex::new(Some(u64::MAX)),
            recorded_outside: Mutex::default(),
            sharing_policy: SharingPolicy::new(sharing, config.slack),
            retention: Retention::new(config.release_threshold, config.stream_cache),
            config,
            listing: OnceLock::new(),
            registration: OnceLock::new(),
        })
    }

    /// Returns the streams of the device.
    pub(crate) fn streams(&self) -> &StreamPool {
        &self.streams
    }

    /// Returns the budget that physical memory is charged to.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Registers a reason to take the full allocation path.
    pub(crate) fn add_full_path_reason(&self) {
        self.full_path_reasons.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a reason that was registered by [`PoolCore::add_full_path_reason`].
    pub(crate) fn remove_full_path_reason(&self) {
        self.full_path_reasons.fetch_sub(1, Ordering::Relaxed);
    }

    /// Lists a block that does not come from a stream's cache until it is freed, if leaks are
    /// reported. Reserved memory counts with its committed bytes.
    #[track_caller]
    pub(crate) fn list_for_leaks(
        &self,
        block: &mut Block,
        committed: Option<Arc<dyn CommittedBytes>>,
    ) {
        if let Some(listing) = self.listing.get() {
            let (extent, tag, owner) =
                ((block.address(), block.bytes()), block.tag(), block.home());
            block.meta_mut().live.listed = Some(listing.list(extent, tag, &owner, committed));
        }
    }

    /// Returns the bytes held from the driver.
    pub(crate) fn held(&self) -> u64 {
        self.memory.held().now() + self.dedicated.held().now()
    }

    /// Returns the hooks of features.
    pub(crate) fn hooks(&self) -> impl Iterator<Item = &dyn PoolHook> {
        self.hooks.iter().chain(self.last_hook.get()).map(|hook| &**hook)
    }

    /// Adds the hook of a feature that takes part after all others, and gives it a reason to take
    /// the full path. A pool has at most one: a second is dropped.
    pub(crate) fn add_last_hook(&self, hook: Box<dyn PoolHook>) {
        if self.last_hook.set(hook).is_ok() {
            self.full_path_reasons.fetch_or(LAST_HOOK, Ordering::Relaxed);
        }
    }

    /// Removes the reason of the last feature.
    pub(crate) fn remove_reason_of_last_hook(&self) {
        self.full_path_reasons.fetch_and(!LAST_HOOK, Ordering::Relaxed);
    }

    /// Returns the part of a feature that belongs to this pool, created at its first use.
    pub(crate) fn feature<F: PoolHook + Default>(&self) -> &F {
        self.hooks.find_or_push(
            |hook| {
                let any: &dyn Any = &**hook;
                any.downcast_ref()
            },
            || Box::new(F::default()),
        )
    }

    /// Charges the request's bytes to the limit of its tag, if the tag has one.
    pub(crate) fn charge_tag(&self, stream: &Stream, request: &Request) -> Result<Option<Leased>> {
        for hook in self.hooks() {
            if let Some(charged) = hook.charge(self, stream, request)? {
                return Ok(Some(charged));
            }
        }
        Ok(None)
    }

    /// Allocates a block from a feature, if the request belongs there. The request has been
    /// checked.
    pub(crate) fn allocate_from_feature(
        &self,
        stream: &Stream,
        request: Request,
    ) -> Result<Option<Block>> {
        for hook in self.hooks() {
            if let Some(block) = hook.allocate(self, stream, request)? {
                return Ok(Some(block));
            }
        }
        Ok(None)
    }

    /// Returns the last feature, if it has a reason for the full path and no other has: there is no
    /// other to be asked, and no limit of a tag.
    #[inline]
    pub(crate) fn only_hook(&self) -> Option<&dyn PoolHook> {
        let is_alone = self.full_path_reasons.load(Ordering::Relaxed) == LAST_HOOK;
        if is_alone { self.last_hook.get().map(|hook| &**hook) } else { None }
    }

    /// Returns what tags hold outside of the caches.
    pub(crate) fn holdings_beside_caches(&self) -> Vec<Holding> {
        let mut all = self.dedicated.holdings();
        self.hooks().for_each(|hook| all.extend(hook.holdings()));
        all
    }
}

impl fmt::Debug for PoolCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolCore").field("device", &self.info.device).finish_non_exhaustive()
    }
}
