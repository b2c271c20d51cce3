//! The table of runtimes, by number.
//!
//! - A number is never reused, so a number of a destroyed runtime is recognised from any thread at
//!   any time.
//! - A runtime that is destroyed while blocks are live refuses further calls, and stays in the
//!   table until the last block has been freed:
//!
//! ```text
//!   open ──destroy──▶ closed, blocks are out ──the last free──▶ removed
//!     └───────────────destroy, none is out────────────────────▶
//! ```
#![expect(unsafe_code, reason = "takes the streams of C in")]

use crate::{
    entry::{CallResult, lock},
    status::{Failure, Status},
};
use aquifer::{
    DevicePool, MemoryError, Parkable, RawStream, Runtime, Stager, StagerConfig, Stream, Tag,
    budget::Charge, event::RingSink, sim::Sim, stream::StreamLifetime,
};
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

/// The number of a runtime.
pub type aq_runtime = u64;

/// Streams may be destroyed at any time when no call is in progress.
pub const AQ_STREAMS_UNTOLD: u32 = 0;
/// The caller retires each stream before it destroys it.
pub const AQ_STREAMS_RETIRED: u32 = 1;

/// The stream that a handle denotes.
#[derive(Clone)]
pub(crate) struct ResolvedStream {
    pub(crate) stream: Stream,
    /// Whether the stream may be destroyed without a call, so that another stream may have its
    /// handle.
    pub(crate) may_be_reused: bool,
}

impl ResolvedStream {
    /// Returns whether the handle still denotes this stream.
    #[inline]
    pub(crate) fn is_current(&self) -> bool {
        !self.may_be_reused || self.is_same()
    }

    #[cold]
    fn is_same(&self) -> bool {
        self.stream.timeline().is_current() == Ok(true)
    }
}

/// A runtime.
pub(crate) struct SharedRuntime {
    pub(crate) id: aq_runtime,
    pub(crate) runtime: Runtime,
    pub(crate) sim: Option<Sim>,
    /// The last events of all devices, if they are kept.
    pub(crate) history: Option<Arc<RingSink>>,
    life: u32,
    /// Thread-local state of this runtime is valid while this is unchanged.
    pub(crate) version: AtomicU64,
    pub(crate) closed: AtomicBool,
    /// By device number.
    devices: Box<[DeviceState]>,
}

#[derive(Default)]
struct DeviceState {
    /// Streams that are retired before they are destroyed, by handle. The end of other streams is
    /// not announced, and entries for them would accumulate. So those are known only to
    /// thread-local state, and to the pool as long as it has memory of theirs.
    streams: Mutex<HashMap<u64, Stream>>,
    stager: OnceLock<Stager>,
    /// The stream that blocks of callers without streams are allocated for. No work is queued
    /// there.
    unused: OnceLock<Stream>,
    /// Memory of regions, by tag.
    parkable: Mutex<HashMap<Tag, Parkable>>,
    /// Memory that the caller allocates itself.
    charged: Mutex<Option<Charge>>,
}

/// Open runtimes, and closed ones with live blocks.
static RUNTIMES: OnceLock<RwLock<HashMap<aq_runtime, Arc<SharedRuntime>>>> = OnceLock::new();
/// The number of the next runtime.
static NEXT: AtomicU64 = AtomicU64::new(1);

fn runtimes() -> &'static RwLock<HashMap<aq_runtime, Arc<SharedRuntime>>> {
    RUNTIMES.get_or_init(RwLock::default)
}

/// Returns an open runtime.
pub(crate) fn open(id: aq_runtime) -> CallResult<Arc<SharedRuntime>> {
    match open_or_closing(id) {
        Ok(shared) if shared.closed.load(Ordering::Acquire) => Err(no_runtime(id)),
        other => other,
    }
}

/// Returns a runtime that is open or has live blocks.
pub(crate) fn open_or_closing(id: aq_runtime) -> CallResult<Arc<SharedRuntime>> {
    let found = runtimes().read().unwrap_or_else(PoisonError::into_inner).get(&id).cloned();
    found.ok_or_else(|| no_runtime(id))
}

/// Returns all open runtimes.
pub(crate) fn all_open() -> Vec<Arc<SharedRuntime>> {
    let all = runtimes().read().unwrap_or_else(PoisonError::into_inner);
    all.values().filter(|shared| !shared.closed.load(Ordering::Acquire)).cloned().collect()
}

/// Returns the reason why there is no such runtime.
#[cold]
pub(crate) fn no_runtime(id: aq_runtime) -> Failure {
    if id == 0 || id >= NEXT.load(Ordering::Relaxed) {
        return Failure::new(Status::BadRuntime, format!("{id} is no runtime"));
    }
    Failure::new(Status::Closed, format!("runtime {id} has been destroyed"))
}

