//! Sinks that drop events or pass them on.

use super::{Action, Event, EventSink};
use std::sync::Arc;

/// Drops every event.
///
/// See the example of [`Recorder`](super::Recorder), where it can replace the ring.
#[derive(Clone, Copy, Default, Debug)]
pub struct NullSink;

impl EventSink for NullSink {
    fn record(&self, _event: &Event) {}

    fn accepts(&self, _action: Action) -> bool {
        false
    }

    /// Every event has the same position, so that none waits for another.
    fn reserve(&self) -> Option<u64> {
        Some(0)
    }
}

/// Passes each event to `tracing` under the target `aquifer`: failures and findings as warnings,
/// all others at debug level.
///
/// ```
/// use aquifer::event::{Recorder, TracingSink};
/// use std::sync::Arc;
/// let recorder = Recorder::new(Arc::new(TracingSink)); // for a pool's settings
/// # drop(recorder);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct TracingSink;

impl EventSink for TracingSink {
    fn record(&self, event: &Event) {
        let Event { at_ns, action, place, thread, stream, address, bytes, kind, tag, refused_by } =
            *event;
        let (kind, tag) = (kind.name(), tag.name());
        if matches!(action, Action::Fail | Action::Finding) {
            let refused_by = (refused_by != crate::Tag::NONE).then(|| refused_by.name());
            tracing::warn!(
                target: "aquifer", at_ns, ?action, ?place, thread, stream, address, bytes, kind, tag, refused_by
            );
        } else {
            tracing::debug!(target: "aquifer", at_ns, ?action, ?place, thread, stream, address, bytes, kind, tag);
        }
    }
}

/// Passes each event to two sinks.
#[derive(Debug)]
pub(super) struct TeeSink {
    pub(super) first: Arc<dyn EventSink>,
    pub(super) second: Arc<dyn EventSink>,
    /// Added to an event's time for the second sink, whose recorder was created earlier. Wraps.
    pub(super) offset_ns: u64,
}

impl EventSink for TeeSink {
    fn record(&self, event: &Event) {
        self.first.record(event);
        self.second.record(&Event { at_ns: event.at_ns.wrapping_add(self.offset_ns), ..*event });
    }

    fn accepts(&self, action: Action) -> bool {
        self.first.accepts(action) || self.second.accepts(action)
    }

    fn dropped(&self) -> u64 {
        self.first.dropped() + self.second.dropped()
    }

    fn flush(&self) {
        self.first.flush();
        self.second.flush();
    }
}
