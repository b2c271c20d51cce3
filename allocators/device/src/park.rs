//! Parking: the blocks of a tag return their physical memory to the driver and keep their
//! addresses.
//!
//! An inference server between requests, or one that lends its GPU to training, later needs its
//! weights and its cache at the same addresses, but no memory in between.
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
//! # Which memory can be parked
//! Physical memory is released in whole handles, and blocks of different tags share the handles of
//! the caches. So parkable blocks come from a [`Parkable`], which is separate: it has its own
//! addresses, and handles that no other tag uses. Parking a tag releases all of these handles,
//! including the free parts between its blocks, and none of other tags. The tag's other memory, in
//! the caches or stable or reserved, stays.
//!
//! Memory of graphs is parked with a tag too, if it comes from
//! [`DevicePool::parkable_graph_pool`].
//!
//! # What a parked block is
//! The owner keeps its token, with the same address. Every use of it fails with
//! [`MemoryError::Parked`]: `order`, `prepare`, a copy, a fill, a launch, a recorded use. So does a
//! new block of the tag. The block may be dropped, which makes no driver call, and its saved
//! contents are freed with it. A kernel that still uses the bare address accesses unmapped memory:
//! on a device this destroys the context, and the simulated GPU reports it.
//!
//! # Order
//! `cuMemUnmap` is not stream ordered. So the host first waits, until a deadline, for all work on
//! the blocks: of their owner streams, of streams that used them, and of streams that used the free
//! ranges between them. The copies run on their own stream, and the host waits for them as well. A
//! resume waits too, so that everything queued after it finds the contents. A prepared use that is
//! not finished is [`Busy`](aquifer_core::MemoryError::Busy).
//!
//! # Several tags as one
//! [`DevicePool::begin_park`] and [`DevicePool::begin_resume`] do what can fail. Their results
//! complete it, or undo it when they are dropped.
//!
//! # Failures
//! A park that fails changes nothing. Handles that the driver refuses to unmap at its end stay
//! charged, are reported, and are retried by the pool's next slow path or trim. A resume that
//! fails, because the budget or the driver refuses, leaves everything parked and can be retried. If
//! the pool is closed, blocks that are parked stay so for good.

mod pending;

pub use crate::slot_memory::{Park, ParkReport, ResumeReport};
pub use pending::{PendingPark, PendingResume};

use crate::{
    Block, DeviceBuffer, DevicePool, Request,
    base::waits::{begin_request, deadline},
    limits::LiveLimit,
    pool_core::PoolCore,
    slot_memory::{Capture, SlotMemories, SlotMemory},
};
use aquifer_core::{DeviceId, MemoryError, Opaque, PoolStats, Result, Tag, event::BlockKind};
use aquifer_driver::{DeviceRange, RawStream, site};
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::{fmt, sync::Arc, time::Instant};

/// The size of a slot in bytes, if the pool sets none and memory is ample. At this size, 1 GiB is
/// mapped in under a millisecond.
const SLOT: u64 = 32 << 20;
/// A slot is at most this fraction of the budget.
const SLOTS_PER_BUDGET: u64 = 64;

/// The part of a pool that holds the parkable blocks of one tag.
///
/// It allocates blocks under the pool's budget, and they are used like any other. Allocation is
/// slower than from the caches: a lock and a search, some hundred nanoseconds. Uses on their own
/// streams are checked too. So use it for long-lived data, such as weights and caches of keys and
/// values, not for temporaries.
///
/// Clones share it, and it keeps the pool open.
///
/// ```
/// use aquifer::{
///     DeviceBuffer, DeviceId, DevicePool, MemoryError, Operand, Park, PoolConfig, Tag, sim::Sim,
/// };
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (stream, tag) = (pool.stream()?, Tag::named("weights"));
/// let parkable = pool.parkable(tag)?;
/// let mut weights: DeviceBuffer<f32> = parkable.buffer(&stream, 1 << 20)?;
/// let contents = vec![0.5; 1 << 20];
/// stream.try_scope(|c| c.upload(&contents, &mut weights))?;
/// let address = weights.range().address;
///
/// // SAFETY: 1. no work is about to be queued for the weights: no view of them exists, and only
/// // this thread runs.
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
    slots: Arc<SlotMemory>,
    /// The tenant whose live bytes its blocks are.
    tenant: Option<Arc<LiveLimit>>,
}

