//! What is said when there is no room.

use super::Progress;
use super::count;
use crate::{
    Adoption, Request,
    home::{Home, State},
    physical::{Physical, handle::NoHandle},
    pool::Inner,
};
use aquifer_core::{
    Action, Budget, MemoryError, OutOfBudget, OutOfMemory, Tag,
    budget::{Holding, Room},
    error::{InUse, Stranded},
};

/// Adds what a tag holds to what it holds elsewhere.
fn add(holders: &mut Vec<Holding>, holding: Holding) {
    match holders.iter_mut().find(|h| h.tag == holding.tag) {
        Some(sum) => {
            sum.bytes += holding.bytes;
            sum.blocks += holding.blocks;
        }
        None => holders.push(holding),
    }
}

/// Adds what a stream uses of a freed block to what it uses of others.
fn use_more(users: &mut Vec<InUse>, stream: u32, bytes: u64) {
    match users.iter_mut().find(|user| user.stream == stream) {
        Some(sum) => sum.bytes += bytes,
        None => users.push(InUse { stream, bytes }),
    }
}

impl Inner {
    /// That a tenant's or a tag's live bytes leave no room for `request`, whatever the pool has.
    pub(crate) fn refuse(
        &self,
        request: &Request,
        share: &Budget,
        refused: OutOfBudget,
        room: &Room,
    ) -> MemoryError {
        count(&self.counters.failures, 1);
        self.report_pool(Action::Fail, request.size(), request.owner());
        let mut progress =
            Progress { refused: Some(NoHandle::Budget(refused)), ..Progress::default() };
        room.tried.iter().for_each(|tried| progress.note(tried.step, tried.gave));
        let mut error = self.explain(request.size(), None, progress);
        error.of_live_bytes = true;
        error.raise = share.raises(request.size(), 0);
        MemoryError::OutOfMemory(Box::new(error))
    }

    /// Returns a refusal for a request of `bytes` that the device could not hold if it were empty;
    /// `None` where it could. Nothing is given back for such a request.
    pub(crate) fn refuse_beyond(&self, bytes: u64, tag: Tag) -> Option<MemoryError> {
        if bytes <= self.info.memory {
            return None;
        }
        count(&self.counters.failures, 1);
        self.report_pool(Action::Fail, bytes, tag);
        Some(MemoryError::OutOfMemory(Box::new(self.explain(bytes, None, Progress::default()))))
    }

    /// Whether other streams can have parts of what is free in a cache now.
    fn gives_parts(&self, state: &State) -> bool {
        let done = || state.timeline().is_none_or(|timeline| timeline.is_done(state.last_free));
        match (&self.physical, self.config.adoption) {
            (Physical::Plain(_), _) | (_, Adoption::Never) => false,
            (Physical::Mapped(_), Adoption::DoneOnly) => done(),
            (Physical::Mapped(_), Adoption::Wait) => true,
        }
    }

    /// Turns the refusal of `bytes`, for which nothing else was tried, into the error of a request
    /// that found no room. Leaves other errors as they are.
    pub(crate) fn explained(&self, bytes: u64, error: MemoryError) -> MemoryError {
        let refused = match error {
            MemoryError::OutOfBudget(refused) => NoHandle::Budget(refused),
            MemoryError::Driver(refused) if refused.is_out_of_memory() => NoHandle::Driver(refused),
            other => return other,
        };
        let progress = Progress { refused: Some(refused), ..Progress::default() };
        MemoryError::OutOfMemory(Box::new(self.explain(bytes, None, progress)))
    }

    /// That there is no room for `bytes`, with what the pool holds and who has it: a block of the
    /// cache `own`, or stable or reserved memory.
    pub(crate) fn explain(
        &self,
        bytes: u64,
        own: Option<&'static Home>,
        progress: Progress<'_>,
    ) -> OutOfMemory {
        let stats = self.stats();
        let pass = self.scratch.begin();
        let homes = self.homes(&pass);
        let mut error = OutOfMemory::new(self.info.device.to_string(), bytes);
        error.capacity = self.info.memory;
        match progress.refused {
            Some(NoHandle::Budget(refused)) => {
                error.refused = Some(refused);
                // What lies idle is given back for a request that fits with it.
                let whole = self.whole(&Request::bytes(bytes));
                error.raise = self.budget.raises(whole, self.idle_handles(&homes));
            }
            Some(NoHandle::Driver(refused)) => error.driver = Some(refused),
            None => {}
        }
        (error.live, error.graphs) = (stats.live, stats.graphs);
        error.cached = stats.cached;
        (error.pending, error.physical) = (stats.pending, stats.physical);
        error.tried = progress.tried.into_vec();
        let mut holders: Vec<Holding> = Vec::new();
        if let Physical::Mapped(mapped) = &self.physical {
            mapped.shared_in_use(|stream, bytes| use_more(&mut error.in_use, stream, bytes));
        }
        for &other in &homes {
            other.with(|s| {
                error.largest_free = error.largest_free.max(s.heap.largest_free());
                s.holdings().filter(|h| h.bytes > 0).for_each(|holding| add(&mut holders, holding));
                s.users().for_each(|(stream, bytes)| use_more(&mut error.in_use, stream, bytes));
                if let Some((stream, bytes)) = s.in_use() {
                    use_more(&mut error.in_use, stream, bytes);
                }
                let cached = s.heap.stats().free_bytes;
                let pending = s.account.pending;
                let is_own = own.is_some_and(|own| std::ptr::eq(other, own));
                // Memory with addresses of its own takes nothing out of caches but what they give
                // back whole.
                if own.is_some() && (is_own || self.gives_parts(s)) {
                    error.available = error.available.max(s.heap.largest_free());
                }
                if !is_own && cached + pending > 0 {
                    let stream = s.timeline().map_or(0, |t| t.number());
                    error.stranded.push(Stranded { stream, cached, pending });
                }
            });
        }
        let left = error.refused.map_or(0, |refused| refused.remaining);
        error.available = error.available.max(self.idle_handles(&homes).saturating_add(left));
        self.apart.holdings().into_iter().for_each(|holding| add(&mut holders, holding));
        holders.sort_by_key(|h| std::cmp::Reverse(h.bytes));
        error.stranded.sort_by_key(|s| std::cmp::Reverse(s.cached + s.pending));
        error.in_use.sort_by_key(|user| std::cmp::Reverse(user.bytes));
        error.holders = holders;
        error.tenants = self.tenants.holdings();
        error
    }
}
