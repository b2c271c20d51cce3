//! Delivery of events in the order of their tickets, from many threads.

use super::record::Event;
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
const FLUSH_TIMEOUT: Duration = Duration::from_millis(100);

/// The order of one recorder in one process.
#[derive(Debug, Default)]
pub(super) struct OrderedDelivery {
    tickets: AtomicU64,
    buffer: Mutex<ReorderBuffer>,
}

/// Events that are not due yet.
#[derive(Debug, Default)]
struct ReorderBuffer {
    next: u64,
    pending: BTreeMap<u64, Event>,
    /// Set while a thread delivers an event. That thread then delivers the ones that have become
    /// due.
    delivering: bool,
}

impl ReorderBuffer {
    /// Removes the next due event.
    fn pop_due(&mut self) -> Option<Event> {
        let first = self.pending.first_entry().filter(|entry| *entry.key() <= self.next)?;
        let (number, event) = first.remove_entry();
        self.next = self.next.max(number + 1);
        Some(event)
    }
}

impl OrderedDelivery {
    /// Takes the next ticket.
    pub(super) fn ticket(&self) -> u64 {
        self.tickets.fetch_add(1, Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, ReorderBuffer> {
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Delivers an event to `sink` in its turn: in this call, unless an earlier ticket is
    /// outstanding or another event is being delivered. Events that waited for it follow. No lock
    /// is held while `sink` runs.
    pub(super) fn deliver(&self, number: u64, event: Event, sink: impl Fn(&Event)) {
        let mut buffer = self.lock();
        if buffer.delivering || number > buffer.next {
            buffer.pending.insert(number, event);
            return;
        }
        // An event that a flush has skipped is delivered now.
        buffer.next = buffer.next.max(number + 1);
        let buffer = self.call_sink(buffer, &event, &sink);
        self.deliver_due(buffer, sink);
    }

    /// Delivers the due events, unless another thread is doing so.
    fn deliver_due<'a>(&'a self, mut buffer: MutexGuard<'a, ReorderBuffer>, sink: impl Fn(&Event)) {
        if buffer.delivering {
            return;
        }
        while let Some(event) = buffer.pop_due() {
            buffer = self.call_sink(buffer, &event, &sink);
        }
    }

    /// Calls `sink` without the lock. New events from inside `sink` are queued.
    fn call_sink<'a>(
        &'a self,
        mut buffer: MutexGuard<'a, ReorderBuffer>,
        event: &Event,
        sink: impl Fn(&Event),
    ) -> MutexGuard<'a, ReorderBuffer> {
        buffer.delivering = true;
        drop(buffer);
        sink(event);
        let mut buffer = self.lock();
        buffer.delivering = false;
        buffer
    }

    /// Waits up to a tenth of a second for outstanding tickets, then delivers the events that wait
    /// behind them.
    pub(super) fn flush(&self, sink: impl Fn(&Event)) {
        let until = Instant::now() + FLUSH_TIMEOUT;
        loop {
            let mut buffer = self.lock();
            if buffer.pending.is_empty() && !buffer.delivering {
                return;
            }
            if Instant::now() >= until {
                buffer.next =
                    buffer.pending.last_key_value().map_or(buffer.next, |(last, _)| last + 1);
                return self.deliver_due(buffer, sink);
            }
            drop(buffer);
            thread::sleep(Duration::from_micros(50));
        }
    }
}
