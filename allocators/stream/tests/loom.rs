//! Every interleaving of the lock and of the epochs.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p aquifer-stream --test loom --release`.
#![cfg(loom)]

use aquifer_stream::{Epochs, Spin};
use loom::{sync::Mutex, thread};
use std::sync::Arc as StdArc;

/// What a driver does with two threads that queue on one stream: it takes them one at a time.
#[derive(Clone, Copy, PartialEq)]
enum Queued {
    Work,
    Event,
}

/// A stream, and an event that knows its place in it.
type Queue = Mutex<Vec<Queued>>;

fn enqueue(queue: &Queue, item: Queued) -> usize {
    let mut queue = queue.lock().unwrap();
    queue.push(item);
    queue.len() - 1
}

/// One thread queues work and frees its block; another fences. Wherever the two meet, an event that claims to prove the
/// block's epoch lies behind the block's work.
fn an_event_never_proves_work_queued_after_it(record_first: bool) {
    loom::model(move || {
        let queue = loom::sync::Arc::new(Queue::new(Vec::new()));
        let epochs = loom::sync::Arc::new(Epochs::<usize>::new());
        let fencing = {
            let (queue, epochs) = (queue.clone(), epochs.clone());
            thread::spawn(move || {
                let (epoch, at) = if record_first {
                    let at = enqueue(&queue, Queued::Event);
                    (epochs.close(), at)
                } else {
                    let epoch = epochs.close();
                    (epoch, enqueue(&queue, Queued::Event))
                };
                epochs.publish(epoch, StdArc::new(at));
            })
        };
        let work = enqueue(&queue, Queued::Work);
        let stamp = epochs.open();
        fencing.join().unwrap();
        if let Some((_, event)) = epochs.proof(stamp) {
            assert!(*event > work, "an event at {event} is taken as proof of work at {work}");
        }
    });
}

#[test]
fn closing_before_recording_is_right() {
    an_event_never_proves_work_queued_after_it(false);
}

#[test]
#[should_panic(expected = "is taken as proof of work")]
fn recording_before_closing_is_a_race() {
    an_event_never_proves_work_queued_after_it(true);
}

#[test]
fn two_fences_at_once_leave_the_events_in_order_and_each_proves_its_epoch() {
    loom::model(|| {
        let queue = loom::sync::Arc::new(Queue::new(Vec::new()));
        let epochs = loom::sync::Arc::new(Epochs::<usize>::new());
        let work = enqueue(&queue, Queued::Work);
        let stamp = epochs.open();
        let fence = |queue: &Queue, epochs: &Epochs<usize>| {
            let epoch = epochs.close();
            let at = enqueue(queue, Queued::Event);
            epochs.publish(epoch, StdArc::new(at));
        };
        let other = {
            let (queue, epochs) = (queue.clone(), epochs.clone());
            thread::spawn(move || fence(&queue, &epochs))
        };
        fence(&queue, &epochs);
        other.join().unwrap();
        let (first, event) = epochs.proof(stamp).unwrap();
        assert!(*event > work);
        assert_eq!(epochs.oldest().unwrap().0, first, "the oldest comes first");
        assert_eq!(epochs.finish(epochs.proved()).len(), 2);
        assert!(epochs.is_done(stamp));
    });
}

#[test]
fn the_lock_lets_one_thread_in_at_a_time_and_shows_it_what_the_last_one_wrote() {
    loom::model(|| {
        let spin = loom::sync::Arc::new(Spin::new(0u32));
        let other = {
            let spin = spin.clone();
            thread::spawn(move || spin.with(|n| *n += 1))
        };
        spin.with(|n| *n += 1);
        other.join().unwrap();
        assert_eq!(spin.with(|n| *n), 2);
    });
}
