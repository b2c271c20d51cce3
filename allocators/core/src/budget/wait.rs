//! The wait queue of a tree: ordered by priority, then by arrival.
//!
//! ```text
//!   charge ── fits ──► granted         release, a limit raised, a waiter gone
//!     │ refused                                          │
//!     ▼                                                  ▼
//!   in queue ◄──────────── scan, from the first on ──────┘
//!     │          · fits at every node, and no earlier waiter needs one of them: granted
//!     │          · does not fit: the node that refused is *taken* until the next scan
//!     │          · exceeds a limit, or its deadline has passed: refused
//!     ├── granted ──► the waker is called, the charge is ready
//!     └── dropped ──► leaves the queue; if it had been granted, the bytes go to the next waiter
//! ```
//!
//! One scan of the queue is one critical section of the tree's lock, so no other charge is granted
//! between two waiters. While a node is *taken*, a charge that needs room there is refused unless
//! its priority is above that of the first waiter. So released bytes go to waiters. A charge whose
//! bytes are guaranteed needs no room there and is granted, and so are waiters at other nodes.
//!
//! **No lost wakeups.**
//!
//! - The scan writes the number of waiters under the tree's lock, and every release reads it under
//!   the same lock. So either the scan sees the released bytes, or the release sees the waiters and
//!   requests another scan.
//! - Requesting a scan never blocks. If another thread is in the queue, the request is counted, and
//!   that thread checks the count when it leaves.
//! - So a charge may be dropped anywhere, also by an allocator that the queue itself calls.

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

/// The key of a waiter: higher priority first, then earlier arrival.
type Place = (Reverse<i64>, u64);
type Answer = Result<(), OutOfBudget>;

/// The wait queue of a tree.
pub(super) struct Line {
    /// The number of waiters. Written under the tree's lock.
    waiting: AtomicU64,
    /// The number of scans requested.
    asked: AtomicU64,
    queue: Mutex<Queue>,
}

struct Queue {
    next: u64,
    /// The value of `asked` that the last scan has covered.
    looked: u64,
    waiting: BTreeMap<Place, Waiter>,
    answered: BTreeMap<u64, Answer>,
    /// Nodes that refused a waiter in the last scan.
    taken: Vec<&'static Node>,
}

struct Waiter {
    node: &'static Node,
    bytes: u64,
    deadline: Option<Instant>,
    waker: Option<Waker>,
    answer: Option<Answer>,
}

/// Wakers and hooks to call once no lock is held. Wakers are also dropped then.
#[derive(Default)]
struct Told {
    wakers: Vec<Waker>,
    crossed: Vec<&'static Node>,
}

impl Told {
    fn tell(self) {
        for waker in self.wakers {
            // Foreign code: a panic must not keep the other waiters asleep.
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

    /// Returns whether there is a waiter. Exact under the tree's lock. Sequentially consistent for
    /// leases, which read it without the lock.
    #[inline]
    pub(super) fn is_waited_for(&self) -> bool {
        self.waiting.load(SeqCst) != 0
    }

    /// Returns the number of waiters for bytes of `node` or of a node below it.
    pub(super) fn waiting_at(&self, node: &'static Node) -> usize {
        self.with(|queue| {
            queue.waiting.values().filter(|waiter| waiter.node.is_below(node)).count()
        })
    }

    /// Requests a scan, by this thread or by the one that holds the queue. Never blocks.
    #[cold]
    pub(super) fn look(&self) {
        // Read-modify-writes here and in `leave`: whichever is second sees the other, or the
        // unlocked queue.
        self.asked.fetch_add(1, AcqRel);
        if let Some(queue) = try_lock(&self.queue) {
            self.leave(queue);
        }
    }

    /// Locks the queue for `work`. Every access except [`Line::look`] goes through here, including
    /// reads, since a scan requested in the meantime is left to the lock holder.
    fn with<R>(&self, work: impl FnOnce(&mut Queue) -> R) -> R {
        let mut queue = lock(&self.queue);
        let answer = work(&mut queue);
        self.leave(queue);
        answer
    }

    /// Scans as long as scans are requested, and unlocks the queue.
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
                // The new holder scans when it leaves.
                None => return,
            }
        }
    }

    /// Returns the earliest deadline in the queue.
    fn next_deadline(&self) -> Option<Instant> {
        self.with(|queue| queue.waiting.values().filter_map(|waiter| waiter.deadline).min())
    }
}

