//! A block of device memory, as its owner holds it.

use crate::{
    backing::handle::Handle,
    base::{
        driver::check_stream_device,
        extent::{BlockExtent, BlockMeta, LazyBox, PackedRequest, UntilFree},
        pending::{DeferredFree, PendingWork},
    },
    stream_cache::{BlockToken, CacheRef},
};
use aquifer_core::{
    DeviceId, MemoryError, OpaqueBlock, Result, Tag, budget::Leased, panics::Contained,
};
use aquifer_driver::{
    Access, DeviceRange, KeepAlive, Operand, OperandMut, RawStream, same_machine, site,
};
use aquifer_stream::{Account, Stream, StreamPool, Timeline, TrackUses, Use, UseList, Uses};
use std::{any::Any, fmt, sync::Arc};

/// A block of device memory that returns to its pool when it is dropped.
///
/// A block belongs to the stream it was allocated for. Work on that stream may use it at once,
/// until the drop. Work on any other stream needs [`Block::prepare`], or must be recorded with
/// [`Block::record_use`]. The pool reuses the memory only after all of this work.
///
/// One [`Launch`](aquifer_stream::Launch) orders a kernel with all blocks that it uses:
///
/// ```
/// use aquifer::{
///     DeviceId, DevicePool, Operand, PoolConfig, Request, sim::{Sim, SimKernel}, stream::Launch,
/// };
/// let sim = Sim::h200(1);
/// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
/// let (s, u) = (pool.stream()?, pool.stream()?);
/// let (a, b) = (pool.alloc(&s, Request::bytes(4096))?, pool.alloc(&u, Request::bytes(4096))?);
/// let ready = Launch::on(&u).reads(&a).updates(&b).preflight()?; // `u` waits for `s`
/// let kernel = SimKernel::new("add").reads(a.range(), None).writes(b.range(), None);
/// sim.launch(u.raw(), kernel).map_err(aquifer::MemoryError::Driver)?;
/// ready.commit()?;
/// drop(a); // and its bytes are given out again when the kernel is done with them
/// assert!(sim.violations().is_empty());
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
///
/// The stream's lease may end before the block. The block then stays valid. After its drop, the
/// next slow path of the pool makes its memory available to all streams. A stream takes it once the
/// host has seen its work done, or waits for that work on the device if the pool's
/// [`Adoption`](crate::Adoption) allows it. If nothing can prove the work done, only a wait for the
/// whole device frees the memory, in [`DevicePool::trim`](crate::DevicePool::trim) or in an
/// allocation that finds nothing else to wait for. An example is a block of a thread's default
/// stream that is dropped after the thread has ended.
///
/// The drop never blocks and calls no driver, with these exceptions. On a stream that is fenced at
/// once, such as a thread's default stream, it records an event. Once the pool is closed, the drop
/// of the last block and of blocks that other streams use may call the driver and block. Forgetting
/// a block leaks its memory. The contents are not initialised.
///
/// A request for no bytes gets an empty block, at address 0. It has no memory, so it is neither
/// charged nor counted nor recorded, and everything that takes a block takes it.
pub struct Block {
    pub(crate) owner: BlockOwner,
    pub(crate) extent: BlockExtent,
    pub(crate) uses: UseList,
    /// Created when a block first needs it. Most blocks never do.
    pub(crate) meta: LazyBox<BlockMeta>,
}

/// Where a block returns to.
pub(crate) enum BlockOwner {
    /// A stream's cache in a caching pool.
    Cache(CacheRef),
    /// One of the driver's own allocators.
    Driver(Arc<DriverBlock>),
}

/// The part of a block that returns it to its allocator.
pub(crate) struct DriverBlock {
    pub(crate) releaser: Arc<dyn ReleaseBlock>,
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) streams: StreamPool,
    pub(crate) bytes: u64,
    /// What the allocator knows the block by; 0 if its address suffices.
    pub(crate) key: u64,
}

