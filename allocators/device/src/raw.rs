//! Blocks as raw addresses, for interfaces that carry only addresses.
//!
//! - [`Block::into_raw`] stores the contents of the block's token in a table of its stream's cache,
//!   under that cache's lock. So streams share no state here either. A table that has reached its
//!   size allocates nothing.
//! - Caches share the pool's address range, so the cache of an address has to be found. A
//!   [`AddressDirectory`] stores, for each 2 MiB, up to four caches that have released raw
//!   addresses there. In a steady state it is only read.
//! - The directory is a hint. A cache that it has dropped is found by searching all caches, and a
//!   cache that it names wrongly does not have the address.

use crate::{
    Block, DevicePool, Request,
    base::{extent::BlockMeta, lazy_box::LazyBox},
    block::{BlockOwner, BlockToken},
    direct::Direct,
    physical::Physical,
    stream_cache::{FreeFollowUp, StreamCache},
};
use aquifer_core::{MemoryError, Result, event::HeldBlock};
use aquifer_heap::HeapError;
use aquifer_stream::{Stream, UseList};
use std::{
    collections::{BTreeMap, HashMap},
    hash::{BuildHasherDefault, Hasher},
    mem::{self, ManuallyDrop},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A block that was released as its raw address.
pub(crate) enum RawBlock {
    /// The contents of its token.
    Unique(RawToken),
    /// The token itself: it is or was shared.
    Shared(Arc<Block>),
}

/// The contents of a block's token.
pub(crate) struct RawToken {
    token: BlockToken,
    uses: UseList,
    meta: LazyBox<BlockMeta>,
}

impl RawToken {
    fn into_block(self) -> Block {
        let Self { token: BlockToken { cache_ref, extent }, uses, meta } = self;
        Block { owner: BlockOwner::Cache(cache_ref), extent, uses, meta }
    }
}

/// The blocks of one cache that were released as raw addresses.
pub(crate) type CacheRawTable = HashMap<u64, RawBlock, BuildHasherDefault<AddressHasher>>;

/// A hash for addresses, whose low bits are all alike. It is deterministic, like all of the pool.
#[derive(Default)]
pub(crate) struct AddressHasher(u64);

impl Hasher for AddressHasher {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }
    fn write_u64(&mut self, address: u64) {
        let mixed = (self.0 ^ address).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }
    fn finish(&self) -> u64 {
        self.0
    }
}

/// The bytes of addresses that share an entry, as a power of two.
const GRAIN_BITS: u32 = 21;
/// The number of entries: 128 GiB of consecutive addresses have one each.
const ENTRIES: usize = 1 << 16;
/// Caches per entry, in two bytes each: the number of the cache plus one, the latest in the lowest.
const CACHES_PER_ENTRY: u32 = 4;
/// The maximum number of caches that can be recorded.
const DIRECT_CACHES: usize = 1024;

/// Maps addresses to the caches that may have released them as raw addresses.
pub(crate) struct AddressDirectory {
    /// Allocated at the first raw address: half a MiB, of which the kernel backs only what is
    /// used.
    entries: OnceLock<Box<[AtomicU64]>>,
    /// The caches of the pool in the order of their creation. They exist until the pool closes,
    /// and the directory is not used afterwards.
    caches: Box<[OnceLock<&'static StreamCache>]>,
}

impl AddressDirectory {
    pub(crate) fn new() -> Self {
        Self {
            entries: OnceLock::new(),
            caches: std::iter::repeat_with(OnceLock::new).take(DIRECT_CACHES).collect(),
        }
    }

    /// Registers a cache. A cache beyond the limit is found by searching all.
    pub(crate) fn insert_cache(&self, number: usize, cache: &'static StreamCache) {
        if let Some(slot) = self.caches.get(number) {
            let _ = slot.set(cache);
        }
    }

    /// Returns the cache of this number, if it is registered.
    #[inline]
    pub(crate) fn cache(&self, number: usize) -> Option<&'static StreamCache> {
        self.caches.get(number)?.get().copied()
    }

    fn entry(address: u64) -> usize {
        (address >> GRAIN_BITS) as usize % ENTRIES
    }

