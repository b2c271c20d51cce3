//! Waiting until there is room for all shards of a group.
//!
//! - A group waits in one queue at a time: that of the device which lacks bytes and has the most
//!   left.
//! - The next attempt uses what that queue grants. If the rest is not available, the grant is
//!   released before the group queues again.
//! - So a group holds nothing while it waits, and groups cannot deadlock, whether or not their
//!   budgets share a root. In several queues at once, two groups could each hold what the other
//!   needs.

use super::{Group, Lease, PlaceError, Placer};
use crate::placement::{
    choice::device_to_wait_at,
    waiting::{AwaitedRequest, QueueEntries, Wait, block_on},
};
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

/// The maximum number of immediate grants in one poll. A device that is repeatedly emptied by
/// others is left to the next poll.
const MAX_GRANTS: usize = 4;

/// A group that waits for room. A `Future` that needs no async runtime.
///
/// As with [`Placing`](super::super::Placing), its waker is called when a budget grants bytes and
/// when a device is lost, restored or drained. It has no clock. Dropping it removes its queue entry
/// and releases its bytes.
///
/// ```
/// use aquifer::{Group, PlacementRequest, Policy, Runtime, sim::Sim};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let rt = Runtime::builder().driver(Sim::h200(2).driver()).device_budget(8 << 30).build()?;
/// let placer = rt.placer(Policy::MostFree);
/// let held = placer.place(&PlacementRequest::bytes(6 << 30))?;
/// let mut grouping = pin!(placer.place_group_async(Group::of(2, PlacementRequest::bytes(4 << 30))));
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(grouping.as_mut().poll(&mut context).is_pending());
/// drop(held);
/// let Poll::Ready(leases) = grouping.poll(&mut context) else { panic!("there is room") };
/// assert_eq!(leases?.len(), 2);
/// # Ok::<(), aquifer::MemoryError>(())
/// ```
#[must_use = "a future waits only while it is polled"]
pub struct Grouping(Wait<Group>);

impl Placer {
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
        block_on(self, group.clone(), deadline)
    }

    /// Returns a future that waits as [`Placer::place_group_by`] does.
    pub fn place_group_async(&self, group: Group) -> Grouping {
        Grouping(Wait::new(self, group))
    }
}

impl Grouping {
    /// Sets a deadline. A poll after it ends the wait with the refusal of that moment.
    pub fn until(self, deadline: Instant) -> Self {
        Self(self.0.until(deadline))
    }
}

impl Future for Grouping {
    type Output = Result<Vec<Lease>, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll(context)
    }
}

impl fmt::Debug for Grouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Grouping").field(&self.0).finish()
    }
}

impl Group {
    /// Joins the queue of the device that lacks bytes and has the most left. Keeps its entry if no
    /// other device has more.
    fn enqueue(&self, placer: &Placer, entries: &mut QueueEntries, refused: &PlaceError) {
        let PlaceError::Nowhere(nowhere) = refused else { return };
        let set = &placer.device_set;
        let current = entries.devices().next().map(|(index, _)| index);
        // Computed from the limit, since the group's own queue entry hides what the budget has
        // left.
        let left = |index: usize| {
            let budget = set.current(index).map(|member| member.budget());
            budget.map_or(0, |budget| budget.limit().saturating_sub(budget.used()))
        };
        let best = device_to_wait_at(nowhere, current, |index, _| left(index));
        let Some(index) = best.filter(|_| best != current) else { return };
        let Some(member) = set.current(index) else { return };
        entries.clear();
        entries.join(index, member, self.each.size(), self.each.requested_priority());
    }
}

impl AwaitedRequest for Group {
    type Placed = Vec<Lease>;

    fn is_empty(&self) -> bool {
        self.shards == 0 || self.each.size() == 0
    }

    fn attempt(
        &self,
        placer: &Placer,
        turn: u64,
        entries: &mut QueueEntries,
        context: &mut Context<'_>,
    ) -> Result<Option<Vec<Lease>>, PlaceError> {
        let set = &placer.device_set;
        let mut granted = entries.poll(set, context);
        for _ in 0..MAX_GRANTS {
            let refused = match placer.try_group(self, turn, &mut granted) {
                Ok(leases) => return Ok(Some(leases)),
                Err(refused @ PlaceError::Nowhere(_)) => refused,
                Err(other) => return Err(other),
            };
            drop(granted.take());
            if !placer.is_satisfiable(self) {
                return Err(refused);
            }
            self.enqueue(placer, entries, &refused);
            let Some((index, generation)) = entries.devices().next() else { break };
            set.at(index, generation).reclaim_from_others(self.each.size(), || {
                granted = entries.poll(set, context);
                granted.is_some() || entries.devices().next().is_none()
            });
            if granted.is_none() {
                break;
            }
        }
        Ok(None)
    }

    fn last_attempt(&self, placer: &Placer) -> Result<Vec<Lease>, PlaceError> {
        placer.place_group(self)
    }
}
