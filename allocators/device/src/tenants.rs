//! Limits on the live bytes of a tenant or a tag in a pool.
//!
//! ```text
//!   physical bytes     process ── device 0 ── pool            charged by the pool, for what it holds from the driver
//!
//!   live bytes         all tenants ─┬─ tenant a ── request    charged by blocks, for as long as they live
//!                                   └─ tenant b
//! ```
//!
//! **There are two trees, since they count two things.** A live block lies in memory that the pool
//! has already been charged for. When the block is freed, that memory stays charged for later
//! blocks. So a tenant's bytes are part of the pool's bytes. If a tenant were a child of the pool's
//! own budget, each live byte would count twice on the way to the root, and a device of 80 GiB
//! would be full with 40 in use. So a tenant is a budget of a separate tree that the program
//! creates. Like any tree, it may have nested tenants, guarantees, priorities and levels, over one
//! pool or over the pools of several devices. A tenant that shares its root with the pool's budget
//! is refused.
//!
//! **What is counted**: the requested bytes of live blocks. The sum for a tenant is
//! [`PoolStats::requested`](aquifer_core::PoolStats::requested) of its blocks. [`Reserved`] memory
//! is counted by its committed steps. Freed memory that other streams still use counts as the
//! pool's again, as in its statistics. For pinned memory and any other `Allocator`, a `Limit`
//! around it charges the same budget.
//!
//! **Cost**: charges come from [`BudgetLease`](aquifer_core::budget::BudgetLease)s, one for each
//! group of streams, so a block up to the lease's grain usually takes no lock of the tree. The
//! block stores its charge in a small host allocation. Blocks without a tenant are not affected,
//! except that a pool with a limited tag takes the full path for all its blocks.

use crate::{
    Block, DeviceBuffer, DevicePool, Parkable, Request, Reserved, StableBlock,
    base::waits::begin_request,
    limits::{LiveLimit, LiveLimits},
    reserved::StepCharges,
};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Opaque, PoolStats, Reservation, Result, Tag, budget::Leased,
};
use aquifer_driver::site;
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::sync::{Arc, Mutex, Weak, atomic::Ordering};

impl DevicePool {
    /// Returns this pool for a tenant: every block counts towards the tenant's live bytes from its
    /// allocation to its free, and what the tenant's budget does not grant is refused. Further
    /// calls for the same tenant cost a search of a list.
    ///
    /// ```
    /// use aquifer::{Budget, DeviceId, DevicePool, MemoryError, PoolConfig, Request, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let s = pool.stream()?;
    /// let a = Budget::new("tenant a", 8 << 20);
    /// let x = pool.for_tenant(&a)?.alloc(&s, Request::bytes(6 << 20))?;
    /// assert_eq!(a.used(), 6 << 20);
    /// let refused = pool.for_tenant(&a)?.alloc(&s, Request::bytes(3 << 20)).unwrap_err();
    /// let MemoryError::OutOfMemory(error) = refused else { panic!("{refused}") };
    /// assert_eq!(error.refused.unwrap().budget, "tenant a");
    /// drop(x);
    /// assert_eq!(a.used(), 0);
    /// # Ok::<(), MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a budget that shares its root with the [pool's
    /// own](DevicePool::budget), where each live byte would count twice.
    pub fn for_tenant(&self, tenant: &Budget) -> Result<Tenant> {
        let root =
            |budget: &Budget| std::iter::successors(Some(budget.clone()), Budget::parent).last();
        if root(tenant).is_some_and(|top| root(self.budget()).is_some_and(|own| own.is(&top))) {
            return Err(MemoryError::BadSetting {
                name: "the tenant's budget",
                value: tenant.name().to_owned(),
                expected: "of live bytes: `Budget::new`, or below one, and not below what the pool itself is charged to",
            });
        }
        let is = |limit: &LiveLimit| limit.tag.is_none() && limit.budget.is(tenant);
        let limit = self
            .core()
            .feature::<LiveLimits>()
            .limit_for(is, || LiveLimit::new(tenant.clone(), None));
        Ok(Tenant { pool: self.clone(), limit, held: Weak::new() })
    }

