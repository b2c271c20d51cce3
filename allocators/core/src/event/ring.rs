//! A bounded lock-free ring of the last events.
//!
//! ```text
//!   position   …  8    9   10   11   12   13 …     taken when the event happens
//!              ┌────┬────┬────┬────┐
//!   slot       │  0 │  1 │  2 │  3 │               position modulo slots, a power of two
//!   stamp      │ 26 │ 20 │ 22 │ 23 │               2 · position + 1: being written, + 2: written
//!              └────┴────┴────┴────┘               so 12 has replaced 8, and 11 is being written
//! ```
//!
//! A writer performs a compare-and-swap, six stores and another store. It never waits for another
//! thread. A reader checks the stamp before and after it reads, so a slot that is overwritten
//! during the read counts as lost. Slots consist of atomics, so a torn read is discarded and is not
//! a data race.

use super::{Action, BlockKind, Event, EventSink, MemoryLocation};
use crate::{
    DeviceId, Tag,
    sync::atomic::{AtomicU64, Ordering},
};
use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

/// Keeps the last events in order, and counts those that later ones have replaced.
///
/// A [`Recorder`](super::Recorder) of this sink needs no lock either: an event's ticket is its
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

/// One cache line, so that writers of neighbouring slots do not share one.
#[repr(align(64))]
struct Slot {
    stamp: AtomicU64,
    words: [AtomicU64; 6],
}

impl Slot {
    fn new() -> Self {
        Self { stamp: AtomicU64::new(0), words: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    fn written(position: u64) -> u64 {
        2 * position + 2
    }

    /// Writes an event, unless the slot has a later one, or a writer that is a full round late is
    /// still writing.
    #[inline]
    fn fill(&self, position: u64, event: &Event) {
        let stamp = self.stamp.load(Ordering::Relaxed);
        let writing = Self::written(position) - 1;
        if stamp >= writing || stamp % 2 == 1 {
            return;
        }
        // Acquire: of two writers of the slot, the second one's words come after the first one's.
        if self
            .stamp
            .compare_exchange(stamp, writing, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            return;
        }
        for (word, value) in self.words.iter().zip(encode(event)) {
            // Release: a reader that sees one of the words also sees the stamp of the write.
            word.store(value, Ordering::Release);
        }
        self.stamp.store(Self::written(position), Ordering::Release);
    }

    /// Returns the event of this position if it is there and is not overwritten during the read.
    /// Otherwise returns the stamp.
    fn read(&self, position: u64) -> Result<Option<Event>, u64> {
        let stamp = self.stamp.load(Ordering::Acquire);
        if stamp != Self::written(position) {
            return Err(stamp);
        }
        let words = std::array::from_fn(|at| self.words[at].load(Ordering::Acquire));
        match self.stamp.load(Ordering::Relaxed) {
            now if now == stamp => Ok(decode(words)),
            now => Err(now),
        }
    }
}

impl RingSink {
    /// Creates a ring of at most `capacity` events. Allocates all of its memory now: 64 bytes for
    /// each event, rounded up to a power of two of them.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        let slots = if capacity == 0 { 0 } else { capacity.next_power_of_two() };
        Self {
            slots: (0..slots).map(|_| Slot::new()).collect(),
            capacity: capacity as u64,
            next: AtomicU64::new(0),
            reader: Mutex::new(Reader { next: 0, dropped: 0 }),
        }
    }

    /// Removes and returns the events, oldest first. Concurrent events may be among them. Writers
    /// are not blocked.
    #[must_use]
    pub fn take(&self) -> Vec<Event> {
        self.read(&mut self.reader.lock().unwrap_or_else(PoisonError::into_inner))
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
        let mut from = *self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        self.read(&mut from)
    }

    fn read(&self, reader: &mut Reader) -> Vec<Event> {
        let mut events = Vec::new();
        let end = self.next.load(Ordering::Acquire);
        self.skip(reader, end);
        while reader.next < end {
            let Some(slot) = self.slot(reader.next) else { break };
            match slot.read(reader.next) {
                Ok(event) => events.extend(event),
                // A later event has overwritten it.
                Err(stamp) if stamp > Slot::written(reader.next) => reader.dropped += 1,
                // The event is outstanding, or was discarded because its slot was busy. The next
                // round skips it.
                Err(_) => break,
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
        let mut reader = self.reader.lock().unwrap_or_else(PoisonError::into_inner);
        self.skip(&mut reader, self.next.load(Ordering::Acquire));
        reader.dropped
    }
}

impl fmt::Debug for RingSink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingSink").field("capacity", &self.capacity).finish_non_exhaustive()
    }
}

const ACTIONS: [Action; 12] = [
    Action::Allocate,
    Action::Free,
    Action::Complete,
    Action::Grow,
    Action::Reap,
    Action::Move,
    Action::Adopt,
    Action::Fail,
    Action::Finding,
    Action::Limit,
    Action::Outside,
    Action::DropPlan,
];

/// Packs an event into six words: time, address, bytes, location, budget, and the rest.
fn encode(event: &Event) -> [u64; 6] {
    let (kind, number) = match event.place {
        MemoryLocation::Device(DeviceId(device)) => (0, device),
        MemoryLocation::Host(Some(node)) => (1, node),
        MemoryLocation::Host(None) => (2, 0),
        MemoryLocation::Global => (3, 0),
    };
    let place = u64::from(event.stream) << 32 | u64::from(number);
    let what = u64::from(event.thread) << 32
        | (event.tag.index() as u64) << 16
        | (kind | (event.kind as u64) << 4) << 8
        | u64::from(event.action as u8);
    let refused_by = event.refused_by.index() as u64;
    [event.at_ns, event.address, event.bytes, place, refused_by, what]
}

/// Unpacks the words of [`encode`]. Returns `None` for invalid words.
fn decode([at_ns, address, bytes, place, refused_by, what]: [u64; 6]) -> Option<Event> {
    let number = place as u32;
    let at = match what >> 8 & 0xf {
        0 => MemoryLocation::Device(DeviceId(number)),
        1 => MemoryLocation::Host(Some(number)),
        2 => MemoryLocation::Host(None),
        _ => MemoryLocation::Global,
    };
    Some(Event {
        at_ns,
        action: *ACTIONS.get(what as usize & 0xff)?,
        place: at,
        thread: (what >> 32) as u32,
        stream: (place >> 32) as u32,
        address,
        bytes,
        kind: *BlockKind::ALL.get(what as usize >> 12 & 0xf)?,
        tag: Tag::from_index(what as usize >> 16 & 0xffff)?,
        refused_by: Tag::from_index(refused_by as usize)?,
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn events_survive_encoding_unchanged() {
        let places = [
            MemoryLocation::Device(DeviceId(u32::MAX)),
            MemoryLocation::Host(Some(7)),
            MemoryLocation::Host(None),
            MemoryLocation::Global,
        ];
        for (number, action) in ACTIONS.into_iter().enumerate() {
            for place in places {
                let event = Event {
                    at_ns: u64::MAX,
                    action,
                    place,
                    thread: u32::MAX - 1,
                    stream: u32::MAX - 2,
                    address: 0x7fff_ffff_fe00,
                    bytes: u64::MAX - 3,
                    kind: BlockKind::ALL[number % BlockKind::ALL.len()],
                    tag: Tag::from_index(Tag::MAX - 1).unwrap(),
                    refused_by: Tag::from_index(Tag::MAX - 2).unwrap(),
                };
                assert_eq!(decode(encode(&event)), Some(event));
            }
        }
    }
}
