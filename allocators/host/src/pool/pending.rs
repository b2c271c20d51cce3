//! Pending frees: blocks that were freed while a gate was shut, and closed pools with such blocks.

use super::{
    context::PoolContext,
    pool_core::{LINGERING, PoolCore, is_open, lock},
    state::{FreedBlock, PolledBlock},
};
use crate::{clock, kernel::is_forked_child, region};
use aquifer_core::{Action, event::EventTicket};
use aquifer_driver::HostAccess;
use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

/// Releases the memory of closed pools that had live blocks or unfinished copies, as far as these
/// are done now. Also called when a pool is created, and by an allocation that has to grow its
/// pool. Blocks until devices are idle if there is memory to release.
///
/// See [`PinnedPool`](super::PinnedPool) for an example that leaves such memory.
pub fn sweep() {
    sweep_after(|_, _| {});
}

fn sweep_after(wait: impl Fn(&'static PoolCore, &Arc<PoolContext>)) {
    if is_forked_child() {
        return;
    }
    let lingering = mem::take(&mut *lock(&LINGERING));
    for core in lingering {
        core.poll_all();
        if let Some(shared) = core.with(|state| state.shared.clone().filter(|_| !state.open)) {
            wait(core, &shared);
            core.drain(&shared, true);
            core.reap(&shared, 0, u64::MAX, None);
            core.recycle_or_linger();
        }
    }
    region::end_retired();
}

/// An iterator over the blocks whose gates are all open.
fn done(blocks: &[PolledBlock]) -> impl Iterator<Item = FreedBlock> {
    blocks.iter().filter(|polled| polled.gates.is_empty()).map(|polled| polled.block)
}

impl PoolCore {
    /// As [`sweep`], when this last pool that pins memory for its machine has closed, or its last
    /// block is freed. No later quiet point may come, so copies still in flight are waited for, for
    /// each pool at most its patience. This core does not rely on the list, which another thread
    /// may be sweeping.
    pub(super) fn settle(&'static self, shared: &Arc<PoolContext>) {
        self.wait_for_copies(shared);
        self.reap(shared, 0, u64::MAX, None);
        self.recycle_or_linger();
        sweep_after(|core, other| {
            if other.machine() == shared.machine() {
                core.wait_for_copies(other);
            }
        });
    }

    /// Waits for the pending blocks of a closed pool, if none is live.
    fn wait_for_copies(&'static self, shared: &Arc<PoolContext>) {
        let end = clock::after(shared.config.patience);
        let left = || end.saturating_duration_since(Instant::now());
        while self.with(|state| state.serves(shared) && state.has_pending() && !state.has_live())
            && !left().is_zero()
        {
            if !self.wait_oldest(left()) {
                // Another thread polls them.
                thread::yield_now();
            }
        }
    }

    /// Polls the gates of all pending blocks.
    pub(super) fn poll_all(&'static self) {
        let blocks = self.with(|state| state.begin_poll(usize::MAX));
        self.poll_blocks(blocks);
    }

    /// Polls the gates of pending blocks that were taken out for this, and stores the results.
    pub(super) fn poll_blocks(&'static self, mut blocks: Vec<PolledBlock>) {
        if blocks.is_empty() {
            return;
        }
        for polled in &mut blocks {
            // Open gates are dropped here, outside the lock, because a drop may run any code. In
            // place, because a vector that goes back into the pool's metadata must not be allocated
            // here: allocations may be routed to this very pool.
            polled.gates.retain(|gate| !is_open(&**gate));
        }
        let shared = self.with(|state| state.shared.clone());
        if let Some(shared) = shared.as_ref().filter(|shared| shared.observed) {
            done(&blocks).for_each(|block| shared.observe(block, HostAccess::Free));
        }
        let events: Vec<(FreedBlock, EventTicket)> = self.with(|state| {
            let recorder = shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let events = recorder
                .map(|recorder| done(&blocks).map(|block| (block, recorder.ticket())).collect());
            state.end_poll(blocks);
            events.unwrap_or_default()
        });
        self.update_poll_flag();
        for (block, ticket) in events {
            self.record(&shared, Some(ticket), Action::Complete, block.address, block.requested);
        }
    }

    /// Waits for the oldest pending block, at most `patience`. Returns `false` if there was none.
    pub(super) fn wait_oldest(&'static self, patience: Duration) -> bool {
        let blocks = self.with(|state| state.begin_poll(1));
        if blocks.is_empty() {
            return false;
        }
        self.with(|state| state.count_host_wait());
        let deadline = clock::after(patience);
        for gate in blocks.iter().flat_map(|polled| &polled.gates) {
            // The result is not used: the gate is polled again below. A gate that panics counts as
            // shut.
            let _answer = catch_unwind(AssertUnwindSafe(|| gate.wait(Some(deadline))));
        }
        self.poll_blocks(blocks);
        true
    }
}
