//! Limits on what a tenant or a tag has live in a pool.
//!
//! ```text
//!   physical bytes     process ── device 0 ── pool            charged by the pool, for what it holds from the driver
//!
//!   live bytes         all tenants ─┬─ tenant a ── request    charged by blocks, for as long as they live
//!                                   └─ tenant b
//! ```
//!
//! **Two trees, since they count two things.** A live block lies in memory that the pool has been
//! charged for already, and that memory stays charged when the block is freed, for whoever comes
//! next: a tenant's bytes are a part of the pool's, not more of them. Were a tenant a child of the
//! pool's own budget, each live byte would count twice on the way to the root, and a device of 80
//! GiB would be full with 40 in use. So a tenant is a budget of another tree, of the program's own
//! making: with tenants of tenants, guarantees, priorities and levels as any tree, over one pool or
//! over those of several devices. One that has its root in common with the pool's budget is
//! refused.
//!
//! **What is counted** are the bytes that were asked for, of blocks that have an owner: the sum of
//! a tenant's is [`PoolStats::requested`](aquifer_core::PoolStats::requested) of its blocks.
//! [`Reserved`] memory is counted by its committed steps. Freed memory that other streams still use
//! is the pool's again, as in its statistics. Pinned memory and any other that an `Allocator` gives
//! is counted for the same budget by a `Limit` around it.
//!
//! **What it costs.** Charges come out of [`Lease`]s, one for each of a few streams, so a block up
//! to the lease's grain touches no lock of the tree as a rule. The block remembers its charge in
//! its extras, an allocation of 88 bytes on the host. A cached pair takes 51 ns in place of 16 on a
//! 2-core virtual machine, and 493 instructions in place of 182; one beyond the grain, 597. A block
//! of nobody's takes 182 where it took 181 before there were tenants, and 584 an operation
//! of random sizes as before. A pool with a limited tag takes the longer way for all its blocks.

use crate::{
    Block, DeviceBuffer, DevicePool, Request, Reserved, StableBlock, pool::Inner, pool::deadline,
    request::Sensible, reserved::StepAccount,
};
use aquifer_core::{
    Budget, DeviceId, MemoryError, Opaque, PoolStats, Result, Tag,
    budget::{Lease, Leased},
    error::TenantHolding,
};
use aquifer_driver::site;
use aquifer_stream::Stream;
use bytemuck::Pod;
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

/// Leases of one share: streams with different numbers hardly ever touch the same.
const LANES: usize = 8;
/// A lease takes this part of the limit at a time, so that all of them keep less than half of it
/// spare.
const GRAIN_PART: u64 = 64;
/// Bounds of that, in bytes.
const GRAIN: (u64, u64) = (64 << 10, 16 << 20);

/// Who has a share of the pool.
#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// Whether any of them is a tag's.
    limits_tags: AtomicBool,
    shares: RwLock<Vec<Arc<Share>>>,
}

/// What one tenant or tag has in one pool.
#[derive(Debug)]
pub(crate) struct Share {
    budget: Budget,
    leases: [Lease; LANES],
    /// The tag whose limit it is.
    tag: Option<Tag>,
}

impl Share {
    fn new(budget: Budget, tag: Option<Tag>) -> Self {
        let grain = (budget.limit() / GRAIN_PART).clamp(GRAIN.0, GRAIN.1);
        Self { leases: std::array::from_fn(|_| budget.lease(grain)), budget, tag }
    }

    /// Whether only the pool has it, and nothing of the tenant is live.
    fn is_forgotten(self: &Arc<Self>) -> bool {
        self.tag.is_none() && Arc::strong_count(self) == 1 && self.live() == 0
    }

    /// The live bytes of the whole tenant, wherever they are.
    fn live(&self) -> u64 {
        self.budget.used().saturating_sub(self.budget.spare())
    }

    #[inline]
    pub(crate) fn charge(
        &self,
        pool: &Inner,
        stream: &Stream,
        request: &Request,
    ) -> Result<Leased> {
        let lease = &self.leases[stream.number() as usize % LANES];
        match lease.charge(request.size()) {
            Ok(leased) => Ok(leased),
            Err(_) => self.charge_slowly(pool, lease, request),
        }
    }

    /// Whoever has said that it can free something of the tenant's is asked.
    #[cold]
    fn charge_slowly(&self, pool: &Inner, lease: &Lease, request: &Request) -> Result<Leased> {
        let room = self.budget.make_room(request.size(), deadline(pool.config.wait), None);
        lease
            .charge(request.size())
            .map_err(|refused| pool.refuse(request, &self.budget, refused, &room))
    }
}

