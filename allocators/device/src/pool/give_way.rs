//! What a pool releases for others, and the requests of others to it.

use crate::{
    DevicePool,
    base::waits::{deadline, has_passed},
    pool_core::PoolCore,
    reclaim::Reclaimers,
};
use aquifer_core::{
    Charge, OutOfBudget,
    budget::{Offer, Reclaim, Room},
    event::MemoryLocation,
};
use aquifer_driver::site;
use std::{sync::Arc, time::Instant};

impl PoolCore {
    /// Registers this pool as a reclaimer of its budgets.
    pub(crate) fn register(self: &Arc<Self>) {
        let _only_once = self.registration.set(self.budget.on_need(self));
    }

    /// Returns the bytes that are in no live block and that a trim could release now or soon,
    /// including those of pending frees.
    fn idle(&self) -> u64 {
        let pass = self.scratch.begin();
        let live: u64 =
            self.caches(&pass).iter().map(|cache| cache.with(|s| s.footprint().live)).sum();
        let (held, unit) = (self.memory.held().now(), self.memory.slot());
        let idle = held.saturating_sub(live);
        // Memory that shares a handle with a live block is kept. The number is not rounded: a
        // reclaimer that failed is called again when it changes.
        let of_features: u64 = self.hooks().map(|hook| hook.free_bytes()).sum();
        (if idle >= unit { idle } else { 0 }) + self.dedicated.retiring() + of_features
    }
}

impl Reclaim for PoolCore {
    fn name(&self) -> &'static str {
        "caches of a pool"
    }

    /// Returns the bytes of the caches' memory that are in no live block, whether free, pending or
    /// spare, the pending bytes of dedicated memory, empty parkable slots, and those of graph pools
    /// that no capture has used. The warm reserve counts. So do free bytes beside a live block in
    /// one handle, although they cannot be released, but in all less than one slot counts as
    /// nothing. Free memory that captures have used does not count, since no reclaim releases it.
    fn offer(&self) -> Offer {
        let bytes = self.idle();
        let cost = self.memory.reclaim_cost(bytes, self.config.peers.len() as u32);
        Offer { bytes, cost }
    }

    /// Gives memory back until `bytes` fewer are held: retries releases that the driver has
    /// refused, releases retiring memory and the empty slots that it offers, records and polls
    /// fences, and releases idle memory, with the warm reserve. Before the deadline it then waits
    /// for the oldest work that keeps memory from being free, and repeats. After the deadline it
    /// makes one pass without such a wait, or does nothing where each release waits for the device.
    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if self.waits() && has_passed(deadline) {
            return;
        }
        let keep = self.held().saturating_sub(bytes);
        // Bytes whose release the driver refuses stay charged, and the next trim retries.
        while self.trim_under_pressure(keep).is_ok()
            && self.held() > keep
            && !has_passed(deadline)
            && self.wait_for_freed_work(None, deadline).unwrap_or(false)
        {}
        self.publish();
    }

    /// Returns whether each release waits for the device: on devices without virtual memory, and in
    /// bypass mode.
    fn waits(&self) -> bool {
        self.dedicated.is_plain()
    }

    fn place(&self) -> Option<MemoryLocation> {
        Some(MemoryLocation::Device(self.info.device))
    }
}

impl DevicePool {
    /// Releases device memory to the driver for other users, such as a library whose own allocation
    /// has failed or is about to. Calls this pool and all reclaimers under the same root of budgets
    /// that have memory of this device, the cheapest first, until `bytes` have been released or no
    /// more is available. Returns what is missing, and what each reclaimer released.
    ///
    /// The bytes then belong to the driver, and the budget has that much more room. To keep this
    /// program from taking them again, lower the budget's limit
    /// ([`Budget::shrink`](aquifer_core::Budget::shrink)) or charge them to it.
    ///
    /// Blocks for the time of the driver calls and, until `deadline`, for queued work and the
    /// device. A wait for the device that has begun before `deadline` may end later. With a
    /// deadline in the past it waits for neither. `None` means no limit.
    ///
    /// ```
    /// use aquifer::{DeviceId, DevicePool, Driver, PoolConfig, Request, sim::Sim};
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
    /// # Ok::<(), aquifer::MemoryError>(())
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

    /// Charges memory that the caller allocates itself to this pool's budget, until the charge is
    /// dropped. If it does not fit, calls the reclaimers, which blocks for up to
    /// [`PoolConfig::wait`](crate::PoolConfig::wait).
    ///
    /// # Errors
    /// [`OutOfBudget`], with nothing charged.
    pub fn charge(&self, bytes: u64) -> Result<Charge, OutOfBudget> {
        let PoolCore { budget, config, .. } = &**self.core();
        budget.charge(bytes).or_else(|_| {
            budget.make_room(bytes, deadline(config.wait), None);
            budget.charge(bytes)
        })
    }
}
