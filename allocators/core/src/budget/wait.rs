//! Waiting for bytes: in line, by priority, then in order.
//!
//! ```text
//!   charge ── fits ──► granted                             release, a limit raised, somebody gone from the line
//!     │ refused                                                                │
//!     ▼                                                                        ▼
//!   in line ◄─────────────── looked through, from the first on ────────────────┘
//!     │                        · fits at every node, nobody before it waits for one of them: granted
//!     │                        · does not: the node that refused is *taken*, until the next look
//!     │                        · is above a limit, or its deadline has passed: refused
//!     ├── granted ──► the waker is called, the charge lies ready
//!     └── dropped ──► its place is given up; if it had been granted, the bytes go to the next
//! ```
//!
//! A look is one stay inside the tree's lock, so nobody's charge comes between two who wait. While
//! a node is taken, a charge that needs room there is refused unless its priority is above the
//! first waiter's: what is given back goes to whoever waits. A charge that needs no room there,
//! since its bytes are guaranteed, passes; so does whoever waits at another node.
//!
//! **Nobody is lost.** The count of those in line is written inside the lock, by the look that left
//! them there, and whoever gives bytes back reads it inside the lock: either the look has seen the
//! bytes, or the count is seen and there is another look. Looking never blocks: if somebody is at
//! the line already, it is asked for, and whoever leaves the line looks whether somebody has asked.
//! So a charge may be dropped anywhere, also by an allocator that the line itself calls.

use super::{
    Budget, Charge,
    node::{NOBODY, Node},
    refusal::OutOfBudget,
};
use crate::{
    panics::contain,
    sync::{
        Bed, Mutex, MutexGuard,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
        },
        lock, try_lock,
    },
};
use std::{
    cmp::Reverse,
    collections::BTreeMap,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Instant,
};

/// A place in line: higher priorities first, then whoever came first.
type Place = (Reverse<i64>, u64);
type Answer = Result<(), OutOfBudget>;

/// Who waits for bytes of a tree.
pub(super) struct Line {
    /// How many wait. Written inside the tree's lock.
    waiting: AtomicU64,
    /// How often a look has been asked for.
    asked: AtomicU64,
    queue: Mutex<Queue>,
}

struct Queue {
    next: u64,
    /// The looks that have been made up to here were asked for.
    looked: u64,
    waiting: BTreeMap<Place, Waiter>,
    answered: BTreeMap<u64, Answer>,
    /// Nodes whose room somebody waits for.
    taken: Vec<&'static Node>,
}

struct Waiter {
    node: &'static Node,
    bytes: u64,
    deadline: Option<Instant>,
    waker: Option<Waker>,
    answer: Option<Answer>,
}

/// What is left to do when the line has been left: wakers and hooks are called with no lock held,
/// dropped wakers too.
#[derive(Default)]
struct Told {
    wakers: Vec<Waker>,
    crossed: Vec<&'static Node>,
}

impl Told {
    fn tell(self) {
        for waker in self.wakers {
            // It is code of others; the rest is woken all the same.
            contain(|| waker.wake());
        }
        for node in self.crossed {
            node.tell_path();
        }
    }
}

impl Line {
    pub(super) fn new() -> Self {
        Self {
            waiting: AtomicU64::new(0),
            asked: AtomicU64::new(0),
            queue: Mutex::new(Queue {
                next: 0,
                looked: 0,
                waiting: BTreeMap::new(),
                answered: BTreeMap::new(),
                taken: Vec::new(),
            }),
        }
    }

    /// Whether anybody waits. Exact inside the tree's lock; sequentially consistent for leases,
    /// which read it outside.
    #[inline]
    pub(super) fn is_waited_for(&self) -> bool {
        self.waiting.load(SeqCst) != 0
    }

    /// How many wait for `node`'s bytes, or for those of a node below it (a count).
    pub(super) fn waiting_at(&self, node: &'static Node) -> usize {
        self.with(|queue| {
            queue.waiting.values().filter(|waiter| waiter.node.is_below(node)).count()
        })
    }

    /// Has the line looked through, by this thread or by the one that is at it. Never blocks.
    #[cold]
    pub(super) fn look(&self) {
        // A read-modify-write here and one in `leave`: whichever is second sees the other, or the
        // queue it has left.
        self.asked.fetch_add(1, AcqRel);
        if let Some(queue) = try_lock(&self.queue) {
            self.leave(queue);
        }
    }

    /// The only way in but for [`Line::look`]: also for those who change nothing, since a look that
    /// is asked for meanwhile is left to them.
    fn with<R>(&self, work: impl FnOnce(&mut Queue) -> R) -> R {
        let mut queue = lock(&self.queue);
        let answer = work(&mut queue);
        self.leave(queue);
        answer
    }