impl Tenants {
    fn find(&self, is: impl Fn(&Share) -> bool) -> Option<Arc<Share>> {
        let shares = self.shares.read().unwrap_or_else(PoisonError::into_inner);
        shares.iter().find(|share| is(share)).cloned()
    }

    /// The share that `is` finds, or a new one.
    fn share(&self, is: impl Fn(&Share) -> bool, make: impl FnOnce() -> Share) -> Arc<Share> {
        if let Some(share) = self.find(&is) {
            return share;
        }
        let new = Arc::new(make());
        let mut shares = self.shares.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = shares.iter().find(|share| is(share)) {
            return share.clone();
        }
        shares.push(new.clone());
        // Those that nobody uses any more and that have nothing left. Their leases go after the
        // lock.
        let gone: Vec<_> = shares.extract_if(.., |share| share.is_forgotten()).collect();
        drop(shares);
        drop(gone);
        new
    }

    /// Gives back what leases have spare, and forgets tenants that have no handle and nothing live:
    /// a budget with no live bytes is charged for none afterwards.
    pub(crate) fn trim(&self) {
        let gone: Vec<_> = {
            let mut shares = self.shares.write().unwrap_or_else(PoisonError::into_inner);
            shares.extract_if(.., |share| share.is_forgotten()).collect()
        };
        // Their leases go after the lock.
        drop(gone);
        let shares = self.shares.read().unwrap_or_else(PoisonError::into_inner).clone();
        shares.iter().flat_map(|share| &share.leases).for_each(Lease::trim);
    }

    /// What each has live, most first.
    pub(crate) fn holdings(&self) -> Vec<TenantHolding> {
        let shares = self.shares.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut holdings: Vec<_> = shares
            .iter()
            .map(|share| TenantHolding {
                name: share.budget.name(),
                live: share.live(),
                limit: share.budget.limit(),
            })
            .collect();
        holdings.sort_by_key(|tenant| std::cmp::Reverse(tenant.live));
        holdings
    }
}

impl Inner {
    /// Takes the request's bytes of its tag's limit, if the tag has one.
    pub(crate) fn charge_tag(&self, stream: &Stream, request: &Request) -> Result<Option<Leased>> {
        if !self.tenants.limits_tags.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let share = self.tenants.find(|share| share.tag == Some(request.owner()));
        share.map(|share| share.charge(self, stream, request)).transpose()
    }
}

impl DevicePool {
    /// This pool, as a tenant sees it: every block is counted as the tenant's live bytes from its
    /// allocation to its free, and what the tenant's budget does not grant is refused. Asking again
    /// for the same tenant costs a look into a list.
    ///
    /// ```
    /// use aquifer_core::{Budget, MemoryError};
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{DeviceId, sim::Sim};
    /// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
    /// let s = pool.stream()?;
    /// let a = Budget::new("tenant a", 8 << 20);
    /// let x = pool.for_tenant(&a)?.alloc(&s, Request::bytes(6 << 20))?;
    /// assert_eq!(a.used() - a.spare(), 6 << 20);
    /// let refused = pool.for_tenant(&a)?.alloc(&s, Request::bytes(3 << 20)).unwrap_err();
    /// let MemoryError::OutOfMemory(error) = refused else { panic!("{refused}") };
    /// assert_eq!(error.refused.unwrap().budget, "tenant a");
    /// drop(x);
    /// assert_eq!(a.used() - a.spare(), 0);
    /// # Ok::<(), MemoryError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::BadSetting`] for a budget that has its root in common with the [pool's
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
        let is = |share: &Share| share.tag.is_none() && share.budget.is(tenant);
        let share = self.inner().tenants.share(is, || Share::new(tenant.clone(), None));
        Ok(Tenant { pool: self.clone(), share })
    }

    /// Limits the live bytes of `tag` in this pool from now on, or sets that limit anew, and
    /// answers with the budget that counts them. Blocks that are live already are not counted.
    /// Stable and [parkable](DevicePool::parkable) blocks are, and [`Reserved`] memory by its
    /// committed steps, under the tag of the thread that reserved it.
    ///
    /// Every allocation of this pool looks up its tag from then on, some 20 ns.
    pub fn limit_tag(&self, tag: Tag, bytes: u64) -> Budget {
        let inner = self.inner();
        let share = inner.tenants.share(
            |share| share.tag == Some(tag),
            || Share::new(Budget::new(tag.name(), bytes), Some(tag)),
        );
        share.budget.set_limit(bytes);
        // Whoever has seen the limit set takes the way that heeds it.
        if !inner.tenants.limits_tags.swap(true, Ordering::Relaxed) {
            inner.add_detour();
        }
        share.budget.clone()
    }
}

