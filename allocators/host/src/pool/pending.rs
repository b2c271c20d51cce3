//! Blocks that were freed with a gate shut, and pools that were closed with such blocks.

use super::{
    home::Home,
    state::{Asked, Freed},
};
use crate::{
    clock,
    kernel::{AcrossForks, Of},
    region,
};
use aquifer_core::{Action, Gate, event::Ticket};
use aquifer_driver::HostAccess;
use std::{
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};

/// Shells of closed pools with pending blocks: nobody else would ask after those.
static LINGERING: AcrossForks<Vec<&'static Home>> = AcrossForks::new(Of::Lingering, Vec::new());

pub(super) fn linger(home: &'static Home) {
    let mut lingering = LINGERING.lock();
    if !lingering.iter().any(|other| std::ptr::eq(*other, home)) {
        lingering.push(home);
    }
}

/// Gives back what pools that were closed with blocks about or copies still on their way have left,
/// as far as those are done now. Making a pool does it too, and an allocation that may take memory
/// and has to. Blocks until devices are idle, if there is something to give back.
///
/// Its example is that of [`PinnedPool`](super::PinnedPool), whose drop it looks after.
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

/// Whether a gate is open. Allocators must not unwind, so a gate that panics counts as shut.
pub(super) fn is_open(gate: &dyn Gate) -> bool {
    catch_unwind(AssertUnwindSafe(|| gate.is_open())).unwrap_or(false)
}

/// Those whose gates are all open.
fn done(asked: &[Asked]) -> impl Iterator<Item = Freed> {
    asked.iter().filter(|one| one.gates.is_empty()).map(|one| one.block)
}

impl Home {
    /// Asks all pending blocks' gates.
    pub(super) fn poll_all(&'static self) {
        let asked = self.with(|state| state.ask(usize::MAX));
        self.settle(asked);
    }

    /// Asks the gates of blocks that were taken out for that, and takes the answers in.
    pub(super) fn settle(&'static self, mut asked: Vec<Asked>) {
        if asked.is_empty() {
            return;
        }
        for one in &mut asked {
            // Open ones are dropped here, without the lock: that may run anything. In place, since
            // what goes back into the books must not have been allocated meanwhile, when
            // allocations may be routed to this very pool.
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

    /// Waits for the oldest pending block, at most so long; says whether there was one to wait for.
    pub(super) fn wait_oldest(&'static self, patience: Duration) -> bool {
        let asked = self.with(|state| state.ask(1));
        if asked.is_empty() {
            return false;
        }
        self.with(|state| state.waited());
        let deadline = clock::after(patience);
        for gate in asked.iter().flat_map(|one| &one.gates) {
            // Whatever it answers, it is asked again below; a gate that panics is one that stays
            // shut.
            let _answer = catch_unwind(AssertUnwindSafe(|| gate.wait(Some(deadline))));
        }
        self.settle(asked);
        true
    }
}
