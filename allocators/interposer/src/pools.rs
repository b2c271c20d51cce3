//! The driver's pools: what they have reserved counts, and not the blocks in them.
//!
//! A pool grows by 32 MiB or more when a block does not fit. So the growth that a request may cause is
//! charged before it, and what the pool has reserved is read after it. A pool shrinks when its
//! stream is synchronised, which is seen later: every 100 ms, and before a request is refused.
#![expect(unsafe_code, reason = "calls the CUDA driver")]

use crate::{
    real::{Opaque, Real, SUCCESS},
    session::Session,
};
use aquifer_core::{Charge, event::MemoryLocation};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The least that a pool of the driver grows by: measured on driver 580, see the tests on a GPU.
const GROWTH: u64 = 32 << 20;
/// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
const RESERVED: u32 = 5;

struct DriverPool {
    handle: usize,
    place: MemoryLocation,
    live: u64,
    /// Bytes of requests whose calls have not returned.
    asked: u64,
    /// How many requests have ended.
    settled: u64,
    /// Calls of this library that use it. The program's call that destroys it waits for them.
    users: u32,
    /// What is reserved, and what requests whose calls have not returned may add to it.
    charge: Option<Charge>,
}

impl DriverPool {
    fn charged(&self) -> u64 {
        self.charge.as_ref().map_or(0, Charge::bytes)
    }

    /// Ends what is charged beyond `reserved`, which was read after `settled` requests had ended.
    /// Requests that have ended since, or whose calls have not returned, may have made it grow.
    fn end_excess(&mut self, reserved: u64, settled: u64) -> Option<Charge> {
        let excess = self.charged().saturating_sub(reserved);
        let charge = self.charge.as_mut().filter(|_| self.asked == 0 && self.settled == settled);
        charge?.split(excess)
    }
}

#[derive(Default)]
pub(crate) struct Pools(Mutex<Vec<DriverPool>>);

/// A request to a pool whose call has not returned.
pub(crate) struct AskedOfPool {
    pub(crate) pool: usize,
    bytes: u64,
}

