//! Tests that a sink that panics or records events itself neither loses events nor changes their
//! order.
#![expect(clippy::unwrap_used, reason = "in tests")]

use aquifer_core::{
    Action, DeviceId, Event, EventSink, Recorder, Tag,
    event::{MemoryLocation, RingSink},
};
use std::{
    fmt,
    sync::{Arc, Mutex, OnceLock, Weak, mpsc},
    thread,
    time::Duration,
};

fn event(recorder: &Recorder, bytes: u64) -> Event {
    recorder.event(Action::Allocate, MemoryLocation::Device(DeviceId(0)), 0, 0, bytes, Tag::NONE)
}

/// Keeps the events it receives, and runs an action at each.
struct Hook {
    told: Mutex<Vec<u64>>,
    recorder: OnceLock<Weak<Recorder>>,
    act: fn(&Hook, u64),
}

impl fmt::Debug for Hook {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hook")
    }
}

impl EventSink for Hook {
    fn record(&self, event: &Event) {
        self.told.lock().unwrap().push(event.bytes);
        (self.act)(self, event.bytes);
    }
}

fn hook(act: fn(&Hook, u64)) -> (Arc<Hook>, Arc<Recorder>) {
    let hook = Arc::new(Hook { told: Mutex::default(), recorder: OnceLock::new(), act });
    let recorder = Arc::new(Recorder::new(hook.clone()));
    hook.recorder.set(Arc::downgrade(&recorder)).unwrap();
    (hook, recorder)
}

#[test]
fn a_sink_that_panics_receives_later_and_pending_events() {
    let (hook, recorder) = hook(|_, bytes| assert_ne!(bytes, 1, "a sink of the user's"));
    let tickets: Vec<_> = (0..4).map(|_| recorder.ticket()).collect();
    // The first one panics with two events behind it.
    for (bytes, ticket) in tickets.into_iter().enumerate().rev() {
        recorder.record(ticket, event(&recorder, bytes as u64));
    }
    recorder.record(recorder.ticket(), event(&recorder, 4));
    assert_eq!(*hook.told.lock().unwrap(), [0, 1, 2, 3, 4]);
}

#[test]
fn a_panicking_sink_with_locations_does_not_unwind_into_the_pool() {
    #[derive(Debug)]
    struct Panics(RingSink);
    impl EventSink for Panics {
        fn record(&self, event: &Event) {
            self.0.record(event);
        }
        fn reserve(&self) -> Option<u64> {
            self.0.reserve()
        }
        fn fill(&self, place: u64, event: &Event) {
            self.0.fill(place, event);
            panic!("a sink of the user's");
        }
    }
    let sink = Arc::new(Panics(RingSink::new(8)));
    let recorder = Recorder::new(sink.clone());
    for bytes in 0..3 {
        recorder.record(recorder.ticket(), event(&recorder, bytes));
    }
    assert_eq!(sink.0.take().len(), 3);
}

#[test]
fn a_sink_that_panics_when_it_is_asked_what_it_uses_gets_no_event_of_that_kind() {
    #[derive(Debug)]
    struct Panics;
    impl EventSink for Panics {
        fn record(&self, _: &Event) {}
        fn accepts(&self, action: Action) -> bool {
            assert_ne!(action, Action::Outside, "a sink of the user's");
            action == Action::Fail
        }
    }
    let recorder = Recorder::new(Arc::new(Panics));
    let answers = [Action::Outside, Action::Fail, Action::Grow].map(|a| recorder.accepts(a));
    assert_eq!(answers, [false, true, false]);
}

#[test]
fn events_recorded_by_a_sink_come_after_the_one_it_receives() {
    let (done, over) = mpsc::channel();
    let (hook, recorder) = hook(|hook, bytes| {
        if bytes < 3 {
            let recorder = hook.recorder.get().unwrap().upgrade().unwrap();
            recorder.record(recorder.ticket(), event(&recorder, bytes + 10));
        }
    });
    let worker = thread::spawn(move || {
        for bytes in 0..3 {
            recorder.record(recorder.ticket(), event(&recorder, bytes));
        }
        done.send(()).unwrap();
    });
    over.recv_timeout(Duration::from_secs(60)).expect("it waits for itself");
    worker.join().unwrap();
    assert_eq!(*hook.told.lock().unwrap(), [0, 10, 1, 11, 2, 12]);
}

#[test]
fn events_of_several_threads_come_one_at_a_time_and_in_order() {
    let (hook, recorder) = hook(|_, _| ());
    let each = if cfg!(miri) { 20 } else { 500 };
    let order = Mutex::new(0);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..each {
                    let (ticket, bytes) = {
                        let mut order = order.lock().unwrap();
                        *order += 1;
                        (recorder.ticket(), *order)
                    };
                    recorder.record(ticket, event(&recorder, bytes));
                }
            });
        }
    });
    assert_eq!(*hook.told.lock().unwrap(), (1..=4 * each).collect::<Vec<u64>>());
}
