//! Tests of the thread that wakes tasks: it is started on demand, there is only one, and a gate
//! that panics stops no other wait.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

#[path = "../../../../tests/support/woken.rs"]
mod woken;

use aquifer_core::{
    Gate, Result,
    wake::{Alarm, Opened},
};
use std::{
    fs,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::Poll,
    thread,
    time::{Duration, Instant},
};
use woken::Woken;

#[derive(Debug, Default)]
struct Flag {
    open: AtomicBool,
    asked: AtomicUsize,
    panics: bool,
}

impl Gate for Flag {
    fn is_open(&self) -> bool {
        self.open.load(Ordering::SeqCst)
    }
    fn wait(&self, deadline: Option<Instant>) -> Result<bool> {
        assert!(
            deadline.is_some_and(|at| at <= Instant::now()),
            "a future asks, and does not wait"
        );
        assert!(self.asked.fetch_add(1, Ordering::SeqCst) == 0 || !self.panics, "as planned");
        Ok(self.is_open())
    }
}

fn threads() -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names.filter(|name| name.trim() == "aquifer-wake").count()
}

#[track_caller]
fn until(what: impl Fn() -> bool) {
    let begun = Instant::now();
    while !what() {
        assert!(begun.elapsed() < Duration::from_secs(60));
        thread::yield_now();
    }
}

/// One test, because the thread belongs to the process.
#[test]
#[cfg_attr(miri, ignore = "counts threads by /proc")]
fn one_thread_is_started_by_the_first_future_that_waits_and_serves_all() {
    let open = Arc::new(Flag { open: AtomicBool::new(true), ..Flag::default() });
    assert_eq!(Woken::here().poll(&mut Opened::of(open)), Poll::Ready(Ok(())));
    drop(Alarm::new());
    assert_eq!(threads(), 0, "nothing waits");

    let gates: [Arc<Flag>; 3] = Default::default();
    let broken = Arc::new(Flag { panics: true, ..Flag::default() });
    let times = [(); 4].map(|()| Woken::here());
    let mut waits: Vec<Opened> = gates.iter().map(|gate| Opened::of(gate.clone())).collect();
    waits.push(Opened::of(broken.clone()));
    for (wait, times) in waits.iter_mut().zip(&times) {
        assert!(times.poll(wait).is_pending());
    }
    until(|| times[3].times() == 1);
    assert_eq!(threads(), 1);

    gates[1].open.store(true, Ordering::SeqCst);
    until(|| times[1].times() == 1);
    assert_eq!(times[1].poll(&mut waits[1]), Poll::Ready(Ok(())));
    assert_eq!(times.each_ref().map(|times| times.times()), [0, 1, 0, 1]);

    // A dropped wait is not polled again.
    waits.clear();
    until(|| Arc::strong_count(&gates[0]) == 1);
    let asked = gates[0].asked.load(Ordering::SeqCst);
    thread::sleep(Duration::from_millis(5));
    assert_eq!(gates[0].asked.load(Ordering::SeqCst), asked);

    // The thread sleeps now, and serves the next wait.
    let mut next = Opened::of(gates[2].clone());
    assert!(times[2].poll(&mut next).is_pending());
    gates[2].open.store(true, Ordering::SeqCst);
    until(|| times[2].times() == 1);
    assert_eq!(threads(), 1);
}
