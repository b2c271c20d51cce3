//! Memory that goes to sleep: a tag's blocks give their physical memory back to the driver and keep
//! their addresses.
//!
//! An inference server between requests, or one that lends its GPU to training, needs its weights
//! and its cache again at the addresses that its kernels and tables know, and nothing of them
//! meanwhile.
//!
//! ```text
//!            device                                         host
//!   awake    ┃ addresses ┃━━ handles ━━ contents ┃
//!            │ no use may begin, none is open or queued
//!            │ copy ─────────────────────────────────────▶  pieces of 64 MiB, from the caller's allocator
//!            │ unmap, release: the charge ends
//!   parked   ┃ addresses ┃                                  contents, unless they were dropped
//!            │ charge, create, map, set access: all of it or nothing
//!            │ copy ◀─────────────────────────────────────
//!   awake    ┃ addresses ┃━━ handles ━━ contents ┃
//! ```
//!
//! # Which memory can go
//! Physical memory goes by whole handles, and blocks of different tags share those of the caches.
//! So blocks that are to be parked come from a [`Parkable`], which lies apart: addresses of its
//! own, and handles in which no other tag lives. Parking a tag releases all of them, the free parts
//! between its blocks too, and none of anybody else's. What else the tag has, in the caches and as
//! stable or reserved memory, stays as it is and is reported.
//!
//! # What a parked block is
//! Its token stays with its owner, at the same address. Every use of it, `order`, `prepare`, a
//! copy, a fill, a launch, a use that is noted, is refused with [`MemoryError::Parked`], and so is
//! a new block of the tag's. It may be dropped, which makes no driver call: what was saved of it
//! goes with the last block that shares its piece of host memory. A kernel that uses its bare
//! address all the same meets an address with nothing behind it: on a device that is the end of the
//! context; the simulated GPU reports it.
//!
//! # Order
//! `cuMemUnmap` is not stream ordered, so the host waits for all work on the blocks, until a
//! deadline, before anything is copied: of their home streams, of those that used them, of those
//! that used what is free between them. The copies have a stream of their own, and the host waits
//! for them as well; so does a resume, and whatever is queued after it comes after the contents. A
//! use that was prepared and is not finished is [`Busy`](aquifer_core::MemoryError::Busy).
//!
//! # When it fails
//! A park that fails has changed nothing. What the driver refuses to unmap at its end stays
//! charged, is reported, and goes with the pool's next slow path or trim. A resume that fails,
//! since the budget or the driver refuses, leaves everything parked, and can be tried again. Blocks
//! of a pool that has closed meanwhile stay parked for good.

pub(crate) mod lodging;
mod passage;
mod saved;

pub(crate) use lodging::Lodging;

use crate::{Block, DeviceBuffer, DevicePool, Request, pool::Inner, request::Sensible};
use allocator_api2::alloc::Allocator;
use aquifer_core::{DeviceId, MemoryError, Opaque, PoolStats, Result, Tag};
use aquifer_driver::site;
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

/// Bytes of a slot where the pool does not say and memory is ample: 1 GiB of them is mapped in
/// under a millisecond.
const SLOT: u64 = 32 << 20;
/// As little of a budget as a slot may be.
const OF_BUDGET: u64 = 64;

/// What becomes of the contents of blocks that are parked, and how long to wait for their last use.
#[derive(Clone)]
pub struct Park {
    /// `None`: they are dropped.
    host: Option<saved::Host>,
    deadline: Option<Instant>,
}

impl Park {
    /// They are saved in memory of this allocator: pinned memory, to be copied at the speed of the
    /// link. It is asked for 64 MiB at a time, or less where that is refused, and keeps them until
    /// the blocks are resumed or dropped.
    #[must_use]
    pub fn save_in(host: impl Allocator + Send + Sync + 'static) -> Self {
        Self { host: Some(Arc::new(host)), deadline: None }
    }

    /// They are dropped. What a resumed block holds is not known.
    #[must_use]
    pub fn discard() -> Self {
        Self { host: None, deadline: None }
    }

    /// Waits for the blocks' uses until then at most, and not as long as the pool's
    /// [`wait`](crate::PoolConfig::wait). The copies that follow take as long as the link needs.
    #[must_use]
    pub fn by(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }
}

