//! Blocks as raw addresses, for interfaces that carry only addresses.
//!
//! - [`Block::into_raw`] stores the contents of the block's token in a table of its stream's cache,
//!   under that cache's lock. So streams share no state here either. A table that has reached its
//!   size allocates nothing.
//! - Caches share the pool's address range, so the cache of an address has to be found. A
//!   [`Directory`] stores, for each 2 MiB, up to four caches that have released raw addresses
//!   there. In a steady state it is only read.
//! - The directory is a hint. A cache that it has dropped is found by searching all caches, and a
//!   cache that it names wrongly does not have the address.

use crate::{
    Block, DevicePool, Request,
    block::{Extras, Freed, Owner, Rare},
    direct::Direct,
    home::{AfterFree, Home},
    physical::Physical,
};
use aquifer_core::{MemoryError, Result, event::HeldBlock};
use aquifer_heap::HeapError;
use aquifer_stream::{Stream, UseList};
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    hash::{BuildHasherDefault, Hasher},
    mem::{self, ManuallyDrop},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

/// A block that was released as its raw address.
pub(crate) enum Raw {
    /// The contents of its token.
    Alone(Token),
    /// The token itself: it is or was shared.
    Shared(Arc<Block>),
}

/// The contents of a block's token.
pub(crate) struct Token {
    freed: Freed,
    uses: UseList,
    extras: Rare<Extras>,
}

impl Token {
    fn into_block(self) -> Block {
        let Self { freed: Freed { way, place }, uses, extras } = self;
        Block { owner: Owner::Pool(way), place, uses, extras }
    }
}

/// The blocks of one cache that were released as raw addresses.
pub(crate) type Table = HashMap<u64, Raw, BuildHasherDefault<Spread>>;

/// A hash for addresses, whose low bits are all alike. It is deterministic, like all of the pool.
#[derive(Default)]
pub(crate) struct Spread(u64);

impl Hasher for Spread {
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
const LANES: u32 = 4;
/// The maximum number of caches that can be recorded.
const NAMED: usize = 1024;

/// Maps addresses to the caches that may have released them as raw addresses.
pub(crate) struct Directory {
    /// Allocated at the first raw address: half a MiB, of which the kernel backs only what is used.
    entries: OnceLock<Box<[AtomicU64]>>,
    /// The caches of the pool in the order of their creation. They exist until the pool closes, and
    /// the directory is not used afterwards.
    homes: Box<[OnceLock<&'static Home>]>,
}

impl Directory {
    pub(crate) fn new() -> Self {
        Self {
            entries: OnceLock::new(),
            homes: std::iter::repeat_with(OnceLock::new).take(NAMED).collect(),
        }
    }

    /// Registers a cache. A cache beyond the limit is found by searching all.
    pub(crate) fn name(&self, number: usize, home: &'static Home) {
        if let Some(place) = self.homes.get(number) {
            let _ = place.set(home);
        }
    }

    /// Returns the cache of this number, if it is registered.
    #[inline]
    pub(crate) fn home(&self, number: usize) -> Option<&'static Home> {
        self.homes.get(number)?.get().copied()
    }

    fn entry(address: u64) -> usize {
        (address >> GRAIN_BITS) as usize % ENTRIES
    }

    /// Records that the cache of this number has released an address here.
    pub(crate) fn note(&self, address: u64, number: usize) {
        if number >= NAMED {
            return;
        }
        let entries = self
            .entries
            .get_or_init(|| std::iter::repeat_with(AtomicU64::default).take(ENTRIES).collect());
        let lane = number as u64 + 1;
        let entry = &entries[Self::entry(address)];
        let noted = entry.load(Ordering::Relaxed);
        if !(0..LANES).any(|n| noted >> (16 * n) & 0xffff == lane) {
            // A race between two stores may lose one of the records. The only cost is a search.
            entry.store(noted << 16 | lane, Ordering::Relaxed);
        }
    }

    /// Returns the caches that may have released `address`, the most likely first.
    fn likely(&self, address: u64) -> impl Iterator<Item = &'static Home> {
        let entry = self.entries.get().map(|entries| &entries[Self::entry(address)]);
        let noted = entry.map_or(0, |entry| entry.load(Ordering::Relaxed));
        (0..LANES).filter_map(move |n| {
            let number = (noted >> (16 * n) & 0xffff).checked_sub(1)?;
            self.home(number as usize)
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
        if let Owner::Backend(backed) = &self.owner {
            let keeper = backed.keeper();
            keeper.keep_raw(self);
            return address;
        }
        // Dropping it would free the block.
        let mut block = ManuallyDrop::new(self);
        let (uses, extras) = (mem::take(&mut block.uses), block.extras.take());
        if let Owner::Pool(way) = block.owner {
            let freed = Freed { way, place: block.place };
            way.home.keep_raw(address, Token { freed, uses, extras });
        }
        address
    }
}

/// Raw blocks that belong to no cache, by address. No two live blocks of a process share an
/// address.
static BACKED: Mutex<Backlog> = Mutex::new(Backlog(BTreeMap::new()));

/// Blocks by their raw addresses. Any of them may be shared.
#[derive(Default)]
pub(crate) struct Backlog(BTreeMap<u64, Arc<Block>>);

impl Backlog {
    pub(crate) fn keep(&mut self, block: Block) {
        let before = self.0.insert(block.address(), Arc::new(block));
        debug_assert!(before.is_none(), "two live blocks at one address");
    }

