//! The limits of live bytes that tenants and tags have in a pool.

use crate::{
    Request,
    base::waits::deadline,
    pool_core::{PoolCore, PoolHook},
};
use aquifer_core::{
    Budget, Result, Tag,
    budget::{BudgetLease, Leased},
    error::TenantHolding,
};
use aquifer_stream::Stream;
use std::sync::{
    Arc, PoisonError, RwLock,
    atomic::{AtomicBool, Ordering},
};

/// Leases per share. Streams with different numbers rarely use the same.
const LANES: usize = 8;

/// A lease takes this fraction of the limit at a time, so that all leases together keep less than
/// half of it unused.
const GRAIN_PART: u64 = 64;

/// Bounds of the grain, in bytes.
const GRAIN: (u64, u64) = (64 << 10, 16 << 20);

/// The tenants and limited tags of a pool.
#[derive(Debug, Default)]
pub(crate) struct LiveLimits {
    /// Whether any of the shares limits a tag.
    pub(crate) limits_tags: AtomicBool,
    limits: RwLock<Vec<Arc<LiveLimit>>>,
}

/// The live bytes of one tenant or tag in one pool.
#[derive(Debug)]
pub(crate) struct LiveLimit {
    pub(crate) budget: Budget,
    leases: [BudgetLease; LANES],
    /// The tag that it limits, if any.
    pub(crate) tag: Option<Tag>,
}

impl LiveLimit {
    pub(crate) fn new(budget: Budget, tag: Option<Tag>) -> Self {
        let grain = (budget.limit() / GRAIN_PART).clamp(GRAIN.0, GRAIN.1);
        Self { leases: std::array::from_fn(|_| budget.lease(grain)), budget, tag }
    }

    /// Returns whether only the pool references it, and no bytes of the tenant are live.
    fn is_unused(self: &Arc<Self>) -> bool {
        self.tag.is_none() && Arc::strong_count(self) == 1 && self.live() == 0
    }

    /// Returns the live bytes of the whole tenant, in all pools.
    pub(crate) fn live(&self) -> u64 {
        self.budget.used()
    }

    #[inline]
    pub(crate) fn charge(
        &self,
        pool: &PoolCore,
        stream: &Stream,
        request: &Request,
    ) -> Result<Leased> {
        let lease = &self.leases[stream.number() as usize % LANES];
        match lease.charge(request.size()) {
            Ok(leased) => Ok(leased),
            Err(_) => self.charge_slow(pool, lease, request),
        }
    }

    /// Calls the reclaimers that are registered for the tenant's budget, then retries.
    #[cold]
    fn charge_slow(
        &self,
        pool: &PoolCore,
        lease: &BudgetLease,
        request: &Request,
    ) -> Result<Leased> {
        let room = self.budget.make_room(request.size(), deadline(pool.config.wait), None);
        lease
            .charge(request.size())
            .map_err(|refused| pool.refuse_live_limit(request, &self.budget, refused, &room))
    }
}

impl LiveLimits {
    fn find(&self, is: impl Fn(&LiveLimit) -> bool) -> Option<Arc<LiveLimit>> {
        let limits = self.limits.read().unwrap_or_else(PoisonError::into_inner);
        limits.iter().find(|limit| is(limit)).cloned()
    }

    /// Returns the share that `is` finds, or a new one.
    pub(crate) fn limit_for(
        &self,
        is: impl Fn(&LiveLimit) -> bool,
        make: impl FnOnce() -> LiveLimit,
    ) -> Arc<LiveLimit> {
        if let Some(limit) = self.find(&is) {
            return limit;
        }
        let new = Arc::new(make());
        let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(limit) = limits.iter().find(|limit| is(limit)) {
            return limit.clone();
        }
        limits.push(new.clone());
        // Remove shares that are unused and have no live bytes. Their leases are dropped after the
        // lock is released.
        let unused: Vec<_> = limits.extract_if(.., |limit| limit.is_unused()).collect();
        drop(limits);
        drop(unused);
        new
    }
}

impl PoolHook for LiveLimits {
    fn charge(
        &self,
        core: &PoolCore,
        stream: &Stream,
        request: &Request,
    ) -> Result<Option<Leased>> {
        if !self.limits_tags.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let limit = self.find(|limit| limit.tag == Some(request.owner()));
        limit.map(|limit| limit.charge(core, stream, request)).transpose()
    }

    /// Returns unused bytes of leases to the budgets, and drops tenants without handles and live
    /// bytes. A budget without live bytes then has no charge left.
    fn release_charges(&self) {
        let unused: Vec<_> = {
            let mut limits = self.limits.write().unwrap_or_else(PoisonError::into_inner);
            limits.extract_if(.., |limit| limit.is_unused()).collect()
        };
        // Their leases are dropped after the lock is released.
        drop(unused);
        let limits = self.limits.read().unwrap_or_else(PoisonError::into_inner).clone();
        limits.iter().flat_map(|limit| &limit.leases).for_each(BudgetLease::trim);
    }

    /// Returns the live bytes of each, most first.
    fn tenant_holdings(&self) -> Vec<TenantHolding> {
        let limits = self.limits.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut holdings: Vec<_> = limits
            .iter()
            .map(|limit| TenantHolding {
                name: limit.budget.name(),
                live: limit.live(),
                limit: limit.budget.limit(),
            })
            .collect();
        holdings.sort_by_key(|tenant| std::cmp::Reverse(tenant.live));
        holdings
    }
}
