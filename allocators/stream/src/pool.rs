//! Streams that are leased and come back.

use crate::{Life, Stream, Timeline};
use aquifer_core::{DeviceId, Id, IdSpace, MemoryError, Result};
use aquifer_driver::{Driver, KeepAlive, RawStream};
use std::{
    collections::HashMap,
    fmt,
    ops::RangeInclusive,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
};

/// How many streams a pool has at most, unless told otherwise.
pub const DEFAULT_CAP: u32 = 64;

/// Owned, non-blocking streams of one device, leased one at a time and used again when they come back.
///
/// There is a cap, and a typed error at the cap; a default stream of the driver is never handed out in its place. Ids
/// name streams of this pool only.
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
    /// Streams that are known here, leased or adopted, by handle. A handle comes back after its stream is destroyed, so
    /// an adopted one is believed only while its id is the same.
    known: Mutex<HashMap<RawStream, Weak<Timeline>>>,
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
    priority: i32,
    /// Grows with each lease, so that an id of an earlier one is told apart.
    generation: u32,
    leased: Weak<Lease>,
}

/// One lease; the stream goes back to the pool when the last clone of it is dropped.
pub(crate) struct Lease {
    pub(crate) pool: Arc<Inner>,
    pub(crate) timeline: Arc<Timeline>,
    pub(crate) id: Id<Stream>,
    /// The slot it goes back to; `None` for an adopted stream.
    slot: Option<u32>,
}

impl Drop for Lease {
    fn drop(&mut self) {
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
        self.lease_with_priority(0)
    }

