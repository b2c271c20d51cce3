//! The driver's pools: what they have reserved counts, and not the blocks in them.
//!
//! A pool grows by 32 MiB or more when a block does not fit. So the growth that a request may cause
//! is charged before it, and what the pool has reserved is read after it. A pool shrinks when its
//! stream is synchronised, which is seen later: every 100 ms, and before a request is refused.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use crate::{
    guest::lock,
    real::{Opaque, Real, SUCCESS},
};
use aquifer_core::{
    Budget, Charge,
    budget::{Offer, Reclaim},
    event::MemoryLocation,
};
use std::{
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// The least that a pool of the driver grows by: measured on driver 580, see the tests on a GPU.
const GROWTH: u64 = 32 << 20;
/// How long a request waits for memory that others give back.
const PATIENCE: Duration = Duration::from_millis(250);
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: u32 = 5;

/// A pool of the driver.
pub(crate) struct DriverPool {
    handle: usize,
    pub(crate) place: MemoryLocation,
    /// Calls of this library that use it. The program's call that destroys it waits for them.
    users: AtomicU32,
    usage: Mutex<Usage>,
}

#[derive(Default)]
struct Usage {
    live: u64,
    /// Bytes of requests whose calls have not returned.
    asked: u64,
    /// How many requests have ended.
    settled: u64,
    /// What is reserved, and what requests whose calls have not returned may add to it.
    charge: Option<Charge>,
}

impl Usage {
    fn charged(&self) -> u64 {
        self.charge.as_ref().map_or(0, Charge::bytes)
    }

    /// Merges another charge of the same budget.
    fn add(&mut self, more: Charge) {
        match &mut self.charge {
            // Both are of the budget of one memory.
            Some(charge) => _ = charge.merge(more),
            None => self.charge = Some(more),
        }
    }

    /// Charges what is reserved, as it was read after `settled` requests had ended. Requests that
    /// have ended since, or whose calls have not returned, may have made it grow. Returns whether
    /// it fits, and what is to be dropped without the lock.
    fn match_reserved(
        &mut self,
        budget: &Budget,
        reserved: u64,
        settled: u64,
    ) -> (bool, Option<Charge>) {
        let charged = self.charged();
        if reserved > charged {
            let more = budget.charge(reserved - charged).ok();
            let fits = more.is_some();
            more.into_iter().for_each(|more| self.add(more));
            return (fits, None);
        }
        let charge = self.charge.as_mut().filter(|_| self.asked == 0 && self.settled == settled);
        (true, charge.and_then(|charge| charge.split(charged - reserved)))
    }
}

/// A request to a pool whose call has not returned.
pub(crate) struct AskedOfPool {
    pub(crate) pool: Arc<DriverPool>,
    bytes: u64,
    may_grow: bool,
}

impl DriverPool {
    fn usage(&self) -> MutexGuard<'_, Usage> {
        lock(&self.usage)
    }

    fn reserved(&self, real: &Real) -> Option<u64> {
        let (pool, mut bytes) = (self.handle as Opaque, 0u64);
        // SAFETY: 1. A pool of the program's, and room for the value's 8 bytes.
        let code = unsafe { (real.cuMemPoolGetAttribute)(pool, RESERVED, (&raw mut bytes).cast()) };
        (code == SUCCESS).then_some(bytes)
    }

    /// Charges the growth that a request may cause. Returns `Err` if it does not fit.
    pub(crate) fn ask(self: Arc<Self>, budget: &Budget, bytes: u64) -> Result<AskedOfPool, ()> {
        let mut is_last = false;
        loop {
            let mut usage = self.usage();
            let wanted = usage.live.saturating_add(usage.asked).saturating_add(bytes);
            let missing = wanted.saturating_sub(usage.charged());
            let growth = missing.checked_next_multiple_of(GROWTH).ok_or(())?;
            if growth > 0 {
                let Ok(more) = budget.charge(growth) else {
                    drop(usage);
                    if is_last {
                        return Err(());
                    }
                    // This may take from what the pool has cached.
                    make_room(budget, growth);
                    is_last = true;
                    continue;
                };
                usage.add(more);
            }
            usage.asked += bytes;
            drop(usage);
            return Ok(AskedOfPool { pool: self, bytes, may_grow: growth > 0 });
        }
    }

    pub(crate) fn free(&self, bytes: u64) {
        let mut usage = self.usage();
        usage.live = usage.live.saturating_sub(bytes);
    }

    /// Reads what is reserved, and charges that.
    fn refresh(&self, real: &Real, budget: &Budget) {
        let settled = self.usage().settled;
        let Some(reserved) = self.reserved(real) else { return };
        let (_fits, excess) = self.usage().match_reserved(budget, reserved, settled);
        drop(excess);
    }
}

