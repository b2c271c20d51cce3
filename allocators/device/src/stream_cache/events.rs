//! Events of frees, for the pool's recorder.

use super::{Binding, BlockToken, CacheHost, CacheState};
use aquifer_core::{Action, event::EventTicket};
use std::sync::Arc;

/// Recorder events with their tickets. The pool is stored, since the cache may serve another stream
/// by the time they are reported.
pub(super) struct FreeEvents {
    pool: Arc<dyn CacheHost>,
    /// The stream's number.
    stream: u32,
    free_ticket: Option<EventTicket>,
    complete_ticket: Option<EventTicket>,
}

impl FreeEvents {
    pub(super) fn record(self, token: &BlockToken) {
        let Self { pool, stream, .. } = self;
        for (ticket, action) in
            [(self.free_ticket, Action::Free), (self.complete_ticket, Action::Complete)]
        {
            pool.report(ticket, action, stream, &token.extent);
        }
    }
}

impl CacheState {
    /// Takes tickets for a free, for its completion, or for both, if the pool has a recorder.
    pub(super) fn free_events(&self, free: bool, complete: bool) -> Option<FreeEvents> {
        let Binding { pool, timeline, .. } = self.binding.as_ref()?;
        if !pool.is_recorded() {
            return None;
        }
        let ticket = |wanted: bool| if wanted { pool.ticket() } else { None };
        let (free_ticket, complete_ticket) = (ticket(free), ticket(complete));
        Some(FreeEvents {
            pool: pool.clone(),
            stream: timeline.number(),
            free_ticket,
            complete_ticket,
        })
    }
}
