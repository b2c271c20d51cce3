//! Streams that are leased and come back.

use crate::{Life, Stream, Timeline, identity::id_of};
use aquifer_core::{DeviceId, DriverError, Id, IdSpace, MemoryError, Result};
use aquifer_driver::{Driver, KeepAlive, RawStream, leftovers};
use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasherDefault, Hasher},
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    thread::{self, ThreadId},
};

/// How many streams a pool has at most, unless told otherwise.
pub const DEFAULT_CAP: u32 = 64;

/// Owned, non-blocking streams of one device, leased one at a time and used again when they come
/// back.
///
/// There is a cap, and a typed error at the cap; a default stream of the driver is never handed out
/// in its place. Ids name streams of this pool only.
#[derive(Clone)]
pub struct StreamPool {
    inner: Arc<Inner>,
}

pub(crate) struct Inner {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    cap: u32,
    ids: IdSpace<Stream>,
    slots: Mutex<Slots>,
    /// Streams that are known here, leased or adopted. A handle comes back after its stream is
    /// destroyed, so an adopted one is believed only while its id is the same.
    known: Mutex<Known>,
}

/// What tells streams apart: the context, of which a device has one here, and the handle; of a
/// per-thread default stream also the thread that means it.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    raw: RawStream,
    thread: Option<ThreadId>,
}

/// Streams by what tells them apart. Every use of a block is looked up here by its stream's handle.
type Known = HashMap<Key, Weak<Timeline>, BuildHasherDefault<OfHandles>>;

/// A hash of handles, which are addresses and numbers of the driver's: nobody chooses them so that
/// they collide, and the standard one takes ten times as long, a third of such a look.
#[derive(Default)]
struct OfHandles(u64);

impl Hasher for OfHandles {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, value: u64) {
        // Fibonacci hashing (Knuth, 6.4), with the upper half, where the mixing is, brought down.
        let mixed = (self.0 ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = mixed ^ mixed >> 32;
    }

    fn write_u32(&mut self, value: u32) {
        self.write_u64(u64::from(value));
    }

    fn write_usize(&mut self, value: usize) {
        self.write_u64(value as u64);
    }
}

impl Key {
    /// What a handle means on the thread that asks.
    fn of(raw: RawStream) -> Self {
        let device = raw.device();
        match raw.handle() {
            0 | 1 => Self { raw: RawStream::legacy(device), thread: None },
            2 => Self { raw, thread: Some(thread::current().id()) },
            _ => Self { raw, thread: None },
        }
    }

    /// How long a default stream lives; `None` for any other, whose owner must say.
    fn default_life(self) -> Option<Life> {
        match self.thread {
            Some(thread) => Some(Life::Thread(thread)),
            None if self.raw == RawStream::legacy(self.raw.device()) => Some(Life::Legacy),
            None => None,
        }
    }
}

/// What a leased stream is to be like.
///
/// ```
/// use aquifer_core::DeviceId;
/// use aquifer_driver::sim::Sim;
/// use aquifer_stream::{Lease, StreamPool};
/// let pool = StreamPool::new(Sim::h200(1).driver(), DeviceId(0), 4);
/// let collectives = pool.lease_as(Lease::default().isolated().priority(-1))?;
/// assert!(collectives.timeline().is_isolated());
/// # Ok::<(), aquifer_core::MemoryError>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Lease {
    priority: i32,
    isolated: bool,
}

impl Lease {
    /// Served before others of a higher number. 0 unless set.
    #[must_use]
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// Never made to wait for another stream, nor another for it, by a pool: see
    /// [`Timeline::is_isolated`].
    #[must_use]
    pub fn isolated(mut self) -> Self {
        self.isolated = true;
        self
    }
}

#[derive(Default)]
struct Slots {
    slots: Vec<Slot>,
    /// Slots whose stream nobody leases.
    idle: Vec<u32>,
    /// Streams being created, outside the lock.
    coming: u32,
    /// Numbers given to adopted streams, above the slots'.
    adopted: u32,
}

