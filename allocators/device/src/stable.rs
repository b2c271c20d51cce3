//! Stable blocks: blocks whose memory never moves, for users that keep an address, such as NCCL,
//! RDMA, other processes, multicast and graphs.
//!
//! The caches move physical memory to where it is missing, and reuse a freed block's bytes for the
//! next block. An address that was *registered* with a network card, exported, or captured in a
//! graph is used beyond the life of the block, and would then silently access the wrong memory. A
//! [`StableBlock`] therefore has its own physical handle, at its own addresses, which are never
//! reused. A [`AddressRegistration`] represents one user that keeps the address: the block may be
//! freed, but while a registration lives nothing is unmapped and the charge stays. A validating
//! driver is notified of each, and reports a move under it.
//!
//! Such a block costs driver calls, some 30 µs or more, and whole handles, usually of 2 MiB, so use
//! it for long-lived buffers. On devices without virtual memory mapping, in bypass mode without
//! exports, and on request ([`DevicePool::alloc_stable_legacy`]) it is its own `cuMemAlloc`, which
//! cannot be exported, and which every transport accepts.

mod error;
mod server;
mod share;
mod wire;

pub use error::ShareError;
pub use server::ShareServer;
pub use share::{ReceivedBlock, SharedBlock, check_peer};

use crate::{
    Block, DevicePool, DeviceSlice, DeviceSliceMut, Request,
    base::{driver::check_stream_device, extent::PackedRequest, waits::begin_request},
    block::DriverBlock,
    dedicated::{DedicatedPool, Span, SpanRelease},
};
use aquifer_core::{Action, DeviceId, MemoryError, Reservation, Result, Tag, event::BlockKind};
use aquifer_driver::{
    Access, DeviceRange, ExportTypes, KeepAlive, Operand, Ownership, RawStream, site,
};
use aquifer_stream::{Account, Stream, TrackUses};
use bytemuck::Pod;
use std::{
    fmt,
    ops::Range,
    sync::{Arc, Mutex},
};

/// A block with its own physical handle and addresses, which are never remapped or reused.
///
/// Work uses it like any [`Block`]: [`StableBlock::block`] borrows it as one, and
/// [`StableBlock::into_block`] converts it. When it is dropped, its memory returns to the driver,
/// not to a cache: at the next slow path or trim of the pool after its last use is done and its
/// last [`AddressRegistration`] is dropped. Dropping never calls the driver and never blocks.
///
/// ```
/// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let stream = pool.stream()?;
/// let block = pool.alloc_stable(&stream, Request::bytes(3 << 20))?;
/// let kept = block.register();        // `kept.range()` is registered with a network card
/// drop(block);
/// pool.trim(0)?;
/// assert_eq!(pool.stats().physical, 4 << 20);
/// drop(kept);                         // once it is unregistered there
/// pool.trim(0)?;
/// assert_eq!(pool.stats().physical, 0);
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
pub struct StableBlock {
    block: Block,
    span: Arc<Span>,
    dedicated: Arc<DedicatedPool>,
}

/// What a stable block's memory is.
#[derive(Clone, Copy)]
pub(crate) enum StableMemory {
    /// One allocation of the driver.
    Whole,
    /// One physical handle that can be exported at least so.
    Mapped(ExportTypes),
}

/// One user that keeps the address of a [`StableBlock`]. While it lives, the memory at the address
/// stays, even if the block is freed.
///
/// A clone is another registration. Leaking one keeps the memory for good. Dropping one makes no
/// driver call; the memory of a freed block is released at the pool's next slow path, trim, or
/// close.
pub struct AddressRegistration {
    span: Arc<Span>,
    dedicated: Arc<DedicatedPool>,
    range: DeviceRange,
}

