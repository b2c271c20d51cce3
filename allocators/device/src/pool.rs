//! The caching pool of one device.

mod figures;

use crate::{
    Adoption, Block, DeviceBuffer, Finding, LeakReport, Log, PoolConfig, Request, Resource,
    apart::{Apart, Span},
    block::{Freed, Place},
    chain::Counters,
    checked::{Checked, Listing, Under},
    direct::Direct,
    environment::Environment,
    graphs::{self, Announcements},
    home::{Home, check_home, note, vacancy::Vacant},
    leasing::Leasing,
    park::Lodgings,
    physical::{Physical, mapped::Mapped, plain::Plain},
    raw::Directory,
    request::Sensible,
    retention::Retention,
    tenants::Tenants,
};
use aquifer_core::{
    Action, Budget, DeviceId, MemoryError, Opaque, PoolStats, Recorder, Reservation, Result, Tag,
    budget::Registration,
    event::{self, Ticket},
    scratch::{Bump, List, Scratch, list},
};
use aquifer_driver::{DeviceInfo, DeviceRange, Driver, Ownership, site};
use aquifer_heap::Heap;
use aquifer_stream::{Stream, StreamPool, Timeline};
use bytemuck::Pod;
use std::{
    cell::Cell,
    fmt,
    panic::Location,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

/// Keys under which pools attach their caches to streams. A key is never reused.
static KEYS: AtomicU64 = AtomicU64::new(1);

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
    handle: Arc<Closer>,
}

/// Closes the pool when the last [`DevicePool`] is dropped.
struct Closer {
    inner: Arc<Inner>,
    /// The source line that opened the pool, reported as the site of what its end does.
    opened_at: &'static Location<'static>,
    /// The allocation path instead of the caches, if any. It may own a reference to `Inner`, so
    /// `Inner` must not own it.
    detour: Option<Detour>,
}

/// An allocation path other than the streams' caches alone.
enum Detour {
    /// Each block is an allocation of its own.
    Direct(Arc<dyn Resource>),
    /// Blocks are checked.
    Checked(Arc<Checked>),
}