    /// Records that the cache of this number has released an address here.
    pub(crate) fn record(&self, address: u64, number: usize) {
        if number >= DIRECT_CACHES {
            return;
        }
        let entries = self
            .entries
            .get_or_init(|| std::iter::repeat_with(AtomicU64::default).take(ENTRIES).collect());
        let lane = number as u64 + 1;
        let entry = &entries[Self::entry(address)];
        let noted = entry.load(Ordering::Relaxed);
        if !(0..CACHES_PER_ENTRY).any(|n| noted >> (16 * n) & 0xffff == lane) {
            // A race between two stores may lose one of the records. The only cost is a search.
            entry.store(noted << 16 | lane, Ordering::Relaxed);
        }
    }

    /// Returns the caches that may have released `address`, the most likely first.
    fn candidates(&self, address: u64) -> impl Iterator<Item = &'static StreamCache> {
        let entry = self.entries.get().map(|entries| &entries[Self::entry(address)]);
        let noted = entry.map_or(0, |entry| entry.load(Ordering::Relaxed));
        (0..CACHES_PER_ENTRY).filter_map(move |n| {
            let number = (noted >> (16 * n) & 0xffff).checked_sub(1)?;
            self.cache(number as usize)
        })
    }
}

impl Block {
    /// Converts the block to its raw address. The block stays allocated, with its recorded uses,
    /// until [`DevicePool::from_raw`] converts it back or [`DevicePool::free_raw`] frees it.
    /// Otherwise it leaks and keeps its pool's memory.
    ///
    /// Takes the lock of its stream's cache and makes no driver call.
    #[must_use = "the address is the only way back to the block"]
    pub fn into_raw(self) -> u64 {
        let address = self.address();
        if let BlockOwner::Driver(driver_block) = &self.owner {
            let releaser = driver_block.releaser();
            releaser.insert_raw(self);
            return address;
        }
        // Dropping it would free the block.
        let mut block = ManuallyDrop::new(self);
        let (uses, meta) = (mem::take(&mut block.uses), block.meta.take());
        if let BlockOwner::Cache(cache_ref) = block.owner {
            let token = BlockToken { cache_ref, extent: block.extent };
            cache_ref.cache.insert_raw(address, RawToken { token, uses, meta });
        }
        address
    }
}

/// Raw blocks that belong to no cache, by address. No two live blocks of a process share an
/// address.
static RAW_TABLE: Mutex<RawTable> = Mutex::new(RawTable(BTreeMap::new()));

/// Blocks by their raw addresses. Any of them may be shared.
#[derive(Default)]
pub(crate) struct RawTable(BTreeMap<u64, Arc<Block>>);

impl RawTable {
    pub(crate) fn insert(&mut self, block: Block) {
        let before = self.0.insert(block.address(), Arc::new(block));
        debug_assert!(before.is_none(), "two live blocks at one address");
    }

    pub(crate) fn share(&self, address: u64) -> Option<Arc<Block>> {
        self.0.get(&address).cloned()
    }

    /// Removes and returns the block, unless it is shared.
    pub(crate) fn take_unique(&mut self, address: u64) -> Option<Result<Block>> {
        let block = self.0.remove(&address)?;
        Some(Arc::try_unwrap(block).map_err(|shared| {
            self.0.insert(address, shared);
            MemoryError::Busy { address }
        }))
    }

    /// Removes the block. The caller must drop it without this table's lock.
    pub(crate) fn remove(&mut self, address: u64) -> Option<Arc<Block>> {
        self.0.remove(&address)
    }
}

fn raw_table() -> MutexGuard<'static, RawTable> {
    RAW_TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stores a block that belongs to no cache while its address is released.
pub(crate) fn insert_raw_block(block: Block) {
    raw_table().insert(block);
}

