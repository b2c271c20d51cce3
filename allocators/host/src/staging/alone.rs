//! Beginning a transfer: on which stream its operands are ordered, and those that the calling thread makes by itself.
//!
//! Waking a worker takes as long as a thread takes to copy some hundred KiB, and an order between two streams as long as the
//! driver takes to queue ten copies. So a short transfer is one copy on the operand's home stream, where program order is
//! all the order there is, and a wait:
//!
//! ```text
//!   to the device          memory ──► home stream           up to `direct`: the driver copies it into its own buffers
//!                          memory ──► slot ──► home stream  up to `alone`
//!   to the host            home stream ──► slot ──► memory
//! ```
#![expect(unsafe_code, reason = "queues copies, and copies between raw addresses")]

use super::{
    Front, Shared, StageError,
    lane::{Lane, Lanes, settle},
    parts::Parts,
    permit::Permit,
    plan::{Far, HostSide, Move, Plan, Way},
    pump::queue_moves,
    stores::{self, Stores},
    transfer::Transfer,
};
use aquifer_core::{MemoryError, Result as MemoryResult};
use aquifer_driver::{HostAccess, RawStream};
use aquifer_stream::Timeline;
use std::{ptr::NonNull, sync::Arc};

/// Bytes that go from a slot to the device at once, of a transfer of so many: while they are on their way the thread copies
/// the next. One more copy costs as much time as 50 KiB take on the link.
fn piece(total: u64) -> usize {
    (total / 4).clamp(128 << 10, 256 << 10) as usize
}

/// Bytes from which on the thread writes past its caches what it sends. It writes slower so, and the link, which need not
/// ask the caches for what they have, is faster by more: 64 KiB arrive in 13 µs, and through the caches in 15; 16 KiB in
/// 14, and through the caches in 10.
const PAST_CACHES: u64 = 32 << 10;

type Result<T> = std::result::Result<T, StageError>;

impl Shared {
    fn check(&self, parts: &Parts) -> MemoryResult<()> {
        match parts.range {
            Some(range) if range.device != self.device => {
                Err(MemoryError::WrongDevice { expected: self.device, actual: range.device })
            }
            _ => Ok(()),
        }
    }

    /// Orders operands for a stream: their home, where they have one that does not capture, else one of the stager's own.
    fn front(
        &self,
        home: Option<RawStream>,
        order: impl FnOnce(RawStream) -> MemoryResult<()>,
    ) -> MemoryResult<Front> {
        let home = home.and_then(|raw| self.streams.timeline(raw, None).ok());
        if let Some(home) = home.filter(|home| !home.fences_at_once())
            && !home.is_capturing()?
        {
            order(home.raw())?;
            return Ok(Front::Home(home));
        }
        let road = self.take_road()?;
        match order(road.raw()) {
            Ok(()) => Ok(Front::Own(road)),
            Err(error) => {
                self.give_road(&road);
                Err(error)
            }
        }
    }

    /// Makes a transfer whose operands have been ordered, and does not begin it.
    ///
    /// # Safety
    /// 1. The memory that the parts name is readable or, where it is copied to, writable and nobody else's, the operands
    ///    keep their ranges and are lent to nobody else, and the source or sink is there, until the transfer is finished.
    pub(super) unsafe fn transfer(
        self: &Arc<Self>,
        parts: Parts,
        far: Option<Far>,
        permit: Permit,
        home: Option<RawStream>,
        order: impl FnOnce(RawStream) -> MemoryResult<()>,
    ) -> Result<Arc<Transfer>> {
        self.check(&parts)?;
        let (road, home) = match self.front(home, order)? {
            Front::Own(road) => (road, None),
            Front::Home(home) => {
                let road = self.take_road()?;
                // Events of earlier transfers are recorded again, once they are seen to have passed. What a refusal means
                // is told by the calls to come.
                let _looked = home.poll();
                // Now: what its user queues on the home stream later is nothing to wait for.
                if let Err(error) = road.timeline().wait_for(&home, home.open()) {
                    self.give_road(&road);
                    return Err(error.into());
                }
                (road, Some(home))
            }
        };
        let plan = Plan::new(parts.way, far, parts.parts, self.config.grain(parts.way, parts.total));
        Ok(Transfer::new(self, plan, road, home, permit))
    }