impl DevicePool {
    /// Returns the allocator of parkable blocks of `tag`. It is created at the first call and
    /// shared by all callers for the tag. Creating it reserves addresses (`cuMemAddressReserve`),
    /// but no memory.
    ///
    /// Memory is added in slots of the pool's [`handle_bytes`](crate::PoolConfig::handle_bytes), or
    /// of 32 MiB, or less if that exceeds a sixty-fourth of the budget.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`] on devices without virtual memory mapping;
    /// [`MemoryError::Parked`] while other memory of the tag is parked, if this is the first call;
    /// the driver's.
    #[track_caller]
    pub fn parkable(&self, tag: Tag) -> Result<Parkable> {
        let _site = site::enter();
        let core = self.core();
        let slots = match core.feature::<SlotMemories>().parkable(tag) {
            Some(slots) => slots,
            None => {
                let memories = core.parkable_memories(tag)?;
                core.dedicated.reap_nonblocking();
                let (kind, bytes) = (BlockKind::Parkable, core.info.memory.saturating_mul(2));
                let new = SlotMemory::new(core, kind, Some(tag), bytes, core.parkable_slot())?;
                memories.add_parkable(new)
            }
        };
        Ok(Parkable { pool: self.clone(), slots, tenant: None })
    }

    /// Parks the [parkable](DevicePool::parkable) blocks of `tag`: waits for their uses, saves or
    /// drops their contents, and returns their memory to the driver (`cuMemcpyDtoHAsync`,
    /// `cuMemUnmap`, `cuMemRelease`).
    ///
    /// From then on, uses of the blocks and new blocks of the tag are refused until
    /// [`DevicePool::resume`]. Other tags are not affected.
    ///
    /// Blocks the thread until all of it is done. For a tag without parkable blocks nothing is
    /// parked.
    ///
    /// # Safety
    /// 1. From the call until a resume, no work is queued that was ordered before it: if a view of
    ///    such a block was [ordered](aquifer_driver::Operand::order), as an argument of a launch or
    ///    as a side of a copy, its work was queued before the call or is never queued. Prepared
    ///    uses are exempt: they are detected, and the call is refused.
    /// 2. No bare address of such a block is used in that time, and no part of it that was given to
    ///    an arena.
    ///
    /// # Errors
    /// [`MemoryError::Parked`] if they are parked, being parked or being resumed;
    /// [`MemoryError::Busy`] if a prepared use is not finished; [`MemoryError::TimedOut`];
    /// [`MemoryError::Capturing`] if a stream that used them captures a graph;
    /// [`MemoryError::Capacity`] if no stream can be leased for the copies; [`MemoryError::System`]
    /// if the allocator refuses; [`MemoryError::Unsupported`] on devices without virtual memory
    /// mapping; the driver's. In each case nothing has changed.
    #[track_caller]
    #[expect(unsafe_code, reason = "the caller promises what cannot be seen from here")]
    pub unsafe fn park(&self, tag: Tag, how: Park) -> Result<ParkReport> {
        let _site = site::enter();
        // SAFETY: 1. and 2. guaranteed by the caller.
        unsafe { self.begin_park(tag, how) }.map(PendingPark::commit)
    }

