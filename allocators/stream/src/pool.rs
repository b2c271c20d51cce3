//! A pool of leased and recycled streams.

use crate::{
    Stream, StreamLifetime, Timeline,
    life::id_of,
    stream::{ReturnSlot, StreamLease},
};
use aquifer_core::{DeviceId, DriverError, Id, IdSpace, MemoryError, Result};
use aquifer_driver::{Driver, KeepAlive, RawStream, leftovers};
use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    thread::{self, ThreadId},
};

/// The default limit of streams in a pool.
pub const DEFAULT_CAP: u32 = 64;

/// A pool of non-blocking streams of one device. Each stream is leased to one user at a time and is
/// reused when the lease ends.
///
/// The number of streams is limited. At the limit a lease returns a typed error. A default stream
/// of the driver is never returned instead. Ids are valid in this pool only.
#[derive(Clone)]
pub struct StreamPool {
    core: Arc<PoolCore>,
}

pub(crate) struct PoolCore {
    driver: Arc<dyn Driver>,
    device: DeviceId,
    cap: u32,
    ids: IdSpace<Stream>,
    slots: Mutex<SlotTable>,
    /// The streams known to this pool, leased or adopted. The driver reuses handles of destroyed
    /// streams, so the entry of an adopted stream is valid only while its id is the same.
    timelines: Mutex<TimelineMap>,
    after_synchronize: OnceLock<Weak<dyn AfterSynchronize>>,
}

/// Called when a thread has waited for a stream of a pool: for example, by a device pool, to apply
/// its release threshold.
#[doc(hidden)]
pub trait AfterSynchronize: Send + Sync {
    /// Does what may follow. No lock is held.
    fn synchronized(&self);
}

/// Identifies a stream: its context (a device has one here) and its handle. For a per-thread
/// default stream also its thread.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct StreamKey {
    raw: RawStream,
    thread: Option<ThreadId>,
}

/// Streams by key. Each use of a block looks up its stream here.
type TimelineMap = HashMap<StreamKey, Weak<Timeline>, BuildHasherDefault<HandleHasher>>;

/// A hasher for stream handles, which are addresses and small numbers of the driver. Nothing
/// chooses them to collide, and the standard hasher would take a large part of the lookup time.
#[derive(Default)]
struct HandleHasher(u64);

impl Hasher for HandleHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().for_each(|&byte| self.write_u64(u64::from(byte)));
    }

    fn write_u64(&mut self, value: u64) {
        // Fibonacci hashing (Knuth, 6.4). The well-mixed upper half is folded into the lower.
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

impl StreamKey {
    /// Returns what a handle means on the calling thread.
    fn of(raw: RawStream) -> Self {
        let device = raw.device();
        match raw.handle() {
            0 | 1 => Self { raw: RawStream::legacy(device), thread: None },
            2 => Self { raw, thread: Some(thread::current().id()) },
            _ => Self { raw, thread: None },
        }
    }

    /// Returns the lifetime of a default stream, or `None` for any other stream, whose lifetime the
    /// caller must give.
    fn default_life(self) -> Option<StreamLifetime> {
        match self.thread {
            Some(thread) => Some(StreamLifetime::Thread(thread)),
            None if self.raw == RawStream::legacy(self.raw.device()) => {
                Some(StreamLifetime::Legacy)
            }
            None => None,
        }
    }
}

/// The properties by which idle streams are told apart.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Kind {
    priority: i32,
    isolated: bool,
}

#[derive(Default)]
struct SlotTable {
    slots: Vec<Slot>,
    /// Slots whose stream is not leased.
    idle: Vec<u32>,
    /// The number of streams being created outside the lock.
    creating: u32,
    /// The number of adopted streams so far. They are numbered above the slots.
    adopted: u32,
}

struct Slot {
    timeline: Arc<Timeline>,
    kind: Kind,
    /// Incremented by each lease, so that ids of earlier leases are invalid.
    generation: u32,
    lease: Weak<StreamLease>,
}

