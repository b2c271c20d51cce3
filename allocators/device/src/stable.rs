//! Blocks whose memory never moves, for whoever keeps an address: NCCL, RDMA, other processes,
//! multicast, graphs.
//!
//! The caches move physical memory to where it is missing, and hand a freed block's bytes to the
//! next who asks. Whoever has *registered* an address with a network card, exported it or captured
//! it in a graph keeps it beyond the block, and would read and write the wrong memory, silently. A
//! [`StableBlock`] therefore has a physical handle of its own, at addresses of its own, which
//! nobody else is ever given. A [`Registration`] stands for one who keeps the address: the
//! block may be freed, but while one lives nothing is unmapped and the charge stays. A driver that
//! checks is told of each, and reports a move under it.
//!
//! Such a block costs the driver's calls, some 30 µs and more, and whole handles of 2 MiB as a
//! rule: it is for buffers that live long. On devices that cannot map, and in bypass mode without
//! exports, it is a `cuMemAlloc` of its own, which cannot be exported.

mod export;

pub use export::Exported;

use crate::{
    Block, DevicePool, DeviceSlice, DeviceSliceMut, Request,
    apart::{Apart, Owned, Span},
    backend::Backed,
    block::Asked,
    home::check_home,
    request::Sensible,
};
use aquifer_core::{Action, DeviceId, MemoryError, Reservation, Result, Tag, event::BlockKind};
use aquifer_driver::{Access, DeviceRange, KeepAlive, Operand, Ownership, RawStream, site};
use aquifer_stream::{Account, Stream, Tracked};
use bytemuck::Pod;
use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex},
};

/// A block with a physical handle and addresses of its own, which are never remapped or given to
/// anybody else.
///
/// Work uses it as it uses any [`Block`], which [`StableBlock::block`] lends and
/// [`StableBlock::into_block`] is. When it is dropped its memory goes back to the driver, not to a
/// cache: at the next slow path or trim of the pool that finds its last use done and its last
/// [`Registration`] gone. Dropping never calls the driver and never blocks.
///
/// ```
/// use aquifer_device::{DevicePool, PoolConfig, Request};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let block = pool.alloc_stable(&stream, Request::bytes(3 << 20))?;
/// let kept = block.register();        // a network card is told `kept.range()`
/// drop(block);
/// pool.trim(0)?;
/// assert_eq!(pool.stats().physical, 4 << 20);
/// drop(kept);                         // and has forgotten it
/// pool.trim(0)?;
/// assert_eq!(pool.stats().physical, 0);
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
pub struct StableBlock {
    block: Block,
    span: Arc<Span>,
    apart: Arc<Apart>,
    /// Its memory was made by somebody else.
    imported: bool,
}

/// One who keeps the address of a [`StableBlock`]: while it lives, what lies behind the address
/// stays, whatever becomes of the block.
///
/// A clone is one more. Forgetting one keeps the memory for good. Dropping one makes no driver
/// call; the memory of a block that has been freed goes at the pool's next slow path, trim, or end.
pub struct Registration {
    span: Arc<Span>,
    apart: Arc<Apart>,
    range: DeviceRange,
}

impl DevicePool {
    /// A block for work that is queued on `stream` from now on, whose memory never moves. One
    /// physical handle, whole, rounded up to the device's granularity: `cuMemAddressReserve`,
    /// `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`, or `cuMemAlloc` where those are not to be
    /// had. Memory is exportable as [`PoolConfig::export`] says.
    ///
    /// When there is no room the pool gives its caches' free memory back to the driver, asks its
    /// handlers and waits for queued work, at most as long as its settings say.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`MemoryError::BadAlignment`] beyond
    /// [`BLOCK_ALIGN`](crate::BLOCK_ALIGN) where it is an allocation of the driver's. Nothing has
    /// changed then.
    ///
    /// [`PoolConfig::export`]: crate::PoolConfig::export
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        let _site = site::enter();
        self.stable_block(stream, request, None)
    }

    /// As [`DevicePool::alloc_stable`], with its whole handle drawn from `held`. Where `held` has
    /// less, what it lacks is charged and all of it drawn.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`]; `held` is then as it was, unless others have taken what a
    /// call of the driver gave back as it failed.
    #[track_caller]
    pub fn alloc_stable_reserved(
        &self,
        stream: &Stream,
        request: Request,
        held: &Mutex<Reservation>,
    ) -> Result<StableBlock> {
        let _site = site::enter();
        let bytes = self.inner().apart.rounded(request.checked()?.size());
        self.inner().drawing(held, bytes, |funds| self.stable_block(stream, request, Some(funds)))
    }

    #[track_caller]
    fn stable_block(
        &self,
        stream: &Stream,
        request: Request,
        held: Option<&Mutex<Reservation>>,
    ) -> Result<StableBlock> {
        let request = request.checked()?;
        self.check_stream(stream)?;
        let inner = self.inner();
        let apart = &inner.apart;
        if apart.is_plain() && request.alignment() > crate::BLOCK_ALIGN {
            return Err(MemoryError::BadAlignment { align: request.alignment() });
        }
        let of_tag = inner.charge_tag(stream, &request)?;
        apart.reap_quietly();
        let bytes = apart.rounded(request.size());
        let span = inner.with_room(BlockKind::Stable, bytes, request.owner(), held, |funds| {
            apart.whole(BlockKind::Stable, bytes, request.alignment(), funds)
        })?;
        let mut stable = self.stable(stream, span, request, false);
        stable.block.count_for_tag(of_tag);
        Ok(stable)
    }

    /// Refuses another device's or machine's stream.
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<()> {
        check_home(&**self.driver(), self.device(), stream.timeline())
    }

    /// The block of a span that is mapped whole.
    #[track_caller]
    fn stable(
        &self,
        stream: &Stream,
        span: Arc<Span>,
        request: Request,
        imported: bool,
    ) -> StableBlock {
        let apart = self.inner().apart.clone();
        let (live, requested) = if imported { (0, 0) } else { (span.bytes, request.size()) };
        apart.took_block(live, requested, request.owner());
        let number = stream.number();
        apart.report(
            BlockKind::Stable,
            Action::Allocate,
            number,
            span.address,
            requested,
            request.owner(),
        );
        let mut block =
            self.apart_block(stream, &span, request.size(), request.owner(), Some(requested));
        if imported {
            // It is others' memory in others' order: to a driver that checks, nobody gives it out
            // here.
            block.extras_mut().generation = 0;
        }
        self.inner().list(&mut block, None);
        let live = Ownership::Live { stream: stream.raw(), generation: block.generation() };
        apart.note(block.generation(), span.address, span.bytes, live);
        StableBlock { block, span, apart, imported }
    }

    /// A block over a whole span, whatever is mapped there.
    pub(crate) fn apart_block(
        &self,
        stream: &Stream,
        span: &Arc<Span>,
        requested: u64,
        tag: Tag,
        asked: Option<u64>,
    ) -> Block {
        let apart = self.inner().apart.clone();
        apart.made(tag);
        let generation = apart.generation();
        let backed = Backed {
            ledger: Arc::new(Owned { apart, span: span.clone(), asked, tag }),
            timeline: stream.timeline().clone(),
            streams: self.streams().clone(),
            bytes: span.bytes,
        };
        Block::backed(span.address, Asked::new(requested, tag), backed, generation)
    }
}

