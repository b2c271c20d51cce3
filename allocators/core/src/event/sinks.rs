//! Sinks that drop events, or pass them on.

use super::{Event, Sink};

/// Keeps nothing.
///
/// Its example is that of [`Recorder`](super::Recorder), where it stands in place of a ring.
#[derive(Clone, Copy, Default, Debug)]
pub struct NullSink;

impl Sink for NullSink {
    fn record(&self, _event: &Event) {}
}

/// Passes each event to `tracing` at debug level under the target `aquifer`, failures and findings as warnings.
///
/// ```
/// use aquifer_core::event::{Recorder, TracingSink};
/// use std::sync::Arc;
/// let recorder = Recorder::new(Arc::new(TracingSink)); // for a pool's settings
/// # drop(recorder);
/// ```
#[derive(Clone, Copy, Default, Debug)]
pub struct TracingSink;

impl Sink for TracingSink {
    fn record(&self, event: &Event) {
        let Event { at_ns, action, place, thread, stream, address, bytes, tag } = *event;
        let tag = tag.name();
        if matches!(action, super::Action::Fail | super::Action::Finding) {
            tracing::warn!(target: "aquifer", at_ns, ?action, ?place, thread, stream, address, bytes, tag);
        } else {
            tracing::debug!(target: "aquifer", at_ns, ?action, ?place, thread, stream, address, bytes, tag);
        }
    }
}