    /// Looks while that is asked for, and leaves.
    fn leave<'a>(&'a self, mut queue: MutexGuard<'a, Queue>) {
        loop {
            let asked = self.asked.load(Acquire);
            let told = (queue.looked != asked).then(|| {
                queue.looked = asked;
                queue.look(self, None)
            });
            drop(queue);
            if let Some(told) = told {
                told.tell();
            }
            if self.asked.fetch_add(0, AcqRel) == asked {
                return;
            }
            match try_lock(&self.queue) {
                Some(again) => queue = again,
                // Whoever is there looks when leaving.
                None => return,
            }
        }
    }

    /// The earliest deadline in line.
    fn next_deadline(&self) -> Option<Instant> {
        self.with(|queue| queue.waiting.values().filter_map(|waiter| waiter.deadline).min())
    }
}

impl Queue {
    /// Goes through the line from the first on. Allocates before and after the tree's lock, not
    /// inside.
    fn look(&mut self, line: &Line, at: Option<Instant>) -> Told {
        let mut told = Told::default();
        let Some((_, first)) = self.waiting.first_key_value() else {
            self.clear(line);
            return told;
        };
        let tree = first.node.tree;
        let timed = self.waiting.values().any(|waiter| waiter.deadline.is_some());
        let now = at.or_else(|| timed.then(Instant::now));
        self.taken.reserve(self.waiting.len());
        told.crossed.reserve(self.waiting.len());
        let inside = tree.lock.enter();
        for node in self.taken.drain(..) {
            node.line.store(NOBODY, Relaxed);
            node.refresh();
        }
        let mut left = 0;
        for ((Reverse(priority), _), waiter) in &mut self.waiting {
            let node = waiter.node;
            waiter.answer = match node.admit(waiter.bytes, *priority) {
                Ok(()) => {
                    if node.add(waiter.bytes) {
                        told.crossed.push(node);
                    }
                    Some(Ok(()))
                }
                Err((by, refusal)) => {
                    let late = waiter
                        .deadline
                        .is_some_and(|deadline| now.is_some_and(|now| now >= deadline));
                    match node.never(waiter.bytes) {
                        Some(never) => Some(Err(never)),
                        None if late => Some(Err(refusal)),
                        None => {
                            if by.line.load(Relaxed) == NOBODY {
                                by.line.store(*priority, Relaxed);
                                by.refresh();
                                self.taken.push(by);
                            }
                            left += 1;
                            None
                        }
                    }
                }
            };
        }
        line.waiting.store(left, SeqCst);
        drop(inside);
        let answered: Vec<Place> = self
            .waiting
            .iter()
            .filter(|(_, w)| w.answer.is_some())
            .map(|(place, _)| *place)
            .collect();
        for place in answered {
            let Some(mut waiter) = self.waiting.remove(&place) else { continue };
            told.wakers.extend(waiter.waker.take());
            if let Some(answer) = waiter.answer {
                self.answered.insert(place.1, answer);
            }
        }
        told
    }

    /// Nobody is left.
    fn clear(&mut self, line: &Line) {
        if let Some(first) = self.taken.first() {
            let _inside = first.tree.lock.enter();
            for node in self.taken.drain(..) {
                node.line.store(NOBODY, Relaxed);
                node.refresh();
            }
            line.waiting.store(0, SeqCst);
        }
    }
}

/// A charge that waits for its bytes. A `Future` that needs no runtime: whoever gives bytes back
/// calls its waker.
///
/// It takes its place in line when it is polled first. Dropping it gives the place up, or hands
/// bytes that it was granted and has not taken to the next in line. It has no clock: a deadline
/// that has passed ends it when it is polled, when anybody looks through the line, or by
/// [`Budget::expire_waits`].
///
/// ```
/// use aquifer_core::Budget;
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let budget = Budget::new("device 0", 100);
/// let most = budget.charge(80)?;
/// let mut waiting = pin!(budget.charge_async(50));
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(waiting.as_mut().poll(&mut context).is_pending());
/// assert!(budget.charge(10).is_err());         // what is left is waited for
/// drop(most);
/// let Poll::Ready(charge) = waiting.poll(&mut context) else { panic!("the bytes are there") };
/// assert_eq!(charge?.bytes(), 50);
/// # Ok::<(), aquifer_core::OutOfBudget>(())
/// ```
#[must_use = "a future waits only while it is polled"]
pub struct Waiting {
    budget: Budget,
    bytes: u64,
    deadline: Option<Instant>,
    /// Instead of the budget's own.
    priority: Option<i32>,
    stage: Stage,
}

#[derive(Clone, Copy)]
enum Stage {
    New,
    InLine(Place),
    Over,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting")
            .field("budget", &self.budget.name())
            .field("bytes", &self.bytes)
            .field("deadline", &self.deadline)
            .finish_non_exhaustive()
    }
}

impl Waiting {
    /// Ends with the refusal of that moment when `deadline` has passed.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Stands in line by this priority instead of the budget's own.
    pub fn with_priority(mut self, priority: i32) -> Self {
        self.priority = Some(priority);
        self
    }

