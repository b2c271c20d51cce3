//! What the planned memory does, drops and reports once its lock is released.

use super::memory::PlannedMemory;
use crate::{
    base::{
        lazy_box::LazyBox,
        pending::{DeferredFree, PartsWork},
    },
    block::DriverBlock,
};
use aquifer_core::event::{Event, EventTicket};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// Calls that take other locks, values whose drop may call the driver or foreign code, and events.
/// Most operations have none.
pub(super) struct Leftovers(LazyBox<Lists>);

#[derive(Default)]
struct Lists {
    /// Whether the live bytes have risen above their limit, or never change again.
    must_settle: bool,
    /// The work that the range waits for before it is given back.
    retired: Option<PartsWork>,
    frees: Vec<DeferredFree>,
    blocks: Vec<Arc<DriverBlock>>,
    timelines: Vec<Arc<Timeline>>,
    events: Vec<(EventTicket, Event)>,
}

impl Leftovers {
    pub(super) fn new() -> Self {
        Self(LazyBox::NONE)
    }

    /// Settles the peaks of the pool, before a block is handed out.
    #[cold]
    pub(super) fn settle(&mut self) {
        self.0.get_or_default().must_settle = true;
    }

    /// Gives the range back when `work` is over, and settles the peaks.
    pub(super) fn retire(&mut self, work: PartsWork) {
        self.0.get_or_default().retired = Some(work);
        self.settle();
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

    /// Does what is to be done, sends the events, and drops the rest. Called with no lock held.
    #[inline]
    pub(super) fn finish(self, memory: &PlannedMemory) {
        if !self.0.is_none() {
            self.do_and_drop(memory);
        }
    }

    #[inline(never)]
    fn do_and_drop(self, memory: &PlannedMemory) {
        let lists = self.0.or_default();
        if lists.must_settle {
            memory.peaks.settle();
        }
        if let Some(work) = lists.retired {
            memory.retire_span(work);
        }
        memory.dedicated.send(lists.events);
    }
}