/// Releases freed blocks.
pub(crate) trait ReleaseBlock: Send + Sync {
    /// Called before the block at this address is released. References to its uses that others hold
    /// must be dropped here.
    fn before_release(&self, _address: u64) {}

    fn release(&self, block: DeferredFree);

    /// Releases a block of this key that has no uses and no extras, and no more to be done.
    /// Returns whether it did.
    fn release_idle(&self, _block: &DriverBlock, _request: PackedRequest) -> bool {
        false
    }

    /// Returns the handles behind a range of a live block, and the offset of the range in the
    /// first. `None` for memory that other processes cannot map.
    fn handles(&self, _address: u64, _bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        None
    }

    /// Keeps a block while its address is raw, or returns it, to be kept in the table of all blocks
    /// that belong to no cache.
    fn insert_raw(&self, block: Block) -> Option<Block> {
        Some(block)
    }
}

/// The allocator of empty blocks. They have no memory, so nothing waits for their uses.
struct NoMemory;

impl ReleaseBlock for NoMemory {
    fn release(&self, _block: DeferredFree) {}

    fn release_idle(&self, _block: &DriverBlock, _request: PackedRequest) -> bool {
        true
    }

    fn insert_raw(&self, _block: Block) -> Option<Block> {
        None
    }
}

impl DriverBlock {
    /// Returns the allocator, which can also keep the block.
    pub(crate) fn releaser(&self) -> Arc<dyn ReleaseBlock> {
        self.releaser.clone()
    }

    /// Releases a freed block. `uses` are those not known to be done.
    fn release(&self, extent: &BlockExtent, generation: u64, uses: Uses, until_free: UntilFree) {
        self.releaser.release(DeferredFree {
            address: extent.address,
            bytes: self.bytes,
            requested: extent.request.bytes(),
            key: self.key,
            tag: extent.request.tag(),
            generation,
            timeline: self.timeline.clone(),
            work: PendingWork::new(&self.timeline, uses),
            until_free,
        });
    }
}

impl Block {
    /// Makes a block without extras from its token.
    #[inline]
    pub(crate) fn from_token(token: &BlockToken) -> Self {
        Self {
            owner: BlockOwner::Cache(token.cache_ref),
            extent: token.extent,
            uses: UseList::new(),
            meta: LazyBox::NONE,
        }
    }

    /// Makes a block that returns to one of the driver's allocators.
    #[inline]
    pub(crate) fn from_driver_block(
        address: u64,
        request: PackedRequest,
        driver_block: impl Into<Arc<DriverBlock>>,
        generation: u64,
    ) -> Self {
        let meta = if generation == 0 {
            LazyBox::NONE
        } else {
            LazyBox::new(BlockMeta { generation, ..BlockMeta::default() })
        };
        let extent = BlockExtent { address, request };
        Self { owner: BlockOwner::Driver(driver_block.into()), extent, uses: UseList::new(), meta }
    }

    /// Makes an empty block of `stream`.
    ///
    /// # Errors
    /// Those of [`check_stream_device`].
    #[cold]
    pub(crate) fn empty(streams: &StreamPool, stream: &Stream, tag: Tag) -> Result<Self> {
        check_stream_device(&**streams.driver(), streams.device(), stream.timeline())?;
        let driver_block = DriverBlock {
            releaser: Arc::new(NoMemory),
            timeline: stream.timeline().clone(),
            streams: streams.clone(),
            bytes: 0,
            key: 0,
        };
        Ok(Self::from_driver_block(0, PackedRequest::new(0, tag), driver_block, 0))
    }

    /// Returns the block's extras, created on demand.
    pub(crate) fn meta_mut(&mut self) -> &mut BlockMeta {
        self.meta.get_or_default()
    }

    /// Ties these live bytes of its tag to the block.
    pub(crate) fn count_for_tag(&mut self, bytes: Option<Leased>) {
        if let Some(bytes) = bytes {
            self.meta_mut().live.of_tag = Some(bytes);
        }
    }

