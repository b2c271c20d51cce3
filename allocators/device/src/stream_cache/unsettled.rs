//! Blocks that take a cache above its limit: the pool's [peaks](crate::peaks) come before their
//! callers.
//!
//! The fast path cannot settle the peaks: it holds the lock of its cache, and a settlement locks
//! all caches. So it sets the allocated block aside, and returns as if the cache had no room. The
//! full path takes the block from there and settles. The fast path pays nothing for this.
//!
//! Threads that have set aside equal requests may exchange their blocks. If a thread without room
//! takes the block of another one, that one allocates again.

use super::{BlockToken, CacheState, StreamCache};
use crate::{Request, base::extent::PackedRequest};

impl StreamCache {
    /// As [`StreamCache::fast_alloc`], for a caller that can settle: sets nothing aside. Returns
    /// with the result whether the peaks are settled. If not, the caller must settle them before it
    /// hands out the block.
    pub(crate) fn full_alloc<B>(
        &'static self,
        request: &Request,
        make: impl FnOnce(&BlockToken) -> B,
    ) -> Option<(B, bool)> {
        self.with_unflushed(|s| {
            let allocated = s.allocate_token(self, request).copied();
            let is_settled = allocated.is_some();
            let token = allocated.or_else(|| s.take_unsettled(request))?;
            Some((make(&token), is_settled))
        })
    }

    /// Removes and returns a block that the fast path has set aside for such a request. The caller
    /// must settle the peaks before it hands out the block.
    pub(crate) fn take_unsettled(&self, request: &Request) -> Option<BlockToken> {
        self.with_unflushed(|s| s.take_unsettled(request))
    }
}

impl CacheState {
    /// Takes what is live now into account. Returns whether it is within the limit. If not, the
    /// peaks must be settled before a block is handed out.
    pub(crate) fn admit(&mut self) -> bool {
        let now = self.live_bytes();
        let reserve = self.binding.as_ref().map(|binding| binding.pool.limit_reserve());
        reserve.is_some_and(|reserve| self.bounds.admit(now, reserve))
    }

    /// Takes the block in `last` into account, or sets the block aside and returns `None`.
    #[cold]
    #[inline(never)]
    pub(super) fn admit_last(&mut self) -> Option<()> {
        if self.admit() {
            return Some(());
        }
        self.unsettled.extend(self.last.take());
        None
    }

    /// Gives bytes of the limit back after a free that took the cache far below it.
    #[cold]
    #[inline(never)]
    pub(super) fn lower_limit(&mut self) {
        self.admit();
    }

    fn take_unsettled(&mut self, request: &Request) -> Option<BlockToken> {
        let packed = PackedRequest::new(request.size(), request.owner());
        let at = self.unsettled.iter().rposition(|token| {
            token.extent.request == packed
                && token.extent.address.is_multiple_of(request.alignment())
        })?;
        Some(self.unsettled.swap_remove(at))
    }
}
