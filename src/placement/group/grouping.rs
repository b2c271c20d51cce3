//! Waiting until there is room for all shards of a group.
//!
//! - A group waits in one queue at a time: that of the device which lacks bytes and has the most
//!   left.
//! - The next attempt uses what that queue grants. If the rest is not available, the grant is
//!   released before the group queues again.
//! - So a group holds nothing while it waits, and groups cannot deadlock, whether or not their
//!   budgets share a root. In several queues at once, two groups could each hold what the other
//!   needs.

use super::{Grant, Group, Lease, PlaceError, Placer, RejectReason};
use crate::placement::waiting::{QueueEntry, block_on};
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
pub struct Grouping {
    placer: Placer,
    group: Group,
    deadline: Option<Instant>,
    entry: Option<QueueEntry>,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the device set.
    watch: u64,
    finished: bool,
}

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
        let grouping = self.place_group_async(group.clone());
        match deadline {
            Some(deadline) => block_on(grouping.until(deadline), Some(deadline)),
            None => block_on(grouping, None),
        }
    }

    /// Returns a future that waits as [`Placer::place_group_by`] does.
    pub fn place_group_async(&self, group: Group) -> Grouping {
        let watch = self.device_set.watcher();
        Grouping {
            placer: self.clone(),
            group,
            deadline: None,
            entry: None,
            turn: None,
            watch,
            finished: false,
        }
    }
}

impl Grouping {
    /// Sets a deadline. A poll after it ends the wait with the refusal of that moment.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Returns what the queue has granted, if its device is in service and the driver has the
    /// bytes. A finished queue entry is removed.
    fn poll_grant(&mut self, context: &mut Context<'_>) -> Option<Grant> {
        let entry = self.entry.as_mut()?;
        let (index, generation) = (entry.index, entry.generation);
        let answer = Pin::new(&mut entry.waiting).poll(context);
        let member = self.placer.device_set.at(index, generation);
        let serving = member.is_serving();
        if answer.is_ready() || !serving {
            self.entry = None;
        }
        match answer {
            Poll::Ready(Ok(charge)) if serving && member.is_backed() => {
                Some(Grant { index, generation, reservation: charge.into() })
            }
            // Refused, or granted by a budget with room while the driver has none. The next sample
            // shows that.
            _ => None,
        }
    }

    /// Joins the queue of the device that lacks bytes and has the most left. Keeps its entry if no
    /// other device has more.
    fn enqueue(&mut self, refused: &PlaceError) {
        let PlaceError::Nowhere(nowhere) = refused else { return };
        let device_set = &self.placer.device_set;
        let current = self.entry.as_ref().map(|entry| entry.index);
        // Computed from the limit, since the group's own queue entry hides what the budget has
        // left.
        let left = |index: usize| {
            let budget = device_set.current(index).map(|member| member.budget());
            budget.map_or(0, |budget| budget.limit().saturating_sub(budget.used()))
        };
        let lacking = nowhere.devices.iter().enumerate();
        let lacking = lacking.filter(|(_, passed)| {
            matches!(passed.why, RejectReason::Free { .. } | RejectReason::Budget(_))
        });
        let best = lacking
            .map(|(index, _)| index)
            .max_by_key(|&index| (left(index), current == Some(index)));
        // If no device lacks bytes, a device has to come back or a pool has to find room. The next
        // poll detects that.
        let Some(index) = best.filter(|_| best != current) else { return };
        let Some(member) = device_set.current(index) else { return };
        let waiting = member.budget().charge_async(self.group.each.size());
        let waiting = match self.group.each.requested_priority() {
            Some(priority) => waiting.with_priority(priority),
            None => waiting,
        };
        self.entry = Some(QueueEntry { index, generation: member.generation, waiting });
    }

    fn try_now(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Lease>, PlaceError>> {
        let turn = *self.turn.get_or_insert_with(|| self.placer.turn());
        let mut granted = self.poll_grant(context);
        for _ in 0..MAX_GRANTS {
            let refused = match self.placer.try_group(&self.group, turn, &mut granted) {
                Err(refused @ PlaceError::Nowhere(_)) => refused,
                other => return Poll::Ready(other),
            };
            drop(granted.take());
            if !self.placer.is_satisfiable(&self.group) {
                return Poll::Ready(Err(refused));
            }
            self.enqueue(&refused);
            let Some(entry) = &self.entry else { break };
            let device_set = self.placer.device_set.clone();
            let member = device_set.at(entry.index, entry.generation);
            member.reclaim_from_others(self.group.each.size(), || {
                granted = self.poll_grant(context);
                granted.is_some() || self.entry.is_none()
            });
            if granted.is_none() {
                break;
            }
        }
        Poll::Pending
    }
}

impl Future for Grouping {
    type Output = Result<Vec<Lease>, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.finished {
            return Poll::Pending;
        }
        // Registered before anything is read, so that no later change is missed.
        self.placer.device_set.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = match self.try_now(context) {
            Poll::Ready(answer) => answer,
            Poll::Pending if late => {
                // Its own queue entry would distort the reasons in the error.
                self.entry = None;
                self.placer.place_group(&self.group)
            }
            Poll::Pending => return Poll::Pending,
        };
        self.finished = true;
        self.entry = None;
        Poll::Ready(answer)
    }
}

impl Drop for Grouping {
    fn drop(&mut self) {
        self.placer.device_set.watch(self.watch, None);
    }
}

impl fmt::Debug for Grouping {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grouping")
            .field("group", &self.group)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}
