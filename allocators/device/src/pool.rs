//! The caching pool of one device.

mod raw;
mod stats;

use crate::{
    Adoption, Block, DeviceBuffer, Finding, LeakReport, Log, PoolConfig, Request, Resource,
    base::{
        address_directory::{AddressDirectory, DIRECT_CACHES},
        driver::{check_stream_device, notify_observer},
        extent::BlockExtent,
        live_blocks::{CommittedBytes, LiveBlockList},
    },
    checked::{BlockSource, CheckedPool},
    dedicated::DedicatedPool,
    direct::Direct,
    environment::Environment,
    graphs::Announcements,
    park::ParkablePools,
    physical::{Physical, mapped::Mapped, segments::Segments},
    request::ValidateRequest,
    retention::Retention,
    sharing_policy::SharingPolicy,
    slow_path::Counters,
    stream_cache::{BlockToken, CacheHost, StreamCache, close::sweep_released, recycle::IdleCache},
    tenants::LiveLimits,
};
use aquifer_core::{
    Action, Budget, DeviceId, MemoryError, Opaque, PoolStats, Recorder, Reservation, Result, Tag,
    budget::HookRegistration,
    event::{self, EventTicket},
    scratch::{Bump, List, Scratch, list},
};
use aquifer_driver::{DeviceInfo, DeviceRange, Driver, Ownership, site};
use aquifer_heap::Heap;
use aquifer_stream::{Stream, StreamPool, Timeline};
use bytemuck::Pod;
use std::{
    fmt, iter,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

/// Keys under which pools attach their caches to streams. A key is never reused.
static NEXT_KEY: AtomicU64 = AtomicU64::new(1);

/// Device memory in per-stream caches, over physical memory that moves between the caches.
///
/// Clones share the pool. The last clone closes it when it is dropped. Blocks may outlive the pool
/// and stay valid. The last of them releases what is left.
///
/// ```
/// use aquifer_device::{DevicePool, PoolConfig, Request};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let block = pool.alloc(&stream, Request::bytes(1 << 20))?;
/// assert_eq!(pool.stats().requested, 1 << 20);
/// drop(block);                                             // no driver call, no wait
/// assert_eq!(pool.stats().requested, 0);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
///
/// The pool is no allocator for collections, whose elements the host reads and writes:
///
/// ```compile_fail,E0277
/// # use aquifer_device::DevicePool;
/// fn on_the_device(pool: DevicePool) -> allocator_api2::vec::Vec<u8, DevicePool> {
///     allocator_api2::vec::Vec::new_in(pool)
/// }
/// ```
#[derive(Clone)]
pub struct DevicePool {
    handle: Arc<PoolHandle>,
}

/// Closes the pool when the last [`DevicePool`] is dropped.
struct PoolHandle {
    core: Arc<PoolCore>,
    /// The source line that opened the pool, reported as the site of what its end does.
    opened_at: &'static Location<'static>,
    /// The allocation path instead of the caches, if any. It may own a reference to `PoolCore`, so
    /// `PoolCore` must not own it.
    alloc_path: Option<AllocPath>,
}

/// An allocation path other than the streams' caches alone.
enum AllocPath {
    /// Each block is an allocation of its own.
    Direct(Arc<dyn Resource>),
    /// Blocks are checked.
    Checked(Arc<CheckedPool>),
}

/// The shared core of a pool.
pub(crate) struct PoolCore {
    key: u64,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) info: DeviceInfo,
    streams: StreamPool,
    pub(crate) physical: Box<dyn Physical>,
    pub(crate) budget: Budget,
    /// Dedicated memory: stable blocks and reserved elements.
    pub(crate) dedicated: Arc<DedicatedPool>,
    /// Pools of memory that can be parked.
    pub(crate) parkables: ParkablePools,
    pub(crate) config: PoolConfig,
    /// All caches of the pool, also idle ones.
    caches: RwLock<Vec<&'static StreamCache>>,
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
    /// Number of reasons to take the slow allocation path: another source of blocks, an observer
    /// or recorder, the limit of a tag, announced captures.
    slow_reasons: AtomicU32,
    /// Announced captures, which allocate from memory of graphs.
    pub(crate) announcements: Announcements,
    pub(crate) tenants: LiveLimits,
    generations: AtomicU64,
    pub(crate) counters: Counters,
    pub(crate) sharing_policy: SharingPolicy,
    pub(crate) retention: Retention,
    /// The source of blocks in bypass mode, without its wrapper.
    bypass: Option<Direct>,
    /// The quarantine, which releases its blocks before reclaim from others. It owns a reference
    /// to the pool.
    pub(crate) quarantine: OnceLock<Weak<CheckedPool>>,
    /// Live blocks that come from elsewhere than the caches, listed if leaks are reported.
    listing: OnceLock<Arc<LiveBlockList>>,
    /// The pool's registration as a reclaimer.
    pub(crate) registration: OnceLock<HookRegistration>,
}