    /// Leases a stream of this priority (a lower number is served first): one that came back, or a new one.
    ///
    /// # Errors
    /// [`MemoryError::Capacity`] when `cap` streams are leased; the driver's.
    pub fn lease_with_priority(&self, priority: i32) -> Result<Stream> {
        let inner = &self.inner;
        let found = {
            let mut slots = inner.slots();
            let at = slots.idle.iter().position(|&slot| slots.slots[slot as usize].priority == priority);
            match at {
                Some(at) => {
                    let slot = slots.idle.swap_remove(at);
                    return Ok(inner.lease_slot(&mut slots, slot));
                }
                None if (slots.slots.len() as u32) + slots.coming < inner.cap => {
                    slots.coming += 1;
                    None
                }
                // All streams exist; one that is idle under another priority gives way.
                None => Some(slots.idle.pop().ok_or(MemoryError::Capacity { max: inner.cap })?),
            }
        };
        let made = inner.make(priority);
        let mut slots = inner.slots();
        match (made, found) {
            (Ok(make), None) => {
                slots.coming -= 1;
                let slot = slots.slots.len() as u32;
                let timeline = Arc::new(make(slot));
                slots.slots.push(Slot { timeline, priority, generation: 0, leased: Weak::new() });
                Ok(inner.lease_slot(&mut slots, slot))
            }
            (Ok(make), Some(slot)) => {
                let old = std::mem::replace(&mut slots.slots[slot as usize].timeline, Arc::new(make(slot)));
                slots.slots[slot as usize].priority = priority;
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

    /// Takes in a stream of another library, so that it can be used with pools of this device. The same stream adopted
    /// twice is one and the same here.
    ///
    /// # Safety
    /// 1. `raw` is a valid stream of this pool's device and driver.
    /// 2. It is kept valid as `life` says.
    ///
    /// # Errors
    /// [`MemoryError::DefaultStream`] for the handles 0, 1 and 2; [`MemoryError::WrongDevice`]; the driver's.
    #[expect(unsafe_code, reason = "declares an unsafe function; holds no unsafe block")]
    pub unsafe fn adopt(&self, raw: RawStream, life: Life) -> Result<Stream> {
        self.adopt_known(raw, life)
    }

    fn adopt_known(&self, raw: RawStream, life: Life) -> Result<Stream> {
        let timeline = self.inner.adopted(raw, life)?;
        let id = self.inner.ids.mint(timeline.number(), 0);
        Ok(Stream { lease: Arc::new(Lease { pool: self.inner.clone(), timeline, id, slot: None }) })
    }

    /// The timeline of a stream by its handle: one that is leased here or adopted, or one that `alive` keeps valid,
    /// which is adopted now.
    ///
    /// # Errors
    /// [`MemoryError::UnknownId`] for a stream that is not known without `alive`; those of adoption.
    pub fn timeline(&self, raw: RawStream, alive: Option<KeepAlive>) -> Result<Arc<Timeline>> {
        match alive {
            Some(alive) => self.inner.adopted(raw, Life::KeptAlive(alive)),
            None => self.inner.lookup(raw)?.ok_or(MemoryError::UnknownId),
        }
    }

    /// The leased stream of this id; an error for an id of another pool, or of a lease that is over.
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

    fn known(&self) -> MutexGuard<'_, HashMap<RawStream, Weak<Timeline>>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self, error: aquifer_core::DriverError) -> MemoryError {
        MemoryError::driver(self.device, error)
    }

    /// A new stream of the driver's; its number is known only under the lock.
    fn make(&self, priority: i32) -> Result<impl FnOnce(u32) -> Timeline + use<>> {
        let raw = self.driver.stream_create(self.device, priority).map_err(|e| self.lost(e))?;
        let id = match self.driver.stream_id(raw) {
            Ok(id) => id,
            Err(error) => {
                self.unmake(raw);
                return Err(self.lost(error));
            }
        };
        let driver = self.driver.clone();
        Ok(move |number| Timeline::new(driver, raw, number, id, Life::Owned))
    }

    #[expect(unsafe_code, reason = "ends a handle")]
    fn unmake(&self, raw: RawStream) {
        // SAFETY: 1. the stream has just been made, and nobody else has its handle.
        // A refusal leaks a stream, which is all that can be done about it here.
        let _ = unsafe { self.driver.stream_destroy(raw) };
    }

    fn lease_slot(self: &Arc<Self>, slots: &mut Slots, slot: u32) -> Stream {
        let entry = &mut slots.slots[slot as usize];
        entry.generation += 1;
        let lease = Arc::new(Lease {
            pool: self.clone(),
            timeline: entry.timeline.clone(),
            id: self.ids.mint(slot, entry.generation),
            slot: Some(slot),
        });
        entry.leased = Arc::downgrade(&lease);
        self.known().insert(entry.timeline.raw(), Arc::downgrade(&entry.timeline));
        Stream { lease }
    }

    /// The timeline known for a handle, if its stream is still the same one.
    fn lookup(&self, raw: RawStream) -> Result<Option<Arc<Timeline>>> {
        if raw.device() != self.device {
            return Err(MemoryError::WrongDevice { expected: self.device, actual: raw.device() });
        }
        let Some(known) = self.known().get(&raw).and_then(Weak::upgrade) else { return Ok(None) };
        if known.is_retired() {
            return Ok(None);
        }
        let same = match known.life() {
            Life::Owned | Life::KeptAlive(_) => true,
            Life::Retired | Life::Fenced => {
                self.driver.stream_id(raw).map_err(|e| self.lost(e))? == known.id()
            }
        };
        Ok(same.then_some(known))
    }

    fn adopted(&self, raw: RawStream, life: Life) -> Result<Arc<Timeline>> {
        if raw.handle() <= 2 {
            return Err(MemoryError::DefaultStream { handle: raw.handle() });
        }
        if let Some(known) = self.lookup(raw)? {
            return Ok(known);
        }
        let id = self.driver.stream_id(raw).map_err(|e| self.lost(e))?;
        // Before the other lock is taken: whoever leases takes the two in the other order.
        let number = {
            let mut slots = self.slots();
            slots.adopted += 1;
            self.cap + slots.adopted - 1
        };
        let timeline = Arc::new(Timeline::new(self.driver.clone(), raw, number, id, life));
        let mut known = self.known();
        known.retain(|_, timeline| timeline.strong_count() > 0);
        // Another thread may have taken it in meanwhile.
        let other = known.get(&raw).and_then(Weak::upgrade);
        let same = other.as_ref().is_some_and(|other| other.id() == id && !other.is_retired());
        if !same {
            known.insert(raw, Arc::downgrade(&timeline));
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
