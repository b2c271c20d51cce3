//! One transfer: who is at it, how far it is, and who waits for its end.
//!
//! ```text
//!             take part: claim a chunk, move it, claim the next …
//!   begun ──▶ running: 0 … n ──▶ over: nothing left to claim, or stopped; and nobody at it ──▶ finished
//! ```
//!
//! Whoever takes part leaves only when no copy of his is on its way any more. So once a transfer is
//! finished nobody touches its host memory, and everything that the host queues from then on comes
//! after its copies.

use super::{
    Shared, StageError,
    lane::Lane,
    permit::Permit,
    plan::{Plan, Way},
    settle::settle_or_abort,
    submit::Submissions,
};
use crate::workers::Job;
use aquifer_core::panics::contain;
use aquifer_driver::site;
use aquifer_stream::{Stream, Timeline};
use std::{
    any::Any,
    cell::Cell,
    fmt, hint,
    panic::Location,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Poll, Waker},
    time::Instant,
};

/// How far a transfer is.
///
/// Its example is that of [`Ticket`](crate::Ticket).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Bytes there are.
    pub total: u64,
}

/// Bytes for which one more worker is woken: it takes tens of microseconds to be at it, and then
/// the others are done with less. Whoever wakes them is held up by each.
const WORTH_WAKING: u64 = 512 << 10;

/// How many workers a transfer of so many bytes is worth.
fn worth_waking(bytes: u64) -> usize {
    usize::try_from(bytes / WORTH_WAKING).unwrap_or(usize::MAX).max(1)
}

/// How often somebody who has nothing left to do looks whether a transfer is finished before he
/// goes to sleep: for about as long as workers take for their last chunks, and many times what it
/// takes to be woken.
const LOOKS: u32 = 8000;

/// What owns the memory of a transfer until it is finished.
pub(super) type Keep = Arc<dyn Any + Send + Sync>;

pub(super) struct Transfer {
    pub(super) shared: Arc<Shared>,
    pub(super) plan: Plan,
    /// The stream of its copies, which come after the operands' earlier uses.
    pub(super) road: Stream,
    /// Copies on their way to it.
    pub(super) submissions: Submissions,
    /// The operands' home, where they have one in common.
    home: Option<Arc<Timeline>>,
    /// The next chunk to be claimed.
    next: AtomicUsize,
    /// No further chunk is claimed. Once set it stays.
    stopped: AtomicBool,
    /// Bytes that have arrived.
    done: AtomicU64,
    /// The line of the program that asked for it.
    site: Option<&'static Location<'static>>,
    state: Mutex<State>,
    /// The transfer is finished.
    changed: Condvar,
    /// The same for those who do not sleep.
    ended: AtomicBool,
}

struct State {
    /// How many take part now.
    running: usize,
    /// What went wrong first.
    error: Option<StageError>,
    /// Nobody takes part, and nobody will.
    over: bool,
    /// And what the transfer held has been given back.
    finished: bool,
    wakers: Vec<Waker>,
    held: Held,
}

/// What a transfer holds until it is over.
#[derive(Default)]
struct Held {
    permit: Option<Permit>,
    keep: Option<Keep>,
    job: Option<Job<()>>,
}

