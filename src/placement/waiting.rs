//! Waiting until some device has room.
//!
//! A request waits in the queue of the budget of every suitable device. The first grant serves it.
//! The other queue entries are then removed, and bytes that another queue has granted in the
//! meantime go to its next waiter.

use super::{Health, Lease, PlaceError, PlacementRequest, Placer, Rejections};
use aquifer_core::{Charge, Reservation, budget::Waiting};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// The interval at which a blocked thread checks for changes without a wake-up: free memory of
/// caches and of the driver.
const TICK: Duration = Duration::from_millis(20);

/// A request that waits for room. A `Future` that needs no async runtime.
///
/// Its waker is called when a budget grants the bytes, and when a device is lost, restored or
/// drained. It has no clock: memory that caches could release, memory that other programs return to
/// the driver, and the deadline are checked only when it is polled. So a program with a timer
/// should poll it periodically. Dropping it removes its queue entries; bytes that were granted but
/// not taken go to the next waiter.
///
/// ```
/// use aquifer::{PlacementRequest, Policy, Runtime, sim::Sim};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let rt = Runtime::builder().driver(Sim::h200(2).driver()).device_budget(8 << 30).build()?;
/// let placer = rt.placer(Policy::MostFree);
/// let held = [placer.place(&PlacementRequest::bytes(6 << 30))?, placer.place(&PlacementRequest::bytes(6 << 30))?];
/// let mut placing = pin!(placer.place_async(PlacementRequest::bytes(4 << 30)));
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(placing.as_mut().poll(&mut context).is_pending());
/// let [first, _second] = held;
/// drop(first);
/// let Poll::Ready(lease) = placing.poll(&mut context) else { panic!("there is room") };
/// assert_eq!(lease?.remaining(), 4 << 30);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "a future waits only while it is polled"]
pub struct Placing {
    placer: Placer,
    place: PlacementRequest,
    deadline: Option<Instant>,
    entries: Vec<QueueEntry>,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the device set.
    watch: u64,
    finished: bool,
}

/// A queue entry of a request at the budget of one device.
pub(super) struct QueueEntry {
    pub(super) index: usize,
    pub(super) generation: u32,
    pub(super) waiting: Waiting,
}

impl Placer {
    /// Like [`Placer::place`], but waits until a device has room or until `deadline`. Waits in the
    /// queue of the budget of each suitable device, by priority, then in order of arrival. Blocks
    /// the thread, with no lock held.
    ///
    /// # Errors
    /// [`PlaceError`] with the state at the deadline. Fails at once if no device could ever have
    /// room.
    pub fn place_by(
        &self,
        place: &PlacementRequest,
        deadline: Option<Instant>,
    ) -> Result<Lease, PlaceError> {
        let placing = self.place_async(place.clone());
        match deadline {
            Some(deadline) => block_on(placing.until(deadline), Some(deadline)),
            None => block_on(placing, None),
        }
    }

    /// Returns a future that waits as [`Placer::place_by`] does.
    pub fn place_async(&self, place: PlacementRequest) -> Placing {
        let (entries, watch) = (Vec::new(), self.device_set.watcher());
        Placing {
            placer: self.clone(),
            place,
            deadline: None,
            entries,
            turn: None,
            watch,
            finished: false,
        }
    }
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls at each wake-up, each tick and at the deadline. The deadline is enforced by the future
/// itself.
pub(super) fn block_on<F: Future + Unpin>(mut future: F, deadline: Option<Instant>) -> F::Output {
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(answer) = Pin::new(&mut future).poll(&mut context) {
            return answer;
        }
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        thread::park_timeout(left.map_or(TICK, |left| left.min(TICK)));
    }
}

impl Placing {
    /// Sets a deadline. A poll after it ends the wait with the refusal of that moment.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Returns the bytes that a device has to have room for.
    fn needs(&self) -> u64 {
        self.place.needs()
    }

    /// Makes a lease of what one queue has granted, if the device is in service and the driver has
    /// the bytes.
    fn accept_grant(&self, index: usize, generation: u32, charge: Charge) -> Option<Lease> {
        let device_set = &self.placer.device_set;
        let member = device_set.at(index, generation);
        if !member.is_serving() || !member.is_backed() {
            return None;
        }
        let mut reservation = Reservation::from(charge);
        // `min_free` beyond the size was a condition only. It is not kept.
        drop(reservation.draw(self.needs() - self.place.size()));
        Some(Lease::new(device_set.clone(), index, generation, reservation))
    }