fn reserved(real: &Real, pool: usize) -> Option<u64> {
    let mut bytes = 0u64;
    // SAFETY: 1. A pool of the program's, and room for the value's 8 bytes.
    let code =
        unsafe { (real.cuMemPoolGetAttribute)(pool as Opaque, RESERVED, (&raw mut bytes).cast()) };
    (code == SUCCESS).then_some(bytes)
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, Vec<DriverPool>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn add(&self, pool: usize, place: MemoryLocation) {
        let mut pools = self.lock();
        if pools.iter().all(|known| known.handle != pool) {
            pools.push(DriverPool {
                handle: pool,
                place,
                live: 0,
                asked: 0,
                settled: 0,
                users: 0,
                charge: None,
            });
        }
    }

    /// Removes a pool that the program destroys. Waits for calls of this library that use it.
    pub(crate) fn remove(&self, pool: usize) {
        loop {
            let mut pools = self.lock();
            match pools.iter().position(|known| known.handle == pool) {
                Some(at) if pools[at].users == 0 => {
                    let ended = pools.swap_remove(at);
                    drop(pools);
                    drop(ended);
                    return;
                }
                Some(_) => {
                    drop(pools);
                    std::thread::yield_now();
                }
                None => return,
            }
        }
    }

    /// Calls `work` for each pool of a memory, none of which is destroyed meanwhile.
    fn each(&self, place: MemoryLocation, work: impl Fn(usize)) {
        let handles: Vec<usize> = {
            let mut pools = self.lock();
            let of = pools.iter_mut().filter(|known| known.place == place);
            of.map(|known| {
                known.users += 1;
                known.handle
            })
            .collect()
        };
        for pool in handles {
            work(pool);
            if let Some(known) = self.lock().iter_mut().find(|known| known.handle == pool) {
                known.users -= 1;
            }
        }
    }

    /// Returns the memory that a known pool is of.
    pub(crate) fn place_of(&self, pool: usize) -> Option<MemoryLocation> {
        self.lock().iter().find(|known| known.handle == pool).map(|known| known.place)
    }

    fn settled(&self, pool: usize) -> Option<u64> {
        self.lock().iter().find(|known| known.handle == pool).map(|known| known.settled)
    }

    /// Charges the growth that a request may cause. Returns `Err` if it does not fit.
    pub(crate) fn ask(
        &self,
        session: &'static Session,
        pool: usize,
        bytes: u64,
    ) -> Result<AskedOfPool, ()> {
        let place = self.place_of(pool).ok_or(())?;
        let holder = session.holder(place).ok_or(())?;
        let mut is_last = false;
        loop {
            let mut pools = self.lock();
            let known = pools.iter_mut().find(|known| known.handle == pool).ok_or(())?;
            let wanted = known.live.saturating_add(known.asked).saturating_add(bytes);
            let missing = wanted.saturating_sub(known.charged());
            let growth = missing.checked_next_multiple_of(GROWTH).ok_or(())?;
            if growth > 0 {
                let Ok(more) = holder.budget.charge(growth) else {
                    drop(pools);
                    if is_last {
                        return Err(());
                    }
                    // This may take from what the pool has cached.
                    holder.make_room(growth);
                    is_last = true;
                    continue;
                };
                known.charge = merge(known.charge.take(), more);
            }
            known.asked += bytes;
            return Ok(AskedOfPool { pool, bytes });
        }
    }

    /// Ends a request, and charges what the pool has reserved. Returns whether it fits.
    pub(crate) fn settle(
        &self,
        session: &'static Session,
        asked: AskedOfPool,
        succeeded: bool,
    ) -> bool {
        let AskedOfPool { pool, bytes } = asked;
        let settled = self.settled(pool);
        let now = reserved(session.real, pool);
        let mut pools = self.lock();
        let Some(known) = pools.iter_mut().find(|known| known.handle == pool) else { return true };
        known.asked = known.asked.saturating_sub(bytes);
        let missing = now.unwrap_or(0).saturating_sub(known.charged());
        if missing > 0 {
            // It has grown by more than was expected.
            let holder = session.holder(known.place);
            let Some(more) = holder.and_then(|holder| holder.budget.charge(missing).ok()) else {
                known.settled += 1;
                return !succeeded;
            };
            known.charge = merge(known.charge.take(), more);
        }
        if succeeded {
            known.live += bytes;
        }
        let excess = match (now, settled) {
            (Some(now), Some(settled)) => known.end_excess(now, settled),
            _ => None,
        };
        known.settled += 1;
        drop(pools);
        drop(excess);
        true
    }

    pub(crate) fn free(&self, pool: usize, bytes: u64) {
        if let Some(known) = self.lock().iter_mut().find(|known| known.handle == pool) {
            known.live = known.live.saturating_sub(bytes);
        }
    }

    /// Returns what the pools of a memory have reserved beyond their blocks.
    pub(crate) fn cached(&self, place: MemoryLocation) -> u64 {
        let pools = self.lock();
        let of = pools.iter().filter(|known| known.place == place);
        of.map(|known| known.charged().saturating_sub(known.live + known.asked)).sum()
    }

    /// Reads what the pools of a memory have reserved, and charges no more than that.
    pub(crate) fn refresh(&self, real: &Real, place: MemoryLocation) {
        self.each(place, |pool| {
            let Some(settled) = self.settled(pool) else { return };
            let Some(now) = reserved(real, pool) else { return };
            let mut pools = self.lock();
            let known = pools.iter_mut().find(|known| known.handle == pool);
            let excess = known.and_then(|known| known.end_excess(now, settled));
            drop(pools);
            drop(excess);
        });
    }

    /// Makes the driver release what its pools of a memory have cached.
    pub(crate) fn trim(&self, real: &Real, place: MemoryLocation) {
        self.each(place, |pool| {
            // SAFETY: 1. A pool of the program's, which is not destroyed meanwhile.
            unsafe { (real.cuMemPoolTrimTo)(pool as Opaque, 0) };
        });
        self.refresh(real, place);
    }
}

/// Merges two charges of one budget.
fn merge(charge: Option<Charge>, more: Charge) -> Option<Charge> {
    let Some(mut charge) = charge else { return Some(more) };
    // Both are of the budget of one memory.
    let _merged = charge.merge(more);
    Some(charge)
}