    /// Like [`DevicePool::for_tenant`], but the tenant's memory is drawn from `held` before the
    /// budget is charged, as long as another owner keeps `held`.
    ///
    /// # Errors
    /// As [`DevicePool::for_tenant`].
    #[doc(hidden)]
    pub fn for_tenant_drawing(
        &self,
        tenant: &Budget,
        held: &Arc<Mutex<Reservation>>,
    ) -> Result<Tenant> {
        Ok(Tenant { held: Arc::downgrade(held), ..self.for_tenant(tenant)? })
    }

    /// Sets the limit of the live bytes of `tag` in this pool, and returns the budget that counts
    /// them. Blocks that are live already are not counted. Stable and
    /// [parkable](DevicePool::parkable) blocks are counted, and [`Reserved`] memory by its
    /// committed steps, under the tag of the thread that reserved it.
    ///
    /// From then on every allocation of this pool looks up its tag, which takes some 20 ns.
    pub fn limit_tag(&self, tag: Tag, bytes: u64) -> Budget {
        let core = self.core();
        let limits = core.feature::<LiveLimits>();
        let limit = limits.limit_for(
            |limit| limit.tag == Some(tag),
            || LiveLimit::new(Budget::new(tag.name(), bytes), Some(tag)),
        );
        limit.budget.set_limit(bytes);
        // A thread that has seen the limit set takes the full path, which checks it.
        if !limits.limits_tags.swap(true, Ordering::Relaxed) {
            core.add_full_path_reason();
        }
        limit.budget.clone()
    }
}

/// A pool for one tenant: see [`DevicePool::for_tenant`]. A clone is another handle.
///
/// Wrappers, arenas and buffers accept it in place of a pool:
///
/// ```
/// use aquifer::{Budget, DeviceArena, DeviceId, DevicePool, PoolConfig, sim::Sim};
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// let s = pool.stream()?;
/// let tenant = pool.for_tenant(&Budget::new("tenant a", 8 << 20))?;
/// let arena = DeviceArena::new(&tenant, &s, 1 << 20)?;
/// assert_eq!(tenant.live(), 1 << 20);
/// drop(arena);
/// assert_eq!(tenant.live(), 0);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tenant {
    pool: DevicePool,
    limit: Arc<LiveLimit>,
    /// The reservation that memory is drawn from first. Its owner may drop it at any time.
    held: Weak<Mutex<Reservation>>,
}

