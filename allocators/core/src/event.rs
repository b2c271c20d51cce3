//! Events: one record for every operation on memory, and the sinks that receive them.
//!
//! Pools create an [`Event`] for each allocation, free, growth, release, move and failure if they
//! have a [`Recorder`]. Without one, the cost is a test of an `Option`.
//!
//! A recorder passes the events to its [`EventSink`] one at a time and in the order in which they
//! happened, although they come from many threads and are passed on outside the pools' locks. To do
//! so, a pool takes a [`EventTicket`] while it holds the lock, and the recorder waits for
//! outstanding tickets.
//!
//! | sink | effect |
//! |---|---|
//! | [`RingSink`] | keeps the last events in memory |
//! | [`TraceFile`] | writes a row in our own format, which `aquifer replay` reads |
//! | [`TracingSink`] | passes it to the program's logging |
//! | [`NullSink`] | none |
//!
//! The crate aquifer-formats writes events in the formats of other libraries. A [`LineLog`] is a
//! file for a sink of your own.

mod clock;
mod delivery;
mod environment;
mod line_file;
mod record;
mod ring;
mod sinks;
mod trace;

pub use crate::ids::MemoryLocation;
pub use line_file::LineLog;
pub use record::{Action, BlockKind, Event};
pub use ring::RingSink;
pub use sinks::{NullSink, TracingSink};
pub use trace::TraceFile;

