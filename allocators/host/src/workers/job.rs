//! A job in pieces: its scheduling, its results and its errors.

use crate::kernel::is_forked_child;
use std::{
    error, fmt,
    mem::{self, ManuallyDrop},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Instant,
};

/// Why a job, or a piece of it, was not completed.
///
/// See [`Workers`](super::Workers) for an example.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum JobError {
    /// A piece panicked. The worker continues. The message went to the panic hook.
    Panicked {
        /// The piece.
        piece: usize,
    },
    /// The deadline passed.
    TimedOut {
        /// Pieces that were completed by then.
        done: usize,
        /// Number of all pieces.
        pieces: usize,
    },
    /// The job was cancelled.
    Cancelled,
    /// The workers ended before the job was completed, or they belong to the parent of this
    /// process.
    Closed,
}

impl fmt::Display for JobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Panicked { piece } => write!(f, "piece {piece} of the job panicked"),
            Self::TimedOut { done, pieces } => {
                write!(f, "the deadline passed with {done} of {pieces} pieces done")
            }
            Self::Cancelled => f.write_str("the job was cancelled"),
            Self::Closed => f.write_str("the workers ended before the job"),
        }
    }
}

impl error::Error for JobError {}

/// A job that was submitted to workers. Dropping it cancels the pieces that have not started.
///
/// See [`Workers`](super::Workers) for an example.
#[derive(Debug)]
#[must_use = "a job that is dropped is cancelled"]
pub struct Job<R: Send + 'static> {
    state: Arc<JobCore<R>>,
}

/// The interface of a job to its worker group.
pub(super) trait Work: Send + Sync {
    /// Runs the next piece, and counts it in `busy` for that time. Returns `false` if there is none
    /// left.
    fn run_piece(&self, busy: &AtomicUsize) -> bool;
    /// Returns the number of pieces that have not started.
    fn waiting(&self) -> usize;
    /// Starts no further piece, for the given reason.
    fn stop(&self, why: JobError);
}

struct JobCore<R> {
    pieces: usize,
    deadline: Option<Instant>,
    done: AtomicUsize,
    inner: Mutex<JobState<R>>,
    changed: Condvar,
}

type PieceFn<R> = Arc<dyn Fn(usize) -> R + Send + Sync>;

struct JobState<R> {
    /// Dropped after the last piece, so that what it owns is gone before the job is reported as
    /// finished.
    work: Option<PieceFn<R>>,
    /// The next piece to start.
    next: usize,
    /// Number of running pieces.
    running: usize,
    results: Vec<PieceResult<R>>,
    /// Why no further piece starts.
    stopped: Option<JobError>,
    /// No piece runs or will run, and `work` has been dropped.
    finished: bool,
    /// The job's handle was dropped, so results are not needed.
    abandoned: bool,
}

enum PieceResult<R> {
    Pending,
    Done(R),
    Taken,
}