    /// Does what of [`DevicePool::park`] can fail, and can be undone: refuses uses, waits, and
    /// saves the contents. Returns what completes the park, or undoes it when it is dropped. With
    /// it, several tags are parked as one, also of several devices.
    ///
    /// # Safety
    /// As [`DevicePool::park`], from this call on.
    ///
    /// # Errors
    /// As [`DevicePool::park`].
    #[track_caller]
    #[expect(unsafe_code, reason = "the caller promises what cannot be seen from here")]
    pub unsafe fn begin_park(&self, tag: Tag, how: Park) -> Result<PendingPark> {
        let _site = site::enter();
        let core = self.core();
        if core.dedicated.step() == 0 {
            return Err(UNSUPPORTED);
        }
        let until = deadline(core.config.wait);
        let memories = core.feature::<SlotMemories>().of(tag);
        PendingPark::begin(core, memories, &how, until)
    }

    /// Resumes the parked blocks of `tag` at their addresses: takes memory for all of them from the
    /// budget and the driver, or for none, and copies back the saved contents (`cuMemCreate`,
    /// `cuMemMap`, `cuMemSetAccess`, `cuMemcpyHtoDAsync`). Everything queued after it finds the
    /// contents. Does nothing for a tag that is not parked.
    ///
    /// Makes room as [`DevicePool::alloc_stable`] does, and blocks until the contents are there. If
    /// the budget is exhausted, or another thread parks or resumes the tag, waits for it until
    /// `deadline`, or not at all without one. So several threads may resume a tag: one does it, and
    /// the others return when it is done.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`]; [`MemoryError::Parked`] if another thread still parks or
    /// resumes it; [`MemoryError::Capacity`] if no stream can be leased for the copies; the
    /// driver's. In each case everything stays parked and can be resumed again.
    #[track_caller]
    pub fn resume(&self, tag: Tag, deadline: Option<Instant>) -> Result<ResumeReport> {
        let _site = site::enter();
        self.begin_resume(tag, deadline).map(PendingResume::commit)
    }

    /// Does what of [`DevicePool::resume`] can fail, and can be undone: maps the memory and copies
    /// the contents back. Returns what completes the resume, or parks the memory again when it is
    /// dropped. Until then uses are refused. With it, several tags are resumed as one, also of
    /// several devices.
    ///
    /// # Errors
    /// As [`DevicePool::resume`].
    #[track_caller]
    pub fn begin_resume(&self, tag: Tag, deadline: Option<Instant>) -> Result<PendingResume> {
        let _site = site::enter();
        let memories = self.core().feature::<SlotMemories>().of(tag);
        PendingResume::begin(self.core(), memories, deadline)
    }

    /// Copies the saved contents at `address` into `into`: those of the last park, while their
    /// block is parked, and after a resume that [keeps](PendingResume::keep_saved) them. Returns
    /// whether there are any, all of one block. Never waits for work.
    ///
    /// ```
    /// use allocator_api2::alloc::Global;
    /// use aquifer::{DeviceId, DevicePool, Park, PoolConfig, Request, Tag, sim::Sim};
    /// let sim = Sim::h200(1);
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// let (stream, tag) = (pool.stream()?, Tag::named("kept"));
    /// let block = pool.parkable(tag)?.alloc(&stream, Request::bytes(4096))?;
    /// # #[expect(unsafe_code, reason = "parks what nothing uses")]
    /// // SAFETY: 1. and 2. nothing uses the block.
    /// unsafe { pool.park(tag, Park::save_in(Global)) }?;
    /// pool.begin_resume(tag, None)?.keep_saved().commit();
    /// assert!(pool.read_saved(block.address() + 512, &mut [0; 1024]));
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn read_saved(&self, address: u64, into: &mut [u8]) -> bool {
        self.core().feature::<SlotMemories>().read_saved(address, into)
    }

    /// Returns the bytes of physical memory in parkable blocks and graph pools of this tag, with
    /// the free parts between the blocks: what parking it returns to the driver.
    #[must_use]
    pub fn parkable_bytes(&self, tag: Tag) -> u64 {
        let memories = self.core().feature::<SlotMemories>().of(tag);
        memories.iter().map(|memory| memory.charged_bytes()).sum()
    }

