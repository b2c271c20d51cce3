//! Devices, limits, statistics and snapshots.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    elastic,
    entry::{CallResult, c_str_of, enter, fill, require, text, write_out, write_out_if_set},
    runtime::aq_runtime,
    status::{Failure, Status, aq_status},
    table::SharedRuntime,
    thread_state,
};
use aquifer::{Budget, DevicePool, MemoryError, PinnedPool, PoolStats};
use serde_json::{Value, json};
use std::{
    ffi::{OsStr, c_char},
    os::unix::ffi::OsStrExt,
    path::Path,
};

/// The properties of a device.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct aq_device_facts {
    /// `sizeof(aq_device_facts)`.
    pub size: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Free bytes as reported by the driver.
    pub free_memory: u64,
    /// Granularity of physical handles in bytes; 0 without virtual memory management.
    pub granularity: u64,
    /// The driver's number of the device.
    pub ordinal: u32,
    /// Major compute capability: 9 of 9.0.
    pub major: u32,
    /// Minor compute capability: 0 of 9.0.
    pub minor: u32,
    /// The NUMA node of the nearest host memory; -1 if unknown.
    pub node: i32,
    /// Whether the device is simulated.
    pub simulated: u32,
    /// Whether it has virtual memory management.
    pub virtual_memory: u32,
    /// Its name, truncated to fit, zero-terminated.
    pub name: [c_char; 128],
    /// Its PCI address, likewise.
    pub pci_address: [c_char; 32],
}

/// Statistics of a pool.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct aq_stats {
    /// `sizeof(aq_stats)`.
    pub size: usize,
    /// Bytes in blocks, rounded.
    pub live: u64,
    /// Bytes in blocks, as requested.
    pub requested: u64,
    /// Free bytes in caches.
    pub cached: u64,
    /// Bytes freed, and pending for uses on other streams.
    pub pending: u64,
    /// Bytes held from the driver or kernel.
    pub physical: u64,
    /// Peak of `live`.
    pub peak_live: u64,
    /// Peak of `requested`.
    pub peak_requested: u64,
    /// Peak of `physical`.
    pub peak_physical: u64,
    /// Number of live blocks.
    pub blocks: u64,
    /// Number of successful allocations.
    pub allocations: u64,
    /// Number of blocks freed.
    pub frees: u64,
    /// Number of failed allocations.
    pub failures: u64,
    /// Number of times that memory was taken from the driver or kernel.
    pub growths: u64,
    /// Bytes given back to them.
    pub reaped: u64,
    /// Number of physical handles moved.
    pub moves: u64,
    /// Number of ranges that one stream took over from another.
    pub adoptions: u64,
    /// Number of events recorded.
    pub fences: u64,
    /// Number of waits of one stream for another.
    pub stream_waits: u64,
    /// Number of waits of the host.
    pub host_waits: u64,
    /// Number of allocations that the plan has served.
    pub plan_hits: u64,
    /// Number of allocations that it has not served while it was in use.
    pub plan_strays: u64,
    /// Those of `plan_strays` whose place was still held, or not ordered.
    pub plan_overlaps: u64,
    /// How often the position in the plan was lost and found again.
    pub plan_resynchronisations: u64,
}

impl From<PoolStats> for aq_stats {
    fn from(s: PoolStats) -> Self {
        Self {
            size: size_of::<Self>(),
            live: s.live,
            requested: s.requested,
            cached: s.cached,
            pending: s.pending,
            physical: s.physical,
            peak_live: s.peak_live,
            peak_requested: s.peak_requested,
            peak_physical: s.peak_physical,
            blocks: s.blocks,
            allocations: s.allocations,
            frees: s.frees,
            failures: s.failures,
            growths: s.growths,
            reaped: s.reaped,
            moves: s.moves,
            adoptions: s.adoptions,
            fences: s.fences,
            stream_waits: s.stream_waits,
            host_waits: s.host_waits,
            plan_hits: s.plan_hits,
            plan_strays: s.plan_strays,
            plan_overlaps: s.plan_overlaps,
            plan_resynchronisations: s.plan_resynchronisations,
        }
    }
}

/// Copies a text into a field of fixed length, truncated to fit, zero-terminated.
fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    for (to, from) in field[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
    field
}

fn facts(shared: &SharedRuntime, pool: &DevicePool) -> CallResult<aq_device_facts> {
    let info = pool.info();
    let lost = |e| MemoryError::driver(pool.device(), e);
    Ok(aq_device_facts {
        size: size_of::<aq_device_facts>(),
        memory: info.memory,
        free_memory: pool.driver().memory_info(pool.device()).map_err(lost)?.free,
        granularity: info.granularity,
        ordinal: pool.device().0,
        major: info.compute_capability.0,
        minor: info.compute_capability.1,
        node: shared
            .runtime
            .host()
            .topology
            .memory_near_device(info)
            .ok()
            .flatten()
            .and_then(|node| i32::try_from(node.0).ok())
            .unwrap_or(-1),
        simulated: u32::from(shared.sim.is_some()),
        virtual_memory: u32::from(info.virtual_memory),
        name: field(&info.name),
        pci_address: field(info.pci_address.as_deref().unwrap_or("")),
    })
}

