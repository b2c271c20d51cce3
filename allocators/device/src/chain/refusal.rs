//! What is said when there is no room.

use super::Progress;
use super::count;
use crate::{Request, home::Home, physical::handle::NoHandle, pool::Inner};
use aquifer_core::{
    Action, MemoryError, OutOfBudget, OutOfMemory,
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
    pub(crate) fn refuse(&self, request: &Request, refused: OutOfBudget, room: &Room) -> MemoryError {
        count(&self.counters.failures, 1);
        self.report_pool(Action::Fail, request.size(), request.owner());
        let mut progress = Progress { refused: Some(NoHandle::Budget(refused)), ..Progress::default() };
        room.tried.iter().for_each(|tried| progress.note(tried.step, tried.gave));
        let mut error = self.explain(request.size(), None, progress);
        error.of_live_bytes = true;
        MemoryError::OutOfMemory(Box::new(error))
    }

    /// That there is no room for `bytes`, with what the pool holds and who has it: a block of the cache `own`, or stable or
    /// reserved memory.
    pub(crate) fn explain(
        &self,
        bytes: u64,
        own: Option<&'static Home>,
        progress: Progress<'_>,
    ) -> OutOfMemory {
        let stats = self.stats();
        let mut error = OutOfMemory::new(self.info.device.to_string(), bytes);
        match progress.refused {
            Some(NoHandle::Budget(refused)) => error.refused = Some(refused),
            Some(NoHandle::Driver(refused)) => error.driver = Some(refused),
            None => {}
        }
        (error.live, error.graphs) = (stats.live, stats.graphs);
        error.cached = stats.cached;
        (error.pending, error.physical) = (stats.pending, stats.physical);
        error.tried = progress.tried.into_vec();
        let mut holders: Vec<Holding> = Vec::new();
        for other in self.homes(&self.scratch.begin()) {
            other.with(|s| {
                error.largest_free = error.largest_free.max(s.heap.largest_free());
                s.holdings().filter(|h| h.bytes > 0).for_each(|holding| add(&mut holders, holding));
                s.users().for_each(|(stream, bytes)| use_more(&mut error.in_use, stream, bytes));
                let cached = s.heap.stats().free_bytes;
                let pending = s.account.pending;
                let is_own = own.is_some_and(|own| std::ptr::eq(other, own));
                if !is_own && cached + pending > 0 {
                    let stream = s.timeline().map_or(0, |t| t.number());
                    error.stranded.push(Stranded { stream, cached, pending });
                }
            });
        }
        self.apart.holdings().into_iter().for_each(|holding| add(&mut holders, holding));
        holders.sort_by_key(|h| std::cmp::Reverse(h.bytes));
        error.stranded.sort_by_key(|s| std::cmp::Reverse(s.cached + s.pending));
        error.in_use.sort_by_key(|user| std::cmp::Reverse(user.bytes));
        error.holders = holders;
        error.tenants = self.tenants.holdings();
        error
    }
}
