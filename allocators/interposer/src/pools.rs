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
    /// Calls of this library that use it. The program's call that destroys it waits for them.
    users: u32,
    charge: Option<Charge>,
}

impl DriverPool {
    fn charged(&self) -> u64 {
        self.charge.as_ref().map_or(0, Charge::bytes)
    }
}

#[derive(Default)]
pub(crate) struct Pools(Mutex<Vec<DriverPool>>);

/// A request to a pool whose call has not returned.
pub(crate) struct AskedOfPool {
    pub(crate) pool: usize,
    bytes: u64,
    charge: Option<Charge>,
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

    /// Charges the growth that a request may cause. Returns `Err` if it does not fit.
    pub(crate) fn ask(
        &self,
        session: &'static Session,
        pool: usize,
        bytes: u64,
    ) -> Result<AskedOfPool, ()> {
        let missing = || {
            let mut pools = self.lock();
            let known = pools.iter_mut().find(|known| known.handle == pool)?;
            let wanted = known.live.saturating_add(known.asked).saturating_add(bytes);
            let missing = wanted.saturating_sub(known.charged());
            if missing == 0 {
                known.asked += bytes;
            }
            Some((missing, known.place))
        };
        let mut charge = None;
        if let Some((missing, place)) = missing()
            && missing > 0
            && let Some(growth) = missing.checked_next_multiple_of(GROWTH)
        {
            charge = Some(session.holder(place).ok_or(())?.charge(growth).ok_or(())?);
            if let Some(known) = self.lock().iter_mut().find(|known| known.handle == pool) {
                known.asked += bytes;
            }
        }
        Ok(AskedOfPool { pool, bytes, charge })
    }

    /// Ends a request, and charges what the pool has reserved. Returns whether it fits.
    pub(crate) fn settle(
        &self,
        session: &'static Session,
        asked: AskedOfPool,
        succeeded: bool,
    ) -> bool {
        let AskedOfPool { pool, bytes, charge: mut ahead } = asked;
        let now = reserved(session.real, pool);
        let mut pools = self.lock();
        let Some(known) = pools.iter_mut().find(|known| known.handle == pool) else { return true };
        known.asked = known.asked.saturating_sub(bytes);
        if succeeded {
            known.live += bytes;
        }
        let missing = now.unwrap_or(0).saturating_sub(known.charged());
        let more = match ahead.as_mut().and_then(|ahead| ahead.split(missing.min(ahead.bytes()))) {
            Some(part) if part.bytes() == missing => Some(part),
            part => {
                // The pool has grown by more than was expected.
                let rest = missing - part.as_ref().map_or(0, Charge::bytes);
                if rest == 0 {
                    part
                } else {
                    match session
                        .holder(known.place)
                        .and_then(|holder| holder.budget.charge(rest).ok())
                    {
                        Some(rest) => merge(part, rest),
                        None => return false,
                    }
                }
            }
        };
        if let Some(more) = more {
            known.charge = merge(known.charge.take(), more);
        }
        drop(pools);
        drop(ahead);
        true
    }

    pub(crate) fn free(&self, pool: usize, bytes: u64) {
        if let Some(known) = self.lock().iter_mut().find(|known| known.handle == pool) {
            known.live = known.live.saturating_sub(bytes);
        }
    }

    /// Takes back that a block was freed.
    pub(crate) fn put_back(&self, pool: usize, bytes: u64) {
        if let Some(known) = self.lock().iter_mut().find(|known| known.handle == pool) {
            known.live += bytes;
        }
    }

    /// Returns what the pools of a memory have reserved beyond their blocks.
    pub(crate) fn cached(&self, place: MemoryLocation) -> u64 {
        let pools = self.lock();
        let of = pools.iter().filter(|known| known.place == place);
        of.map(|known| known.charged().saturating_sub(known.live)).sum()
    }

    /// Reads what the pools of a memory have reserved, and charges no more than that.
    pub(crate) fn refresh(&self, real: &Real, place: MemoryLocation) {
        self.each(place, |pool| {
            let Some(now) = reserved(real, pool) else { return };
            let mut pools = self.lock();
            let Some(known) = pools.iter_mut().find(|known| known.handle == pool) else { return };
            let excess = known.charged().saturating_sub(now);
            // A request whose call has not returned may make it grow.
            let ended = match &mut known.charge {
                Some(charge) if known.asked == 0 => charge.split(excess),
                _ => None,
            };
            drop(pools);
            drop(ended);
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