    fn line(&self) -> &'static Line {
        &self.budget.node.tree.line
    }

    fn finish(&mut self, answer: Answer) -> Poll<Result<Charge, OutOfBudget>> {
        self.stage = Stage::Over;
        Poll::Ready(answer.map(|()| Charge::granted(self.budget.node, self.bytes)))
    }

    fn begin(&mut self, waker: &Waker) -> Poll<Result<Charge, OutOfBudget>> {
        let priority =
            self.priority.map_or_else(|| self.budget.node.priority.load(Relaxed), i64::from);
        match self.budget.node.take_as(self.bytes, priority) {
            Ok(()) => return self.finish(Ok(())),
            Err(refusal) if self.deadline.is_some_and(|deadline| Instant::now() >= deadline) => {
                return self.finish(Err(refusal));
            }
            Err(_) => {}
        }
        let waiter = Waiter {
            node: self.budget.node,
            bytes: self.bytes,
            deadline: self.deadline,
            // A clone may be anybody's code, so it is made before the line is entered.
            waker: Some(waker.clone()),
            answer: None,
        };
        let line = self.line();
        let (place, told) = line.with(|queue| {
            let place = (Reverse(priority), queue.next);
            queue.next += 1;
            queue.waiting.insert(place, waiter);
            (place, queue.look(line, None))
        });
        self.stage = Stage::InLine(place);
        told.tell();
        // What leases hold and do not use goes to whoever waits. From here on they see that
        // somebody does.
        self.budget.node.recall_all();
        self.go_on(place, waker)
    }

    fn go_on(&mut self, place: Place, waker: &Waker) -> Poll<Result<Charge, OutOfBudget>> {
        let line = self.line();
        let mut next = Some(waker.clone());
        let late = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let (answer, told) = line.with(|queue| {
            let told = if late && queue.waiting.contains_key(&place) {
                queue.look(line, None)
            } else {
                Told::default()
            };
            if let Some(waiter) = queue.waiting.get_mut(&place) {
                std::mem::swap(&mut waiter.waker, &mut next);
            }
            (queue.answered.remove(&place.1), told)
        });
        // The waker that was there before goes here, where its end may do what it likes.
        contain(move || drop(next));
        told.tell();
        match answer {
            Some(answer) => self.finish(answer),
            None => Poll::Pending,
        }
    }

    /// Waits on this thread, as [`Budget::charge_by`] does. With no lock held.
    ///
    /// # Errors
    /// As [`Budget::charge_by`].
    pub fn wait(mut self) -> Result<Charge, OutOfBudget> {
        let parked = Arc::new(Parked { bed: Bed::new(), woken: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&parked));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(answer) = Pin::new(&mut self).poll(&mut context) {
                return answer;
            }
            // Others' deadlines count: whoever stands behind one that has passed may be next.
            parked.wait(self.line().next_deadline());
            if !parked.woken.swap(false, Acquire) {
                self.line().look();
            }
        }
    }
}

impl Future for Waiting {
    type Output = Result<Charge, OutOfBudget>;

    /// Once it has been ready it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::New => self.begin(context.waker()),
            Stage::InLine(place) => self.go_on(place, context.waker()),
            Stage::Over => Poll::Pending,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Stage::InLine(place) = self.stage else { return };
        let line = self.line();
        let (gone, answer, told) = line.with(|queue| {
            let gone = queue.waiting.remove(&place);
            // Those behind it may be next.
            let told = if gone.is_some() { queue.look(line, None) } else { Told::default() };
            (gone, queue.answered.remove(&place.1), told)
        });
        contain(move || drop(gone));
        told.tell();
        if let Some(Ok(())) = answer {
            drop(Charge::granted(self.budget.node, self.bytes));
        }
    }
}

/// A thread that waits.
struct Parked {
    bed: Bed,
    woken: AtomicBool,
}

impl Wake for Parked {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Release);
        self.bed.wake();
    }
}

impl Parked {
    /// Until it is woken or the moment has come, or for no reason.
    fn wait(&self, until: Option<Instant>) {
        if !self.woken.load(Acquire) {
            self.bed.sleep(until);
        }
    }
}

impl Budget {
    /// As [`Budget::charge`], waiting for the bytes until `deadline`, or for as long as it takes:
    /// in line, by this budget's priority, then in order. Blocks the thread, with no lock held.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the figures of the deadline; or at once, at any time, where the bytes
    /// are above a limit, less what others are guaranteed, and so could never be had.
    pub fn charge_by(&self, bytes: u64, deadline: Option<Instant>) -> Result<Charge, OutOfBudget> {
        let waiting = self.charge_async(bytes);
        match deadline {
            Some(deadline) => waiting.until(deadline),
            None => waiting,
        }
        .wait()
    }

    /// As [`Budget::charge_by`], by a future.
    pub fn charge_async(&self, bytes: u64) -> Waiting {
        Waiting { budget: self.clone(), bytes, deadline: None, priority: None, stage: Stage::New }
    }

    /// Ends the waits in this budget's whole tree whose deadline is not after `now`, those that are
    /// not polled too: for programs with a timer of their own. Never blocks on a wait.
    pub fn expire_waits(&self, now: Instant) {
        let line = &self.node.tree.line;
        line.with(|queue| queue.look(line, Some(now))).tell();
    }

    /// How many wait for bytes of this budget or of one below it (a count).
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.node.tree.line.waiting_at(self.node)
    }
}
