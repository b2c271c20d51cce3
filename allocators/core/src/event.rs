//! One record for everything that happens to memory, and where records go.
//!
//! Pools make an [`Event`] for each allocation, free, growth, reap, move and failure, if they were
//! given a [`Recorder`]; without one the cost is a test of an `Option`. A recorder hands its
//! [`Sink`] the events one at a time and in the order in which they happened, though they come from
//! many threads and are handed over outside the pools' locks: a pool takes a [`Ticket`] while it
//! holds the lock, and the recorder waits for tickets that are still out.
//!
//! | sink | what becomes of an event |
//! |---|---|
//! | [`RingSink`] | kept in memory, the last so many, without a lock |
//! | [`TraceFile`] | a row of our own format, that `aquifer replay` reads |
//! | [`RmmLog`] | a row as RAPIDS' memory manager writes it |
//! | [`TracingSink`] | whatever the program logs with |
//! | [`NullSink`] | nothing |
//!
//! What a ring has kept, a [`MemorySnapshot`] writes for the memory viewer of PyTorch.

mod clock;
mod environment;
mod lines;
mod process;
mod ring;
mod rmm;
mod sinks;
pub mod snapshot;
mod trace;
mod turns;

pub use ring::RingSink;
pub use rmm::RmmLog;
pub use sinks::{NullSink, TracingSink};
pub use snapshot::{HeldBlock, MemorySnapshot};
pub use trace::TraceFile;

use crate::{DeviceId, Tag, panics::contain};
use clock::Clock;
use process::PerProcess;
use std::{
    cell::Cell,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use turns::Turns;

/// What happened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Action {
    /// A block was given out.
    Allocate,
    /// A block was freed by its owner. Its bytes may still be in use on other streams.
    Free,
    /// The last use of a freed block is done: from here on anybody may have its bytes.
    Complete,
    /// The pool took memory from the driver or the kernel.
    Grow,
    /// The pool gave memory back to the driver or the kernel.
    Reap,
    /// A physical handle moved to another address.
    Move,
    /// A free range went from one stream to another.
    Adopt,
    /// An allocation failed.
    Fail,
    /// A pool that debugs has found something wrong with a block: its bytes, its place or its
    /// owner.
    Finding,
}

/// What a block is, by the way it is held.
///
/// ```
/// use aquifer_core::event::BlockKind;
/// assert_eq!(BlockKind::Reserved.name(), "reserved");
/// assert_eq!(BlockKind::from_name("reserved"), Some(BlockKind::Reserved));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum BlockKind {
    /// Device memory of a stream's cache, or an allocation of the driver's in its place.
    Cached,
    /// Device memory whose physical memory and addresses are its own.
    Stable,
    /// A committed step of reserved device memory. Committing allocates it, decommitting frees it.
    Reserved,
    /// Device memory that can be parked. Parking frees it, resuming allocates it again at the same
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

    /// Returns its name, as traces have it.
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

    /// Returns the kind of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// Where something happened.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[non_exhaustive]
pub enum Place {
    /// Memory of a device.
    Device(DeviceId),
    /// Pinned memory of a NUMA node, or of none that is known.
    Host(Option<u32>),
    /// The global allocator.
    Global,
}

/// One thing that happened to memory.
///
/// Its example is that of [`Recorder`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, in nanoseconds since the recorder was made.
    pub at_ns: u64,
    /// What.
    pub action: Action,
    /// Where.
    pub place: Place,
    /// Which thread made it happen: a number of the process, from 1 on, in the order of threads'
    /// first events.
    pub thread: u32,
    /// The stream's number in its pool; 0 where there are no streams.
    pub stream: u32,
    /// The block's or range's address.
    pub address: u64,
    /// Bytes: what was asked for when a block is allocated, freed or completed, else what was
    /// taken or given.
    pub bytes: u64,
    /// What kind of memory it is about.
    pub kind: BlockKind,
    /// Whose.
    pub tag: Tag,
}

impl Event {
    /// Returns the same event for memory of this kind.
    #[inline]
    #[must_use]
    pub fn of_kind(self, kind: BlockKind) -> Self {
        Self { kind, ..self }
    }
}

/// Where events go. Called with one event at a time, in order, never under a lock of a pool or of
/// the recorder.
///
/// A sink may use the pool that it listens to: events of that come after the one that it is being
/// called with. A panic in it ends there, and it is called with the next event all the same.
pub trait Sink: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn record(&self, event: &Event);

    /// A place in an order of its own, for an event that [`fill`](Sink::fill) brings later, at any
    /// time; `None` from a sink that wants its events one at a time and in order. Called under
    /// locks of pools, so it takes none.
    fn reserve(&self) -> Option<u64> {
        None
    }

    /// Takes the event of a place that was reserved.
    fn fill(&self, _place: u64, event: &Event) {
        self.record(event);
    }

    /// Events that did not fit, so far.
    fn dropped(&self) -> u64 {
        0
    }

    /// Writes out what is held back.
    fn flush(&self) {}
}