    pub(crate) fn share(&self, address: u64) -> Option<Arc<Block>> {
        self.0.get(&address).cloned()
    }

    /// Removes and returns the block, unless it is shared.
    pub(crate) fn take(&mut self, address: u64) -> Option<Result<Block>> {
        let block = self.0.remove(&address)?;
        Some(Arc::try_unwrap(block).map_err(|shared| {
            self.0.insert(address, shared);
            MemoryError::Busy { address }
        }))
    }

    /// Removes the block. The caller must drop it without this table's lock.
    pub(crate) fn let_go(&mut self, address: u64) -> Option<Arc<Block>> {
        self.0.remove(&address)
    }
}

/// The maximum number of freed addresses that are remembered.
const REMEMBERED: usize = 1 << 16;

/// The newest addresses whose blocks were freed and that have not been allocated since. They
/// distinguish a double free from an address that was never allocated.
#[derive(Default, Debug)]
pub(crate) struct FreedAddresses {
    /// The number of the free at each address.
    at: HashMap<u64, u64>,
    /// Oldest first, some of them out of date.
    order: VecDeque<(u64, u64)>,
    frees: u64,
}

impl FreedAddresses {
    /// Records that the block at this address was freed.
    pub(crate) fn note(&mut self, address: u64) {
        self.frees += 1;
        self.at.insert(address, self.frees);
        self.order.push_back((address, self.frees));
        if self.order.len() > REMEMBERED
            && let Some((oldest, free)) = self.order.pop_front()
            && self.at.get(&oldest) == Some(&free)
        {
            self.at.remove(&oldest);
        }
    }

    /// Records that a block was allocated at this address.
    pub(crate) fn forget(&mut self, address: u64) {
        self.at.remove(&address);
    }

    pub(crate) fn has(&self, address: u64) -> bool {
        self.at.contains_key(&address)
    }

    /// Returns the error for an address without a raw block.
    pub(crate) fn refuse(&self, address: u64) -> MemoryError {
        if self.has(address) {
            MemoryError::DoubleFree { address }
        } else {
            MemoryError::ForeignBlock { address }
        }
    }
}

fn backed() -> MutexGuard<'static, Backlog> {
    BACKED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Stores a block that belongs to no cache while its address is released.
pub(crate) fn keep_backed(block: Block) {
    backed().keep(block);
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
        if let Some(home) = self.quick_home(stream, &request)
            && let Some(address) = home.quick_alloc_raw(&request)
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
        let block = self.find(address, |home| home.take_raw(address));
        let block =
            block.or_else(|| self.is_backed(address).then(|| backed().take(address)).flatten());
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
        let block = self.find(address, |home| home.share_raw(address));
        let block =
            block.or_else(|| self.is_backed(address).then(|| backed().share(address)).flatten());
        block.ok_or_else(|| self.refuse(address))
    }

    /// Returns the bypass allocator, in which each block is its own allocation, unless the address
    /// is one of a graph's or a stable block.
    fn bypass(&self, address: u64) -> Option<&Direct> {
        self.inner().bypass().filter(|_| !self.is_backed(address))
    }

    /// Returns whether a raw block of this pool that belongs to no cache has this address.
    fn is_backed(&self, address: u64) -> bool {
        backed().0.get(&address).is_some_and(
            |block| matches!(&block.owner, Owner::Backend(home) if home.streams.is(self.streams())),
        )
    }

    /// Frees the block that was [converted](Block::into_raw) to this address, as dropping it would.
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], except [`MemoryError::Busy`].
    pub fn free_raw(&self, address: u64) -> Result<()> {
        if let Some(direct) = self.bypass(address) {
            return direct.free_raw(address);
        }
        if self.find(address, |home| home.free_raw(address)).is_some() {
            return Ok(());
        }
        let backed = self.is_backed(address).then(|| backed().let_go(address)).flatten();
        backed.map(drop).ok_or_else(|| self.refuse(address))
    }

