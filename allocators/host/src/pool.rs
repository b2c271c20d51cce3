//! A pool of pinned memory blocks on one NUMA node.
//!
//! Registering memory with the driver takes milliseconds and stalls other threads. A [`PinnedPool`]
//! therefore registers whole regions and serves blocks from them. The invariants:
//! - The heap engine that places blocks keeps its metadata outside the pinned memory, because a
//!   copy in flight may still write into a freed block.
//! - No block spans two registrations, because one copy must not cross their boundary.
//!
//! ```text
//!   Vec, Box, HashMap … ── PinnedAllocator (Copy) ──► magazine of the thread: no lock
//!                                                       │  empty or full
//!                                                      depot, from 64 KiB to 1 MiB: a lock for each class
//!                                                       │  empty or full, or a gate is noted on the block
//!                                                      core, a lock ── slabs ── heap ── regions ── node's memory
//!                                                       │
//!                                                       └── blocks freed with a gate shut: given out again when it opens
//! ```
//!
//! | module | contents |
//! |---|---|
//! | `pool_core` | the pool core: fast path, locked path, closing |
//! | `magazine`, `cache_bin`, `owner_biased_lock` | per-thread caches of free blocks, and draining by others |
//! | `depot` | shared cache of free blocks above 64 KiB that exceed a thread's own cache |
//! | `thread` | thread numbers, and the thread's current magazine |
//! | `page_map`, `span` | lock-free lookup from an address to its slot and the slot's state |
//! | `config`, `context` | settings, and what a pool is opened with |
//! | `stats` | statistics |
//! | `state` | the pool's state under its lock |
//! | `classes`, `slabs` | size classes up to 1 MiB, and slabs for those up to 64 KiB |
//! | `grow` | the slow path when no free block fits, and releasing regions |
//! | `pending` | pending frees: freed blocks whose gates are still shut |
//! | `reclaim` | reclaim between this pool and others under its budget |
//! | `poison` | annotations for `AddressSanitizer` |
//! | `allocator`, `buffer` | the pool as an `Allocator`, and typed buffers |
//! | `publish` | what other processes are shown of a pool |
//!
//! # Sizes
//! - Up to 2 KiB a request gets a slot of whole cache lines, up to 64 KiB one that is at most a
//!   sixteenth larger, 2.1 % on average.
//! - Above 64 KiB a request gets a single block by best fit over all free memory. Up to 1 MiB its
//!   size is rounded up by at most a 32nd, 1.05 % on average over random sizes, so that requests of
//!   similar size reuse each other's blocks.
//! - Above 1 MiB sizes are rounded up to 64 bytes.
//!
//! # Threads
//! An allocation takes no lock and no atomic read-modify-write while the thread's magazine has a
//! block for it, and a free takes none while the magazine has room and no gate is noted on the
//! block. Otherwise they take a lock: from 64 KiB to 1 MiB that of the class in the depot, and if
//! that does not help, or for other sizes, that of the pool. While blocks are pending, every 64th
//! allocation takes the pool's lock to poll gates. Each thread has a [magazine] of free blocks:
//! - Up to 64 KiB it starts with about 64 KiB of each class, but at least four blocks. It grows
//!   with the thread's demand, as long as the pool has as much free memory outside magazines.
//! - Up to 1 MiB it keeps the last freed block of each of eight class residues: a freed block
//!   replaces one whose class is equal modulo 8. A *depot*, shared by all threads with one lock per
//!   class, keeps the rest.
//! - Above 1 MiB it keeps four blocks.
//!
//! Blocks in magazines count as cached. They are collected before the pool grows, trims or refuses
//! a request. When a thread ends, the next thread takes over its magazine. A block may be freed by
//! any thread, and goes into that thread's magazine. Blocks return to the pool's heap in batches.
//!
//! Each slot has a state byte, so that a double free is refused in all states of the block. Two
//! threads that free one block *at the same moment* are not detected: this is a data race in the
//! caller's unsafe code. The same holds for a gate that is noted on a block during its free.
//!
//! The fast path is inlined into the executable, for example in the methods of a
//! `Vec<T, PinnedAllocator>`. In a shared library it is slower, because access to thread-locals
//! needs a function call there.
//!
//! Threads share no cache line that the fast path writes: magazines are aligned to cache-line
//! pairs, the lock is separate from data that every call reads, and each thread takes slots from
//! slabs of its own.
//!
//! [magazine]: PinnedConfig::magazines
//!
//! # Reuse
//! A copy in flight notes a gate on its block ([`DeferReuse`](aquifer_core::DeferReuse)). If the
//! block is freed before the gate opens, the block is *pending*: it is not reused, and its contents
//! stay unchanged. A free never queries the driver. The next allocation polls the gates.
//!
//! # When an allocation does not fit
//! The slow path takes these steps in order:
//! - Collects freed blocks whose gates have opened.
//! - Drains the magazines of all threads and the depot.
//! - Grows by a new region, then by a smaller one.
//! - Releases wholly free regions of this pool, to make room under the budget, and grows again.
//! - Reclaims from other pools below the budget that refused
//!   ([`Reclaim`](aquifer_core::budget::Reclaim)), and grows again.
//! - Takes back idle blocks that stagers keep.
//! - Waits for the oldest pending blocks, at most [`PinnedConfig::patience`].
//! - Returns an error that lists all steps.
//!
//! One thread grows at a time, since the driver registers one range at a time. Other threads that
//! would have to grow wait for it. With [`Grow::WhenWarmed`] an allocation neither grows the pool nor
//! releases regions, for this pool or for others.
//!
//! A pool releases wholly free regions for other pools under its budget only if these found no
//! cheaper memory and may wait, because the device must be idle for it. An application's reclaimer
//! must not allocate from pinned pools while a pinned pool calls it.
//!
//! # Closing
//! Dropping the last handle closes the pool. Allocations then return an error, and regions without
//! live blocks are released at once. Live blocks stay valid, and the free of a region's last block
//! releases the region. While other pools of the same machine are open, that free must not wait for
//! devices: a pinned region stays charged until a quiet point, a trim, a [`sweep`], or the next
//! region that its budget would refuse. Once no pool is open, no quiet point may follow, and the
//! free ends the registration itself, which waits for devices. The close of the last pool, and the
//! free of a closed pool's last block after that, also wait for copies in flight, at most
//! [`PinnedConfig::patience`] for each pool. Memory of longer copies is released when the next pool
//! is created. The core that allocators point to is never freed. It is recycled with a new
//! generation, so that an allocator of the old pool is refused.
//!
//! # In a child of a fork
//! A child does not inherit the memory, unless [`PinnedConfig::share_on_fork`] lets it read blocks
//! that exist, and locks may be held by threads that do not exist there. In a child, allocations
//! return [`MemoryError::OtherProcess`], frees do nothing, statistics are zero, and nothing blocks.
//! The child cannot make a pool of its own either. The parent's pool is unaffected.
//!
//! # Caveats
//! - `deallocate` cannot return an error: a pointer that is not a live block of the pool is ignored
//!   and counted in [`PinnedStats::refused_frees`].
//! - A pool takes no memory before the first allocation or [`PinnedPool::warm`].
//! - Threads have magazines only if the kernel offers `membarrier` and the pool's events are not
//!   recorded, for at most 1,024 threads at a time. Otherwise every call takes the lock.
//! - [`PoolStats::peak_live`](aquifer_core::PoolStats::peak_live) counts blocks in magazines and
//!   the depot as live. `peak_requested` misses blocks that were allocated and freed within
//!   magazines between two calls of `stats`.
//! - While a thread is inside a pool, its other allocations from pools are refused: a pool's
//!   metadata must not be allocated from the pool itself, however allocations are routed.

