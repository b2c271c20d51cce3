//! A job in pieces: who runs which, and what became of them.

use std::{
    error, fmt,
    mem::{self, ManuallyDrop},
    panic::{AssertUnwindSafe, catch_unwind},
    process,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

/// When a job is given up.
///
/// ```
/// use aquifer_host::workers::Deadline;
/// use std::time::{Duration, Instant};
/// assert_eq!(Deadline::from(None), Deadline::Never);
/// assert_eq!(Deadline::from(Duration::from_secs(1)), Deadline::AfterBegin(Duration::from_secs(1)));
/// let now = Instant::now();
/// assert_eq!(Deadline::from(Some(now)), Deadline::At(now));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Deadline {
    /// Never.
    Never,
    /// At this moment, though the job may not have begun by then.
    At(Instant),
    /// So long after its first piece began: waiting behind other jobs costs it nothing.
    AfterBegin(Duration),
}

impl From<Option<Instant>> for Deadline {
    fn from(moment: Option<Instant>) -> Self {
        moment.map_or(Self::Never, Self::At)
    }
}

impl From<Duration> for Deadline {
    fn from(limit: Duration) -> Self {
        Self::AfterBegin(limit)
    }
}

/// Why a job, or a piece of it, was not done.
///
/// Its example is that of [`Workers`](super::Workers).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum JobError {
    /// A piece panicked. The worker lives on; the message went to the panic hook.
    Panicked {
        /// The piece.
        piece: usize,
    },
    /// The deadline passed.
    TimedOut {
        /// Pieces that were done by then.
        done: usize,
        /// Pieces there are.
        pieces: usize,
    },
    /// It was cancelled.
    Cancelled,
    /// The workers ended before it was done, or this is a child process and they are the parent's.
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

/// A job that workers are at. Dropping it cancels the pieces that have not begun.
///
/// Its example is that of [`Workers`](super::Workers).
#[derive(Debug)]
#[must_use = "a job that is dropped is cancelled"]
pub struct Job<R: Send + 'static> {
    state: Arc<State<R>>,
}

/// What a crew sees of a job.
pub(super) trait Work: Send + Sync {
    /// Runs the next piece, counted in `busy` meanwhile; `false` if there is none to begin.
    fn run_piece(&self, busy: &AtomicUsize) -> bool;
    /// Pieces that nobody has begun.
    fn waiting(&self) -> usize;
    /// Begins no further piece, for this reason.
    fn stop(&self, why: JobError);
}

struct State<R> {
    pieces: usize,
    deadline: Deadline,
    /// The process whose threads work at it. In a child of that, the lock may be held by a thread
    /// that is not there.
    process: u32,
    done: AtomicUsize,
    inner: Mutex<Inner<R>>,
    changed: Condvar,
}

type Piece<R> = Arc<dyn Fn(usize) -> R + Send + Sync>;

struct Inner<R> {
    /// Until the last piece is over, so that what it owns is gone before anybody learns that the
    /// job is.
    work: Option<Piece<R>>,
    /// When the first piece began.
    begun: Option<Instant>,
    /// The next piece to begin.
    next: usize,
    /// Pieces that somebody is at.
    running: usize,
    results: Vec<Slot<R>>,
    /// Why no further piece begins.
    stopped: Option<JobError>,
    /// Nothing runs, nothing will, and `work` has been dropped.
    finished: bool,
    /// Nobody will fetch results.
    abandoned: bool,
}

enum Slot<R> {
    Open,
    Done(R),
    Taken,
}