    /// Returns whether memory of this tag is parked, being parked or being resumed.
    #[must_use]
    pub fn is_parked(&self, tag: Tag) -> bool {
        self.core().feature::<SlotMemories>().check_resident(tag).is_err()
    }
}

const UNSUPPORTED: MemoryError =
    MemoryError::Unsupported { feature: "parking: virtual memory management (cuMemMap)" };

impl PoolCore {
    /// Returns the parkable memory of all tags, to add some of a tag.
    ///
    /// # Errors
    /// [`MemoryError::Unsupported`]; [`MemoryError::Parked`] while memory of the tag is parked.
    pub(crate) fn parkable_memories(&self, tag: Tag) -> Result<&SlotMemories> {
        if self.dedicated.step() == 0 {
            return Err(UNSUPPORTED);
        }
        let memories = self.feature::<SlotMemories>();
        memories.check_resident(tag).map(|()| memories)
    }

    /// Returns the size of a slot of parkable memory in bytes.
    fn parkable_slot(&self) -> u64 {
        if self.config.handle_bytes > 0 {
            return self.dedicated.step();
        }
        let part = (self.budget.limit() / SLOTS_PER_BUDGET).max(1);
        (1 << part.ilog2()).clamp(self.dedicated.step(), SLOT.max(self.dedicated.step()))
    }
}

impl Parkable {
    /// Returns this allocator for blocks that count as the tenant's live bytes.
    pub(crate) fn for_tenant(self, tenant: Arc<LiveLimit>) -> Self {
        Self { tenant: Some(tenant), ..self }
    }

    /// Allocates a block for work that is queued on `stream` from now on. The block gets this
    /// allocator's tag, regardless of the request, and counts towards the tag's
    /// [limit](DevicePool::limit_tag), also while it is parked.
    ///
    /// If no free range is ready, takes memory as [`DevicePool::alloc_stable`] does, and may block
    /// like it.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`MemoryError::Parked`] while the tag is parked.
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        let _site = site::enter();
        if request.size() == 0 {
            return Block::empty(self.pool.streams(), stream, self.slots.tag());
        }
        let request = self.pool.core().checked(request)?.tag(self.slots.tag());
        // One deadline for the limits of the tenant and the tag, and for the pool.
        let _request = begin_request();
        let core = self.pool.core();
        let of_tenant =
            self.tenant.as_ref().map(|limit| limit.charge(core, stream, &request)).transpose()?;
        let of_tag = core.charge_tag(stream, &request)?;
        let mut block = self.slots.allocate(stream, request, Capture::UNANNOUNCED)?;
        block.count_for_tag(of_tag);
        if of_tenant.is_some() {
            block.meta_mut().live.of_tenant = of_tenant;
        }
        self.pool.core().list_for_leaks(&mut block, None);
        Ok(block)
    }

    /// Allocates a buffer of `len` elements for work that is queued on `stream` from now on.
    ///
    /// # Errors
    /// As [`Parkable::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new_in(self, stream, len)
    }

    /// Returns the tag of its blocks.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.slots.tag()
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }

    /// Returns its live blocks by address: where each begins, with its requested bytes, and its
    /// stream.
    #[must_use]
    pub fn live_blocks(&self) -> Vec<(DeviceRange, RawStream)> {
        self.slots.live_blocks()
    }

    /// Returns whether its blocks are parked, being parked or being resumed.
    #[must_use]
    pub fn is_parked(&self) -> bool {
        self.slots.is_parked()
    }

    /// Returns its statistics. Parked blocks are counted, but have no bytes.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        self.slots.stats()
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
        if self.stats().physical > keep {
            self.slots.release_slots(u64::MAX).complete()
        } else {
            Ok(0)
        }
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