use crate::{Tag, panics::contain};
use clock::Clock;
use delivery::OrderedDelivery;
use std::{
    cell::Cell,
    fmt, process,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

/// A receiver of events. Called with one event at a time, in order, and never under a lock of a
/// pool or of the recorder.
///
/// A sink may use the pool whose events it receives. The events of that use follow after the
/// current one. A panic of the sink is contained, and the next event is delivered as usual.
pub trait EventSink: fmt::Debug + Send + Sync {
    /// Processes one event.
    fn record(&self, event: &Event);

    /// Returns whether the sink uses events of this action. Pools ask before they call the driver
    /// for an event alone, as for [`Action::Outside`]. Other events are passed on in any case.
    fn accepts(&self, _action: Action) -> bool {
        true
    }

    /// Reserves a position in the sink's own order for an event that [`fill`](EventSink::fill)
    /// delivers at any later time. Returns `None` if the sink requires its events one at a time and
    /// in order. Called under locks of pools, so it must not take a lock.
    fn reserve(&self) -> Option<u64> {
        None
    }

    /// Processes the event of a reserved position.
    fn fill(&self, _position: u64, event: &Event) {
        self.record(event);
    }

    /// Returns the number of events dropped so far.
    fn dropped(&self) -> u64 {
        0
    }

    /// Writes out buffered events.
    fn flush(&self) {}
}

/// The position of an event in the order of its recorder.
///
/// See the example of [`Recorder`].
#[derive(Debug)]
#[must_use = "a ticket that is not used holds up every later event"]
pub struct EventTicket {
    number: u64,
    /// Whether the sink has reserved the position.
    reserved: bool,
}

/// Passes events to a [`EventSink`] in the order of their [`EventTicket`]s.
///
/// ```
/// use aquifer::{DeviceId, Tag, event::{Action, MemoryLocation, Recorder, RingSink}};
/// use std::sync::Arc;
/// let ring = Arc::new(RingSink::new(16));
/// let recorder = Recorder::new(ring.clone());
/// let (first, second) = (recorder.ticket(), recorder.ticket());
/// let place = MemoryLocation::Device(DeviceId(0));
/// recorder.record(second, recorder.event(Action::Free, place, 0, 0x1000, 512, Tag::NONE));
/// recorder.record(first, recorder.event(Action::Allocate, place, 0, 0x1000, 512, Tag::NONE));
/// let order: Vec<_> = ring.take().into_iter().map(|e| e.action).collect();
/// assert_eq!(order, [Action::Allocate, Action::Free]);
/// ```
///
/// On drop, events behind an outstanding ticket are passed on without it. In a child of a fork,
/// sinks that need their events in order receive none.
pub struct Recorder {
    sink: Arc<dyn EventSink>,
    clock: Clock,
    delivery: OrderedDelivery,
    /// The process that may use the locks of the delivery and of the sink. In a forked child,
    /// threads that do not exist there may hold them.
    process: u32,
}

impl Recorder {
    /// Creates a recorder for `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn EventSink>) -> Self {
        Self::with_clock(sink, Clock::start())
    }

    fn with_clock(sink: Arc<dyn EventSink>, clock: Clock) -> Self {
        Self { sink, clock, delivery: OrderedDelivery::default(), process: process::id() }
    }

    /// Takes the next position in the order. Call it under the lock that guards the operation.
    #[inline]
    #[doc(hidden)]
    pub fn ticket(&self) -> EventTicket {
        match self.sink.reserve() {
            Some(number) => EventTicket { number, reserved: true },
            None => EventTicket { number: self.delivery.ticket(), reserved: false },
        }
    }

    /// Creates an event with the current time. Its kind is the usual one for `place` (see
    /// [`Event::of_kind`]).
    #[inline]
    #[must_use]
    pub fn event(
        &self,
        action: Action,
        place: MemoryLocation,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) -> Event {
        let kind = match place {
            MemoryLocation::Device(_) => BlockKind::Cached,
            MemoryLocation::Host(_) => BlockKind::Pinned,
            MemoryLocation::Global => BlockKind::Global,
        };
        let (at_ns, thread) = (self.clock.elapsed(), thread_number());
        Event {
            at_ns,
            action,
            place,
            thread,
            stream,
            address,
            bytes,
            kind,
            tag,
            refused_by: Tag::NONE,
        }
    }

    /// Passes the event on. A sink with reserved positions receives it at once. Any other sink
    /// receives it in order: in this call, unless an earlier ticket is outstanding or another event
    /// is being passed on.
    #[inline]
    #[doc(hidden)]
    pub fn record(&self, ticket: EventTicket, event: Event) {
        if ticket.reserved {
            contained(|| self.sink.fill(ticket.number, &event));
        } else if process::id() == self.process {
            self.delivery
                .deliver(ticket.number, event, |event| contained(|| self.sink.record(event)));
        }
    }

    /// Records a figure of a whole pool as an event without a block, if it differs from the one
    /// recorded last, which `last` stores. `value` runs under the lock of `last`, so that events
    /// are in the order of their figures. Called with no other lock held.
    #[doc(hidden)]
    pub fn record_change(
        &self,
        last: &Mutex<Option<u64>>,
        action: Action,
        place: MemoryLocation,
        value: impl FnOnce() -> u64,
    ) {
        let (ticket, value) = {
            let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
            let value = value();
            if last.replace(value) == Some(value) {
                return;
            }
            (self.ticket(), value)
        };
        self.record(ticket, self.event(action, place, 0, 0, value, Tag::NONE));
    }

    /// Waits up to a tenth of a second for events that other threads have begun to record, then
    /// flushes the sink. Pools call it when they close.
    pub fn flush(&self) {
        if process::id() == self.process {
            self.delivery.flush(|event| contained(|| self.sink.record(event)));
            contained(|| self.sink.flush());
        }
    }

    /// Returns whether the sink uses events of this action: see [`EventSink::accepts`].
    #[must_use]
    pub fn accepts(&self, action: Action) -> bool {
        contain(|| self.sink.accepts(action)).unwrap_or(false)
    }

    /// Returns the sink.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }
}

/// Returns the number of the calling thread.
#[inline]
fn thread_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        // `const` and without a destructor, so that a thread that is exiting can record events.
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| match number.get() {
        0 => {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
            number.get()
        }
        number => number,
    })
}

/// Calls a sink. Allocations and drops get here, so a panic must not propagate. The panic hook has
/// printed its message.
#[inline]
fn contained(call: impl FnOnce()) {
    let _panicked = contain(call);
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.flush();
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("sink", &self.sink).finish_non_exhaustive()
    }
}
