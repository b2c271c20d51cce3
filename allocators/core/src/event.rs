//! One record for everything that happens to memory, and where records go.
//!
//! Pools make an [`Event`] for each allocation, free, growth, reap, move and failure, if they were given a
//! [`Recorder`]; without one the cost is a test of an `Option`. A recorder hands its [`Sink`] the events one at a time
//! and in the order in which they happened, though they come from many threads and are handed over outside the pools'
//! locks: a pool takes a [`Ticket`] while it holds the lock, and the recorder waits for tickets that are still out.

mod sinks;
mod trace;

pub use sinks::{NullSink, RingSink, TracingSink};
pub use trace::TraceFile;

use crate::{DeviceId, Tag};
use std::{
    collections::BTreeMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
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
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Event {
    /// When, in nanoseconds since the recorder was made.
    pub at_ns: u64,
    /// What.
    pub action: Action,
    /// Where.
    pub place: Place,
    /// The stream's number in its pool; 0 where there are no streams.
    pub stream: u32,
    /// The block's or range's address.
    pub address: u64,
    /// Bytes: what was asked for when a block is allocated, freed or completed, else what was taken or given.
    pub bytes: u64,
    /// Whose.
    pub tag: Tag,
}

/// Where events go. Called with one event at a time, in order, never under a lock of a pool.
///
/// A sink must not allocate from the pool it listens to.
pub trait Sink: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn record(&self, event: &Event);

    /// Events that did not fit, so far.
    fn dropped(&self) -> u64 {
        0
    }

    /// Writes out what is held back.
    fn flush(&self) {}
}

/// An event's place in the order of its recorder.
#[derive(Debug)]
#[must_use = "a ticket that is not used holds up every later event"]
pub struct Ticket(u64);

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
    started: Instant,
    tickets: AtomicU64,
    early: Mutex<Early>,
}

/// Events whose ticket's turn has not come.
struct Early {
    next: u64,
    waiting: BTreeMap<u64, Event>,
}

impl Recorder {
    /// A recorder in front of `sink`.
    #[must_use]
    pub fn new(sink: Arc<dyn Sink>) -> Self {
        Self {
            sink,
            started: Instant::now(),
            tickets: AtomicU64::new(0),
            early: Mutex::new(Early { next: 0, waiting: BTreeMap::new() }),
        }
    }

    /// The next place in the order. Taken under the lock that makes the thing happen.
    pub fn ticket(&self) -> Ticket {
        Ticket(self.tickets.fetch_add(1, Ordering::Relaxed))
    }

    /// An event that happens now.
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
        let at_ns = u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX);
        Event { at_ns, action, place, stream, address, bytes, tag }
    }

    /// Hands the event over when its turn has come. The sink is called under the recorder's own lock.
    pub fn record(&self, ticket: Ticket, event: Event) {
        let mut early = self.early.lock().unwrap_or_else(PoisonError::into_inner);
        early.waiting.insert(ticket.0, event);
        loop {
            let next = early.next;
            let Some(event) = early.waiting.remove(&next) else { break };
            early.next += 1;
            self.sink.record(&event);
        }
    }

    /// Where the events go.
    #[must_use]
    pub fn sink(&self) -> &Arc<dyn Sink> {
        &self.sink
    }
}

impl fmt::Debug for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recorder").field("sink", &self.sink).finish_non_exhaustive()
    }
}
