//! Blocks as raw addresses, for interfaces that carry only addresses.
//!
//! - [`Block::into_raw`] stores the contents of the block's token in a table of its stream's cache,
//!   under that cache's lock. So streams share no state here either. A table that has reached its
//!   size allocates nothing.
//! - Caches share the pool's address range, so the cache of an address has to be found. An
//!   [`AddressDirectory`](crate::base::addresses::AddressDirectory) stores, for each 2 MiB,
//!   up to four caches that have released raw addresses there. In a steady state it is only read.
//!   It is a hint: other caches are searched if it does not help.

use crate::{
    Block, DevicePool, Request,
    block::BlockOwner,
    raw_table::raw_table,
    stream_cache::{BlockToken, RawToken, StreamCache},
};
use aquifer_core::{MemoryError, Result, Tag};
use aquifer_driver::{DeviceRange, RawStream};
use aquifer_formats::HeldBlock;
use aquifer_heap::HeapError;
use aquifer_stream::Stream;
use std::{
    mem::{self, ManuallyDrop},
    sync::Arc,
};

impl Block {
    /// Converts the block to its raw address. The block stays allocated, with its recorded uses,
    /// until [`DevicePool::from_raw`] converts it back or [`DevicePool::free_raw`] frees it.
    /// Otherwise it leaks and keeps its pool's memory. The address of an empty block is 0, which
    /// may be freed any number of times.
    ///
    /// Takes the lock of its stream's cache and makes no driver call.
    #[must_use = "the address is the only way back to the block"]
    pub fn into_raw(self) -> u64 {
        let address = self.address();
        if let BlockOwner::Driver(driver_block) = &self.owner {
            let releaser = driver_block.releaser();
            if let Some(block) = releaser.insert_raw(self) {
                raw_table().insert(block);
            }
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

/// Makes the block of a token's contents.
fn into_block(raw: RawToken) -> Block {
    let RawToken { token: BlockToken { cache_ref, extent }, uses, meta } = raw;
    Block { owner: BlockOwner::Cache(cache_ref), extent, uses, meta }
}

impl DevicePool {
    /// Allocates a block and returns its raw address, like [`DevicePool::alloc`] followed by
    /// [`Block::into_raw`], for interfaces that carry only addresses. Locks the cache once for
    /// both.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let address = pool.alloc_raw(&pool.stream()?, Request::bytes(4096))?;
    /// assert_eq!(pool.stats().requested, 4096);
    /// pool.free_raw(address)?;
    /// assert_eq!(pool.stats().requested, 0);
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::alloc`].
    #[track_caller]
    #[inline]
    pub fn alloc_raw(&self, stream: &Stream, request: Request) -> Result<u64> {
        let cache = self.core().fast_cache(stream, &request);
        match cache.and_then(|cache| cache.fast_alloc_raw(&request)) {
            Some(address) => Ok(address),
            None => self.alloc_full(stream, request).map(Block::into_raw),
        }
    }

    /// Returns the block of this pool that was [converted](Block::into_raw) to this address.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let stream = pool.stream()?;
    /// let address = pool.alloc(&stream, Request::bytes(4096))?.into_raw();
    /// let block = pool.from_raw(address)?;
    /// assert_eq!((block.address(), block.bytes()), (address, 4096));
    /// assert!(pool.from_raw(address).is_err(), "it has an owner again");
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::DoubleFree`] if the block at this address was freed and its memory still
    /// exists; [`MemoryError::ForeignBlock`] for any other address without a raw block;
    /// [`MemoryError::Busy`] while the block is [shared](DevicePool::share_raw). In each case
    /// nothing has changed.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        let block = self.find(address, |cache| cache.take_raw(address, into_block));
        let block = block.or_else(|| {
            self.is_in_raw_table(address).then(|| raw_table().take_unique(address)).flatten()
        });
        block.unwrap_or_else(|| self.empty_at(address))
    }

    /// Returns the raw block of this pool at this address, to record uses of it. The address stays
    /// valid.
    ///
    /// Several threads may hold the block at once. If it is freed by [`DevicePool::free_raw`] in
    /// that time, it is freed when the last of them drops it, so the uses they have recorded delay
    /// its reuse.
    ///
    /// ```
    /// use aquifer::{Access, DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let (stream, other) = (pool.stream()?, pool.stream()?);
    /// let address = pool.alloc(&stream, Request::bytes(4096))?.into_raw();
    /// other.wait_for(&stream)?;
    /// pool.share_raw(address)?.record_use(&other, Access::Read)?;
    /// pool.free_raw(address)?; // `stream` reuses it only after `other` is done
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], except [`MemoryError::Busy`].
    pub fn share_raw(&self, address: u64) -> Result<Arc<Block>> {
        let block = self.find(address, |cache| cache.share_raw(address, into_block));
        let block = block.or_else(|| {
            self.is_in_raw_table(address).then(|| raw_table().share(address)).flatten()
        });
        block.map_or_else(|| self.empty_at(address).map(Arc::new), Ok)
    }

