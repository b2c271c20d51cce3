//! The release of blocks that have a span of their own.

use super::{DedicatedPool, Span};
use crate::{
    backing::handle::Handle,
    base::{driver::owner_of_freed, extent::AttachedValue, pending::DeferredFree},
    block::ReleaseBlock,
};
use aquifer_core::{Action, Tag, event::BlockKind, panics::Contained};
use std::sync::{Arc, Weak};

/// Releases a block that has a span of its own.
pub(crate) struct SpanRelease {
    pub(crate) dedicated: Arc<DedicatedPool>,
    pub(crate) span: Arc<Span>,
    /// Bytes that were requested; `None` if the bytes mapped at the end count.
    pub(crate) block_bytes: Option<u64>,
    /// The tag of the request.
    pub(crate) tag: Tag,
}

/// Freed blocks of the same size, one behind the other in each range, whose completions are
/// recorded when this is dropped.
#[derive(Debug)]
struct CompleteOnDrop {
    dedicated: Weak<DedicatedPool>,
    span: Weak<Span>,
    kind: BlockKind,
    stream: u32,
    ranges: Vec<(u64, u64)>,
    bytes: u64,
    tag: Tag,
}

impl CompleteOnDrop {
    fn report(&self, dedicated: &DedicatedPool, action: Action, which: impl Fn(u64) -> bool) {
        for &(start, bytes) in &self.ranges {
            let blocks = (0..bytes / self.bytes.max(1)).map(|place| start + place * self.bytes);
            for address in blocks.filter(|address| which(*address)) {
                dedicated.report(self.kind, action, self.stream, address, self.bytes, self.tag);
            }
        }
    }
}

impl Drop for CompleteOnDrop {
    fn drop(&mut self) {
        let Some(dedicated) = self.dedicated.upgrade() else { return };
        let span = self.span.upgrade();
        // What was committed again is a block of its own.
        let is_over = |address| span.as_ref().is_none_or(|span| !span.has_memory_at(address));
        self.report(&dedicated, Action::Complete, is_over);
    }
}

impl DedicatedPool {
    /// Records that their owner has freed the blocks of `bytes` bytes in `ranges` of a span. The
    /// returned value records their completion when it is dropped. Keep it until their memory is
    /// free.
    pub(crate) fn report_freed(
        self: &Arc<Self>,
        span: &Arc<Span>,
        kind: BlockKind,
        (ranges, bytes): (Vec<(u64, u64)>, u64),
        stream: u32,
        tag: Tag,
    ) -> Option<AttachedValue> {
        self.recorder.as_ref()?;
        let (dedicated, span) = (Arc::downgrade(self), Arc::downgrade(span));
        let blocks = CompleteOnDrop { dedicated, span, kind, stream, ranges, bytes, tag };
        blocks.report(self, Action::Free, |_| true);
        Some(Contained::new(Box::new(blocks)))
    }
}

impl ReleaseBlock for SpanRelease {
    fn handles(&self, address: u64, bytes: u64) -> Option<(Vec<Arc<Handle>>, u64)> {
        self.span.handles(address, bytes)
    }

    fn release(&self, block: DeferredFree) {
        let Self { dedicated, span, block_bytes, tag } = self;
        let users = block.users();
        let owner = owner_of_freed(&users);
        for (address, bytes) in span.ranges() {
            dedicated.notify_observer(block.generation, address, bytes, owner);
        }
        let live = span.charged_bytes();
        let requested = block_bytes.unwrap_or(live);
        dedicated.update_usage(|a| {
            a.record_free(live, requested, *tag);
            a.by_tag.of_mut(*tag).blocks -= 1;
            if block_bytes.is_some() {
                a.live.remove_block();
            }
        });
        let (mut until_free, stream) = (block.until_free, block.timeline.number());
        let (kind, ranges, bytes) = match *block_bytes {
            Some(bytes) => (BlockKind::Stable, vec![(block.address, bytes)], bytes),
            None => (BlockKind::Reserved, span.ranges().into_iter().collect(), span.slot),
        };
        if let Some(completes) = dedicated.report_freed(span, kind, (ranges, bytes), stream, *tag) {
            until_free.get_or_insert_default().push(completes);
        }
        let idle = span.take_all_idle();
        if !idle.is_empty() {
            dedicated.slots_retired(BlockKind::Reserved, idle.len() as u64 * span.slot);
            span.return_retiring(idle);
        }
        block.work.fence_at_once();
        span.retire_whole(block.work.into_parts(), until_free);
        dedicated.enqueue_retiring(span);
    }
}
