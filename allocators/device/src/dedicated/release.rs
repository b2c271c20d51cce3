//! The release of blocks that have a span of their own.

use super::{DedicatedPool, Span};
use crate::{
    base::{driver::owner_of_freed, pending::DeferredFree},
    block::ReleaseBlock,
    physical::handle::Handle,
};
use aquifer_core::{Action, Tag, event::BlockKind, panics::Contained};
use std::sync::Arc;

/// Releases a block that has a span of its own.
pub(crate) struct SpanRelease {
    pub(crate) dedicated: Arc<DedicatedPool>,
    pub(crate) span: Arc<Span>,
    /// Bytes that were requested; `None` if the bytes mapped at the end count.
    pub(crate) block_bytes: Option<u64>,
    /// The tag of the request.
    pub(crate) tag: Tag,
}

/// Records the completion of a block when it is dropped.
struct CompleteOnDrop {
    dedicated: std::sync::Weak<DedicatedPool>,
    stream: u32,
    address: u64,
    bytes: u64,
    tag: Tag,
}

impl Drop for CompleteOnDrop {
    fn drop(&mut self) {
        if let Some(dedicated) = self.dedicated.upgrade() {
            dedicated.report(
                BlockKind::Stable,
                Action::Complete,
                self.stream,
                self.address,
                self.bytes,
                self.tag,
            );
        }
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
        if let (Some(bytes), tag) = (*block_bytes, *tag) {
            dedicated.report(BlockKind::Stable, Action::Free, stream, block.address, bytes, tag);
            if dedicated.recorder.is_some() {
                let dedicated = Arc::downgrade(dedicated);
                let completes =
                    CompleteOnDrop { dedicated, stream, address: block.address, bytes, tag };
                until_free
                    .get_or_insert_default()
                    .push(Contained::new(Box::new(completes) as Box<_>));
            }
        }
        if block_bytes.is_none() {
            dedicated.report_decommit(span.ranges(), span.slot, stream, users.is_empty(), *tag);
        }
        block.work.fence_at_once();
        span.retire_whole(block.work.into_parts(), until_free);
        dedicated.enqueue_retiring(span);
    }
}
