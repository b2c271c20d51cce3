//! The wait queue of a tree: ordered by priority, then by arrival.
//!
//! ```text
//!   charge ── fits ──► granted         release, a limit raised, a waiter gone
//!     │ refused                                          │
//!     ▼                                                  ▼
//!   in queue ◄──────────── scan, from the first on ──────┘
//!     │          · fits at every node, and no earlier waiter needs one of them: granted
//!     │          · does not fit: the node that refused is *contended* until the next scan
//!     │          · exceeds a limit, or its deadline has passed: refused
//!     ├── granted ──► the waker is called, the charge is ready
//!     └── dropped ──► leaves the queue; if it had been granted, the bytes go to the next waiter
//! ```
//!
//! One scan of the queue is one critical section of the tree's lock, so no other charge is granted
//! between two waiters. While a node is *contended*, a charge that needs room there is refused
//! unless its priority is above that of the first waiter. So released bytes go to waiters. A charge
//! whose bytes are guaranteed needs no room there and is granted, and so are waiters at other
//! nodes.
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
    charge::Charge,
    node::{Budget, NO_WAITER, Node, WaitQueue, WaitResult, Waiter, WaiterKey, Waiters},
    refusal::OutOfBudget,
};
use crate::{
    panics::contain,
    sync::{
        MutexGuard, Parker,
        atomic::{
            AtomicBool,
            Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst},
        },
        lock, try_lock,
    },
};
use std::{
    cmp::Reverse,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Instant,
};

/// Wakers to call, and so to drop, once no lock is held.
#[derive(Default)]
struct Wakeups(Vec<Waker>);

impl Wakeups {
    fn deliver(self) {
        for waker in self.0 {
            // Foreign code: a panic must not keep the other waiters asleep.
            contain(|| waker.wake());
        }
    }
}

impl WaitQueue {
    /// Returns whether there is a waiter. Exact under the tree's lock. Sequentially consistent for
    /// leases, which read it without the lock.
    #[inline]
    pub(super) fn has_waiters(&self) -> bool {
        self.waiters.load(SeqCst) != 0
    }

    /// Returns the number of waiters for bytes of `node` or of a node below it.
    pub(super) fn waiting_at(&self, node: &'static Node) -> usize {
        self.with(|state| {
            state.waiters.values().filter(|waiter| waiter.node.is_below(node)).count()
        })
    }

    /// Requests a scan, by this thread or by the one that holds the queue. Never blocks.
    #[cold]
    pub(super) fn request_scan(&self) {
        // Read-modify-writes here and in `scan_and_unlock`: whichever is second sees the other, or
        // the unlocked queue.
        self.scans_requested.fetch_add(1, AcqRel);
        if let Some(state) = try_lock(&self.state) {
            self.scan_and_unlock(state);
        }
    }

    /// Locks the queue for `work`. Every access except [`WaitQueue::request_scan`] goes through
    /// here, including reads, since a scan requested in the meantime is left to the lock holder.
    fn with<R>(&self, work: impl FnOnce(&mut Waiters) -> R) -> R {
        let mut state = lock(&self.state);
        let result = work(&mut state);
        self.scan_and_unlock(state);
        result
    }

    /// Scans as long as scans are requested, and unlocks the queue.
    fn scan_and_unlock<'a>(&'a self, mut state: MutexGuard<'a, Waiters>) {
        loop {
            let scans_requested = self.scans_requested.load(Acquire);
            let wakeups = (state.scans_done != scans_requested).then(|| {
                state.scans_done = scans_requested;
                state.scan(self, None)
            });
            drop(state);
            if let Some(wakeups) = wakeups {
                wakeups.deliver();
            }
            if self.scans_requested.fetch_add(0, AcqRel) == scans_requested {
                return;
            }
            match try_lock(&self.state) {
                Some(again) => state = again,
                // The new holder scans when it leaves.
                None => return,
            }
        }
    }

    /// Returns the bytes of the first waiter.
    pub(super) fn first_waiting(&self) -> Option<u64> {
        if !self.has_waiters() {
            return None;
        }
        self.with(|state| state.waiters.first_key_value().map(|(_, waiter)| waiter.bytes))
    }

    /// Returns the earliest deadline in the queue.
    fn next_deadline(&self) -> Option<Instant> {
        self.with(|state| state.waiters.values().filter_map(|waiter| waiter.deadline).min())
    }
}