impl DevicePool {
    /// Opens a pool on `device`. Reserves addresses on devices with virtual memory. Takes no memory
    /// but the [warm reserve](PoolConfig::warm_reserve).
    ///
    /// # Errors
    /// - [`MemoryError::BadSetting`] for a budget of 0 bytes, a handle size that is not a power of
    ///   two, a reserve above the budget or the release threshold, an invalid environment variable,
    ///   and for debugging or a reserve that bypass excludes.
    /// - [`MemoryError::Unsupported`] for an export or a retention that the device does not
    ///   support.
    /// - Those of [`DevicePool::warm`], and the driver's.
    #[track_caller]
    pub fn open(driver: Arc<dyn Driver>, device: DeviceId, mut config: PoolConfig) -> Result<Self> {
        sweep_released();
        let _site = site::enter();
        let environment = Environment::read()?;
        config.bypass |= environment.bypass;
        config.recorder = Recorder::with_environment(config.recorder)?;
        config.debug = config.debug.or(environment.debug);
        if config.bypass {
            config.debug.beside_bypass()?;
        }
        let debug = config.debug.clone();
        let driver_error = |e| MemoryError::driver(device, e);
        let info = driver.device_info(device).map_err(driver_error)?;
        if let Some(feature) = info.export_types.missing(config.export) {
            return Err(MemoryError::Unsupported { feature });
        }
        let budget = match &config.budget {
            Some(budget) => budget.clone(),
            None => Budget::new(
                device.name(),
                driver.memory_info(device).map_err(driver_error)?.free / 5 * 4,
            ),
        };
        if budget.limit() == 0 {
            let (name, value) = ("budget", "0".to_owned());
            return Err(MemoryError::BadSetting {
                name,
                value,
                expected: "a number of bytes above zero",
            });
        }
        let maps = info.virtual_memory && info.granularity > 0;
        config.check_retention(budget.limit(), maps)?;
        let accessors = config.accessors(&*driver, device, maps)?;
        let physical: Box<dyn Physical> = if maps {
            let slot = config.handle_bytes.max(1).div_ceil(info.granularity) * info.granularity;
            if !slot.is_power_of_two() {
                let (name, value) = ("handle_bytes", config.handle_bytes.to_string());
                return Err(MemoryError::BadSetting {
                    name,
                    value,
                    expected: "0 or a power of two",
                });
            }
            let fixed = config.handle_bytes > 0;
            Box::new(Mapped::open(
                &driver,
                accessors.clone(),
                info.memory,
                slot,
                fixed,
                config.compact,
                budget.clone(),
            )?)
        } else {
            Box::new(Segments::new(&driver, device, budget.clone()))
        };
        let streams = StreamPool::new(driver.clone(), device, config.streams);
        let bypass = config
            .bypass
            .then(|| Direct::new(driver.clone(), streams.clone(), Some(budget.clone())));
        let direct = bypass.clone().map(|direct| match &config.recorder {
            Some(recorder) => Arc::new(Log::new(direct, recorder.clone())) as Arc<dyn Resource>,
            None => Arc::new(direct),
        });
        let dedicated = DedicatedPool::new(&driver, &info, &config, accessors);
        let observed = driver.observer().is_some();
        let quick = direct.is_none() && !debug.is_on() && !observed && config.recorder.is_none();
        let sharing = physical.is_mapped() && config.adoption != Adoption::Never;
        let sharing_policy = SharingPolicy::new(sharing);
        let retention = Retention::new(config.release_threshold, config.stream_cache);
        let warm = config.warm_reserve;
        let core = Arc::new(PoolCore {
            key: NEXT_KEY.fetch_add(1, Ordering::Relaxed),
            driver,
            info,
            streams,
            physical,
            dedicated,
            parkables: ParkablePools::default(),
            budget,
            config,
            caches: RwLock::default(),
            scratch: Scratch::new(),
            idle_caches: Mutex::default(),
            numbered_caches: iter::repeat_with(OnceLock::new).take(DIRECT_CACHES).collect(),
            directory: Arc::default(),
            observed,
            slow_reasons: AtomicU32::new(u32::from(!quick)),
            announcements: Announcements::default(),
            tenants: LiveLimits::default(),
            generations: AtomicU64::new(1),
            counters: Counters::default(),
            sharing_policy,
            retention,
            bypass,
            quarantine: OnceLock::new(),
            listing: OnceLock::new(),
            registration: OnceLock::new(),
        });
        core.register();
        core.warm(warm)?;
        let alloc_path = if debug.is_on() {
            let PoolCore { driver, streams, config, .. } = &*core;
            let (driver, streams, recorder) =
                (driver.clone(), streams.clone(), config.recorder.clone());
            let (waits, wait) = (config.adoption == Adoption::Wait, config.wait);
            let source =
                direct.map_or_else(|| BlockSource::Pool(core.clone()), BlockSource::Direct);
            let checked = CheckedPool::new(source, debug, driver, streams, recorder, waits, wait)?;
            let _only_once = core.quarantine.set(Arc::downgrade(&checked));
            if let Some(listing) = checked.listing() {
                let _only_once = core.listing.set(listing.clone());
            }
            checked.register(&core.budget);
            Some(AllocPath::Checked(checked))
        } else {
            direct.map(AllocPath::Direct)
        };
        Ok(Self { handle: Arc::new(PoolHandle { core, opened_at: site::current(), alloc_path }) })
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<PoolCore> {
        &self.handle.core
    }

    pub(crate) fn checked(&self) -> Option<&Arc<CheckedPool>> {
        match &self.handle.alloc_path {
            Some(AllocPath::Checked(checked)) => Some(checked),
            _ => None,
        }
    }

    /// Leases a stream of this device.
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn stream(&self) -> Result<Stream> {
        self.core().streams.lease()
    }

    /// Returns the streams of this device.
    #[must_use]
    pub fn streams(&self) -> &StreamPool {
        &self.core().streams
    }

    /// Allocates a block for work queued on `stream` from now on.
    ///
    /// Makes no driver call if the stream's own cache has room. If not, a series of steps makes
    /// room, of which only the last block. See the crate's documentation.
    ///
    /// # Errors
    /// - [`MemoryError::ZeroSize`], [`MemoryError::TooLarge`], [`MemoryError::BadAlignment`] and
    ///   [`MemoryError::WrongDevice`] for an invalid request.
    /// - [`MemoryError::OutOfMemory`] if no step made room.
    /// - The driver's.
    #[track_caller]
    #[inline]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        if let Some(cache) = self.fast_cache(stream, &request)
            && let Some(block) = cache.fast_alloc(&request, Block::from_token)
        {
            return Ok(block);
        }
        self.alloc_slow(stream, request)
    }

