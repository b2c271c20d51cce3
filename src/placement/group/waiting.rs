//! Waiting until there is room for all shards of a group.
//!
//! - A group waits in one queue at a time: that of the device which lacks bytes and has the most
//!   left.
//! - The next attempt uses what that queue grants. If the rest is not available, the grant is
//!   released before the group queues again.
//! - So a group holds nothing while it waits, and groups cannot deadlock, whether or not their
//!   budgets share a root. In several queues at once, two groups could each hold what the other
//!   needs.

use super::{Granted, Group, Lease, PlaceError, Placer, Why};
use crate::placement::waiting::block_on;
use aquifer_core::budget::Waiting;
use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
    time::Instant,
};

/// The maximum number of immediate grants in one poll. A device that is repeatedly emptied by
/// others is left to the next poll.
const GRANTS: usize = 4;

/// A group that waits for room. A `Future` that needs no async runtime.
///
/// As with [`Placing`](super::super::Placing), its waker is called when a budget grants bytes and
/// when a device is lost, restored or drained. It has no clock. Dropping it removes its queue entry
/// and releases its bytes.
///
/// ```
/// use aquifer::{Group, Place, Policy, Runtime, sim::Sim};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let rt = Runtime::builder().driver(Sim::h200(2).driver()).device_budget(8 << 30).build()?;
/// let placer = rt.placer(Policy::MostFree);
/// let held = placer.place(&Place::bytes(6 << 30))?;
/// let mut grouping = pin!(placer.place_group_async(Group::of(2, Place::bytes(4 << 30))));
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
    line: Option<Line>,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the fleet.
    watch: u64,
    over: bool,
}

/// A queue entry for the bytes of one shard.
struct Line {
    index: usize,
    generation: u32,
    waiting: Waiting,
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
        let watch = self.fleet.watcher();
        Grouping {
            placer: self.clone(),
            group,
            deadline: None,
            line: None,
            turn: None,
            watch,
            over: false,
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
    fn granted(&mut self, context: &mut Context<'_>) -> Option<Granted> {
        let line = self.line.as_mut()?;
        let (index, generation) = (line.index, line.generation);
        let answer = Pin::new(&mut line.waiting).poll(context);
        let member = self.placer.fleet.at(index, generation);
        let serves = member.serves();
        if answer.is_ready() || !serves {
            self.line = None;
        }
        match answer {
            Poll::Ready(Ok(charge)) if serves && member.is_covered() => {
                Some(Granted { index, generation, held: charge.into() })
            }
            // Refused, or granted by a budget with room while the driver has none. The next sample
            // shows that.
            _ => None,
        }
    }

    /// Joins the queue of the device that lacks bytes and has the most left. Keeps its entry if no
    /// other device has more.
    fn line_up(&mut self, refused: &PlaceError) {
        let PlaceError::Nowhere(nowhere) = refused else { return };
        let fleet = &self.placer.fleet;
        let standing = self.line.as_ref().map(|line| line.index);
        // Computed from the limit, since the group's own queue entry hides what the budget has
        // left.
        let left = |index: usize| {
            let budget = fleet.current(index).map(|member| member.budget());
            budget.map_or(0, |budget| budget.limit().saturating_sub(budget.used()))
        };
        let lacking = nowhere.devices.iter().enumerate();
        let lacking =
            lacking.filter(|(_, passed)| matches!(passed.why, Why::Free { .. } | Why::Budget(_)));
        let best = lacking
            .map(|(index, _)| index)
            .max_by_key(|&index| (left(index), standing == Some(index)));
        // If no device lacks bytes, a device has to come back or a pool has to find room. The next
        // poll detects that.
        let Some(index) = best.filter(|_| best != standing) else { return };
        let Some(member) = fleet.current(index) else { return };
        let waiting = member.budget().charge_async(self.group.each.size());
        let waiting = match self.group.each.priority_asked() {
            Some(priority) => waiting.with_priority(priority),
            None => waiting,
        };
        self.line = Some(Line { index, generation: member.generation, waiting });
    }

    fn try_now(&mut self, context: &mut Context<'_>) -> Poll<Result<Vec<Lease>, PlaceError>> {
        let turn = *self.turn.get_or_insert_with(|| self.placer.turn());
        let mut granted = self.granted(context);
        for _ in 0..GRANTS {
            let refused = match self.placer.try_group(&self.group, turn, &mut granted) {
                Err(refused @ PlaceError::Nowhere(_)) => refused,
                other => return Poll::Ready(other),
            };
            drop(granted.take());
            if !self.placer.could_ever(&self.group) {
                return Poll::Ready(Err(refused));
            }
            self.line_up(&refused);
            let Some(line) = &self.line else { break };
            let fleet = self.placer.fleet.clone();
            let member = fleet.at(line.index, line.generation);
            member.ask_others(self.group.each.size(), || {
                granted = self.granted(context);
                granted.is_some() || self.line.is_none()
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
        if self.over {
            return Poll::Pending;
        }
        // Registered before anything is read, so that no later change is missed.
        self.placer.fleet.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = match self.try_now(context) {
            Poll::Ready(answer) => answer,
            Poll::Pending if late => {
                // Its own queue entry would distort the reasons in the error.
                self.line = None;
                self.placer.place_group(&self.group)
            }
            Poll::Pending => return Poll::Pending,
        };
        self.over = true;
        self.line = None;
        Poll::Ready(answer)
    }
}

impl Drop for Grouping {
    fn drop(&mut self) {
        self.placer.fleet.watch(self.watch, None);
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