    /// Returns the block's first address on the device.
    #[inline]
    #[must_use]
    pub fn address(&self) -> u64 {
        self.extent.address
    }

    /// Returns the number of bytes requested.
    #[inline]
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.extent.request.bytes()
    }

    /// Returns the number of bytes that the block occupies, at least those requested. Takes the
    /// lock of the stream's cache.
    #[must_use]
    pub fn capacity(&self) -> u64 {
        match &self.owner {
            BlockOwner::Cache(CacheRef { cache, key }) => cache.size_of(self.extent.address, *key),
            BlockOwner::Driver(driver_block) => driver_block.bytes,
        }
    }

    /// Returns the tag that the block was requested with.
    #[must_use]
    pub fn tag(&self) -> Tag {
        self.extent.request.tag()
    }

    /// Returns the device of the block.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.home().raw().device()
    }

    /// Returns the stream that owns the block.
    #[must_use]
    #[doc(hidden)]
    pub fn home(&self) -> Arc<Timeline> {
        match &self.owner {
            BlockOwner::Cache(CacheRef { cache, .. }) => cache.timeline(),
            BlockOwner::Driver(driver_block) => driver_block.timeline.clone(),
        }
    }

    /// Returns a number that distinguishes the block from all others at this address, on a driver
    /// with an observer; 0 on other drivers.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.meta.get().map_or(0, |meta| meta.generation)
    }

    /// Makes `stream` wait for the work that must precede `access`. The block's memory is not
    /// reused until the returned [`Use`] is finished or dropped, even if the block is freed before.
    /// The host does not wait.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] if a prepared use conflicts; [`MemoryError::WrongDevice`]; the
    /// driver's.
    #[track_caller]
    pub fn prepare(&self, stream: &Stream, access: Access) -> Result<Use> {
        let _site = site::enter();
        let owner = self.home();
        self.check_stream(&owner, stream)?;
        self.uses.prepare(self.address(), &owner, stream.timeline(), access)
    }

    /// Records that work queued on `stream` uses the block. The caller must have ordered that work
    /// with the block's other uses, by a wait of `stream` for the owner stream or by
    /// [`Block::prepare`].
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; the driver's, if the stream has to be fenced at once.
    #[track_caller]
    pub fn record_use(&self, stream: &Stream, access: Access) -> Result<()> {
        let _site = site::enter();
        let owner = self.home();
        self.check_stream(&owner, stream)?;
        self.uses.record(&owner, stream.timeline(), access)
    }

    fn check_stream(&self, owner: &Timeline, stream: &Stream) -> Result<()> {
        self.check_device(owner, stream.device())?;
        same_machine(&**owner.driver(), &**stream.driver())
    }

    fn check_device(&self, owner: &Timeline, device: DeviceId) -> Result<()> {
        let expected = owner.raw().device();
        if device == expected {
            Ok(())
        } else {
            Err(MemoryError::WrongDevice { expected, actual: device })
        }
    }

    /// Orders a use that ends with a borrow. `exclusive` states that every conflicting borrow has
    /// ended.
    pub(crate) fn order_as(
        &self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
        exclusive: bool,
    ) -> Result<()> {
        let owner = self.home();
        self.check_device(&owner, stream.device())?;
        let on = if owner.is(alive.as_ref()) {
            owner.clone()
        } else {
            self.owner.streams()?.timeline(stream, alive)?
        };
        let lend = if exclusive { UseList::lend } else { UseList::lend_beside };
        lend(&self.uses, self.address(), &owner, &on, access)
    }
}

