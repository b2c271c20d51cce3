//! The sources of blocks that can be checked: the caches of a pool, and the driver itself.

use crate::{
    Block, Request, Resource, base::waits::deadline, checked::BlockSource, pool_core::PoolCore,
};
use aquifer_core::{MemoryError, PoolStats, Reservation, Result, budget::Reclaim};
use aquifer_stream::Stream;
use std::{
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Instant,
};

/// The streams' caches of a pool.
#[derive(Debug)]
pub(super) struct CacheSource(pub(super) Arc<PoolCore>);

impl BlockSource for CacheSource {
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        match drawn {
            None => self.0.allocate(stream, request),
            Some(drawn) => self.0.allocate_drawing(stream, request, drawn, bytes),
        }
    }

    fn stats(&self) -> PoolStats {
        self.0.stats()
    }

    fn unchecked_stats(&self) -> PoolStats {
        dedicated_stats(&self.0)
    }

    fn unchecked_live(&self) -> u64 {
        self.0.dedicated.live()
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        self.0.trim(keep)
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        Reclaim::reclaim(&*self.0, bytes, deadline);
    }
}

/// An allocation of the driver for each block, beside a pool. Blocks do not keep the pool.
#[derive(Debug)]
pub(super) struct BypassSource {
    pub(super) core: Weak<PoolCore>,
    pub(super) direct: Arc<dyn Resource>,
}

impl BlockSource for BypassSource {
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        let core = self.core.upgrade();
        draw_and_allocate(core.as_deref(), &*self.direct, stream, request, drawn, bytes)
    }

    fn stats(&self) -> PoolStats {
        let stats = self.direct.stats();
        self.core.upgrade().map_or(stats, |core| core.stats_with(stats))
    }

    fn unchecked_stats(&self) -> PoolStats {
        self.core.upgrade().map_or_else(PoolStats::default, |core| dedicated_stats(&core))
    }

    fn physical(&self) -> u64 {
        self.direct.stats().physical
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        self.core.upgrade().map_or(Ok(0), |core| core.trim_with(&*self.direct, keep))
    }
}

fn dedicated_stats(core: &PoolCore) -> PoolStats {
    let mut stats = PoolStats::default();
    core.dedicated.add_to(&mut stats);
    stats
}

/// Makes an allocation of the driver, for which a reservation makes room. Where the driver or the
/// budget has none, gives back the dedicated memory of the pool, waits for it, and tries once more.
pub(super) fn draw_and_allocate(
    core: Option<&PoolCore>,
    direct: &dyn Resource,
    stream: &Stream,
    request: Request,
    drawn: Option<&Mutex<Reservation>>,
    bytes: u64,
) -> Result<Block> {
    if let Some(drawn) = drawn {
        // The driver's allocations are charged as a whole, so this releases the reservation to
        // make room for it.
        drop(drawn.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes));
    }
    match (direct.allocate(stream, request), core) {
        (Err(MemoryError::OutOfMemory(_)), Some(core)) => {
            Reclaim::reclaim(core, request.size(), deadline(core.config.wait));
            direct.allocate(stream, request).map_err(|error| core.add_own(error))
        }
        (allocated, _) => allocated,
    }
}
