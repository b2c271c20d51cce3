//! Waiting until there is room for a request or a group.
//!
//! - A request waits in the queue of the budget of every suitable device that lacks bytes. What the
//!   first one grants is used. The other queue entries are then removed, and bytes that another
//!   queue has granted in the meantime go to its next waiter.
//! - A group of several shards waits in one queue at a time: that of the device which lacks bytes
//!   and has the most left. The next attempt uses what that queue grants. If the rest is not
//!   available, the grant is released before the group queues again. So a group holds nothing while
//!   it waits, and groups cannot deadlock, whether or not their budgets share a root. In several
//!   queues at once, two groups could each hold what the other needs.
//! - The waker is registered with the device set before anything is read, so that no change is
//!   missed.

use super::{
    Group, Health, Lease, PlaceError, PlacementRequest, Placer,
    choice::{Grant, only},
    device_set::{DeviceSet, Member},
};
use aquifer_core::{Reservation, budget::Waiting};
use std::{
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

/// The maximum number of immediate grants in one poll. A device that is repeatedly emptied by
/// others is left to the next poll.
const MAX_GRANTS: usize = 4;

/// A request that waits for room, or a group. A `Future` that needs no async runtime.
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
#[derive(Debug)]
#[must_use = "a future waits only while it is polled"]
pub struct Placing<T = Lease> {
    placer: Placer,
    group: Group,
    deadline: Option<Instant>,
    entries: QueueEntries,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the device set.
    watch: u64,
    finished: bool,
    /// Makes the output of the leases.
    output: fn(Vec<Lease>) -> Result<T, PlaceError>,
}

/// The entries of one request in the queues of budgets, at most one for each device.
#[derive(Default, Debug)]
struct QueueEntries(Vec<QueueEntry>);

#[derive(Debug)]
struct QueueEntry {
    index: usize,
    generation: u32,
    waiting: Waiting,
}

impl QueueEntries {
    /// Returns the first usable grant, and leaves all queues then. A grant is usable if its device
    /// is in service and the driver has the bytes. Entries that have ended, and those at devices
    /// out of service, are removed.
    fn poll(&mut self, set: &DeviceSet, context: &mut Context<'_>) -> Option<Grant<Reservation>> {
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
                    let held = Reservation::from(charge);
                    let (generation, bytes) = (Some(generation), held.remaining());
                    return Some(Grant { index, generation, bytes, held });
                }
                // The request exceeds a limit that was lowered, or a budget has room while the
                // driver has none. It is tried again at the next poll.
                Poll::Ready(_) => {}
            }
        }
        None
    }

    /// Joins the queue of the budget of a device.
    fn join(&mut self, index: usize, member: &Member, place: &PlacementRequest) {
        let waiting = member.budget().charge_async(place.needs());
        let waiting = match place.requested_priority() {
            Some(priority) => waiting.with_priority(priority),
            None => waiting,
        };
        self.0.push(QueueEntry { index, generation: member.generation, waiting });
    }

    fn contains(&self, index: usize) -> bool {
        self.0.iter().any(|entry| entry.index == index)
    }

    /// Joins the queues in which a group waits, of devices that lack bytes.
    fn enqueue(&mut self, set: &DeviceSet, group: &Group) {
        let place = &group.each;
        let (needs, priority) = (place.needs(), place.requested_priority());
        let lacking = set.members().enumerate().filter(|(index, member)| {
            let candidate = member.candidate(*index, 0, None);
            let suits = place.suits(&candidate) && candidate.total >= needs;
            // Its own entry hides what the budget has left.
            let lacks = self.contains(*index) || member.budget().estimate(priority) < needs;
            suits && member.is_serving() && lacks
        });
        if group.shards == 1 {
            for (index, member) in lacking.collect::<Vec<_>>() {
                if !self.contains(index) {
                    self.join(index, member, place);
                }
            }
            return;
        }
        // It keeps its entry if no other device has more left.
        let left = |(index, member): &(usize, &Member)| {
            let budget = member.budget();
            (budget.limit().saturating_sub(budget.used()), self.contains(*index))
        };
        let most = lacking.max_by_key(left);
        if let Some((index, member)) = most.filter(|(index, _)| !self.contains(*index)) {
            self.0.clear();
            self.join(index, member, place);
        }
    }
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
        self.place_async(place.clone()).block_on(deadline)
    }

    /// Returns a future that waits as [`Placer::place_by`] does.
    pub fn place_async(&self, place: PlacementRequest) -> Placing {
        Placing::new(self, Group::of(1, place), only)
    }

    /// Like [`Placer::place_group`], but waits until there is room for all shards or until
    /// `deadline`. Blocks, with no lock and no bytes held.
    ///
    /// # Errors
    /// [`PlaceError`] with the state at the deadline. Fails at once if there can never be room.
    pub fn place_group_by(
        &self,
        group: &Group,
        deadline: Option<Instant>,
    ) -> Result<Vec<Lease>, PlaceError> {
        self.place_group_async(group.clone()).block_on(deadline)
    }

    /// Returns a future that waits as [`Placer::place_group_by`] does.
    pub fn place_group_async(&self, group: Group) -> Placing<Vec<Lease>> {
        Placing::new(self, group, Ok)
    }
}