impl Waiters {
    /// Scans the queue from the first waiter on. Allocates only before and after the tree's lock.
    fn scan(&mut self, queue: &WaitQueue, at: Option<Instant>) -> Wakeups {
        let mut wakeups = Wakeups::default();
        let Some((_, first)) = self.waiters.first_key_value() else {
            self.clear(queue);
            return wakeups;
        };
        let tree = first.node.tree;
        let timed = self.waiters.values().any(|waiter| waiter.deadline.is_some());
        let now = at.or_else(|| timed.then(Instant::now));
        self.contended.reserve(self.waiters.len());
        let guard = tree.lock.lock();
        for node in self.contended.drain(..) {
            node.waiter_priority.store(NO_WAITER, Relaxed);
            node.update_bounds();
        }
        let mut remaining = 0;
        for ((Reverse(priority), _), waiter) in &mut self.waiters {
            let node = waiter.node;
            let admitted = node.admit(waiter.bytes, *priority);
            waiter.result = match admitted.and_then(|()| node.require_claim(waiter.bytes)) {
                Ok(()) => {
                    node.add(waiter.bytes);
                    Some(Ok(()))
                }
                Err((refusing, refusal)) => {
                    let expired = waiter
                        .deadline
                        .is_some_and(|deadline| now.is_some_and(|now| now >= deadline));
                    match node.unsatisfiable(waiter.bytes) {
                        Some(unsatisfiable) => Some(Err(unsatisfiable)),
                        None if expired => Some(Err(refusal)),
                        None => {
                            if refusing.waiter_priority.load(Relaxed) == NO_WAITER {
                                refusing.waiter_priority.store(*priority, Relaxed);
                                refusing.update_bounds();
                                self.contended.push(refusing);
                            }
                            remaining += 1;
                            None
                        }
                    }
                }
            };
        }
        queue.waiters.store(remaining, SeqCst);
        drop(guard);
        let finished: Vec<WaiterKey> =
            self.waiters.iter().filter(|(_, w)| w.result.is_some()).map(|(key, _)| *key).collect();
        for key in finished {
            let Some(mut waiter) = self.waiters.remove(&key) else { continue };
            wakeups.0.extend(waiter.waker.take());
            if let Some(result) = waiter.result {
                self.results.insert(key.1, result);
            }
        }
        wakeups
    }