impl StreamPool {
    /// Creates an empty pool for `device`. Makes no driver call.
    #[must_use]
    pub fn new(driver: Arc<dyn Driver>, device: DeviceId, cap: u32) -> Self {
        Self {
            core: Arc::new(PoolCore {
                driver,
                device,
                cap,
                ids: IdSpace::new(),
                slots: Mutex::default(),
                timelines: Mutex::default(),
                after_synchronize: OnceLock::new(),
            }),
        }
    }

    /// Leases a stream of priority 0. Reuses an idle stream or creates one. An idle stream that
    /// still captures a graph is not leased. If the pool has no other stream left, a new one
    /// replaces it.
    ///
    /// # Errors
    /// [`MemoryError::Capacity`] when `cap` streams are leased, and driver errors.
    pub fn lease(&self) -> Result<Stream> {
        self.lease_with_priority(0)
    }

    /// Leases a stream of this priority (`cuStreamCreateWithPriority`). A lower number is served
    /// first. The driver clamps it to the priorities of the device, which are 0 to -5 on an H200.
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn lease_with_priority(&self, priority: i32) -> Result<Stream> {
        self.lease_kind(Kind { priority, isolated: false })
    }

    /// Leases a stream that only its user may order with other streams. For collectives. See
    /// [`Timeline::is_isolated`].
    ///
    /// # Errors
    /// As [`StreamPool::lease`].
    pub fn lease_isolated(&self) -> Result<Stream> {
        self.lease_kind(Kind { priority: 0, isolated: true })
    }

