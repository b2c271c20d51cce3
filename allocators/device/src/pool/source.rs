//! The blocks of a pool before any checks: those of the streams' caches, or the driver's own.

use crate::{Block, Request, Resource, base::waits::deadline, pool_core::PoolCore};
use aquifer_core::{MemoryError, PoolStats, Reservation, Result, budget::Reclaim};
use aquifer_stream::Stream;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// The source of a pool's blocks.
pub(crate) struct PoolSource {
    pub(super) core: Arc<PoolCore>,
    /// In bypass mode, what makes each block an allocation of the driver.
    pub(super) direct: Option<Arc<dyn Resource>>,
}

/// Draws bytes from a reservation, for memory that is charged as a whole: it makes room for it.
pub(super) fn draw(drawn: Option<&Mutex<Reservation>>, bytes: u64) {
    if let Some(drawn) = drawn {
        drop(drawn.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes));
    }
}

impl PoolSource {
    /// Allocates a block for the request, which contains the `bytes` of a user. Draws new memory
    /// from `drawn` first, which goes down by `bytes` or more. In bypass mode, where the driver or
    /// the budget has no room, gives back the dedicated memory of the pool, waits for it, and tries
    /// once more.
    pub(crate) fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        let core = &self.core;
        let Some(direct) = &self.direct else {
            return match drawn {
                None => core.allocate(stream, request),
                Some(drawn) => core.allocate_drawing(stream, request, drawn, bytes),
            };
        };
        draw(drawn, bytes);
        match direct.allocate(stream, request) {
            Err(MemoryError::OutOfMemory(_)) => {
                Reclaim::reclaim(&**core, request.size(), deadline(core.config.wait));
                direct.allocate(stream, request).map_err(|error| core.add_own(error))
            }
            allocated => allocated,
        }
    }

    /// Returns the statistics of the pool.
    pub(super) fn stats(&self) -> PoolStats {
        match &self.direct {
            None => self.core.stats(),
            Some(direct) => self.core.stats_with(direct.stats()),
        }
    }

    /// Gives free memory back until at most `keep` bytes are held. Returns the bytes.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        match &self.direct {
            None => self.core.trim(keep),
            Some(direct) => self.core.trim_with(&**direct, keep),
        }
    }

    /// Gives memory back for others, as [`Reclaim::reclaim`](aquifer_core::budget::Reclaim). Blocks
    /// of the driver have gone back already.
    pub(crate) fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        if self.direct.is_none() {
            Reclaim::reclaim(&*self.core, bytes, deadline);
        }
    }
}