/// Returns the number of devices of a runtime.
///
/// # Safety
/// 1. `count` is null, or points to a `uint32_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_count(runtime: aq_runtime, count: *mut u32) -> aq_status {
    enter(|| {
        let devices = thread_state::with(runtime, |shared| Ok(shared.runtime.devices().len()))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(count, devices as u32, "count") }
    })
}

/// Returns the properties of a device.
///
/// # Safety
/// 1. `facts` is null, or points to a struct that begins with its size, which the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device(
    runtime: aq_runtime,
    device: u32,
    facts: *mut aq_device_facts,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            let found = self::facts(shared, shared.pool(device)?)?;
            // SAFETY: 1. Guaranteed by the caller. 2. `repr(C)` and a `usize` first; four of its
            // ten words are pairs of `u32`, and the arrays end at a multiple of eight.
            unsafe { fill(facts, found, "facts") }
        })
    })
}

/// Returns the statistics of a device's pool.
///
/// # Safety
/// 1. `stats` is null, or points to a struct that begins with its size, which the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_device_stats(
    runtime: aq_runtime,
    device: u32,
    stats: *mut aq_stats,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            let found = shared.pool(device)?.stats().into();
            // SAFETY: 1. Guaranteed by the caller. 2. `repr(C)`, and words only.
            unsafe { fill(stats, found, "stats") }
        })
    })
}

/// Sets the peaks of a device's pool to what it holds now.
#[unsafe(no_mangle)]
pub extern "C" fn aq_reset_peaks(runtime: aq_runtime, device: u32) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            shared.pool(device)?.reset_peaks();
            Ok(())
        })
    })
}

/// Returns the statistics of the pool of pinned memory near a device.
///
/// # Safety
/// 1. `stats` is null, or points to a struct that begins with its size, which the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_stats(
    runtime: aq_runtime,
    device: u32,
    stats: *mut aq_stats,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            let found = shared.runtime.pinned_near(device as usize).stats().memory.into();
            // SAFETY: 1. Guaranteed by the caller. 2. `repr(C)`, and words only.
            unsafe { fill(stats, found, "stats") }
        })
    })
}

/// # Safety
/// 1. `limit` and `used` are null, or point to `uint64_t`s that the caller may write.
unsafe fn limit_of(budget: &Budget, limit: *mut u64, used: *mut u64) {
    // SAFETY: 1. Guaranteed by the caller.
    unsafe {
        write_out_if_set(limit, budget.limit());
        write_out_if_set(used, budget.used());
    }
}

/// Returns a device's limit, and its used bytes.
///
/// # Safety
/// 1. `limit` and `used` are null, or point to `uint64_t`s that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_limit(
    runtime: aq_runtime,
    device: u32,
    limit: *mut u64,
    used: *mut u64,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            // SAFETY: 1. Guaranteed by the caller.
            unsafe { limit_of(shared.pool(device)?.budget(), limit, used) };
            Ok(())
        })
    })
}

/// Sets a device's limit.
///
/// # Safety
/// 1. `excess` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_set_limit(
    runtime: aq_runtime,
    device: u32,
    limit: u64,
    excess: *mut u64,
) -> aq_status {
    enter(|| {
        let above = thread_state::with(runtime, |shared| {
            Ok(shared.pool(device)?.budget().set_limit(limit))
        })?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out_if_set(excess, above) };
        Ok(())
    })
}

/// Charges memory that the caller allocates itself to a device's limit.
#[unsafe(no_mangle)]
pub extern "C" fn aq_charge(runtime: aq_runtime, device: u32, bytes: u64) -> aq_status {
    enter(|| thread_state::with(runtime, |shared| shared.charge(device, bytes)))
}

/// Releases charged bytes.
#[unsafe(no_mangle)]
pub extern "C" fn aq_uncharge(runtime: aq_runtime, device: u32, bytes: u64) -> aq_status {
    enter(|| thread_state::with(runtime, |shared| shared.uncharge(device, bytes)))
}

/// Returns the limit of pinned memory, and its used bytes.
///
/// # Safety
/// 1. `limit` and `used` are null, or point to `uint64_t`s that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_pinned_limit(
    runtime: aq_runtime,
    limit: *mut u64,
    used: *mut u64,
) -> aq_status {
    enter(|| {
        thread_state::with(runtime, |shared| {
            // SAFETY: 1. Guaranteed by the caller.
            unsafe { limit_of(pinned(shared).budget(), limit, used) };
            Ok(())
        })
    })
}

/// Sets the limit of pinned memory.
///
/// # Safety
/// 1. `excess` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_set_pinned_limit(
    runtime: aq_runtime,
    limit: u64,
    excess: *mut u64,
) -> aq_status {
    enter(|| {
        let above =
            thread_state::with(runtime, |shared| Ok(pinned(shared).budget().set_limit(limit)))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out_if_set(excess, above) };
        Ok(())
    })
}

/// Returns any pinned pool. All pools of a runtime are under one budget.
fn pinned(shared: &SharedRuntime) -> &PinnedPool {
    shared.runtime.pinned_near(0)
}

