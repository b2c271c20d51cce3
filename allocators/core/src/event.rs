//! One record for everything that happens to memory, and where records go.
//!
//! Pools make an [`Event`] for each allocation, free, growth, reap, move and failure, if they were given a
//! [`Recorder`]; without one the cost is a test of an `Option`. A recorder hands its [`Sink`] the events one at a time
//! and in the order in which they happened, though they come from many threads and are handed over outside the pools'
//! locks: a pool takes a [`Ticket`] while it holds the lock, and the recorder waits for tickets that are still out.
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
mod lines;
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

use crate::{DeviceId, Tag};
use clock::Clock;
use std::{
    cell::Cell,
    collections::BTreeMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
};

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
    /// A pool that debugs has found something wrong with a block: its bytes, its place or its owner.
    Finding,
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
    /// Which thread made it happen: a number of the process, from 1 on, in the order of threads' first events.
    pub thread: u32,
    /// The stream's number in its pool; 0 where there are no streams.
    pub stream: u32,
    /// The block's or range's address.
    pub address: u64,
    /// Bytes: what was asked for when a block is allocated, freed or completed, else what was taken or given.
    pub bytes: u64,
    /// Whose.
    pub tag: Tag,
}

/// Where events go. Called with one event at a time, in order, never under a lock of a pool or of the recorder.
///
/// A sink may use the pool that it listens to: events of that come after the one that it is being called with. A panic in
/// it ends there, and it is called with the next event all the same.
pub trait Sink: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn record(&self, event: &Event);

    /// A place in an order of its own, for an event that [`fill`](Sink::fill) brings later, at any time; `None` from a sink
    /// that wants its events one at a time and in order. Called under locks of pools, so it takes none.
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
pub struct Recorder {
    sink: Arc<dyn Sink>,
    clock: Clock,
    tickets: AtomicU64,
    early: Mutex<Early>,
}

/// Events whose ticket's turn has not come.
struct Early {
    next: u64,
    waiting: BTreeMap<u64, Event>,
    /// A thread hands events over; it goes on with those whose turn has come when it is done with one.
    busy: bool,
}

impl Recorder {
    /// A recorder in front of `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn Sink>) -> Self {
        Self {
            sink,
            clock: Clock::start(),
            tickets: AtomicU64::new(0),
            early: Mutex::new(Early { next: 0, waiting: BTreeMap::new(), busy: false }),
        }
    }

    /// The next place in the order. Taken under the lock that makes the thing happen.
    #[inline]
    pub fn ticket(&self) -> Ticket {
        match self.sink.reserve() {
            Some(number) => Ticket { number, reserved: true },
            None => Ticket { number: self.tickets.fetch_add(1, Ordering::Relaxed), reserved: false },
        }
    }

    /// An event that happens now.
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
        Event { at_ns: self.clock.elapsed(), action, place, thread: thread(), stream, address, bytes, tag }
    }

    /// Hands the event over: at once to a sink that has a place for it, else when its turn has come, which is in this call
    /// unless an earlier ticket is still out or another event is being handed over.
    #[inline]
    pub fn record(&self, ticket: Ticket, event: Event) {
        if ticket.reserved {
            contained(|| self.sink.fill(ticket.number, &event));
        } else {
            self.record_in_turn(ticket.number, event);
        }
    }

    fn record_in_turn(&self, number: u64, event: Event) {
        let early = || self.early.lock().unwrap_or_else(PoisonError::into_inner);
        let mut now = event;
        {
            let mut early = early();
            if number != early.next || early.busy {
                early.waiting.insert(number, event);
                return;
            }
            early.busy = true;
        }
        loop {
            // No lock is held: what the sink does may make events, which wait for their turn.
            contained(|| self.sink.record(&now));
            let mut early = early();
            early.next += 1;
            let next = early.next;
            match early.waiting.remove(&next) {
                Some(event) => now = event,
                None => {
                    early.busy = false;
                    return;
                }
            }
        }
    }

    /// Where the events go.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn Sink> {
        &self.sink
    }
}

/// Runs what a sink does. It is called by allocations and drops, so a panic must not leave it; the panic's own message has
/// told of it.
#[inline]
fn contained(call: impl FnOnce()) {
    let _panicked = catch_unwind(AssertUnwindSafe(call));
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

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("sink", &self.sink).finish_non_exhaustive()
    }
}
