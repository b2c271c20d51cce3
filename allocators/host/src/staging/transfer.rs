//! The state of one transfer: its participants, its progress and the threads that wait for it.
//!
//! ```text
//!             take part: claim a chunk, move it, claim the next …
//!   begun ──▶ running: 0 … n ──▶ over: nothing left to claim, or stopped; and nobody at it ──▶ finished
//! ```
//!
//! A participant leaves only when none of its copies is in flight. So once a transfer is finished:
//!
//! - No thread touches its host memory.
//! - Everything that the host queues later comes after its copies.

use super::{
    StageError, StagerCore, check_process,
    lane::{Lane, synchronize_or_abort},
    permit::Permit,
    plan::{Direction, TransferPlan},
    submit::Submissions,
};
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

/// The progress of a transfer.
///
/// See [`Ticket`](crate::Ticket) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Progress {
    /// Bytes that have arrived.
    pub done: u64,
    /// Total bytes.
    pub total: u64,
}

/// Bytes per woken worker. A worker takes tens of microseconds to start, and each wake-up delays
/// the calling thread, so fewer bytes are not worth another worker.
const BYTES_PER_WORKER: u64 = 512 << 10;

/// Returns the number of workers worth waking for a transfer of `bytes` bytes.
fn workers_to_wake(bytes: u64) -> usize {
    usize::try_from(bytes / BYTES_PER_WORKER).unwrap_or(usize::MAX).max(1)
}

/// Spin iterations of a waiting thread before it sleeps. They cover about the time of the workers'
/// last chunks, which is much longer than a wake-up.
const SPINS: u32 = 8000;

/// The owner of a transfer's memory, kept until the transfer is finished.
pub(super) type KeepAlive = Arc<dyn Any + Send + Sync>;

pub(super) struct Transfer {
    pub(super) shared: Arc<StagerCore>,
    pub(super) plan: TransferPlan,
    /// The stream of the copies, ordered after the earlier uses of the operands.
    pub(super) transfer_stream: Stream,
    /// Copies on their way to that stream.
    pub(super) submissions: Submissions,
    /// The common owner stream of the operands, if they share one.
    owner: Option<Arc<Timeline>>,
    /// The next chunk to be claimed.
    next: AtomicUsize,
    /// No further chunk is claimed. It is never reset.
    stopped: AtomicBool,
    /// Bytes that have arrived.
    done: AtomicU64,
    /// The call site of the request.
    site: Option<&'static Location<'static>>,
    state: Mutex<TransferState>,
    /// Signalled when the transfer is finished.
    changed: Condvar,
    /// The same state for threads that spin.
    finished: AtomicBool,
}

struct TransferState {
    /// Number of current participants.
    running: usize,
    /// The first error.
    error: Option<StageError>,
    /// There is no participant, and there will be none.
    over: bool,
    /// The transfer is over, and its permit has been returned.
    finished: bool,
    wakers: Vec<Waker>,
    resources: TransferResources,
}

/// Resources that a transfer holds until it is over.
#[derive(Default)]
struct TransferResources {
    permit: Option<Permit>,
    keep_alive: Option<KeepAlive>,
}

impl Transfer {
    pub(super) fn new(
        shared: &Arc<StagerCore>,
        plan: TransferPlan,
        transfer_stream: Stream,
        owner: Option<Arc<Timeline>>,
        permit: Permit,
    ) -> Arc<Self> {
        let resources = TransferResources { permit: Some(permit), ..TransferResources::default() };
        let state = TransferState {
            running: 0,
            error: None,
            over: false,
            finished: false,
            wakers: Vec::new(),
            resources,
        };
        Arc::new(Self {
            shared: shared.clone(),
            plan,
            transfer_stream,
            submissions: Submissions::default(),
            owner,
            next: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            done: AtomicU64::new(0),
            site: site::entered(),
            state: Mutex::new(state),
            changed: Condvar::new(),
            finished: AtomicBool::new(false),
        })
    }

    fn lock(&self) -> MutexGuard<'_, TransferState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the outcome in a forked child of the process that owns the workers and the memory.
    /// No lock may be taken there.
    fn outcome_in_child() -> Option<Result<(), StageError>> {
        check_process().err().map(|error| Err(error.into()))
    }

    /// Stores the owner of the transfer's memory until it is finished. Must be called before
    /// [`Transfer::begin`].
    pub(super) fn set_keep_alive(&self, keep_alive: KeepAlive) {
        self.lock().resources.keep_alive = Some(keep_alive);
    }