    /// Whether a transfer between memory and the device is so short that the calling thread makes it.
    pub(super) fn is_short(&self, way: Way, bytes: u64) -> bool {
        bytes <= self.direct(way).max(self.alone(way))
    }

    /// Bytes up to which the driver copies by itself.
    fn direct(&self, way: Way) -> u64 {
        match way {
            Way::Up => self.config.direct as u64,
            Way::Down => self.config.down_direct as u64,
        }
    }

    /// Bytes up to which the calling thread copies through a slot.
    fn alone(&self, way: Way) -> u64 {
        let alone = match way {
            Way::Up => self.config.alone,
            Way::Down => self.config.down_alone,
        };
        alone.min(self.config.slot) as u64
    }

    /// How the calling thread copies. What comes down it reads from its caches, and somebody will read it there.
    fn stores_alone(&self, parts: &Parts) -> Stores {
        let (said, auto) = match parts.way {
            Way::Up if parts.total >= PAST_CACHES => (self.config.stores, Stores::NonTemporal),
            Way::Up => (self.config.stores, Stores::Cached),
            Way::Down => (self.config.down_stores, Stores::Cached),
        };
        if said == Stores::Auto { auto } else { said }
    }

    /// Copies by this thread, through a slot or, where it is not to be or there is none that is pinned, through the driver.
    /// Blocks.
    ///
    /// # Safety
    /// 1. The memory that the parts name is readable or, where it is copied to, writable and nobody else's, and the operands
    ///    keep their ranges and are lent to nobody else, while this runs.
    pub(super) unsafe fn move_alone(
        &self,
        parts: &Parts,
        home: Option<RawStream>,
        order: impl FnOnce(RawStream) -> MemoryResult<()>,
    ) -> Result<()> {
        self.check(parts)?;
        let lanes = &self.side(parts.way).lanes;
        let lane = if (self.direct(parts.way) + 1..=self.alone(parts.way)).contains(&parts.total) {
            lanes.one_pinned()
        } else {
            None
        };
        let front = match self.front(home, order) {
            Ok(front) => front,
            Err(error) => {
                lane.into_iter().for_each(|lane| lanes.give(lane));
                return Err(error.into());
            }
        };
        let on = front.timeline();
        let (moved, settled) = match lane {
            // SAFETY: 1. the caller's. 2. the operands have just been ordered.
            Some(lane) => unsafe { through_slot(on, parts, lane, lanes, self.stores_alone(parts)) },
            // SAFETY: 1. the caller's. 2. the operands have just been ordered.
            None => unsafe { through_driver(on, parts) },
        };
        if let Front::Own(road) = &front
            && settled.is_ok()
        {
            self.give_road(road);
        }
        Ok(moved.and(settled)?)
    }
}

