//! What the planned memory drops and reports once its lock is released.

use crate::{base::pending::DeferredFree, block::DriverBlock, dedicated::DedicatedPool};
use aquifer_core::event::{Event, EventTicket};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// Values whose drop may call the driver or foreign code, and events.
#[derive(Default)]
pub(super) struct Leftovers {
    pub(super) frees: Vec<DeferredFree>,
    pub(super) blocks: Vec<Arc<DriverBlock>>,
    pub(super) timelines: Vec<Arc<Timeline>>,
    pub(super) events: Vec<(EventTicket, Event)>,
}

impl Leftovers {
    /// Sends the events, and drops the rest. Called with no lock held.
    pub(super) fn finish(self, dedicated: &DedicatedPool) {
        dedicated.send(self.events);
    }
}