/// Enters a runtime in the table, and returns its number.
pub(crate) fn insert(shared: SharedRuntime) -> aq_runtime {
    let id = shared.id;
    runtimes().write().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(shared));
    id
}

impl SharedRuntime {
    /// Creates a runtime with a new number. `life` is one of `AQ_STREAMS_…`, for streams that are
    /// not registered.
    pub(crate) fn new(
        runtime: Runtime,
        sim: Option<Sim>,
        history: Option<Arc<RingSink>>,
        life: u32,
    ) -> Self {
        let devices = runtime.devices().iter().map(|_| DeviceState::default()).collect();
        Self {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            runtime,
            sim,
            history,
            life,
            version: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            devices,
        }
    }

    /// Returns the pool of a device.
    #[inline]
    pub(crate) fn pool(&self, device: u32) -> Result<&DevicePool, MemoryError> {
        match self.runtime.devices().get(device as usize) {
            Some(pool) => Ok(pool),
            None => Err(self.no_device(device)),
        }
    }

    #[cold]
    fn no_device(&self, device: u32) -> MemoryError {
        MemoryError::NoDevice { asked: device, count: self.devices.len() as u32 }
    }

    fn device(&self, device: u32) -> Result<&DeviceState, MemoryError> {
        self.devices.get(device as usize).ok_or_else(|| self.no_device(device))
    }

    /// Returns the stager of a device, created at its first use.
    pub(crate) fn stager(&self, device: u32) -> CallResult<&Stager> {
        let stager = &self.device(device)?.stager;
        if let Some(stager) = stager.get() {
            return Ok(stager);
        }
        let new = self.runtime.stager(device as usize, StagerConfig::default())?;
        Ok(stager.get_or_init(|| new))
    }

    /// Returns a stream of a device that no work is queued on, leased at its first use.
    pub(crate) fn unused_stream(&self, device: u32) -> CallResult<&Stream> {
        let unused = &self.device(device)?.unused;
        if let Some(stream) = unused.get() {
            return Ok(stream);
        }
        let new = self.pool(device)?.stream()?;
        Ok(unused.get_or_init(|| new))
    }

    /// Returns the memory of a region's tag on a device, created at its first use.
    pub(crate) fn parkable(&self, device: u32, tag: Tag) -> Result<Parkable, MemoryError> {
        let by_tag = &self.device(device)?.parkable;
        if let Some(parkable) = lock(by_tag).get(&tag) {
            return Ok(parkable.clone());
        }
        // Of two that are created at the same time, both stand for the same memory.
        let new = self.pool(device)?.parkable(tag)?;
        Ok(lock(by_tag).entry(tag).or_insert(new).clone())
    }

    /// Charges memory that the caller allocates itself.
    pub(crate) fn charge(&self, device: u32, bytes: u64) -> CallResult {
        let charge = self.pool(device)?.charge(bytes).map_err(MemoryError::from)?;
        let mut charged = lock(&self.device(device)?.charged);
        match &mut *charged {
            Some(all) => {
                let merged = all.merge(charge);
                debug_assert!(merged.is_ok(), "a pool has one budget");
            }
            None => *charged = Some(charge),
        }
        Ok(())
    }

    /// Releases a part of what was charged.
    pub(crate) fn uncharge(&self, device: u32, bytes: u64) -> CallResult {
        let mut charged = lock(&self.device(device)?.charged);
        let held = charged.as_ref().map_or(0, Charge::bytes);
        let part = charged.as_mut().and_then(|all| all.split(bytes));
        // A release may wake waiters.
        drop(charged);
        part.map(drop).ok_or_else(|| {
            let text = format!("bytes is {bytes}; it can be {held}, the charged bytes, at most");
            Failure::new(Status::BadArgument, text)
        })
    }

    /// Returns the memory of all regions on a device.
    pub(crate) fn parkables(&self, device: u32) -> Result<Vec<Parkable>, MemoryError> {
        Ok(lock(&self.device(device)?.parkable).values().cloned().collect())
    }