    fn lease_kind(&self, kind: Kind) -> Result<Stream> {
        let core = &self.core;
        let mut capturing = Vec::new();
        let reuse = loop {
            let (slot, timeline) = {
                let mut slots = core.slots();
                let fits = |&slot: &u32| {
                    slots.slots[slot as usize].kind == kind && !capturing.contains(&slot)
                };
                match slots.idle.iter().position(fits) {
                    Some(at) => {
                        let slot = slots.idle.swap_remove(at);
                        (slot, slots.slots[slot as usize].timeline.clone())
                    }
                    None if (slots.slots.len() as u32) + slots.creating < core.cap => {
                        slots.creating += 1;
                        break None;
                    }
                    None => {
                        // At the limit. An idle stream of another kind is replaced, or else one
                        // that captures.
                        let victim = slots.idle.iter().rposition(|slot| !capturing.contains(slot));
                        let at = victim.or(slots.idle.len().checked_sub(1));
                        break Some(
                            slots
                                .idle
                                .swap_remove(at.ok_or(MemoryError::Capacity { max: core.cap })?),
                        );
                    }
                }
            };
            // A driver call, so made outside the lock. The slot is not idle now, so no other thread
            // leases it.
            let captures = match timeline.is_capturing() {
                // Nothing captures on a lost device. The first call for the stream returns the
                // error.
                Err(MemoryError::DeviceLost { .. }) => Ok(false),
                captures => captures,
            };
            let mut slots = core.slots();
            match captures {
                Ok(false) => return Ok(core.lease_slot(&mut slots, slot)),
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
        let created = core.create_stream(kind);
        let mut slots = core.slots();
        match (created, reuse) {
            (Ok(new_timeline), None) => {
                slots.creating -= 1;
                let slot = slots.slots.len() as u32;
                let timeline = Arc::new(new_timeline(slot));
                slots.slots.push(Slot { timeline, kind, generation: 0, lease: Weak::new() });
                Ok(core.lease_slot(&mut slots, slot))
            }
            (Ok(new_timeline), Some(slot)) => {
                let old = std::mem::replace(
                    &mut slots.slots[slot as usize].timeline,
                    Arc::new(new_timeline(slot)),
                );
                slots.slots[slot as usize].kind = kind;
                let stream = core.lease_slot(&mut slots, slot);
                drop(slots);
                // Destroys the stream, which is a driver call, unless a cache still references it.
                drop(old);
                Ok(stream)
            }
            (Err(error), None) => {
                slots.creating -= 1;
                Err(error)
            }
            (Err(error), Some(slot)) => {
                slots.idle.push(slot);
                Err(error)
            }
        }
    }

    /// Adopts a stream of another library, so that it can be used with pools of this device.
    /// Adopting the same stream again returns the same timeline.
    ///
    /// The handles 0, 1 and 2 are the driver's default streams. Their lifetime is known, and `life`
    /// is ignored: see [`StreamPool::legacy_default`] and [`StreamPool::thread_default`].
    ///
    /// # Safety
    /// 1. `raw` is a valid stream of this pool's device and driver.
    /// 2. It is kept valid as `life` says.
    ///
    /// # Errors
    /// [`MemoryError::WrongDevice`], and driver errors.
    #[expect(unsafe_code, reason = "declares an unsafe function; holds no unsafe block")]
    pub unsafe fn adopt(&self, raw: RawStream, life: StreamLifetime) -> Result<Stream> {
        self.adopt_stream(raw, life)
    }

    /// Like [`StreamPool::adopt`], for a stream that only its user may order with other streams,
    /// such as collectives of another library. See [`Timeline::is_isolated`]. A stream that is
    /// already known becomes isolated.
    ///
    /// # Safety
    /// As [`StreamPool::adopt`].
    ///
    /// # Errors
    /// As [`StreamPool::adopt`].
    #[expect(unsafe_code, reason = "declares an unsafe function; holds no unsafe block")]
    pub unsafe fn adopt_isolated(&self, raw: RawStream, life: StreamLifetime) -> Result<Stream> {
        let stream = self.adopt_stream(raw, life)?;
        stream.timeline().isolate();
        Ok(stream)
    }

    /// Returns the legacy default stream of the device's primary context. The handles 0 and 1 both
    /// mean it. The driver orders it with every blocking stream of the context in both directions.
    /// Leased streams are non-blocking.
    ///
    /// # Errors
    /// Driver errors.
    pub fn legacy_default(&self) -> Result<Stream> {
        self.adopt_stream(RawStream::legacy(self.device()), StreamLifetime::Legacy)
    }

    /// Returns the default stream of the calling thread (handle 2). Each thread has its own stream
    /// and timeline.
    ///
    /// Frees and uses on it are fenced immediately, with an event that this thread records. So free
    /// its blocks and end its uses on this thread. Only this thread knows when work on it is done,
    /// so streams of other threads cannot use its blocks: give a block that threads hand to each
    /// other to a leased stream. What another thread frees or ends is held back
    /// until this thread frees, ends or waits for something again, or until the device is
    /// synchronised. Calls for the stream from another thread return [`MemoryError::OtherThread`].
    ///
    /// # Errors
    /// Driver errors.
    pub fn thread_default(&self) -> Result<Stream> {
        self.adopt_stream(RawStream::per_thread(self.device()), StreamLifetime::Fenced)
    }

    fn adopt_stream(&self, raw: RawStream, life: StreamLifetime) -> Result<Stream> {
        let timeline = self.core.adopt_timeline(raw, life)?;
        let id = self.core.ids.mint(timeline.number(), 0);
        Ok(Stream { lease: StreamLease::new(self.core.clone(), &timeline, id, None) })
    }

    /// Returns the timeline of a stream by its handle. The stream is leased or adopted here, or
    /// `alive` keeps it valid, or it is a default stream. In the last two cases it is adopted if it
    /// is not known yet.
    ///
    /// If `alive` is the [`Timeline`] of this handle, from [`Timeline::keep_alive`], the stream
    /// belongs to another pool of the device. That timeline is returned unless the stream is known
    /// here. So both pools share one timeline for it.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for a retired stream, a stream of another driver, or a stream
    /// that is not known and has no `alive`. [`MemoryError::OtherThread`] if `alive` is the default
    /// stream of another thread. Otherwise the errors of adoption.
    #[doc(hidden)]
    pub fn timeline(&self, raw: RawStream, alive: Option<KeepAlive>) -> Result<Arc<Timeline>> {
        let alive = match alive.map(Arc::downcast::<Timeline>) {
            Some(Ok(timeline)) => {
                // The caller means this stream, not that of the calling thread with its handle.
                timeline.check_thread()?;
                // A stream that is known here keeps its timeline.
                return match self.timeline(raw, None) {
                    Err(MemoryError::UnknownId) if self.core.accepts(&timeline, raw) => {
                        Ok(timeline)
                    }
                    known => known,
                };
            }
            Some(Err(alive)) => Some(alive),
            None => None,
        };
        match alive {
            Some(alive) => self.core.adopt_timeline(raw, StreamLifetime::KeptAlive(alive)),
            None => match StreamKey::of(raw).default_life() {
                Some(life) => self.core.adopt_timeline(raw, life),
                None => self.core.lookup(raw)?.ok_or(MemoryError::UnknownId),
            },
        }
    }

    /// Returns the leased stream with this id.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for an id of another pool or of a lease that has ended.
    pub fn get(&self, id: Id<Stream>) -> Result<Stream> {
        let (slot, generation) = self.core.ids.resolve(id).ok_or(MemoryError::UnknownId)?;
        let slots = self.core.slots();
        let lease = slots.slots.get(slot as usize).filter(|s| s.generation == generation);
        let lease = lease.and_then(|s| s.lease.upgrade()).ok_or(MemoryError::UnknownId)?;
        Ok(Stream { lease })
    }

    /// Returns the number of streams that are leased now.
    #[must_use]
    pub fn leased(&self) -> u32 {
        let slots = self.core.slots();
        (slots.slots.len() - slots.idle.len()) as u32
    }

    /// Returns the maximum number of leased streams.
    #[must_use]
    pub fn cap(&self) -> u32 {
        self.core.cap
    }

    /// Returns the device of the pool.
    #[must_use]
    pub fn device(&self) -> DeviceId {
        self.core.device
    }

    /// Returns whether both are handles to the same pool.
    #[must_use]
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.core, &other.core)
    }

