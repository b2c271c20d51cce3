//! Waiting until some device has room.
//!
//! A request waits in the queue of the budget of every suitable device. The first grant serves it.
//! The other queue entries are then removed, and bytes that another queue has granted in the
//! meantime go to its next waiter.

use super::{Health, Lease, Met, Place, PlaceError, Placer};
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
/// use aquifer::{Place, Policy, Runtime, sim::Sim};
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let rt = Runtime::builder().driver(Sim::h200(2).driver()).device_budget(8 << 30).build()?;
/// let placer = rt.placer(Policy::MostFree);
/// let held = [placer.place(&Place::bytes(6 << 30))?, placer.place(&Place::bytes(6 << 30))?];
/// let mut placing = pin!(placer.place_async(Place::bytes(4 << 30)));
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
    place: Place,
    deadline: Option<Instant>,
    lines: Vec<Line>,
    /// The turn of the policy, taken at the first poll.
    turn: Option<u64>,
    /// The number under which its waker is registered with the fleet.
    watch: u64,
    over: bool,
}

struct Line {
    index: usize,
    generation: u32,
    waiting: Waiting,
}

impl Placer {
    /// Like [`Placer::place`], but waits until a device has room or until `deadline`. Waits in the
    /// queue of the budget of each suitable device, by priority, then in order of arrival. Blocks
    /// the thread, with no lock held.
    ///
    /// # Errors
    /// [`PlaceError`] with the state at the deadline. Fails at once if no device could ever have
    /// room.
    pub fn place_by(&self, place: &Place, deadline: Option<Instant>) -> Result<Lease, PlaceError> {
        let placing = self.place_async(place.clone());
        match deadline {
            Some(deadline) => block_on(placing.until(deadline), Some(deadline)),
            None => block_on(placing, None),
        }
    }

    /// Returns a future that waits as [`Placer::place_by`] does.
    pub fn place_async(&self, place: Place) -> Placing {
        let (lines, watch) = (Vec::new(), self.fleet.watcher());
        Placing {
            placer: self.clone(),
            place,
            deadline: None,
            lines,
            turn: None,
            watch,
            over: false,
        }
    }
}

struct Sleeper(Thread);

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Polls at each wake-up, each tick and at the deadline. The deadline is enforced by the future
/// itself.
pub(super) fn block_on<F: Future + Unpin>(mut future: F, deadline: Option<Instant>) -> F::Output {
    let waker = Waker::from(Arc::new(Sleeper(thread::current())));
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
    fn take(&self, index: usize, generation: u32, charge: Charge) -> Option<Lease> {
        let fleet = &self.placer.fleet;
        let member = fleet.at(index, generation);
        if !member.serves() || !member.is_covered() {
            return None;
        }
        let mut held = Reservation::from(charge);
        // `min_free` beyond the size was a condition only. It is not kept.
        drop(held.draw(self.needs() - self.place.size()));
        Some(fleet.lease(index, generation, held))
    }

    /// Polls every queue entry. Entries at devices out of service are dropped.
    fn ask(&mut self, context: &mut Context<'_>) -> Option<Lease> {
        for mut line in std::mem::take(&mut self.lines) {
            if !self.placer.fleet.at(line.index, line.generation).serves() {
                continue;
            }
            match Pin::new(&mut line.waiting).poll(context) {
                Poll::Pending => self.lines.push(line),
                Poll::Ready(Ok(charge)) => {
                    // The other entries, removed together with this one, are dropped when it
                    // serves.
                    if let Some(lease) = self.take(line.index, line.generation, charge) {
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
    fn line_up(&mut self) -> bool {
        let fleet = self.placer.fleet.clone();
        let mut hope = false;
        for (index, member) in fleet.members().enumerate() {
            let candidate = member.candidate(index, 0, None);
            let suits = self.place.suits(&candidate) && candidate.total >= self.needs();
            if !suits || member.health() == Health::Lost {
                continue;
            }
            hope = true;
            let known = self.lines.iter().any(|line| line.index == index);
            if known
                || !member.serves()
                || member.budget().estimate(self.place.priority_asked()) >= self.needs()
            {
                continue;
            }
            let waiting = member.budget().charge_async(self.needs());
            let waiting = match self.place.priority_asked() {
                Some(priority) => waiting.with_priority(priority),
                None => waiting,
            };
            self.lines.push(Line { index, generation: member.generation, waiting });
        }
        hope
    }

    fn try_now(&mut self, context: &mut Context<'_>) -> Result<Option<Lease>, PlaceError> {
        let fleet = self.placer.fleet.clone();
        let now = self.placer.find_out();
        if let Some(lease) = self.ask(context) {
            return Ok(Some(lease));
        }
        // Devices where the request is queued are skipped: its own queue entry would make them
        // refuse.
        let refused = self.lines.iter().fold(0, |set, line| set | (1 << line.index));
        let mut met = Met { refused, ..Met::default() };
        let turn = *self.turn.get_or_insert_with(|| self.placer.turn());
        if let Some(lease) = self.placer.try_ranked(&self.place, turn, now, &mut met)? {
            return Ok(Some(lease));
        }
        let hope = self.line_up();
        if let Some(lease) = self.ask(context) {
            return Ok(Some(lease));
        }
        for line in &self.lines {
            let member = fleet.at(line.index, line.generation);
            let lacks = self
                .needs()
                .saturating_sub(member.budget().limit().saturating_sub(member.budget().used()));
            if lacks > 0 && member.holds_free() {
                // What cannot be released now may be released at the next tick.
                let _ = member.make_room(lacks);
            }
        }
        let lined: Vec<_> =
            self.lines.iter().map(|line| fleet.at(line.index, line.generation)).collect();
        for member in lined {
            let mut lease = None;
            member.ask_others(self.needs(), || {
                lease = self.ask(context);
                lease.is_some()
            });
            if lease.is_some() {
                return Ok(lease);
            }
        }
        if hope { Ok(None) } else { Err(self.placer.nowhere(&self.place, 1, &met)) }
    }
}

impl Future for Placing {
    type Output = Result<Lease, PlaceError>;

    /// After it has returned `Ready`, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.over {
            return Poll::Pending;
        }
        if self.place.size() == 0 {
            self.over = true;
            return Poll::Ready(Err(PlaceError::ZeroSize));
        }
        // Registered before anything is read, so that no later change is missed.
        self.placer.fleet.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = match self.try_now(context) {
            Ok(Some(lease)) => Ok(lease),
            Err(refused) => Err(refused),
            Ok(None) if late => {
                // Its own queue entries would distort the reasons in the error.
                self.lines.clear();
                Err(self.placer.nowhere(&self.place, 1, &Met::default()))
            }
            Ok(None) => return Poll::Pending,
        };
        self.over = true;
        self.lines.clear();
        Poll::Ready(answer)
    }
}

impl Drop for Placing {
    fn drop(&mut self) {
        self.placer.fleet.watch(self.watch, None);
    }
}

impl fmt::Debug for Placing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Placing")
            .field("place", &self.place)
            .field("deadline", &self.deadline)
            .field("lines", &self.lines.len())
            .finish_non_exhaustive()
    }
}