    /// Searches the likely caches, then all.
    fn find<T>(&self, address: u64, mut ask: impl FnMut(&'static Home) -> Option<T>) -> Option<T> {
        let inner = self.inner();
        let likely = inner.directory.likely(address).find_map(&mut ask);
        likely.or_else(|| inner.homes(&inner.scratch.begin()).into_iter().find_map(ask))
    }

    /// Returns the raw blocks of the streams' caches.
    pub(crate) fn raw_blocks(&self) -> Vec<HeldBlock> {
        let inner = self.inner();
        inner.homes(&inner.scratch.begin()).into_iter().flat_map(Home::raw_blocks).collect()
    }

    /// Returns the error for an address without a raw block.
    #[cold]
    fn refuse(&self, address: u64) -> MemoryError {
        let inner = self.inner();
        let freed = inner.homes(&inner.scratch.begin()).into_iter().any(|home| {
            home.with(|s| {
                let pending =
                    || s.pending.iter().any(|pending| pending.freed.place.address == address);
                match s.heap.block_at(address) {
                    Ok(_) => pending(),
                    Err(why) => matches!(why, HeapError::DoubleFree { .. }),
                }
            })
        });
        let shared = || match &self.inner().physical {
            Physical::Mapped(mapped) => mapped.is_in_commons(address),
            Physical::Plain(_) => false,
        };
        let checked = || self.checked().is_some_and(|checked| checked.was_freed(address));
        if freed || shared() || checked() {
            MemoryError::DoubleFree { address }
        } else {
            MemoryError::ForeignBlock { address }
        }
    }
}

impl Home {
    /// Allocates a block from the cache, if it has room, and returns its address. The fast path
    /// without listeners.
    #[inline]
    fn quick_alloc_raw(&'static self, request: &Request) -> Option<u64> {
        self.with_last(|s| {
            let freed = *s.take(self, request)?;
            let address = freed.place.address;
            s.raw.insert(
                address,
                Raw::Alone(Token { freed, uses: UseList::new(), extras: Rare::NONE }),
            );
            s.note_raw(address);
            Some(address)
        })
    }

    /// Returns the raw blocks of this cache.
    fn raw_blocks(&'static self) -> Vec<HeldBlock> {
        let stream = self.timeline().number();
        let told = |(&address, raw): (&u64, &Raw)| {
            let asked = match raw {
                Raw::Alone(token) => token.freed.place.asked,
                Raw::Shared(block) => block.place.asked,
            };
            HeldBlock { address, bytes: asked.bytes(), stream, tag: asked.tag(), at: None }
        };
        // The list is allocated before the lock is taken. It may grow under the lock if blocks were
        // added since.
        let mut blocks = Vec::with_capacity(self.with(|s| s.raw.len()));
        self.with(|s| blocks.extend(s.raw.iter().map(told)));
        blocks
    }

    /// Stores the contents of a token while its address is released.
    fn keep_raw(&self, address: u64, token: Token) {
        self.with_last(|s| {
            s.raw.insert(address, Raw::Alone(token));
            s.note_raw(address);
        });
    }

    /// Removes and returns the raw block at `address`; `None` if this cache has none.
    fn take_raw(&self, address: u64) -> Option<Result<Block>> {
        self.with_last(|s| {
            let block = match s.raw.remove(&address)? {
                Raw::Alone(token) => Ok(token.into_block()),
                // References are cloned only under this lock, so a unique one stays unique.
                Raw::Shared(block) => Arc::try_unwrap(block),
            };
            Some(block.map_err(|shared| {
                s.raw.insert(address, Raw::Shared(shared));
                MemoryError::Busy { address }
            }))
        })
    }

    /// Returns the raw block at `address`, which stays raw; `None` if this cache has none.
    fn share_raw(&self, address: u64) -> Option<Arc<Block>> {
        self.with_last(|s| {
            let block = match s.raw.remove(&address)? {
                Raw::Alone(token) => Arc::new(token.into_block()),
                Raw::Shared(block) => block,
            };
            s.raw.insert(address, Raw::Shared(block.clone()));
            Some(block)
        })
    }

    /// Frees the raw block at `address`; `None` if this cache has none.
    fn free_raw(&'static self, address: u64) -> Option<()> {
        /// What remains to be done after the lock is released.
        enum Rest {
            After(Option<Box<AfterFree>>),
            Token(Token),
            Shared(Arc<Block>),
        }
        let rest = self.with_last(|s| {
            Some(match s.raw.remove(&address)? {
                Raw::Alone(mut token) => {
                    if token.uses.is_empty() && token.extras.is_none() {
                        Rest::After(s.put_back(&token.freed.way, &token.freed.place))
                    } else {
                        Rest::Token(token)
                    }
                }
                Raw::Shared(block) => Rest::Shared(block),
            })
        })?;
        match rest {
            Rest::After(after) => self.attend(after),
            Rest::Token(Token { freed, mut uses, extras }) => {
                self.put_back_with_extras(freed, &mut uses, extras);
            }
            Rest::Shared(block) => drop(block),
        }
        Some(())
    }
}
