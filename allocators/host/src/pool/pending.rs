//! Pending frees: blocks that were freed while a gate was shut, and closed pools with such blocks.

use super::{
    home::Home,
    state::{Asked, Freed},
};
use crate::{
    clock,
    kernel::{ForkSafe, LockOrder},
    region,
};
use aquifer_core::{Action, Gate, event::Ticket};
use aquifer_driver::HostAccess;
use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

/// Cores of closed pools with pending blocks. No allocation polls their gates any more.
static LINGERING: ForkSafe<Vec<&'static Home>> = ForkSafe::new(LockOrder::Lingering, Vec::new());

pub(super) fn linger(home: &'static Home) {
    let mut lingering = LINGERING.lock();
    if !lingering.iter().any(|other| std::ptr::eq(*other, home)) {
        lingering.push(home);
    }
}

/// Releases the memory of closed pools that had live blocks or unfinished copies, as far as these
/// are done now. Also called when a pool is created, and by an allocation that has to grow its
/// pool. Blocks until devices are idle if there is memory to release.
///
/// See [`PinnedPool`](super::PinnedPool) for an example that leaves such memory.
pub fn sweep() {
    let homes = mem::take(&mut *LINGERING.lock());
    for home in homes.into_iter().filter(|home| home.is_here()) {
        home.poll_all();
        if let Some(shared) = home.with(|state| state.shared.clone().filter(|_| !state.open)) {
            home.drain(&shared, true);
            home.reap(&shared, 0, u64::MAX, None);
            home.retire_or_linger();
        }
    }
    region::end_retired();
}

/// Returns whether a gate is open. A gate that panics counts as shut, since allocators must not
/// unwind.
pub(super) fn is_open(gate: &dyn Gate) -> bool {
    catch_unwind(AssertUnwindSafe(|| gate.is_open())).unwrap_or(false)
}

/// An iterator over the blocks whose gates are all open.
fn done(asked: &[Asked]) -> impl Iterator<Item = Freed> {
    asked.iter().filter(|one| one.gates.is_empty()).map(|one| one.block)
}

impl Home {
    /// Polls the gates of all pending blocks.
    pub(super) fn poll_all(&'static self) {
        let asked = self.with(|state| state.ask(usize::MAX));
        self.settle(asked);
    }

    /// Polls the gates of pending blocks that were taken out for this, and stores the results.
    pub(super) fn settle(&'static self, mut asked: Vec<Asked>) {
        if asked.is_empty() {
            return;
        }
        for one in &mut asked {
            // Open gates are dropped here, outside the lock, because a drop may run any code. In
            // place, because a vector that goes back into the pool's metadata must not be allocated
            // here: allocations may be routed to this very pool.
            one.gates.retain(|gate| !is_open(&**gate));
        }
        let shared = self.with(|state| state.shared.clone());
        if let Some(shared) = shared.as_ref().filter(|shared| shared.observed) {
            done(&asked).for_each(|block| shared.observe(block, HostAccess::Free));
        }
        let told: Vec<(Freed, Ticket)> = self.with(|state| {
            let recorder = shared.as_ref().and_then(|shared| shared.config.recorder.as_ref());
            let told = recorder
                .map(|recorder| done(&asked).map(|block| (block, recorder.ticket())).collect());
            state.answer(asked);
            told.unwrap_or_default()
        });
        self.note_waiting();
        for (block, ticket) in told {
            self.tell(&shared, Some(ticket), Action::Complete, block.address, block.requested);
        }
    }

    /// Waits for the oldest pending block, at most `patience`. Returns `false` if there was none.
    pub(super) fn wait_oldest(&'static self, patience: Duration) -> bool {
        let asked = self.with(|state| state.ask(1));
        if asked.is_empty() {
            return false;
        }
        self.with(|state| state.waited());
        let deadline = clock::after(patience);
        for gate in asked.iter().flat_map(|one| &one.gates) {
            // The result is not used: the gate is polled again below. A gate that panics counts as
            // shut.
            let _answer = catch_unwind(AssertUnwindSafe(|| gate.wait(Some(deadline))));
        }
        self.settle(asked);
        true
    }
}