    /// Returns the stream that a raw handle denotes for the calling thread.
    ///
    /// # Safety
    /// 1. `handle` is a stream of this driver and device that is alive. For a simulated driver any
    ///    number is allowed.
    /// 2. Its lifetime is as stated by the runtime's options or by its registration.
    pub(crate) unsafe fn stream(&self, device: u32, handle: u64) -> CallResult<ResolvedStream> {
        let pool = self.pool(device)?;
        match handle {
            0 | 1 => {
                return Ok(ResolvedStream {
                    stream: pool.streams().legacy_default()?,
                    may_be_reused: false,
                });
            }
            2 => {
                return Ok(ResolvedStream {
                    stream: pool.streams().thread_default()?,
                    may_be_reused: false,
                });
            }
            _ => {}
        }
        let known = lock(&self.device(device)?.streams).get(&handle).cloned();
        if let Some(stream) = known.filter(|stream| !stream.timeline().is_retired()) {
            return Ok(ResolvedStream { stream, may_be_reused: false });
        }
        // SAFETY: 1. 2. Guaranteed by the caller.
        unsafe { self.adopt(device, handle, self.life) }
    }

    /// Adopts a stream.
    ///
    /// # Safety
    /// 1. As [`SharedRuntime::stream`]. 2. Its lifetime is as stated by `life`.
    unsafe fn adopt(&self, device: u32, handle: u64, life: u32) -> CallResult<ResolvedStream> {
        let pool = self.pool(device)?;
        let may_be_reused = life != AQ_STREAMS_RETIRED;
        let life = if may_be_reused { StreamLifetime::Fenced } else { StreamLifetime::Retired };
        // SAFETY: 1. Guaranteed by the caller.
        let raw = unsafe { RawStream::from_raw(pool.device(), handle) };
        // SAFETY: 1. 2. Guaranteed by the caller.
        let stream = unsafe { pool.streams().adopt(raw, life) }
            .map_err(|error| no_stream(error, device, handle))?;
        if !may_be_reused {
            let before = lock(&self.device(device)?.streams).insert(handle, stream.clone());
            // The drop may be that of the last reference to the stream's state.
            drop(before);
        }
        Ok(ResolvedStream { stream, may_be_reused })
    }

    /// Adopts a stream whose owner will retire it.
    ///
    /// # Safety
    /// 1. `handle` is a stream of this driver and device that is alive. 2. It is retired before it
    ///    is destroyed.
    pub(crate) unsafe fn register(&self, device: u32, handle: u64) -> CallResult {
        // SAFETY: 1. 2. Guaranteed by the caller: the stream is alive for longer than either
        // lifetime requires.
        let known = unsafe { self.stream(device, handle) }?;
        if known.may_be_reused {
            // Ends the stream's timeline, with its work, and begins a new one.
            // SAFETY: 1. Guaranteed by the caller.
            unsafe { self.retire(device, handle) }?;
            // SAFETY: 1. 2. Guaranteed by the caller.
            unsafe { self.adopt(device, handle, AQ_STREAMS_RETIRED) }?;
        }
        Ok(())
    }

    /// Retires a stream.
    ///
    /// # Safety
    /// 1. `handle` is a stream of this driver and device that is alive. For a simulated driver any
    ///    number is allowed.
    pub(crate) unsafe fn retire(&self, device: u32, handle: u64) -> CallResult {
        let pool = self.pool(device)?;
        // SAFETY: 1. Guaranteed by the caller.
        let raw = unsafe { RawStream::from_raw(pool.device(), handle) };
        let timeline =
            pool.streams().timeline(raw, None).map_err(|error| no_stream(error, device, handle))?;
        timeline.retire()?;
        let removed = {
            let mut streams = lock(&self.device(device)?.streams);
            let same = |known: &Stream| Arc::ptr_eq(known.timeline(), &timeline);
            if streams.get(&handle).is_some_and(same) { streams.remove(&handle) } else { None }
        };
        drop(removed);
        self.version.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Returns whether no block is live.
    fn is_empty(&self) -> bool {
        self.runtime.devices().iter().all(|pool| pool.stats().blocks == 0)
    }

    /// Removes a destroyed runtime from the table, if the block just freed was its last.
    #[cold]
    pub(crate) fn remove_if_unused(&self) {
        if self.is_empty() {
            let removed =
                runtimes().write().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
            drop(removed);
        }
    }
}

impl fmt::Debug for SharedRuntime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedRuntime").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Turns the refusal of a handle by the driver or the pool into a failure.
#[cold]
fn no_stream(error: MemoryError, device: u32, handle: u64) -> Failure {
    match error {
        MemoryError::UnknownId => {
            let text = format!(
                "{handle:#x} is no stream that device {device} knows; nothing is to be done"
            );
            Failure::new(Status::UnknownStream, text)
        }
        // Invalid value, context or handle.
        MemoryError::Driver(error) if matches!(error.code, 1 | 201 | 400) => {
            let text = format!("{handle:#x} is no stream of device {device}: {error}");
            Failure::new(Status::UnknownStream, text)
        }
        other => other.into(),
    }
}
