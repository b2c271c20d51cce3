//! Futures that wait for devices, and the one thread that wakes them.
//!
//! A driver has two ways to report completed work without blocking a thread. A host function in the
//! stream (`cuLaunchHostFunc`) delays the work behind it, may not call the driver, becomes part of
//! the graph in a capturing stream, and never runs once the device is lost, so a task would sleep
//! for ever. A query (`cuEventQuery`) has none of these problems. So one thread polls, for all
//! tasks of the process.
//!
//! - The thread is started by the first poll of a future that is not ready. A program that awaits
//!   nothing has no such thread. It sleeps while no future waits, and is never joined.
//! - A future also queries its gate at each poll, so a task that is polled for another reason sees
//!   completed work at once.
//! - A gate is polled after 20 µs, then after pauses that double up to [`LONGEST_PAUSE`].
//! - Wakers and gates are called with no lock held. A panic in one of them ends that wait only.
//! - Dropping a future removes its wait at once. A leaked future keeps its gate until the gate
//!   opens.
//! - A child of `fork` starts its own thread.

use crate::{Gate, Result};
use std::{
    collections::BTreeMap,
    fmt,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    process,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// The pause before the first poll.
const SHORTEST_PAUSE: Duration = Duration::from_micros(20);

/// The longest pause between two polls of a gate, which bounds how late a task is woken.
pub const LONGEST_PAUSE: Duration = Duration::from_millis(1);

/// The condition that a task waits for.
#[derive(Clone)]
enum WaitCondition {
    /// The pause is over.
    Elapsed,
    /// A gate opens or fails.
    GateOpen(Arc<dyn Gate>),
}

impl WaitCondition {
    fn is_met(&self) -> bool {
        match self {
            Self::Elapsed => true,
            Self::GateOpen(gate) => gate.wait(Some(Instant::now())) != Ok(false),
        }
    }
}

struct WakeEntry {
    due: Instant,
    pause: Duration,
    condition: WaitCondition,
    waker: Waker,
}

#[derive(Default)]
struct State {
    /// Waits by number. The numbers only identify them.
    entries: BTreeMap<u64, WakeEntry>,
    thread: Option<Thread>,
}

/// The waits of one process.
struct PendingWaits {
    process: u32,
    next_number: AtomicU64,
    state: Mutex<State>,
    /// The state of a child of `fork`, where this state's lock may be held by a thread that does
    /// not exist.
    child: OnceLock<Box<PendingWaits>>,
}

impl PendingWaits {
    fn new() -> Self {
        Self {
            process: process::id(),
            next_number: AtomicU64::new(0),
            state: Mutex::default(),
            child: OnceLock::new(),
        }
    }

    /// Returns the state of this process.
    fn of_this_process() -> &'static Self {
        static FIRST: OnceLock<PendingWaits> = OnceLock::new();
        let (mut waits, current) = (FIRST.get_or_init(Self::new), process::id());
        while waits.process != current {
            waits = waits.child.get_or_init(|| Box::new(Self::new()));
        }
        waits
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code unwinds while the lock is held.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a wait. If the thread cannot be started, the task is woken at once, and so polls in a
    /// busy loop.
    fn register(&'static self, condition: WaitCondition, pause: Duration, waker: &Waker) -> u64 {
        let number = self.next_number.fetch_add(1, Ordering::Relaxed);
        let entry =
            WakeEntry { due: Instant::now() + pause, pause, condition, waker: waker.clone() };
        let thread = {
            let mut state = self.state();
            state.entries.insert(number, entry);
            if state.thread.is_none() {
                let started =
                    thread::Builder::new().name("aquifer-wake".into()).spawn(|| self.run());
                state.thread = started.ok().map(|handle| handle.thread().clone());
            }
            state.thread.clone()
        };
        match thread {
            Some(thread) => thread.unpark(),
            None => {
                self.unregister(number);
                waker.wake_by_ref();
            }
        }
        number
    }

    /// Replaces the waker of a wait. Returns whether the wait still exists.
    fn replace_waker(&self, number: u64, waker: &Waker) -> bool {
        // Wakers are foreign code: the new one is cloned before the lock, and the old one is
        // dropped after it.
        let new = waker.clone();
        let old = self
            .state()
            .entries
            .get_mut(&number)
            .map(|entry| std::mem::replace(&mut entry.waker, new));
        old.is_some()
    }

    fn unregister(&self, number: u64) {
        let removed = self.state().entries.remove(&number);
        // The gate may hold the last reference to a stream, whose drop calls the driver.
        drop(removed);
    }

    /// The main loop of the thread.
    fn run(&self) {
        loop {
            let now = Instant::now();
            let due: Vec<(u64, WaitCondition)> = {
                let state = self.state();
                let due = state.entries.iter().filter(|(_, entry)| entry.due <= now);
                due.map(|(number, entry)| (*number, entry.condition.clone())).collect()
            };
            for (number, condition) in due {
                let met = catch_unwind(AssertUnwindSafe(|| condition.is_met())).unwrap_or(true);
                let removed = {
                    let mut state = self.state();
                    if met {
                        state.entries.remove(&number)
                    } else {
                        if let Some(entry) = state.entries.get_mut(&number) {
                            entry.pause = (entry.pause * 2).min(LONGEST_PAUSE);
                            entry.due = Instant::now() + entry.pause;
                        }
                        None
                    }
                };
                if let Some(WakeEntry { waker, condition, .. }) = removed {
                    drop(condition);
                    // A panic of a waker must not end the thread.
                    let _ = catch_unwind(AssertUnwindSafe(|| waker.wake()));
                }
            }
            let next = self.state().entries.values().map(|entry| entry.due).min();
            match next {
                Some(next) => thread::park_timeout(next.saturating_duration_since(Instant::now())),
                None => thread::park(),
            }
        }
    }
}

/// A task's registration with the thread that wakes it. Dropping it cancels the registration.
///
/// For futures that check their condition at each poll and wait for a gate or a pause in between.
/// [`Opened`] is one.
///
/// ```
/// use aquifer::wake::Alarm;
/// use std::{future::Future, pin::Pin, task::{Context, Poll}, time::Duration};
/// /// Ready at its third poll.
/// struct Thrice(u32, Alarm);
/// impl Future for Thrice {
///     type Output = ();
///     fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
///         self.0 += 1;
///         if self.0 == 3 {
///             return Poll::Ready(());
///         }
///         self.1.after(Duration::from_micros(50), context.waker());
///         Poll::Pending
///     }
/// }
/// ```
#[derive(Default)]
pub struct Alarm {
    set: Option<(&'static PendingWaits, u64)>,
}

impl Alarm {
    /// Creates an alarm that is not set.
    #[must_use]
    pub const fn new() -> Self {
        Self { set: None }
    }

    /// Calls `waker` once `pause` is over. Replaces a waker that was set before.
    pub fn after(&mut self, pause: Duration, waker: &Waker) {
        self.set(WaitCondition::Elapsed, pause, waker);
    }

    /// Calls `waker` once `gate` is open or fails. Replaces a waker that was set before.
    pub fn when(&mut self, gate: Arc<dyn Gate>, waker: &Waker) {
        // An existing wait for the gate continues with its own pause.
        let registered =
            self.set.as_ref().is_some_and(|(waits, number)| waits.replace_waker(*number, waker));
        if !registered {
            self.set(WaitCondition::GateOpen(gate), SHORTEST_PAUSE, waker);
        }
    }

    /// Cancels the alarm: the waker is not called from now on, except for a call that is in
    /// progress.
    pub fn clear(&mut self) {
        if let Some((waits, number)) = self.set.take() {
            waits.unregister(number);
        }
    }

    fn set(&mut self, condition: WaitCondition, pause: Duration, waker: &Waker) {
        self.clear();
        let waits = PendingWaits::of_this_process();
        self.set = Some((waits, waits.register(condition, pause, waker)));
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        self.clear();
    }
}

impl fmt::Debug for Alarm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Alarm").field("is_set", &self.set.is_some()).finish()
    }
}

