//! Creating and destroying runtimes.
#![expect(unsafe_code, reason = "exports functions to C")]

pub use crate::table::{AQ_STREAMS_RETIRED, AQ_STREAMS_UNTOLD, aq_runtime};

use crate::{
    entry::{CallResult, caller_size, enter, install_panic_hook, require, write_out},
    ledger,
    status::{Failure, Status, aq_status},
    table::{self, SharedRuntime},
    thread_state,
};
use aquifer::{
    DeviceId, MemoryError, PinnedConfig, PoolConfig, Runtime,
    event::{Recorder, RingSink},
    sim::{DeviceConfig, Schedule, Sim, SimConfig},
};
use std::{
    ffi::{CStr, OsStr, c_char},
    fmt::Display,
    os::unix::ffi::OsStrExt,
    path::PathBuf,
    ptr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

/// The machine's CUDA driver. Without one there are no devices.
pub const AQ_DRIVER_MACHINE: u32 = 0;
/// The simulated driver.
pub const AQ_DRIVER_SIM: u32 = 1;
/// The machine's CUDA driver, or the simulated driver if there is none.
pub const AQ_DRIVER_MACHINE_OR_SIM: u32 = 2;

/// Simulated devices without virtual memory management.
pub const AQ_SIM_PLAIN: u32 = 1;
/// Simulated devices without checks, for measurements.
pub const AQ_SIM_UNCHECKED: u32 = 2;

/// Shares the memory of devices with other processes.
pub const AQ_SHARED_DEVICES: u32 = 1;
/// Shares pinned memory with other processes.
pub const AQ_SHARED_PINNED: u32 = 2;
/// Keeps the guarantees free instead of lending them.
pub const AQ_SHARED_RESERVED: u32 = 4;

/// Maximum number of events that a runtime keeps: 1 GiB of them.
const MAX_HISTORY: u64 = 1 << 24;

/// Options of a new runtime. Zero selects the default of a field.
#[derive(Clone, Copy, Debug)]
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
    /// Any of `AQ_SHARED_…`.
    pub shared: u32,
    /// The order among processes that wait for shared memory.
    pub shared_priority: i32,
    /// Bytes of each device that are guaranteed to this process.
    pub shared_guarantee: u64,
    /// Bytes of pinned memory that are guaranteed to this process.
    pub pinned_guarantee: u64,
    /// The folder of the ledgers; null for that of `AQUIFER_LEDGER`.
    pub ledger_folder: *const c_char,
    /// A plan file for every device's pool; null for that of `AQUIFER_PLAN`.
    pub plan: *const c_char,
    /// Per cent of the peak of its live bytes that each device's pool may hold beyond it.
    pub slack: u64,
}

impl Default for aq_runtime_options {
    fn default() -> Self {
        Self {
            size: 0,
            driver: AQ_DRIVER_MACHINE,
            streams: AQ_STREAMS_UNTOLD,
            sim_devices: 0,
            sim_flags: 0,
            sim_memory: 0,
            sim_seed: 0,
            device_limit: 0,
            pinned_limit: 0,
            wait_ns: 0,
            release_threshold: 0,
            history: 0,
            shared: 0,
            shared_priority: 0,
            shared_guarantee: 0,
            pinned_guarantee: 0,
            ledger_folder: ptr::null(),
            plan: ptr::null(),
            slack: 0,
        }
    }
}

