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
#![expect(unsafe_code, reason = "exports functions to C, and takes their streams in")]

use crate::{
    entry::{CallResult, caller_size, enter, install_panic_hook, require, write_out},
    status::{Failure, Status, aq_status},
    thread_state,
};
use aquifer::{
    DeviceId, DevicePool, MemoryError, PoolConfig, RawStream, Recorder, Runtime, Stager,
    StagerConfig, Stream, StreamLifetime,
    event::RingSink,
    sim::{DeviceConfig, Schedule, Sim, SimConfig},
};
use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

/// The number of a runtime.
pub type aq_runtime = u64;

/// The machine's CUDA driver. Without one there are no devices.
pub const AQ_DRIVER_MACHINE: u32 = 0;
/// The simulated driver.
pub const AQ_DRIVER_SIM: u32 = 1;
/// The machine's CUDA driver, or the simulated driver if there is none.
pub const AQ_DRIVER_MACHINE_OR_SIM: u32 = 2;

/// Streams may be destroyed at any time when no call is in progress.
pub const AQ_STREAMS_UNTOLD: u32 = 0;
/// The caller retires each stream before it destroys it.
pub const AQ_STREAMS_RETIRED: u32 = 1;

/// Simulated devices without virtual memory management.
pub const AQ_SIM_PLAIN: u32 = 1;
/// Simulated devices without checks, for measurements.
pub const AQ_SIM_UNCHECKED: u32 = 2;

/// Maximum number of events that a runtime keeps: 1 GiB of them.
const MAX_HISTORY: u64 = 1 << 24;

/// Options of a new runtime. Zero selects the default of a field.
#[derive(Clone, Copy, Default, Debug)]
#[repr(C)]
pub struct aq_runtime_options {
    /// `sizeof(aq_runtime_options)`.
    pub size: usize,
    /// One of `AQ_DRIVER_…`.
    pub driver: u32,
    /// One of `AQ_STREAMS_…`, for streams that are not registered.
    pub streams: u32,
    /// Number of devices of the simulated driver.
    pub sim_devices: u32,
    /// Any of `AQ_SIM_…`.
    pub sim_flags: u32,
    /// Bytes of memory of each simulated device.
    pub sim_memory: u64,
    /// Seed by which queued work runs late and in another order; 0 runs it at once.
    pub sim_seed: u64,
    /// Maximum number of bytes of each device.
    pub device_limit: u64,
    /// Maximum number of bytes of pinned host memory.
    pub pinned_limit: u64,
    /// Nanoseconds that an allocation waits for memory still in use.
    pub wait_ns: u64,
    /// Idle bytes of each device above which memory goes back to the driver.
    pub release_threshold: u64,
    /// Number of events kept for memory snapshots.
    pub history: u64,
}

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
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Returns the reason why there is no such runtime.
#[cold]
pub(crate) fn no_runtime(id: aq_runtime) -> Failure {
    if id == 0 || id >= NEXT.load(Ordering::Relaxed) {
        return Failure::new(Status::BadRuntime, format!("{id} is no runtime"));
    }
    Failure::new(Status::Closed, format!("runtime {id} has been destroyed"))
}

impl SharedRuntime {
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

fn bad(what: &str, value: u32, expected: &str) -> Failure {
    Failure::new(Status::BadArgument, format!("options->{what} is {value}; it can be {expected}"))
}

impl aq_runtime_options {
    /// Reads the caller's options, as far as its version has them.
    ///
    /// # Safety
    /// 1. `from` is null or points to options that begin with their size in bytes.
    pub(crate) unsafe fn read(from: *const Self) -> CallResult<Self> {
        let mut options = Self::default();
        if from.is_null() {
            return Ok(options);
        }
        // SAFETY: 1. The first field is a `size_t`.
        let known = unsafe { caller_size(from.cast(), size_of::<Self>(), "options") }?;
        // SAFETY: 1. Both sides have that many bytes. 2. Any bytes are valid values of these
        // fields. 3. `options` is a local, so they do not overlap.
        unsafe {
            std::ptr::copy_nonoverlapping(
                from.cast::<u8>(),
                (&raw mut options).cast::<u8>(),
                known,
            );
        };
        // SAFETY: 1. Guaranteed by the caller.
        let size = unsafe { from.cast::<usize>().read() };
        // Fields of a newer version must be 0.
        // SAFETY: 1. The caller's struct has `size` bytes.
        let unknown_set = (known..size).any(|at| unsafe { from.cast::<u8>().add(at).read() } != 0);
        if unknown_set {
            let text = format!(
                "options of {size} bytes ask for what this version, with {known}, does not know"
            );
            return Err(Failure::new(Status::Version, text));
        }
        Ok(options)
    }

    fn sim(&self) -> CallResult<Sim> {
        if self.sim_devices > SimConfig::MOST_DEVICES {
            let (name, value) = ("sim_devices", self.sim_devices.to_string());
            return Err(
                MemoryError::BadSetting { name, value, expected: "at most 64 of them" }.into()
            );
        }
        let mut config = SimConfig::h200(self.sim_devices.max(1));
        if self.sim_flags & AQ_SIM_PLAIN != 0 {
            config
                .devices
                .iter_mut()
                .for_each(|device| *device = DeviceConfig::without_virtual_memory());
        }
        if self.sim_memory > 0 {
            config.capacity = Some(self.sim_memory);
        }
        if self.sim_seed > 0 {
            config.schedule = Schedule::Seeded(self.sim_seed);
        }
        let sim = Sim::new(config);
        sim.oracle(self.sim_flags & AQ_SIM_UNCHECKED == 0);
        Ok(sim)
    }

