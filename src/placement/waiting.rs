//! Waiting until some device has room.
//!
//! Whoever waits stands in line at the budget of every device that suits. The first that grants
//! serves; the others' places are given up, and bytes that one of them had granted meanwhile go to
//! the next in its line.

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

/// How often a thread that waits looks for what nobody tells: free memory of caches and of the
/// driver.
const TICK: Duration = Duration::from_millis(20);

/// A request that waits for room. A `Future` that needs no runtime.
///
/// Its waker is called when a budget grants the bytes, and when a device comes or goes. It has no
/// clock: what caches could give up, what other programs give back to the driver, and its deadline
/// are looked at when it is polled, so a program with a timer polls now and then. Dropping it gives
/// its places in line up; bytes that were granted and not taken go to the next.
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
    /// Its turn, once it has been polled.
    turn: Option<u64>,
    /// Where its waker stands among those of the fleet.
    watch: u64,
    over: bool,
}

struct Line {
    index: usize,
    generation: u32,
    waiting: Waiting,
}

impl Placer {
    /// As [`Placer::place`], waiting until a device has room, or until `deadline`: in line at the
    /// budget of each device that suits, by priority, then in order. Blocks the thread, with no
    /// lock held.
    ///
    /// # Errors
    /// [`PlaceError`] of the deadline; at once where no device could ever have room.
    pub fn place_by(&self, place: &Place, deadline: Option<Instant>) -> Result<Lease, PlaceError> {
        let placing = self.place_async(place.clone());
        match deadline {
            Some(deadline) => block_on(placing.until(deadline), Some(deadline)),
            None => block_on(placing, None),
        }
    }

    /// As [`Placer::place_by`], by a future.
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

/// Polls whenever it is woken, each tick and at the deadline, which is the future's own.
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
    /// Ends with the refusal of that moment when it is polled after `deadline`.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Bytes that a device has to have room for.
    fn needs(&self) -> u64 {
        self.place.needs()
    }

    /// What one line has granted, if the device still serves and the driver has as much.
    fn take(&self, index: usize, generation: u32, charge: Charge) -> Option<Lease> {
        let fleet = &self.placer.fleet;
        let member = fleet.at(index, generation);
        if !member.serves() || !member.is_covered() {
            return None;
        }
        let mut held = Reservation::from(charge);
        // Room beyond what is held was a condition.
        drop(held.draw(self.needs() - self.place.size()));
        Some(fleet.lease(index, generation, held))
    }

    /// Asks every line. A line at a device that has left is given up.
    fn ask(&mut self, context: &mut Context<'_>) -> Option<Lease> {
        for mut line in std::mem::take(&mut self.lines) {
            if !self.placer.fleet.at(line.index, line.generation).serves() {
                continue;
            }
            match Pin::new(&mut line.waiting).poll(context) {
                Poll::Pending => self.lines.push(line),
                Poll::Ready(Ok(charge)) => {
                    // Other lines, taken out with this one, are given up when it serves.
                    if let Some(lease) = self.take(line.index, line.generation, charge) {
                        return Some(lease);
                    }
                }
                // Above a limit that was lowered; it is asked again at the next poll.
                Poll::Ready(Err(_)) => {}
            }
        }
        None
    }

    /// Gets in line where the budget lacks bytes. Whether a device could ever have room.
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
        // Where it stands in line, its own place there would refuse it.
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
                // What it cannot give now it may at the next tick.
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

    /// Once it has been ready it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if self.over {
            return Poll::Pending;
        }
        if self.place.size() == 0 {
            self.over = true;
            return Poll::Ready(Err(PlaceError::ZeroSize));
        }
        // Before anything is looked at: what changes from here on is told.
        self.placer.fleet.watch(self.watch, Some(context.waker()));
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let answer = match self.try_now(context) {
            Ok(Some(lease)) => Ok(lease),
            Err(refused) => Err(refused),
            Ok(None) if late => {
                // Without its own places in line, which are in the way of what it says.
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
