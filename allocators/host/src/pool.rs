//! A pool of pinned memory on one node.
//!
//! Registering memory with the driver costs milliseconds and stalls other threads, so a
//! [`PinnedPool`] takes it by the region and hands it out by the block. Blocks are placed by the
//! heap engine, whose bookkeeping lies apart from the memory: a copy that is still on its way may
//! write into a freed block and must find no free list there. No block crosses from one
//! registration into the next, over which no copy could go.
//!
//! ```text
//!   Vec, Box, HashMap … ── PinnedAllocator (Copy) ──► magazine of the thread: no lock
//!                                                       │  empty or full, or a gate is noted on the block
//!                                                     shell ── slabs ── heap ── regions ── node's memory
//!                                                       │
//!                                                       └── blocks freed with a gate shut: given out again when it opens
//! ```
//!
//! | module | holds |
//! |---|---|
//! | `home` | the shell: the short way, the way by the lock, the end |
//! | `magazine`, `rack`, `door` | free blocks of one thread, and how another comes at them |
//! | `depot` | those above 64 KiB that a thread has too many of, for all |
//! | `thread` | which thread this is, and where its magazines are |
//! | `map`, `span` | from an address to its slot and how it stands, without a lock |
//! | `state` | the books, under the lock |
//! | `classes`, `slabs` | sizes up to 1 MiB, and slabs of those up to 64 KiB, cut from the heap |
//! | `grow` | the chain when nothing free holds a request, and giving back |
//! | `pending` | blocks behind gates |
//! | `reclaim` | what it gives back for others under its budget, and how it asks them |
//! | `poison` | what `AddressSanitizer` is told |
//!
//! # Sizes
//! Up to 64 KiB a request gets a slot that is at most a sixteenth longer than it, 2.1 % in the
//! mean; above, a block of its own where the best fit among all free memory is: up to 1 MiB at most
//! a 32nd longer, 1.05 % in the mean over random lengths, so that blocks of nearly the same length
//! serve each other; from there on exact to 64 bytes.
//!
//! # Threads
//! A pair of an allocation and a free takes neither lock nor atomic read-modify-write: each thread
//! has a [magazine] of free blocks: up to 64 KiB some 64 KiB or four blocks of each class at first,
//! and more the more its thread takes and gives at a time, while as much is free in the pool's
//! books; up to 1 MiB the eight that were freed last, with a *depot* behind them that all threads
//! share, a lock for each class; and four blocks above. Nothing is lost in them: what they hold
//! counts as cached, is taken before the pool grows, trims, or refuses, and goes to the next thread
//! when one ends. A block may be freed by any thread, and is that one's to use again; many go back
//! to the books at a time.
//!
//! Each slot has a byte that says how it stands, so a second free is refused wherever the block is.
//! Two threads that free one block *at the same moment* are not told apart: that is a race in the
//! caller's own unsafe code. The same holds for a gate that is noted on a block while its owner
//! frees it.
//!
//! On a machine where `malloc` and `free` of 64 B take 7.6 ns, a pair takes 5.2 ns up to 64 KiB, in
//! some ninety instructions of which half find the slot of the block that is freed, and see that it
//! is one; 15 to 23 ns from there to 64 MiB. That is code that is compiled with the executable, as
//! methods of a `Vec<T, PinnedAllocator>` are: a library finds its thread-locals by a call, and
//! keeps its arguments over that.
//!
//! Threads share no cache line that a pair writes: magazines lie apart, the lock lies apart from
//! what every call reads, and the slots that a thread is given are of slabs that are its own.
//!
//! [magazine]: PinnedConfig::magazines
//!
//! # Reuse
//! A copy in flight notes a gate on its block ([`DeferReuse`](aquifer_core::DeferReuse)). If the
//! block is freed before the gate opens it is *pending*: nobody gets it, nothing in it changes. A
//! free never asks the driver; the next allocation looks whether gates have opened.
//!
//! # When an allocation does not fit
//! Freed blocks whose gates have opened → what threads keep at hand → a new region → a smaller one
//! → regions of this pool that are wholly free, given back to make room under the budget → others
//! below the budget that refuses, which give back what they can
//! ([`Reclaim`](aquifer_core::budget::Reclaim)) → a slot of a larger class → the oldest pending
//! blocks, waited for at most [`PinnedConfig::patience`] → an error that tells all this. One thread
//! grows at a time, and others wait for it where they would have had to grow too, since the driver
//! registers one range at a time anyway. With [`Grow::AtQuietPoints`] regions are neither taken nor
//! given back there, nor for others.
//!
//! A pool gives its wholly free regions to others under its budget, when they have found nothing
//! that is cheaper and have time to wait: the device has to be idle for it. What an application
//! does when a pinned pool asks it cannot allocate from pinned pools.
//!
//! [`PinnedPool::try_allocate`] stops before the new region, and [`PinnedPool::allocate_until`]
//! begins again until a time.
//!
//! # The end
//! Dropping the last handle closes the pool: allocators answer with an error from then on, and
//! regions without live blocks go at once. Blocks that are still about stay good, and the last of a
//! region's blocks to be freed gives the region up: a free must not wait for devices, so one that
//! is pinned stays charged until a quiet point, a trim, a [`sweep`], or a region that would find no
//! room in its budget. The shell that allocators point to is never freed but used again with a new
//! generation, so that a stale allocator always finds something that refuses it.
//!
//! # In a child of a fork
//! The memory is not inherited, and locks may be held by threads that are not there, so a child
//! finds nothing here: allocations answer with [`MemoryError::OtherProcess`], frees do nothing,
//! statistics are zero, and nothing blocks. It can make a pool of its own. The parent's is as it
//! was.
//!
//! # What surprises
//! - `deallocate` cannot answer: a pointer that is not a live block of the pool is ignored and
//!   counted in [`PinnedStats::refused_frees`].
//! - A pool takes no memory before the first allocation, [`PinnedPool::warm`] or
//!   [`PinnedPool::quiet_point`].
//! - Threads have magazines where the kernel offers `membarrier`, for pools whose events nobody
//!   records, 1,024 threads at a time. Otherwise everything is the same, with the lock.
//! - [`PoolStats::peak_live`] counts what magazines and the depot hold as live, and
//!   `peak_requested` misses what came and went within magazines since somebody last asked.
//! - While a pool is at work for a thread, that thread's other allocations from pools are refused:
//!   bookkeeping can not come out of the memory it keeps the books of, however allocations are
//!   routed.