    /// Polls every queue entry. Entries at devices out of service are dropped.
    fn poll_queues(&mut self, context: &mut Context<'_>) -> Option<Lease> {
        for mut entry in std::mem::take(&mut self.entries) {
            if !self.placer.device_set.at(entry.index, entry.generation).is_serving() {
                continue;
            }
            match Pin::new(&mut entry.waiting).poll(context) {
                Poll::Pending => self.entries.push(entry),
                Poll::Ready(Ok(charge)) => {
                    // The other entries, removed together with this one, are dropped when it
                    // serves.
                    if let Some(lease) = self.accept_grant(entry.index, entry.generation, charge) {
                        return Some(lease);
                    }
                }
                // The request exceeds a limit that was lowered. It is tried again at the next poll.
                Poll::Ready(Err(_)) => {}
            }
        }
        None
    }

    /// Joins the queue of each suitable budget that lacks bytes. Returns whether a device could
    /// ever have room.
    fn enqueue(&mut self) -> bool {
        let device_set = self.placer.device_set.clone();
        let mut satisfiable = false;
        for (index, member) in device_set.members().enumerate() {
            let candidate = member.candidate(index, 0, None);
            let suits = self.place.suits(&candidate) && candidate.total >= self.needs();
            if !suits || member.health() == Health::Lost {
                continue;
            }
            satisfiable = true;
            let known = self.entries.iter().any(|entry| entry.index == index);
            if known
                || !member.is_serving()
                || member.budget().estimate(self.place.requested_priority()) >= self.needs()
            {
                continue;
            }
            let waiting = member.budget().charge_async(self.needs());
            let waiting = match self.place.requested_priority() {
                Some(priority) => waiting.with_priority(priority),
                None => waiting,
            };
            self.entries.push(QueueEntry { index, generation: member.generation, waiting });
        }
        satisfiable
    }

    fn try_now(&mut self, context: &mut Context<'_>) -> Result<Option<Lease>, PlaceError> {
        let device_set = self.placer.device_set.clone();
        let now = self.placer.refresh();
        if let Some(lease) = self.poll_queues(context) {
            return Ok(Some(lease));
        }
        // Devices where the request is queued are skipped: its own queue entry would make them
        // refuse.
        let queued = self.entries.iter().fold(0, |set, entry| set | (1 << entry.index));
        let mut rejections = Rejections { devices: queued, ..Rejections::default() };
        let turn = *self.turn.get_or_insert_with(|| self.placer.turn());
        if let Some(lease) = self.placer.try_ranked(&self.place, turn, now, &mut rejections)? {
            return Ok(Some(lease));
        }
        let satisfiable = self.enqueue();
        if let Some(lease) = self.poll_queues(context) {
            return Ok(Some(lease));
        }
        for entry in &self.entries {
            let member = device_set.at(entry.index, entry.generation);
            let lacks = self
                .needs()
                .saturating_sub(member.budget().limit().saturating_sub(member.budget().used()));
            if lacks > 0 && member.has_cached() {
                // What cannot be released now may be released at the next tick.
                let _ = member.make_room(lacks);
            }
        }
        let queued: Vec<_> =
            self.entries.iter().map(|entry| device_set.at(entry.index, entry.generation)).collect();
        for member in queued {
            let mut lease = None;
            member.reclaim_from_others(self.needs(), || {
                lease = self.poll_queues(context);
                lease.is_some()
            });
            if lease.is_some() {
                return Ok(lease);
            }
        }
        if satisfiable { Ok(None) } else { Err(self.placer.no_fit(&self.place, 1, &rejections)) }
    }
}

impl Future for Placing {
    type Output = Result<Lease, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.finished {
            return Poll::Pending;
        }
        if self.place.size() == 0 {
            self.finished = true;
            return Poll::Ready(Err(PlaceError::ZeroSize));
        }
        // Registered before anything is read, so that no later change is missed.
        self.placer.device_set.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = match self.try_now(context) {
            Ok(Some(lease)) => Ok(lease),
            Err(refused) => Err(refused),
            Ok(None) if late => {
                // Its own queue entries would distort the reasons in the error.
                self.entries.clear();
                Err(self.placer.no_fit(&self.place, 1, &Rejections::default()))
            }
            Ok(None) => return Poll::Pending,
        };
        self.finished = true;
        self.entries.clear();
        Poll::Ready(answer)
    }
}

impl Drop for Placing {
    fn drop(&mut self) {
        self.placer.device_set.watch(self.watch, None);
    }
}

impl fmt::Debug for Placing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placing")
            .field("place", &self.place)
            .field("deadline", &self.deadline)
            .field("entries", &self.entries.len())
            .finish_non_exhaustive()
    }
}
