//! What the caches of streams need of their pool.

use super::PoolCore;
use crate::{
    base::{extent::BlockExtent, part_bounds::LimitReserve},
    stream_cache::{CacheHost, StreamCache},
};
use aquifer_core::{Action, event::EventTicket};
use aquifer_heap::Heap;
use aquifer_stream::{StreamPool, Timeline};

impl CacheHost for PoolCore {
    fn streams(&self) -> &StreamPool {
        &self.streams
    }

    fn is_recorded(&self) -> bool {
        self.config.recorder.is_some()
    }

    fn status_id(&self) -> u64 {
        self.status.lines_id()
    }

    fn limit_reserve(&self) -> &LimitReserve {
        self.peaks.reserve()
    }

    fn ticket(&self) -> Option<EventTicket> {
        self.ticket()
    }

    fn report(
        &self,
        ticket: Option<EventTicket>,
        action: Action,
        stream: u32,
        extent: &BlockExtent,
    ) {
        let BlockExtent { address, request } = extent;
        self.report(ticket, action, stream, *address, request.bytes(), request.tag());
    }

    fn count_completion(&self) {
        self.dedicated.count_completion();
    }

    fn reclaim_cache(&self, cache: &'static StreamCache, timeline: &Timeline, heap: &Heap) {
        timeline.detach(self.key);
        self.unregister_cache(cache);
        self.memory.take_back(heap.free_extents().map(|e| e.range));
    }

    fn leak_cache(&self, cache: &'static StreamCache, timeline: &Timeline) {
        self.memory.leak();
        timeline.detach(self.key);
        self.unregister_cache(cache);
    }
}
