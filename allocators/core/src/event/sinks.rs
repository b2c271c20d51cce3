//! Sinks that keep events, drop them, or pass them on.

use super::{Event, Sink};
use std::{
    collections::VecDeque,
    sync::{Mutex, PoisonError},
};

/// Keeps the last events, and counts those it had to drop for them.
#[derive(Debug)]
pub struct RingSink {
    capacity: usize,
    ring: Mutex<Ring>,
}

#[derive(Debug)]
struct Ring {
    events: VecDeque<Event>,
    dropped: u64,
}

impl RingSink {
    /// A ring of at most `capacity` events, all of its memory taken now.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::new(Ring { events: VecDeque::with_capacity(capacity), dropped: 0 }) }
    }

    /// Takes out what is there, oldest first.
    #[must_use]
    pub fn take(&self) -> Vec<Event> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).events.drain(..).collect()
    }
}

impl Sink for RingSink {
    fn record(&self, event: &Event) {
        let mut ring = self.ring.lock().unwrap_or_else(PoisonError::into_inner);
        if ring.events.len() >= self.capacity {
            ring.dropped += 1;
            if ring.events.pop_front().is_none() {
                return;
            }
        }
        ring.events.push_back(*event);
    }

    fn dropped(&self) -> u64 {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner).dropped
    }
}

/// Keeps nothing.
#[derive(Clone, Copy, Default, Debug)]
pub struct NullSink;

impl Sink for NullSink {
    fn record(&self, _event: &Event) {}
}

/// Passes each event to `tracing` at debug level under the target `aquifer`, failures and findings as warnings.
#[derive(Clone, Copy, Default, Debug)]
pub struct TracingSink;

impl Sink for TracingSink {
    fn record(&self, event: &Event) {
        let Event { at_ns, action, place, stream, address, bytes, tag } = *event;
        if matches!(action, super::Action::Fail | super::Action::Finding) {
            tracing::warn!(target: "aquifer", at_ns, ?action, ?place, stream, address, bytes, tag = tag.name());
        } else {
            tracing::debug!(target: "aquifer", at_ns, ?action, ?place, stream, address, bytes, tag = tag.name());
        }
    }
}
