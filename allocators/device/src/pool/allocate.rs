//! Allocation from a stream's cache, or else on the slow path.

use crate::{
    Block, Request, Resource,
    pool_core::PoolCore,
    request::{MAX_BYTES, ValidateRequest},
};
use aquifer_core::{MemoryError, Reservation, Result};
use aquifer_driver::site;
use aquifer_stream::Stream;
use std::sync::{Arc, Mutex, PoisonError};

impl PoolCore {
    /// Checks a request. One for more than any device has is out of memory, like one for more than
    /// this device has.
    ///
    /// # Errors
    /// Those of [`ValidateRequest::checked`].
    pub(crate) fn checked(&self, request: Request) -> Result<Request> {
        request.checked().map_err(|error| match error {
            MemoryError::TooLarge { requested, limit } if requested <= limit => self
                .refuse_oversized(requested, request.owner())
                .unwrap_or(MemoryError::TooLarge { requested, limit: MAX_BYTES }),
            error => error,
        })
    }

    /// Allocates a block from the stream's cache, or on the slow path. The request has been
    /// checked.
    #[track_caller]
    #[inline]
    pub(crate) fn allocate(self: &Arc<Self>, stream: &Stream, request: Request) -> Result<Block> {
        let cache = self.cache_for(stream)?;
        match self.try_cache(cache, &request) {
            Some(block) => Ok(block),
            None => {
                let _site = site::enter();
                self.allocate_slow(cache, &request, None)
            }
        }
    }

    /// As [`PoolCore::allocate`], and draws new memory from `held` first, which goes down by
    /// `bytes` or more.
    #[track_caller]
    pub(crate) fn allocate_drawing(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        held: &Mutex<Reservation>,
        bytes: u64,
    ) -> Result<Block> {
        let remaining = || held.lock().unwrap_or_else(PoisonError::into_inner).remaining();
        let before = remaining();
        let cache = self.cache_for(stream)?;
        let block = match self.try_cache(cache, &request) {
            Some(block) => block,
            None => {
                let _site = site::enter();
                self.allocate_slow(cache, &request, Some(held))?
            }
        };
        let drawn = before.saturating_sub(remaining());
        let unused = bytes.saturating_sub(drawn).min(remaining());
        drop(held.lock().unwrap_or_else(PoisonError::into_inner).draw(unused));
        Ok(block)
    }

    /// Gives free memory back in bypass mode: the pool's own, and then that of `direct`.
    pub(crate) fn trim_with(&self, direct: &dyn Resource, keep: u64) -> Result<u64> {
        // Dedicated memory comes from the pool itself in any case.
        let gone = self.trim(keep)?;
        let keep = keep.saturating_sub(self.dedicated.held().now());
        Ok(gone + direct.trim(keep)?)
    }
}
