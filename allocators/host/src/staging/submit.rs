//! Submission of copies to the driver, by one thread for all participants of a transfer.
//!
//! If every worker calls the driver itself, the workers wait for each other in it, and fill no
//! slots in that time. Therefore the first thread that submits also queues the copies that others
//! submit in the meantime. The others continue with their next slots at once.
//!
//! ```text
//!   worker 1   fill a │ queue a, c, b │ fill d …
//!   worker 2   fill b ▪ fill e                       ▪ submits
//!   worker 3   fill c ▪ fill f
//! ```
//!
//! This is flat combining (Hendler, Incze, Shavit and Tzafrir, 2010).
#![expect(unsafe_code, reason = "sends a slot's address to another thread; holds no unsafe block")]

use super::{StageError, plan::Move};
use aquifer_core::Result as MemoryResult;
use std::{
    cell::Cell,
    collections::VecDeque,
    hint,
    ptr::NonNull,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

/// Spin iterations of a waiting thread before it sleeps. They cover more than the time that the
/// driver needs for the copies of all workers.
const SPINS: u32 = 2000;

/// The copies of one transfer that are on their way to the driver.
#[derive(Default)]
pub(super) struct Submissions {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// In the order of submission.
    waiting: VecDeque<Submission>,
    /// A thread is queueing copies. It checks `waiting` again before it stops.
    busy: bool,
}

/// The copies of one slot. The slot must not be touched until they are
/// [completed](Submission::complete).
pub(super) struct Submission {
    /// The slot's first byte.
    pub(super) start: NonNull<u8>,
    pub(super) moves: Vec<Move>,
    /// Receives the answer. `None` after that.
    receipt: Option<Arc<Receipt>>,
}

// SAFETY: 1. the address of a slot. Its worker does not touch the slot until it is answered, and
// keeps the slot alive for longer.
unsafe impl Send for Submission {}

/// The result of a submission.
pub(super) struct SubmissionResult {
    pub(super) moves: Vec<Move>,
    /// The epoch of the transfer's stream that ends with the copies. `None` if it is unknown how
    /// many were queued.
    pub(super) epoch: Option<u64>,
    pub(super) queued: Result<(), StageError>,
}

/// Receives the results of a slot's submissions. Created once for each slot.
#[derive(Default)]
pub(super) struct Receipt {
    state: Mutex<ReceiptState>,
    completed: Condvar,
    /// An answer is available.
    ready: AtomicBool,
}

#[derive(Default)]
struct ReceiptState {
    result: Option<SubmissionResult>,
    /// The worker sleeps. Checked first, because a notification is a system call even without
    /// waiters.
    asleep: bool,
}

impl Submission {
    pub(super) fn new(start: NonNull<u8>, moves: Vec<Move>, receipt: Arc<Receipt>) -> Self {
        receipt.ready.store(false, Ordering::Relaxed);
        Self { start, moves, receipt: Some(receipt) }
    }

    /// Hands the slot back to its worker. Its copies end with `epoch`, or failed.
    pub(super) fn complete(mut self, epoch: u64, queued: MemoryResult<()>) {
        self.send(Some(epoch), queued.map_err(StageError::Memory));
    }

    fn send(&mut self, epoch: Option<u64>, queued: Result<(), StageError>) {
        if let Some(receipt) = self.receipt.take() {
            receipt.complete(SubmissionResult {
                moves: std::mem::take(&mut self.moves),
                epoch,
                queued,
            });
        }
    }
}

impl Drop for Submission {
    /// Answers with an error if there was no answer. The worker would wait forever otherwise.
    fn drop(&mut self) {
        self.send(None, Err(StageError::WorkerLost));
    }
}

impl Receipt {
    fn lock(&self) -> MutexGuard<'_, ReceiptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn complete(&self, result: SubmissionResult) {
        let mut state = self.lock();
        state.result = Some(result);
        let asleep = state.asleep;
        // Set after the answer is stored, and under the lock, so that the worker cannot take the
        // answer before.
        self.ready.store(true, Ordering::Release);
        drop(state);
        if asleep {
            self.completed.notify_one();
        }
    }

    /// Returns the result of the submission. Blocks until a thread has handed it to the driver.
    pub(super) fn wait(&self) -> SubmissionResult {
        for _ in 0..SPINS {
            if self.ready.load(Ordering::Acquire) {
                break;
            }
            hint::spin_loop();
        }
        let mut state = self.lock();
        loop {
            if let Some(result) = state.result.take() {
                state.asleep = false;
                return result;
            }
            state.asleep = true;
            state = self.completed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Submissions {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a submission. Never blocks.
    ///
    /// If a [`Combiner`] is returned, the caller must queue this submission and all that arrive
    /// during the turn. Otherwise another thread does.
    pub(super) fn submit(&self, submission: Submission) -> Option<Combiner<'_>> {
        let mut state = self.lock();
        state.waiting.push_back(submission);
        if std::mem::replace(&mut state.busy, true) {
            None
        } else {
            Some(Combiner { submissions: self, over: Cell::new(false) })
        }
    }
}

/// The turn of one thread as the combiner: it queues the submissions of all threads. It ends when
/// none is left. If it is dropped early, the waiting workers are answered with an error.
pub(super) struct Combiner<'a> {
    submissions: &'a Submissions,
    /// No submission was left. Another thread may have the turn now.
    over: Cell<bool>,
}

impl Combiner<'_> {
    /// Returns the next submission. `None` ends the turn.
    pub(super) fn next(&self) -> Option<Submission> {
        let mut state = self.submissions.lock();
        let next = state.waiting.pop_front();
        if next.is_none() {
            // Under the same lock as the check: a thread that submits after it takes the next turn.
            state.busy = false;
            self.over.set(true);
        }
        next
    }
}