struct Slot {
    timeline: Arc<Timeline>,
    kind: Lease,
    /// Grows with each lease, so that an id of an earlier one is told apart.
    generation: u32,
    leased: Weak<Leased>,
}

/// One lease; the stream goes back to the pool when the last clone of it is dropped.
pub(crate) struct Leased {
    pub(crate) pool: Arc<Inner>,
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) id: Id<Stream>,
    /// The slot it goes back to; `None` for an adopted stream.
    slot: Option<u32>,
}

impl Leased {
    fn new(
        pool: &Arc<Inner>,
        timeline: &Arc<Timeline>,
        id: Id<Stream>,
        slot: Option<u32>,
    ) -> Arc<Self> {
        timeline.lease();
        Arc::new(Self { pool: pool.clone(), timeline: timeline.clone(), id, slot })
    }
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.timeline.end_lease();
        if let Some(slot) = self.slot {
            self.pool.slots().idle.push(slot);
        }
    }
}

impl StreamPool {
    /// An empty pool for `device`. Makes no driver call.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, device: DeviceId, cap: u32) -> Self {
        Self {
            inner: Arc::new(Inner {
                driver,
                device,
                cap,
                ids: IdSpace::new(),
                slots: Mutex::default(),
                known: Mutex::default(),
            }),
        }
    }

    /// Leases a stream of the default priority.
    ///
    /// # Errors
    /// [`MemoryError::Capacity`] when `cap` streams are leased; the driver's.
    pub fn lease(&self) -> Result<Stream> {
        self.lease_as(Lease::default())
    }

    /// Leases a stream of this priority (a lower number is served first): one that came back, or a
    /// new one.
    ///
    /// # Errors
    /// [`MemoryError::Capacity`] when `cap` streams are leased; the driver's.
    pub fn lease_with_priority(&self, priority: i32) -> Result<Stream> {
        self.lease_as(Lease::default().priority(priority))
    }

    /// Leases a stream for work that must be ordered with other streams only where its user says
    /// so: collectives. See [`Timeline::is_isolated`].
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn lease_isolated(&self) -> Result<Stream> {
        self.lease_as(Lease::default().isolated())
    }

    /// Leases a stream of this kind: one that came back, or a new one. A stream that came back and
    /// still captures a graph is not leased; where the pool has no other left, a new one takes its
    /// place.
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn lease_as(&self, kind: Lease) -> Result<Stream> {
        let inner = &self.inner;
        let mut capturing = Vec::new();
        let found = loop {
            let (slot, timeline) = {
                let mut slots = inner.slots();
                let fits = |&slot: &u32| {
                    slots.slots[slot as usize].kind == kind && !capturing.contains(&slot)
                };
                match slots.idle.iter().position(fits) {
                    Some(at) => {
                        let slot = slots.idle.swap_remove(at);
                        (slot, slots.slots[slot as usize].timeline.clone())
                    }
                    None if (slots.slots.len() as u32) + slots.coming < inner.cap => {
                        slots.coming += 1;
                        break None;
                    }
                    None => {
                        // All streams exist; an idle one of another kind gives way, else one that
                        // captures.
                        let gives_way =
                            slots.idle.iter().rposition(|slot| !capturing.contains(slot));
                        let at = gives_way.or(slots.idle.len().checked_sub(1));
                        break Some(
                            slots
                                .idle
                                .swap_remove(at.ok_or(MemoryError::Capacity { max: inner.cap })?),
                        );
                    }
                }
            };
            // A call of the driver's, so outside of the lock. Nobody leases the slot meanwhile.
            let captures = match timeline.is_capturing() {
                // Nothing is captured on a device that is lost; the first call for the stream says
                // so.
                Err(MemoryError::DeviceLost { .. }) => Ok(false),
                captures => captures,
            };
            let mut slots = inner.slots();
            match captures {
                Ok(false) => return Ok(inner.lease_slot(&mut slots, slot)),
                Ok(true) => {
                    slots.idle.push(slot);
                    capturing.push(slot);
                }
                Err(error) => {
                    slots.idle.push(slot);
                    return Err(error);
                }
            }
        };
        let made = inner.make(kind);
        let mut slots = inner.slots();
        match (made, found) {
            (Ok(make), None) => {
                slots.coming -= 1;
                let slot = slots.slots.len() as u32;
                let timeline = Arc::new(make(slot));
                slots.slots.push(Slot { timeline, kind, generation: 0, leased: Weak::new() });
                Ok(inner.lease_slot(&mut slots, slot))
            }
            (Ok(make), Some(slot)) => {
                let old = std::mem::replace(
                    &mut slots.slots[slot as usize].timeline,
                    Arc::new(make(slot)),
                );
                slots.slots[slot as usize].kind = kind;
                let stream = inner.lease_slot(&mut slots, slot);
                drop(slots);
                // Destroys the stream, a driver call, unless a cache still notes it.
                drop(old);
                Ok(stream)
            }
            (Err(error), None) => {
                slots.coming -= 1;
                Err(error)
            }
            (Err(error), Some(slot)) => {
                slots.idle.push(slot);
                Err(error)
            }
        }
    }

    /// Takes in a stream of another library, so that it can be used with pools of this device. The
    /// same stream adopted twice is one and the same here.
    ///
    /// The handles 0, 1 and 2 are the driver's default streams, whose life is known, whatever
    /// `life` says: see [`StreamPool::legacy_default`] and [`StreamPool::thread_default`].
    ///
    /// # Safety
    /// 1. `raw` is a valid stream of this pool's device and driver.
    /// 2. It is kept valid as `life` says.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`]; the driver's.
    #[expect(unsafe_code, reason = "declares an unsafe function; holds no unsafe block")]
    pub unsafe fn adopt(&self, raw: RawStream, life: Life) -> Result<Stream> {
        self.adopt_known(raw, life)
    }

    /// As [`StreamPool::adopt`], for a stream that must be ordered with others only where its user
    /// says so: collectives of another library. See [`Timeline::is_isolated`]. A stream that is
    /// known already is isolated from now on.
    ///
    /// # Safety
    /// As [`StreamPool::adopt`].
    ///
    /// # Errors
    /// As [`StreamPool::adopt`].
    #[expect(unsafe_code, reason = "declares an unsafe function; holds no unsafe block")]
    pub unsafe fn adopt_isolated(&self, raw: RawStream, life: Life) -> Result<Stream> {
        let stream = self.adopt_known(raw, life)?;
        stream.timeline().isolate();
        Ok(stream)
    }

    /// The legacy default stream of the device's primary context, which the handles 0 and 1 both
    /// mean. The driver orders it with every blocking stream of the context, both ways; leased
    /// streams are not blocking.
    ///
    /// # Errors
    /// The driver's.
    pub fn legacy_default(&self) -> Result<Stream> {
        self.adopt_known(RawStream::legacy(self.device()), Life::Legacy)
    }

    /// The default stream that the calling thread has to itself (handle 2). Each thread gets an
    /// account of its own.
    ///
    /// Frees and uses on it are fenced at once, with an event recorded by this thread; so blocks
    /// allocated for it are freed, and uses on it ended, here. What another thread frees or ends is
    /// held back until this thread frees, ends or waits for something again, or the whole device is
    /// waited for. Calls for the stream from another thread are refused with
    /// [`MemoryError::OtherThread`].
    ///
    /// # Errors
    /// The driver's.
    pub fn thread_default(&self) -> Result<Stream> {
        self.adopt_known(RawStream::per_thread(self.device()), Life::Fenced)
    }

    fn adopt_known(&self, raw: RawStream, life: Life) -> Result<Stream> {
        let timeline = self.inner.adopted(raw, life)?;
        let id = self.inner.ids.mint(timeline.number(), 0);
        Ok(Stream { lease: Leased::new(&self.inner, &timeline, id, None) })
    }

    /// The timeline of a stream by its handle: one that is leased here or adopted, or one that
    /// `alive` keeps valid, or a default stream, which is adopted now.
    ///
    /// Where `alive` is the [`Timeline`] of this handle, as [`Timeline::keep_alive`] gives it, the
    /// stream belongs to another pool of the device: that timeline is returned, unless the stream
    /// is known here. So two pools share one account of it.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for a stream that is not known without `alive`, that has been
    /// retired, or that belongs to another driver; those of adoption.
    pub fn timeline(&self, raw: RawStream, alive: Option<KeepAlive>) -> Result<Arc<Timeline>> {
        let alive = match alive.map(Arc::downcast::<Timeline>) {
            Some(Ok(timeline)) => {
                // A default stream's handle means a stream of each thread, so this pool's own
                // account is asked for it.
                return match self.timeline(raw, None) {
                    Err(MemoryError::UnknownId) if self.inner.shares(&timeline, raw) => {
                        Ok(timeline)
                    }
                    known => known,
                };
            }
            Some(Err(alive)) => Some(alive),
            None => None,
        };
        match alive {
            Some(alive) => self.inner.adopted(raw, Life::KeptAlive(alive)),
            None => match Key::of(raw).default_life() {
                Some(life) => self.inner.adopted(raw, life),
                None => self.inner.lookup(raw)?.ok_or(MemoryError::UnknownId),
            },
        }
    }

    /// The leased stream of this id; an error for an id of another pool, or of a lease that is
    /// over.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`].
    pub fn get(&self, id: Id<Stream>) -> Result<Stream> {
        let (slot, generation) = self.inner.ids.resolve(id).ok_or(MemoryError::UnknownId)?;
        let slots = self.inner.slots();
        let lease = slots.slots.get(slot as usize).filter(|s| s.generation == generation);
        let lease = lease.and_then(|s| s.leased.upgrade()).ok_or(MemoryError::UnknownId)?;
        Ok(Stream { lease })
    }

    /// Streams leased now.
    #[must_use]
    pub fn leased(&self) -> u32 {
        let slots = self.inner.slots();
        (slots.slots.len() - slots.idle.len()) as u32
    }

    /// Streams that may be leased at once.
    #[must_use]
    pub fn cap(&self) -> u32 {
        self.inner.cap
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.inner.device
    }

    /// Whether both are handles to one pool.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// The driver.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.inner.driver
    }

    /// Priorities that make a difference on this device, highest first.
    ///
    /// # Errors
    /// The driver's.
    pub fn priorities(&self) -> Result<RangeInclusive<i32>> {
        self.inner.driver.stream_priorities(self.inner.device).map_err(|e| self.inner.lost(e))
    }
}

