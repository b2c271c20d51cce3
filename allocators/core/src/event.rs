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
//! | [`RingSink`] | keeps the last events in memory, without a lock |
//! | [`TraceFile`] | writes a row in our own format, which `aquifer replay` reads |
//! | [`RmmLog`] | writes a row in the format of RAPIDS' memory manager |
//! | [`TracingSink`] | passes it to the program's logging |
//! | [`NullSink`] | none |
//!
//! A [`MemorySnapshot`] writes the events of a ring for PyTorch's memory viewer.

mod clock;
mod delivery;
mod environment;
mod line_file;
mod process;
mod ring;
mod rmm;
mod sinks;
pub mod snapshot;
mod trace;

pub use ring::RingSink;
pub use rmm::RmmLog;
pub use sinks::{NullSink, TracingSink};
pub use snapshot::{HeldBlock, MemorySnapshot};
pub use trace::TraceFile;

use crate::{DeviceId, Tag, panics::contain};
use clock::Clock;
use delivery::OrderedDelivery;
use process::PerProcess;
use std::{
    cell::Cell,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

/// The kind of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Action {
    /// A block was allocated.
    Allocate,
    /// A block was freed by its owner. Its bytes may still be in use on other streams.
    Free,
    /// The last use of a freed block is done. Its bytes can be reused from here on.
    Complete,
    /// The pool allocated memory from the driver or the kernel.
    Grow,
    /// The pool released memory to the driver or the kernel.
    Reap,
    /// A physical handle moved to another address.
    Move,
    /// A free range moved from one stream's cache to another's.
    Adopt,
    /// An allocation failed.
    Fail,
    /// A debugging pool found an error: the bytes, the location or the owner of a block are wrong.
    Finding,
}

/// The kind of a block, by the way its memory is held.
///
/// ```
/// use aquifer_core::event::BlockKind;
/// assert_eq!(BlockKind::Reserved.name(), "reserved");
/// assert_eq!(BlockKind::from_name("reserved"), Some(BlockKind::Reserved));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum BlockKind {
    /// Device memory of a stream's cache, or a driver allocation used instead.
    Cached,
    /// Device memory with its own physical memory and addresses.
    Stable,
    /// A committed step of reserved device memory. Commit allocates it, decommit frees it.
    Reserved,
    /// Device memory that can be parked. Parking frees it. Resuming allocates it again at the same
    /// address.
    Parkable,
    /// Device memory of captured graphs.
    Graph,
    /// Pinned host memory.
    Pinned,
    /// Memory of the global allocator.
    Global,
}

impl BlockKind {
    /// Every kind.
    pub const ALL: [Self; 7] = [
        Self::Cached,
        Self::Stable,
        Self::Reserved,
        Self::Parkable,
        Self::Graph,
        Self::Pinned,
        Self::Global,
    ];

    /// Returns the name that traces use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cached => "cached",
            Self::Stable => "stable",
            Self::Reserved => "reserved",
            Self::Parkable => "parkable",
            Self::Graph => "graph",
            Self::Pinned => "pinned",
            Self::Global => "global",
        }
    }

    /// Returns the kind with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// The location of an event.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum MemoryLocation {
    /// Memory of a device.
    Device(DeviceId),
    /// Pinned memory of a NUMA node, or of an unknown node.
    Host(Option<u32>),
    /// The global allocator.
    Global,
}

/// One operation on memory.
///
/// See the example of [`Recorder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// The time, in nanoseconds since the recorder was created.
    pub at_ns: u64,
    /// The action.
    pub action: Action,
    /// The location.
    pub place: MemoryLocation,
    /// The thread: a number unique in the process, from 1 on, in the order of the threads' first
    /// events.
    pub thread: u32,
    /// The stream's number in its pool, or 0 if there are no streams.
    pub stream: u32,
    /// The address of the block or range.
    pub address: u64,
    /// Bytes: the requested size for allocations, frees and completions, otherwise the size taken
    /// or released.
    pub bytes: u64,
    /// The kind of memory.
    pub kind: BlockKind,
    /// The tag.
    pub tag: Tag,
}

impl Event {
    /// Returns the event with another kind.
    #[inline]
    #[must_use]
    pub fn of_kind(self, kind: BlockKind) -> Self {
        Self { kind, ..self }
    }
}

/// A receiver of events. Called with one event at a time, in order, and never under a lock of a
/// pool or of the recorder.
///
/// A sink may use the pool whose events it receives. The events of that use follow after the
/// current one. A panic of the sink is contained, and the next event is delivered as usual.
pub trait EventSink: fmt::Debug + Send + Sync {
    /// Processes one event.
    fn record(&self, event: &Event);

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
/// use aquifer_core::event::{Action, MemoryLocation, Recorder, RingSink};
/// use aquifer_core::{DeviceId, Tag};
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
/// On drop, events behind an outstanding ticket are passed on without it. A child of a fork has its
/// own order, so events that other threads of the parent had begun delay nothing there.
pub struct Recorder {
    sink: Arc<dyn EventSink>,
    clock: Clock,
    delivery: PerProcess<OrderedDelivery>,
}

impl Recorder {
    /// Creates a recorder for `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn EventSink>) -> Self {
        Self::with_clock(sink, Clock::start())
    }

    fn with_clock(sink: Arc<dyn EventSink>, clock: Clock) -> Self {
        Self { sink, clock, delivery: PerProcess::new(OrderedDelivery::default()) }
    }

    fn delivery(&self) -> &OrderedDelivery {
        self.delivery.get(|_| OrderedDelivery::default())
    }

    /// Takes the next position in the order. Call it under the lock that guards the operation.
    #[inline]
    pub fn ticket(&self) -> EventTicket {
        match self.sink.reserve() {
            Some(number) => EventTicket { number, reserved: true },
            None => EventTicket { number: self.delivery().ticket(), reserved: false },
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
        Event { at_ns, action, place, thread, stream, address, bytes, kind, tag }
    }

    /// Passes the event on. A sink with reserved positions receives it at once. Any other sink
    /// receives it in order: in this call, unless an earlier ticket is outstanding or another event
    /// is being passed on.
    #[inline]
    pub fn record(&self, ticket: EventTicket, event: Event) {
        if ticket.reserved {
            contained(|| self.sink.fill(ticket.number, &event));
        } else {
            self.delivery()
                .deliver(ticket.number, event, |event| contained(|| self.sink.record(event)));
        }
    }

    /// Waits up to a tenth of a second for events that other threads have begun to record, then
    /// flushes the sink. Pools call it when they close.
    pub fn flush(&self) {
        self.delivery().flush(|event| contained(|| self.sink.record(event)));
        contained(|| self.sink.flush());
    }

    /// Returns the sink.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn EventSink> {
        &self.sink
    }
}

/// Calls a sink. Allocations and drops get here, so a panic must not propagate. The panic hook has
/// printed its message.
#[inline]
fn contained(call: impl FnOnce()) {
    let _panicked = contain(call);
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