/// What became of a tag's memory.
///
/// Its example is that of [`Parkable`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ParkReport {
    /// Whose.
    pub tag: Tag,
    /// Blocks that are parked (a count).
    pub blocks: u64,
    /// Bytes that they hold.
    pub parked: u64,
    /// Bytes of host memory that keep their contents.
    pub saved: u64,
    /// Bytes of physical memory that went back to the driver, and that nobody is charged for any
    /// more.
    pub released: u64,
    /// What stayed on the device.
    pub kept: Elsewhere,
    /// What the copies took, with finding host memory for them.
    pub copying: Duration,
    /// All of it, the wait for the last use included.
    pub took: Duration,
}

/// What of a tag's memory stays on the device when it is parked.
///
/// Its example is that of [`Parkable`].
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct Elsewhere {
    /// Bytes in blocks that are not parkable: of the streams' caches, where other tags share the
    /// handles, and stable and reserved memory, whose addresses others may keep.
    pub shared: u64,
    /// Bytes of handles that the driver did not unmap. They stay charged, and are tried again.
    pub refused: u64,
    /// What the driver said.
    pub refusal: Option<MemoryError>,
}

/// What came back of a tag's memory.
///
/// Its example is that of [`Parkable`].
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct ResumeReport {
    /// Whose.
    pub tag: Tag,
    /// Blocks that may be used again (a count).
    pub blocks: u64,
    /// Bytes of physical memory behind them.
    pub taken: u64,
    /// Bytes of contents that were copied back.
    pub restored: u64,
    /// What the copies took.
    pub copying: Duration,
    /// All of it.
    pub took: Duration,
}

impl ParkReport {
    fn of(tag: Tag) -> Self {
        let (kept, zero) = (Elsewhere::default(), Duration::ZERO);
        Self { tag, blocks: 0, parked: 0, saved: 0, released: 0, kept, copying: zero, took: zero }
    }
}

impl ResumeReport {
    fn of(tag: Tag) -> Self {
        let zero = Duration::ZERO;
        Self { tag, blocks: 0, taken: 0, restored: 0, copying: zero, took: zero }
    }
}

/// The part of a pool in which the blocks of one tag lie together, to be parked together.
///
/// It gives out blocks as the pool does, under the pool's budget, to be used as any other. They
/// come by a slower way than the caches': a lock and a search, some hundred nanoseconds, and their
/// uses on their own streams are asked for too. So it is for what lives long, weights and caches of
/// keys and values, not for what a request needs and drops.
///
/// Clones share it, and it keeps the pool open.
///
/// ```
/// use aquifer_core::{MemoryError, Tag};
/// use aquifer_device::{DeviceBuffer, DevicePool, Park, PoolConfig};
/// use aquifer_driver::{DeviceId, Operand, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("weights"));
/// let parkable = pool.parkable(tag)?;
/// let mut weights: DeviceBuffer<f32> = parkable.buffer(&stream, 1 << 20)?;
/// let contents = vec![0.5; 1 << 20];
/// stream.try_scope(|c| c.upload(&contents, &mut weights))?;
/// let address = weights.range().address;
///
/// // SAFETY: 1. no work is about to be queued for the weights: nothing of them is lent, and one thread runs here.
/// let report = unsafe { pool.park(tag, Park::save_in(allocator_api2::alloc::Global)) }?;
/// assert_eq!((report.saved, pool.stats().physical), (4 << 20, 0));
/// assert_eq!(stream.fill(&mut weights, 0.0), Err(MemoryError::Parked { tag }));
///
/// pool.resume(tag, None)?;
/// let mut back = vec![0.0; 1 << 20];
/// stream.try_scope(|c| c.download(&weights, &mut back))?;
/// assert_eq!((weights.range().address, back), (address, contents));
/// assert!(sim.violations().is_empty());
/// # Ok::<(), MemoryError>(())
/// ```
#[derive(Clone)]
pub struct Parkable {
    pool: DevicePool,
    lodging: Arc<Lodging>,
}

/// The parkable memory of a pool, by tag. It ends with the last who may use it.
#[derive(Default)]
pub(crate) struct Lodgings(Mutex<Vec<Weak<Lodging>>>);