    /// Returns the stream's cache if the fast path may serve the request from it.
    #[inline]
    pub(crate) fn fast_cache(
        &self,
        stream: &Stream,
        request: &Request,
    ) -> Option<&'static StreamCache> {
        let core = self.core();
        let quick = request.is_plain()
            && core.slow_reasons.load(Ordering::Relaxed) == 0
            && !core.sharing_policy.prefers_shared(request.size());
        if quick { core.known_cache(stream) } else { None }
    }

    /// Allocates on the full path: tags, graphs, debugging, bypass and the slow path.
    #[track_caller]
    #[inline(never)]
    fn alloc_slow(&self, stream: &Stream, request: Request) -> Result<Block> {
        let request = request.checked()?;
        let of_tag = self.core().charge_tag(stream, &request)?;
        let of_graph = self.core().allocate_for_graph(stream, request)?;
        let mut block = match (of_graph, &self.handle.alloc_path) {
            (Some(mut block), _) => {
                self.core().list_for_leaks(&mut block, None);
                block
            }
            (None, Some(alloc_path)) => {
                let _site = site::enter();
                alloc_path.allocate(stream, request, None)?
            }
            (None, None) => self.core().allocate(stream, request)?,
        };
        block.count_for_tag(of_tag);
        Ok(block)
    }

    /// Allocates as [`DevicePool::alloc`], and draws new memory from `held` before the budget.
    /// `held` goes down by the request's size in any case: what was not needed, since the cache had
    /// some memory, is returned to the budget.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]. `held` is then as before, except for what other threads drew.
    #[track_caller]
    pub fn alloc_reserved(
        &self,
        stream: &Stream,
        request: Request,
        held: &Mutex<Reservation>,
    ) -> Result<Block> {
        let request = request.checked()?;
        let of_tag = self.core().charge_tag(stream, &request)?;
        let of_graph = self.core().allocate_for_graph(stream, request)?;
        let mut block = match (of_graph, &self.handle.alloc_path) {
            (Some(mut block), _) => {
                self.core().list_for_leaks(&mut block, None);
                // A graph's memory is charged as it grows, so this releases the reservation to make
                // room for it.
                drop(held.lock().unwrap_or_else(PoisonError::into_inner).draw(request.size()));
                block
            }
            (None, Some(alloc_path)) => {
                let _site = site::enter();
                alloc_path.allocate(stream, request, Some(held))?
            }
            (None, None) => self.core().allocate_drawing(stream, request, held, request.size())?,
        };
        block.count_for_tag(of_tag);
        Ok(block)
    }

    /// Drops a block, or a value that holds one, and records the caller's line as the place of the
    /// free for [debugging](crate::Debugging). Otherwise equal to a plain drop.
    #[track_caller]
    pub fn free<T>(&self, held: T) {
        let _site = site::enter();
        drop(held);
    }

    /// Returns the findings of [debugging](crate::Debugging) so far: the first 1,024, in the order
    /// of their discovery. Never blocks.
    #[must_use]
    pub fn findings(&self) -> Vec<Finding> {
        self.checked().map(|checked| checked.findings()).unwrap_or_default()
    }

    /// Checks the guards of all live blocks and everything in quarantine. Returns the faults that
    /// were not reported before, or nothing if neither check is enabled. Blocks until the work
    /// queued on the blocks' own streams is done. What other streams write at the same time is
    /// found when the live block is freed.
    ///
    /// # Errors
    /// The driver's, if blocks cannot be read back. Earlier findings stay in
    /// [`DevicePool::findings`].
    #[track_caller]
    pub fn check(&self) -> Result<Vec<Finding>> {
        let _site = site::enter();
        self.checked().map_or_else(|| Ok(Vec::new()), |checked| checked.check())
    }

    /// Returns the live blocks by the source lines that allocated them, or `None` unless
    /// [`leaks`](crate::Debugging::leaks) is enabled. Never blocks.
    #[must_use]
    pub fn leaks(&self) -> Option<LeakReport> {
        self.checked()?.leaks()
    }

    /// Allocates a buffer of `len` elements for work queued on `stream` from now on.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new_in(self, stream, len)
    }

    /// Polls queued work, frees pending blocks whose last use is over, and drops what was [kept
    /// until then](aquifer_core::OpaqueBlock::keep_until_free). Only slow paths and trims do so
    /// otherwise, since a free makes no driver call. Gives no cached memory back, and never blocks.
    /// With [debugging](crate::Debugging) it waits as [`DevicePool::trim`] does.
    ///
    /// ```
    /// use aquifer_core::OpaqueBlock;
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{Access, DeviceId, sim::Sim};
    /// use std::sync::Arc;
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let (s, u) = (pool.stream()?, pool.stream()?);
    /// let (mut block, kept) = (pool.alloc(&s, Request::bytes(4096))?, Arc::new(()));
    /// block.keep_until_free(Box::new(kept.clone()));
    /// block.prepare(&u, Access::Read)?.finish()?;
    /// drop(block);                                // `u` may still use it
    /// u.synchronize()?;
    /// pool.poll()?;
    /// assert_eq!(Arc::strong_count(&kept), 1);
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// The driver's.
    #[track_caller]
    pub fn poll(&self) -> Result<()> {
        let _site = site::enter();
        match &self.handle.alloc_path {
            None => self.core().poll(),
            Some(AllocPath::Direct(direct)) => {
                self.core().poll()?;
                direct.trim(u64::MAX).map(drop)
            }
            Some(AllocPath::Checked(checked)) => checked.trim(self.core(), u64::MAX).map(drop),
        }
    }

    /// Gives free memory back to the driver until at most `keep` bytes are held, or the [release
    /// threshold](PoolConfig::release_threshold) if that is less. Returns the bytes given back. The
    /// [warm reserve](DevicePool::warm) and memory whose work is not done are left.
    ///
    /// Waits for the device if memory is left of streams whose work nothing else can prove done,
    /// such as the default streams of threads that have ended. With [debugging](crate::Debugging)
    /// it also waits for blocks that are to be read.
    ///
    /// # Errors
    /// The driver's, also if it refuses to release unmapped memory: that memory stays charged, and
    /// the next trim tries again. What was given back before the error stays given back.
    #[track_caller]
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let _site = site::enter();
        match &self.handle.alloc_path {
            None => self.core().trim(keep),
            Some(AllocPath::Direct(direct)) => self.core().trim_with(&**direct, keep),
            Some(AllocPath::Checked(checked)) => checked.trim(self.core(), keep),
        }
    }

    /// Returns the budget that physical memory is charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.core().budget
    }

    /// Returns the device of this pool.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.core().info.device
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.core().info
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.core().driver
    }
}