/// Copies by the driver, and waits for that. Answers with what came of both.
///
/// # Safety
/// 1. As [`Shared::move_alone`]. 2. The operands have been ordered for the stream.
unsafe fn through_driver(on: &Timeline, parts: &Parts) -> (MemoryResult<()>, MemoryResult<()>) {
    if parts.total == 0 {
        return (Ok(()), Ok(()));
    }
    let (driver, raw) = (on.driver(), on.raw());
    let queue = || {
        let _calling = on.calling()?;
        for part in parts.parts.iter().filter(|part| part.bytes > 0) {
            let HostSide::Memory(host) = part.host else { continue };
            // SAFETY: 1. the caller's, and nothing is returned before the copies are done. 2. the caller's.
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
    // Also after a refusal: some may have been queued.
    (queued, settle(on))
}

/// Copies through the first slot of a lane, and waits for that. Answers with what came of both.
///
/// # Safety
/// 1. As [`Shared::move_alone`]; the parts fit into a slot. 2. The operands have been ordered for the stream.
unsafe fn through_slot(
    on: &Arc<Timeline>,
    parts: &Parts,
    lane: Lane,
    lanes: &Lanes,
    stores: Stores,
) -> (MemoryResult<()>, MemoryResult<()>) {
    let mut lent = Lent { lane: Some(lane), on, lanes };
    let Some(lane) = lent.lane.as_mut() else { return (Ok(()), Ok(())) };
    let piece = piece(parts.total);
    let mut moves = std::mem::take(&mut lane.slots[0].moves);
    moves.clear();
    let mut at = 0;
    for part in parts.parts.iter().filter(|part| part.bytes > 0) {
        let end = at + part.bytes as usize;
        let (mut host, mut device) = (part.host, part.device);
        while at < end {
            let bytes = (end - at).min(piece - at % piece);
            moves.push(Move { host, device, at, bytes });
            (host, device, at) = (host.skip(bytes as u64), device + bytes as u64, at + bytes);
        }
    }
    let start = lane.slots[0].start();
    let (moved, settled) = match parts.way {
        Way::Up => {
            lane.slots[0].touch(on, 0..at, HostAccess::Write);
            let mut pieces = moves.chunk_by(|a, b| a.at / piece == b.at / piece);
            let queued = pieces.try_for_each(|piece| {
                // SAFETY: 1. the caller's: the parts are readable, and fit into the slot, which is this thread's; no copy
                // reads these bytes of it yet.
                unsafe { move_host(Way::Up, start, piece, stores) };
                // SAFETY: 1. the moves fit into the slot, where nobody touches them until they are known to be done. 2.
                // the caller's.
                unsafe { queue_moves(on, Way::Up, start, piece) }
            });
            // Also after a refusal: some may have been queued.
            (queued, settle(on))
        }
        Way::Down => {
            // SAFETY: 1. the moves fit into the slot, which is this thread's until they are known to be done. 2. the
            // caller's.
            let queued = unsafe { queue_moves(on, Way::Down, start, &moves) };
            // Also after a refusal: some may have been queued.
            let settled = settle(on);
            if settled.is_ok() && queued.is_ok() {
                lane.slots[0].touch(on, 0..at, HostAccess::Read);
                // SAFETY: 1. the caller's: the parts are writable, and nobody else's; no copy touches the slot any more.
                unsafe { move_host(Way::Down, start, &moves, stores) };
            }
            (queued, settled)
        }
    };
    lane.slots[0].moves = moves;
    if settled.is_ok() {
        lent.lane.take().into_iter().for_each(|lane| lanes.give(lane));
    }
    (moved, settled)
}

/// Copies between a slot that begins at `start` and memory.
///
/// # Safety
/// 1. The moves lie in the slot. Their memory is readable, or writable and nobody else's; so is the slot.
unsafe fn move_host(way: Way, start: NonNull<u8>, moves: &[Move], stores: Stores) {
    for one in moves {
        let HostSide::Memory(host) = one.host else { continue };
        // SAFETY: 1. the caller's.
        let slot = unsafe { start.add(one.at) };
        let (to, from) = if way == Way::Up { (slot, host) } else { (host, slot) };
        // SAFETY: 1. and 3. the caller's. 2. a slot is nothing that is borrowed elsewhere.
        unsafe { stores::copy(to.as_ptr(), from.as_ptr(), one.bytes, stores) };
    }
}

/// A lane whose first slot is used on another stream. Dropped with it, that stream is waited for first.
struct Lent<'a> {
    lane: Option<Lane>,
    on: &'a Arc<Timeline>,
    lanes: &'a Lanes,
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