impl DevicePool {
    /// Allocates a block whose memory never moves, for work that is queued on `stream` from now on.
    /// It gets one whole physical handle, rounded up to the device's granularity:
    /// `cuMemAddressReserve`, `cuMemCreate`, `cuMemMap` and `cuMemSetAccess`, or `cuMemAlloc` where
    /// those are not available. Its memory is exportable as [`PoolConfig::export`] specifies.
    ///
    /// If there is no room, the pool releases its caches' free memory to the driver, calls its
    /// failure handlers and waits for queued work, for at most the time in its settings.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`MemoryError::BadAlignment`] beyond
    /// [`BLOCK_ALIGN`](crate::BLOCK_ALIGN) if it is an allocation of the driver. In each case
    /// nothing has changed.
    ///
    /// [`PoolConfig::export`]: crate::PoolConfig::export
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        let _site = site::enter();
        self.stable_block(stream, request, None, self.default_memory(), true)
    }

    /// Allocates a block whose memory never moves as one allocation of the driver (`cuMemAlloc`),
    /// charged to the same budget. Transports between processes that refuse mapped memory accept
    /// it: legacy CUDA IPC, UCX's `cuda_ipc` without a fabric. It cannot be exported or
    /// [shared](DevicePool::share).
    ///
    /// Its release, at a slow path or trim after its last use and registration, waits for the whole
    /// device (`cuMemFree`). If there is no room, it behaves as [`DevicePool::alloc_stable`].
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let stream = pool.stream()?;
    /// let mapped = pool.alloc_stable(&stream, Request::bytes(1 << 20))?;
    /// let legacy = pool.alloc_stable_legacy(&stream, Request::bytes(1 << 20))?;
    /// assert!(!mapped.is_legacy_ipc_capable()? && legacy.is_legacy_ipc_capable()?);
    /// let registered = legacy.register();     // with UCX, for example, until this is dropped
    /// # drop(registered);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; [`MemoryError::BadAlignment`] beyond
    /// [`BLOCK_ALIGN`](crate::BLOCK_ALIGN). In each case nothing has changed.
    #[track_caller]
    pub fn alloc_stable_legacy(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        let _site = site::enter();
        self.stable_block(stream, request, None, StableMemory::Whole, true)
    }

    /// Allocates a block for parts that a validating driver is told of one by one. New memory of
    /// the driver is every stream's at once.
    #[track_caller]
    pub(crate) fn alloc_chunk(
        &self,
        stream: &Stream,
        request: Request,
        memory: StableMemory,
    ) -> Result<StableBlock> {
        self.stable_block(stream, request, None, memory, false)
    }

    /// Returns the memory of stable blocks for which the settings decide.
    fn default_memory(&self) -> StableMemory {
        let dedicated = &self.core().dedicated;
        if dedicated.is_plain() {
            StableMemory::Whole
        } else {
            StableMemory::Mapped(dedicated.export)
        }
    }

    /// Like [`DevicePool::alloc_stable`], with its whole handle drawn from `held`. If `held` has
    /// less, the missing bytes are charged first and then all of it is drawn.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`]. `held` is then unchanged, unless another thread has taken
    /// bytes that a failed driver call had returned.
    #[track_caller]
    pub fn alloc_stable_reserved(
        &self,
        stream: &Stream,
        request: Request,
        held: &Mutex<Reservation>,
    ) -> Result<StableBlock> {
        let _site = site::enter();
        let bytes = self.core().dedicated.round_up(self.core().checked(request)?.size());
        let memory = self.default_memory();
        self.core().with_reservation(held, bytes, |funds| {
            self.stable_block(stream, request, Some(funds), memory, true)
        })
    }

    #[track_caller]
    fn stable_block(
        &self,
        stream: &Stream,
        request: Request,
        held: Option<&Mutex<Reservation>>,
        memory: StableMemory,
        is_told: bool,
    ) -> Result<StableBlock> {
        let core = self.core();
        let request = core.checked(request)?;
        self.check_stream(stream)?;
        let dedicated = &core.dedicated;
        if matches!(memory, StableMemory::Whole) && request.alignment() > crate::BLOCK_ALIGN {
            return Err(MemoryError::BadAlignment { align: request.alignment() });
        }
        // One deadline for the tag's limit and for the pool.
        let _request = begin_request();
        let of_tag = core.charge_tag(stream, &request)?;
        dedicated.reap_nonblocking();
        let (kind, owner) = (BlockKind::Stable, request.owner());
        let span = match memory {
            StableMemory::Whole => {
                let bytes = request.size().next_multiple_of(crate::BLOCK_ALIGN);
                core.with_room(kind, bytes, owner, held, |funds| {
                    dedicated.allocate_whole(kind, bytes, funds)
                })
            }
            StableMemory::Mapped(export) => {
                let bytes = dedicated.round_up(request.size());
                core.with_room(kind, bytes, owner, held, |funds| {
                    dedicated.allocate_span(kind, bytes, request.alignment(), export, funds)
                })
            }
        }?;
        let mut stable = self.stable(stream, span, request, false, is_told);
        stable.block.count_for_tag(of_tag);
        Ok(stable)
    }

    /// Returns an error for a stream of another device or machine.
    pub(crate) fn check_stream(&self, stream: &Stream) -> Result<()> {
        check_stream_device(&**self.driver(), self.device(), stream.timeline())
    }

    /// Returns the block of a span that is mapped whole.
    #[track_caller]
    fn stable(
        &self,
        stream: &Stream,
        span: Arc<Span>,
        request: Request,
        imported: bool,
        is_told: bool,
    ) -> StableBlock {
        let dedicated = self.core().dedicated.clone();
        let (live, requested) = if imported { (0, 0) } else { (span.bytes, request.size()) };
        dedicated.record_block_alloc(live, requested, request.owner());
        let number = stream.number();
        dedicated.report(
            BlockKind::Stable,
            Action::Allocate,
            number,
            span.address,
            requested,
            request.owner(),
        );
        let mut block =
            self.dedicated_block(stream, &span, request.size(), request.owner(), Some(requested));
        if !is_told {
            // Others allocate the memory and order its uses: the owner of an import, the pool of a
            // chunk. A validating driver must not count it as allocated here.
            block.meta_mut().generation = 0;
        }
        self.core().list_for_leaks(&mut block, None);
        let live =
            Ownership::Live { stream: stream.timeline().noted(), generation: block.generation() };
        dedicated.notify_observer(block.generation(), span.address, span.bytes, live);
        StableBlock { block, span, dedicated }
    }

    /// Returns a block over a whole span, whatever is mapped there.
    pub(crate) fn dedicated_block(
        &self,
        stream: &Stream,
        span: &Arc<Span>,
        requested: u64,
        tag: Tag,
        block_bytes: Option<u64>,
    ) -> Block {
        let dedicated = self.core().dedicated.clone();
        dedicated.record_block(tag);
        let generation = dedicated.generation();
        let driver_block = DriverBlock {
            releaser: Arc::new(SpanRelease { dedicated, span: span.clone(), block_bytes, tag }),
            timeline: stream.timeline().clone(),
            streams: self.streams().clone(),
            bytes: span.bytes,
            key: 0,
        };
        Block::from_driver_block(
            span.address,
            PackedRequest::new(requested, tag),
            driver_block,
            generation,
        )
    }
}