/// A future that is ready when a [`Gate`] is open. Needs no runtime. A poll never blocks.
///
/// Dropping it ends only the wait. Polling it again after it was ready queries the gate again.
///
/// ```
/// use aquifer_core::{Gate, Result, wake::Opened};
/// use std::{pin::pin, sync::Arc, task::{Context, Poll, Waker}, time::Instant, future::Future};
/// #[derive(Debug)]
/// struct Open;
/// impl Gate for Open {
///     fn is_open(&self) -> bool { true }
///     fn wait(&self, _deadline: Option<Instant>) -> Result<bool> { Ok(true) }
/// }
/// let mut opened = pin!(Opened::of(Arc::new(Open)));
/// assert_eq!(opened.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(())));
/// ```
#[derive(Debug)]
#[must_use = "a future waits only while it is polled"]
pub struct Opened {
    gate: Arc<dyn Gate>,
    alarm: Alarm,
}

impl Opened {
    /// Creates a future that waits for `gate`.
    pub fn of(gate: Arc<dyn Gate>) -> Self {
        Self { gate, alarm: Alarm::new() }
    }
}

impl Future for Opened {
    /// An error is the gate's: the device is lost.
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        // With a deadline in the past, the gate is queried without waiting.
        match self.gate.wait(Some(Instant::now())) {
            Ok(false) => {
                let gate = self.gate.clone();
                self.alarm.when(gate, context.waker());
                Poll::Pending
            }
            Ok(true) => {
                self.alarm.clear();
                Poll::Ready(Ok(()))
            }
            Err(error) => {
                self.alarm.clear();
                Poll::Ready(Err(error))
            }
        }
    }
}
