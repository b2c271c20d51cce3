//! Delivery of events in the order of their tickets, from many threads.

use super::Event;
use std::{
    collections::BTreeMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// How long a flush waits for outstanding tickets.
const PATIENCE: Duration = Duration::from_millis(100);

/// The order of one recorder in one process.
#[derive(Debug, Default)]
pub(super) struct Turns {
    tickets: AtomicU64,
    early: Mutex<Early>,
}

/// Events that are not due yet.
#[derive(Debug, Default)]
struct Early {
    next: u64,
    waiting: BTreeMap<u64, Event>,
    /// Set while a thread delivers an event. That thread then delivers the ones that have become
    /// due.
    busy: bool,
}

impl Early {
    /// Removes the next due event.
    fn due(&mut self) -> Option<Event> {
        let first = self.waiting.first_entry().filter(|entry| *entry.key() <= self.next)?;
        let (number, event) = first.remove_entry();
        self.next = self.next.max(number + 1);
        Some(event)
    }
}

impl Turns {
    /// Takes the next ticket.
    pub(super) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn early(&self) -> MutexGuard<'_, Early> {
        self.early.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers an event to `sink` in its turn: in this call, unless an earlier ticket is
    /// outstanding or another event is being delivered. Events that waited for it follow. No lock
    /// is held while `sink` runs.
    pub(super) fn pass(&self, number: u64, event: Event, sink: impl Fn(&Event)) {
        let mut early = self.early();
        if early.busy || number > early.next {
            early.waiting.insert(number, event);
            return;
        }
        // An event that a flush has skipped is delivered now.
        early.next = early.next.max(number + 1);
        let early = self.call(early, &event, &sink);
        self.hand_over(early, sink);
    }

    /// Delivers the due events, unless another thread is doing so.
    fn hand_over<'a>(&'a self, mut early: MutexGuard<'a, Early>, sink: impl Fn(&Event)) {
        if early.busy {
            return;
        }
        while let Some(event) = early.due() {
            early = self.call(early, &event, &sink);
        }
    }

    /// Calls `sink` without the lock. New events from inside `sink` are queued.
    fn call<'a>(
        &'a self,
        mut early: MutexGuard<'a, Early>,
        event: &Event,
        sink: impl Fn(&Event),
    ) -> MutexGuard<'a, Early> {
        early.busy = true;
        drop(early);
        sink(event);
        let mut early = self.early();
        early.busy = false;
        early
    }

    /// Waits up to a tenth of a second for outstanding tickets, then delivers the events that wait
    /// behind them.
    pub(super) fn flush(&self, sink: impl Fn(&Event)) {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut early = self.early();
            if early.waiting.is_empty() && !early.busy {
                return;
            }
            if Instant::now() >= until {
                early.next =
                    early.waiting.last_key_value().map_or(early.next, |(last, _)| last + 1);
                return self.hand_over(early, sink);
            }
            drop(early);
            thread::sleep(Duration::from_micros(50));
        }
    }
}
