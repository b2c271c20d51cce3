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
        let deps = self.order_behind(timeline, range, deps)?;
        self.make_eager_block(stream, range, &request, Capture::UNANNOUNCED)
            .inspect_err(|_| self.state().slots.ranges.free.add(range, deps))
    }

    /// Returns the address of a free range for a valid request, for work of `stream` that is not
    /// captured. Prefers memory whose work is done. Returns `None` if there is none, if the stream
    /// captures, or if launches that are not recorded may write free memory.
    pub(crate) fn find_free(&self, stream: &Stream, request: &Request) -> Result<Option<u64>> {
        let timeline = stream.timeline();
        let _ = self.poll_fences();
        if timeline.is_capturing()? {
            return Ok(None);
        }
        let state = self.state();
        let (bytes, align) = (request.size().next_multiple_of(BLOCK_ALIGN), request.alignment());
        let find = |ready: &dyn Fn(&StreamDeps) -> bool| {
            state.slots.ranges.free.find_filled(bytes, align, ready)
        };
        let found = find(&|deps| Capture::UNANNOUNCED.may_use(timeline, deps));
        let found = found.or_else(|| find(&|_| true)).filter(|_| !state.has_untracked_launches);
        Ok(found.map(|(_, range)| range.start))
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

    /// Returns whether these addresses are reserved for this memory.
    fn contains(&self, address: u64, bytes: u64) -> bool {
        let (start, end) = (self.span.address, address.checked_add(bytes));
        start <= address && end.is_some_and(|end| end <= start + self.span.bytes)
    }
}
