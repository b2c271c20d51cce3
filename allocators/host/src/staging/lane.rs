//! Lanes: small sets of slots, each used by one worker at a time, and the wait for their copies.
#![expect(
    unsafe_code,
    reason = "declares the elements of slots plain data, and returns pointers to their bytes"
)]

use super::{
    StageError,
    plan::Move,
    submit::{Answer, Submission},
};
use crate::{PinnedBuf, PinnedPool, pool::IdleHolder};
use aquifer_core::{MemoryError, Result};
use aquifer_driver::HostAccess;
use aquifer_stream::{HostOwned, Point, Timeline};
use bytemuck::{Pod, Zeroable};
use std::{
    mem::{self, ManuallyDrop},
    ops::Range,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

/// The unit of slots. It aligns each slot to a page, as direct reads of files require.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; Page::BYTES]);

impl Page {
    const BYTES: usize = 4096;
}

// SAFETY: 1. all zeros are a valid array of bytes.
unsafe impl Zeroable for Page {}
// SAFETY: 1. an array of bytes whose size is its alignment has no padding, and all bit patterns are
// valid.
unsafe impl Pod for Page {}

/// A staging buffer of pinned memory.
pub(super) struct Slot {
    pages: PinnedBuf<Page>,
    /// The moves that the slot carries, or carried last.
    pub(super) moves: Vec<Move>,
    /// The number of bytes that the slot carries.
    pub(super) bytes: u64,
    /// The epoch that ends the copies in flight between the slot and the device, on the stream of
    /// these copies.
    busy: Option<u64>,
    /// The copies have been submitted. The slot must not be touched before the answer.
    submitted: Option<Receiver<Answer>>,
}

impl Slot {
    pub(super) fn capacity(&self) -> usize {
        self.pages.len() * Page::BYTES
    }

    /// Marks the slot busy: copies without an event behind them may be in flight.
    pub(super) fn mark_busy(&mut self, on: &Timeline) {
        self.busy = Some(on.open());
    }

    pub(super) fn is_busy(&self) -> bool {
        self.submitted.is_some() || self.busy.is_some()
    }

    /// Marks the slot busy and returns its copies for submission.
    pub(super) fn start_submission(&mut self) -> Submission {
        debug_assert!(!self.is_busy(), "the slot is still in use");
        let (answer, receipt) = mpsc::sync_channel(1);
        self.submitted = Some(receipt);
        Submission { start: self.start(), moves: mem::take(&mut self.moves), answer }
    }

    /// Waits until submitted copies of this slot have been queued on the stream `on`, and updates
    /// the slot. Blocks.
    ///
    /// # Errors
    /// The error of queueing the copies. The slot stays busy, since some may have been queued.
    fn finish_submission(&mut self, on: &Timeline) -> std::result::Result<(), StageError> {
        let Some(receipt) = self.submitted.take() else { return Ok(()) };
        let Ok(answer) = receipt.recv() else {
            self.mark_busy(on);
            return Err(StageError::WorkerLost);
        };
        (self.moves, self.busy) = (answer.moves, Some(answer.epoch));
        answer.queued
    }

    /// Reports a CPU access to some bytes of the slot to the driver's observer, if there is one.
    pub(super) fn report_access(&mut self, on: &Timeline, bytes: Range<usize>, access: HostAccess) {
        if let Some(observer) = on.driver().observer() {
            let start = self.start().as_ptr() as u64;
            observer.host(start + bytes.start as u64, bytes.len() as u64, access);
        }
    }

    /// Returns the address of the slot's bytes. The holder has exclusive use of them while no copy
    /// is in flight.
    pub(super) fn start(&mut self) -> NonNull<u8> {
        self.pages.bytes().cast()
    }
}

/// A few slots. No slot of an idle lane is busy.
pub(super) struct Lane {
    pub(super) slots: Vec<Slot>,
}

impl Lane {
    fn new(pool: &PinnedPool, slots: usize, bytes: usize) -> Result<Self> {
        let slot = || {
            let pages = pool.buffer(bytes.div_ceil(Page::BYTES))?;
            Ok(Slot { pages, moves: Vec::new(), bytes: 0, busy: None, submitted: None })
        };
        Ok(Self { slots: (0..slots).map(|_| slot()).collect::<Result<_>>()? })
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.slots.iter().all(|slot| slot.pages.is_pinned())
    }

    /// Waits until the copies of a slot are done. They have been queued on the stream `on`, or are
    /// about to be.
    ///
    /// # Errors
    /// The error of queueing the copies or of the wait. The slot stays busy.
    pub(super) fn wait(
        &mut self,
        slot: usize,
        on: &Timeline,
    ) -> std::result::Result<(), StageError> {
        self.slots[slot].finish_submission(on)?;
        if let Some(epoch) = self.slots[slot].busy {
            on.wait(epoch, None)?;
            self.slots[slot].busy = None;
        }
        Ok(())
    }

    /// Reports a CPU access to all bytes that the slot carries to the driver's observer, if there
    /// is one.
    pub(super) fn report_access(&mut self, slot: usize, on: &Timeline, access: HostAccess) {
        let slot = &mut self.slots[slot];
        let used = slot.moves.last().map_or(0, |last| last.at + last.bytes);
        slot.report_access(on, 0..used, access);
    }

    /// Waits for everything in flight on this stream, after an error.
    ///
    /// # Errors
    /// As [`synchronize`]. The slots stay busy, and the lane must be [discarded](Lanes::discard).
    pub(super) fn synchronize(&mut self, on: &Timeline) -> Result<()> {
        // A later wait for the slot reports errors of the submission. Here it only matters that no
        // other thread queues the copies any more.
        self.slots.iter_mut().for_each(|slot| drop(slot.finish_submission(on)));
        if self.slots.iter().any(Slot::is_busy) {
            synchronize(on)?;
            self.slots.iter_mut().for_each(|slot| slot.busy = None);
        }
        Ok(())
    }

    /// Gives the slots back to their pool. The pool keeps busy slots until the work queued on
    /// `behind` is known to be done. After the loss of the device it keeps them forever.
    fn retire(mut self, behind: &Arc<Timeline>) {
        let deferred = self.slots.iter_mut().filter(|slot| slot.is_busy()).all(|slot| {
            let point = Point::ahead(behind);
            point.reached();
            slot.pages.defer(Arc::new(point)).is_ok()
        });
        if !deferred {
            // The slots are leaked, because the end of their use cannot be determined.
            let _leaked = ManuallyDrop::new(self);
        }
    }
}

/// The lanes of one direction. They are created on first use, and never more than requested.
pub(super) struct Lanes {
    pool: PinnedPool,
    slots: usize,
    slot_bytes: usize,
    limit: usize,
    state: Mutex<LaneCounts>,
    /// Signalled when a lane is returned or removed.
    changed: Condvar,
}

struct LaneCounts {
    idle: Vec<Lane>,
    /// Number of lanes, including those being created.
    count: usize,
    /// Threads that wait for a lane. Checked first, because a notification is a system call even
    /// without waiters.
    waiting: usize,
    /// Threads that are creating a lane. While there are any, idle lanes are not returned to the
    /// pool. Otherwise, with memory for only one lane, two threads could alternate forever between
    /// trimming and creating.
    reclaim_holds: usize,
}

impl Lanes {
    pub(super) fn new(pool: &PinnedPool, limit: usize, slots: usize, slot_bytes: usize) -> Self {
        Self {
            pool: pool.clone(),
            slots,
            slot_bytes,
            limit,
            state: Mutex::new(LaneCounts {
                idle: Vec::new(),
                count: 0,
                waiting: 0,
                reclaim_holds: 0,
            }),
            changed: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, LaneCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Creates lanes until there are `wanted`. Blocks while the pool grows.
    ///
    /// # Errors
    /// Those of the pool, if there is not a single lane. With fewer lanes than wanted, transfers
    /// only take longer.
    pub(super) fn ensure(&self, wanted: usize) -> Result<()> {
        loop {
            {
                let mut state = self.lock();
                if state.count >= wanted.min(self.limit) {
                    return Ok(());
                }
                state.count += 1;
            }
            let made = {
                let _hold = self.hold_reclaim();
                Lane::new(&self.pool, self.slots, self.slot_bytes)
            };
            match made {
                Ok(lane) => self.release(lane),
                Err(error) => {
                    let left = self.remove_one();
                    return if left > 0 { Ok(()) } else { Err(error) };
                }
            }
        }
    }

    /// Prevents the pool from reclaiming lanes while the returned guard is alive.
    pub(super) fn hold_reclaim(&self) -> ReclaimHold<'_> {
        self.lock().reclaim_holds += 1;
        ReclaimHold(self)
    }

    /// Returns an idle lane, if there is one.
    pub(super) fn try_acquire(&self) -> Option<Lane> {
        self.lock().idle.pop()
    }

    /// Returns an idle lane that is pinned, and creates it if it is the first. Blocks while the
    /// pool grows.
    pub(super) fn acquire_pinned(&self) -> Option<Lane> {
        let lane = match self.try_acquire() {
            Some(lane) => lane,
            None => {
                // Without a lane the caller copies through the driver, which reports the error.
                self.ensure(1).ok()?;
                self.try_acquire()?
            }
        };
        if lane.is_pinned() {
            return Some(lane);
        }
        self.release(lane);
        None
    }

    /// Returns a lane, and waits for one while other transfers use all of them.
    ///
    /// Returns `None` if `is_cancelled` returns true, or if no lane exists any more. `is_cancelled`
    /// is checked again after each [`Lanes::wake_waiters`].
    pub(super) fn acquire(&self, is_cancelled: impl Fn() -> bool) -> Option<Lane> {
        let mut state = self.lock();
        loop {
            if is_cancelled() || (state.idle.is_empty() && state.count == 0) {
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

    /// Wakes the threads in [`Lanes::acquire`], so that they check again whether they need a lane.
    pub(super) fn wake_waiters(&self) {
        // Under the lock: otherwise a thread that has just checked would miss the notification.
        self.notify_waiters(&self.lock());
    }

    /// Notifies all waiting threads: a single one may have given up in the meantime.
    fn notify_waiters(&self, state: &LaneCounts) {
        if state.waiting > 0 {
            self.changed.notify_all();
        }
    }

    /// Puts a lane back into the idle list. None of its slots may be busy.
    pub(super) fn release(&self, lane: Lane) {
        debug_assert!(!lane.slots.iter().any(Slot::is_busy), "a copy may touch a slot");
        let mut state = self.lock();
        state.idle.push(lane);
        debug_assert!(state.idle.len() <= state.count, "a lane that was not counted");
        self.notify_waiters(&state);
    }

    /// Removes a lane with busy slots, whose work was queued on a stream that cannot be waited for.
    pub(super) fn discard(&self, lane: Lane, behind: &Arc<Timeline>) {
        lane.retire(behind);
        self.remove_one();
    }

    /// Leaks a lane that a graph may touch on every launch.
    pub(super) fn leak(&self, lane: Lane) {
        let _leaked = ManuallyDrop::new(lane);
        self.remove_one();
    }

    /// Decrements the number of lanes, and returns what is left.
    fn remove_one(&self) -> usize {
        let mut state = self.lock();
        debug_assert!(state.count > 0, "no lane is counted");
        state.count -= 1;
        self.notify_waiters(&state);
        state.count
    }

    /// Returns whether the slots of all idle lanes are pinned. Returns `true` if none is idle.
    pub(super) fn is_pinned(&self) -> bool {
        self.lock().idle.iter().all(Lane::is_pinned)
    }

    /// Gives the slots of idle lanes back to their pool, and returns the number of their bytes.
    pub(super) fn trim(&self) -> u64 {
        let idle = {
            let mut state = self.lock();
            state.count -= state.idle.len();
            self.notify_waiters(&state);
            mem::take(&mut state.idle)
        };
        idle.iter().flat_map(|lane| &lane.slots).map(|slot| slot.capacity() as u64).sum()
    }
}

/// The guard of [`Lanes::hold_reclaim`].
pub(super) struct ReclaimHold<'a>(&'a Lanes);

impl Drop for ReclaimHold<'_> {
    fn drop(&mut self) {
        self.0.lock().reclaim_holds -= 1;
    }
}

/// Idle slots return to the pool when it has no memory left.
impl IdleHolder for Lanes {
    fn idle_bytes(&self) -> u64 {
        let state = self.lock();
        let lanes = if state.reclaim_holds > 0 { 0 } else { state.idle.len() };
        lanes as u64 * (self.slots * self.slot_bytes) as u64
    }

    fn release_idle(&self) -> u64 {
        if self.lock().reclaim_holds > 0 { 0 } else { self.trim() }
    }
}

/// Interval of the checks whether a capture has ended.
const CAPTURE_PAUSE: Duration = Duration::from_micros(100);

/// Waits until no work that was queued on a stream runs any more, with every method of the driver.
/// For callers that can keep the memory of that work. Blocks, also while a capture is open on the
/// stream, since no wait is possible before it ends.
///
/// # Errors
/// As [`Timeline::settle`]. [`MemoryError::Capturing`] if a capture was seen and has ended: the
/// queued work may have become part of it, and may never have run.
pub(super) fn synchronize(timeline: &Timeline) -> Result<()> {
    retry_after_captures(timeline, Timeline::settle)
}

/// Waits as [`synchronize`] does, for callers that cannot keep the memory: does not return while
/// work may run. See [`Timeline::settle_or_abort`].
///
/// # Errors
/// As [`synchronize`]. No work runs any more.
pub(super) fn synchronize_or_abort(timeline: &Timeline) -> Result<()> {
    retry_after_captures(timeline, Timeline::settle_or_abort)
}

fn retry_after_captures(
    timeline: &Timeline,
    synchronize: fn(&Timeline) -> Result<()>,
) -> Result<()> {
    let mut seen = Ok(());
    loop {
        match synchronize(timeline) {
            Ok(()) => return seen,
            Err(capturing @ MemoryError::Capturing { .. }) => seen = Err(capturing),
            refused => return refused,
        }
        thread::sleep(CAPTURE_PAUSE);
    }
}
