//! A waker that counts its calls, and an executor on it.
//!
//! The tests of several crates include this file by its path, so it names no items of theirs.
#![allow(dead_code, reason = "each test binary uses some of it")]

use std::{
    future::{Future, IntoFuture},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// Longer than any operation takes on a busy machine, unless it hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// A waker that unparks a thread and counts its calls.
pub(crate) struct Woken {
    thread: Thread,
    times: AtomicU32,
}

impl Woken {
    pub(crate) fn here() -> Arc<Self> {
        Arc::new(Self { thread: thread::current(), times: AtomicU32::new(0) })
    }

    pub(crate) fn times(&self) -> u32 {
        self.times.load(Ordering::SeqCst)
    }

    /// Polls a future once for this waker.
    pub(crate) fn poll<F: Future + Unpin>(self: &Arc<Self>, future: &mut F) -> Poll<F::Output> {
        Pin::new(future).poll(&mut Context::from_waker(&Waker::from(Arc::clone(self))))
    }
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.times.fetch_add(1, Ordering::SeqCst);
        self.thread.unpark();
    }
}

/// Runs a future to its end on this thread. Polls it when woken, and at no other time.
#[track_caller]
pub(crate) fn block_on<F: IntoFuture>(future: F) -> F::Output {
    let woken = Woken::here();
    let waker = Waker::from(Arc::clone(&woken));
    let (mut future, begun, mut seen) = (pin!(future.into_future()), Instant::now(), 0);
    loop {
        if let Poll::Ready(answer) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return answer;
        }
        while woken.times() == seen {
            assert!(begun.elapsed() < PATIENCE, "a task that nothing wakes");
            thread::park_timeout(PATIENCE);
        }
        seen = woken.times();
    }
}
