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
use std::{
    collections::VecDeque,
    mem::{self, ManuallyDrop},
    ptr::NonNull,
    sync::{Mutex, MutexGuard, PoisonError, mpsc::SyncSender},
};

/// The copies of one slot. The slot must not be touched before the answer. If this is dropped
/// without one, its worker sees that.
pub(super) struct Submission {
    /// The slot's first byte.
    pub(super) start: NonNull<u8>,
    pub(super) moves: Vec<Move>,
    pub(super) answer: SyncSender<Answer>,
}

// SAFETY: 1. the address of a slot. Its worker does not touch the slot until it is answered, and
// keeps the slot alive for longer.
unsafe impl Send for Submission {}

/// The result of a submission.
pub(super) struct Answer {
    pub(super) moves: Vec<Move>,
    /// The epoch of the transfer's stream that ends with the copies.
    pub(super) epoch: u64,
    pub(super) queued: Result<(), StageError>,
}

/// The copies of one transfer that are on their way to the driver.
#[derive(Default)]
pub(super) struct Submissions(Mutex<Combining>);

#[derive(Default)]
struct Combining {
    /// In the order of submission.
    waiting: VecDeque<Submission>,
    /// A thread is queueing copies. It checks `waiting` again before it stops.
    busy: bool,
}

impl Submissions {
    fn lock(&self) -> MutexGuard<'_, Combining> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues a submission. If no other thread is queueing copies, this one calls `queue` with
    /// the submission and all that arrive meanwhile.
    pub(super) fn submit(&self, submission: Submission, mut queue: impl FnMut(Submission)) {
        {
            let mut state = self.lock();
            state.waiting.push_back(submission);
            if mem::replace(&mut state.busy, true) {
                return;
            }
        }
        let turn = Turn(self);
        while let Some(next) = self.next() {
            queue(next);
        }
        // `next` has ended the turn, and another thread may have it now.
        let _over = ManuallyDrop::new(turn);
    }

    /// Returns the next submission. `None` ends the turn, under the same lock as the check: a
    /// thread that submits after it takes the next turn.
    fn next(&self) -> Option<Submission> {
        let mut state = self.lock();
        debug_assert!(state.busy, "another thread has ended the turn");
        let next = state.waiting.pop_front();
        state.busy = next.is_some();
        next
    }
}

/// The turn of one thread. Dropped on unwind only: the waiting submissions get no answer.
struct Turn<'a>(&'a Submissions);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let left = mem::take(&mut *self.0.lock());
        drop(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::{
            atomic::{AtomicBool, AtomicU64, Ordering},
            mpsc::{Receiver, sync_channel},
        },
        thread,
    };

    fn submission() -> (Submission, Receiver<Answer>) {
        let (answer, receipt) = sync_channel(1);
        (Submission { start: NonNull::dangling(), moves: Vec::new(), answer }, receipt)
    }

    #[test]
    fn one_combiner_at_a_time_queues_all_submissions_and_completes_each_once() {
        let submissions = Submissions::default();
        let (busy, queued) = (AtomicBool::new(false), AtomicU64::new(0));
        let queue = |next: Submission| {
            assert!(!busy.swap(true, Ordering::Relaxed), "two at once");
            let epoch = queued.fetch_add(1, Ordering::Relaxed);
            busy.store(false, Ordering::Relaxed);
            next.answer.send(Answer { moves: next.moves, epoch, queued: Ok(()) }).unwrap();
        };
        thread::scope(|threads| {
            for _ in 0..4 {
                threads.spawn(|| {
                    for _ in 0..500 {
                        let (next, receipt) = submission();
                        submissions.submit(next, queue);
                        assert!(receipt.recv().unwrap().queued.is_ok());
                    }
                });
            }
        });
        assert_eq!(queued.load(Ordering::Relaxed), 4 * 500);
    }

    #[test]
    fn panic_of_the_combiner_leaves_all_submissions_without_an_answer() {
        let submissions = Submissions::default();
        let ([mine, other], mut receipts) = {
            let (all, receipts): (Vec<_>, Vec<_>) =
                [(); 2].map(|()| submission()).into_iter().unzip();
            (<[_; 2]>::try_from(all).ok().unwrap(), receipts)
        };
        let mut other = Some(other);
        let unwound = catch_unwind(AssertUnwindSafe(|| {
            submissions.submit(mine, |_first| {
                let queue = |_| unreachable!("one turn at a time");
                submissions.submit(other.take().unwrap(), queue);
                panic!("on purpose");
            });
        }));
        assert!(unwound.is_err());
        assert!(receipts.iter().all(|receipt| receipt.recv().is_err()));
        // The next submission has a turn of its own.
        let (next, receipt) = submission();
        receipts.push(receipt);
        let mut turns = 0;
        submissions.submit(next, |_| turns += 1);
        assert_eq!(turns, 1);
    }
}
