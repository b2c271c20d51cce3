//! What the planned memory drops and reports once its lock is released.

use crate::{
    base::{lazy_box::LazyBox, pending::DeferredFree},
    block::DriverBlock,
    dedicated::DedicatedPool,
};
use aquifer_core::event::{Event, EventTicket};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// Values whose drop may call the driver or foreign code, and events. Most operations have none.
pub(super) struct Leftovers(LazyBox<Lists>);

#[derive(Default)]
struct Lists {
    frees: Vec<DeferredFree>,
    blocks: Vec<Arc<DriverBlock>>,
    timelines: Vec<Arc<Timeline>>,
    events: Vec<(EventTicket, Event)>,
}

impl Leftovers {
    pub(super) fn new() -> Self {
        Self(LazyBox::NONE)
    }

    pub(super) fn add_free(&mut self, free: DeferredFree) {
        self.0.get_or_default().frees.push(free);
    }

    #[inline]
    pub(super) fn add_block(&mut self, block: Option<Arc<DriverBlock>>) {
        if let Some(block) = block {
            self.0.get_or_default().blocks.push(block);
        }
    }

    pub(super) fn add_timeline(&mut self, timeline: Option<Arc<Timeline>>) {
        if let Some(timeline) = timeline {
            self.0.get_or_default().timelines.push(timeline);
        }
    }

    #[inline]
    pub(super) fn add_event(&mut self, event: Option<(EventTicket, Event)>) {
        if let Some(event) = event {
            self.0.get_or_default().events.push(event);
        }
    }

    /// Sends the events, and drops the rest. Called with no lock held.
    #[inline]
    pub(super) fn finish(self, dedicated: &DedicatedPool) {
        if !self.0.is_none() {
            self.send_and_drop(dedicated);
        }
    }

    #[inline(never)]
    fn send_and_drop(self, dedicated: &DedicatedPool) {
        dedicated.send(self.0.or_default().events);
    }
}