impl<R: Send + 'static> Job<R> {
    pub(super) fn new(
        pieces: usize,
        deadline: Option<Instant>,
        work: impl Fn(usize) -> R + Send + Sync + 'static,
    ) -> Self {
        let results = (0..pieces).map(|_| PieceResult::Pending).collect();
        let inner = JobState {
            work: (pieces > 0).then(|| Arc::new(work) as PieceFn<R>),
            next: 0,
            running: 0,
            results,
            stopped: None,
            finished: pieces == 0,
            abandoned: false,
        };
        let (done, inner, changed) = (AtomicUsize::new(0), Mutex::new(inner), Condvar::new());
        Self { state: Arc::new(JobCore { pieces, deadline, done, inner, changed }) }
    }

    pub(super) fn work(&self) -> Arc<dyn Work> {
        self.state.clone()
    }

    /// Returns the number of pieces.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.state.pieces
    }

    /// Returns the number of completed pieces, as progress out of [`Job::pieces`]. Takes no lock.
    #[must_use]
    pub fn done(&self) -> usize {
        self.state.done.load(Ordering::Acquire)
    }

    /// Waits for all pieces and returns their results, in order. Blocks at most until `deadline` or
    /// the job's own, whichever is first.
    ///
    /// # Errors
    /// [`JobError`]. Results made so far are dropped.
    pub fn wait(self, deadline: Option<Instant>) -> Result<Vec<R>, JobError> {
        self.wait_for(self.state.pieces, deadline)?;
        let results = mem::take(&mut self.state.lock().results);
        Ok(results
            .into_iter()
            .filter_map(|slot| match slot {
                PieceResult::Done(result) => Some(result),
                PieceResult::Pending | PieceResult::Taken => None,
            })
            .collect())
    }

    /// Waits until the first `pieces` pieces are completed, while others may still run. If these
    /// are all pieces, `work` has been dropped on return. Blocks at most until `deadline` or the
    /// job's own, whichever is first. The job is cancelled if that passes.
    ///
    /// # Errors
    /// [`JobError`] if one of these pieces will not be completed.
    pub fn wait_for(&self, pieces: usize, deadline: Option<Instant>) -> Result<(), JobError> {
        let state = &*self.state;
        if is_forked_child() {
            return Err(JobError::Closed);
        }
        let pieces = pieces.min(state.pieces);
        let mut inner = state.lock();
        loop {
            let ready =
                inner.results.iter().take(pieces).all(|slot| !matches!(slot, PieceResult::Pending));
            if ready && (pieces < state.pieces || inner.finished) {
                return Ok(());
            }
            if let Some(why) = inner.stopped
                && !ready
                && inner.running == 0
            {
                return Err(why);
            }
            let Some(until) = deadline.into_iter().chain(state.deadline).min() else {
                inner = state.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let why = state.timed_out();
                drop(inner);
                state.stop(why);
                return Err(why);
            }
            inner =
                state.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Takes the result of a completed piece. Returns `None` if it is not completed, or was taken
    /// already.
    #[must_use]
    pub fn take(&self, piece: usize) -> Option<R> {
        if is_forked_child() {
            return None;
        }
        let mut inner = self.state.lock();
        let slot = inner.results.get_mut(piece)?;
        match mem::replace(slot, PieceResult::Taken) {
            PieceResult::Done(result) => Some(result),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Starts no further piece. Running pieces continue to their end.
    pub fn cancel(&self) {
        if !is_forked_child() {
            self.state.stop(JobError::Cancelled);
        }
    }

    /// Cancels the job, and waits until no piece runs and `work` has been dropped.
    pub fn settle(self) {
        self.cancel();
        if is_forked_child() {
            return;
        }
        let mut inner = self.state.lock();
        while !inner.finished {
            inner = self.state.changed.wait(inner).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl<R: Send + 'static> Drop for Job<R> {
    fn drop(&mut self) {
        // A child process leaks its copy of the parent's job.
        if is_forked_child() {
            return;
        }
        self.state.stop(JobError::Cancelled);
        let mut inner = self.state.lock();
        inner.abandoned = true;
        let results = mem::take(&mut inner.results);
        drop(inner);
        // Outside the lock, because dropping a result may run any code.
        drop(results);
    }
}

impl<R> JobCore<R> {
    fn lock(&self) -> MutexGuard<'_, JobState<R>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timed_out(&self) -> JobError {
        JobError::TimedOut { done: self.done.load(Ordering::Acquire), pieces: self.pieces }
    }

    /// Drops `work` when no piece needs it any more, then marks the job as finished.
    fn finish_if_done(&self, mut inner: MutexGuard<'_, JobState<R>>) {
        let starts_more = inner.stopped.is_none() && inner.next < self.pieces;
        if starts_more || inner.running > 0 || inner.finished {
            drop(inner);
            self.changed.notify_all();
            return;
        }
        let work = inner.work.take();
        drop(inner);
        drop(work);
        self.lock().finished = true;
        self.changed.notify_all();
    }
}

impl<R: Send> Work for JobCore<R> {
    fn run_piece(&self, busy: &AtomicUsize) -> bool {
        let mut inner = self.lock();
        if inner.stopped.is_some() || inner.next >= self.pieces {
            return false;
        }
        if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            drop(inner);
            self.stop(self.timed_out());
            return false;
        }
        let Some(work) = inner.work.clone() else { return false };
        let piece = inner.next;
        debug_assert!(piece < self.pieces && !inner.finished, "there is no piece {piece}");
        inner.next += 1;
        inner.running += 1;
        busy.fetch_add(1, Ordering::Relaxed);
        drop(inner);
        run(RunningPiece { state: self, piece, result: None, busy }, work);
        true
    }

    fn waiting(&self) -> usize {
        let inner = self.lock();
        if inner.stopped.is_some() { 0 } else { self.pieces - inner.next }
    }

    fn stop(&self, why: JobError) {
        let mut inner = self.lock();
        if inner.stopped.is_none() && inner.next < self.pieces {
            inner.stopped = Some(why);
        }
        self.finish_if_done(inner);
    }
}

/// A running piece. Its drop does the accounting, however the piece ends.
struct RunningPiece<'a, R> {
    state: &'a JobCore<R>,
    piece: usize,
    result: Option<R>,
    busy: &'a AtomicUsize,
}

fn run<R>(mut running: RunningPiece<'_, R>, work: PieceFn<R>) {
    let piece = running.piece;
    match catch_unwind(AssertUnwindSafe(|| work(piece))) {
        Ok(result) => running.result = Some(result),
        Err(payload) => {
            // A payload may panic when it is dropped. The payload of that second panic is leaked.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                let _leaked = ManuallyDrop::new(second);
            }
        }
    }
    // Before the piece counts as completed (see `JobState::work`).
    drop(work);
}

impl<R> Drop for RunningPiece<'_, R> {
    fn drop(&mut self) {
        let mut inner = self.state.lock();
        // Before the piece is reported as completed, so that a caller which then submits another
        // job finds this worker free.
        self.busy.fetch_sub(1, Ordering::Relaxed);
        debug_assert!(inner.running > 0 && !inner.finished, "the piece did not run");
        inner.running -= 1;
        let mut unwanted = None;
        match self.result.take() {
            Some(result) if inner.abandoned => unwanted = Some(result),
            Some(result) => {
                self.state.done.fetch_add(1, Ordering::AcqRel);
                if let Some(slot) = inner.results.get_mut(self.piece) {
                    *slot = PieceResult::Done(result);
                }
            }
            None => {
                inner.stopped.get_or_insert(JobError::Panicked { piece: self.piece });
            }
        }
        self.state.finish_if_done(inner);
        drop(unwanted);
    }
}

impl<R> fmt::Debug for JobCore<R> {
    /// Takes no lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("pieces", &self.pieces)
            .field("done", &self.done)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