impl AskedOfPool {
    /// Ends a request. Charges what the pool has reserved, if it may have grown or is limited.
    /// Returns the pool if that fits.
    pub(crate) fn settle(
        self,
        real: &Real,
        budget: &Budget,
        is_limited: bool,
        succeeded: bool,
    ) -> Option<Arc<DriverPool>> {
        let Self { pool, bytes, may_grow } = self;
        let now = if may_grow || is_limited {
            let settled = pool.usage().settled;
            pool.reserved(real).map(|reserved| (reserved, settled))
        } else {
            None
        };
        let mut usage = pool.usage();
        usage.asked = usage.asked.saturating_sub(bytes);
        let (fits, excess) = match now {
            Some((reserved, settled)) => usage.match_reserved(budget, reserved, settled),
            None => (true, None),
        };
        usage.settled += 1;
        if succeeded && fits {
            usage.live += bytes;
        }
        drop(usage);
        drop(excess);
        fits.then_some(pool)
    }
}

/// The driver's pools that the program uses.
#[derive(Default)]
pub(crate) struct Pools(RwLock<Vec<Arc<DriverPool>>>);

impl Pools {
    pub(crate) fn find(&self, pool: usize) -> Option<Arc<DriverPool>> {
        let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
        pools.iter().find(|known| known.handle == pool).cloned()
    }

    /// Adds a pool, unless another thread has.
    pub(crate) fn add(&self, pool: usize, place: MemoryLocation) -> Arc<DriverPool> {
        let mut pools = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = pools.iter().find(|known| known.handle == pool) {
            return known.clone();
        }
        let (users, usage) = (AtomicU32::new(0), Mutex::default());
        let added = Arc::new(DriverPool { handle: pool, place, users, usage });
        pools.push(added.clone());
        added
    }

    /// Removes a pool that the program destroys. Waits for calls of this library that use it.
    pub(crate) fn remove(&self, pool: usize) {
        let removed = {
            let mut pools = self.0.write().unwrap_or_else(PoisonError::into_inner);
            let at = pools.iter().position(|known| known.handle == pool);
            at.map(|at| pools.swap_remove(at))
        };
        let Some(removed) = removed else { return };
        while removed.users.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        let charge = removed.usage().charge.take();
        drop(charge);
    }

    /// Calls `work` for each pool of a memory, none of which is destroyed meanwhile.
    fn each(&self, place: MemoryLocation, work: impl Fn(&DriverPool)) {
        let used: Vec<Arc<DriverPool>> = {
            let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
            let of = pools.iter().filter(|known| known.place == place);
            of.inspect(|known| _ = known.users.fetch_add(1, Ordering::Acquire)).cloned().collect()
        };
        for pool in used {
            work(&pool);
            pool.users.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns what the pools of a memory have reserved beyond their blocks.
    pub(crate) fn cached(&self, place: MemoryLocation) -> u64 {
        let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let of = pools.iter().filter(|known| known.place == place);
        of.map(|known| {
            let usage = known.usage();
            usage.charged().saturating_sub(usage.live + usage.asked)
        })
        .sum()
    }

    /// Reads what the pools of a memory have reserved, and charges that.
    pub(crate) fn refresh(&self, real: &Real, place: MemoryLocation, budget: &Budget) {
        self.each(place, |pool| pool.refresh(real, budget));
    }

    /// Makes the driver release what its pools of a memory have cached.
    pub(crate) fn trim(&self, real: &Real, place: MemoryLocation, budget: &Budget) {
        self.each(place, |pool| {
            // SAFETY: 1. A pool of the program's, which is not destroyed meanwhile.
            unsafe { (real.cuMemPoolTrimTo)(pool.handle as Opaque, 0) };
            pool.refresh(real, budget);
        });
    }
}

/// Gives back what the driver's pools of a memory have cached.
pub(crate) struct Trimmer {
    pub(crate) real: &'static Real,
    pub(crate) pools: &'static Pools,
    pub(crate) place: MemoryLocation,
    pub(crate) budget: Budget,
}

impl Reclaim for Trimmer {
    fn name(&self) -> &'static str {
        "the driver's pools"
    }

    fn offer(&self) -> Offer {
        Offer { bytes: self.pools.cached(self.place), cost: Duration::from_micros(50) }
    }

    fn reclaim(&self, _bytes: u64, _deadline: Option<Instant>) {
        self.pools.trim(self.real, self.place, &self.budget);
    }
}

/// Asks the driver's pools and other processes for room.
pub(crate) fn make_room(budget: &Budget, bytes: u64) {
    budget.make_room(bytes, Some(Instant::now() + PATIENCE), None);
}
