//! Tests of epochs: what is known to be done only grows, and never exceeds what an event has
//! proved.
//!
//! `loom.rs` tries every interleaving. This file tests each operation.

use aquifer_stream::Epochs;
use std::{sync::Arc, thread};

#[test]
fn an_epoch_ends_when_it_is_closed_and_is_proved_by_the_first_event_from_there_on() {
    let epochs = Epochs::new();
    let stamps: Vec<u64> = (0..3)
        .map(|_| {
            let stamp = epochs.open();
            assert_eq!(epochs.close(), stamp, "the epoch that was open");
            stamp
        })
        .collect();
    assert_eq!(stamps, [1, 2, 3]);
    assert_eq!((epochs.proved(), epochs.proof(1)), (0, None));
    epochs.publish(2, Arc::new("second"));
    assert_eq!(epochs.proved(), 2);
    let proof = |epoch| epochs.proof(epoch).map(|(proved, event)| (proved, *event));
    assert_eq!(proof(1), Some((2, "second")), "a later event proves what came before");
    assert_eq!(proof(2), Some((2, "second")));
    assert_eq!(proof(3), None, "and nothing that came after");
}

#[test]
fn events_published_in_any_order_stand_in_the_order_of_their_epochs() {
    let epochs = Epochs::new();
    for epoch in [3, 1, 4, 2] {
        epochs.publish(epoch, Arc::new(epoch));
    }
    assert_eq!(epochs.proved(), 4);
    for epoch in 1..=4 {
        assert_eq!(epochs.oldest(), Some((epoch, Arc::new(epoch))));
        assert_eq!(epochs.proof(epoch), Some((epoch, Arc::new(epoch))));
        assert_eq!(epochs.finish(epoch), [Arc::new(epoch)], "that one is not needed any more");
    }
    assert_eq!(epochs.oldest(), None);
}

#[test]
fn done_only_grows() {
    let epochs = Epochs::new();
    for epoch in 1..=5 {
        epochs.publish(epoch, Arc::new(epoch));
    }
    assert_eq!(epochs.finish(4).len(), 4);
    assert!(epochs.is_done(4) && !epochs.is_done(5));
    assert!(epochs.finish(2).is_empty(), "an old answer that comes late");
    assert!(epochs.is_done(4));
    assert_eq!(epochs.proved(), 5);
    assert_eq!(epochs.finish(u64::MAX).len(), 1, "the stream has ended");
    assert!(epochs.is_done(u64::MAX));
}

#[test]
fn an_epoch_seen_done_by_one_thread_is_done_for_all() {
    let epochs = Epochs::<u64>::new();
    thread::scope(|scope| {
        for thread in 0..4 {
            let epochs = &epochs;
            scope.spawn(move || {
                for round in 0..2000u64 {
                    let (before, closed) = (epochs.proved(), epochs.close());
                    epochs.publish(closed, Arc::new(closed));
                    assert!(epochs.proved() >= closed.max(before));
                    if (round + thread) % 3 == 0 {
                        drop(epochs.finish(closed));
                        assert!(epochs.is_done(closed) && epochs.is_done(closed - 1));
                    }
                }
            });
        }
    });
    let _ = epochs.finish(epochs.close());
    assert_eq!(epochs.oldest(), None);
}