impl DevicePool {
    /// Allocates a block and returns its raw address, like [`DevicePool::alloc`] followed by
    /// [`Block::into_raw`], for interfaces that carry only addresses. Locks the cache once for
    /// both.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let address = pool.alloc_raw(&pool.stream()?, Request::bytes(4096))?;
    /// assert_eq!(pool.stats().requested, 4096);
    /// pool.free_raw(address)?;
    /// assert_eq!(pool.stats().requested, 0);
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::alloc`].
    #[track_caller]
    #[inline]
    pub fn alloc_raw(&self, stream: &Stream, request: Request) -> Result<u64> {
        if let Some(cache) = self.fast_cache(stream, &request)
            && let Some(address) = cache.fast_alloc_raw(&request)
        {
            return Ok(address);
        }
        self.alloc(stream, request).map(Block::into_raw)
    }

    /// Returns the block of this pool that was [converted](Block::into_raw) to this address.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let stream = pool.stream()?;
    /// let address = pool.alloc(&stream, Request::bytes(4096))?.into_raw();
    /// let block = pool.from_raw(address)?;
    /// assert_eq!((block.address(), block.bytes()), (address, 4096));
    /// assert!(pool.from_raw(address).is_err(), "it has an owner again");
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::DoubleFree`] if the block at this address was freed and its memory still
    /// exists; [`MemoryError::ForeignBlock`] for any other address without a raw block;
    /// [`MemoryError::Busy`] while the block is [shared](DevicePool::share_raw). In each case
    /// nothing has changed.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        if let Some(direct) = self.bypass(address) {
            return direct.from_raw(address);
        }
        let block = self.find(address, |cache| cache.take_raw(address));
        let block = block.or_else(|| {
            self.is_in_raw_table(address).then(|| raw_table().take_unique(address)).flatten()
        });
        block.unwrap_or_else(|| Err(self.refuse(address)))
    }

    /// Returns the raw block of this pool at this address, to record uses of it. The address stays
    /// valid.
    ///
    /// Several threads may hold the block at once. If it is freed by [`DevicePool::free_raw`] in
    /// that time, it is freed when the last of them drops it, so the uses they have recorded delay
    /// its reuse.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{Access, DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let (stream, other) = (pool.stream()?, pool.stream()?);
    /// let address = pool.alloc(&stream, Request::bytes(4096))?.into_raw();
    /// other.wait_for(&stream)?;
    /// pool.share_raw(address)?.record_use(&other, Access::Read)?;
    /// pool.free_raw(address)?; // `stream` reuses it only after `other` is done
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], except [`MemoryError::Busy`].
    pub fn share_raw(&self, address: u64) -> Result<Arc<Block>> {
        if let Some(direct) = self.bypass(address) {
            return direct.share_raw(address);
        }
        let block = self.find(address, |cache| cache.share_raw(address));
        let block = block.or_else(|| {
            self.is_in_raw_table(address).then(|| raw_table().share(address)).flatten()
        });
        block.ok_or_else(|| self.refuse(address))
    }

    /// Returns the bypass allocator, in which each block is its own allocation, unless the address
    /// is one of a graph's or a stable block.
    fn bypass(&self, address: u64) -> Option<&Direct> {
        self.core().bypass().filter(|_| !self.is_in_raw_table(address))
    }

    /// Returns whether a raw block of this pool that belongs to no cache has this address.
    fn is_in_raw_table(&self, address: u64) -> bool {
        raw_table().0.get(&address).is_some_and(|block| match &block.owner {
            BlockOwner::Driver(driver_block) => driver_block.streams.is(self.streams()),
            BlockOwner::Cache(_) => false,
        })
    }

    /// Frees the block that was [converted](Block::into_raw) to this address, as dropping it would.
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], except [`MemoryError::Busy`].
    pub fn free_raw(&self, address: u64) -> Result<()> {
        if let Some(direct) = self.bypass(address) {
            return direct.free_raw(address);
        }
        if self.find(address, |cache| cache.free_raw(address)).is_some() {
            return Ok(());
        }
        let backed = self.is_in_raw_table(address).then(|| raw_table().remove(address)).flatten();
        backed.map(drop).ok_or_else(|| self.refuse(address))
    }

    /// Searches the likely caches, then all.
    fn find<T>(
        &self,
        address: u64,
        mut query: impl FnMut(&'static StreamCache) -> Option<T>,
    ) -> Option<T> {
        let core = self.core();
        let likely = core.directory.candidates(address).find_map(&mut query);
        likely.or_else(|| core.caches(&core.scratch.begin()).into_iter().find_map(query))
    }

    /// Returns the raw blocks of the streams' caches.
    pub(crate) fn raw_blocks(&self) -> Vec<HeldBlock> {
        let core = self.core();
        core.caches(&core.scratch.begin()).into_iter().flat_map(StreamCache::raw_blocks).collect()
    }

    /// Returns the error for an address without a raw block.
    #[cold]
    fn refuse(&self, address: u64) -> MemoryError {
        let core = self.core();
        let freed = core.caches(&core.scratch.begin()).into_iter().any(|cache| {
            cache.with(|s| {
                let pending =
                    || s.pending.iter().any(|pending| pending.token.extent.address == address);
                match s.heap.block_at(address) {
                    Ok(_) => pending(),
                    Err(why) => matches!(why, HeapError::DoubleFree { .. }),
                }
            })
        });
        let shared = || match &self.core().physical {
            Physical::Mapped(mapped) => mapped.is_shared_free(address),
            Physical::Segments(_) => false,
        };
        let checked = || self.checked().is_some_and(|checked| checked.was_freed(address));
        if freed || shared() || checked() {
            MemoryError::DoubleFree { address }
        } else {
            MemoryError::ForeignBlock { address }
        }
    }
}

