//! Allocation from a stream's cache, or else on the slow path.

use super::PoolCore;
use crate::{
    Block, Request,
    base::{driver::notify_observer, extent::BlockExtent},
    request::{MAX_BYTES, ValidateRequest},
    stream_cache::{BlockToken, StreamCache},
};
use aquifer_core::{Action, MemoryError, Reservation, Result, event::EventTicket};
use aquifer_driver::{
    DeviceRange, Ownership,
    site::{self, Entered},
};
use aquifer_stream::Stream;
use std::sync::{Arc, Mutex, PoisonError, atomic::Ordering};

/// Draws bytes from a reservation, for memory that is charged as a whole: it makes room for it.
pub(crate) fn draw(drawn: Option<&Mutex<Reservation>>, bytes: u64) {
    if let Some(drawn) = drawn {
        drop(drawn.lock().unwrap_or_else(PoisonError::into_inner).draw(bytes));
    }
}

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

    /// Allocates a block without [debugging](crate::Debugging). The request has been checked, and
    /// contains the `bytes` of a user. Draws new memory from `drawn` first, which goes down by
    /// `bytes` or more.
    #[track_caller]
    pub(crate) fn allocate_unchecked(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        drawn: Option<&Mutex<Reservation>>,
        bytes: u64,
    ) -> Result<Block> {
        debug_assert!(bytes <= request.size(), "a block is smaller than what its user has");
        if self.config.bypass {
            draw(drawn, bytes);
            return self.allocate_plain(stream, request);
        }
        match drawn {
            None => self.allocate(stream, request),
            Some(drawn) => self.allocate_drawing(stream, request, drawn, bytes),
        }
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
    fn allocate_drawing(
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

    /// Allocates from a stream's cache, and reports the block to the recorder and the observer.
    /// Returns `None` if the cache has no room, or if the request is to be served from the ranges
    /// that streams share: then the block that was freed last is not tried either.
    pub(crate) fn try_cache(
        &self,
        cache: &'static StreamCache,
        request: &Request,
    ) -> Option<Block> {
        if self.sharing_policy.prefers_shared(request.size()) {
            return None;
        }
        let make = |token: &BlockToken| (*token, self.ticket());
        let ((token, ticket), is_settled) = cache.full_alloc(request, make)?;
        if !is_settled {
            self.peaks.settle_cache(cache);
        }
        Some(self.make_block(cache, &token, ticket))
    }

    /// Sets the caller's line as the site of driver calls if the driver has an observer: it is told
    /// of blocks that a cache serves, too, which make no driver call.
    #[track_caller]
    #[inline]
    pub(crate) fn enter_observed(&self) -> Option<Entered> {
        // Not by `then`, since `Location::caller` would return the closure's caller.
        if self.observed { Some(site::enter()) } else { None }
    }

    /// Makes a block from the token, and reports it to the observer and the recorder.
    pub(crate) fn make_block(
        &self,
        cache: &'static StreamCache,
        token: &BlockToken,
        ticket: Option<EventTicket>,
    ) -> Block {
        let mut block = Block::from_token(token);
        if self.observed {
            let generation = self.notify_live(cache, token);
            block.meta_mut().generation = generation;
        }
        if ticket.is_some() {
            let (stream, BlockExtent { address, request }) =
                (cache.timeline().number(), token.extent);
            self.report(ticket, Action::Allocate, stream, address, request.bytes(), request.tag());
        }
        block
    }

    #[cold]
    fn notify_live(&self, cache: &'static StreamCache, token: &BlockToken) -> u64 {
        let generation = self.generations.fetch_add(1, Ordering::Relaxed);
        let stream = cache.timeline().noted();
        let address = token.extent.address;
        let bytes = cache.size_of(address, token.cache_ref.key);
        let range = DeviceRange { device: self.info.device, address, bytes };
        notify_observer(&self.driver, generation, range, Ownership::Live { stream, generation });
        generation
    }
}