    /// Submits the transfer to the workers of its direction. If that fails, the transfer is
    /// finished with an error.
    pub(super) fn begin(self: &Arc<Self>) {
        let chunks = self.plan.chunks();
        if chunks > 0 {
            let direction = self.shared.direction_state(self.plan.direction);
            let wanted = chunks.min(direction.workers_most).min(workers_to_wake(self.plan.total()));
            let submitted =
                direction.lanes.ensure(wanted + 1).map_err(StageError::Memory).and_then(|()| {
                    let transfer = self.clone();
                    let work = move || transfer.run_as_worker();
                    direction
                        .workers
                        .submit(self.shared.node, wanted, work)
                        .map_err(StageError::Workers)
                });
            if let Err(error) = submitted {
                self.fail(error);
            }
        }
        self.finish_if_over();
    }

    /// Takes part as a worker, with any lane that is available.
    fn run_as_worker(&self) {
        let Some(part) = self.join() else { return };
        let lanes = &self.shared.direction_state(self.plan.direction).lanes;
        while part.has_work() {
            if let Some(lane) = lanes.acquire(|| !part.has_work()) {
                part.run(lane);
            } else if part.has_work()
                && let Err(error) = lanes.ensure(1)
            {
                self.fail(StageError::Memory(error));
            }
        }
    }

    /// Takes part on the calling thread, if a lane is idle.
    pub(super) fn help(&self) {
        if Self::outcome_in_child().is_none()
            && let Some(part) = self.join()
            && part.has_work()
            && let Some(lane) = self.shared.direction_state(self.plan.direction).lanes.try_acquire()
        {
            part.run(lane);
        }
    }