impl Lodgings {
    fn list(&self) -> MutexGuard<'_, Vec<Weak<Lodging>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns those that are in use, with no lock held.
    pub(crate) fn all(&self) -> Vec<Arc<Lodging>> {
        self.list().iter().filter_map(Weak::upgrade).collect()
    }

    fn of(&self, tag: Tag) -> Option<Arc<Lodging>> {
        // Those that end here do so when the lock is open.
        self.all().into_iter().find(|lodging| lodging.tag == tag)
    }

    /// Takes one in, unless somebody was faster: that one then.
    fn add(&self, new: Arc<Lodging>) -> Arc<Lodging> {
        let mut all = self.list();
        let known: Vec<_> = all.iter().filter_map(Weak::upgrade).collect();
        let found = known.iter().find(|lodging| lodging.tag == new.tag).cloned();
        if found.is_none() {
            all.retain(|lodging| lodging.strong_count() > 0);
            all.push(Arc::downgrade(&new));
        }
        drop(all);
        found.unwrap_or(new)
    }

    /// Gives back to the driver what is free in slots of their own. The bytes.
    ///
    /// # Errors
    /// The driver's first refusal; all others have been tried.
    pub(crate) fn trim(&self) -> Result<u64> {
        let all = self.all();
        let (mut gone, mut outcome) = (0, Ok(()));
        for lodging in all {
            match lodging.trim() {
                Ok(bytes) => gone += bytes,
                Err(error) => outcome = outcome.and(Err(error)),
            }
        }
        outcome.map(|()| gone)
    }
}

impl Inner {
    /// Bytes of a tag in live blocks that are on the device.
    fn held_by(&self, tag: Tag) -> u64 {
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let cached = homes.iter().map(|home| {
            home.with(|s| s.holdings().filter(|h| h.tag == tag).map(|h| h.bytes).sum::<u64>())
        });
        let apart = self.apart.holdings().into_iter().filter(|h| h.tag == tag).map(|h| h.bytes);
        cached.chain(apart).sum()
    }
}

impl DevicePool {
    /// Where blocks of `tag` come from that can be parked: made at its first use, the same for all
    /// who ask for the tag. Reserves addresses (`cuMemAddressReserve`), and takes no memory.
    ///
    /// Memory comes in slots of the pool's [`handle_bytes`](crate::PoolConfig::handle_bytes), or of
    /// 32 MiB, less where that is more than a sixty-fourth of the budget.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices that cannot map; the driver's.
    #[track_caller]
    pub fn parkable(&self, tag: Tag) -> Result<Parkable> {
        let _site = site::enter();
        let inner = self.inner();
        let lodging = match inner.lodgings.of(tag) {
            Some(lodging) => lodging,
            None => {
                if inner.apart.step() == 0 {
                    return Err(UNSUPPORTED);
                }
                inner.apart.reap_quietly();
                inner.lodgings.add(Lodging::new(inner, tag, inner.slot())?)
            }
        };
        Ok(Parkable { pool: self.clone(), lodging })
    }

    /// Parks the [parkable](DevicePool::parkable) blocks of `tag`: waits for their uses, saves what
    /// is in them or drops it, and gives their memory back to the driver (`cuMemcpyDtoHAsync`,
    /// `cuMemUnmap`, `cuMemRelease`). From here on their uses are refused, and blocks of the tag
    /// too, until [`DevicePool::resume`]. Other tags go on meanwhile.
    ///
    /// Blocks until all of it is done. A tag that has no parkable blocks has nothing parked, and
    /// the report says what it has elsewhere.
    ///
    /// # Safety
    /// 1. From the call until a resume, no work is queued that was ordered before it: whoever has a
    ///    view of such a block [ordered](aquifer_driver::Operand::order), as an argument of a
    ///    launch or as a side of a copy, has queued his work before the call or never does.
    ///    Prepared uses are no such thing: they are seen, and refuse it.
    /// 2. No bare address of such a block is used meanwhile, and no part of it that was given to an
    ///    arena.
    ///
    /// # Errors
    /// [`MemoryError::Parked`] if they are parked, or on the way; [`MemoryError::Busy`] if a
    /// prepared use is not finished; [`MemoryError::TimedOut`]; [`MemoryError::Capturing`] if a
    /// stream that used them captures a graph; [`MemoryError::Capacity`] if no stream can be leased
    /// for the copies; [`MemoryError::System`] if the allocator
    /// refuses; [`MemoryError::Unsupported`] on devices that cannot map; the driver's. Nothing has
    /// changed then.
    #[track_caller]
    #[expect(unsafe_code, reason = "the caller promises what cannot be seen from here")]
    pub unsafe fn park(&self, tag: Tag, how: Park) -> Result<ParkReport> {
        let _site = site::enter();
        let inner = self.inner();
        if inner.apart.step() == 0 {
            return Err(UNSUPPORTED);
        }
        match inner.lodgings.of(tag) {
            Some(lodging) => lodging.park(&how),
            None => {
                let mut report = ParkReport::of(tag);
                report.kept.shared = inner.held_by(tag);
                Ok(report)
            }
        }
    }