impl<T> Placing<T> {
    fn new(placer: &Placer, group: Group, output: fn(Vec<Lease>) -> Result<T, PlaceError>) -> Self {
        let watch = placer.device_set.watcher();
        let (placer, entries) = (placer.clone(), QueueEntries::default());
        let (deadline, turn, finished) = (None, None, false);
        Self { placer, group, deadline, entries, turn, watch, finished, output }
    }

    /// Sets a deadline. A poll after it ends the wait with the refusal of that moment.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Uses what the queues have granted, or what is free now, or joins queues. Returns `None` if
    /// it has to wait.
    fn attempt(
        &mut self,
        turn: u64,
        context: &mut Context<'_>,
    ) -> Result<Option<Vec<Lease>>, PlaceError> {
        let Self { placer, group, entries, .. } = self;
        let (set, needs) = (&placer.device_set, group.each.needs());
        let mut granted = entries.poll(set, context);
        for _ in 0..MAX_GRANTS {
            match placer.try_group(group, turn, &mut granted) {
                Ok(leases) => return Ok(Some(leases)),
                Err(PlaceError::Nowhere(_)) if placer.is_satisfiable(group) => {}
                Err(refused) => return Err(refused),
            }
            drop(granted.take());
            entries.enqueue(set, group);
            granted = entries.poll(set, context);
            let queued: Vec<_> =
                entries.0.iter().map(|entry| set.at(entry.index, entry.generation)).collect();
            for member in queued {
                if granted.is_some() {
                    break;
                }
                let budget = member.budget();
                let lacks = needs.saturating_sub(budget.limit().saturating_sub(budget.used()));
                if lacks > 0 && member.has_cached() {
                    // What cannot be released now may be released at the next tick.
                    let _ = member.make_room(lacks);
                }
                member.reclaim_from_others(needs, || {
                    granted = entries.poll(set, context);
                    granted.is_some() || entries.0.is_empty()
                });
            }
            if granted.is_none() {
                break;
            }
        }
        Ok(None)
    }

    /// Blocks this thread until the request is placed. Polls at each wake-up, each tick and at the
    /// deadline.
    fn block_on(mut self, deadline: Option<Instant>) -> Result<T, PlaceError> {
        self.deadline = deadline;
        let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(answer) = Pin::new(&mut self).poll(&mut context) {
                return answer;
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            thread::park_timeout(left.map_or(TICK, |left| left.min(TICK)));
        }
    }
}

impl Placer {
    /// Returns whether there would be room if nothing were in use.
    fn is_satisfiable(&self, group: &Group) -> bool {
        let members = self.device_set.members().enumerate();
        let present = members.filter(|(_, member)| member.health() != Health::Lost);
        group.is_satisfiable(present.map(|(index, member)| member.candidate(index, 0, None)))
    }
}

impl<T> Future for Placing<T> {
    type Output = Result<T, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.finished {
            return Poll::Pending;
        }
        self.placer.device_set.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let turn = self.turn.unwrap_or_else(|| self.placer.turn());
        self.turn = Some(turn);
        let answer = match self.attempt(turn, context) {
            Ok(Some(leases)) => Ok(leases),
            Err(refused) => Err(refused),
            Ok(None) if late => {
                // Its own entries would distort the reasons in the error.
                self.entries.0.clear();
                self.placer.try_group(&self.group, turn, &mut None)
            }
            Ok(None) => return Poll::Pending,
        };
        self.finished = true;
        self.entries.0.clear();
        Poll::Ready(answer.and_then(self.output))
    }
}

impl<T> Drop for Placing<T> {
    fn drop(&mut self) {
        self.placer.device_set.watch(self.watch, None);
    }
}

struct ThreadWaker(Thread);

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
