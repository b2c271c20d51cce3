//! Movement of chunks through the slots of a lane.
//!
//! ```text
//!   to the device, two slots                          to the host, two slots
//!   CPU     fill 0 │ fill 1 │ fill 0 │ fill 1         stream   copy 0 │ copy 1 │ copy 0 │ copy 1
//!   stream         │ copy 0 │ copy 1 │ copy 0         CPU             │ empty 0│ empty 1│ empty 0
//! ```
//!
//! An event follows the copies of each slot. The CPU touches the slot again only after the event
//! has completed. One worker fills slots at a fifth of the speed of the link, so all workers
//! together keep it busy.
#![expect(unsafe_code, reason = "queues copies, and copies between raw addresses")]

use super::{
    StageError,
    lane::Lane,
    plan::{Cursor, Direction, Endpoint, HostEnd, Move},
    stores::{self, Stores},
    transfer::Transfer,
};
use aquifer_core::{MemoryError, Result as MemoryResult, panics::contain};
use aquifer_driver::HostAccess;
use aquifer_stream::Timeline;
use std::{io, ptr::NonNull, sync::Arc};

type Result<T> = std::result::Result<T, StageError>;

/// Queues the copies between a slot that begins at `start` and the device. Moves that are
/// contiguous on both sides are merged into one copy.
///
/// # Safety
/// 1. The moves lie in the slot. The slot and the moves' ranges on the device stay alive until the
///    copies are done, and the slot is not touched until then. 2. The ranges have been ordered for
///    the stream.
pub(super) unsafe fn queue_moves(
    on: &Timeline,
    direction: Direction,
    start: NonNull<u8>,
    moves: &[Move],
) -> MemoryResult<()> {
    let (driver, raw) = (on.driver(), on.raw());
    let joined =
        |a: &Move, b: &Move| a.at + a.bytes == b.at && a.device + a.bytes as u64 == b.device;
    let _calling = on.calling()?;
    moves.chunk_by(joined).try_for_each(|run| {
        let (first, bytes) = (run[0], run.iter().map(|item| item.bytes).sum());
        // SAFETY: 1. guaranteed by the caller.
        let at = unsafe { start.add(first.at) };
        // SAFETY: 1. and 2. guaranteed by the caller.
        let copied = unsafe {
            match direction {
                Direction::Upload => driver.copy_to_device(raw, first.device, at, bytes),
                Direction::Download => driver.copy_to_host(raw, at, first.device, bytes),
            }
        };
        copied.map_err(|error| MemoryError::driver(raw.device(), error))
    })
}

impl Transfer {
    /// Moves chunks to the device until none is left to claim.
    pub(super) fn upload(&self, lane: &mut Lane) -> Result<()> {
        let mut slot = 0;
        while let Some(chunk) = self.claim() {
            let mut cursor = self.plan.chunk(chunk);
            while !cursor.is_at_end() && !self.is_stopped() {
                self.wait_uploaded(lane, slot)?;
                self.fill(lane, slot, &mut cursor)?;
                self.queue(lane, slot);
                slot = (slot + 1) % lane.slots.len();
            }
        }
        // In the order in which they were queued.
        for later in 0..lane.slots.len() {
            self.wait_uploaded(lane, (slot + later) % lane.slots.len())?;
        }
        Ok(())
    }

    /// Waits until the content of a slot is on the device.
    fn wait_uploaded(&self, lane: &mut Lane, slot: usize) -> Result<()> {
        if lane.slots[slot].is_busy() {
            lane.wait(slot, self.transfer_stream.timeline())?;
            self.add_done(lane.slots[slot].bytes);
        }
        Ok(())
    }

    /// Moves chunks to the host until none is left to claim.
    pub(super) fn download(&self, lane: &mut Lane) -> Result<()> {
        let slots = lane.slots.len();
        let mut cursor: Option<Cursor> = None;
        // `full` slots, starting with `first`, carry bytes.
        let (mut first, mut full) = (0, 0);
        loop {
            while full < slots && !self.is_stopped() {
                let chunk = match cursor.as_mut() {
                    Some(cursor) if !cursor.is_at_end() => cursor,
                    _ => match self.claim() {
                        Some(chunk) => cursor.insert(self.plan.chunk(chunk)),
                        None => break,
                    },
                };
                let slot = (first + full) % slots;
                self.load(lane, slot, chunk);
                self.queue(lane, slot);
                full += 1;
            }
            if full == 0 {
                return Ok(());
            }
            lane.wait(first, self.transfer_stream.timeline())?;
            if !self.is_stopped() {
                self.empty(lane, first)?;
                self.add_done(lane.slots[first].bytes);
            }
            (first, full) = ((first + 1) % slots, full - 1);
        }
    }

    /// Decides what a slot carries next. If the source panics in `alignment`, the alignment is 1. A
    /// panic in a read is reported.
    fn load(&self, lane: &mut Lane, slot: usize, cursor: &mut Cursor) {
        let align = match self.plan.endpoint {
            Some(Endpoint::Source(source)) => {
                // SAFETY: 1. the source outlives the transfer, which has not finished.
                contain(|| unsafe { source.as_ref() }.alignment()).unwrap_or(1)
            }
            _ => 1,
        };
        let align = if align.is_power_of_two() { align.min(4096) } else { 1 };
        let slot = &mut lane.slots[slot];
        slot.bytes = self.plan.load(cursor, slot.capacity(), align, &mut slot.moves);
    }