    /// Brings the parked blocks of `tag` back, at their addresses: takes memory for all of them
    /// from the budget and the driver, or none, and copies back what was saved (`cuMemCreate`,
    /// `cuMemMap`, `cuMemSetAccess`, `cuMemcpyHtoDAsync`). All that is queued from here on finds
    /// the contents there. Does nothing for a tag that is not parked.
    ///
    /// Makes room as [`DevicePool::alloc_stable`] does, and blocks until the contents are there.
    /// Where others have taken the budget it waits in line for it until `deadline`, or not at all
    /// without one.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`]; [`MemoryError::Parked`] while another thread parks or resumes
    /// it; [`MemoryError::Capacity`] if no stream can be leased for the copies; the driver's.
    /// Everything is parked then, and can be resumed again.
    #[track_caller]
    pub fn resume(&self, tag: Tag, deadline: Option<Instant>) -> Result<ResumeReport> {
        let _site = site::enter();
        match self.inner().lodgings.of(tag) {
            Some(lodging) => lodging.resume(deadline),
            None => Ok(ResumeReport::of(tag)),
        }
    }
}

const UNSUPPORTED: MemoryError =
    MemoryError::Unsupported { feature: "parking: virtual memory management (cuMemMap)" };

impl Inner {
    /// Bytes of a slot of parkable memory.
    fn slot(&self) -> u64 {
        if self.config.handle_bytes > 0 {
            return self.apart.step();
        }
        let part = (self.budget.limit() / OF_BUDGET).max(1);
        (1 << part.ilog2()).clamp(self.apart.step(), SLOT.max(self.apart.step()))
    }
}

impl Parkable {
    /// A block for work that is queued on `stream` from now on. It is the tag's, whatever the
    /// request says, and counts under the tag's [limit](DevicePool::limit_tag), also while it is
    /// parked.
    ///
    /// Where no free place is ready, takes memory as [`DevicePool::alloc_stable`] does, and may
    /// block as that may.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`MemoryError::Parked`] while the tag is parked.
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        let _site = site::enter();
        let request = request.checked()?.tag(self.lodging.tag);
        let of_tag = self.pool.inner().charge_tag(stream, &request)?;
        let mut block = self.lodging.allocate(stream, request)?;
        block.count_for_tag(of_tag);
        self.pool.inner().list(&mut block, None);
        Ok(block)
    }

    /// A buffer of `len` elements for work that is queued on `stream` from now on.
    ///
    /// # Errors
    /// As [`Parkable::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new_in(self, stream, len)
    }

    /// Whose its blocks are.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.lodging.tag
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    /// Whether its blocks are parked, or on the way there or back.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.lodging.is_parked()
    }

    /// What it holds. Parked blocks are counted, and have no bytes.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.lodging.stats()
    }
}

impl Opaque for Parkable {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.pool.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.alloc(stream, request)
    }
    fn stats(&self) -> PoolStats {
        self.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        if self.stats().physical > keep { self.lodging.trim() } else { Ok(0) }
    }
}

impl fmt::Debug for Park {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Park")
            .field("saves", &self.host.is_some())
            .field("deadline", &self.deadline)
            .finish()
    }
}

impl fmt::Debug for Parkable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Parkable")
            .field("tag", &self.tag())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