mod allocator;
mod buffer;
mod cache_bin;
mod classes;
mod config;
mod context;
mod depot;
mod grow;
mod magazine;
mod owner_biased_lock;
mod page_map;
mod pending;
mod poison;
mod pool_core;
mod publish;
mod reclaim;
mod slabs;
mod span;
mod state;
mod stats;
mod thread;

pub use allocator::PinnedAllocator;
pub use buffer::PinnedBuf;
pub use config::{Grow, PinnedConfig};
pub(crate) use context::IdleHolder;
pub use pending::sweep;
pub use stats::PinnedStats;

use crate::{
    kernel::is_forked_child,
    region::{Host, RegionReport},
    topology::NodeId,
};
use aquifer_core::{Budget, MemoryError, Recorder, Result, scratch::Scratch};
use aquifer_driver::site;
use aquifer_status::PoolSlot;
use context::PoolContext;
use pool_core::PoolCore;
use std::{
    alloc::Layout,
    fmt,
    ptr::NonNull,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64},
    },
};

/// A pool of pinned memory blocks. Cheap to clone. Dropping the last clone closes the pool.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use aquifer::Runtime;
/// let rt = Runtime::builder().or_sim_quietly().build()?;
/// let pool = rt.pinned_near(0).clone();            // on the node next to device 0
/// let mut v = Vec::with_capacity_in(1 << 10, pool.allocator());
/// v.extend(0..1000u32);
/// assert_eq!(pool.stats().memory.requested, 4 << 10);
/// drop((pool, rt));
/// assert_eq!(v[999], 999, "blocks outlive their pool");
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone)]
pub struct PinnedPool {
    handle: Arc<PoolHandle>,
}

/// Closes the pool when the last clone is dropped.
struct PoolHandle {
    core: &'static PoolCore,
    generation: u64,
    shared: Arc<PoolContext>,
}

impl Drop for PoolHandle {
    fn drop(&mut self) {
        self.core.close(self.generation);
        if let Some(recorder) = &self.shared.config.recorder {
            recorder.flush();
        }
    }
}

