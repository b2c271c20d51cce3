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
    stores,
    submit::{Answer, Submission},
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
                self.copy_slot(lane, first, HostAccess::Read)?;
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
        self.copy_slot(lane, slot, HostAccess::Write)
    }

    /// Copies the content of a slot to its destination, or from its source. No copy of the device
    /// touches it.
    fn copy_slot(&self, lane: &mut Lane, slot: usize, access: HostAccess) -> Result<()> {
        lane.report_access(slot, self.transfer_stream.timeline(), access);
        let slot = &mut lane.slots[slot];
        let (start, non_temporal) = (slot.start(), self.is_non_temporal());
        for item in &slot.moves {
            if let HostEnd::File(offset) = item.host {
                // SAFETY: 1. `load` only creates moves inside the slot. 2. initialised bytes, to
                // which this lane has exclusive access.
                let bytes = unsafe {
                    NonNull::slice_from_raw_parts(start.add(item.at), item.bytes).as_mut()
                };
                self.copy_file(offset, bytes)?;
            }
        }
        // SAFETY: 1. `load` only creates moves inside the slot, which belongs to this lane. The
        // parts are readable, or writable and not accessed by others, until the transfer is
        // finished.
        unsafe { copy_host(self.plan.direction, start, &slot.moves, non_temporal) };
        Ok(())
    }

    /// Reads `bytes` from the source, or writes them to the sink.
    fn copy_file(&self, mut offset: u64, mut bytes: &mut [u8]) -> Result<()> {
        let Some(endpoint) = self.plan.endpoint else { return Ok(()) };
        while !bytes.is_empty() {
            // SAFETY: 1. the source or sink outlives the transfer, which has not finished.
            let moved = contain(|| unsafe {
                match endpoint {
                    Endpoint::Source(source) => source.as_ref().read_at(offset, bytes),
                    Endpoint::Sink(sink) => sink.as_ref().write_at(offset, bytes),
                }
            });
            let failed = |error| match endpoint {
                Endpoint::Source(_) => StageError::Source { offset, error: Arc::new(error) },
                Endpoint::Sink(_) => StageError::Sink { offset, error: Arc::new(error) },
            };
            match (moved, endpoint) {
                (Some(Ok(0)), Endpoint::Source(_)) => {
                    return Err(StageError::SourceEnded { offset, missing: bytes.len() as u64 });
                }
                (Some(Ok(0)), Endpoint::Sink(_)) => {
                    return Err(failed(io::ErrorKind::WriteZero.into()));
                }
                (Some(Ok(moved)), _) => {
                    // A source may report more bytes than requested.
                    let moved = moved.min(bytes.len());
                    bytes = &mut bytes[moved..];
                    offset += moved as u64;
                }
                (Some(Err(error)), _) if error.kind() == io::ErrorKind::Interrupted => {}
                (Some(Err(error)), _) => return Err(failed(error)),
                (None, _) => return Err(StageError::SourcePanicked { offset }),
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
        let on = self.transfer_stream.timeline();
        self.submissions.submit(lane.slots[slot].start_submission(), |submission| {
            let Submission { start, moves, answer } = submission;
            // SAFETY: 1. `load` only creates moves inside the slot. The slot stays alive and unused
            // until the event behind the copies has completed: only then does its worker get it
            // back, and the worker does not leave before. The operands stay alive until the
            // transfer is finished, which is later. 2. the stream waits for the operands' earlier
            // uses, and their owners have lent them to the transfer.
            let queued = unsafe { queue_moves(on, self.plan.direction, start, &moves) };
            // Record an event after an error too, since some copies may have been queued.
            let epoch = on.open();
            let queued = queued.and(on.fence(epoch).map(drop)).map_err(StageError::Memory);
            // The slot's worker waits for the answer.
            let _ = answer.send(Answer { moves, epoch, queued });
        });
    }

    fn is_non_temporal(&self) -> bool {
        let state = self.shared.direction_state(self.plan.direction);
        let (direction, total) = (self.plan.direction, self.plan.total());
        stores::is_non_temporal(direction, total, state.slots, state.cache)
    }
}

/// Copies between a slot that begins at `start` and host memory.
///
/// # Safety
/// 1. The moves lie in the slot. The source, slot or host memory, is readable. The destination is
///    writable and not accessed by others.
pub(super) unsafe fn copy_host(
    direction: Direction,
    start: NonNull<u8>,
    moves: &[Move],
    non_temporal: bool,
) {
    for item in moves {
        let HostEnd::Memory(host) = item.host else { continue };
        // SAFETY: 1. guaranteed by the caller.
        let slot = unsafe { start.add(item.at) };
        let (to, from) = if direction == Direction::Upload { (slot, host) } else { (host, slot) };
        // SAFETY: 1. and 3. guaranteed by the caller. 2. slot memory is never borrowed elsewhere.
        unsafe { stores::copy(to.as_ptr(), from.as_ptr(), item.bytes, non_temporal) };
    }
}