mod allocator;
mod buffer;
mod classes;
mod depot;
mod door;
mod grow;
mod home;
mod magazine;
mod map;
mod pending;
mod poison;
mod rack;
mod reclaim;
mod slabs;
mod span;
mod state;
mod thread;

pub use allocator::PinnedAllocator;
pub use buffer::PinnedBuf;
pub use home::stale_frees;
pub use pending::sweep;
pub(crate) use reclaim::Keeper;

use crate::{
    region::{self, Host, PageTier, Pinning, RegionReport, Verify, window::GRANULE},
    topology::NodeId,
};
use aquifer_core::{
    Budget, MemoryError, PoolStats, Recorder, Result, event::Place, scratch::Scratch,
};
use aquifer_driver::{HostFlags, site};
use bytemuck::Pod;
use home::{Effort, Home};
use std::{
    alloc::Layout,
    fmt,
    ptr::NonNull,
    sync::{Arc, Mutex, OnceLock, Weak},
    time::{Duration, Instant},
};

/// How a pool takes memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct PinnedConfig {
    /// The node its memory should lie on; `None` for wherever pages fall.
    pub node: Option<NodeId>,
    /// An error instead of memory on another node.
    pub strict: bool,
    /// Whether its memory must be pinned.
    pub pinning: Pinning,
    /// Bytes of a region at least; larger requests get one of their own size.
    pub chunk: usize,
    /// Bytes of one registration at most, when [`PinnedPool::warm`] takes much at once.
    pub registration: usize,
    /// The best pages to try for.
    pub pages: PageTier,
    /// How the driver is to pin it.
    pub flags: HostFlags,
    /// How many pages of a new region the kernel is asked about.
    pub verify: Verify,
    /// How long making one region may take; `None` for as long as it takes.
    pub deadline: Option<Duration>,
    /// How long an allocation that would fail waits for pending blocks, and how long others under
    /// the budget may wait for theirs. Zero for not at all.
    pub patience: Duration,
    /// When it may take more memory.
    pub grow: Grow,
    /// Free bytes that [`PinnedPool::quiet_point`] grows to, so that allocations need not. Zero
    /// for none.
    pub grow_ahead: usize,
    /// Free bytes that no trim goes below: what stays warm.
    pub reserve: usize,
    /// Whether each thread keeps free blocks at hand. Without, every call takes the pool's lock.
    pub magazines: bool,
    /// Where the pool's events go, besides the file that `AQUIFER_TRACE` names. A pool whose
    /// events are recorded has no magazines.
    pub recorder: Option<Arc<Recorder>>,
}

