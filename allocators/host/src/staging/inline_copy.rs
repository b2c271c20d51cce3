//! The start of a transfer: the stream on which its operands are ordered, and transfers that the
//! calling thread makes itself.
//!
//! Waking a worker takes as long as copying some hundred KiB on one thread. A dependency between
//! two streams costs the driver as much as queueing ten copies. So a short transfer is one copy on
//! the operand's owner stream, where program order is sufficient, and one wait:
//!
//! ```text
//!   to the device          memory ──► owner stream           up to `direct`: the driver copies it into its own buffers
//!                          memory ──► slot ──► owner stream  up to `alone`
//!   to the host            owner stream ──► slot ──► memory
//! ```
#![expect(unsafe_code, reason = "queues copies, and copies between raw addresses")]

use super::{
    OrderingStream, StageError, StagerCore, check_process,
    lane::{Lane, Lanes, Slot, synchronize, synchronize_or_abort},
    parts::Parts,
    permit::Permit,
    plan::{Direction, Endpoint, HostEnd, Move, Part, TransferPlan},
    pump::{copy_host, queue_moves},
    transfer::Transfer,
};
use aquifer_core::{MemoryError, Result as MemoryResult};
use aquifer_driver::{HostAccess, RawStream};
use aquifer_stream::Timeline;
use std::sync::Arc;

/// A remainder of at most this many bytes is not split. An additional copy costs as much time as 50
/// KiB on the link.
const UNSPLIT_MAX: usize = 96 << 10;

/// Returns the ends of all pieces of a transfer of `total` bytes except the last.
///
/// While one piece is in flight, the thread copies the next. To the device, each piece is two
/// thirds of what is left. The link is three times as fast as the thread, so each piece has arrived
/// when the next is copied. Only the last piece, which is short, is waited for. To the host, the
/// shortest piece comes first.
///
/// ```text
///   to the device   copy ────────────┬──────┬───┬─┐          to the host   link ─┬───┬──────┐
///                   link             └──────────┴────┴──┴┘                 copy  └──┴─────┴────────────
/// ```
fn cuts(direction: Direction, total: usize) -> Vec<usize> {
    let (mut left, mut cuts) = (total, Vec::new());
    while left > UNSPLIT_MAX {
        left -= left / 3 * 2 / PAGE * PAGE;
        cuts.push(left);
    }
    match direction {
        Direction::Upload => cuts.iter_mut().for_each(|left| *left = total - *left),
        Direction::Download => cuts.reverse(),
    }
    cuts
}

/// Cuts are multiples of this from one end, so that copies begin at a cache line.
const PAGE: usize = 4096;

/// Bytes from which the thread uses non-temporal stores for uploads.
///
/// These stores are slower for the thread. The link gains more, because it need not snoop the
/// caches. For shorter transfers, cached stores are faster.
const NON_TEMPORAL_UPLOAD: u64 = 32 << 10;

/// The same bound for downloads. Shorter downloads are faster with cached stores.
const NON_TEMPORAL_DOWNLOAD: u64 = 512 << 10;

type Result<T> = std::result::Result<T, StageError>;

impl StagerCore {
    fn check(&self, parts: &Parts) -> MemoryResult<()> {
        check_process()?;
        match parts.range {
            Some(range) if range.device != self.device => {
                Err(MemoryError::WrongDevice { expected: self.device, actual: range.device })
            }
            _ => {
                match parts.machine.filter(|&machine| machine != self.streams.driver().machine()) {
                    Some(actual) => Err(MemoryError::OtherMachine {
                        expected: self.streams.driver().machine(),
                        actual,
                    }),
                    None => Ok(()),
                }
            }
        }
    }

