//! Blocks in bypass mode: each is an allocation of the driver of its own, which its drop frees.
//!
//! An allocation takes 50 µs or more, and a free waits for the whole device. Memory checkers see
//! each block, while a pool looks like one large allocation to them. The drop of a block blocks
//! until all of its streams have finished with it. While a use is open, the memory is retiring, and
//! the end of the use frees it.

use crate::{
    BLOCK_ALIGN, Block, Request,
    base::{
        driver::{check_stream_device, owner_of_freed},
        extent::PackedRequest,
        pending::{DeferredFree, PendingUses},
    },
    block::{DriverBlock, ReleaseBlock},
    dedicated::{DedicatedPool, Span},
    pool_core::PoolCore,
};
use aquifer_core::{Action, MemoryError, Result, event::BlockKind};
use aquifer_driver::Ownership;
use aquifer_stream::{LastUse, Stream};
use std::sync::Arc;

/// Frees a block, at its drop or when its last use ends.
#[derive(Clone)]
struct FreePlain {
    dedicated: Arc<DedicatedPool>,
    span: Arc<Span>,
}

impl PoolCore {
    /// Allocates a block as an allocation of its own. The request has been checked. Makes room as
    /// [`PoolCore::with_room`] does.
    ///
    /// # Errors
    /// [`MemoryError::BadAlignment`] beyond [`BLOCK_ALIGN`]: the driver guarantees no more. As
    /// [`PoolCore::with_room`].
    pub(crate) fn allocate_plain(&self, stream: &Stream, request: Request) -> Result<Block> {
        check_stream_device(&*self.driver, self.info.device, stream.timeline())?;
        if request.alignment() > BLOCK_ALIGN {
            return Err(MemoryError::BadAlignment { align: request.alignment() });
        }
        let (dedicated, kind) = (&self.dedicated, BlockKind::Cached);
        let (bytes, tag) = (request.size(), request.owner());
        // What the driver has refused to free has nothing to do with this request.
        let _refused = dedicated.reap_matching(|span| span.kind() == kind);
        let span = self.with_room(kind, bytes, tag, None, |funds| {
            dedicated.allocate_whole(kind, bytes, funds)
        })?;
        let (address, generation) = (span.address, dedicated.generation());
        debug_assert!(address.is_multiple_of(request.alignment()), "a block is not aligned");
        dedicated.plain_allocated(address, bytes, tag);
        dedicated.report(kind, Action::Allocate, stream.number(), address, bytes, tag);
        let live = Ownership::Live { stream: stream.timeline().noted(), generation };
        dedicated.notify_observer(generation, address, bytes, live);
        let driver_block = DriverBlock {
            releaser: Arc::new(FreePlain { dedicated: dedicated.clone(), span }),
            timeline: stream.timeline().clone(),
            streams: self.streams().clone(),
            bytes,
            key: 0,
        };
        let packed = PackedRequest::new(bytes, tag);
        Ok(Block::from_driver_block(address, packed, driver_block, generation))
    }
}

impl FreePlain {
    /// Waits for the work of the block and frees it. What the driver refuses stays retiring.
    fn free(&self) {
        let _ = self.span.wait(|timeline, epoch| timeline.wait(epoch, None));
        let _ = self.dedicated.reap_span(&self.span);
    }
}

impl LastUse for FreePlain {
    fn ended(&self) {
        self.free();
    }
}

impl ReleaseBlock for FreePlain {
    fn release(&self, mut block: DeferredFree) {
        let Self { dedicated, span } = self;
        let DeferredFree { address, bytes, tag, generation, .. } = block;
        debug_assert_eq!((address, bytes), (span.address, span.bytes), "another block's memory");
        let users = block.users();
        dedicated.notify_observer(generation, address, bytes, owner_of_freed(&users));
        dedicated.plain_freed(address, bytes, tag);
        let freed = (vec![(address, bytes)], bytes);
        let stream = block.timeline.number();
        if let Some(completes) = dedicated.report_freed(span, BlockKind::Cached, freed, stream, tag)
        {
            block.until_free.get_or_insert_default().push(completes);
        }
        let listener: Arc<dyn LastUse> = Arc::new(self.clone());
        let is_open = block.work.uses.has_open() && block.work.uses.tell(&listener);
        // The owner stream may end before the uses do.
        block.work.fence_at_once();
        span.retire_whole(block.work.into_parts(), block.until_free);
        if is_open {
            // The use may have ended meanwhile.
            let _ = dedicated.reap_span(span);
        } else {
            self.free();
        }
    }
}
