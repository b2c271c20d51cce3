//! Blocks as bare addresses, for interfaces that carry nothing else.
//!
//! A block that is [turned into its address](Block::into_raw) leaves what its token held in a table
//! of its own stream's cache, under that cache's lock. So streams share nothing here either, and a
//! table that has reached its size allocates nothing.
//!
//! Which cache an address belongs to is a question of its own, since caches share the pool's range.
//! A [`Directory`] remembers for each 2 MiB which caches have turned blocks there into addresses,
//! up to four. In a steady state it is read and not written. It is a hint: a cache that it has
//! forgotten is found by asking all of them, and a cache that it names by mistake knows nothing of
//! the address.

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

/// A block that is out as its address.
pub(crate) enum Raw {
    /// What its token held.
    Alone(Token),
    /// The token itself: somebody looks at it, or has.
    Shared(Arc<Block>),
}

/// What a block's token held.
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

/// The blocks of one cache that are out as bare addresses.
pub(crate) type Table = HashMap<u64, Raw, BuildHasherDefault<Spread>>;

/// Spreads addresses, whose low bits are all alike. The same ones each time, as all that a pool
/// does.
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

/// Bytes that share an entry, as a power of two.
const GRAIN_BITS: u32 = 21;
/// Entries: 128 GiB in a row have one each.
const ENTRIES: usize = 1 << 16;
/// Caches of an entry, two bytes each: one more than the cache's number, the one noted last lowest.
const LANES: u32 = 4;
/// Caches that can be named.
const NAMED: usize = 1024;

/// Which caches have had addresses out, by where these lie.
pub(crate) struct Directory {
    /// Made when the first address goes out: half a MiB, of which the kernel backs what is used.
    entries: OnceLock<Box<[AtomicU64]>>,
    /// The caches of the pool in the order they were made. They stay until the pool closes, and
    /// nobody asks then.
    homes: Box<[OnceLock<&'static Home>]>,
}

impl Directory {
    pub(crate) fn new() -> Self {
        Self {
            entries: OnceLock::new(),
            homes: std::iter::repeat_with(OnceLock::new).take(NAMED).collect(),
        }
    }

    /// Names a cache. One too many is found by asking all.
    pub(crate) fn name(&self, number: usize, home: &'static Home) {
        if let Some(place) = self.homes.get(number) {
            let _ = place.set(home);
        }
    }

    /// The cache of this number, if it can be named.
    #[inline]
    pub(crate) fn home(&self, number: usize) -> Option<&'static Home> {
        self.homes.get(number)?.get().copied()
    }

    fn entry(address: u64) -> usize {
        (address >> GRAIN_BITS) as usize % ENTRIES
    }

    /// Notes that the cache of this number has an address out here.
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
            // Two at once may lose one of the two, which costs a search.
            entry.store(noted << 16 | lane, Ordering::Relaxed);
        }
    }

    /// The caches that may have `address` out, the likeliest first.
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
    /// The block as its bare address. It lives on, with all that was noted of it, until
    /// [`DevicePool::from_raw`] makes it a block again or [`DevicePool::free_raw`] frees it. What
    /// never comes back leaks, and keeps its pool's memory.
    ///
    /// Takes the lock of its stream's cache, and makes no driver call.
    #[must_use = "the address is the only way back to the block"]
    pub fn into_raw(self) -> u64 {
        let address = self.address();
        if let Owner::Backend(backed) = &self.owner {
            let keeper = backed.keeper();
            keeper.keep_raw(self);
            return address;
        }
        // Its drop would free it.
        let mut block = ManuallyDrop::new(self);
        let (uses, extras) = (mem::take(&mut block.uses), block.extras.take());
        if let Owner::Pool(way) = block.owner {
            let freed = Freed { way, place: block.place };
            way.home.keep_raw(address, Token { freed, uses, extras });
        }
        address
    }
}

/// Blocks that are out as bare addresses and belong to no cache: by address, which no two live
/// blocks of a process share.
static BACKED: Mutex<Backlog> = Mutex::new(Backlog(BTreeMap::new()));

/// Blocks by the addresses that they are out as, any of which somebody may look at.
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

    /// The block to be owned, unless somebody looks at it.
    pub(crate) fn take(&mut self, address: u64) -> Option<Result<Block>> {
        let block = self.0.remove(&address)?;
        Some(Arc::try_unwrap(block).map_err(|shared| {
            self.0.insert(address, shared);
            MemoryError::Busy { address }
        }))
    }

    /// The block to be let go of, which is not to happen under this table's lock.
    pub(crate) fn let_go(&mut self, address: u64) -> Option<Arc<Block>> {
        self.0.remove(&address)
    }
}

/// Addresses that so many blocks had are remembered when they are freed.
const REMEMBERED: usize = 1 << 16;

/// Addresses whose blocks have been freed and that no block has had since, the newest of them: so
/// that a second free is told from an address that never was a block's.
#[derive(Default, Debug)]
pub(crate) struct FreedAddresses {
    /// The free that each was noted at.
    at: HashMap<u64, u64>,
    /// Oldest first, some of them out of date.
    order: VecDeque<(u64, u64)>,
    frees: u64,
}

impl FreedAddresses {
    /// A block at this address is freed.
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

    /// A block is given out at this address.
    pub(crate) fn forget(&mut self, address: u64) {
        self.at.remove(&address);
    }

    pub(crate) fn has(&self, address: u64) -> bool {
        self.at.contains_key(&address)
    }