/// When a pool registers memory with the driver, which stalls whoever launches kernels for
/// milliseconds.
///
/// Its example is that of [`PinnedConfig`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
#[non_exhaustive]
pub enum Grow {
    /// When an allocation needs it.
    #[default]
    Now,
    /// In [`PinnedPool::warm`] and [`PinnedPool::quiet_point`] only. An allocation that what is
    /// there does not hold is refused, and gives no region back for it.
    AtQuietPoints,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self {
            node: None,
            strict: false,
            pinning: Pinning::default(),
            chunk: 64 << 20,
            registration: region::RegionRequest::REGISTRATION,
            pages: PageTier::HugeTlb,
            flags: HostFlags::default(),
            verify: Verify::default(),
            deadline: None,
            patience: Duration::from_millis(100),
            grow: Grow::Now,
            grow_ahead: 0,
            reserve: 0,
            magazines: true,
            recorder: None,
        }
    }
}

impl PinnedConfig {
    /// The defaults, on this node.
    #[must_use]
    pub fn on(node: NodeId) -> Self {
        Self { node: Some(node), ..Self::default() }
    }

    fn check(&self) -> Result<()> {
        for (name, bytes) in [("chunk", self.chunk), ("registration", self.registration)] {
            if !(GRANULE..=1 << 39).contains(&bytes) {
                let expected = "2 MiB to 512 GiB";
                return Err(MemoryError::BadSetting { name, value: bytes.to_string(), expected });
            }
        }
        Ok(())
    }
}

/// What a pool holds.
///
/// Its example is that of [`PinnedPool`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PinnedStats {
    /// The account that all pools keep.
    pub memory: PoolStats,
    /// Regions (a count).
    pub regions: u64,
    /// Bytes of regions that devices can reach without staging.
    pub pinned: u64,
    /// Bytes of free blocks that threads keep at hand, kept when they ended, or have too many of:
    /// a part of `memory.cached`.
    pub in_magazines: u64,
    /// Frees of pointers that were no live block, or with a layout that was none of its (a count).
    /// Nothing was freed.
    pub refused_frees: u64,
    /// How often the pool's lock was taken (a count), this look included: what magazines are to
    /// spare.
    pub locked: u64,
}

/// What stays as it was made, for the pool's whole life.
#[derive(Debug)]
struct Shared {
    host: Host,
    budget: Budget,
    config: PinnedConfig,
    /// Whether somebody checks what the host does with pinned memory.
    observed: bool,
    known: OnceLock<reclaim::Known>,
    /// Those who keep blocks that nobody uses now.
    keepers: Mutex<Vec<Weak<dyn Keeper>>>,
    /// What passes list.
    scratch: Scratch,
}

impl Shared {
    fn place(&self) -> Place {
        Place::Host(self.config.node.map(|node| node.0))
    }
}

/// Pinned memory by the block. Cheap to clone; the last clone to go closes the pool.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use aquifer_core::Budget;
/// use aquifer_host::{PinnedConfig, PinnedPool, kernel::Kernel, region::Host, topology::Topology};
/// let host = Host::new(Topology::read()?, Kernel::new());
/// let pool = PinnedPool::new(&host, &Budget::new("pinned", 1 << 30), PinnedConfig::default())?;
/// let mut v = Vec::with_capacity_in(1 << 10, pool.allocator());
/// v.extend(0..1000u32);
/// assert_eq!(pool.stats().memory.requested, 4 << 10);
/// drop(pool);
/// assert_eq!(v[999], 999, "blocks outlive their pool");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool {
    handle: Arc<Handle>,
}

/// Closes the pool when the last clone goes.
struct Handle {
    home: &'static Home,
    generation: u64,
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.home.close(self.generation);
        if let Some(recorder) = &self.shared.config.recorder {
            recorder.flush();
        }
    }
}

impl PinnedPool {
    /// A pool whose regions are charged to `budget`. Takes no memory yet.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a configuration that cannot be followed, or an
    /// `AQUIFER_TRACE` that cannot be written.
    pub fn new(host: &Host, budget: &Budget, mut config: PinnedConfig) -> Result<Self> {
        config.check()?;
        config.recorder = Recorder::with_environment(config.recorder)?;
        let observed = host.reach.as_ref().is_some_and(|reach| reach.driver.observer().is_some());
        let (host, budget, known) = (host.clone(), budget.clone(), OnceLock::new());
        let (keepers, scratch) = (Mutex::default(), Scratch::new());
        let shared = Arc::new(Shared { host, budget, config, observed, known, keepers, scratch });
        let (home, generation) = Home::open(shared.clone());
        shared.register(home, generation);
        Ok(Self { handle: Arc::new(Handle { home, generation, shared }) })
    }

    /// The pool as an allocator, for collections. It may outlive the pool, and answers with an
    /// error then.
    #[must_use]
    pub fn allocator(&self) -> PinnedAllocator {
        PinnedAllocator::new(self.handle.home, self.handle.generation)
    }

