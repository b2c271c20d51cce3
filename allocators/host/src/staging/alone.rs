//! The start of a transfer: the stream on which its operands are ordered, and transfers that the
//! calling thread makes itself.
//!
//! Waking a worker takes as long as copying some hundred KiB on one thread. A dependency between
//! two streams costs the driver as much as queueing ten copies. So a short transfer is one copy on
//! the operand's home stream, where program order is sufficient, and one wait:
//!
//! ```text
//!   to the device          memory ──► home stream           up to `direct`: the driver copies it into its own buffers
//!                          memory ──► slot ──► home stream  up to `alone`
//!   to the host            home stream ──► slot ──► memory
//! ```
#![expect(unsafe_code, reason = "queues copies, and copies between raw addresses")]

use super::{
    Front, Shared, StageError,
    lane::{Lane, Lanes, Slot},
    parts::Parts,
    permit::Permit,
    plan::{Far, HostSide, Move, Part, Plan, Way},
    pump::queue_moves,
    settle::{Waits, settle, settle_or_abort},
    stores::{self, Stores},
    transfer::Transfer,
};
use aquifer_core::{MemoryError, Result as MemoryResult};
use aquifer_driver::{HostAccess, RawStream};
use aquifer_stream::Timeline;
use std::{ptr::NonNull, sync::Arc};

/// A remainder of at most this many bytes is not split. An additional copy costs as much time as 50
/// KiB on the link.
const AT_ONCE: usize = 96 << 10;

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
fn cuts(way: Way, total: usize) -> Vec<usize> {
    let (mut left, mut cuts) = (total, Vec::new());
    while left > AT_ONCE {
        left -= left / 3 * 2 / PAGE * PAGE;
        cuts.push(left);
    }
    match way {
        Way::Up => cuts.iter_mut().for_each(|left| *left = total - *left),
        Way::Down => cuts.reverse(),
    }
    cuts
}

/// Cuts are multiples of this from one end, so that copies begin at a cache line.
const PAGE: usize = 4096;

/// Bytes from which the thread uses non-temporal stores for uploads.
///
/// These stores are slower for the thread. The link gains more, because it need not snoop the
/// caches. For shorter transfers, cached stores are faster.
const PAST_CACHES: u64 = 32 << 10;

/// The same bound for downloads. Shorter downloads are faster with cached stores.
const PAST_CACHES_DOWN: u64 = 512 << 10;

type Result<T> = std::result::Result<T, StageError>;