impl Opaque for DevicePool {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.alloc(stream, request)
    }
    fn stats(&self) -> PoolStats {
        self.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.trim(keep)
    }
}

impl PoolCore {
    /// Returns the streams of the device.
    pub(crate) fn streams(&self) -> &StreamPool {
        &self.streams
    }

    /// Returns the budget that physical memory is charged to.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Registers a reason to take the slow allocation path.
    pub(crate) fn add_slow_reason(&self) {
        self.slow_reasons.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a reason that was registered by [`PoolCore::add_slow_reason`].
    pub(crate) fn remove_slow_reason(&self) {
        self.slow_reasons.fetch_sub(1, Ordering::Relaxed);
    }

    /// Allocates a block from the stream's cache, or on the slow path. The request has been
    /// checked.
    #[track_caller]
    #[inline]
    pub(crate) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        let cache = self.cache_for(stream)?;
        match self.try_cache(cache, &request) {
            Some(block) => Ok(block),
            None => {
                let _site = site::enter();
                self.allocate_slow(cache, &request, None)
            }
        }
    }

    /// As [`PoolCore::allocate`], and draws new memory from `held` first, which goes down by
    /// `bytes` or more.
    #[track_caller]
    pub(crate) fn allocate_drawing(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        held: &Mutex<Reservation>,
        bytes: u64,
    ) -> Result<Block> {
        let remaining = || held.lock().unwrap_or_else(PoisonError::into_inner).remaining();
        let before = remaining();
        let cache = self.cache_for(stream)?;
        let block = match self.try_cache(cache, &request) {
            Some(block) => block,
            None => {
                let _site = site::enter();
                self.allocate_slow(cache, &request, Some(held))?
            }
        };
        let drawn = before.saturating_sub(remaining());
        let unused = bytes.saturating_sub(drawn).min(remaining());
        drop(held.lock().unwrap_or_else(PoisonError::into_inner).draw(unused));
        Ok(block)
    }