impl PinnedPool {
    /// Creates a pool whose regions are charged to `budget`. Takes no memory yet.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for an invalid configuration, for an `AQUIFER_TRACE` that cannot
    /// be written, or for an invalid `AQUIFER_STATUS`. [`MemoryError::OtherProcess`] in a forked
    /// child of a process that had a [`Host`].
    pub fn new(host: &Host, budget: &Budget, mut config: PinnedConfig) -> Result<Self> {
        if is_forked_child() {
            return Err(MemoryError::OtherProcess);
        }
        config.check()?;
        config.recorder = Recorder::with_environment(config.recorder)?;
        aquifer_status::start()?;
        let status = PoolSlot::open(publish::describe(config.node.map(|node| node.0)));
        let observed = host.reach.as_ref().is_some_and(|reach| reach.driver.observer().is_some());
        let (host, budget, registration) = (host.clone(), budget.clone(), OnceLock::new());
        let (idle_holders, scratch) = (Mutex::default(), Scratch::new());
        let shared = Arc::new(PoolContext {
            host,
            budget,
            config,
            observed,
            registration,
            idle_holders,
            scratch,
            status,
            recorded_limit: AtomicU64::new(u64::MAX),
            has_explained: AtomicBool::new(false),
        });
        shared.report_limit();
        sweep();
        let (core, generation) = PoolCore::open(shared.clone());
        shared.register(core, generation);
        core.publish(&shared);
        Ok(Self { handle: Arc::new(PoolHandle { core, generation, shared }) })
    }

    /// Returns the pool as an allocator for collections. The allocator may outlive the pool, and
    /// returns errors then.
    #[must_use]
    pub fn allocator(&self) -> PinnedAllocator {
        PinnedAllocator::new(self.handle.core, self.handle.generation)
    }

    /// Allocates a block. Returns the reason if there is none. Free the block with the allocator's
    /// `deallocate`. Blocks when the pool has to grow.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] with the steps that were tried. The region's error if the cause
    /// was not a lack of memory.
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>> {
        let _site = site::enter();
        let block = self.handle.core.allocate(self.handle.generation, layout)?;
        poison::on_allocate(block.cast(), layout.size());
        Ok(block)
    }

    /// Grows until the pool holds `bytes`, populated and registered, so that later allocations need
    /// not grow. Blocks.
    ///
    /// # Errors
    /// The region's error. Regions that were made before it stay.
    #[track_caller]
    pub fn warm(&self, bytes: usize) -> Result<()> {
        let _site = site::enter();
        let core = self.core()?;
        let warmed = core.warm(self.handle.generation, bytes as u64);
        core.publish(&self.handle.shared);
        warmed
    }

    /// Releases wholly free regions, largest first. Returns the number of bytes released. At least
    /// `keep` free bytes stay. Polls pending blocks and drains magazines first. Blocks until
    /// devices are idle, so call it at quiet points.
    ///
    /// # Errors
    /// The driver's or the kernel's error when a region could not be released. That region is
    /// stranded and stays charged.
    #[track_caller]
    pub fn trim(&self, keep: usize) -> Result<u64> {
        let _site = site::enter();
        let core = self.core()?;
        core.poll_all();
        let released = core.trim(self.handle.generation, keep as u64);
        core.publish(&self.handle.shared);
        released
    }

    /// Returns the pool's statistics.
    #[must_use]
    pub fn stats(&self) -> PinnedStats {
        let stats = |core: &PoolCore| core.with_tally(|state, tally| state.stats(tally));
        self.core().map_or_else(
            |_| PinnedStats::default(),
            |core| {
                let stats = stats(core);
                core.publish(&self.handle.shared);
                stats
            },
        )
    }

    /// Returns the NUMA node of the pool's memory.
    #[must_use]
    pub fn node(&self) -> Option<NodeId> {
        self.handle.shared.config.node
    }

    /// Returns the budget that regions are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.handle.shared.budget
    }

    /// Returns whether the block that contains `address` is pinned, or `None` if this pool has no
    /// such block.
    #[must_use]
    pub fn is_pinned(&self, address: NonNull<u8>) -> Option<bool> {
        let address = address.addr().get() as u64;
        let core = self.core().ok()?;
        core.with(|state| state.block_at(address).and_then(|_| state.is_pinned(address)))
    }

    /// Returns the reports of all regions, in address order.
    #[must_use]
    pub fn reports(&self) -> Vec<RegionReport> {
        self.core().map_or_else(|_| Vec::new(), |core| core.with(|state| state.reports()))
    }

    /// Returns whether the pool's metadata is consistent. Takes time proportional to the pool's
    /// size. For tests and fuzzing.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.core().is_ok_and(|core| core.with_tally(|state, tally| state.is_consistent(tally)))
    }

    /// Registers `holder`, whose idle blocks the pool may take back. The pool holds a weak
    /// reference.
    pub(crate) fn register_idle_holder<K: IdleHolder + 'static>(&self, holder: &Arc<K>) {
        let holder: Weak<K> = Arc::downgrade(holder);
        let mut all =
            self.handle.shared.idle_holders.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|other| other.strong_count() > 0);
        all.push(holder);
    }

    /// Returns the pool core, or an error in a child process.
    fn core(&self) -> Result<&'static PoolCore> {
        if is_forked_child() { Err(MemoryError::OtherProcess) } else { Ok(self.handle.core) }
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