/// The shared core of a pool.
pub(crate) struct Inner {
    key: u64,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) info: DeviceInfo,
    streams: StreamPool,
    pub(crate) physical: Physical,
    pub(crate) budget: Budget,
    /// Dedicated memory: stable blocks and reserved elements.
    pub(crate) apart: Arc<Apart>,
    /// Pools of memory that can be parked.
    pub(crate) lodgings: Lodgings,
    pub(crate) config: PoolConfig,
    /// All caches of the pool, also idle ones.
    homes: RwLock<Vec<&'static Home>>,
    /// Scratch memory for lists of caches.
    pub(crate) scratch: Scratch,
    vacant: Mutex<Vec<Vacant>>,
    /// Finds the cache of a raw address.
    pub(crate) directory: Directory,
    /// Whether the driver has an observer, which needs the owner of each block.
    observed: bool,
    /// Number of reasons to take the slow allocation path: another source of blocks, an observer or
    /// recorder, the limit of a tag, announced captures.
    detours: AtomicU32,
    /// Announced captures, which allocate from memory of graphs.
    pub(crate) announcements: Announcements,
    pub(crate) tenants: Tenants,
    generations: AtomicU64,
    pub(crate) counters: Counters,
    pub(crate) leasing: Leasing,
    pub(crate) retention: Retention,
    /// The source of blocks in bypass mode, without its wrapper.
    bypass: Option<Direct>,
    /// The quarantine, which releases its blocks before reclaim from others. It owns a reference to
    /// the pool.
    pub(crate) quarantine: OnceLock<Weak<Checked>>,
    /// Live blocks that come from elsewhere than the caches, listed if leaks are reported.
    listing: OnceLock<Arc<Listing>>,
    /// The pool's registration as a reclaimer.
    pub(crate) registration: OnceLock<Registration>,
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
        graphs::sweep();
        let _site = site::enter();
        let environment = Environment::read()?;
        config.bypass |= environment.bypass;
        config.recorder = Recorder::with_environment(config.recorder)?;
        config.debug = config.debug.or(environment.debug);
        if config.bypass {
            config.debug.beside_bypass()?;
        }
        let debug = config.debug.clone();
        let lost = |e| MemoryError::driver(device, e);
        let info = driver.device_info(device).map_err(lost)?;
        if let Some(feature) = info.export_types.missing(config.export) {
            return Err(MemoryError::Unsupported { feature });
        }
        let budget = match &config.budget {
            Some(budget) => budget.clone(),
            None => {
                Budget::new(device.name(), driver.memory_info(device).map_err(lost)?.free / 5 * 4)
            }
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
        let reach = config.reach(&*driver, device, maps)?;
        let physical = if maps {
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
            Physical::Mapped(Mapped::open(
                &driver,
                reach.clone(),
                info.memory,
                slot,
                fixed,
                config.compact,
                budget.clone(),
            )?)
        } else {
            Physical::Plain(Plain::new(&driver, device, budget.clone()))
        };
        let streams = StreamPool::new(driver.clone(), device, config.streams);
        let bypass = config
            .bypass
            .then(|| Direct::new(driver.clone(), streams.clone(), Some(budget.clone())));
        let direct = bypass.clone().map(|direct| match &config.recorder {
            Some(recorder) => Arc::new(Log::new(direct, recorder.clone())) as Arc<dyn Resource>,
            None => Arc::new(direct),
        });
        let apart = Apart::new(&driver, &info, &config, reach);
        let observed = driver.observer().is_some();
        let quick = direct.is_none() && !debug.is_on() && !observed && config.recorder.is_none();
        let sharing = matches!(physical, Physical::Mapped(_)) && config.adoption != Adoption::Never;
        let leasing = Leasing::new(sharing);
        let retention = Retention::new(config.release_threshold, config.stream_cache);
        let warm = config.warm_reserve;
        let inner = Arc::new(Inner {
            key: KEYS.fetch_add(1, Ordering::Relaxed),
            driver,
            info,
            streams,
            physical,
            apart,
            lodgings: Lodgings::default(),
            budget,
            config,
            homes: RwLock::default(),
            scratch: Scratch::new(),
            vacant: Mutex::default(),
            directory: Directory::new(),
            observed,
            detours: AtomicU32::new(u32::from(!quick)),
            announcements: Announcements::default(),
            tenants: Tenants::default(),
            generations: AtomicU64::new(1),
            counters: Counters::default(),
            leasing,
            retention,
            bypass,
            quarantine: OnceLock::new(),
            listing: OnceLock::new(),
            registration: OnceLock::new(),
        });
        inner.register();
        inner.warm(warm)?;
        let detour = if debug.is_on() {
            let Inner { driver, streams, config, .. } = &*inner;
            let (driver, streams, recorder) =
                (driver.clone(), streams.clone(), config.recorder.clone());
            let (waits, wait) = (config.adoption == Adoption::Wait, config.wait);
            let under = direct.map_or_else(|| Under::Pool(inner.clone()), Under::Direct);
            let checked = Checked::new(under, debug, driver, streams, recorder, waits, wait)?;
            let _only_once = inner.quarantine.set(Arc::downgrade(&checked));
            if let Some(listing) = checked.listing() {
                let _only_once = inner.listing.set(listing.clone());
            }
            checked.register(&inner.budget);
            Some(Detour::Checked(checked))
        } else {
            direct.map(Detour::Direct)
        };
        Ok(Self { handle: Arc::new(Closer { inner, opened_at: site::current(), detour }) })
    }

    #[inline]
    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.handle.inner
    }

    pub(crate) fn checked(&self) -> Option<&Arc<Checked>> {
        match &self.handle.detour {
            Some(Detour::Checked(checked)) => Some(checked),
            _ => None,
        }
    }

    /// Leases a stream of this device.
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn stream(&self) -> Result<Stream> {
        self.inner().streams.lease()
    }

    /// Returns the streams of this device.
    #[must_use]
    pub fn streams(&self) -> &StreamPool {
        &self.inner().streams
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
        if let Some(home) = self.quick_home(stream, &request)
            && let Some(block) = home.quick_alloc(&request)
        {
            return Ok(block);
        }
        self.alloc_fully(stream, request)
    }

    /// Returns the stream's cache if the fast path may serve the request from it.
    #[inline]
    pub(crate) fn quick_home(&self, stream: &Stream, request: &Request) -> Option<&'static Home> {
        let inner = self.inner();
        let quick = request.is_plain()
            && inner.detours.load(Ordering::Relaxed) == 0
            && !inner.leasing.takes_over(request.size());
        if quick { inner.known_home(stream) } else { None }
    }

    /// Allocates on the full path: tags, graphs, debugging, bypass and the slow path.
    #[track_caller]
    #[inline(never)]
    fn alloc_fully(&self, stream: &Stream, request: Request) -> Result<Block> {
        let request = request.checked()?;
        let of_tag = self.inner().charge_tag(stream, &request)?;
        let of_graph = self.inner().allocate_for_graph(stream, request)?;
        let mut block = match (of_graph, &self.handle.detour) {
            (Some(mut block), _) => {
                self.inner().list(&mut block, None);
                block
            }
            (None, Some(detour)) => {
                let _site = site::enter();
                detour.allocate(stream, request, None)?
            }
            (None, None) => self.inner().allocate(stream, request)?,
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
        let of_tag = self.inner().charge_tag(stream, &request)?;
        let of_graph = self.inner().allocate_for_graph(stream, request)?;
        let mut block = match (of_graph, &self.handle.detour) {
            (Some(mut block), _) => {
                self.inner().list(&mut block, None);
                // A graph's memory is charged as it grows, so this releases the reservation to make
                // room for it.
                drop(held.lock().unwrap_or_else(PoisonError::into_inner).draw(request.size()));
                block
            }
            (None, Some(detour)) => {
                let _site = site::enter();
                detour.allocate(stream, request, Some(held))?
            }
            (None, None) => self.inner().allocate_drawing(stream, request, held, request.size())?,
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
        match &self.handle.detour {
            None => self.inner().poll(),
            Some(Detour::Direct(direct)) => {
                self.inner().poll()?;
                direct.trim(u64::MAX).map(drop)
            }
            Some(Detour::Checked(checked)) => checked.trim(self.inner(), u64::MAX).map(drop),
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
        match &self.handle.detour {
            None => self.inner().trim(keep),
            Some(Detour::Direct(direct)) => self.inner().trim_over(&**direct, keep),
            Some(Detour::Checked(checked)) => checked.trim(self.inner(), keep),
        }
    }

    /// Returns the budget that physical memory is charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.inner().budget
    }

    /// Returns the device of this pool.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.inner().info.device
    }

    /// Returns the properties of the device.
    #[must_use]
    pub fn info(&self) -> &DeviceInfo {
        &self.inner().info
    }

    /// Returns the driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner().driver
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

impl Inner {
    /// Returns the streams of the device.
    pub(crate) fn streams(&self) -> &StreamPool {
        &self.streams
    }

    /// Returns the budget that physical memory is charged to.
    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Registers a reason to take the slow allocation path.
    pub(crate) fn add_detour(&self) {
        self.detours.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a reason that was registered by [`Inner::add_detour`].
    pub(crate) fn end_detour(&self) {
        self.detours.fetch_sub(1, Ordering::Relaxed);
    }

    /// Allocates a block from the stream's cache, or on the slow path. The request has been
    /// checked.
    #[track_caller]
    #[inline]
    pub(crate) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        let home = self.home(stream)?;
        match home.try_alloc(self, &request) {
            Some(block) => Ok(block),
            None => {
                let _site = site::enter();
                self.allocate_slowly(home, &request, None)
            }
        }
    }

    /// As [`Inner::allocate`], and draws new memory from `held` first, which goes down by `bytes`
    /// or more.
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
        let home = self.home(stream)?;
        let block = match home.try_alloc(self, &request) {
            Some(block) => block,
            None => {
                let _site = site::enter();
                self.allocate_slowly(home, &request, Some(held))?
            }
        };
        let drawn = before.saturating_sub(remaining());
        let unused = bytes.saturating_sub(drawn).min(remaining());
        drop(held.lock().unwrap_or_else(PoisonError::into_inner).draw(unused));
        Ok(block)
    }

    /// Returns the cache of a stream, and creates it at its first use.
    fn home(self: &Arc<Self>, stream: &Stream) -> Result<&'static Home> {
        match self.known_home(stream) {
            Some(home) => Ok(home),
            None => self.new_home(stream),
        }
    }

    /// Returns the cache of a stream that has one already.
    #[inline]
    fn known_home(&self, stream: &Stream) -> Option<&'static Home> {
        let number = stream.timeline().attachment(self.key)? as usize;
        self.directory.home(number).or_else(|| self.further_home(number))
    }

    /// Returns a cache whose number exceeds the directory. The list is ordered by number.
    #[cold]
    fn further_home(&self, number: usize) -> Option<&'static Home> {
        self.homes.read().unwrap_or_else(PoisonError::into_inner).get(number).copied()
    }

    /// Gives free memory back in bypass mode: the pool's own, and then that of `direct`.
    pub(crate) fn trim_over(&self, direct: &dyn Resource, keep: u64) -> Result<u64> {
        // Dedicated memory comes from the pool itself in any case.
        let gone = self.trim(keep)?;
        let keep = keep.saturating_sub(self.apart.held().now());
        Ok(gone + direct.trim(keep)?)
    }

    /// Lists a block that does not come from a stream's cache until it is freed, if leaks are
    /// reported. Reserved memory counts with its committed bytes.
    #[track_caller]
    pub(crate) fn list(&self, block: &mut Block, committed: Option<&Arc<Span>>) {
        if let Some(listing) = self.listing.get() {
            let (place, tag, home) = ((block.address(), block.bytes()), block.tag(), block.home());
            block.extras_mut().live.listed = Some(listing.list(place, tag, &home, committed));
        }
    }

    /// Returns the source of blocks in bypass mode.
    pub(crate) fn bypass(&self) -> Option<&Direct> {
        self.bypass.as_ref()
    }

    /// Returns whether every event is recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        self.config.recorder.is_some()
    }

    #[cold]
    fn new_home(self: &Arc<Self>, stream: &Stream) -> Result<&'static Home> {
        check_home(&*self.driver, self.info.device, stream.timeline())?;
        self.vacate();
        // The lock prevents two threads from creating a cache for one stream. No driver call is
        // made under it.
        let mut homes = self.homes.write().unwrap_or_else(PoisonError::into_inner);
        let known = stream.timeline().attachment(self.key);
        if let Some(&home) = known.and_then(|number| homes.get(number as usize)) {
            return Ok(home);
        }
        let (home, number) = match self.vacant().pop() {
            Some(vacant) => {
                let number = vacant.number;
                (vacant.serve(self, stream.timeline()), number)
            }
            None => {
                // Caches leave the list only when the pool closes, and none is created then, so a
                // number is never reused.
                let number = homes.len();
                let home = Home::open(self.clone(), stream.timeline().clone(), number);
                self.directory.name(number, home);
                homes.push(home);
                (home, number)
            }
        };
        stream.timeline().attach(self.key, number as u32);
        Ok(home)
    }

    pub(crate) fn vacant(&self) -> MutexGuard<'_, Vec<Vacant>> {
        self.vacant.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists all caches of the pool.
    pub(crate) fn homes<'s>(&self, bump: &'s Bump) -> List<'s, &'static Home> {
        list(bump, self.homes.read().unwrap_or_else(PoisonError::into_inner).iter().copied())
    }

    /// Makes a block from the token, and reports it to the observer and the recorder.
    pub(crate) fn hand_out(
        &self,
        home: &'static Home,
        freed: &Freed,
        ticket: Option<Ticket>,
    ) -> Block {
        let mut block = Block::at_home(freed);
        if self.observed {
            let generation = self.note_live(home, freed);
            block.extras_mut().generation = generation;
        }
        if ticket.is_some() {
            let (stream, Place { address, asked }) = (home.timeline().number(), freed.place);
            self.report(ticket, Action::Allocate, stream, address, asked.bytes(), asked.tag());
        }
        block
    }

    #[cold]
    fn note_live(&self, home: &'static Home, freed: &Freed) -> u64 {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let stream = home.timeline().raw();
        let address = freed.place.address;
        let bytes = home.size_of(address, freed.way.key);
        let range = DeviceRange { device: self.info.device, address, bytes };
        note(&self.driver, generation, range, Ownership::Live { stream, generation });
        generation
    }

    /// Takes a ticket in the order of events, if there is a recorder.
    #[inline]
    pub(crate) fn ticket(&self) -> Option<Ticket> {
        self.config.recorder.as_deref().map(Recorder::ticket)
    }

    /// Records an event under its ticket, if there is one.
    #[inline]
    pub(crate) fn report(
        &self,
        ticket: Option<Ticket>,
        action: Action,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) {
        if let (Some(ticket), Some(recorder)) = (ticket, &self.config.recorder) {
            let place = event::Place::Device(self.info.device);
            recorder.record(ticket, recorder.event(action, place, stream, address, bytes, tag));
        }
    }

    /// Records an event that concerns no block.
    pub(crate) fn report_pool(&self, action: Action, bytes: u64, tag: Tag) {
        if let Some(recorder) = &self.config.recorder {
            let event =
                recorder.event(action, event::Place::Device(self.info.device), 0, 0, bytes, tag);
            recorder.record(recorder.ticket(), event);
        }
    }

    /// Returns the bytes held from the driver.
    pub(crate) fn held(&self) -> u64 {
        let cached = match &self.physical {
            Physical::Mapped(mapped) => mapped.held().now(),
            Physical::Plain(plain) => plain.held().now(),
        };
        cached + self.apart.held().now()
    }

    /// Removes a retired cache whose stream could not be waited for. Its memory is kept, since work
    /// may still use it.
    pub(crate) fn keep_home(&self, home: &'static Home, timeline: &Timeline) {
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.keep();
        }
        self.forget_home(home, timeline);
    }

    fn forget_home(&self, home: &'static Home, timeline: &Timeline) {
        timeline.detach(self.key);
        self.unlist(home);
    }

    fn unlist(&self, home: &'static Home) {
        self.homes
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .retain(|other| !std::ptr::eq(*other, home));
    }

    /// Removes a retired cache, and returns its ranges to the pool.
    pub(crate) fn take_home_back(
        &self,
        home: &'static Home,
        timeline: &Arc<Timeline>,
        heap: &Heap,
    ) {
        timeline.detach(self.key);
        self.unlist(home);
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.take_back(heap.free_extents().map(|e| e.range));
        }
    }
}