/// Gives free device memory back to the driver.
///
/// # Safety
/// 1. `given` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_trim(
    runtime: aq_runtime,
    device: u32,
    keep: u64,
    given: *mut u64,
) -> aq_status {
    enter(|| {
        let bytes = thread_state::with(runtime, |shared| {
            let pool = shared.pool(device)?;
            let trimmed = pool.trim(keep)?;
            Ok(trimmed + elastic::release_idle(runtime, device, pool, keep))
        })?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out_if_set(given, bytes) };
        Ok(())
    })
}

fn stats_json(s: PoolStats) -> Value {
    json!({
        "live": s.live, "requested": s.requested, "cached": s.cached, "pending": s.pending, "physical": s.physical,
        "graphs": s.graphs, "peak_live": s.peak_live, "peak_requested": s.peak_requested,
        "peak_physical": s.peak_physical,
        "blocks": s.blocks, "allocations": s.allocations, "frees": s.frees, "failures": s.failures,
        "growths": s.growths, "reaped": s.reaped, "moves": s.moves, "adoptions": s.adoptions, "fences": s.fences,
        "stream_waits": s.stream_waits, "host_waits": s.host_waits,
        "plan_hits": s.plan_hits, "plan_strays": s.plan_strays, "plan_overlaps": s.plan_overlaps,
        "plan_resynchronisations": s.plan_resynchronisations,
    })
}

fn budget_json(budget: &Budget) -> Value {
    let f = budget.figures();
    let children: Vec<_> = budget.children().map(|child| budget_json(&child)).collect();
    json!({
        "name": f.name, "limit": f.limit, "used": f.used, "held": f.held, "guarantee": f.guarantee, "peak": f.peak,
        "stranded": f.stranded, "priority": f.priority, "children": children,
    })
}

fn device_json(pool: &DevicePool) -> Value {
    let info = pool.info();
    json!({
        "ordinal": pool.device().0, "name": info.name, "memory": info.memory, "granularity": info.granularity,
        "pci_address": info.pci_address, "virtual_memory": info.virtual_memory, "streams_leased": pool.streams().leased(),
        "budget": budget_json(pool.budget()), "stats": stats_json(pool.stats()),
        "findings": pool.findings().iter().map(ToString::to_string).collect::<Vec<_>>(),
    })
}

fn pinned_json(pool: &PinnedPool) -> Value {
    let stats = pool.stats();
    let regions: Vec<_> = pool
        .reports()
        .iter()
        .map(|report| {
            json!({
                "bytes": report.bytes, "pages": format!("{:?}", report.pages),
                "pinned_by": format!("{:?}", report.pinned_by),
                "shortfalls": report.shortfalls.iter().map(ToString::to_string).collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({
        "node": pool.node().map(|node| node.0), "pinned": stats.pinned, "in_magazines": stats.in_magazines,
        "refused_frees": stats.refused_frees, "stats": stats_json(stats.memory), "regions": regions,
    })
}

fn snapshot(shared: &SharedRuntime) -> Value {
    let runtime = &shared.runtime;
    let mut pools: Vec<&PinnedPool> = Vec::new();
    // The index past the last device selects the pool without a node.
    for index in (0..=runtime.devices().len()).rev() {
        let pool = runtime.pinned_near(index);
        if !pools.iter().any(|other| other.node() == pool.node()) {
            pools.push(pool);
        }
    }
    json!({
        "format": "aquifer-snapshot", "version": 1, "driver": runtime.driver().map(|driver| driver.name()),
        "devices": runtime.devices().iter().map(device_json).collect::<Vec<_>>(),
        "pinned_budget": budget_json(pinned(shared).budget()),
        "pinned": pools.into_iter().map(pinned_json).collect::<Vec<_>>(),
    })
}

/// Returns the state of a runtime as JSON.
///
/// # Safety
/// 1. `json` is null, or points to a `char *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_snapshot(runtime: aq_runtime, json: *mut *mut c_char) -> aq_status {
    enter(|| {
        require(json, "json")?;
        let text_json = thread_state::with(runtime, |shared| Ok(snapshot(shared).to_string()))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(json, text(&text_json), "json") }
    })
}

/// Writes the events and the contents of a device's pool to a file for PyTorch's memory viewer.
///
/// # Safety
/// 1. `path` is null, or a zero-terminated text.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_memory_snapshot(
    runtime: aq_runtime,
    device: u32,
    path: *const c_char,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. Guaranteed by the caller.
        let path = Path::new(OsStr::from_bytes(unsafe { c_str_of(path, "path") }?.to_bytes()));
        thread_state::with(runtime, |shared| {
            let pool = shared.pool(device)?;
            let history = shared.history.as_ref().ok_or_else(|| {
                let text = "the runtime keeps no events; make it with options->history";
                Failure::new(Status::Unsupported, text)
            })?;
            let saved = pool.snapshot(history.kept()).save(path);
            saved.map_err(|error| {
                Failure::new(Status::System, format!("{}: {error}", path.display()))
            })
        })
    })
}
