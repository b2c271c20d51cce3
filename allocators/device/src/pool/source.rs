//! The blocks of a pool before any checks: those of the streams' caches, or the driver's own.

use crate::{Block, Request, checked::BlockSource, pool_core::PoolCore};
use aquifer_core::{PoolStats, Reservation, Result, budget::Reclaim};
use aquifer_stream::Stream;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Instant,
};

/// The source of a pool's blocks.
pub(super) struct PoolSource(pub(super) Arc<PoolCore>);

/// Draws bytes from a reservation, for memory that is charged as a whole: it makes room for it.
pub(super) fn draw(drawn: Option<&Mutex<Reservation>>, bytes: u64) {
    if let Some(drawn) = drawn {
        drop(drawn.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes));
    }
}

impl BlockSource for PoolSource {
    fn allocate(
        &self,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        let core = &self.0;
        if core.config.bypass {
            draw(drawn, bytes);
            return core.allocate_plain(stream, request);
        }
        match drawn {
            None => core.allocate(stream, request),
            Some(drawn) => core.allocate_drawing(stream, request, drawn, bytes),
        }
    }

    fn stats(&self) -> PoolStats {
        self.0.stats()
    }

    fn unchecked_stats(&self) -> PoolStats {
        let mut stats = PoolStats::default();
        self.0.dedicated.add_live_to(&mut stats);
        stats
    }

    fn trim(&self, keep: u64) -> Result<u64> {
        self.0.trim(keep)
    }

    fn reclaim(&self, bytes: u64, deadline: Option<Instant>) {
        Reclaim::reclaim(&*self.0, bytes, deadline);
    }
}
