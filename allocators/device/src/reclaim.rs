//! Reclaim: the memory that a pool releases for others, and the requests to others to release
//! theirs.
//!
//! - Everything that holds memory under a budget is registered with the budget as long as it lives,
//!   by a weak reference.
//! - An offer is computed from the pool's own accounts, under locks that are never held during a
//!   driver call.
//! - The crate's documentation lists the cost of each kind of offer.

use crate::{
    DevicePool,
    base::{reclaim_cost::reclaim_cost, waits::has_passed},
    checked::{BlockSource, CheckedPool},
    pool::PoolCore,
};
use aquifer_core::{
    Budget, DeviceId,
    budget::{Asking, HookRegistration, Offer, Reclaim, Room},
    error::Tried,
    event::MemoryLocation,
};
use aquifer_driver::{Driver, site};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};

/// Returns whether memory of that place is the device's. Memory of an integrated device is host
/// memory.
fn is_memory_of(driver: &dyn Driver, device: DeviceId, place: MemoryLocation) -> bool {
    match place {
        MemoryLocation::Device(other) => other == device,
        MemoryLocation::Host(_) => driver.device_info(device).is_ok_and(|info| info.integrated),
        _ => false,
    }
}

/// The reclaimers that a holder of device memory can call, the cheapest first.
pub(crate) struct Reclaimers<'a> {
    asking: Asking<'a>,
    driver: &'a dyn Driver,
    device: DeviceId,
}

impl<'a> Reclaimers<'a> {
    pub(crate) fn new(
        budget: &'a Budget,
        own: Option<&'a HookRegistration>,
        driver: &'a dyn Driver,
        device: DeviceId,
    ) -> Self {
        Self { asking: budget.asking(own), driver, device }
    }

    /// Calls the next reclaimer below the budget that has refused a charge of `bytes`.
    pub(crate) fn for_charge(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        self.asking.for_charge(bytes, deadline)
    }

    /// Calls the next reclaimer with memory of this device, under any budget of the tree, after the
    /// driver has refused `bytes`.
    pub(crate) fn for_memory(&mut self, bytes: u64, deadline: Option<Instant>) -> Option<Tried> {
        let Self { asking, driver, device } = self;
        asking.for_memory(bytes, deadline, &|place| is_memory_of(*driver, *device, place))
    }
}

impl PoolCore {
    /// Registers this pool as a reclaimer of its budgets.
    pub(crate) fn register(self: &Arc<Self>) {
        let _only_once = self.registration.set(self.budget.on_need(self));
    }

    pub(crate) fn reclaimers(&self) -> Reclaimers<'_> {
        Reclaimers::new(&self.budget, self.registration.get(), &*self.driver, self.info.device)
    }

    /// Returns the bytes that are in no live block, including those of pending frees.
    fn idle(&self) -> u64 {
        let pass = self.scratch.begin();
        let live: u64 =
            self.caches(&pass).iter().map(|cache| cache.with(|s| s.footprint().live)).sum();
        let (held, unit) = (self.physical.held().now(), self.physical.unit());
        let idle = held.saturating_sub(live);
        // Memory that shares a handle with a live block is kept. The number is not rounded: a
        // reclaimer that failed is called again when it changes.
        (if idle >= unit { idle } else { 0 }) + self.dedicated.retiring()
    }
}

impl Reclaim for PoolCore {
    fn name(&self) -> &'static str {
        "caches of a pool"
    }

    fn offer(&self) -> Offer {
        let bytes = self.idle();
        let cost = self.physical.reclaim_cost(bytes, self.config.peers.len() as u32);
        Offer { bytes, cost }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if self.waits() && has_passed(deadline) {
            return;
        }
        let keep = self.held().saturating_sub(bytes);
        // Bytes whose release the driver refuses stay charged, and the next trim retries.
        while self.trim_under_pressure(keep).is_ok()
            && self.held() > keep
            && !has_passed(deadline)
            && self.wait_for_oldest(None, deadline).unwrap_or(false)
        {}
    }

    fn waits(&self) -> bool {
        !self.physical.is_mapped()
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.info.device))
    }
}

impl Reclaim for CheckedPool {
    fn name(&self) -> &'static str {
        "quarantine of a pool"
    }

    fn offer(&self) -> Offer {
        let bytes = self.held_back();
        Offer { bytes, cost: reclaim_cost(0, Duration::ZERO, bytes, Duration::from_micros(54)) }
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if has_passed(deadline) {
            return;
        }
        self.reclaim_quarantine(bytes);
        if let BlockSource::Pool(core) = self.source() {
            core.reclaim(bytes, deadline);
        }
    }

    fn waits(&self) -> bool {
        true
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.device()))
    }
}

impl DevicePool {
    /// Releases device memory to the driver for other users, such as a library whose own allocation
    /// has failed or is about to. Calls this pool and all reclaimers under the same root of budgets
    /// that have memory of this device, the cheapest first, until `bytes` have been released or no
    /// more is available. Returns what is missing, and what each reclaimer released.
    ///
    /// The bytes then belong to the driver, and the budget has that much more room. To keep this
    /// program from taking them again, lower the budget's limit ([`Budget::shrink`]) or charge them
    /// to it.
    ///
    /// Blocks for the time of the driver calls and, until `deadline`, for queued work and the
    /// device. With a deadline in the past it waits for neither. `None` means no limit.
    ///
    /// ```
    /// use aquifer_device::{DevicePool, PoolConfig, Request};
    /// use aquifer_driver::{DeviceId, Driver, sim::Sim};
    /// let sim = Sim::h200(1).symbolic();
    /// let pool = DevicePool::open(sim.driver(), DeviceId(0), PoolConfig::default())?;
    /// let stream = pool.stream()?;
    /// drop(pool.alloc(&stream, Request::bytes(100 << 30))?);        // idle now
    ///
    /// // Another library's own allocation, which fails for lack of memory.
    /// let theirs = || sim.driver().mem_alloc(DeviceId(0), 60 << 30);
    /// let answer = theirs().or_else(|refused| {
    ///     match pool.give_back(60 << 30, None).missing {
    ///         0 => theirs(),
    ///         _ => Err(refused),
    ///     }
    /// });
    /// assert!(answer.is_ok());
    /// # Ok::<(), aquifer_core::MemoryError>(())
    /// ```
    #[track_caller]
    pub fn give_back(&self, bytes: u64, deadline: Option<Instant>) -> Room {
        let _site = site::enter();
        let PoolCore { driver, info, budget, .. } = &**self.core();
        let root = budget.root();
        let before = root.used();
        let mut reclaimers = Reclaimers::new(budget, None, &**driver, info.device);
        let mut room = Room { missing: bytes, tried: Vec::new() };
        // First what is available without waiting, then the rest.
        for deadline in [Some(Instant::now()), deadline] {
            while room.missing > 0
                && let Some(tried) = reclaimers.for_memory(room.missing, deadline)
            {
                room.missing = bytes.saturating_sub(before.saturating_sub(root.used()));
                room.tried.push(tried);
            }
        }
        room
    }
}