impl Transfer {
    pub(super) fn new(
        shared: &Arc<Shared>,
        plan: Plan,
        road: Stream,
        home: Option<Arc<Timeline>>,
        permit: Permit,
    ) -> Arc<Self> {
        let held = Held { permit: Some(permit), ..Held::default() };
        let state = State {
            running: 0,
            error: None,
            over: false,
            finished: false,
            wakers: Vec::new(),
            held,
        };
        Arc::new(Self {
            shared: shared.clone(),
            plan,
            road,
            submissions: Submissions::default(),
            home,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            done: AtomicU64::new(0),
            site: site::entered(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            ended: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What came of it in a child of the process that has its workers and its memory: there, no
    /// lock may be taken.
    fn elsewhere(&self) -> Option<Result<(), StageError>> {
        self.shared.here().err().map(|error| Err(error.into()))
    }

    /// Keeps what owns its memory until it is finished. To be called before it is begun.
    pub(super) fn keep(&self, keep: Keep) {
        self.lock().held.keep = Some(keep);
    }

    /// Has the workers of its direction begin it. What cannot be begun is finished with an error.
    pub(super) fn begin(self: &Arc<Self>) {
        let chunks = self.plan.chunks();
        if chunks > 0 {
            let side = self.shared.side(self.plan.way);
            let wanted = chunks.min(side.workers_most).min(worth_waking(self.plan.total()));
            let begun = side.lanes.ensure(wanted + 1).map_err(StageError::Memory).and_then(|()| {
                let transfer = self.clone();
                let work = move |_| transfer.work();
                side.workers
                    .submit(self.shared.node, wanted, None, work)
                    .map_err(StageError::Workers)
            });
            match begun {
                Ok(job) => {
                    let mut state = self.lock();
                    if !state.over {
                        state.held.job = Some(job);
                    }
                }
                Err(error) => self.fail(error),
            }
        }
        self.finish_if_over();
    }

    /// A worker takes part, with whichever lane it gets.
    fn work(&self) {
        let Some(part) = self.enter() else { return };
        let lanes = &self.shared.side(self.plan.way).lanes;
        while part.is_wanted() {
            if let Some(lane) = lanes.take(|| !part.is_wanted()) {
                part.run(lane);
            } else if part.is_wanted()
                && let Err(error) = lanes.ensure(1)
            {
                self.fail(StageError::Memory(error));
            }
        }
    }

    /// The calling thread takes part, if a lane is idle.
    pub(super) fn help(&self) {
        if self.elsewhere().is_none()
            && let Some(part) = self.enter()
            && part.is_wanted()
            && let Some(lane) = self.shared.side(self.plan.way).lanes.try_take()
        {
            part.run(lane);
        }
    }

    fn enter(&self) -> Option<Participant<'_>> {
        let mut state = self.lock();
        if state.over || self.is_claimed() {
            return None;
        }
        state.running += 1;
        Some(Participant { transfer: self, moving: Cell::new(false) })
    }

    /// Whether nothing is left to claim.
    fn is_claimed(&self) -> bool {
        self.is_stopped() || self.next.load(Ordering::Relaxed) >= self.plan.chunks()
    }

    /// Claims a chunk.
    pub(super) fn claim(&self) -> Option<usize> {
        if self.is_stopped() {
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|&chunk| chunk < self.plan.chunks())
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Counts bytes that have arrived.
    pub(super) fn arrived(&self, bytes: u64) {
        self.done.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn progress(&self) -> Progress {
        Progress { done: self.done.load(Ordering::Relaxed), total: self.plan.total() }
    }

    /// Ends it early, for this reason, unless it has come to its end or failed before.
    pub(super) fn fail(&self, error: StageError) {
        if self.elsewhere().is_some() {
            return;
        }
        {
            let mut state = self.lock();
            if state.over || self.progress().done == self.plan.total() {
                return;
            }
            state.error.get_or_insert(error);
            self.stopped.store(true, Ordering::Relaxed);
        }
        self.shared.side(self.plan.way).lanes.call();
        self.finish_if_over();
    }

    pub(super) fn cancel(&self) {
        self.fail(StageError::Cancelled);
    }

    /// If nobody is at it and nobody will be, gives back what it holds and tells those who wait.
    fn finish_if_over(&self) {
        let held = {
            let mut state = self.lock();
            if state.over || state.running > 0 || !self.is_claimed() {
                return;
            }
            state.over = true;
            if state.error.is_none() {
                self.shared.give_road(&self.road);
            }
            std::mem::take(&mut state.held)
        };
        let Held { permit, keep, job } = held;
        // Before anybody is told: who waited finds a permit.
        drop(permit);
        let wakers = {
            let mut state = self.lock();
            state.finished = true;
            self.ended.store(true, Ordering::Release);
            std::mem::take(&mut state.wakers)
        };
        self.changed.notify_all();
        // Code of others, and the rest is woken all the same.
        for waker in wakers {
            contain(|| waker.wake());
        }
        drop(job);
        // Last, and outside of all locks: it may be anything.
        contain(|| drop(keep));
    }

    pub(super) fn is_finished(&self) -> bool {
        self.elsewhere().is_some() || self.lock().finished
    }

    /// What came of it, once it is finished.
    pub(super) fn outcome(&self) -> Option<Result<(), StageError>> {
        if let Some(elsewhere) = self.elsewhere() {
            return Some(elsewhere);
        }
        let state = self.lock();
        state.finished.then(|| state.error.clone().map_or(Ok(()), Err))
    }

    /// Takes part, and blocks until it is finished.
    pub(super) fn wait(&self) -> Result<(), StageError> {
        if let Some(elsewhere) = self.elsewhere() {
            return elsewhere;
        }
        self.help();
        // Nothing is left to claim then, or no lane was to be had: mostly the others are at their
        // last chunks.
        for _ in 0..LOOKS {
            if self.ended.load(Ordering::Acquire) {
                break;
            }
            hint::spin_loop();
        }
        let mut state = self.lock();
        while !state.finished {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.error.clone().map_or(Ok(()), Err)
    }

    /// Blocks until it is finished or the deadline has passed; whether it is finished.
    pub(super) fn wait_until(&self, deadline: Instant) -> bool {
        if self.elsewhere().is_some() {
            return true;
        }
        let mut state = self.lock();
        while !state.finished {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// The outcome, or `waker` is woken when there is one.
    pub(super) fn poll(&self, waker: &Waker) -> Poll<Result<(), StageError>> {
        if let Some(elsewhere) = self.elsewhere() {
            return Poll::Ready(elsewhere);
        }
        let mut state = self.lock();
        if state.finished {
            return Poll::Ready(state.error.clone().map_or(Ok(()), Err));
        }
        if !state.wakers.iter().any(|known| known.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        Poll::Pending
    }
}

impl fmt::Debug for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Transfer").field("progress", &self.progress()).finish_non_exhaustive()
    }
}

/// Somebody who takes part. However he leaves, he is counted out.
struct Participant<'a> {
    transfer: &'a Transfer,
    /// He is at it, and has not come back.
    moving: Cell<bool>,
}

impl Participant<'_> {
    fn is_wanted(&self) -> bool {
        !self.transfer.is_claimed()
    }

    /// Moves chunks until there are none, and hands the lane back.
    fn run(&self, lane: Lane) {
        let transfer = self.transfer;
        let _site = site::enter_as(transfer.site);
        let lanes = &transfer.shared.side(transfer.plan.way).lanes;
        // Whatever happens, the lane is settled before anybody else gets it.
        let mut held = Handed { lane: Some(lane), transfer };
        let Some(lane) = held.lane.as_mut() else { return };
        self.moving.set(true);
        let moved = match transfer.plan.way {
            Way::Up => transfer.upload(lane),
            Way::Down => transfer.download(lane),
        };
        self.moving.set(false);
        match moved {
            Ok(()) => held.lane.take().into_iter().for_each(|lane| lanes.give(lane)),
            Err(error) => {
                transfer.fail(error);
                drop(held);
            }
        }
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        // Not by asking whether the thread panics: one that unwinds may wait for a transfer, and so
        // take part in it.
        if self.moving.get() {
            self.transfer.fail(StageError::WorkerLost);
        }
        self.transfer.lock().running -= 1;
        self.transfer.finish_if_over();
    }
}

/// A lane in use. Dropped with it, the lane is settled first.
struct Handed<'a> {
    lane: Option<Lane>,
    transfer: &'a Transfer,
}

impl Drop for Handed<'_> {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        let transfer = self.transfer;
        let lanes = &transfer.shared.side(transfer.plan.way).lanes;
        let road = transfer.road.timeline();
        match lane.settle(road) {
            Ok(()) => lanes.give(lane),
            Err(error) => {
                // Uses of the operands on their home stream must come after the copies. If that is
                // refused too, the operands go back only when no copy runs any more: it is done, or
                // the device is lost or the driver gone.
                let joined = transfer.home.as_ref().map(|home| home.wait_for(road, road.open()));
                if let Some(Err(_)) = joined {
                    let _over = settle_or_abort(road);
                }
                transfer.fail(StageError::Memory(error));
                lanes.discard(lane, road);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::worth_waking;

    #[test]
    fn a_transfer_wakes_a_worker_for_each_half_mebibyte_and_one_at_least() {
        for (kib, workers) in [(0, 1), (300, 1), (512, 1), (1024, 2), (1536, 3), (4096, 8)] {
            assert_eq!(worth_waking(kib << 10), workers, "{kib} KiB");
        }
    }
}