    /// Allocates from a stream's cache, and reports the block to the recorder and the observer.
    /// Returns `None` if the cache has no room, or if the request is to be served from the ranges
    /// that streams share.
    pub(crate) fn try_cache(
        &self,
        cache: &'static StreamCache,
        request: &Request,
    ) -> Option<Block> {
        if self.sharing_policy.prefers_shared(request.size()) {
            return None;
        }
        let (token, ticket) = cache.fast_alloc(request, |token| (*token, self.ticket()))?;
        Some(self.make_block(cache, &token, ticket))
    }

    /// Returns the cache of a stream, and creates it at its first use.
    fn cache_for(self: &Arc<Self>, stream: &Stream) -> Result<&'static StreamCache> {
        match self.known_cache(stream) {
            Some(cache) => Ok(cache),
            None => self.open_cache(stream),
        }
    }

    /// Returns the cache of a stream that has one already.
    #[inline]
    fn known_cache(&self, stream: &Stream) -> Option<&'static StreamCache> {
        let number = stream.timeline().attachment(self.key)? as usize;
        self.numbered_cache(number).or_else(|| self.cache_beyond_table(number))
    }

    /// Returns the cache of this number, if the directory has its number.
    #[inline]
    pub(crate) fn numbered_cache(&self, number: usize) -> Option<&'static StreamCache> {
        self.numbered_caches.get(number)?.get().copied()
    }

    /// Returns a cache whose number exceeds the directory. The list is ordered by number.
    #[cold]
    fn cache_beyond_table(&self, number: usize) -> Option<&'static StreamCache> {
        self.caches.read().unwrap_or_else(PoisonError::into_inner).get(number).copied()
    }

    /// Gives free memory back in bypass mode: the pool's own, and then that of `direct`.
    pub(crate) fn trim_with(&self, direct: &dyn Resource, keep: u64) -> Result<u64> {
        // Dedicated memory comes from the pool itself in any case.
        let gone = self.trim(keep)?;
        let keep = keep.saturating_sub(self.dedicated.held().now());
        Ok(gone + direct.trim(keep)?)
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

    /// Returns the source of blocks in bypass mode.
    pub(crate) fn bypass(&self) -> Option<&Direct> {
        self.bypass.as_ref()
    }

    #[cold]
    fn open_cache(self: &Arc<Self>, stream: &Stream) -> Result<&'static StreamCache> {
        check_stream_device(&*self.driver, self.info.device, stream.timeline())?;
        self.recycle_caches();
        // The lock prevents two threads from creating a cache for one stream. No driver call is
        // made under it.
        let mut caches = self.caches.write().unwrap_or_else(PoisonError::into_inner);
        let known = stream.timeline().attachment(self.key);
        if let Some(&cache) = known.and_then(|number| caches.get(number as usize)) {
            return Ok(cache);
        }
        let (cache, number) = match self.idle_caches().pop() {
            Some(idle) => {
                let number = idle.number;
                (idle.bind(self.clone(), self.directory.clone(), stream.timeline()), number)
            }
            None => {
                // Caches leave the list only when the pool closes, and none is created then, so a
                // number is never reused.
                let number = caches.len();
                let (pool, directory) = (self.clone(), self.directory.clone());
                let cache = StreamCache::open(pool, directory, stream.timeline().clone(), number);
                if let Some(slot) = self.numbered_caches.get(number) {
                    let _only_once = slot.set(cache);
                }
                caches.push(cache);
                (cache, number)
            }
        };
        stream.timeline().attach(self.key, number as u32);
        Ok(cache)
    }

    pub(crate) fn idle_caches(&self) -> MutexGuard<'_, Vec<IdleCache>> {
        self.idle_caches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists all caches of the pool.
    pub(crate) fn caches<'s>(&self, bump: &'s Bump) -> List<'s, &'static StreamCache> {
        list(bump, self.caches.read().unwrap_or_else(PoisonError::into_inner).iter().copied())
    }

    /// Makes a block from the token, and reports it to the observer and the recorder.
    pub(crate) fn make_block(
        &self,
        cache: &'static StreamCache,
        token: &BlockToken,
        ticket: Option<EventTicket>,
    ) -> Block {
        let mut block = Block::from_token(token);
        if self.observed {
            let generation = self.notify_live(cache, token);
            block.meta_mut().generation = generation;
        }
        if ticket.is_some() {
            let (stream, BlockExtent { address, request }) =
                (cache.timeline().number(), token.extent);
            self.report(ticket, Action::Allocate, stream, address, request.bytes(), request.tag());
        }
        block
    }

    #[cold]
    fn notify_live(&self, cache: &'static StreamCache, token: &BlockToken) -> u64 {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let stream = cache.timeline().raw();
        let address = token.extent.address;
        let bytes = cache.size_of(address, token.cache_ref.key);
        let range = DeviceRange { device: self.info.device, address, bytes };
        notify_observer(&self.driver, generation, range, Ownership::Live { stream, generation });
        generation
    }

    /// Takes a ticket in the order of events, if there is a recorder.
    #[inline]
    pub(crate) fn ticket(&self) -> Option<EventTicket> {
        self.config.recorder.as_deref().map(Recorder::ticket)
    }

    /// Records an event under its ticket, if there is one.
    #[inline]
    pub(crate) fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) {
        if let (Some(ticket), Some(recorder)) = (ticket, &self.config.recorder) {
            let place = event::MemoryLocation::Device(self.info.device);
            recorder.record(ticket, recorder.event(action, place, stream, address, bytes, tag));
        }
    }

    /// Records an event that concerns no block.
    pub(crate) fn report_pool(&self, action: Action, bytes: u64, tag: Tag) {
        if let Some(recorder) = &self.config.recorder {
            let event = recorder.event(
                action,
                event::MemoryLocation::Device(self.info.device),
                0,
                0,
                bytes,
                tag,
            );
            recorder.record(recorder.ticket(), event);
        }
    }

    /// Returns the bytes held from the driver.
    pub(crate) fn held(&self) -> u64 {
        self.physical.held().now() + self.dedicated.held().now()
    }

    fn unregister_cache(&self, cache: &'static StreamCache) {
        self.caches
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !std::ptr::eq(*other, cache));
    }
}