/// A pool as one tenant sees it: [`DevicePool::for_tenant`]. A clone is another handle.
///
/// Wrappers, arenas and buffers take it where they take a pool:
///
/// ```
/// use aquifer_core::Budget;
/// use aquifer_device::{DeviceArena, DevicePool, PoolConfig};
/// use aquifer_driver::{DeviceId, sim::Sim};
/// let pool = DevicePool::open(Sim::h200(1).driver(), DeviceId(0), PoolConfig::default())?;
/// let s = pool.stream()?;
/// let tenant = pool.for_tenant(&Budget::new("tenant a", 8 << 20))?;
/// let arena = DeviceArena::new(&tenant, &s, 1 << 20)?;
/// assert_eq!(tenant.live(), 1 << 20);
/// drop(arena);
/// assert_eq!(tenant.live(), 0);
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Tenant {
    pool: DevicePool,
    share: Arc<Share>,
}

impl Tenant {
    /// As [`DevicePool::alloc`], counted as the tenant's.
    ///
    /// Where the tenant's budget has no room, those who have [registered](Budget::on_need) with it
    /// are asked to free something first, until [`PoolConfig::wait`](crate::PoolConfig::wait) is
    /// over.
    ///
    /// # Errors
    /// As [`DevicePool::alloc`]; of [`MemoryError::OutOfMemory`],
    /// [`of_live_bytes`](aquifer_core::OutOfMemory::of_live_bytes) says that it was the tenant's
    /// budget, or one above, that refused.
    #[track_caller]
    pub fn alloc(&self, stream: &Stream, request: Request) -> Result<Block> {
        let leased = self.charge(stream, request)?;
        let mut block = self.pool.alloc(stream, request)?;
        block.extras_mut().live.of_tenant = Some(leased);
        Ok(block)
    }

    /// As [`DevicePool::alloc_stable`], counted as the tenant's.
    ///
    /// # Errors
    /// As [`DevicePool::alloc_stable`] and [`Tenant::alloc`].
    #[track_caller]
    pub fn alloc_stable(&self, stream: &Stream, request: Request) -> Result<StableBlock> {
        let leased = self.charge(stream, request)?;
        let mut stable = self.pool.alloc_stable(stream, request)?;
        stable.block_mut().extras_mut().live.of_tenant = Some(leased);
        Ok(stable)
    }

    /// As [`DevicePool::buffer`], counted as the tenant's.
    ///
    /// # Errors
    /// As [`Tenant::alloc`].
    #[track_caller]
    pub fn buffer<T: Pod>(&self, stream: &Stream, len: usize) -> Result<DeviceBuffer<T>> {
        DeviceBuffer::new_in(self, stream, len)
    }

    /// As [`DevicePool::reserve`], with committed steps counted as the tenant's live bytes:
    /// growable memory, such as a cache of keys and values. Addresses are not counted.
    ///
    /// ```
    /// use aquifer_core::{Budget, MemoryError};
    /// use aquifer_device::{DevicePool, PoolConfig};
    /// use aquifer_driver::{DeviceId, sim::Sim};
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
    /// As [`DevicePool::reserve`]. [`Reserved::commit`] is refused by the tenant's limit as
    /// [`Tenant::alloc`] is.
    #[track_caller]
    pub fn reserve<T: Pod>(&self, stream: &Stream, max_len: usize) -> Result<Reserved<T>> {
        let _site = site::enter();
        self.reserve_in_steps(stream, max_len, self.pool.inner().apart.step())
    }

    /// As [`DevicePool::reserve_in_steps`], with committed steps counted as the tenant's live
    /// bytes.
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
        let account = StepAccount { tenant: Some(self.share.clone()), ..StepAccount::default() };
        self.pool.reserve_for(stream, max_len, step, account)
    }

    fn charge(&self, stream: &Stream, request: Request) -> Result<Leased> {
        // What makes no sense is refused as such, and not by a limit.
        let request = request.checked()?;
        self.share.charge(self.pool.inner(), stream, &request)
    }

    /// What its live bytes are charged to.
    #[must_use]
    pub fn budget(&self) -> &Budget {
        &self.share.budget
    }

    /// Bytes that the tenant has live, in this pool and in any other that counts for the same
    /// budget, and those of tenants below it.
    #[must_use]
    pub fn live(&self) -> u64 {
        self.share.live()
    }

    /// The pool.
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
