//! A pool of pinned memory on one node.
//!
//! Registering memory with the driver costs milliseconds and stalls other threads, so a [`PinnedPool`] takes it by the
//! region and hands it out by the block. Blocks are placed by the heap engine, whose bookkeeping lies apart from the
//! memory: a copy that is still on its way may write into a freed block and must find no free list there. No block
//! crosses from one registration into the next, over which no copy could go.
//!
//! ```text
//!   Vec, Box, HashMap … ── PinnedAllocator (Copy) ──► shell ── heap ── regions ── node's memory
//!                                                       │
//!                                                       └── blocks freed with a gate shut: given out again when it opens
//! ```
//!
//! # Reuse
//! A copy in flight notes a gate on its block ([`DeferReuse`](aquifer_core::DeferReuse)). If the block is freed before
//! the gate opens it is *pending*: nobody gets it, nothing in it changes. A free never asks the driver; the next
//! allocation looks whether gates have opened.
//!
//! # When an allocation does not fit
//! Freed blocks whose gates have opened → a new region → a smaller one → regions of this pool that are wholly free, given
//! back to make room under the budget → the oldest pending blocks, waited for at most [`PinnedConfig::patience`] → an
//! error that tells all this. One thread grows at a time, and others wait for it where they would have had to grow too,
//! since the driver registers one range at a time anyway.
//!
//! # The end
//! Dropping the last handle closes the pool: allocators answer with an error from then on, and regions without live
//! blocks go at once. Blocks that are still about stay good, and the last of a region's blocks to be freed ends the
//! region. The shell that allocators point to is never freed but used again with a new generation, so that a stale
//! allocator always finds something that refuses it.
//!
//! # What surprises
//! - `deallocate` cannot answer: a pointer that is not a live block of the pool is ignored and counted in
//!   [`PinnedStats::refused_frees`].
//! - A pool takes no memory before the first allocation or [`PinnedPool::warm`].
//! - While a pool is at work for a thread, that thread's other allocations from pools are refused: bookkeeping can not
//!   come out of the memory it keeps the books of, however allocations are routed.

mod allocator;
mod buffer;
mod grow;
mod home;
mod pending;
mod state;

pub use allocator::PinnedAllocator;
pub use buffer::PinnedBuf;
pub use home::stale_frees;
pub use pending::sweep;

use crate::{
    region::{Host, PageTier, Pinning, RegionReport, Verify, window::GRANULE},
    topology::NodeId,
};
use aquifer_core::{Budget, MemoryError, PoolStats, Recorder, Result, event::Place};
use aquifer_driver::{HostFlags, site};
use bytemuck::Pod;
use home::Home;
use std::{alloc::Layout, fmt, ptr::NonNull, sync::Arc, time::Duration};

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
    /// How long an allocation that would fail waits for pending blocks. Zero for not at all.
    pub patience: Duration,
    /// Where the pool's events go.
    pub recorder: Option<Arc<Recorder>>,
}

impl Default for PinnedConfig {
    fn default() -> Self {
        Self {
            node: None,
            strict: false,
            pinning: Pinning::default(),
            chunk: 64 << 20,
            registration: crate::region::RegionRequest::REGISTRATION,
            pages: PageTier::HugeTlb,
            flags: HostFlags::default(),
            verify: Verify::default(),
            deadline: None,
            patience: Duration::from_millis(100),
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
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub struct PinnedStats {
    /// The account that all pools keep.
    pub memory: PoolStats,
    /// Regions (a count).
    pub regions: u64,
    /// Bytes of regions that devices can reach without staging.
    pub pinned: u64,
    /// Frees of pointers that were no live block, or with a layout that was none of its (a count). Nothing was freed.
    pub refused_frees: u64,
}

/// What stays as it was made, for the pool's whole life.
#[derive(Debug)]
struct Shared {
    host: Host,
    budget: Budget,
    config: PinnedConfig,
    /// Whether somebody checks what the host does with pinned memory.
    observed: bool,
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
    generation: u32,
    shared: Arc<Shared>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.home.close(self.generation);
    }
}

impl PinnedPool {
    /// A pool whose regions are charged to `budget`. Takes no memory yet.
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a configuration that cannot be followed.
    pub fn new(host: &Host, budget: &Budget, config: PinnedConfig) -> Result<Self> {
        config.check()?;
        let observed = host.reach.as_ref().is_some_and(|reach| reach.driver.observer().is_some());
        let shared = Arc::new(Shared { host: host.clone(), budget: budget.clone(), config, observed });
        let (home, generation) = Home::open(shared.clone());
        Ok(Self { handle: Arc::new(Handle { home, generation, shared }) })
    }

    /// The pool as an allocator, for collections. It may outlive the pool, and answers with an error then.
    #[must_use]
    pub fn allocator(&self) -> PinnedAllocator {
        PinnedAllocator::new(self.handle.home, self.handle.generation)
    }

    /// A block, with the reason if there is none. Free it by the allocator's `deallocate`. Blocks when it has to grow.
    ///
    /// # Errors
    /// [`MemoryError::OutOfMemory`] with what was tried; the region's, if it was not for want of memory.
    #[track_caller]
    pub fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>> {
        let _site = site::enter();
        self.handle.home.allocate(self.handle.generation, layout)
    }

    /// `len` zeroed elements.
    ///
    /// # Errors
    /// As [`PinnedPool::allocate`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, len: usize) -> Result<PinnedBuf<T>> {
        PinnedBuf::new_in(self, len)
    }

    /// Takes regions until the pool holds `bytes`, populated and registered: what allocations need not wait for later.
    /// Blocks.
    ///
    /// # Errors
    /// The region's. What was taken before stays.
    #[track_caller]
    pub fn warm(&self, bytes: usize) -> Result<()> {
        let _site = site::enter();
        self.handle.home.warm(self.handle.generation, bytes)
    }

    /// Gives back regions that are wholly free, largest first, while at least `keep` free bytes stay. Answers with the
    /// bytes given back. For quiet points: blocks until devices are idle, and looks at pending blocks before.
    ///
    /// # Errors
    /// The driver's or the kernel's, when a region would not end: it is stranded then, and stays charged.
    #[track_caller]
    pub fn trim(&self, keep: usize) -> Result<u64> {
        let _site = site::enter();
        self.handle.home.poll_all();
        self.handle.home.trim(self.handle.generation, keep as u64)
    }

    /// What it holds.
    #[must_use]
    pub fn stats(&self) -> PinnedStats {
        self.handle.home.with(|state| state.stats())
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
        self.handle.home.with(|state| state.block_at(address).and_then(|_| state.is_pinned(address)))
    }

    /// How each region was made, in address order.
    #[must_use]
    pub fn reports(&self) -> Vec<RegionReport> {
        self.handle.home.with(|state| state.reports())
    }

    /// Checks the pool's books against each other, in time proportional to what it holds. For tests and fuzzing.
    #[must_use]
    pub fn is_consistent(&self) -> bool {
        self.handle.home.with(|state| state.is_consistent())
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