impl StableBlock {
    /// Returns its first device address, which is the same as long as it or a registration of it
    /// lives.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.block.address()
    }

    /// Returns the requested bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.block.bytes()
    }

    /// Returns the bytes that it holds: its whole handle.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        self.block.capacity()
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.block.device()
    }

    /// Returns whether every transport between processes accepts its memory, as the driver says
    /// (`CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE`). See
    /// [`DevicePool::alloc_stable_legacy`].
    ///
    /// # Errors
    /// The driver's.
    pub fn is_legacy_ipc_capable(&self) -> Result<bool> {
        let capable = self.dedicated.driver.is_legacy_ipc_capable(self.device(), self.address());
        capable.map_err(|e| self.dedicated.driver_error(e))
    }

    /// Returns it as a block, to prepare and record uses.
    #[must_use]
    pub fn block(&self) -> &Block {
        &self.block
    }

    pub(crate) fn block_mut(&mut self) -> &mut Block {
        &mut self.block
    }

    /// Converts it to a block, such as for a [`DeviceBuffer`](crate::DeviceBuffer). The block can
    /// no longer be registered.
    #[must_use]
    pub fn into_block(self) -> Block {
        self.block
    }

    /// Registers a user that keeps the address until the returned value is dropped.
    #[track_caller]
    pub fn register(&self) -> AddressRegistration {
        let _site = site::enter();
        let (dedicated, span) = (self.dedicated.clone(), self.span.clone());
        let range =
            DeviceRange { device: dedicated.device, address: span.address, bytes: self.bytes() };
        AddressRegistration::new(dedicated, span, range)
    }

    /// Returns the number of its live registrations.
    #[must_use]
    pub fn registrations(&self) -> u64 {
        self.span.registrations()
    }

    /// Returns a view of the elements in `range`, counted from its start, for reading.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice<T: Pod>(&self, range: Range<usize>) -> Result<DeviceSlice<'_, T>> {
        let (offset, len) = bounds::<T>(&range, self.bytes())?;
        Ok(DeviceSlice::of(&self.block, offset, len))
    }

    /// Returns a view of the elements in `range`, counted from its start, for writing.
    ///
    /// # Errors
    /// [`MemoryError::OutOfRange`].
    pub fn slice_mut<T: Pod>(&mut self, range: Range<usize>) -> Result<DeviceSliceMut<'_, T>> {
        let (offset, len) = bounds::<T>(&range, self.bytes())?;
        Ok(DeviceSliceMut::of(&self.block, offset, len))
    }
}

/// Returns the position of a range of elements within `bytes`: its first byte and its number of
/// elements.
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
        _ => Err(MemoryError::OutOfRange {
            start: range.start as u64,
            end: range.end as u64,
            len: bytes.checked_div(size).unwrap_or(0),
        }),
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. the range is the block's own and stays mapped while it lives. Another block over the
// same memory can only be made by unsafe code, the import. 2. the block's own promise: its pool
// keeps the memory until every recorded use is done. 3. the block's own promise.
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

impl TrackUses for StableBlock {
    fn account(&self) -> Account<'_> {
        self.block.account()
    }
}

impl AddressRegistration {
    /// Records one more user that keeps the address.
    fn new(dedicated: Arc<DedicatedPool>, span: Arc<Span>, range: DeviceRange) -> Self {
        span.add_registration();
        if let Some(observer) = dedicated.driver.observer() {
            observer.registered(range);
        }
        Self { span, dedicated, range }
    }

    /// Returns the range that is kept.
    #[must_use]
    pub fn range(&self) -> DeviceRange {
        self.range
    }
}

impl Clone for AddressRegistration {
    #[track_caller]
    fn clone(&self) -> Self {
        let _site = site::enter();
        Self::new(self.dedicated.clone(), self.span.clone(), self.range)
    }
}

impl Drop for AddressRegistration {
    fn drop(&mut self) {
        // Before the count is decremented: from then on another thread may unmap.
        if let Some(observer) = self.dedicated.driver.observer() {
            observer.unregistered(self.range);
        }
        self.span.remove_registration();
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

impl fmt::Debug for AddressRegistration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registration").field("range", &self.range).finish_non_exhaustive()
    }
}
