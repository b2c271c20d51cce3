//! What is said when there is no room.

use super::Progress;
use crate::{home::Home, physical::handle::NoHandle, pool::Inner};
use aquifer_core::{OutOfMemory, budget::Holding, error::Stranded};

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

impl Inner {
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
        (error.live, error.cached) = (stats.live, stats.cached);
        (error.pending, error.physical) = (stats.pending, stats.physical);
        error.tried = progress.tried;
        let mut holders: Vec<Holding> = Vec::new();
        for other in self.homes() {
            other.with(|s| {
                error.largest_free = error.largest_free.max(s.heap.largest_free());
                s.holdings().filter(|h| h.bytes > 0).for_each(|holding| add(&mut holders, holding));
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
        error.holders = holders;
        error
    }
}
