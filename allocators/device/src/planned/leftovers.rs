//! What the planned memory does, drops and reports once its lock is released.

use crate::{
    base::{
        extent::UntilFree,
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
pub(super) struct Lists {
    /// Whether the live bytes have risen above their limit.
    pub(super) is_above_limit: bool,
    /// The work that the range waits for before it is given back, and what is dropped then.
    pub(super) retired: Option<(PartsWork, UntilFree)>,
    frees: Vec<DeferredFree>,
    blocks: Vec<Arc<DriverBlock>>,
    timelines: Vec<Arc<Timeline>>,
    pub(super) events: Vec<(EventTicket, Event)>,
}

impl Leftovers {
    pub(super) fn new() -> Self {
        Self(LazyBox::NONE)
    }

    /// Takes the live bytes into account in the peaks of the pool, before a block is handed out.
    #[cold]
    pub(super) fn note_above_limit(&mut self) {
        self.0.get_or_default().is_above_limit = true;
    }

    /// Gives the range back and drops `until_free` when `work` is over, and settles the peaks.
    pub(super) fn retire(&mut self, work: PartsWork, until_free: UntilFree) {
        self.0.get_or_default().retired = Some((work, until_free));
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

    pub(super) fn add_event(&mut self, event: Option<(EventTicket, Event)>) {
        if let Some(event) = event {
            self.0.get_or_default().events.push(event);
        }
    }

    /// Returns what there is, to be dropped with no lock held.
    #[inline]
    pub(super) fn into_lists(self) -> Option<Lists> {
        (!self.0.is_none()).then(|| self.0.or_default())
    }
}
