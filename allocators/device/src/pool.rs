//! The caching pool of one device.
//!
//! - Fast path: [`DevicePool::alloc`], `PoolCore::fast_cache`, `StreamCache::fast_alloc`, the heap.
//!   It takes the lock of the stream's cache and no other.
//! - Full path: `DevicePool::alloc_full` asks the features, then the checks if there are any, or
//!   [`PoolCore`]: the cache again, and the slow path if it has no room.
//!
//! `guide/inside/device_pool.md` follows one allocation step by step.

mod give_way;
mod raw;

use crate::{
    Block, DeviceBuffer, Finding, LeakReport, PoolConfig, Request,
    base::waits::begin_request,
    checked::CheckedPool,
    environment::Environment,
    mapped_memory::MappedMemory,
    planned,
    pool_core::{PoolCore, allocate::draw},
    request::MAX_BYTES,
    sharing_policy::held_parts,
    stream_cache::{CacheHost, close::retry_teardowns},
};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Opaque, PoolStats, Recorder, Reservation, Result, Tag,
    budget::Holding,
};
use aquifer_driver::{DeviceInfo, Driver, site};
use aquifer_stream::{Stream, StreamPool};
use bytemuck::Pod;
use std::{
    fmt,
    panic::Location,
    sync::{Arc, Mutex},
};

/// Device memory in per-stream caches, over physical memory that moves between the caches.
///
/// Clones share the pool. The last clone closes it when it is dropped. Blocks may outlive the pool
/// and stay valid. The last of them releases what is left.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let block = pool.alloc(&stream, Request::bytes(1 << 20))?;
/// assert_eq!(pool.stats().requested, 1 << 20);
/// drop(block);                                             // no driver call, no wait
/// assert_eq!(pool.stats().requested, 0);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// The pool is no allocator for collections, whose elements the host reads and writes:
///
/// ```compile_fail,E0277
/// # use aquifer::DevicePool;
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
    /// The checks of blocks, if any. They own a reference to `PoolCore`, so it must not own them.
    checked: Option<Arc<CheckedPool>>,
}