impl OpaqueBlock for Block {
    fn keep_until_free(&mut self, thing: Box<dyn Any + Send + Sync>) {
        self.meta_mut().until_free.get_or_insert_default().push(Contained::new(thing));
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. The block owns the range until it is dropped, and its pool does not reuse the range
// before. 2. `UseList::lend` makes the stream wait for the owner stream and for conflicting uses,
// and the pool does not reuse the bytes until every recorded use is done. 3. A stream that is not
// fenced at once is valid until it is retired. 4. It is the machine of the driver that the memory
// comes from.
unsafe impl Operand for Block {
    fn range(&self) -> DeviceRange {
        DeviceRange { device: self.device(), address: self.address(), bytes: self.bytes() }
    }

    fn machine(&self) -> Option<u64> {
        Some(self.home().driver().machine())
    }

    fn home_stream(&self) -> Option<RawStream> {
        let owner = self.home();
        // A stream that is fenced at once belongs to its own thread, or may have been destroyed.
        (!owner.fences_at_once() && !owner.is_retired()).then(|| owner.raw())
    }

    fn order(&self, stream: RawStream, alive: Option<KeepAlive>, access: Access) -> Result<()> {
        // Holding `&self` proves that no mutable borrow is live. The declared access mode proves
        // nothing.
        self.order_as(stream, alive, access, !access.writes())
    }
}

#[expect(unsafe_code, reason = "makes the promises of an operand")]
// SAFETY: 1. The owner has exclusive access to the block, and its slices borrow it.
unsafe impl OperandMut for Block {
    fn order_mut(
        &mut self,
        stream: RawStream,
        alive: Option<KeepAlive>,
        access: Access,
    ) -> Result<()> {
        self.order_as(stream, alive, access, true)
    }
}

impl TrackUses for Block {
    fn account(&self) -> Account<'_> {
        // Holding `&self` proves that no mutable borrow is live.
        Account { address: self.address(), home: self.home(), uses: &self.uses, alone: true }
    }
}
impl BlockOwner {
    /// Returns the streams of the block's pool.
    pub(crate) fn streams(&self) -> Result<StreamPool> {
        match self {
            Self::Cache(CacheRef { cache, .. }) => cache.streams().ok_or(MemoryError::Closed),
            Self::Driver(driver_block) => Ok(driver_block.streams.clone()),
        }
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        if let BlockOwner::Cache(cache_ref) = &self.owner
            && self.uses.is_empty()
            && self.meta.is_none()
        {
            return cache_ref.cache.deallocate(cache_ref, &self.extent);
        }
        self.end();
    }
}

impl Block {
    /// Frees a block that has uses, extras or another owner than a cache.
    #[inline(never)]
    fn end(&mut self) {
        match &self.owner {
            BlockOwner::Cache(cache_ref)
                if self.uses.is_empty()
                    && self.meta.get().is_some_and(BlockMeta::has_only_charges) =>
            {
                let live = self.meta.take();
                cache_ref.cache.deallocate(cache_ref, &self.extent);
                // Released after the memory, so that a request granted these bytes finds the
                // memory.
                drop(live);
            }
            BlockOwner::Cache(cache_ref) => {
                let token = BlockToken { cache_ref: *cache_ref, extent: self.extent };
                cache_ref.cache.deallocate_with_meta(token, &mut self.uses, self.meta.take());
            }
            BlockOwner::Driver(driver_block)
                if self.uses.is_empty()
                    && self.meta.is_none()
                    && driver_block.releaser.release_idle(driver_block, self.extent.request) => {}
            BlockOwner::Driver(driver_block) => {
                driver_block.releaser.before_release(self.extent.address);
                let uses = self.uses.take();
                let meta = self.meta.take().or_default();
                driver_block.release(&self.extent, meta.generation, uses, meta.until_free);
            }
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Block")
            .field("address", &format_args!("{:#x}", self.address()))
            .field("bytes", &self.bytes())
            .field("tag", &self.tag())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_six_words() {
        assert_eq!(size_of::<Block>(), 48);
    }

    #[test]
    fn packed_request_round_trips() {
        assert_eq!(size_of::<PackedRequest>(), 8);
        for bytes in [0, 1, 511, u64::from(u32::MAX), 1 << 32, crate::request::MAX_BYTES] {
            let request = PackedRequest::new(bytes, Tag::OTHER);
            assert_eq!((request.bytes(), request.tag()), (bytes, Tag::OTHER));
        }
    }
}