    /// Fills a slot that no copy reads.
    fn fill(&self, lane: &mut Lane, slot: usize, cursor: &mut Cursor) -> Result<()> {
        self.load(lane, slot, cursor);
        lane.report_access(slot, self.transfer_stream.timeline(), HostAccess::Write);
        let slot = &mut lane.slots[slot];
        let start = slot.start();
        for item in &slot.moves {
            // SAFETY: 1. `load` only creates moves inside the slot.
            let to = unsafe { start.add(item.at) };
            match item.host {
                HostEnd::Memory(from) => {
                    // SAFETY: 1. the part is readable until the transfer is finished, and the slot
                    // contains the move. 2. slot memory is never borrowed elsewhere. 3. the part is
                    // borrowed for reading, so it is not written, and the slot belongs to this
                    // lane.
                    unsafe {
                        stores::copy(to.as_ptr(), from.as_ptr(), item.bytes, self.stores());
                    }
                }
                HostEnd::File(offset) => {
                    // SAFETY: 1. initialised bytes inside the slot, to which this lane has
                    // exclusive access.
                    let into = unsafe { NonNull::slice_from_raw_parts(to, item.bytes).as_mut() };
                    self.read(offset, into)?;
                }
            }
        }
        Ok(())
    }

    /// Fills `into` from the source.
    fn read(&self, mut offset: u64, mut into: &mut [u8]) -> Result<()> {
        let Some(Endpoint::Source(source)) = self.plan.endpoint else { return Ok(()) };
        // SAFETY: 1. the source outlives the transfer, which has not finished.
        let source = unsafe { source.as_ref() };
        while !into.is_empty() {
            let read = contain(|| source.read_at(offset, into));
            match read {
                Some(Ok(0)) => {
                    return Err(StageError::SourceEnded { offset, missing: into.len() as u64 });
                }
                Some(Ok(read)) => {
                    // A source may report more bytes than requested.
                    let read = read.min(into.len());
                    into = &mut into[read..];
                    offset += read as u64;
                }
                Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Some(Err(error)) => {
                    return Err(StageError::Source { offset, error: Arc::new(error) });
                }
                None => return Err(StageError::SourcePanicked { offset }),
            }
            if self.is_stopped() {
                return Err(StageError::Cancelled);
            }
        }
        Ok(())
    }

    /// Submits the copies between a slot and the device, with an event behind them. This thread or
    /// the current combiner queues them. The result is known when the slot is waited for.
    fn queue(&self, lane: &mut Lane, slot: usize) {
        let Some(combiner) = self.submissions.submit(lane.slots[slot].start_submission()) else {
            return;
        };
        let on = self.transfer_stream.timeline();
        while let Some(submission) = combiner.next() {
            // SAFETY: 1. `load` only creates moves inside the slot. The slot stays alive and unused
            // until the event behind the copies has completed: only then does its worker get it
            // back, and the worker does not leave before. The operands stay alive until the
            // transfer is finished, which is later. 2. the stream waits for the operands' earlier
            // uses, and their owners have lent them to the transfer.
            let queued = unsafe {
                queue_moves(on, self.plan.direction, submission.start, &submission.moves)
            };
            // Record an event after an error too, since some copies may have been queued.
            let epoch = on.open();
            let fenced = on.fence(epoch).map(drop);
            submission.complete(epoch, queued.and(fenced));
        }
    }

    fn stores(&self) -> Stores {
        let state = self.shared.direction_state(self.plan.direction);
        state.stores.resolve(self.plan.direction, self.plan.total(), state.slots, state.cache)
    }

    /// Copies the content of a slot, written by the device, to its destination.
    fn empty(&self, lane: &mut Lane, slot: usize) -> Result<()> {
        lane.report_access(slot, self.transfer_stream.timeline(), HostAccess::Read);
        let slot = &mut lane.slots[slot];
        let start = slot.start();
        for item in &slot.moves {
            // SAFETY: 1. `load` only creates moves inside the slot.
            let from = unsafe { start.add(item.at) };
            match item.host {
                HostEnd::Memory(to) => {
                    // SAFETY: 1. the part is writable until the transfer is finished, and the slot
                    // contains the move. 2. slot memory is never borrowed elsewhere. 3. the
                    // transfer has exclusive access to the part, and no copy touches the slot.
                    unsafe {
                        stores::copy(to.as_ptr(), from.as_ptr(), item.bytes, self.stores());
                    }
                }
                HostEnd::File(offset) => {
                    // SAFETY: 1. initialised bytes inside the slot, which is not written.
                    let bytes = unsafe { NonNull::slice_from_raw_parts(from, item.bytes).as_ref() };
                    self.write(offset, bytes)?;
                }
            }
        }
        Ok(())
    }

    /// Writes `from` to the sink.
    fn write(&self, mut offset: u64, mut from: &[u8]) -> Result<()> {
        let Some(Endpoint::Sink(sink)) = self.plan.endpoint else { return Ok(()) };
        // SAFETY: 1. the sink outlives the transfer, which has not finished.
        let sink = unsafe { sink.as_ref() };
        while !from.is_empty() {
            match contain(|| sink.write_at(offset, from)) {
                Some(Ok(0)) => {
                    let error = Arc::new(io::ErrorKind::WriteZero.into());
                    return Err(StageError::Sink { offset, error });
                }
                Some(Ok(written)) => {
                    let written = written.min(from.len());
                    from = &from[written..];
                    offset += written as u64;
                }
                Some(Err(error)) if error.kind() == io::ErrorKind::Interrupted => {}
                Some(Err(error)) => {
                    return Err(StageError::Sink { offset, error: Arc::new(error) });
                }
                None => return Err(StageError::SourcePanicked { offset }),
            }
            if self.is_stopped() {
                return Err(StageError::Cancelled);
            }
        }
        Ok(())
    }
}