impl DevicePool {
    /// Opens a pool on `device`. Reserves addresses on devices with virtual memory. Takes no memory
    /// but the [warm reserve](PoolConfig::warm_reserve) and the range of a
    /// [plan](PoolConfig::plan).
    ///
    /// # Errors
    /// - [`MemoryError::BadSetting`] for a budget of 0 bytes, a handle size that is not a power of
    ///   two, a reserve above the budget or the release threshold, an invalid environment variable,
    ///   and for debugging or a reserve that bypass excludes.
    /// - [`MemoryError::Unsupported`] for an export or a retention that the device does not
    ///   support.
    /// - [`MemoryError::BadSetting`] for a [plan](PoolConfig::plan) that cannot be read, or beside
    ///   debugging or bypass; [`MemoryError::OutOfMemory`] if its range does not fit.
    /// - Those of [`DevicePool::warm`], and the driver's.
    #[track_caller]
    pub fn open(driver: Arc<dyn Driver>, device: DeviceId, mut config: PoolConfig) -> Result<Self> {
        retry_teardowns();
        let _site = site::enter();
        let environment = Environment::read()?;
        aquifer_status::start()?;
        config.bypass |= environment.bypass;
        config.recorder = Recorder::with_environment(config.recorder)?;
        config.debug = config.debug.or(environment.debug);
        if config.bypass {
            config.debug.beside_bypass()?;
        }
        let mut plan_setting = "plan";
        if config.plan.is_none() && config.loaded_plan.is_none() && environment.plan.is_some() {
            (config.plan, plan_setting) = (environment.plan, "AQUIFER_PLAN");
        }
        let plan = planned::load(&mut config, plan_setting)?;
        let debug = config.debug.clone();
        let driver_error = |e| MemoryError::driver(device, e);
        let mut info = driver.device_info(device).map_err(driver_error)?;
        // Addresses for several times as many bytes are reserved. No device has more.
        info.memory = info.memory.min(MAX_BYTES);
        if let Some(feature) = info.export_types.missing(config.export) {
            return Err(MemoryError::Unsupported { feature });
        }
        let budget = match &config.budget {
            Some(budget) => budget.clone(),
            None => Budget::new(
                device.to_string(),
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
        config.check_slack()?;
        config.check_retention(budget.limit(), maps)?;
        let slot = config.slot(&info)?;
        let accessors = config.accessors(&*driver, device, maps)?;
        let memory = MappedMemory::open(
            &driver,
            accessors.clone(),
            info.memory,
            slot,
            (config.handle_bytes == 0).then(|| held_parts(config.slack)),
            config.default_export(info.export_types),
            budget.clone(),
        )?;
        // Where nothing can be mapped, each block is an allocation of its own.
        config.bypass |= !maps;
        let warm = config.warm_reserve;
        let core = PoolCore::new(driver, info, budget, config, memory, accessors);
        core.register();
        core.release_after_synchronize();
        if let Some(plan) = plan {
            planned::open(&core, plan)?;
        }
        core.warm(warm)?;
        let checked = if debug.is_on() {
            let checked = CheckedPool::new(&core, debug)?;
            if let Some(listing) = checked.listing() {
                let _only_once = core.listing.set(listing.clone());
            }
            checked.register();
            Some(checked)
        } else {
            None
        };
        core.publish();
        Ok(Self { handle: Arc::new(PoolHandle { core, opened_at: site::current(), checked }) })
    }

    #[inline]
    pub(crate) fn core(&self) -> &Arc<PoolCore> {
        &self.handle.core
    }

    pub(crate) fn checked(&self) -> Option<&Arc<CheckedPool>> {
        self.handle.checked.as_ref()
    }

    /// Leases a stream of this device.
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn stream(&self) -> Result<Stream> {
        self.core().streams().lease()
    }

    /// Returns the streams of this device.
    #[must_use]
    pub fn streams(&self) -> &StreamPool {
        self.core().streams()
    }

    /// Allocates a block for work queued on `stream` from now on.
    ///
    /// Makes no driver call if the stream's own cache serves the request. If not, a series of steps
    /// makes room. Of these, the reclaim from others, the waits for queued work, and the wait for
    /// other threads' transfers may block. See the crate's documentation.
    ///
    /// A request for no bytes gets an empty block, which takes no memory: see [`Block`].
    ///
    /// # Errors
    /// - [`MemoryError::TooLarge`], [`MemoryError::BadAlignment`] and [`MemoryError::WrongDevice`]
    ///   for an invalid request. Only more than 2⁶³ − 1 bytes are too large.
    /// - [`MemoryError::OutOfMemory`] if no step made room, or if the device has less memory.
    /// - The driver's.
    #[track_caller]
    #[inline]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        let cache = self.core().fast_cache(stream, &request);
        match cache.and_then(|cache| cache.fast_alloc(&request, Block::from_token)) {
            Some(block) => Ok(block),
            None => self.alloc_full(stream, request),
        }
    }

    /// Allocates on the full path: tags, graphs, debugging, bypass and the slow path.
    #[track_caller]
    #[inline(never)]
    fn alloc_full(&self, stream: &Stream, request: Request) -> Result<Block> {
        let _site = self.core().enter_observed();
        if request.size() == 0 {
            return Block::empty(self.streams(), stream, request.owner());
        }
        let request = self.core().checked(request)?;
        if let Some(hook) = self.core().only_hook() {
            return match hook.allocate(self.core(), stream, request)? {
                Some(block) => Ok(block),
                None => {
                    let _request = begin_request();
                    self.core().allocate(stream, request)
                }
            };
        }
        self.alloc_drawing(stream, request, None)
    }

    /// Allocates a valid request, and draws new memory from `drawn` first.
    #[track_caller]
    fn alloc_drawing(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        let core = self.core();
        // One deadline for the tag's limit and for the pool.
        let _request = begin_request();
        let of_tag = core.charge_tag(stream, &request)?;
        let mut block = match (core.allocate_from_feature(stream, request)?, self.checked()) {
            (Some(mut block), _) => {
                core.list_for_leaks(&mut block, None);
                // This memory is charged as it grows, so this releases the reservation to make
                // room for it.
                draw(drawn, request.size());
                block
            }
            (None, Some(checked)) => {
                let _site = site::enter();
                checked.allocate(stream, request, drawn)?
            }
            (None, None) => {
                let _site = core.config.bypass.then(site::enter);
                core.allocate_unchecked(stream, request, drawn, request.size())?
            }
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
        let _site = self.core().enter_observed();
        if request.size() == 0 {
            return Block::empty(self.streams(), stream, request.owner());
        }
        let request = self.core().checked(request)?;
        self.alloc_drawing(stream, request, Some(held))
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

    /// Checks the guards of all live blocks and of freed ones that were not checked yet. Returns
    /// the faults that were not reported before, or nothing without
    /// [`canaries`](crate::Debugging::canaries). Blocks until the work queued on the blocks' own
    /// streams is done. What other streams write at the same time is found when the live block is
    /// freed.
    ///
    /// # Errors
    /// The driver's, if blocks cannot be read back. Earlier findings stay in
    /// [`DevicePool::findings`].
    #[track_caller]
    pub fn check(&self) -> Result<Vec<Finding>> {
        let _site = site::enter();
        self.checked().map_or_else(|| Ok(Vec::new()), |checked| checked.check())
    }

    /// Checks the invariants of the pool's own structures, for fuzzing. Called while no other thread
    /// uses the pool.
    ///
    /// # Panics
    /// If one does not hold: a bug of this library.
    #[doc(hidden)]
    pub fn check_invariants(&self) {
        self.core().memory.check();
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
    /// otherwise, since a free makes no driver call. Of idle memory, gives back what exceeds the
    /// [release threshold](PoolConfig::release_threshold). Never blocks.
    /// With [debugging](crate::Debugging) it waits as [`DevicePool::trim`] does.
    ///
    /// ```
    /// use aquifer::{
    ///     Access, DeviceId, DevicePool, PoolConfig, Request, device::OpaqueBlock, sim::Sim,
    /// };
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
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// The driver's.
    #[track_caller]
    pub fn poll(&self) -> Result<()> {
        let _site = site::enter();
        let polled = self.poll_sources();
        self.core().enforce_threshold();
        self.core().publish();
        polled
    }

    fn poll_sources(&self) -> Result<()> {
        if let Some(checked) = self.checked() {
            return checked.trim(u64::MAX).map(drop);
        }
        self.core().poll()
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
        let released = match self.checked() {
            None => self.core().trim(keep),
            Some(checked) => checked.trim(keep),
        };
        self.core().publish();
        released
    }

    /// Takes memory from the driver and maps it (`cuMemCreate`, `cuMemMap`, `cuMemSetAccess`) until
    /// the caches hold `bytes`, rounded up to handles. The first stream that needs it gets it.
    /// Returns the bytes taken. Blocks only for the driver's own time.
    ///
    /// From now on neither a trim nor the [release threshold](crate::PoolConfig::release_threshold)
    /// releases memory below `bytes` in the caches, in use or idle. This replaces an earlier value,
    /// and 0 removes the reserve. Only these may take it: a request of this pool, for a block or
    /// for stable or reserved memory, for which no other room can be made; another pool under the
    /// same budget; and closing the pool. It is not refilled automatically.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, driver::Call, sim::Sim};
    /// let sim = Sim::h200(1);
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// pool.warm(1 << 30)?;
    /// let made = sim.driver().calls().get(Call::HandleCreate);
    /// let block = pool.alloc(&pool.stream()?, Request::bytes(1 << 30))?;
    /// assert_eq!(sim.driver().calls().get(Call::HandleCreate), made);
    /// drop(block);
    /// pool.trim(0)?;
    /// assert_eq!(pool.stats().physical, 1 << 30);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices without virtual memory mapping, and in bypass mode;
    /// [`MemoryError::OutOfMemory`]; the driver's. In each case the pool holds as much as before,
    /// and the reserve is unchanged.
    #[track_caller]
    pub fn warm(&self, bytes: u64) -> Result<u64> {
        let _site = site::enter();
        let taken = self.core().warm(bytes);
        self.core().publish();
        taken
    }

    /// Returns the bytes held from the driver now, as [`PoolStats::physical`], without a walk over
    /// the caches.
    #[inline]
    #[must_use]
    pub fn physical(&self) -> u64 {
        self.core().held()
    }

    /// Returns the bytes that live blocks of this tag hold in this pool. Walks all caches. Never
    /// waits for the driver.
    #[must_use]
    pub fn held_by(&self, tag: Tag) -> u64 {
        let core = self.core();
        let of = |holding: &Holding| if holding.tag == tag { holding.bytes } else { 0 };
        let pass = core.scratch.begin();
        let cached: u64 = core
            .caches(&pass)
            .iter()
            .map(|cache| cache.with(|s| s.holdings().map(|h| of(&h)).sum::<u64>()))
            .sum();
        cached + core.holdings_beside_caches().iter().map(of).sum::<u64>()
    }

    /// Returns the pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let mut stats = self.core().stats();
        if let Some(checked) = self.checked() {
            checked.count_freed(&mut stats);
        }
        self.core().publish();
        stats
    }

    /// Sets the peaks of [`DevicePool::stats`] to what is held now. Never waits for the driver.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// drop(pool.alloc(&pool.stream()?, Request::bytes(4096))?);
    /// assert_eq!(pool.stats().peak_requested, 4096);
    /// pool.reset_peaks();
    /// assert_eq!(pool.stats().peak_requested, 0);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    pub fn reset_peaks(&self) {
        let core = self.core();
        core.peaks.reset();
        core.memory.held().reset_peak_of_pool();
        core.publish();
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

impl Drop for PoolHandle {
    fn drop(&mut self) {
        let _site = site::enter_or(self.opened_at);
        if let Some(checked) = &self.checked {
            checked.close();
        }
        self.core.hooks().for_each(|hook| hook.close());
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
        retry_teardowns();
        self.core.dedicated.reap_nonblocking();
        // Blocks may outlive the pool. It is shown until the last of them ends.
        self.core.publish();
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
            .field("physical", &self.core().memory)
            .finish_non_exhaustive()
    }
}