impl Detour {
    #[track_caller]
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
    ) -> Result<Block> {
        match self {
            Self::Direct(direct) => {
                Under::draw_and_allocate(direct, stream, request, drawn, request.size())
            }
            Self::Checked(checked) => checked.allocate(stream, request, drawn),
        }
    }
}

impl Drop for Closer {
    fn drop(&mut self) {
        let _site = site::enter_or(self.opened_at);
        if let Some(Detour::Checked(checked)) = &self.detour {
            checked.close();
        }
        let pass = self.inner.scratch.begin();
        for home in self.inner.homes(&pass) {
            home.close(&self.inner);
        }
        let vacant = std::mem::take(&mut *self.inner.vacant());
        for vacant in vacant {
            self.inner.unlist(vacant.home);
            vacant.retire();
        }
        graphs::sweep();
        self.inner.apart.reap_quietly();
        if let Some(recorder) = &self.inner.config.recorder {
            recorder.flush();
        }
    }
}

thread_local! {
    /// Whether this thread is in a call that must not wait.
    static WAITS_FOR_NOTHING: Cell<bool> = const { Cell::new(false) };
}

/// Runs `work`. Allocations of this thread within it never wait, whatever the pool's settings.
pub(crate) fn without_waiting<T>(work: impl FnOnce() -> T) -> T {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            WAITS_FOR_NOTHING.set(self.0);
        }
    }
    let _restore = Restore(WAITS_FOR_NOTHING.replace(true));
    work()
}

/// Returns when an allocation stops waiting, or `None` for never.
pub(crate) fn deadline(wait: Duration) -> Option<std::time::Instant> {
    let now = std::time::Instant::now();
    if WAITS_FOR_NOTHING.get() { Some(now) } else { now.checked_add(wait) }
}

impl fmt::Debug for DevicePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DevicePool")
            .field("device", &self.device())
            .field("budget", self.budget())
            .field("physical", &self.inner().physical)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inner").field("device", &self.info.device).finish_non_exhaustive()
    }
}
