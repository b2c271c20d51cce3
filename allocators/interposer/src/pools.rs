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
        Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The least that a pool of the driver grows by: measured on driver 580, see the tests on a GPU.
const GROWTH: u64 = 32 << 20;
/// How long a request waits for memory that others give back.
const PATIENCE: Duration = Duration::from_millis(250);
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: u32 = 5;

/// A pool of the driver. It is never destroyed: calls that use it need not count.
pub(crate) struct DriverPool {
    handle: usize,
    pub(crate) place: MemoryLocation,
    /// Calls of this library that use the driver's pool. The program's call that destroys it waits
    /// for them.
    users: AtomicU32,
    /// Bytes of blocks, and of requests whose calls have not returned.
    claimed: AtomicU64,
    /// The bytes of `usage.charge`.
    charged: AtomicU64,
    usage: Mutex<Usage>,
}

#[derive(Default)]
struct Usage {
    /// Requests that may make the pool grow and whose calls have not returned.
    growing: u32,
    /// How many of them have ended.
    settled: u64,
    /// What is reserved, and what such requests may add to it.
    charge: Option<Charge>,
}

/// A request to a pool whose call has not returned.
pub(crate) struct AskedOfPool {
    pub(crate) pool: &'static DriverPool,
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

    /// Merges another charge of the same budget.
    fn add(&self, usage: &mut Usage, more: Charge) {
        match &mut usage.charge {
            // Both are of the budget of one memory.
            Some(charge) => _ = charge.merge(more),
            None => usage.charge = Some(more),
        }
        self.publish(usage);
    }

    fn publish(&self, usage: &Usage) {
        let charged = usage.charge.as_ref().map_or(0, Charge::bytes);
        self.charged.store(charged, Ordering::Relaxed);
    }

    /// Charges the growth that a request may cause. Returns `Err` if it does not fit. Without a
    /// limit a request that fits into what is charged takes no lock.
    pub(crate) fn ask(
        &'static self,
        budget: &Budget,
        is_limited: bool,
        bytes: u64,
    ) -> Result<AskedOfPool, ()> {
        let asked = |may_grow| AskedOfPool { pool: self, bytes, may_grow };
        let claimed = self.claimed.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if !is_limited && claimed <= self.charged.load(Ordering::Relaxed) {
            return Ok(asked(false));
        }
        let mut is_last = false;
        loop {
            let mut usage = self.usage();
            let claimed = self.claimed.load(Ordering::Relaxed);
            let missing = claimed.saturating_sub(self.charged.load(Ordering::Relaxed));
            let growth = missing.checked_next_multiple_of(GROWTH);
            let more = growth.map(|growth| budget.charge(growth));
            if let Some(Ok(more)) = more {
                self.add(&mut usage, more);
                usage.growing += 1;
                return Ok(asked(true));
            }
            drop(usage);
            let Some(growth) = growth.filter(|_| !is_last) else {
                self.free(bytes);
                return Err(());
            };
            // This may take from what the pool has cached.
            make_room(budget, growth);
            is_last = true;
        }
    }

    /// Ends a block, or a request that got none.
    pub(crate) fn free(&self, bytes: u64) {
        self.claimed.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Charges what is reserved, as it was read after `settled` requests had ended. Requests that
    /// have ended since, or whose calls have not returned, may have made it grow. Returns whether
    /// it fits, and what is to be dropped without the lock.
    fn match_reserved(
        &self,
        usage: &mut Usage,
        budget: &Budget,
        reserved: u64,
        settled: u64,
    ) -> (bool, Option<Charge>) {
        let charged = self.charged.load(Ordering::Relaxed);
        if reserved > charged {
            let more = budget.charge(reserved - charged).ok();
            let fits = more.is_some();
            more.into_iter().for_each(|more| self.add(usage, more));
            return (fits, None);
        }
        let is_still = usage.growing == 0 && usage.settled == settled;
        let charge = usage.charge.as_mut().filter(|_| is_still);
        let excess = charge.and_then(|charge| charge.split(charged - reserved));
        self.publish(usage);
        (true, excess)
    }

    /// Reads what is reserved, and charges that.
    fn refresh(&self, real: &Real, budget: &Budget) {
        let settled = self.usage().settled;
        let Some(reserved) = self.reserved(real) else { return };
        let (_fits, excess) = self.match_reserved(&mut self.usage(), budget, reserved, settled);
        drop(excess);
    }
}

impl AskedOfPool {
    /// Ends a request. Charges what the pool has reserved, if it may have grown. Returns the pool
    /// if that fits.
    pub(crate) fn settle(
        self,
        real: &Real,
        budget: &Budget,
        succeeded: bool,
    ) -> Option<&'static DriverPool> {
        let Self { pool, bytes, may_grow } = self;
        let mut fits = true;
        if may_grow {
            let settled = pool.usage().settled;
            let reserved = pool.reserved(real);
            let mut usage = pool.usage();
            usage.growing -= 1;
            let mut excess = None;
            if let Some(reserved) = reserved {
                (fits, excess) = pool.match_reserved(&mut usage, budget, reserved, settled);
            }
            usage.settled += 1;
            drop(usage);
            drop(excess);
        }
        if !(succeeded && fits) {
            pool.free(bytes);
        }
        fits.then_some(pool)
    }
}

/// The driver's pools that the program uses.
#[derive(Default)]
pub(crate) struct Pools(RwLock<Vec<&'static DriverPool>>);

impl Pools {
    pub(crate) fn find(&self, pool: usize) -> Option<&'static DriverPool> {
        let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
        pools.iter().find(|known| known.handle == pool).copied()
    }

    /// Adds a pool, unless another thread has.
    pub(crate) fn add(&self, pool: usize, place: MemoryLocation) -> &'static DriverPool {
        let mut pools = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = pools.iter().find(|known| known.handle == pool) {
            return known;
        }
        let added = Box::leak(Box::new(DriverPool {
            handle: pool,
            place,
            users: AtomicU32::new(0),
            claimed: AtomicU64::new(0),
            charged: AtomicU64::new(0),
            usage: Mutex::default(),
        }));
        pools.push(added);
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
        let charge = {
            let mut usage = removed.usage();
            let charge = usage.charge.take();
            removed.publish(&usage);
            charge
        };
        drop(charge);
    }

    /// Calls `work` for each pool of a memory, none of which is destroyed meanwhile.
    fn each(&self, place: MemoryLocation, work: impl Fn(&DriverPool)) {
        let used: Vec<&DriverPool> = {
            let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
            let of = pools.iter().filter(|known| known.place == place);
            of.inspect(|known| _ = known.users.fetch_add(1, Ordering::Acquire)).copied().collect()
        };
        for pool in used {
            work(pool);
            pool.users.fetch_sub(1, Ordering::Release);
        }
    }

    /// Returns what the pools of a memory have reserved beyond their blocks.
    pub(crate) fn cached(&self, place: MemoryLocation) -> u64 {
        let pools = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let of = pools.iter().filter(|known| known.place == place);
        of.map(|known| {
            let charged = known.charged.load(Ordering::Relaxed);
            charged.saturating_sub(known.claimed.load(Ordering::Relaxed))
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