    /// A block, with the reason if there is none. Free it by the allocator's `deallocate`. Blocks
    /// when it has to grow.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] with what was tried; the region's, if it was not for want of
    /// memory.
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>> {
        let _site = site::enter();
        let block = self.handle.home.allocate(self.handle.generation, layout)?;
        poison::given(block.cast(), layout.size());
        Ok(block)
    }

    /// A block from what the pool has: it does not grow, give back or wait for anything.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] when nothing free holds it.
    #[track_caller]
    pub fn try_allocate(&self, layout: Layout) -> Result<NonNull<[u8]>> {
        self.allocate_with(layout, &Effort::None)
    }

    /// As [`PinnedPool::allocate`], and when that would fail, waits until `end` for blocks to come
    /// back: by frees of other threads, by gates that open, by a budget with room again. Looks
    /// every 2 ms at most.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`], when it is `end`.
    #[track_caller]
    pub fn allocate_until(&self, layout: Layout, end: Instant) -> Result<NonNull<[u8]>> {
        self.allocate_with(layout, &Effort::Until(end))
    }

    #[track_caller]
    fn allocate_with(&self, layout: Layout, effort: &Effort) -> Result<NonNull<[u8]>> {
        let _site = site::enter();
        let (home, generation) = (self.handle.home, self.handle.generation);
        let block = match home.quick(generation, layout) {
            Some(start) => NonNull::slice_from_raw_parts(start, layout.size()),
            None => home.allocate_slowly(generation, layout, effort)?,
        };
        poison::given(block.cast(), layout.size());
        Ok(block)
    }

    /// `len` zeroed elements.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, len: usize) -> Result<PinnedBuf<T>> {
        PinnedBuf::new_in(self, len)
    }

    /// Takes regions until the pool holds `bytes`, populated and registered: what allocations need
    /// not wait for later. Blocks.
    ///
    /// # Errors
    /// The region's. What was taken before stays.
    #[track_caller]
    pub fn warm(&self, bytes: usize) -> Result<()> {
        let _site = site::enter();
        self.here()?.warm(self.handle.generation, bytes as u64)
    }

    /// Says that no kernels are being launched: the time for what stalls those. Grows until
    /// [`PinnedConfig::grow_ahead`] bytes are free, and answers with the bytes taken. Any thread
    /// may call it, also one whose only work it is. Blocks while it grows.
    ///
    /// # Errors
    /// The region's. Nothing was taken then.
    #[track_caller]
    pub fn quiet_point(&self) -> Result<u64> {
        let _site = site::enter();
        let home = self.here()?;
        region::end_retired();
        home.poll_all();
        let ahead = self.handle.shared.config.grow_ahead as u64;
        home.grow_ahead(self.handle.generation, ahead)
    }

    /// Gives back regions that are wholly free, largest first, while at least `keep` free bytes
    /// stay, or [`PinnedConfig::reserve`] if that is more. Takes back first what threads keep at
    /// hand. Answers with the bytes given back. For quiet points: blocks until devices are idle,
    /// and looks at pending blocks before.
    ///
    /// # Errors
    /// The driver's or the kernel's, when a region would not end: it is stranded then, and stays
    /// charged.
    #[track_caller]
    pub fn trim(&self, keep: usize) -> Result<u64> {
        let _site = site::enter();
        let home = self.here()?;
        home.poll_all();
        home.trim(self.handle.generation, keep as u64)
    }

    /// What it holds.
    #[must_use]
    pub fn stats(&self) -> PinnedStats {
        let stats = |home: &Home| home.with_tally(|state, tally| state.stats(tally));
        self.here().map_or_else(|_| PinnedStats::default(), stats)
    }

    /// The node its memory should lie on.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.handle.shared.config.node
    }

    /// The budget its regions are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.handle.shared.budget
    }

    /// Whether the block that holds `address` is pinned; `None` if this pool has no such block.
    #[must_use]
    pub fn is_pinned(&self, address: NonNull<u8>) -> Option<bool> {
        let address = address.addr().get() as u64;
        let home = self.here().ok()?;
        home.with(|state| state.block_at(address).and_then(|_| state.is_pinned(address)))
    }

    /// How each region was made, in address order.
    #[must_use]
    pub fn reports(&self) -> Vec<RegionReport> {
        self.here().map_or_else(|_| Vec::new(), |home| home.with(|state| state.reports()))
    }

    /// Checks the pool's books against each other, in time proportional to what it holds. For tests
    /// and fuzzing.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.here().is_ok_and(|home| home.with_tally(|state, tally| state.is_consistent(tally)))
    }

    /// The shell, in the process that has its memory.
    fn here(&self) -> Result<&'static Home> {
        let home = self.handle.home;
        if home.is_here() { Ok(home) } else { Err(MemoryError::OtherProcess) }
    }
}

impl fmt::Debug for PinnedPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedPool")
            .field("node", &self.node())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}