impl<R: Send + 'static> Job<R> {
    pub(super) fn new(
        pieces: usize,
        deadline: Deadline,
        work: impl Fn(usize) -> R + Send + Sync + 'static,
    ) -> Self {
        let results = (0..pieces).map(|_| Slot::Open).collect();
        let inner = Inner {
            work: (pieces > 0).then(|| Arc::new(work) as Piece<R>),
            begun: None,
            next: 0,
            running: 0,
            results,
            stopped: None,
            finished: pieces == 0,
            abandoned: false,
        };
        let (process, done) = (process::id(), AtomicUsize::new(0));
        let (inner, changed) = (Mutex::new(inner), Condvar::new());
        Self { state: Arc::new(State { pieces, deadline, process, done, inner, changed }) }
    }

    pub(super) fn work(&self) -> Arc<dyn Work> {
        self.state.clone()
    }

    /// Pieces there are.
    #[must_use]
    pub fn pieces(&self) -> usize {
        self.state.pieces
    }

    /// Pieces that are done: with [`Job::pieces`], how far it has come. Takes no lock.
    #[must_use]
    pub fn done(&self) -> usize {
        self.state.done.load(Ordering::Acquire)
    }

    /// Waits for all pieces and answers with their results, in order. Blocks until `deadline` or
    /// the job's own, whichever is first.
    ///
    /// # Errors
    /// [`JobError`]; what has been made is dropped.
    pub fn wait(self, deadline: Option<Instant>) -> Result<Vec<R>, JobError> {
        self.wait_for(self.state.pieces, deadline)?;
        let results = mem::take(&mut self.state.lock().results);
        Ok(results
            .into_iter()
            .filter_map(|slot| match slot {
                Slot::Done(result) => Some(result),
                Slot::Open | Slot::Taken => None,
            })
            .collect())
    }

    /// Waits until the first `pieces` pieces are done, while others may still run. When it answers
    /// for all of them, the work itself has been dropped. Blocks until `deadline` or the job's own,
    /// and cancels the job when that passes.
    ///
    /// # Errors
    /// [`JobError`] if one of them will not be done.
    pub fn wait_for(&self, pieces: usize, deadline: Option<Instant>) -> Result<(), JobError> {
        let state = &*self.state;
        if state.is_the_parents() {
            return Err(JobError::Closed);
        }
        let pieces = pieces.min(state.pieces);
        let mut inner = state.lock();
        loop {
            let ready = inner.results.iter().take(pieces).all(|slot| !matches!(slot, Slot::Open));
            if ready && (pieces < state.pieces || inner.finished) {
                return Ok(());
            }
            if let Some(why) = inner.stopped
                && !ready
                && inner.running == 0
            {
                return Err(why);
            }
            let own = state.ends(&inner);
            let Some(until) = deadline.into_iter().chain(own).min() else {
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

    /// The result of a piece that is done; `None` if it is not, or has been taken.
    #[must_use]
    pub fn take(&self, piece: usize) -> Option<R> {
        if self.state.is_the_parents() {
            return None;
        }
        let mut inner = self.state.lock();
        let slot = inner.results.get_mut(piece)?;
        match mem::replace(slot, Slot::Taken) {
            Slot::Done(result) => Some(result),
            other => {
                *slot = other;
                None
            }
        }
    }

    /// Begins no further piece. Pieces that workers are at run to their end.
    pub fn cancel(&self) {
        if !self.state.is_the_parents() {
            self.state.stop(JobError::Cancelled);
        }
    }

    /// Cancels, and waits until no worker is at it and the work has been dropped.
    pub fn settle(self) {
        self.cancel();
        if self.state.is_the_parents() {
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
        // What a child has of its parent's job stays in the child's memory.
        if self.state.is_the_parents() {
            return;
        }
        self.state.stop(JobError::Cancelled);
        let mut inner = self.state.lock();
        inner.abandoned = true;
        let results = mem::take(&mut inner.results);
        drop(inner);
        // Outside the lock: results may be anything.
        drop(results);
    }
}

impl<R> State<R> {
    fn lock(&self) -> MutexGuard<'_, Inner<R>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_the_parents(&self) -> bool {
        process::id() != self.process
    }

    /// When it is given up, as far as that is settled.
    fn ends(&self, inner: &Inner<R>) -> Option<Instant> {
        match self.deadline {
            Deadline::Never => None,
            Deadline::At(moment) => Some(moment),
            Deadline::AfterBegin(limit) => inner.begun?.checked_add(limit),
        }
    }

    fn timed_out(&self) -> JobError {
        JobError::TimedOut { done: self.done.load(Ordering::Acquire), pieces: self.pieces }
    }

    /// Drops the work when nothing needs it any more, then says that the job is over.
    fn finish_if_over(&self, mut inner: MutexGuard<'_, Inner<R>>) {
        let begins_more = inner.stopped.is_none() && inner.next < self.pieces;
        if begins_more || inner.running > 0 || inner.finished {
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

impl<R: Send> Work for State<R> {
    fn run_piece(&self, busy: &AtomicUsize) -> bool {
        let mut inner = self.lock();
        if inner.stopped.is_some() || inner.next >= self.pieces {
            return false;
        }
        if self.ends(&inner).is_some_and(|deadline| Instant::now() >= deadline) {
            drop(inner);
            self.stop(self.timed_out());
            return false;
        }
        let Some(work) = inner.work.clone() else { return false };
        let piece = inner.next;
        inner.next += 1;
        inner.running += 1;
        busy.fetch_add(1, Ordering::Relaxed);
        let first = inner.begun.is_none() && matches!(self.deadline, Deadline::AfterBegin(_));
        if first {
            inner.begun = Some(Instant::now());
        }
        drop(inner);
        if first {
            // Who waits can now tell until when.
            self.changed.notify_all();
        }
        run(Running { state: self, piece, result: None, busy }, work);
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
        self.finish_if_over(inner);
    }
}

/// A piece that a worker is at: however the worker leaves it, it is accounted for.
struct Running<'a, R> {
    state: &'a State<R>,
    piece: usize,
    result: Option<R>,
    busy: &'a AtomicUsize,
}

fn run<R>(mut running: Running<'_, R>, work: Piece<R>) {
    let piece = running.piece;
    match catch_unwind(AssertUnwindSafe(|| work(piece))) {
        Ok(result) => running.result = Some(result),
        Err(payload) => {
            // A payload may panic when it is dropped; what that throws is left alone.
            if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
                let _left_alone = ManuallyDrop::new(second);
            }
        }
    }
    // Before the piece counts as over: see `Inner::work`.
    drop(work);
}

impl<R> Drop for Running<'_, R> {
    fn drop(&mut self) {
        let mut inner = self.state.lock();
        // Before anybody learns that the piece is over: who then asks for more finds this worker
        // free.
        self.busy.fetch_sub(1, Ordering::Relaxed);
        inner.running -= 1;
        let mut unwanted = None;
        match self.result.take() {
            Some(result) if inner.abandoned => unwanted = Some(result),
            Some(result) => {
                self.state.done.fetch_add(1, Ordering::AcqRel);
                if let Some(slot) = inner.results.get_mut(self.piece) {
                    *slot = Slot::Done(result);
                }
            }
            None => {
                inner.stopped.get_or_insert(JobError::Panicked { piece: self.piece });
            }
        }
        self.state.finish_if_over(inner);
        drop(unwanted);
    }
}

impl<R> fmt::Debug for State<R> {
    /// Takes no lock.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("pieces", &self.pieces)
            .field("done", &self.done)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