impl StableBlock {
    /// Its first address on the device, the same as long as it or a registration of it lives.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// Bytes that were asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Bytes that it holds: its whole handle.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.block.capacity()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.block.device()
    }

    /// As a block: to prepare and note uses.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    pub(crate) fn block_mut(&mut self) -> &mut Block {
        &mut self.block
    }

    /// As a block from here on, which can be registered no more; for a
    /// [`DeviceBuffer`](crate::DeviceBuffer), say.
    #[must_use]
    pub fn into_block(self) -> Block {
        self.block
    }

    /// Notes that somebody keeps the address, until the answer is dropped.
    #[track_caller]
    pub fn register(&self) -> Registration {
        let _site = site::enter();
        let (apart, span) = (self.apart.clone(), self.span.clone());
        let range =
            DeviceRange { device: apart.device, address: span.address, bytes: self.bytes() };
        Registration::new(apart, span, range)
    }

    /// How many registrations of it live.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.span.kept_by()
    }

    /// The elements in `range`, counted from its start, to be read.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice<T: Pod>(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = bounds::<T>(&range, self.bytes())?;
        Ok(DeviceSlice::of(&self.block, offset, len))
    }

    /// The elements in `range`, counted from its start, to be written.
    ///
    /// # Errors
    /// [`MemoryError::OutOfBounds`].
    pub fn slice_mut<T: Pod>(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (offset, len) = bounds::<T>(&range, self.bytes())?;
        Ok(DeviceSliceMut::of(&self.block, offset, len))
    }
}

/// Where a range of elements lies within `bytes`: its first byte, and how many elements.
pub(crate) fn bounds<T>(range: &Range<usize>, bytes: u64) -> Result<(u64, usize)> {
    if range.start > range.end {
        return Err(MemoryError::ReversedRange {
            start: range.start as u64,
            end: range.end as u64,
        });
    }
    let size = size_of::<T>() as u64;
    let at = |element: usize| (element as u64).checked_mul(size);
    match (at(range.start), at(range.end)) {
        (Some(start), Some(end)) if end <= bytes => Ok((start, range.end - range.start)),
        (start, end) => {
            let offset = start.unwrap_or(u64::MAX);
            Err(MemoryError::OutOfBounds {
                offset,
                len: end.unwrap_or(u64::MAX).saturating_sub(offset),
                bytes,
            })
        }
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. the block's own range, which stays mapped while it lives. Only unsafe code can make
// another block over the same memory: the import. 2. the block's own promise: its pool holds the
// memory until every noted use is done. 3. the block's own promise.
unsafe impl Operand for StableBlock {
    fn range(&self) -> DeviceRange {
        self.block.range()
    }
    fn machine(&self) -> Option<u64> {
        self.block.machine()
    }
    fn home_stream(&self) -> Option<RawStream> {
        self.block.home_stream()
    }
    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        self.block.order(stream, alive, access)
    }
}

impl Tracked for StableBlock {
    fn account(&self) -> Account<'_> {
        self.block.account()
    }
}

impl Registration {
    /// Notes one more who keeps the address.
    fn new(apart: Arc<Apart>, span: Arc<Span>, range: DeviceRange) -> Self {
        span.keep();
        if let Some(observer) = apart.driver.observer() {
            observer.registered(range);
        }
        Self { span, apart, range }
    }

    /// What is kept.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        self.range
    }
}

impl Clone for Registration {
    #[track_caller]
    fn clone(&self) -> Self {
        let _site = site::enter();
        Self::new(self.apart.clone(), self.span.clone(), self.range)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // Before the count: from then on another thread may unmap.
        if let Some(observer) = self.apart.driver.observer() {
            observer.unregistered(self.range);
        }
        self.span.forget();
    }
}

impl fmt::Debug for StableBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StableBlock")
            .field("block", &self.block)
            .field("registrations", &self.registrations())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Registration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("range", &self.range).finish_non_exhaustive()
    }
}