impl Queue {
    /// Scans the queue from the first waiter on. Allocates only before and after the tree's lock.
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

    /// Releases the taken nodes when the queue is empty.
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

/// A charge that waits for its bytes: a `Future` that needs no runtime, since a release calls its
/// waker.
///
/// It enters the queue at its first poll. Dropping it leaves the queue, and passes granted bytes
/// that were not taken to the next waiter. It has no timer: an expired deadline takes effect when
/// it is polled, when any thread scans the queue, or by [`Budget::expire_waits`].
///
/// ```
/// use aquifer_core::Budget;
/// use std::{future::Future, pin::pin, task::{Context, Poll, Waker}};
/// let budget = Budget::new("device 0", 100);
/// let most = budget.charge(80)?;
/// let mut waiting = pin!(budget.charge_async(50));
/// let mut context = Context::from_waker(Waker::noop());
/// assert!(waiting.as_mut().poll(&mut context).is_pending());
/// assert!(budget.charge(10).is_err());         // the remaining bytes are kept for the waiter
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
    /// Overrides the budget's priority.
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
    /// Sets a deadline, after which the wait ends with the refusal of that moment.
    pub fn until(mut self, deadline: Instant) -> Self {
        self.deadline = Some(deadline);
        self
    }

    /// Waits with this priority instead of the budget's own.
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
            // Cloning a waker runs foreign code, so it happens before the queue is locked.
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
        // Spare bytes of leases go to waiters. From here on the leases see that there is one.
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
        // The old waker is foreign code, and is dropped with no lock held.
        contain(move || drop(next));
        told.tell();
        match answer {
            Some(answer) => self.finish(answer),
            None => Poll::Pending,
        }
    }

    /// Blocks this thread until the charge is granted or refused, as [`Budget::charge_by`] does.
    /// Holds no lock while waiting.
    ///
    /// # Errors
    /// See [`Budget::charge_by`].
    pub fn wait(mut self) -> Result<Charge, OutOfBudget> {
        let parked = Arc::new(Parked { bed: Bed::new(), woken: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&parked));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(answer) = Pin::new(&mut self).poll(&mut context) {
                return answer;
            }
            // The deadlines of other waiters count too: this waiter may be next after an expired
            // one.
            parked.wait(self.line().next_deadline());
            if !parked.woken.swap(false, Acquire) {
                self.line().look();
            }
        }
    }
}

impl Future for Waiting {
    type Output = Result<Charge, OutOfBudget>;

    /// After it was ready once, it stays pending.
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
            // Waiters behind it may be served now.
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

/// A waiting thread.
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
    /// Sleeps until it is woken or `until` is reached. May wake spuriously.
    fn wait(&self, until: Option<Instant>) {
        if !self.woken.load(Acquire) {
            self.bed.sleep(until);
        }
    }
}

impl Budget {
    /// Like [`Budget::charge`], but waits for the bytes until `deadline`, or without a limit for
    /// `None`. Waiters are served by priority, then in order of arrival. Blocks the thread, with no
    /// lock held.
    ///
    /// # Errors
    /// [`OutOfBudget`] with the figures at the deadline. It is returned at once if the bytes can
    /// never be granted: they exceed a limit minus the guarantees of others.
    pub fn charge_by(&self, bytes: u64, deadline: Option<Instant>) -> Result<Charge, OutOfBudget> {
        let waiting = self.charge_async(bytes);
        match deadline {
            Some(deadline) => waiting.until(deadline),
            None => waiting,
        }
        .wait()
    }

    /// The asynchronous form of [`Budget::charge_by`].
    pub fn charge_async(&self, bytes: u64) -> Waiting {
        Waiting { budget: self.clone(), bytes, deadline: None, priority: None, stage: Stage::New }
    }

    /// Ends the waits in this budget's whole tree whose deadline is not after `now`, including
    /// those that are not polled. For programs with their own timer. Never blocks on a wait.
    pub fn expire_waits(&self, now: Instant) {
        let line = &self.node.tree.line;
        line.with(|queue| queue.look(line, Some(now))).tell();
    }

    /// Returns the number of waiters for bytes of this budget or of one below it.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.node.tree.line.waiting_at(self.node)
    }
}
