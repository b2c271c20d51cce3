//! Errors of requests that found no room.

use super::progress::Progress;
use crate::{
    Adoption, Request,
    backing::handle::HandleError,
    pool_core::{PoolCore, count},
    stream_cache::{CacheState, StreamCache},
};
use aquifer_core::{
    Budget, MemoryError, OutOfBudget, OutOfMemory, Tag,
    budget::{Holding, Room},
    error::{InUse, Stranded},
};

/// Adds a holding to the sum of its tag.
fn add_holding(holders: &mut Vec<Holding>, holding: Holding) {
    match holders.iter_mut().find(|h| h.tag == holding.tag) {
        Some(sum) => {
            sum.bytes += holding.bytes;
            sum.blocks += holding.blocks;
        }
        None => holders.push(holding),
    }
}

/// Adds bytes of a freed block to what the stream uses of other freed blocks.
fn add_in_use(users: &mut Vec<InUse>, stream: u32, bytes: u64) {
    match users.iter_mut().find(|user| user.stream == stream) {
        Some(sum) => sum.bytes += bytes,
        None => users.push(InUse { stream, bytes }),
    }
}

impl PoolCore {
    /// Returns the error for a request refused by a tenant's or a tag's limit of live bytes,
    /// whatever the pool has free.
    pub(crate) fn refuse_live_limit(
        &self,
        request: &Request,
        limit: &Budget,
        refused: OutOfBudget,
        room: &Room,
    ) -> MemoryError {
        count(&self.counters.failures, 1);
        self.report_failure(request.size(), request.owner(), Some((limit, &refused)));
        let mut progress =
            Progress { refused: Some(HandleError::Budget(refused)), ..Progress::default() };
        room.tried.iter().for_each(|tried| progress.record(tried.step, tried.gave));
        let mut error = self.explain(request.size(), None, progress);
        error.of_live_bytes = true;
        error.raise = limit.raises(request.size(), 0);
        MemoryError::OutOfMemory(Box::new(error))
    }

    /// Returns an error for a request of `bytes` that exceeds the device's whole memory, or `None`
    /// for a smaller one. No memory is reclaimed for such a request.
    pub(crate) fn refuse_oversized(&self, bytes: u64, tag: Tag) -> Option<MemoryError> {
        if bytes <= self.info.memory {
            return None;
        }
        count(&self.counters.failures, 1);
        self.report_failure(bytes, tag, None);
        Some(MemoryError::OutOfMemory(Box::new(self.explain(bytes, None, Progress::default()))))
    }

    /// Returns whether other streams can now take parts of the free memory of a cache.
    fn can_give_parts(&self, state: &CacheState) -> bool {
        let done = || state.timeline().is_none_or(|timeline| timeline.is_done(state.last_free));
        match self.config.adoption {
            Adoption::Never => false,
            Adoption::DoneOnly => done(),
            Adoption::Wait => true,
        }
    }

    /// Turns the refusal of `bytes` into the error of a request that found no room, where no other
    /// step was tried. Returns other errors unchanged.
    pub(crate) fn explain_refusal(&self, bytes: u64, error: MemoryError) -> MemoryError {
        let refused = match error {
            MemoryError::OutOfBudget(refused) => HandleError::Budget(refused),
            MemoryError::Driver(refused) if refused.is_out_of_memory() => {
                HandleError::Driver(refused)
            }
            other => return other,
        };
        let progress = Progress { refused: Some(refused), ..Progress::default() };
        MemoryError::OutOfMemory(Box::new(self.explain(bytes, None, progress)))
    }

    /// Returns the error for `bytes` that found no room, with the pool's contents and their
    /// holders. `own` is the cache of the request, or `None` for stable and reserved memory.
    pub(super) fn explain(
        &self,
        bytes: u64,
        own: Option<&'static StreamCache>,
        progress: Progress<'_>,
    ) -> OutOfMemory {
        let stats = self.stats();
        let pass = self.scratch.begin();
        let caches = self.caches(&pass);
        let mut error = OutOfMemory::new(self.info.device.to_string(), bytes);
        error.capacity = self.info.memory;
        match progress.refused {
            Some(HandleError::Budget(refused)) => {
                error.refused = Some(refused);
                // Idle memory is given back for a request that fits with it.
                let whole = self.memory.backing_bytes(&Request::bytes(bytes));
                error.raise = self.budget.raises(whole, self.memory.idle(&caches));
            }
            Some(HandleError::Driver(refused)) => error.driver = Some(refused),
            None => {}
        }
        // Memory that the driver does not take back may be what is missing.
        error.driver = error.driver.or(progress.unreleased);
        (error.live, error.graphs) = (stats.live, stats.graphs);
        error.cached = stats.cached;
        (error.pending, error.physical) = (stats.pending, stats.physical);
        error.tried = progress.tried.into_vec();
        let mut holders: Vec<Holding> = Vec::new();
        let in_use = &mut error.in_use;
        self.memory.shared_in_use(|stream, bytes| add_in_use(in_use, stream, bytes));
        for &other in &caches {
            other.with(|s| {
                error.largest_free = error.largest_free.max(s.heap.largest_free());
                s.holdings()
                    .filter(|h| h.bytes > 0)
                    .for_each(|holding| add_holding(&mut holders, holding));
                s.users().for_each(|(stream, bytes)| add_in_use(&mut error.in_use, stream, bytes));
                if let Some((stream, bytes)) = s.in_use() {
                    add_in_use(&mut error.in_use, stream, bytes);
                }
                let cached = s.heap.free_bytes();
                let pending = s.usage.pending;
                let is_own = own.is_some_and(|own| std::ptr::eq(other, own));
                // Dedicated memory can only use whole handles that caches give back.
                if own.is_some() && (is_own || self.can_give_parts(s)) {
                    error.available = error.available.max(s.heap.largest_free());
                }
                if !is_own && cached + pending > 0 {
                    let stream = s.timeline().map_or(0, |t| t.number());
                    error.stranded.push(Stranded { stream, cached, pending });
                }
            });
        }
        let left = error.refused.map_or(0, |refused| refused.remaining);
        error.available = error.available.max(self.memory.idle(&caches).saturating_add(left));
        self.dedicated
            .holdings()
            .into_iter()
            .for_each(|holding| add_holding(&mut holders, holding));
        holders.sort_by_key(|h| std::cmp::Reverse(h.bytes));
        error.stranded.sort_by_key(|s| std::cmp::Reverse(s.cached + s.pending));
        error.in_use.sort_by_key(|user| std::cmp::Reverse(user.bytes));
        error.holders = holders;
        error.tenants = self.hooks().flat_map(|hook| hook.tenant_holdings()).collect();
        error
    }
}