impl Drop for Combiner<'_> {
    fn drop(&mut self) {
        // `thread::panicking` would be wrong here: a thread that is unwinding may take part in a
        // transfer.
        if self.over.get() {
            return;
        }
        let left = {
            let mut state = self.submissions.lock();
            state.busy = false;
            std::mem::take(&mut state.waiting)
        };
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        thread,
    };

    fn submission(receipt: &Arc<Receipt>) -> Submission {
        Submission::new(NonNull::dangling(), Vec::new(), receipt.clone())
    }

    #[test]
    fn one_combiner_at_a_time_queues_all_submissions_and_completes_each_once() {
        let submissions = Submissions::default();
        let (busy, queued) = (AtomicBool::new(false), Mutex::new(0u64));
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    let receipt = Arc::new(Receipt::default());
                    for _ in 0..500 {
                        if let Some(combiner) = submissions.submit(submission(&receipt)) {
                            while let Some(next) = combiner.next() {
                                assert!(!busy.swap(true, Ordering::Relaxed), "two at once");
                                let epoch = {
                                    let mut queued = queued.lock().unwrap();
                                    *queued += 1;
                                    *queued
                                };
                                busy.store(false, Ordering::Relaxed);
                                next.complete(epoch, Ok(()));
                            }
                        }
                        let result = receipt.wait();
                        assert!(result.queued.is_ok() && result.epoch.is_some());
                    }
                });
            }
        });
        assert_eq!(*queued.lock().unwrap(), 4 * 500);
    }

    #[test]
    fn panic_of_the_combiner_completes_all_submissions_with_an_error() {
        let submissions = Submissions::default();
        let [mine, others] = [0, 1].map(|_| Arc::new(Receipt::default()));
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            let combiner = submissions.submit(submission(&mine)).unwrap();
            assert!(submissions.submit(submission(&others)).is_none(), "one turn at a time");
            let _first = combiner.next();
            panic!("on purpose");
        }));
        assert!(unwound.is_err());
        for receipt in [&mine, &others] {
            let result = receipt.wait();
            assert!(matches!(result.queued, Err(StageError::WorkerLost)) && result.epoch.is_none());
        }
        assert!(submissions.submit(submission(&mine)).is_some(), "the turn is over");
    }
}