    /// Why no block is out as this address.
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

/// Keeps a block of no cache while its address is out.
pub(crate) fn keep_backed(block: Block) {
    backed().keep(block);
}

impl DevicePool {
    /// A block as its bare address: [`DevicePool::alloc`] and [`Block::into_raw`] in one, for
    /// interfaces that carry nothing else. The cache is locked once for both.
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

    /// The block of this pool that was [turned into](Block::into_raw) this address.
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
    /// [`MemoryError::DoubleFree`] if the block at this address has been freed, as long as memory
    /// is there; [`MemoryError::ForeignBlock`] for any other address that is not out;
    /// [`MemoryError::Busy`] while somebody [looks at it](DevicePool::share_raw). Nothing changes
    /// then.
    pub fn from_raw(&self, address: u64) -> Result<Block> {
        if let Some(direct) = self.bypass(address) {
            return direct.from_raw(address);
        }
        let block = self.find(address, |home| home.take_raw(address));
        let block =
            block.or_else(|| self.is_backed(address).then(|| backed().take(address)).flatten());
        block.unwrap_or_else(|| Err(self.refuse(address)))
    }

    /// The block of this pool that is out as this address, to note uses of it; its address stays
    /// out.
    ///
    /// Several threads may hold it at once. One that is freed by [`DevicePool::free_raw`] meanwhile
    /// ends with the last of them, so what they note holds its memory back.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{Access, DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let (stream, other) = (pool.stream()?, pool.stream()?);
    /// let address = pool.alloc(&stream, Request::bytes(4096))?.into_raw();
    /// other.wait_for(&stream)?;
    /// pool.share_raw(address)?.record_use(&other, Access::Read)?;
    /// pool.free_raw(address)?; // `stream` does not have it again before `other` is done
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], which it is never too busy for.
    pub fn share_raw(&self, address: u64) -> Result<Arc<Block>> {
        if let Some(direct) = self.bypass(address) {
            return direct.share_raw(address);
        }
        let block = self.find(address, |home| home.share_raw(address));
        let block =
            block.or_else(|| self.is_backed(address).then(|| backed().share(address)).flatten());
        block.ok_or_else(|| self.refuse(address))
    }

    /// Where each block is an allocation of its own, unless this is one of those that are not:
    /// graphs' and stable ones.
    fn bypass(&self, address: u64) -> Option<&Direct> {
        self.inner().bypass().filter(|_| !self.is_backed(address))
    }

    /// Whether a block that belongs to no cache is out as this address, and is of this pool.
    fn is_backed(&self, address: u64) -> bool {
        backed().0.get(&address).is_some_and(
            |block| matches!(&block.owner, Owner::Backend(home) if home.streams.is(self.streams())),
        )
    }

    /// Frees the block that was [turned into](Block::into_raw) this address, as dropping it would
    /// have.
    ///
    /// # Errors
    /// As [`DevicePool::from_raw`], which it is never too busy for.
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

    /// Asks the likely caches, then all.
    fn find<T>(&self, address: u64, mut ask: impl FnMut(&'static Home) -> Option<T>) -> Option<T> {
        let inner = self.inner();
        let likely = inner.directory.likely(address).find_map(&mut ask);
        likely.or_else(|| inner.homes(&inner.scratch.begin()).into_iter().find_map(ask))
    }

    /// The blocks of streams' caches that are out as bare addresses.
    pub(crate) fn raw_blocks(&self) -> Vec<HeldBlock> {
        let inner = self.inner();
        inner.homes(&inner.scratch.begin()).into_iter().flat_map(Home::raw_blocks).collect()
    }

    /// Why there is no such address out.
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
    /// A block out of the cache, if it has room, as its address. The hot path where nobody listens.
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

    /// The blocks of this cache that are out as bare addresses.
    fn raw_blocks(&'static self) -> Vec<HeldBlock> {
        let stream = self.timeline().number();
        let told = |(&address, raw): (&u64, &Raw)| {
            let asked = match raw {
                Raw::Alone(token) => token.freed.place.asked,
                Raw::Shared(block) => block.place.asked,
            };
            HeldBlock { address, bytes: asked.bytes(), stream, tag: asked.tag(), at: None }
        };
        // The memory for the list is taken before the lock; what has come meanwhile takes its own.
        let mut blocks = Vec::with_capacity(self.with(|s| s.raw.len()));
        self.with(|s| blocks.extend(s.raw.iter().map(told)));
        blocks
    }

    /// Keeps what a token held while its address is out.
    fn keep_raw(&self, address: u64, token: Token) {
        self.with_last(|s| {
            s.raw.insert(address, Raw::Alone(token));
            s.note_raw(address);
        });
    }

    /// The block of this cache that is out as `address`, to be owned; `None` if there is none.
    fn take_raw(&self, address: u64) -> Option<Result<Block>> {
        self.with_last(|s| {
            let block = match s.raw.remove(&address)? {
                Raw::Alone(token) => Ok(token.into_block()),
                // Clones are made under the lock only, so one that is alone here stays so.
                Raw::Shared(block) => Arc::try_unwrap(block),
            };
            Some(block.map_err(|shared| {
                s.raw.insert(address, Raw::Shared(shared));
                MemoryError::Busy { address }
            }))
        })
    }

    /// The block of this cache that is out as `address`, which stays out.
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

    /// Frees the block of this cache that is out as `address`; `None` if there is none.
    fn free_raw(&'static self, address: u64) -> Option<()> {
        /// What is to be done once the lock is open again.
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
