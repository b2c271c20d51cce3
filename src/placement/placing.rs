//! Waiting until some device has room.
//!
//! A request waits in the queue of the budget of every suitable device. The first grant serves it.
//! The other queue entries are then removed, and bytes that another queue has granted in the
//! meantime go to its next waiter.

use super::{
    Health, Lease, PlaceError, PlacementRequest, Placer, Rejections,
    waiting::{AwaitedRequest, Grant, QueueEntries, Wait, block_on},
};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

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
pub struct Placing(Wait<PlacementRequest>);

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
        block_on(self, place.clone(), deadline)
    }

    /// Returns a future that waits as [`Placer::place_by`] does.
    pub fn place_async(&self, place: PlacementRequest) -> Placing {
        Placing(Wait::new(self, place))
    }
}

impl Placing {
    /// Sets a deadline. A poll after it ends the wait with the refusal of that moment.
    pub fn until(self, deadline: Instant) -> Self {
        Self(self.0.until(deadline))
    }
}

impl Future for Placing {
    type Output = Result<Lease, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

impl fmt::Debug for Placing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Placing").field(&self.0).finish()
    }
}

impl PlacementRequest {
    /// Makes a lease of what one queue has granted.
    fn lease(&self, placer: &Placer, granted: Grant) -> Lease {
        let Grant { index, generation, mut reservation } = granted;
        // `min_free` beyond the size was a condition only. It is not kept.
        drop(reservation.draw(self.needs() - self.size()));
        Lease::new(placer.device_set.clone(), index, generation, reservation)
    }

    /// Joins the queue of each suitable budget that lacks bytes. Returns whether a device could
    /// ever have room.
    fn enqueue(&self, placer: &Placer, entries: &mut QueueEntries) -> bool {
        let (needs, priority) = (self.needs(), self.requested_priority());
        let mut satisfiable = false;
        for (index, member) in placer.device_set.members().enumerate() {
            let candidate = member.candidate(index, 0, None);
            let suits = self.suits(&candidate) && candidate.total >= needs;
            if !suits || member.health() == Health::Lost {
                continue;
            }
            satisfiable = true;
            let is_queued = entries.devices().any(|(queued, _)| queued == index);
            if !is_queued && member.is_serving() && member.budget().estimate(priority) < needs {
                entries.join(index, member, needs, priority);
            }
        }
        satisfiable
    }
}

impl AwaitedRequest for PlacementRequest {
    type Placed = Lease;

    fn is_empty(&self) -> bool {
        self.size() == 0
    }

    fn attempt(
        &self,
        placer: &Placer,
        turn: u64,
        entries: &mut QueueEntries,
        context: &mut Context<'_>,
    ) -> Result<Option<Lease>, PlaceError> {
        let (set, needs) = (&placer.device_set, self.needs());
        let now = placer.refresh();
        if let Some(granted) = entries.poll(set, context) {
            return Ok(Some(self.lease(placer, granted)));
        }
        // Devices where the request is queued are skipped: its own queue entry would make them
        // refuse.
        let queued = entries.devices().fold(0, |set, (index, _)| set | (1 << index));
        let mut rejections = Rejections { devices: queued, ..Rejections::default() };
        if let Some(lease) = placer.try_ranked(self, turn, now, &mut rejections)? {
            return Ok(Some(lease));
        }
        let satisfiable = self.enqueue(placer, entries);
        if let Some(granted) = entries.poll(set, context) {
            return Ok(Some(self.lease(placer, granted)));
        }
        let queued: Vec<_> =
            entries.devices().map(|(index, generation)| set.at(index, generation)).collect();
        for member in &queued {
            let budget = member.budget();
            let lacks = needs.saturating_sub(budget.limit().saturating_sub(budget.used()));
            if lacks > 0 && member.has_cached() {
                // What cannot be released now may be released at the next tick.
                let _ = member.make_room(lacks);
            }
        }
        for member in queued {
            let mut granted = None;
            member.reclaim_from_others(needs, || {
                granted = entries.poll(set, context);
                granted.is_some()
            });
            if let Some(granted) = granted {
                return Ok(Some(self.lease(placer, granted)));
            }
        }
        if satisfiable { Ok(None) } else { Err(placer.no_fit(self, 1, &rejections)) }
    }

    fn last_attempt(&self, placer: &Placer) -> Result<Lease, PlaceError> {
        Err(placer.no_fit(self, 1, &Rejections::default()))
    }
}