fn bad(what: &str, value: impl Display, expected: &str) -> Failure {
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
            ptr::copy_nonoverlapping(from.cast::<u8>(), (&raw mut options).cast::<u8>(), known);
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
        Ok(Some(Arc::new(RingSink::new(self.history as usize))))
    }

    /// Returns the folder of the ledgers, if memory is shared and the caller names one.
    ///
    /// # Safety
    /// 1. `ledger_folder` is null, or a zero-terminated text.
    unsafe fn ledger_folder(&self) -> CallResult<Option<PathBuf>> {
        const KNOWN: u32 = AQ_SHARED_DEVICES | AQ_SHARED_PINNED | AQ_SHARED_RESERVED;
        if self.shared & !KNOWN != 0 {
            return Err(bad(
                "shared",
                self.shared,
                "0, or AQ_SHARED_DEVICES (1), AQ_SHARED_PINNED (2) and AQ_SHARED_RESERVED (4), combined by |",
            ));
        }
        let unused = |kind: u32, guarantee: u64| self.shared & kind == 0 && guarantee > 0;
        if unused(AQ_SHARED_DEVICES, self.shared_guarantee)
            || unused(AQ_SHARED_PINNED, self.pinned_guarantee)
        {
            let text = format!(
                "options->shared is {}, and does not share the memory of options->shared_guarantee \
                 ({}) or options->pinned_guarantee ({}); add AQ_SHARED_DEVICES (1) or \
                 AQ_SHARED_PINNED (2), or set that guarantee to 0",
                self.shared, self.shared_guarantee, self.pinned_guarantee
            );
            return Err(Failure::new(Status::BadArgument, text));
        }
        if self.shared == 0 || self.ledger_folder.is_null() {
            return Ok(None);
        }
        // SAFETY: 1. Guaranteed by the caller.
        Ok(Some(unsafe { ledger::folder_of(self.ledger_folder) }?))
    }

    /// Builds the runtime.
    ///
    /// # Safety
    /// 1. `ledger_folder` and `plan` are null, or zero-terminated texts.
    unsafe fn build(self, shareable: bool) -> CallResult<SharedRuntime> {
        if self.streams > AQ_STREAMS_RETIRED {
            return Err(bad(
                "streams",
                self.streams,
                "AQ_STREAMS_UNTOLD (0) or AQ_STREAMS_RETIRED (1)",
            ));
        }
        if self.sim_flags > AQ_SIM_PLAIN | AQ_SIM_UNCHECKED {
            return Err(bad(
                "sim_flags",
                self.sim_flags,
                "0, AQ_SIM_PLAIN (1), AQ_SIM_UNCHECKED (2), or both (3)",
            ));
        }
        let slack = u32::try_from(self.slack).ok().filter(|&slack| slack <= PoolConfig::MAX_SLACK);
        let Some(slack) = slack else {
            return Err(bad("slack", self.slack, "1 to 10000 per cent, or 0 for the default (17)"));
        };
        let mut pools = PoolConfig::default();
        pools.shareable = shareable;
        if slack > 0 {
            pools.slack = slack;
        }
        if self.wait_ns > 0 {
            pools.wait = Duration::from_nanos(self.wait_ns);
        }
        if self.release_threshold > 0 {
            pools.release_threshold = self.release_threshold;
        }
        if !self.plan.is_null() {
            // SAFETY: 1. Guaranteed by the caller.
            let path = unsafe { CStr::from_ptr(self.plan) };
            pools.plan = Some(PathBuf::from(OsStr::from_bytes(path.to_bytes())));
        }
        // SAFETY: 1. Guaranteed by the caller.
        let folder = unsafe { self.ledger_folder() }?;
        let history = self.history()?;
        if let Some(history) = &history {
            pools.recorder = Some(Arc::new(Recorder::new(history.clone())));
        }
        let mut pinned = PinnedConfig::default();
        // Forked workers read what their parent has pinned: so it is with the driver's own memory.
        pinned.share_on_fork = true;
        let build_runtime = |sim: Option<&Sim>| {
            let mut builder = Runtime::builder().pools(pools.clone()).pinned(pinned.clone());
            if let Some(sim) = sim {
                builder = builder.driver(sim.driver());
            }
            if self.device_limit > 0 {
                builder = builder.device_budget(self.device_limit);
            }
            if self.pinned_limit > 0 {
                builder = builder.pinned_budget(self.pinned_limit);
            }
            if self.shared & AQ_SHARED_DEVICES != 0 {
                builder = builder.shared(self.shared_guarantee);
            }
            if self.shared & AQ_SHARED_PINNED != 0 {
                builder = builder.shared_pinned(self.pinned_guarantee);
            }
            if self.shared & AQ_SHARED_RESERVED != 0 {
                builder = builder.reserve_guarantees();
            }
            if let Some(folder) = &folder {
                builder = builder.ledger_folder(folder);
            }
            builder = builder.shared_priority(self.shared_priority);
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
            other => {
                let expected = "AQ_DRIVER_MACHINE (0), AQ_DRIVER_SIM (1) or \
                                AQ_DRIVER_MACHINE_OR_SIM (2)";
                return Err(bad("driver", other, expected));
            }
        };
        Ok(SharedRuntime::new(runtime, sim, history, self.streams))
    }
}

impl aq_runtime_options {
    /// Creates a runtime and enters it in the table. If it is `shareable`, other processes can map
    /// its memory.
    ///
    /// # Safety
    /// 1. `ledger_folder` and `plan` are null, or zero-terminated texts.
    pub(crate) unsafe fn create(self, shareable: bool) -> CallResult<aq_runtime> {
        install_panic_hook();
        // SAFETY: 1. Guaranteed by the caller.
        Ok(table::insert(unsafe { self.build(shareable) }?))
    }
}

/// Returns the driver's ordinal of a device.
pub(crate) fn ordinal(shared: &SharedRuntime, device: u32) -> CallResult<DeviceId> {
    Ok(shared.pool(device)?.device())
}

/// Creates a runtime.
///
/// # Safety
/// 1. `options` is null, or points to a struct whose first field is its size in bytes, with texts
///    that are null or end with a zero byte.
/// 2. `runtime` is null, or points to an `aq_runtime` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_runtime_create(
    options: *const aq_runtime_options,
    runtime: *mut aq_runtime,
) -> aq_status {
    enter(|| {
        require(runtime, "runtime")?;
        // SAFETY: 1. Guaranteed by the caller, also of the texts.
        let id = unsafe { aq_runtime_options::read(options)?.create(false) }?;
        // SAFETY: 2. Guaranteed by the caller.
        unsafe { write_out(runtime, id, "runtime") }
    })
}

/// Destroys a runtime.
#[unsafe(no_mangle)]
pub extern "C" fn aq_runtime_destroy(runtime: aq_runtime) -> aq_status {
    enter(|| {
        let shared = table::open(runtime)?;
        if shared.closed.swap(true, Ordering::AcqRel) {
            return Err(table::no_runtime(runtime));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_simulated_machine_has_at_most_as_many_devices_as_a_set_can_name() {
        let most = SimConfig::MOST_DEVICES;
        let devices = |sim_devices| {
            let options = aq_runtime_options { sim_devices, ..Default::default() };
            options.sim().map(|sim| sim.config().devices.len()).map_err(|refused| refused.status())
        };
        assert_eq!((devices(0), devices(most)), (Ok(1), Ok(most as usize)));
        for beyond in [most + 1, u32::MAX] {
            assert_eq!(devices(beyond), Err(Status::BadSetting), "{beyond} devices");
        }
    }
}