    /// Clears the contended nodes when the queue is empty.
    fn clear(&mut self, queue: &WaitQueue) {
        if let Some(first) = self.contended.first() {
            let _guard = first.tree.lock.lock();
            for node in self.contended.drain(..) {
                node.waiter_priority.store(NO_WAITER, Relaxed);
                node.update_bounds();
            }
            queue.waiters.store(0, SeqCst);
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
/// use aquifer::Budget;
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
/// # Ok::<(), aquifer::OutOfBudget>(())
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
    Queued(WaiterKey),
    Done,
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

    fn queue(&self) -> &'static WaitQueue {
        &self.budget.node.tree.wait_queue
    }

    fn finish(&mut self, result: WaitResult) -> Poll<Result<Charge, OutOfBudget>> {
        self.stage = Stage::Done;
        Poll::Ready(result.map(|()| Charge::granted(self.budget.node, self.bytes)))
    }

    fn poll_new(&mut self, waker: &Waker) -> Poll<Result<Charge, OutOfBudget>> {
        let priority =
            self.priority.map_or_else(|| self.budget.node.priority.load(Relaxed), i64::from);
        match self.budget.node.charge_as(self.bytes, priority) {
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
            result: None,
        };
        let queue = self.queue();
        let (key, wakeups) = queue.with(|state| {
            let key = (Reverse(priority), state.next);
            state.next += 1;
            state.waiters.insert(key, waiter);
            (key, state.scan(queue, None))
        });
        self.stage = Stage::Queued(key);
        wakeups.deliver();
        // Spare bytes of leases go to waiters. From here on the leases see that there is one.
        self.budget.node.recall_all();
        self.poll_queued(key, waker)
    }

    fn poll_queued(&mut self, key: WaiterKey, waker: &Waker) -> Poll<Result<Charge, OutOfBudget>> {
        let queue = self.queue();
        let mut next = Some(waker.clone());
        let expired = self.deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let (result, wakeups) = queue.with(|state| {
            let wakeups = if expired && state.waiters.contains_key(&key) {
                state.scan(queue, None)
            } else {
                Wakeups::default()
            };
            if let Some(waiter) = state.waiters.get_mut(&key) {
                std::mem::swap(&mut waiter.waker, &mut next);
            }
            (state.results.remove(&key.1), wakeups)
        });
        // The old waker is foreign code, and is dropped with no lock held.
        contain(move || drop(next));
        wakeups.deliver();
        match result {
            Some(result) => self.finish(result),
            None => Poll::Pending,
        }
    }

    /// Blocks this thread until the charge is granted or refused, as [`Budget::charge_by`] does.
    /// Holds no lock while waiting.
    ///
    /// # Errors
    /// See [`Budget::charge_by`].
    pub fn wait(mut self) -> Result<Charge, OutOfBudget> {
        let thread = Arc::new(ThreadWaker { parker: Parker::new(), woken: AtomicBool::new(false) });
        let waker = Waker::from(Arc::clone(&thread));
        let mut context = Context::from_waker(&waker);
        loop {
            if let Poll::Ready(result) = Pin::new(&mut self).poll(&mut context) {
                return result;
            }
            // The deadlines of other waiters count too: this waiter may be next after an expired
            // one.
            thread.wait(self.queue().next_deadline());
            if !thread.woken.swap(false, Acquire) {
                self.queue().request_scan();
            }
        }
    }
}

impl Future for Waiting {
    type Output = Result<Charge, OutOfBudget>;

    /// After it was ready once, it stays pending.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match self.stage {
            Stage::New => self.poll_new(context.waker()),
            Stage::Queued(key) => self.poll_queued(key, context.waker()),
            Stage::Done => Poll::Pending,
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Stage::Queued(key) = self.stage else { return };
        let queue = self.queue();
        let (removed, result, wakeups) = queue.with(|state| {
            let removed = state.waiters.remove(&key);
            // Waiters behind it may be served now.
            let wakeups =
                if removed.is_some() { state.scan(queue, None) } else { Wakeups::default() };
            (removed, state.results.remove(&key.1), wakeups)
        });
        contain(move || drop(removed));
        wakeups.deliver();
        if let Some(Ok(())) = result {
            drop(Charge::granted(self.budget.node, self.bytes));
        }
    }
}

/// A waiting thread.
struct ThreadWaker {
    parker: Parker,
    woken: AtomicBool,
}

impl Wake for ThreadWaker {
    fn wake(self: Arc<Self>) {
        self.woken.store(true, Release);
        self.parker.unpark();
    }
}

impl ThreadWaker {
    /// Sleeps until it is woken or `until` is reached. May wake spuriously.
    fn wait(&self, until: Option<Instant>) {
        if !self.woken.load(Acquire) {
            self.parker.park(until);
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
        let queue = &self.node.tree.wait_queue;
        queue.with(|state| state.scan(queue, Some(now))).deliver();
    }

    /// Returns the number of waiters for bytes of this budget or of one below it.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.node.tree.wait_queue.waiting_at(self.node)
    }
}