    /// Calls `hook` after each [`Stream::synchronize`] of a stream of this pool. The first call of
    /// this function wins.
    #[doc(hidden)]
    pub fn after_synchronize(&self, hook: Weak<dyn AfterSynchronize>) {
        let _ = self.core.after_synchronize.set(hook);
    }

    /// Returns the driver of the pool.
    #[must_use]
    pub fn driver(&self) -> &Arc<dyn Driver> {
        &self.core.driver
    }
}

impl ReturnSlot for PoolCore {
    fn return_slot(&self, slot: u32) {
        self.slots().idle.push(slot);
    }

    fn synchronized(&self) {
        if let Some(hook) = self.after_synchronize.get().and_then(Weak::upgrade) {
            hook.synchronized();
        }
    }
}

impl PoolCore {
    fn slots(&self) -> MutexGuard<'_, SlotTable> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn timelines(&self) -> MutexGuard<'_, TimelineMap> {
        self.timelines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn driver_error(&self, error: DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    /// Creates a stream in the driver. Its number is assigned later, under the lock.
    fn create_stream(&self, kind: Kind) -> Result<impl FnOnce(u32) -> Timeline + use<>> {
        // Retry releases that the driver refused before. What is refused again stays for the next
        // sweep.
        let _ = leftovers::sweep(&self.driver);
        let raw = self
            .driver
            .stream_create(self.device, kind.priority)
            .map_err(|e| self.driver_error(e))?;
        let id = match id_of(&*self.driver, raw) {
            Ok(id) => id,
            Err(error) => {
                self.destroy_stream(raw);
                return Err(self.driver_error(error));
            }
        };
        let driver = self.driver.clone();
        Ok(move |number| {
            Timeline::new(driver, raw, number, id, StreamLifetime::Owned, kind.isolated)
        })
    }

    #[expect(unsafe_code, reason = "ends a handle")]
    fn destroy_stream(&self, raw: RawStream) {
        let driver = self.driver.clone();
        // SAFETY: 1. the stream was just created, nothing else has its handle, and no release of it
        // has succeeded yet.
        leftovers::release(&self.driver, move || unsafe { driver.stream_destroy(raw) });
    }

    fn lease_slot(self: &Arc<Self>, slots: &mut SlotTable, slot: u32) -> Stream {
        let entry = &mut slots.slots[slot as usize];
        entry.generation += 1;
        let id = self.ids.mint(slot, entry.generation);
        let lease = StreamLease::new(self.clone(), &entry.timeline, id, Some(slot));
        entry.lease = Arc::downgrade(&lease);
        self.timelines()
            .insert(StreamKey::of(entry.timeline.raw()), Arc::downgrade(&entry.timeline));
        Stream { lease }
    }

    /// Returns whether a timeline of another pool can be used here: it has this handle, is not
    /// retired, and has the same driver.
    fn accepts(&self, timeline: &Timeline, raw: RawStream) -> bool {
        timeline.raw() == raw
            && !timeline.is_retired()
            && Arc::ptr_eq(timeline.driver(), &self.driver)
    }

    /// Returns the timeline known for a handle, if the handle still means the same stream.
    fn lookup(&self, raw: RawStream) -> Result<Option<Arc<Timeline>>> {
        if raw.device() != self.device {
            return Err(MemoryError::WrongDevice { expected: self.device, actual: raw.device() });
        }
        let Some(known) = self.timelines().get(&StreamKey::of(raw)).and_then(Weak::upgrade) else {
            return Ok(None);
        };
        if known.is_retired() {
            return Ok(None);
        }
        Ok(known.is_current()?.then_some(known))
    }

    fn adopt_timeline(&self, raw: RawStream, life: StreamLifetime) -> Result<Arc<Timeline>> {
        let key = StreamKey::of(raw);
        let (raw, life) = (key.raw, key.default_life().unwrap_or(life));
        if let Some(known) = self.lookup(raw)? {
            return Ok(known);
        }
        let id = id_of(&*self.driver, raw).map_err(|e| self.driver_error(e))?;
        // Before the other lock is taken: leasing takes these two locks in the opposite order.
        let number = {
            let mut slots = self.slots();
            slots.adopted += 1;
            self.cap.saturating_add(slots.adopted - 1)
        };
        let timeline = Arc::new(Timeline::new(self.driver.clone(), raw, number, id, life, false));
        let mut timelines = self.timelines();
        timelines.retain(|_, timeline| timeline.strong_count() > 0);
        // Another thread may have adopted it since the lookup.
        let other = timelines.get(&key).and_then(Weak::upgrade);
        let same = other
            .as_ref()
            .is_some_and(|other| id.is_none_or(|id| other.has_id(id)) && !other.is_retired());
        if !same {
            timelines.insert(key, Arc::downgrade(&timeline));
        }
        drop(timelines);
        // The other value is dropped after the locks are released: it may be the last reference to
        // another library's stream.
        Ok(if same { other.unwrap_or(timeline) } else { timeline })
    }
}

impl fmt::Debug for StreamPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamPool")
            .field("device", &self.core.device)
            .field("cap", &self.core.cap)
            .field("leased", &self.leased())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::HashSet, hash::BuildHasher};

    #[test]
    fn hasher_spreads_adjacent_handles() {
        let hash = BuildHasherDefault::<HandleHasher>::default();
        for stride in [1, 8, 64, 4096, 1 << 21] {
            // As the derived `Hash` of a key writes them.
            let hashes =
                (0..1024u64).map(|n| hash.hash_one((0u32, 0x7f00_0000_0000 + n * stride, 0usize)));
            let (low, high): (HashSet<_>, HashSet<_>) =
                hashes.map(|hash| (hash % 1024, hash >> 57)).unzip();
            // Random values would leave 647 distinct ones.
            assert!(
                low.len() > 500 && high.len() > 100,
                "{stride}: {} and {}",
                low.len(),
                high.len()
            );
        }
    }
}