impl Inner {
    fn slots(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self, error: DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    /// A new stream of the driver's; its number is known only under the lock.
    fn make(&self, kind: Lease) -> Result<impl FnOnce(u32) -> Timeline + use<>> {
        // What was refused may be released by now. What is refused again stays for the next sweep.
        let _ = leftovers::sweep(&self.driver);
        let raw =
            self.driver.stream_create(self.device, kind.priority).map_err(|e| self.lost(e))?;
        let id = match id_of(&*self.driver, raw) {
            Ok(id) => id,
            Err(error) => {
                self.unmake(raw);
                return Err(self.lost(error));
            }
        };
        let driver = self.driver.clone();
        Ok(move |number| Timeline::new(driver, raw, number, id, Life::Owned, kind.isolated))
    }

    #[expect(unsafe_code, reason = "ends a handle")]
    fn unmake(&self, raw: RawStream) {
        let driver = self.driver.clone();
        // SAFETY: 1. the stream has just been made, nothing else has its handle, and no release of
        // it has succeeded yet.
        leftovers::release(&self.driver, move || unsafe { driver.stream_destroy(raw) });
    }

    fn lease_slot(self: &Arc<Self>, slots: &mut Slots, slot: u32) -> Stream {
        let entry = &mut slots.slots[slot as usize];
        entry.generation += 1;
        let id = self.ids.mint(slot, entry.generation);
        let lease = Leased::new(self, &entry.timeline, id, Some(slot));
        entry.leased = Arc::downgrade(&lease);
        self.known().insert(Key::of(entry.timeline.raw()), Arc::downgrade(&entry.timeline));
        Stream { lease }
    }

    /// Whether the account of a stream of another pool can be used here: it is the handle's, good,
    /// and of the same driver.
    fn shares(&self, timeline: &Timeline, raw: RawStream) -> bool {
        timeline.raw() == raw
            && !timeline.is_retired()
            && Arc::ptr_eq(timeline.driver(), &self.driver)
    }

    /// The timeline known for a handle, if its stream is still the same one.
    fn lookup(&self, raw: RawStream) -> Result<Option<Arc<Timeline>>> {
        if raw.device() != self.device {
            return Err(MemoryError::WrongDevice { expected: self.device, actual: raw.device() });
        }
        let Some(known) = self.known().get(&Key::of(raw)).and_then(Weak::upgrade) else {
            return Ok(None);
        };
        if known.is_retired() {
            return Ok(None);
        }
        Ok(known.is_current()?.then_some(known))
    }

    fn adopted(&self, raw: RawStream, life: Life) -> Result<Arc<Timeline>> {
        let key = Key::of(raw);
        let (raw, life) = (key.raw, key.default_life().unwrap_or(life));
        if let Some(known) = self.lookup(raw)? {
            return Ok(known);
        }
        let id = id_of(&*self.driver, raw).map_err(|e| self.lost(e))?;
        // Before the other lock is taken: whoever leases takes the two in the other order.
        let number = {
            let mut slots = self.slots();
            slots.adopted += 1;
            self.cap.saturating_add(slots.adopted - 1)
        };
        let timeline = Arc::new(Timeline::new(self.driver.clone(), raw, number, id, life, false));
        let mut known = self.known();
        known.retain(|_, timeline| timeline.strong_count() > 0);
        // Another thread may have taken it in meanwhile.
        let other = known.get(&key).and_then(Weak::upgrade);
        let same = other
            .as_ref()
            .is_some_and(|other| id.is_none_or(|id| other.has(id)) && !other.is_retired());
        if !same {
            known.insert(key, Arc::downgrade(&timeline));
        }
        drop(known);
        // What is not the answer goes only now: it may be the last to hold somebody else's stream.
        Ok(if same { other.unwrap_or(timeline) } else { timeline })
    }
}

impl fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamPool")
            .field("device", &self.inner.device)
            .field("cap", &self.inner.cap)
            .field("leased", &self.leased())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, hash::BuildHasher};

    #[test]
    fn handles_that_lie_side_by_side_are_far_apart_in_the_table() {
        let hash = BuildHasherDefault::<OfHandles>::default();
        for stride in [1, 8, 64, 4096, 1 << 21] {
            // As the derived hash of a key writes them.
            let hashes =
                (0..1024u64).map(|n| hash.hash_one((0u32, 0x7f00_0000_0000 + n * stride, 0usize)));
            let (low, high): (HashSet<_>, HashSet<_>) =
                hashes.map(|hash| (hash % 1024, hash >> 57)).unzip();
            // What chance would leave of so many is 647.
            assert!(
                low.len() > 500 && high.len() > 100,
                "{stride}: {} and {}",
                low.len(),
                high.len()
            );
        }
    }
}