    fn join(&self) -> Option<Participant<'_>> {
        let mut state = self.lock();
        if state.over || self.is_exhausted() {
            return None;
        }
        state.running += 1;
        Some(Participant { transfer: self, moving: Cell::new(false) })
    }

    /// Returns whether nothing is left to claim.
    fn is_exhausted(&self) -> bool {
        self.is_stopped() || self.next.load(Ordering::Relaxed) >= self.plan.chunks()
    }

    /// Claims the next chunk, if one is left.
    pub(super) fn claim(&self) -> Option<usize> {
        if self.is_stopped() {
            return None;
        }
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|&chunk| chunk < self.plan.chunks())
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Adds `bytes` to the bytes that have arrived.
    pub(super) fn add_done(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        debug_assert!(before + bytes <= self.plan.total(), "more arrived than was sent");
    }

    pub(super) fn progress(&self) -> Progress {
        Progress { done: self.done.load(Ordering::Relaxed), total: self.plan.total() }
    }

    /// Ends the transfer early with `error`, unless it has completed or failed before.
    pub(super) fn fail(&self, error: StageError) {
        if Self::outcome_in_child().is_some() {
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
        self.shared.direction_state(self.plan.direction).lanes.wake_waiters();
        self.finish_if_over();
    }

    pub(super) fn cancel(&self) {
        self.fail(StageError::Cancelled);
    }

    /// Finishes the transfer if it has no participant and nothing left to claim: releases its
    /// resources and wakes the waiting threads.
    fn finish_if_over(&self) {
        let resources = {
            let mut state = self.lock();
            if state.over || state.running > 0 || !self.is_exhausted() {
                return;
            }
            state.over = true;
            if state.error.is_none() {
                self.shared.release_stream(&self.transfer_stream);
            }
            std::mem::take(&mut state.resources)
        };
        let TransferResources { permit, keep_alive } = resources;
        // Before the wake-ups, so that a woken thread finds a permit.
        drop(permit);
        let wakers = {
            let mut state = self.lock();
            state.finished = true;
            self.finished.store(true, Ordering::Release);
            std::mem::take(&mut state.wakers)
        };
        self.changed.notify_all();
        // Wakers run foreign code. A panic in one must not keep the others from being woken.
        for waker in wakers {
            contain(|| waker.wake());
        }
        // Last, and without locks: the drop may run arbitrary code.
        contain(|| drop(keep_alive));
    }

    pub(super) fn is_finished(&self) -> bool {
        Self::outcome_in_child().is_some() || self.lock().finished
    }

    /// Returns the outcome, once the transfer is finished.
    pub(super) fn outcome(&self) -> Option<Result<(), StageError>> {
        if let Some(outcome_in_child) = Self::outcome_in_child() {
            return Some(outcome_in_child);
        }
        let state = self.lock();
        state.finished.then(|| state.error.clone().map_or(Ok(()), Err))
    }

    /// Takes part, and blocks until the transfer is finished.
    pub(super) fn wait(&self) -> Result<(), StageError> {
        if let Some(outcome_in_child) = Self::outcome_in_child() {
            return outcome_in_child;
        }
        self.help();
        // Now nothing is left to claim, or no lane was idle. Usually the other participants are at
        // their last chunks, so spin for a while.
        for _ in 0..SPINS {
            if self.finished.load(Ordering::Acquire) {
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

    /// Blocks until the transfer is finished or the deadline has passed. Returns whether it is
    /// finished.
    pub(super) fn wait_until(&self, deadline: Instant) -> bool {
        if Self::outcome_in_child().is_some() {
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

    /// Returns the outcome, or registers `waker` to be woken when there is one.
    pub(super) fn poll(&self, waker: &Waker) -> Poll<Result<(), StageError>> {
        if let Some(outcome_in_child) = Self::outcome_in_child() {
            return Poll::Ready(outcome_in_child);
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

/// A participant of a transfer. Its drop deregisters it, also on unwind.
struct Participant<'a> {
    transfer: &'a Transfer,
    /// A move of chunks has started and has not returned.
    moving: Cell<bool>,
}

impl Participant<'_> {
    fn has_work(&self) -> bool {
        !self.transfer.is_exhausted()
    }

    /// Moves chunks until none is left, then returns the lane.
    fn run(&self, lane: Lane) {
        let transfer = self.transfer;
        let _site = site::enter_as(transfer.site);
        let lanes = &transfer.shared.direction_state(transfer.plan.direction).lanes;
        // On error or unwind, the drop of `guard` waits for the lane's copies before it returns the
        // lane.
        let mut guard = TransferLaneGuard { lane: Some(lane), transfer };
        let Some(lane) = guard.lane.as_mut() else { return };
        self.moving.set(true);
        let moved = match transfer.plan.direction {
            Direction::Upload => transfer.upload(lane),
            Direction::Download => transfer.download(lane),
        };
        self.moving.set(false);
        match moved {
            Ok(()) => guard.lane.take().into_iter().for_each(|lane| lanes.release(lane)),
            Err(error) => {
                transfer.fail(error);
                drop(guard);
            }
        }
    }
}

impl Drop for Participant<'_> {
    fn drop(&mut self) {
        // `thread::panicking` would be wrong here: a thread that is unwinding may wait for a
        // transfer, and so take part in it.
        if self.moving.get() {
            self.transfer.fail(StageError::WorkerLost);
        }
        let mut state = self.transfer.lock();
        debug_assert!(state.running > 0 && !state.over, "it did not take part");
        state.running -= 1;
        drop(state);
        self.transfer.finish_if_over();
    }
}

/// A lane in use. Its drop waits for the lane's copies before the lane is returned.
struct TransferLaneGuard<'a> {
    lane: Option<Lane>,
    transfer: &'a Transfer,
}

impl Drop for TransferLaneGuard<'_> {
    fn drop(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        let transfer = self.transfer;
        let lanes = &transfer.shared.direction_state(transfer.plan.direction).lanes;
        let transfer_stream = transfer.transfer_stream.timeline();
        match lane.synchronize(transfer_stream) {
            Ok(()) => lanes.release(lane),
            Err(error) => {
                // Uses of the operands on their owner stream must come after the copies. If that
                // dependency cannot be recorded either, the operands are returned only when no copy
                // can run: the work is done, the device is lost or the driver is gone.
                let joined = transfer
                    .owner
                    .as_ref()
                    .map(|owner| owner.wait_for(transfer_stream, transfer_stream.open()));
                if let Some(Err(_)) = joined {
                    let _over = synchronize_or_abort(transfer_stream);
                }
                transfer.fail(StageError::Memory(error));
                lanes.discard(lane, transfer_stream);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::workers_to_wake;

    #[test]
    fn transfer_wakes_one_worker_per_half_mebibyte_and_at_least_one() {
        for (kib, workers) in [(0, 1), (300, 1), (512, 1), (1024, 2), (1536, 3), (4096, 8)] {
            assert_eq!(workers_to_wake(kib << 10), workers, "{kib} KiB");
        }
    }
}