    /// Returns an empty block of the legacy default stream for the address 0, or the error for any
    /// other address without a raw block.
    #[cold]
    fn empty_at(&self, address: u64) -> Result<Block> {
        if address != 0 {
            return Err(self.refuse(address));
        }
        Block::empty(self.streams(), &self.streams().legacy_default()?, Tag::NONE)
    }

    /// Returns whether a raw block of this pool that belongs to no cache has this address.
    fn is_in_raw_table(&self, address: u64) -> bool {
        raw_table().get(address).is_some_and(|block| match &block.owner {
            BlockOwner::Driver(driver_block) => driver_block.streams.is(self.streams()),
            BlockOwner::Cache(_) => false,
        })
    }

    /// Frees the block that was [converted](Block::into_raw) to this address, as dropping it would.
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], except [`MemoryError::Busy`].
    pub fn free_raw(&self, address: u64) -> Result<()> {
        if self.find(address, |cache| cache.free_raw(address)).is_some() {
            return Ok(());
        }
        let backed = self.is_in_raw_table(address).then(|| raw_table().remove(address)).flatten();
        match backed {
            None if address != 0 => Err(self.refuse(address)),
            _ => Ok(()),
        }
    }

    /// Searches the likely caches, then all.
    fn find<T>(
        &self,
        address: u64,
        mut query: impl FnMut(&'static StreamCache) -> Option<T>,
    ) -> Option<T> {
        let core = self.core();
        let numbers = core.directory.candidates(address);
        let likely = numbers.filter_map(|number| core.numbered_cache(number)).find_map(&mut query);
        likely.or_else(|| core.caches(&core.scratch.begin()).into_iter().find_map(query))
    }

    /// Returns the raw blocks of the streams' caches: where each begins, with its requested bytes,
    /// and its stream. Blocks of graphs, stable and parkable blocks, and the blocks of a pool in
    /// bypass mode are not among them. Locks one cache at a time.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let stream = pool.stream()?;
    /// let address = pool.alloc_raw(&stream, Request::bytes(4096))?;
    /// let blocks = pool.raw_ranges();
    /// assert_eq!((blocks[0].0.address, blocks[0].0.bytes), (address, 4096));
    /// assert_eq!(blocks[0].1, stream.raw());
    /// pool.free_raw(address)?;
    /// assert!(pool.raw_ranges().is_empty());
    /// # Ok::<(), aquifer::MemoryError>(())
    /// ```
    #[must_use]
    pub fn raw_ranges(&self) -> Vec<(DeviceRange, RawStream)> {
        let (core, device) = (self.core(), self.device());
        let of_cache = |cache: &'static StreamCache| {
            let stream = cache.timeline().raw();
            cache.raw_blocks().into_iter().map(move |held| {
                (DeviceRange { device, address: held.address, bytes: held.bytes }, stream)
            })
        };
        core.caches(&core.scratch.begin()).into_iter().flat_map(of_cache).collect()
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
        let shared = || core.memory.is_shared_free(address) || core.dedicated.was_freed(address);
        let checked = || self.checked().is_some_and(|checked| checked.was_freed(address));
        if freed || shared() || checked() {
            MemoryError::DoubleFree { address }
        } else {
            MemoryError::ForeignBlock { address }
        }
    }
}
