//! A few slots, which one worker at a time has to itself.
#![expect(
    unsafe_code,
    reason = "tells the slots' elements plain, and gives pointers to their bytes out"
)]

use super::{
    StageError,
    plan::Move,
    settle::settle,
    submit::{Receipt, Submission},
};
use crate::{PinnedBuf, PinnedPool, pool::Keeper};
use aquifer_core::Result;
use aquifer_driver::HostAccess;
use aquifer_stream::{HostOwned, Point, Timeline};
use bytemuck::{Pod, Zeroable};
use std::{
    mem::ManuallyDrop,
    ops::Range,
    ptr::NonNull,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
};

/// What slots are made of, so that each begins with a page: direct reads of files ask for it.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; Page::BYTES]);

impl Page {
    const BYTES: usize = 4096;
}

// SAFETY: 1. all zeros are an array of bytes.
unsafe impl Zeroable for Page {}
// SAFETY: 1. an array of bytes as long as its alignment: no padding, and any bytes will do.
unsafe impl Pod for Page {}

/// A piece of pinned memory that bytes pass through.
pub(super) struct Slot {
    pages: PinnedBuf<Page>,
    /// What it carries, or carried last.
    pub(super) moves: Vec<Move>,
    /// Of what it carries.
    pub(super) bytes: u64,
    /// The end of the copies that are on their way between it and the device: an epoch of the
    /// stream that they are on.
    busy: Option<u64>,
    /// Its copies have been handed in, and it is not to be touched before the receipt says what
    /// came of that.
    handed_in: bool,
    receipt: Arc<Receipt>,
}

impl Slot {
    pub(super) fn room(&self) -> usize {
        self.pages.len() * Page::BYTES
    }

    /// Copies may be on their way that have no event behind them.
    pub(super) fn mark_busy(&mut self, on: &Timeline) {
        self.busy = Some(on.open());
    }

    pub(super) fn is_busy(&self) -> bool {
        self.handed_in || self.busy.is_some()
    }

    /// Its copies, for whoever queues them. It is busy from now on.
    pub(super) fn hand_in(&mut self) -> Submission {
        self.handed_in = true;
        Submission::new(self.start(), std::mem::take(&mut self.moves), self.receipt.clone())
    }

    /// Has it back if its copies have been handed in, when they have been queued on this stream.
    /// Blocks until then.
    ///
    /// # Errors
    /// What refused them; the slot is busy all the same, since some may have been queued.
    fn take_back(&mut self, on: &Timeline) -> std::result::Result<(), StageError> {
        if !self.handed_in {
            return Ok(());
        }
        let answer = self.receipt.wait();
        self.handed_in = false;
        self.moves = answer.moves;
        self.busy = Some(answer.epoch.unwrap_or_else(|| on.open()));
        answer.queued
    }

    /// Tells whoever checks it that the CPU touches some of its bytes.
    pub(super) fn touch(&mut self, on: &Timeline, bytes: Range<usize>, access: HostAccess) {
        if let Some(observer) = on.driver().observer() {
            let start = self.start().as_ptr() as u64;
            observer.host(start + bytes.start as u64, bytes.len() as u64, access);
        }
    }

    /// Its bytes. Nobody else's while no copy is on its way.
    pub(super) fn start(&mut self) -> NonNull<u8> {
        self.pages.bytes().cast()
    }
}

/// A few slots. None is busy while nobody has the lane.
pub(super) struct Lane {
    pub(super) slots: Vec<Slot>,
}

impl Lane {
    fn new(pool: &PinnedPool, slots: usize, bytes: usize) -> Result<Self> {
        let slot = || {
            let pages = pool.buffer(bytes.div_ceil(Page::BYTES))?;
            let receipt = Arc::new(Receipt::default());
            Ok(Slot { pages, moves: Vec::new(), bytes: 0, busy: None, handed_in: false, receipt })
        };
        Ok(Self { slots: (0..slots).map(|_| slot()).collect::<Result<_>>()? })
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.slots.iter().all(|slot| slot.pages.is_pinned())
    }

    /// Waits until the copies of a slot are done, which were queued on this stream or are about to
    /// be.
    ///
    /// # Errors
    /// What refused them, or the wait; the slot stays busy.
    pub(super) fn wait(
        &mut self,
        slot: usize,
        on: &Timeline,
    ) -> std::result::Result<(), StageError> {
        self.slots[slot].take_back(on)?;
        if let Some(epoch) = self.slots[slot].busy {
            on.wait(epoch, None)?;
            self.slots[slot].busy = None;
        }
        Ok(())
    }

    /// Tells whoever checks it that the CPU touches all that a slot carries.
    pub(super) fn touch(&mut self, slot: usize, on: &Timeline, access: HostAccess) {
        let slot = &mut self.slots[slot];
        let used = slot.moves.last().map_or(0, |last| last.at + last.bytes);
        slot.touch(on, 0..used, access);
    }

    /// Waits for everything that is on its way on this stream, after something has gone wrong.
    ///
    /// # Errors
    /// As [`settle`]. The slots stay busy, and the lane is to be [discarded](Lanes::discard).
    pub(super) fn settle(&mut self, on: &Timeline) -> Result<()> {
        // What refused them is told by whoever waits for the slot; here it is enough that no one
        // queues them any more.
        self.slots.iter_mut().for_each(|slot| drop(slot.take_back(on)));
        if self.slots.iter().any(Slot::is_busy) {
            settle(on)?;
            self.slots.iter_mut().for_each(|slot| slot.busy = None);
        }
        Ok(())
    }