    /// Returns the sink that keeps events.
    fn history(&self) -> CallResult<Option<Arc<RingSink>>> {
        if self.history == 0 {
            return Ok(None);
        }
        if self.history > MAX_HISTORY {
            let text = format!(
                "options->history is {}; it can be {MAX_HISTORY} events at most",
                self.history
            );
            return Err(Failure::new(Status::BadArgument, text));
        }
        if std::env::var_os("AQUIFER_TRACE").is_some_and(|path| !path.is_empty()) {
            let text =
                "options->history and AQUIFER_TRACE are both set, and events go to one of them";
            return Err(Failure::new(Status::BadSetting, text));
        }
        Ok(Some(Arc::new(RingSink::new(self.history as usize))))
    }

    fn build(self) -> CallResult<SharedRuntime> {
        if self.streams > AQ_STREAMS_RETIRED {
            return Err(bad("streams", self.streams, "AQ_STREAMS_UNTOLD or AQ_STREAMS_RETIRED"));
        }
        if self.sim_flags > AQ_SIM_PLAIN | AQ_SIM_UNCHECKED {
            return Err(bad(
                "sim_flags",
                self.sim_flags,
                "AQ_SIM_PLAIN, AQ_SIM_UNCHECKED, or both",
            ));
        }
        let mut pools = PoolConfig::default();
        if self.wait_ns > 0 {
            pools.wait = Duration::from_nanos(self.wait_ns);
        }
        if self.release_threshold > 0 {
            pools.release_threshold = self.release_threshold;
        }
        let history = self.history()?;
        if let Some(history) = &history {
            pools.recorder = Some(Arc::new(Recorder::new(history.clone())));
        }
        let build_runtime = |sim: Option<&Sim>| {
            let mut builder = Runtime::builder().pools(pools.clone());
            if let Some(sim) = sim {
                builder = builder.driver(sim.driver());
            }
            if self.device_limit > 0 {
                builder = builder.device_budget(self.device_limit);
            }
            if self.pinned_limit > 0 {
                builder = builder.pinned_budget(self.pinned_limit);
            }
            builder.build()
        };
        let (runtime, sim) = match self.driver {
            AQ_DRIVER_MACHINE => (build_runtime(None)?, None),
            AQ_DRIVER_SIM => {
                let sim = self.sim()?;
                (build_runtime(Some(&sim))?, Some(sim))
            }
            AQ_DRIVER_MACHINE_OR_SIM => match build_runtime(None)? {
                runtime if runtime.driver().is_some() => (runtime, None),
                _ => {
                    let sim = self.sim()?;
                    (build_runtime(Some(&sim))?, Some(sim))
                }
            },
            other => return Err(bad("driver", other, "one of AQ_DRIVER_…")),
        };
        let devices = runtime.devices().iter().map(|_| DeviceState::default()).collect();
        Ok(SharedRuntime {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            runtime,
            sim,
            history,
            life: self.streams,
            version: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            devices,
        })
    }
}

impl aq_runtime_options {
    /// Creates a runtime and enters it in the table.
    pub(crate) fn create(self) -> CallResult<aq_runtime> {
        install_panic_hook();
        let shared = Arc::new(self.build()?);
        let id = shared.id;
        runtimes().write().unwrap_or_else(PoisonError::into_inner).insert(id, shared);
        Ok(id)
    }
}

/// Returns the driver's ordinal of a device.
pub(crate) fn ordinal(shared: &SharedRuntime, device: u32) -> CallResult<DeviceId> {
    Ok(shared.pool(device)?.device())
}

/// Creates a runtime.
///
/// # Safety
/// 1. `options` is null, or points to a struct whose first field is its size in bytes.
/// 2. `runtime` is null, or points to an `aq_runtime` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_runtime_create(
    options: *const aq_runtime_options,
    runtime: *mut aq_runtime,
) -> aq_status {
    enter(|| {
        require(runtime, "runtime")?;
        // SAFETY: 1. Guaranteed by the caller.
        let id = unsafe { aq_runtime_options::read(options) }?.create()?;
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out(runtime, id, "runtime") }
    })
}

/// Destroys a runtime.
#[unsafe(no_mangle)]
pub extern "C" fn aq_runtime_destroy(runtime: aq_runtime) -> aq_status {
    enter(|| {
        let shared = open(runtime)?;
        if shared.closed.swap(true, Ordering::AcqRel) {
            return Err(no_runtime(runtime));
        }
        shared.version.fetch_add(1, Ordering::Release);
        thread_state::clear(runtime);
        // Thread-local state of other threads keeps the runtime's metadata until their next call or
        // their end. Its memory is released now.
        for pool in shared.runtime.devices() {
            // A refusal leaves the memory with the pool, which ends with the last reference to it.
            let _ = pool.trim(0);
        }
        // A concurrent allocation or free that has not seen the runtime closed is counted by this
        // call, since both take the lock of the block's cache.
        shared.remove_if_unused();
        Ok(())
    })
}