impl Tenant {
    /// Allocates like [`DevicePool::alloc`], counted for the tenant.
    ///
    /// If the tenant's budget has no room, the reclaimers [registered](Budget::on_need) with it are
    /// called first, for at most [`PoolConfig::wait`](crate::PoolConfig::wait).
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]. In [`MemoryError::OutOfMemory`],
    /// [`of_live_bytes`](aquifer_core::OutOfMemory::of_live_bytes) is set if the tenant's budget,
    /// or one above it, refused.
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        if request.size() == 0 {
            return self.pool.alloc(stream, request);
        }
        // One deadline for the tenant's limit and for the pool.
        let _request = begin_request();
        let leased = self.charge(stream, request)?;
        let mut block = match self.held.upgrade() {
            Some(held) => self.pool.alloc_reserved(stream, request, &held)?,
            None => self.pool.alloc(stream, request)?,
        };
        block.meta_mut().live.of_tenant = Some(leased);
        Ok(block)
    }

    /// Allocates like [`DevicePool::alloc_stable`], counted for the tenant.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`] and [`Tenant::alloc`].
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        // One deadline for the tenant's limit and for the pool.
        let _request = begin_request();
        let leased = self.charge(stream, request)?;
        let mut stable = match self.held.upgrade() {
            Some(held) => self.pool.alloc_stable_reserved(stream, request, &held)?,
            None => self.pool.alloc_stable(stream, request)?,
        };
        stable.block_mut().meta_mut().live.of_tenant = Some(leased);
        Ok(stable)
    }

    /// Allocates like [`DevicePool::buffer`], counted for the tenant.
    ///
    /// # Errors
    /// As [`Tenant::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new_in(self, stream, len)
    }

    /// Reserves like [`DevicePool::reserve`], with committed steps counted as the tenant's live
    /// bytes: growable memory, such as a cache of keys and values. Addresses are not counted.
    ///
    /// ```
    /// use aquifer::{Budget, DeviceId, DevicePool, MemoryError, PoolConfig, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let s = pool.stream()?;
    /// let tenant = pool.for_tenant(&Budget::new("tenant a", 8 << 20))?;
    /// let mut keys = tenant.reserve::<u8>(&s, 1 << 30)?; // addresses for 1 GiB
    /// keys.commit_to(5 << 20)?;                          // three steps of 2 MiB
    /// assert_eq!(tenant.live(), 6 << 20);
    /// let refused = keys.commit_to(9 << 20).unwrap_err();
    /// assert!(matches!(&refused, MemoryError::OutOfMemory(error) if error.of_live_bytes));
    /// keys.decommit(2 << 20..1 << 30)?;
    /// assert_eq!(tenant.live(), 2 << 20);
    /// # Ok::<(), MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::reserve`]. The tenant's limit applies to [`Reserved::commit`] as to
    /// [`Tenant::alloc`].
    #[track_caller]
    pub fn reserve<T: Pod>(&self, stream: &Stream, max_len: usize) -> Result<Reserved<T>> {
        let _site = site::enter();
        self.reserve_in_steps(stream, max_len, self.pool.core().dedicated.step())
    }

    /// Reserves like [`DevicePool::reserve_in_steps`], with committed steps counted as the tenant's
    /// live bytes.
    ///
    /// # Errors
    /// As [`Tenant::reserve`].
    #[track_caller]
    pub fn reserve_in_steps<T: Pod>(
        &self,
        stream: &Stream,
        max_len: usize,
        step: u64,
    ) -> Result<Reserved<T>> {
        let _site = site::enter();
        let account = StepCharges { tenant: Some(self.limit.clone()), held: self.held.clone() };
        self.pool.reserve_for(stream, max_len, step, account)
    }

    /// Returns the allocator of [parkable](DevicePool::parkable) blocks of `tag` for this tenant.
    /// Its blocks count towards the tenant's live bytes from their allocation to their free, also
    /// while they are parked: the tenant keeps the right to resume them. Tenants may share a tag,
    /// whose blocks are parked and resumed together. They are not drawn from a lease.
    ///
    /// ```
    /// use aquifer::{Budget, DeviceId, DevicePool, MemoryError, Park, PoolConfig, Tag, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let (s, tag) = (pool.stream()?, Tag::named("adapters of a"));
    /// let tenant = pool.for_tenant(&Budget::new("tenant a", 8 << 20))?;
    /// let adapters = tenant.parkable(tag)?;
    /// let x = adapters.buffer::<f32>(&s, 1 << 20)?;
    /// assert_eq!(tenant.live(), 4 << 20);
    /// // SAFETY: 1. and 2. nothing uses the block.
    /// unsafe { pool.park(tag, Park::discard()) }?;
    /// assert_eq!((pool.stats().physical, tenant.live()), (0, 4 << 20));
    /// pool.resume(tag, None)?;
    /// let refused = adapters.buffer::<f32>(&s, 2 << 20).unwrap_err();
    /// assert!(matches!(&refused, MemoryError::OutOfMemory(error) if error.of_live_bytes));
    /// drop(x);
    /// assert_eq!(tenant.live(), 0);
    /// # Ok::<(), MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// As [`DevicePool::parkable`]. The tenant's limit applies to [`Parkable::alloc`] as to
    /// [`Tenant::alloc`].
    #[track_caller]
    pub fn parkable(&self, tag: Tag) -> Result<Parkable> {
        Ok(self.pool.parkable(tag)?.for_tenant(self.limit.clone()))
    }

    fn charge(&self, stream: &Stream, request: Request) -> Result<Leased> {
        // An invalid request is reported as such, not as a refusal by the limit.
        let request = self.pool.core().checked(request)?;
        self.limit.charge(self.pool.core(), stream, &request)
    }

    /// Returns the budget that its live bytes are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.limit.budget
    }

    /// Returns the tenant's live bytes, in this pool and in all others that charge the same budget,
    /// including those of tenants below it.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.limit.live()
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &DevicePool {
        &self.pool
    }
}

impl Opaque for Tenant {
    type Stream = Stream;
    type Block = Block;

    fn device(&self) -> DeviceId {
        self.pool.device()
    }
    #[track_caller]
    fn allocate(&self, stream: &Stream, request: Request) -> Result<Block> {
        self.alloc(stream, request)
    }
    fn stats(&self) -> PoolStats {
        self.pool.stats()
    }
    fn trim(&self, keep: u64) -> Result<u64> {
        self.pool.trim(keep)
    }
}
