//! A bounded ring of the last events.
//!
//! ```text
//!   position   …  8    9   10   11   12   13 …     taken when the event happens
//!              ┌────┬────┬────┬────┐
//!   slot       │  0 │  1 │  2 │  3 │               position modulo slots, a power of two
//!   holds      │ 12 │  9 │ 10 │  7 │               so 12 has replaced 8, and 11 is outstanding
//!              └────┴────┴────┴────┘
//! ```
//!
//! A position is taken without a lock. Each slot has a lock of its own, so a writer waits only for
//! a reader of its slot, or for a writer that is a full round late.

use super::{Event, EventSink};
use crate::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering},
    lock,
};
use std::fmt;

/// Keeps the last events in order, and counts those that later ones have replaced.
///
/// A [`Recorder`](super::Recorder) of this sink needs no lock of its own: an event's ticket is its
/// position here. An event with an outstanding ticket delays those behind it, until as many later
/// positions are taken as the ring has room for.
///
/// ```
/// use aquifer::{DeviceId, Tag, event::{Action, EventSink, MemoryLocation, Recorder, RingSink}};
/// use std::sync::Arc;
/// let ring = Arc::new(RingSink::new(2));
/// let recorder = Recorder::new(ring.clone());
/// for address in [0x1000, 0x2000, 0x3000] {
///     let ticket = recorder.ticket();
///     let place = MemoryLocation::Device(DeviceId(0));
///     recorder.record(ticket, recorder.event(Action::Allocate, place, 0, address, 512, Tag::NONE));
/// }
/// let kept: Vec<_> = ring.take().iter().map(|event| event.address).collect();
/// assert_eq!((kept, ring.dropped()), (vec![0x2000, 0x3000], 1));
/// ```
pub struct RingSink {
    /// A power of two, at least `capacity`. Empty if that is 0.
    slots: Box<[Slot]>,
    capacity: u64,
    /// The next free position.
    next: AtomicU64,
    reader: Mutex<Reader>,
}

/// The reader's state.
#[derive(Clone, Copy)]
struct Reader {
    /// All earlier positions have been taken out or dropped.
    next: u64,
    dropped: u64,
}

/// The last event of a slot and its position. Aligned, so that writers of neighbouring slots do not
/// share a cache line.
#[repr(align(64))]
struct Slot(Mutex<Option<(u64, Event)>>);

impl Slot {
    /// Stores an event, unless the slot has a later one.
    #[inline]
    fn fill(&self, position: u64, event: &Event) {
        let mut held = lock(&self.0);
        if held.is_none_or(|(later, _)| later < position) {
            *held = Some((position, *event));
        }
    }
}

impl RingSink {
    /// Creates a ring of at most `capacity` events. Allocates all of its memory now: 64 bytes
    /// for each event, rounded up to a power of two of them.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let slots = if capacity == 0 { 0 } else { capacity.next_power_of_two() };
        Self {
            slots: (0..slots).map(|_| Slot(Mutex::new(None))).collect(),
            capacity: capacity as u64,
            next: AtomicU64::new(0),
            reader: Mutex::new(Reader { next: 0, dropped: 0 }),
        }
    }

    /// Removes and returns the events, oldest first. Concurrent events may be among them.
    #[must_use]
    pub fn take(&self) -> Vec<Event> {
        self.read(&mut lock(&self.reader))
    }

    /// Returns what [`take`](RingSink::take) would return, without removing it. Later events may
    /// still overwrite it.
    ///
    /// ```
    /// use aquifer::{DeviceId, Tag, event::{Action, MemoryLocation, Recorder, RingSink}};
    /// use std::sync::Arc;
    /// let ring = Arc::new(RingSink::new(16));
    /// let recorder = Recorder::new(ring.clone());
    /// let event = recorder.event(Action::Allocate, MemoryLocation::Device(DeviceId(0)), 0, 0x1000, 512, Tag::NONE);
    /// recorder.record(recorder.ticket(), event);
    /// assert_eq!(ring.kept(), ring.kept());
    /// assert_eq!((ring.take().len(), ring.kept().len()), (1, 0));
    /// ```
    #[must_use]
    pub fn kept(&self) -> Vec<Event> {
        let mut from = *lock(&self.reader);
        self.read(&mut from)
    }

    fn read(&self, reader: &mut Reader) -> Vec<Event> {
        let mut events = Vec::new();
        let end = self.next.load(Ordering::Acquire);
        self.skip(reader, end);
        while reader.next < end {
            let Some(slot) = self.slot(reader.next) else { break };
            match *lock(&slot.0) {
                Some((position, event)) if position == reader.next => events.push(event),
                // A later event has overwritten it.
                Some((position, _)) if position > reader.next => reader.dropped += 1,
                // The event is outstanding. It is skipped when its slot is used again.
                _ => break,
            }
            reader.next += 1;
        }
        events
    }

    /// Skips the positions that no longer fit into the ring.
    fn skip(&self, reader: &mut Reader, end: u64) {
        let first = end.saturating_sub(self.capacity);
        reader.dropped += first.saturating_sub(reader.next);
        reader.next = reader.next.max(first);
    }

    #[inline]
    fn slot(&self, position: u64) -> Option<&Slot> {
        self.slots.get(position as usize & self.slots.len().wrapping_sub(1))
    }
}

impl EventSink for RingSink {
    fn record(&self, event: &Event) {
        let position = self.next.fetch_add(1, Ordering::Relaxed);
        self.fill(position, event);
    }

    #[inline]
    fn reserve(&self) -> Option<u64> {
        Some(self.next.fetch_add(1, Ordering::Relaxed))
    }

    #[inline]
    fn fill(&self, position: u64, event: &Event) {
        if let Some(slot) = self.slot(position) {
            slot.fill(position, event);
        }
    }

    /// Events that later ones have replaced by now, taken out or not.
    fn dropped(&self) -> u64 {
        let mut reader = lock(&self.reader);
        self.skip(&mut reader, self.next.load(Ordering::Acquire));
        reader.dropped
    }
}

impl fmt::Debug for RingSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingSink").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}