    /// Orders operands for a stream: their owner stream if they have one that is not capturing,
    /// otherwise a stream of the stager.
    fn order_operands(
        &self,
        owner: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> MemoryResult<OrderingStream> {
        let owner = owner.and_then(|raw| self.streams.timeline(raw, None).ok());
        if let Some(owner) = owner.filter(|owner| !owner.fences_at_once())
            && !owner.is_capturing()?
        {
            order(&owner)?;
            return Ok(OrderingStream::Owner(owner));
        }
        let transfer_stream = self.acquire_stream()?;
        match order(transfer_stream.timeline()) {
            Ok(()) => Ok(OrderingStream::Leased(transfer_stream)),
            Err(error) => {
                self.release_stream(&transfer_stream);
                Err(error)
            }
        }
    }

    /// Creates a transfer whose operands have been ordered, but does not begin it.
    ///
    /// # Safety
    /// 1. Until the transfer is finished: the memory that the parts name is readable or, where it
    ///    is copied to, writable and not accessed by others, the operands keep their ranges and are
    ///    lent to no other user, and the source or sink is alive.
    pub(super) unsafe fn transfer(
        self: &Arc<Self>,
        parts: Parts,
        endpoint: Option<Endpoint>,
        permit: Permit,
        owner: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<Arc<Transfer>> {
        self.check(&parts)?;
        let (transfer_stream, owner) = match self.order_operands(owner, order)? {
            OrderingStream::Leased(transfer_stream) => (transfer_stream, None),
            OrderingStream::Owner(owner) => {
                let transfer_stream = self.acquire_stream()?;
                // Events of earlier transfers are recycled once they are known to have completed. A
                // later call reports any error.
                let _polled = owner.poll();
                // The dependency is recorded now, so that work queued later on the owner stream is
                // not waited for.
                if let Err(error) = transfer_stream.timeline().wait_for(&owner, owner.open()) {
                    self.release_stream(&transfer_stream);
                    return Err(error.into());
                }
                (transfer_stream, Some(owner))
            }
        };
        let plan = TransferPlan::new(
            parts.direction,
            endpoint,
            parts.parts,
            self.config.chunk_sizing(parts.direction, parts.total),
        );
        Ok(Transfer::new(self, plan, transfer_stream, owner, permit))
    }

    /// Returns whether a transfer between memory and the device is short enough for the calling
    /// thread to make it itself.
    pub(super) fn is_short(&self, direction: Direction, bytes: u64) -> bool {
        bytes <= self.direct_limit(direction).max(self.inline_limit(direction))
    }

    /// Returns the number of bytes up to which the driver copies directly.
    fn direct_limit(&self, direction: Direction) -> u64 {
        match direction {
            Direction::Upload => self.config.direct as u64,
            Direction::Download => self.config.down_direct as u64,
        }
    }

    /// Returns the number of bytes up to which the calling thread copies through a slot.
    fn inline_limit(&self, direction: Direction) -> u64 {
        let limit = match direction {
            Direction::Upload => self.config.alone,
            Direction::Download => self.config.down_alone,
        };
        limit.min(self.config.slot) as u64
    }

    /// Returns whether the calling thread uses non-temporal stores. Downloaded data is rarely read
    /// from its caches soon.
    fn is_inline_non_temporal(parts: &Parts) -> bool {
        parts.total
            >= match parts.direction {
                Direction::Upload => NON_TEMPORAL_UPLOAD,
                Direction::Download => NON_TEMPORAL_DOWNLOAD,
            }
    }

    /// Copies on the calling thread. Blocks.
    ///
    /// Copies through a slot. If the configuration excludes that, or no pinned slot is available,
    /// it copies through the driver.
    ///
    /// # Safety
    /// 1. While this runs: the memory that the parts name is readable or, where it is copied to,
    ///    writable and not accessed by others, and the operands keep their ranges and are lent to
    ///    no other user.
    pub(super) unsafe fn copy_inline(
        &self,
        parts: &Parts,
        owner: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<()> {
        self.check(parts)?;
        let lanes = &self.direction_state(parts.direction).lanes;
        let direct = parts.total <= self.direct_limit(parts.direction);
        let use_lane = !direct && parts.total <= self.inline_limit(parts.direction);
        let lane = if use_lane { lanes.acquire_pinned() } else { None };
        let ordering = match self.order_operands(owner, order) {
            Ok(ordering) => ordering,
            Err(error) => {
                lane.into_iter().for_each(|lane| lanes.release(lane));
                return Err(error.into());
            }
        };
        let on = ordering.timeline();
        let mut guard = InlineLaneGuard { lane, on, lanes };
        let slot = guard.lane.as_mut().and_then(|lane| lane.slots.first_mut());
        let (moved, synchronized) = match slot {
            // SAFETY: 1. guaranteed by the caller, and no part is longer than a slot. 2. the
            // operands have just been ordered.
            Some(slot) => unsafe {
                through_slot(on, parts, slot, Self::is_inline_non_temporal(parts))
            },
            // SAFETY: 1. guaranteed by the caller. 2. the operands have just been ordered.
            None => unsafe { through_driver(on, parts) },
        };
        match &synchronized {
            Ok(()) => guard.release(),
            Err(MemoryError::Capturing { .. }) => guard.leak(),
            // The drop of `guard` waits for the stream.
            Err(_) => {}
        }
        if let OrderingStream::Leased(transfer_stream) = &ordering
            && synchronized.is_ok()
        {
            self.release_stream(transfer_stream);
        }
        Ok(moved.and(synchronized)?)
    }
}

/// Copies through the driver and waits. Returns the results of the copies and of the wait.
///
/// # Safety
/// 1. As [`StagerCore::copy_inline`]. 2. The operands have been ordered for the stream.
unsafe fn through_driver(on: &Timeline, parts: &Parts) -> (MemoryResult<()>, MemoryResult<()>) {
    if parts.total == 0 {
        return (Ok(()), Ok(()));
    }
    let (driver, raw) = (on.driver(), on.raw());
    let queue = || {
        let _calling = on.calling()?;
        for part in parts.parts.iter().filter(|part| part.bytes > 0) {
            let HostEnd::Memory(host) = part.host else { continue };
            // SAFETY: 1. guaranteed by the caller, and this function does not return before the
            // copies are done. 2. guaranteed by the caller.
            let copied = unsafe {
                match parts.direction {
                    Direction::Upload => {
                        driver.copy_to_device(raw, part.device, host, part.bytes as usize)
                    }
                    Direction::Download => {
                        driver.copy_to_host(raw, host, part.device, part.bytes as usize)
                    }
                }
            };
            copied.map_err(|error| MemoryError::driver(raw.device(), error))?;
        }
        Ok(())
    };
    let queued = queue();
    // Wait after an error too, since some copies may have been queued. The memory is borrowed, and
    // the driver accesses it directly.
    (queued, synchronize_or_abort(on))
}

/// Copies through a slot and waits. Returns the results of the copies and of the wait.
///
/// # Safety
/// 1. As [`StagerCore::copy_inline`]; the parts fit into a slot. 2. The operands have been ordered
///    for the stream.
unsafe fn through_slot(
    on: &Timeline,
    parts: &Parts,
    slot: &mut Slot,
    non_temporal: bool,
) -> (MemoryResult<()>, MemoryResult<()>) {
    let cuts = cuts(parts.direction, parts.total as usize);
    let mut moves = std::mem::take(&mut slot.moves);
    let at = cut_into(&mut moves, &parts.parts, &cuts);
    let piece_of = |item: &Move| cuts.partition_point(|&cut| cut <= item.at);
    let mut pieces = moves.chunk_by(|a, b| piece_of(a) == piece_of(b));
    let start = slot.start();
    let (moved, synchronized) = match parts.direction {
        Direction::Upload => {
            slot.report_access(on, 0..at, HostAccess::Write);
            let queued = pieces.try_for_each(|piece| {
                // SAFETY: 1. guaranteed by the caller: the parts are readable and fit into the
                // slot. This thread has exclusive use of the slot, and no copy reads these bytes of
                // it yet.
                unsafe { copy_host(Direction::Upload, start, piece, non_temporal) };
                // SAFETY: 1. the moves fit into the slot, which is not touched until they are known
                // to be done. 2. guaranteed by the caller.
                unsafe { queue_moves(on, Direction::Upload, start, piece) }
            });
            // Wait after an error too, since some copies may have been queued.
            (queued, synchronize(on))
        }
        Direction::Download => {
            // An event follows each piece except the last. For the last piece, the stream is waited
            // for.
            let (mut points, mut queued) = (Vec::with_capacity(cuts.len()), Ok(()));
            for piece in pieces.clone() {
                // SAFETY: 1. the moves fit into the slot, which this thread uses exclusively until
                // they are known to be done. 2. guaranteed by the caller.
                queued = unsafe { queue_moves(on, Direction::Download, start, piece) };
                if queued.is_err() {
                    break;
                }
                let epoch = on.open();
                if points.len() < cuts.len() && on.fence(epoch).is_ok() {
                    points.push(epoch);
                }
            }
            let mut empty = |piece: &[Move]| {
                let bytes = piece.first().map_or(0, |item| item.at)
                    ..piece.last().map_or(0, |item| item.at + item.bytes);
                slot.report_access(on, bytes, HostAccess::Read);
                // SAFETY: 1. guaranteed by the caller: the parts are writable and not accessed by
                // others. No copy touches these bytes of the slot any more.
                unsafe { copy_host(Direction::Download, start, piece, non_temporal) };
            };
            // A piece that cannot be waited for by its event is copied after the wait for the whole
            // stream.
            for epoch in points {
                if queued.is_err() || !matches!(on.wait(epoch, None), Ok(true)) {
                    break;
                }
                pieces.next().into_iter().for_each(&mut empty);
            }
            // Wait after an error too, since some copies may have been queued.
            let synchronized = synchronize(on);
            if synchronized.is_ok() && queued.is_ok() {
                pieces.for_each(empty);
            }
            (queued, synchronized)
        }
    };
    slot.moves = moves;
    (moved, synchronized)
}

/// Fills `moves` with the content of a slot that holds `parts` end to end, split at `cuts`. Returns
/// the number of bytes.
fn cut_into(moves: &mut Vec<Move>, parts: &[Part], cuts: &[usize]) -> usize {
    moves.clear();
    let (mut at, mut cuts) = (0, cuts.iter().copied().peekable());
    for part in parts.iter().filter(|part| part.bytes > 0) {
        let end = at + part.bytes as usize;
        let (mut host, mut device) = (part.host, part.device);
        while at < end {
            while cuts.next_if(|&cut| cut <= at).is_some() {}
            let bytes = cuts.peek().map_or(end, |&cut| cut.min(end)) - at;
            moves.push(Move { host, device, at, bytes });
            (host, device, at) = (host.skip(bytes as u64), device + bytes as u64, at + bytes);
        }
    }
    at
}

/// An optional lane whose slots are used on a stream. Its drop waits for that stream before it
/// returns the lane.
struct InlineLaneGuard<'a> {
    lane: Option<Lane>,
    on: &'a Arc<Timeline>,
    lanes: &'a Lanes,
}

impl InlineLaneGuard<'_> {
    /// Gives the lane back. No copy may touch it any more.
    fn release(&mut self) {
        self.lane.take().into_iter().for_each(|lane| self.lanes.release(lane));
    }

    /// Leaks the lane, since a graph may touch it on every launch.
    fn leak(&mut self) {
        self.lane.take().into_iter().for_each(|lane| self.lanes.leak(lane));
    }
}

impl Drop for InlineLaneGuard<'_> {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        match synchronize(self.on) {
            Ok(()) => self.lanes.release(lane),
            Err(_) => {
                lane.slots.iter_mut().for_each(|slot| slot.mark_busy(self.on));
                self.lanes.discard(lane, self.on);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_is_cut_into_few_pieces_with_the_shortest_at_the_waiting_end() {
        for (kib, copies) in
            [(1, 1), (96, 1), (97, 2), (128, 2), (256, 2), (512, 3), (1024, 4), (4096, 5)]
        {
            let total = kib << 10;
            let up = cuts(Direction::Upload, total);
            assert_eq!(up.len() + 1, copies, "{kib} KiB: {up:?}");
            assert!(
                up.is_sorted_by(|a, b| a < b) && up.iter().all(|cut| cut % PAGE == 0),
                "{up:?}"
            );
            assert!(total - up.last().unwrap_or(&0) <= UNSPLIT_MAX);
            let down = cuts(Direction::Download, total);
            let mirrored: Vec<_> = down.iter().rev().map(|cut| total - cut).collect();
            assert_eq!(mirrored, up, "the shortest first");
        }
    }

    #[test]
    fn parts_are_cut_only_at_the_ends_of_pieces() {
        let host = |at| {
            HostEnd::Memory(std::ptr::NonNull::without_provenance(
                std::num::NonZeroUsize::new(at).unwrap(),
            ))
        };
        let part = |at, device, bytes| Part { host: host(at), device, bytes };
        let (mut moves, parts) =
            (Vec::new(), [part(100, 1, 10), part(500, 11, 0), part(900, 11, 20)]);
        assert_eq!(cut_into(&mut moves, &parts, &[4, 10, 25]), 30);
        let cut: Vec<_> = moves.iter().map(|item| (item.at, item.bytes, item.device)).collect();
        assert_eq!(cut, [(0, 4, 1), (4, 6, 5), (10, 15, 11), (25, 5, 26)]);
        assert!(matches!(moves[3].host, HostEnd::Memory(at) if at.addr().get() == 915));
    }
}
