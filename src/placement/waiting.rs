//! Waiting until there is room, for one request or a group.
//!
//! - A [`Wait`] has entries in the queues of budgets. Each poll uses what they have granted.
//! - Its waker is registered with the device set before anything is read, so that no change is
//!   missed.
//! - After it has ended it has no entry, and bytes that were granted but not used go to the next
//!   waiter.

use super::{
    PlaceError, Placer,
    device_set::{DeviceSet, Member},
};
use aquifer_core::{Reservation, budget::Waiting};
use std::{
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// The interval at which a blocked thread checks for changes without a wake-up: free memory of
/// caches and of the driver.
pub(super) const TICK: Duration = Duration::from_millis(20);

/// A request that can wait for room.
pub(super) trait AwaitedRequest: fmt::Debug {
    /// What it is served with.
    type Placed;

    /// Whether nothing is requested.
    fn is_empty(&self) -> bool;

    /// Uses what the queues have granted, or what is free now, or joins queues. Returns `None` if
    /// it has to wait.
    ///
    /// # Errors
    /// [`PlaceError`] if there can never be room.
    fn attempt(
        &self,
        placer: &Placer,
        turn: u64,
        entries: &mut QueueEntries,
        context: &mut Context<'_>,
    ) -> Result<Option<Self::Placed>, PlaceError>;

    /// Ends a wait whose deadline has passed, without entries in queues.
    ///
    /// # Errors
    /// [`PlaceError`] with the state of this moment.
    fn last_attempt(&self, placer: &Placer) -> Result<Self::Placed, PlaceError>;
}

/// A request that waits for room.
pub(super) struct Wait<R> {
    placer: Placer,
    request: R,
    deadline: Option<Instant>,
    entries: QueueEntries,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the device set.
    watch: u64,
    finished: bool,
}

/// Bytes that a queue has granted.
pub(super) struct Grant {
    pub(super) index: usize,
    pub(super) generation: u32,
    pub(super) reservation: Reservation,
}

/// The entries of one request in the queues of budgets, at most one for each device.
#[derive(Default)]
pub(super) struct QueueEntries(Vec<QueueEntry>);

struct QueueEntry {
    index: usize,
    generation: u32,
    waiting: Waiting,
}

impl QueueEntries {
    /// Returns the first usable grant, and leaves all queues then. A grant is usable if its device
    /// is in service and the driver has the bytes. Entries that have ended, and those at devices
    /// out of service, are removed.
    pub(super) fn poll(&mut self, set: &DeviceSet, context: &mut Context<'_>) -> Option<Grant> {
        for mut entry in mem::take(&mut self.0) {
            let (index, generation) = (entry.index, entry.generation);
            let member = set.at(index, generation);
            if !member.is_serving() {
                continue;
            }
            match Pin::new(&mut entry.waiting).poll(context) {
                Poll::Pending => self.0.push(entry),
                Poll::Ready(Ok(charge)) if member.is_serving() && member.is_backed() => {
                    self.0.clear();
                    return Some(Grant { index, generation, reservation: charge.into() });
                }
                // The request exceeds a limit that was lowered, or a budget has room while the
                // driver has none. It is tried again at the next poll.
                Poll::Ready(_) => {}
            }
        }
        None
    }

    /// Joins the queue of the budget of a device.
    pub(super) fn join(
        &mut self,
        index: usize,
        member: &Member,
        bytes: u64,
        priority: Option<i32>,
    ) {
        let waiting = member.budget().charge_async(bytes);
        let waiting = match priority {
            Some(priority) => waiting.with_priority(priority),
            None => waiting,
        };
        self.0.push(QueueEntry { index, generation: member.generation, waiting });
    }

    /// Leaves all queues.
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    /// Returns the index and the generation of each device in whose queue it is.
    pub(super) fn devices(&self) -> impl Iterator<Item = (usize, u32)> + '_ {
        self.0.iter().map(|entry| (entry.index, entry.generation))
    }
}

impl<R: AwaitedRequest> Wait<R> {
    pub(super) fn new(placer: &Placer, request: R) -> Self {
        let watch = placer.device_set.watcher();
        Self {
            placer: placer.clone(),
            request,
            deadline: None,
            entries: QueueEntries::default(),
            turn: None,
            watch,
            finished: false,
        }
    }

    /// Sets a deadline. A poll after it ends the wait.
    pub(super) fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// After it has returned `Ready`, it stays pending.
    pub(super) fn poll(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Result<R::Placed, PlaceError>> {
        if self.finished {
            return Poll::Pending;
        }
        let placer = &self.placer;
        placer.device_set.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = if self.request.is_empty() {
            Err(PlaceError::ZeroSize)
        } else {
            let turn = *self.turn.get_or_insert_with(|| placer.turn());
            match self.request.attempt(placer, turn, &mut self.entries, context) {
                Ok(Some(placed)) => Ok(placed),
                Err(refused) => Err(refused),
                Ok(None) if late => {
                    // Its own entries would distort the reasons in the error.
                    self.entries.clear();
                    self.request.last_attempt(placer)
                }
                Ok(None) => return Poll::Pending,
            }
        };
        self.finished = true;
        self.entries.clear();
        Poll::Ready(answer)
    }
}

impl<R> Drop for Wait<R> {
    fn drop(&mut self) {
        self.placer.device_set.watch(self.watch, None);
    }
}

impl<R: fmt::Debug> fmt::Debug for Wait<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wait")
            .field("request", &self.request)
            .field("deadline", &self.deadline)
            .field("entries", &self.entries.0.len())
            .finish_non_exhaustive()
    }
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Blocks this thread until a request is placed. Polls at each wake-up, each tick and at the
/// deadline.
///
/// # Errors
/// As of [`Wait::poll`].
pub(super) fn block_on<R: AwaitedRequest>(
    placer: &Placer,
    request: R,
    deadline: Option<Instant>,
) -> Result<R::Placed, PlaceError> {
    let mut wait = Wait::new(placer, request);
    wait.deadline = deadline;
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(answer) = wait.poll(&mut context) {
            return answer;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        thread::park_timeout(left.map_or(TICK, |left| left.min(TICK)));
    }
}