impl StreamCache {
    /// Allocates a block from the cache, if it has room, and returns its address. The fast path
    /// without listeners.
    #[inline]
    fn fast_alloc_raw(&'static self, request: &Request) -> Option<u64> {
        self.with_unflushed(|s| {
            let token = *s.allocate_token(self, request)?;
            let address = token.extent.address;
            s.raw.insert(
                address,
                RawBlock::Unique(RawToken { token, uses: UseList::new(), meta: LazyBox::NONE }),
            );
            s.record_raw(address);
            Some(address)
        })
    }

    /// Returns the raw blocks of this cache.
    fn raw_blocks(&'static self) -> Vec<HeldBlock> {
        let stream = self.timeline().number();
        let to_held = |(&address, raw): (&u64, &RawBlock)| {
            let request = match raw {
                RawBlock::Unique(token) => token.token.extent.request,
                RawBlock::Shared(block) => block.extent.request,
            };
            HeldBlock { address, bytes: request.bytes(), stream, tag: request.tag(), at: None }
        };
        // The list is allocated before the lock is taken. It may grow under the lock if blocks were
        // added since.
        let mut blocks = Vec::with_capacity(self.with(|s| s.raw.len()));
        self.with(|s| blocks.extend(s.raw.iter().map(to_held)));
        blocks
    }

    /// Stores the contents of a token while its address is released.
    fn insert_raw(&self, address: u64, token: RawToken) {
        self.with_unflushed(|s| {
            s.raw.insert(address, RawBlock::Unique(token));
            s.record_raw(address);
        });
    }

    /// Removes and returns the raw block at `address`; `None` if this cache has none.
    fn take_raw(&self, address: u64) -> Option<Result<Block>> {
        self.with_unflushed(|s| {
            let block = match s.raw.remove(&address)? {
                RawBlock::Unique(token) => Ok(token.into_block()),
                // References are cloned only under this lock, so a unique one stays unique.
                RawBlock::Shared(block) => Arc::try_unwrap(block),
            };
            Some(block.map_err(|shared| {
                s.raw.insert(address, RawBlock::Shared(shared));
                MemoryError::Busy { address }
            }))
        })
    }

    /// Returns the raw block at `address`, which stays raw; `None` if this cache has none.
    fn share_raw(&self, address: u64) -> Option<Arc<Block>> {
        self.with_unflushed(|s| {
            let block = match s.raw.remove(&address)? {
                RawBlock::Unique(token) => Arc::new(token.into_block()),
                RawBlock::Shared(block) => block,
            };
            s.raw.insert(address, RawBlock::Shared(block.clone()));
            Some(block)
        })
    }

    /// Frees the raw block at `address`; `None` if this cache has none.
    fn free_raw(&'static self, address: u64) -> Option<()> {
        /// What remains to be done after the lock is released.
        enum FreeStep {
            After(Option<Box<FreeFollowUp>>),
            Token(RawToken),
            Shared(Arc<Block>),
        }
        let rest = self.with_unflushed(|s| {
            Some(match s.raw.remove(&address)? {
                RawBlock::Unique(mut raw) => {
                    if raw.uses.is_empty() && raw.meta.is_none() {
                        FreeStep::After(s.deallocate(&raw.token.cache_ref, &raw.token.extent))
                    } else {
                        FreeStep::Token(raw)
                    }
                }
                RawBlock::Shared(block) => FreeStep::Shared(block),
            })
        })?;
        match rest {
            FreeStep::After(after) => self.follow_up(after),
            FreeStep::Token(RawToken { token, mut uses, meta }) => {
                self.deallocate_with_meta(token, &mut uses, meta);
            }
            FreeStep::Shared(block) => drop(block),
        }
        Some(())
    }
}
