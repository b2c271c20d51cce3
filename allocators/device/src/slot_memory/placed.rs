//! Blocks at given addresses, for callers that bring the memory of graphs back to an earlier state.

use super::{SlotMemory, ranges::Capture};
use crate::{
    Block, Request,
    base::{driver::check_stream_device, pending::StreamDeps},
};
use aquifer_core::{BLOCK_ALIGN, MemoryError, Result, Tag};
use aquifer_heap::Range;
use aquifer_stream::Stream;
use std::sync::Arc;

/// Returns what two ranges have in common.
fn common(one: Range, other: Range) -> Option<Range> {
    let (start, end) = (one.start.max(other.start), one.end().min(other.end()));
    (start < end).then(|| Range { start, len: end - start })
}

impl SlotMemory {
    /// Allocates a block at `address` for a valid request, for work of `stream` that is not
    /// captured. Orders the stream on the device after the work that used the memory last.
    pub(crate) fn allocate_at(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
        address: u64,
    ) -> Result<Block> {
        let timeline = stream.timeline();
        check_stream_device(&*self.dedicated.driver, self.dedicated.device, timeline)?;
        let _operation = self.begin_operation()?;
        let bytes = request.size().next_multiple_of(BLOCK_ALIGN);
        let range = Range { start: address, len: bytes };
        if !self.contains(address, bytes) {
            return Err(MemoryError::ForeignBlock { address });
        }
        if !address.is_multiple_of(request.alignment()) {
            return Err(MemoryError::BadAlignment { align: request.alignment() });
        }
        let take = || self.state().slots.ranges.free.take(range);
        let deps = take().or_else(|| {
            let _ = self.poll_fences();
            take()
        });
        let deps = match deps {
            Some(deps) => deps,
            None => self.take_with_missing(stream, range, request.owner())?,
        };
        self.make_block_behind(stream, range, deps, &request)
    }

    /// Takes a range of which some slots have been given back to the driver, and adds memory to
    /// those. Returns what the rest of it depends on.
    ///
    /// # Errors
    /// [`MemoryError::Busy`] if a part is not free; as for new memory.
    fn take_with_missing(&self, stream: &Stream, range: Range, tag: Tag) -> Result<StreamDeps> {
        let busy = MemoryError::Busy { address: range.start };
        let pool = self.open_pool()?;
        let grid = self.grid();
        let (missing, taken) = {
            let ranges = &mut self.state().slots.ranges;
            let slots = grid.slots(range);
            let missing: Vec<u64> = slots.filter(|slot| !ranges.claimed.contains(slot)).collect();
            let free = ranges.free.iter().filter_map(|(free, _)| common(free, range));
            let free: Vec<Range> = free.collect();
            let added = missing.iter().filter_map(|&slot| common(grid.slot_range(slot), range));
            if free.iter().copied().chain(added).map(|part| part.len).sum::<u64>() < range.len {
                return Err(busy);
            }
            ranges.claimed.extend(&missing);
            // Taken first, since a shortage gives back what is free.
            let take = |part| ranges.free.take(part).map(|deps| (part, deps));
            (missing, free.into_iter().filter_map(take).collect::<Vec<_>>())
        };
        let backed = pool.back_slots(&self.span, stream.timeline(), tag, &missing, None);
        if let Ok(new) = backed {
            let added: Vec<Range> = missing.iter().map(|&slot| grid.slot_range(slot)).collect();
            self.record_growth(&added, new);
        }
        let ranges = &mut self.state().slots.ranges;
        taken.into_iter().for_each(|(part, deps)| ranges.free.add(part, deps));
        if let Err(error) = backed {
            ranges.unclaim(&missing);
            return Err(error);
        }
        for &slot in &missing {
            ranges.free.add(grid.slot_range(slot), StreamDeps::new());
        }
        ranges.free.take(range).ok_or(busy)
    }

    /// Allocates a block in free memory, for work of `stream` that is not captured. Prefers memory
    /// whose work is done, and else orders the stream on the device after that work. Returns `None`
    /// if no free range is large enough, if the stream captures, or if launches that are not
    /// recorded may write free memory.
    pub(crate) fn allocate_free(
        self: &Arc<Self>,
        stream: &Stream,
        request: Request,
    ) -> Result<Option<Block>> {
        let timeline = stream.timeline();
        check_stream_device(&*self.dedicated.driver, self.dedicated.device, timeline)?;
        let _operation = self.begin_operation()?;
        if self.state().has_untracked_launches || timeline.is_capturing()? {
            return Ok(None);
        }
        let _ = self.poll_fences();
        let (bytes, align) = (request.size().next_multiple_of(BLOCK_ALIGN), request.alignment());
        let capture = Capture::UNANNOUNCED;
        let taken = {
            let free = &mut self.state().slots.ranges.free;
            let ready = |deps: &StreamDeps| capture.may_use(timeline, deps);
            let found = free.find_filled(bytes, align, ready);
            let found = found.or_else(|| free.find_filled(bytes, align, |_| true));
            found.and_then(|(_, range)| Some((range, free.take(range)?)))
        };
        let Some((range, deps)) = taken else { return Ok(None) };
        self.make_block_behind(stream, range, deps, &request).map(Some)
    }

    /// Wraps a taken range in a block for work that is not captured, and orders the stream on the
    /// device after the work that the range depends on. On failure the range is free again.
    fn make_block_behind(
        self: &Arc<Self>,
        stream: &Stream,
        range: Range,
        deps: StreamDeps,
        request: &Request,
    ) -> Result<Block> {
        let deps = self.order_behind(stream.timeline(), range, deps)?;
        self.make_eager_block(stream, range, request, Capture::UNANNOUNCED)
            .inspect_err(|_| self.state().slots.ranges.free.add(range, deps))
    }

    /// Returns whether these addresses are reserved for this memory.
    fn contains(&self, address: u64, bytes: u64) -> bool {
        let (start, end) = (self.span.address, address.checked_add(bytes));
        start <= address && end.is_some_and(|end| end <= start + self.span.bytes)
    }
}