    /// Gives the slots back to their pool, which keeps those with copies on their way until what
    /// has been queued on `behind` is known to be done: of a lost device, for ever.
    fn retire(mut self, behind: &Arc<Timeline>) {
        let held = self.slots.iter_mut().filter(|slot| slot.is_busy()).all(|slot| {
            let point = Point::ahead(behind);
            point.reached();
            slot.pages.defer(Arc::new(point)).is_ok()
        });
        if !held {
            // Nobody could say when they are free again, so they never are.
            let _leaked = ManuallyDrop::new(self);
        }
    }
}

/// The lanes of one direction. There are never more than were asked for; they are made when they
/// are first needed.
pub(super) struct Lanes {
    pool: PinnedPool,
    slots: usize,
    slot_bytes: usize,
    most: usize,
    state: Mutex<State>,
    /// A lane came back, or is gone.
    changed: Condvar,
}

struct State {
    idle: Vec<Lane>,
    /// Lanes there are, those about to be made included.
    made: usize,
    /// Threads that wait for one: waking nobody is a system call all the same.
    waiting: usize,
    /// Threads that are about to make one, for whom none of these is to be given up: with memory
    /// for one, they would go on giving and making.
    kept: usize,
}

impl Lanes {
    pub(super) fn new(pool: &PinnedPool, most: usize, slots: usize, slot_bytes: usize) -> Self {
        Self {
            pool: pool.clone(),
            slots,
            slot_bytes,
            most,
            state: Mutex::new(State { idle: Vec::new(), made: 0, waiting: 0, kept: 0 }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Makes lanes until there are `wanted`. Blocks while the pool grows.
    ///
    /// # Errors
    /// The pool's, if there is not even one; with fewer than wanted the work takes longer.
    pub(super) fn ensure(&self, wanted: usize) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                if state.made >= wanted.min(self.most) {
                    return Ok(());
                }
                state.made += 1;
            }
            let made = {
                let _kept = self.keep();
                Lane::new(&self.pool, self.slots, self.slot_bytes)
            };
            match made {
                Ok(lane) => self.give(lane),
                Err(error) => {
                    let left = self.forget_one();
                    return if left > 0 { Ok(()) } else { Err(error) };
                }
            }
        }
    }

    /// None of these goes back to the pool unasked while the answer lives.
    pub(super) fn keep(&self) -> Kept<'_> {
        self.lock().kept += 1;
        Kept(self)
    }

    /// A lane that nobody has now.
    pub(super) fn try_take(&self) -> Option<Lane> {
        self.lock().idle.pop()
    }

    /// A lane that nobody has now and that is pinned, made if it is the first. Blocks while the
    /// pool grows.
    pub(super) fn one_pinned(&self) -> Option<Lane> {
        let lane = match self.try_take() {
            Some(lane) => lane,
            None => {
                // Without one the driver copies, and says what is wrong.
                self.ensure(1).ok()?;
                self.try_take()?
            }
        };
        if lane.is_pinned() {
            return Some(lane);
        }
        self.give(lane);
        None
    }

    /// A lane, waited for while some other transfer has it, unless `given_up` says so, which is
    /// asked whenever [`Lanes::call`] was called. `None` also if there are none any more.
    pub(super) fn take(&self, given_up: impl Fn() -> bool) -> Option<Lane> {
        let mut state = self.lock();
        loop {
            if given_up() || (state.idle.is_empty() && state.made == 0) {
                return None;
            }
            if let Some(lane) = state.idle.pop() {
                return Some(lane);
            }
            state.waiting += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.waiting -= 1;
        }
    }

    /// Has those who wait for a lane look again whether they need one.
    pub(super) fn call(&self) {
        // Under the lock, or somebody who has just looked would go to sleep after it.
        self.wake(&self.lock());
    }

    /// All of them: one alone may have given up meanwhile.
    fn wake(&self, state: &State) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Takes a lane back, none of whose slots is busy.
    pub(super) fn give(&self, lane: Lane) {
        let mut state = self.lock();
        state.idle.push(lane);
        self.wake(&state);
    }

    /// Takes back a lane whose busy slots are touched by what was queued on a stream that nobody
    /// can wait for.
    pub(super) fn discard(&self, lane: Lane, behind: &Arc<Timeline>) {
        lane.retire(behind);
        self.forget_one();
    }

    /// Takes back a lane that a graph may touch whenever it is launched: nobody ever uses it again.
    pub(super) fn lose(&self, lane: Lane) {
        let _leaked = ManuallyDrop::new(lane);
        self.forget_one();
    }

    /// Counts out a lane; answers with how many are left.
    fn forget_one(&self) -> usize {
        let mut state = self.lock();
        state.made -= 1;
        self.wake(&state);
        state.made
    }

    /// Whether the slots are pinned, as far as there are any idle ones.
    pub(super) fn is_pinned(&self) -> bool {
        self.lock().idle.iter().all(Lane::is_pinned)
    }

    /// Gives the slots of idle lanes back to their pool. Answers with their bytes.
    pub(super) fn trim(&self) -> u64 {
        let idle = {
            let mut state = self.lock();
            state.made -= state.idle.len();
            self.wake(&state);
            std::mem::take(&mut state.idle)
        };
        idle.iter().flat_map(|lane| &lane.slots).map(|slot| slot.room() as u64).sum()
    }
}

/// See [`Lanes::keep`].
pub(super) struct Kept<'a>(&'a Lanes);

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.0.lock().kept -= 1;
    }
}

/// Where the pool has no memory left, idle slots go back to it.
impl Keeper for Lanes {
    fn idle(&self) -> u64 {
        let state = self.lock();
        let lanes = if state.kept > 0 { 0 } else { state.idle.len() };
        lanes as u64 * (self.slots * self.slot_bytes) as u64
    }

    fn give(&self) -> u64 {
        if self.lock().kept > 0 { 0 } else { self.trim() }
    }
}