impl Shared {
    fn check(&self, parts: &Parts) -> MemoryResult<()> {
        self.here()?;
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

    /// Orders operands for a stream: their home stream if they have one that is not capturing,
    /// otherwise a stream of the stager.
    fn front(
        &self,
        home: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> MemoryResult<Front> {
        let home = home.and_then(|raw| self.streams.timeline(raw, None).ok());
        if let Some(home) = home.filter(|home| !home.fences_at_once())
            && !home.is_capturing()?
        {
            order(&home)?;
            return Ok(Front::Home(home));
        }
        let road = self.take_road()?;
        match order(road.timeline()) {
            Ok(()) => Ok(Front::Own(road)),
            Err(error) => {
                self.give_road(&road);
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
        far: Option<Far>,
        permit: Permit,
        home: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<Arc<Transfer>> {
        self.check(&parts)?;
        let (road, home) = match self.front(home, order)? {
            Front::Own(road) => (road, None),
            Front::Home(home) => {
                let road = self.take_road()?;
                // Events of earlier transfers are recycled once they are known to have completed. A
                // later call reports any error.
                let _looked = home.poll();
                // The dependency is recorded now, so that work queued later on the home stream is
                // not waited for.
                if let Err(error) = road.timeline().wait_for(&home, home.open()) {
                    self.give_road(&road);
                    return Err(error.into());
                }
                (road, Some(home))
            }
        };
        let plan =
            Plan::new(parts.way, far, parts.parts, self.config.grain(parts.way, parts.total));
        Ok(Transfer::new(self, plan, road, home, permit))
    }

    /// Returns whether a transfer between memory and the device is short enough for the calling
    /// thread to make it itself.
    pub(super) fn is_short(&self, way: Way, bytes: u64) -> bool {
        bytes <= self.direct(way).max(self.alone(way))
    }

    /// Returns the number of bytes up to which the driver copies directly.
    fn direct(&self, way: Way) -> u64 {
        match way {
            Way::Up => self.config.direct as u64,
            Way::Down => self.config.down_direct as u64,
        }
    }

    /// Returns the number of bytes up to which the calling thread copies through a slot.
    fn alone(&self, way: Way) -> u64 {
        let alone = match way {
            Way::Up => self.config.alone,
            Way::Down => self.config.down_alone,
        };
        alone.min(self.config.slot) as u64
    }

    /// Returns the kind of stores that the calling thread uses. Downloaded data is rarely read from
    /// its caches soon.
    fn stores_alone(&self, parts: &Parts) -> Stores {
        let (said, auto) = match parts.way {
            Way::Up if parts.total >= PAST_CACHES => (self.config.stores, Stores::NonTemporal),
            Way::Up => (self.config.stores, Stores::Cached),
            Way::Down if parts.total >= PAST_CACHES_DOWN => {
                (self.config.down_stores, Stores::NonTemporal)
            }
            Way::Down => (self.config.down_stores, Stores::Cached),
        };
        if said == Stores::Auto { auto } else { said }
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
    pub(super) unsafe fn move_alone(
        &self,
        parts: &Parts,
        home: Option<RawStream>,
        order: impl FnOnce(&Arc<Timeline>) -> MemoryResult<()>,
    ) -> Result<()> {
        self.check(parts)?;
        let lanes = &self.side(parts.way).lanes;
        let direct = parts.total <= self.direct(parts.way);
        let wanted = parts.total <= self.alone(parts.way) && (!direct || self.waits.want_word());
        let lane = if wanted { lanes.one_pinned() } else { None };
        let front = match self.front(home, order) {
            Ok(front) => front,
            Err(error) => {
                lane.into_iter().for_each(|lane| lanes.give(lane));
                return Err(error.into());
            }
        };
        let on = front.timeline();
        let mut lent = Lent { lane, on, lanes };
        let slots = lent.lane.as_mut().map(|lane| &mut lane.slots[..]);
        let (moved, settled) = match slots {
            Some([slot, others @ ..]) if !direct => {
                // SAFETY: 1. guaranteed by the caller, and no part is longer than a slot. 2. the
                // operands have just been ordered.
                unsafe {
                    through_slot(
                        on,
                        &self.waits,
                        parts,
                        slot,
                        others.first_mut(),
                        self.stores_alone(parts),
                    )
                }
            }
            // SAFETY: 1. guaranteed by the caller. 2. the operands have just been ordered.
            slots => unsafe {
                through_driver(on, &self.waits, parts, slots.and_then(<[_]>::first_mut))
            },
        };
        match &settled {
            Ok(()) => lent.give(),
            Err(MemoryError::Capturing { .. }) => lent.lose(),
            // The drop of `lent` waits for the stream.
            Err(_) => {}
        }
        if let Front::Own(road) = &front
            && settled.is_ok()
        {
            self.give_road(road);
        }
        Ok(moved.and(settled)?)
    }
}

/// Copies through the driver and waits, by a word in a slot if one is given. Returns the results of
/// the copies and of the wait.
///
/// # Safety
/// 1. As [`Shared::move_alone`]. 2. The operands have been ordered for the stream.
unsafe fn through_driver(
    on: &Timeline,
    waits: &Waits,
    parts: &Parts,
    word: Option<&mut Slot>,
) -> (MemoryResult<()>, MemoryResult<()>) {
    if parts.total == 0 {
        return (Ok(()), Ok(()));
    }
    let (driver, raw) = (on.driver(), on.raw());
    let queue = || {
        let _calling = on.calling()?;
        for part in parts.parts.iter().filter(|part| part.bytes > 0) {
            let HostSide::Memory(host) = part.host else { continue };
            // SAFETY: 1. guaranteed by the caller, and this function does not return before the
            // copies are done. 2. guaranteed by the caller.
            let copied = unsafe {
                match parts.way {
                    Way::Up => driver.copy_to_device(raw, part.device, host, part.bytes as usize),
                    Way::Down => driver.copy_to_host(raw, host, part.device, part.bytes as usize),
                }
            };
            copied.map_err(|error| MemoryError::driver(raw.device(), error))?;
        }
        Ok(())
    };
    let queued = queue();
    // Wait after an error too, since some copies may have been queued. The memory is borrowed, and
    // the driver accesses it directly.
    (queued, waits.settle(word, on, settle_or_abort))
}

/// Copies through a slot and waits, by a word in another slot if one is given. Returns the results
/// of the copies and of the wait.
///
/// # Safety
/// 1. As [`Shared::move_alone`]; the parts fit into a slot. 2. The operands have been ordered for
///    the stream.
unsafe fn through_slot(
    on: &Timeline,
    waits: &Waits,
    parts: &Parts,
    slot: &mut Slot,
    word: Option<&mut Slot>,
    stores: Stores,
) -> (MemoryResult<()>, MemoryResult<()>) {
    let cuts = cuts(parts.way, parts.total as usize);
    let mut moves = std::mem::take(&mut slot.moves);
    let at = cut_into(&mut moves, &parts.parts, &cuts);
    let piece_of = |one: &Move| cuts.partition_point(|&cut| cut <= one.at);
    let mut pieces = moves.chunk_by(|a, b| piece_of(a) == piece_of(b));
    let start = slot.start();
    let (moved, settled) = match parts.way {
        Way::Up => {
            slot.touch(on, 0..at, HostAccess::Write);
            let queued = pieces.try_for_each(|piece| {
                // SAFETY: 1. guaranteed by the caller: the parts are readable and fit into the
                // slot. This thread has exclusive use of the slot, and no copy reads these bytes of
                // it yet.
                unsafe { move_host(Way::Up, start, piece, stores) };
                // SAFETY: 1. the moves fit into the slot, which is not touched until they are known
                // to be done. 2. guaranteed by the caller.
                unsafe { queue_moves(on, Way::Up, start, piece) }
            });
            // Wait after an error too, since some copies may have been queued.
            (queued, waits.settle(word, on, settle))
        }
        Way::Down => {
            // An event follows each piece except the last. For the last piece, the stream is waited
            // for.
            let (mut points, mut queued) = (Vec::with_capacity(cuts.len()), Ok(()));
            for piece in pieces.clone() {
                // SAFETY: 1. the moves fit into the slot, which this thread uses exclusively until
                // they are known to be done. 2. guaranteed by the caller.
                queued = unsafe { queue_moves(on, Way::Down, start, piece) };
                if queued.is_err() {
                    break;
                }
                let epoch = on.open();
                if points.len() < cuts.len() && on.fence(epoch).is_ok() {
                    points.push(epoch);
                }
            }
            let mut empty = |piece: &[Move]| {
                let bytes = piece.first().map_or(0, |one| one.at)
                    ..piece.last().map_or(0, |one| one.at + one.bytes);
                slot.touch(on, bytes, HostAccess::Read);
                // SAFETY: 1. guaranteed by the caller: the parts are writable and not accessed by
                // others. No copy touches these bytes of the slot any more.
                unsafe { move_host(Way::Down, start, piece, stores) };
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
            let settled = waits.settle(word, on, settle);
            if settled.is_ok() && queued.is_ok() {
                pieces.for_each(empty);
            }
            (queued, settled)
        }
    };
    slot.moves = moves;
    (moved, settled)
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

/// Copies between a slot that begins at `start` and host memory.
///
/// # Safety
/// 1. The moves lie in the slot. The source, slot or host memory, is readable. The destination is
///    writable and not accessed by others.
unsafe fn move_host(way: Way, start: NonNull<u8>, moves: &[Move], stores: Stores) {
    for one in moves {
        let HostSide::Memory(host) = one.host else { continue };
        // SAFETY: 1. guaranteed by the caller.
        let slot = unsafe { start.add(one.at) };
        let (to, from) = if way == Way::Up { (slot, host) } else { (host, slot) };
        // SAFETY: 1. and 3. guaranteed by the caller. 2. slot memory is never borrowed elsewhere.
        unsafe { stores::copy(to.as_ptr(), from.as_ptr(), one.bytes, stores) };
    }
}

/// An optional lane whose slots are used on a stream. Its drop waits for that stream before it
/// returns the lane.
struct Lent<'a> {
    lane: Option<Lane>,
    on: &'a Arc<Timeline>,
    lanes: &'a Lanes,
}

impl Lent<'_> {
    /// Gives the lane back. No copy may touch it any more.
    fn give(&mut self) {
        self.lane.take().into_iter().for_each(|lane| self.lanes.give(lane));
    }

    /// Leaks the lane, since a graph may touch it on every launch.
    fn lose(&mut self) {
        self.lane.take().into_iter().for_each(|lane| self.lanes.lose(lane));
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        match settle(self.on) {
            Ok(()) => self.lanes.give(lane),
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
    fn pieces_are_few_and_only_a_short_one_is_waited_for_at_an_end() {
        for (kib, copies) in
            [(1, 1), (96, 1), (97, 2), (128, 2), (256, 2), (512, 3), (1024, 4), (4096, 5)]
        {
            let total = kib << 10;
            let up = cuts(Way::Up, total);
            assert_eq!(up.len() + 1, copies, "{kib} KiB: {up:?}");
            assert!(
                up.is_sorted_by(|a, b| a < b) && up.iter().all(|cut| cut % PAGE == 0),
                "{up:?}"
            );
            assert!(total - up.last().unwrap_or(&0) <= AT_ONCE);
            let down = cuts(Way::Down, total);
            let mirrored: Vec<_> = down.iter().rev().map(|cut| total - cut).collect();
            assert_eq!(mirrored, up, "the shortest first");
        }
    }

    #[test]
    fn parts_are_cut_where_a_piece_ends_and_nowhere_else() {
        let host = |at| {
            HostSide::Memory(NonNull::without_provenance(std::num::NonZeroUsize::new(at).unwrap()))
        };
        let part = |at, device, bytes| Part { host: host(at), device, bytes };
        let (mut moves, parts) =
            (Vec::new(), [part(100, 1, 10), part(500, 11, 0), part(900, 11, 20)]);
        assert_eq!(cut_into(&mut moves, &parts, &[4, 10, 25]), 30);
        let cut: Vec<_> = moves.iter().map(|one| (one.at, one.bytes, one.device)).collect();
        assert_eq!(cut, [(0, 4, 1), (4, 6, 5), (10, 15, 11), (25, 5, 26)]);
        assert!(matches!(moves[3].host, HostSide::Memory(at) if at.addr().get() == 915));
    }
}