impl CacheHost for PoolCore {
    fn streams(&self) -> &StreamPool {
        &self.streams
    }

    fn is_recorded(&self) -> bool {
        self.config.recorder.is_some()
    }

    fn ticket(&self) -> Option<EventTicket> {
        self.ticket()
    }

    fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        extent: &BlockExtent,
    ) {
        let BlockExtent { address, request } = extent;
        self.report(ticket, action, stream, *address, request.bytes(), request.tag());
    }

    fn count_completion(&self) {
        self.dedicated.count_completion();
    }

    fn reclaim_cache(&self, cache: &'static StreamCache, timeline: &Timeline, heap: &Heap) {
        timeline.detach(self.key);
        self.unregister_cache(cache);
        self.physical.take_back(&mut heap.free_extents().map(|e| e.range));
    }

    fn leak_cache(&self, cache: &'static StreamCache, timeline: &Timeline) {
        self.physical.leak();
        timeline.detach(self.key);
        self.unregister_cache(cache);
    }
}

impl AllocPath {
    #[track_caller]
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        match self {
            Self::Direct(direct) => {
                BlockSource::draw_and_allocate(direct, stream, request, drawn, request.size())
            }
            Self::Checked(checked) => checked.allocate(stream, request, drawn),
        }
    }
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        let _site = site::enter_or(self.opened_at);
        if let Some(AllocPath::Checked(checked)) = &self.alloc_path {
            checked.close();
        }
        let pass = self.core.scratch.begin();
        let host: Arc<dyn CacheHost> = self.core.clone();
        for cache in self.core.caches(&pass) {
            cache.close(&host);
        }
        let idle = std::mem::take(&mut *self.core.idle_caches());
        for idle in idle {
            self.core.unregister_cache(idle.cache);
            idle.retire();
        }
        sweep_released();
        self.core.dedicated.reap_nonblocking();
        if let Some(recorder) = &self.core.config.recorder {
            recorder.flush();
        }
    }
}

impl fmt::Debug for DevicePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePool")
            .field("device", &self.device())
            .field("budget", self.budget())
            .field("physical", &self.core().physical)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for PoolCore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolCore").field("device", &self.info.device).finish_non_exhaustive()
    }
}