/// An event's place in the order of its recorder.
///
/// Its example is that of [`Recorder`].
#[derive(Debug)]
#[must_use = "a ticket that is not used holds up every later event"]
pub struct Ticket {
    number: u64,
    /// Whether the sink has a place for it.
    reserved: bool,
}

/// Hands events to a [`Sink`] in the order of their [`Ticket`]s.
///
/// ```
/// use aquifer_core::event::{Action, Place, Recorder, RingSink};
/// use aquifer_core::{DeviceId, Tag};
/// use std::sync::Arc;
/// let ring = Arc::new(RingSink::new(16));
/// let recorder = Recorder::new(ring.clone());
/// let (first, second) = (recorder.ticket(), recorder.ticket());
/// let place = Place::Device(DeviceId(0));
/// recorder.record(second, recorder.event(Action::Free, place, 0, 0x1000, 512, Tag::NONE));
/// recorder.record(first, recorder.event(Action::Allocate, place, 0, 0x1000, 512, Tag::NONE));
/// let order: Vec<_> = ring.take().into_iter().map(|e| e.action).collect();
/// assert_eq!(order, [Action::Allocate, Action::Free]);
/// ```
///
/// When it is dropped, events that wait for the ticket of another are passed on without it. A child
/// of a fork has an order of its own, so events that other threads of its parent had begun hold
/// nothing up there.
pub struct Recorder {
    sink: Arc<dyn Sink>,
    clock: Clock,
    turns: PerProcess<Turns>,
}

impl Recorder {
    /// A recorder in front of `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn Sink>) -> Self {
        Self::with_clock(sink, Clock::start())
    }

    fn with_clock(sink: Arc<dyn Sink>, clock: Clock) -> Self {
        Self { sink, clock, turns: PerProcess::new(Turns::default()) }
    }

    fn turns(&self) -> &Turns {
        self.turns.get(|_| Turns::default())
    }

    /// The next place in the order. Taken under the lock that makes the thing happen.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        match self.sink.reserve() {
            Some(number) => Ticket { number, reserved: true },
            None => Ticket { number: self.turns().ticket(), reserved: false },
        }
    }

    /// An event that happens now. Its kind is the one that `place` has as a rule: see
    /// [`Event::of_kind`].
    #[inline]
    #[must_use]
    pub fn event(
        &self,
        action: Action,
        place: Place,
        stream: u32,
        address: u64,
        bytes: u64,
        tag: Tag,
    ) -> Event {
        let kind = match place {
            Place::Device(_) => BlockKind::Cached,
            Place::Host(_) => BlockKind::Pinned,
            Place::Global => BlockKind::Global,
        };
        let (at_ns, thread) = (self.clock.elapsed(), thread());
        Event { at_ns, action, place, thread, stream, address, bytes, kind, tag }
    }

    /// Hands the event over: at once to a sink that has a place for it, else when its turn has
    /// come, which is in this call unless an earlier ticket is still out or another event is being
    /// handed over.
    #[inline]
    pub fn record(&self, ticket: Ticket, event: Event) {
        if ticket.reserved {
            contained(|| self.sink.fill(ticket.number, &event));
        } else {
            self.turns().pass(ticket.number, event, |event| contained(|| self.sink.record(event)));
        }
    }

    /// Waits for events that other threads have begun to record, for a tenth of a second at most,
    /// then has the sink write out what it holds back. Pools do so when they close.
    pub fn flush(&self) {
        self.turns().flush(|event| contained(|| self.sink.record(event)));
        contained(|| self.sink.flush());
    }

    /// Where the events go.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn Sink> {
        &self.sink
    }
}

/// Runs what a sink does. It is called by allocations and drops, so a panic must not leave it; the
/// panic's own message has told of it.
#[inline]
fn contained(call: impl FnOnce()) {
    let _panicked = contain(call);
}

/// The calling thread's number.
#[inline]
fn thread() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(1);
    thread_local! {
        // Const and without a destructor, so that events may come from a thread that is ending.
        static NUMBER: Cell<u32> = const { Cell::new(0) };
    }
    NUMBER.with(|number| match number.get() {
        0 => {
            number.set(NEXT.fetch_add(1, Ordering::Relaxed));
            number.get()
        }
        there => there,
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
