//! The simulated device, for tests of programs that use the library from C.
#![expect(
    unsafe_code,
    reason = "exports functions to C, and destroys streams of the simulated driver"
)]

use crate::{
    device::{access, handle},
    entry::{CallResult, enter, require, text, write_out},
    runtime::{aq_runtime, ordinal},
    status::{Failure, Status, aq_status},
    table::SharedRuntime,
    thread_state,
};
use aquifer::{
    DeviceRange, MemoryError, RawStream, driver::CaptureMode, error::DriverError, sim::Sim,
};
use aquifer_driver::RawGraphExec;
use std::ffi::{c_char, c_void};

fn sim(shared: &SharedRuntime) -> CallResult<&Sim> {
    shared.sim.as_ref().ok_or_else(|| {
        Failure::new(Status::Unsupported, "the runtime's devices are not simulated: AQ_DRIVER_SIM")
    })
}

/// Returns the stream of a simulated device with this handle. The driver refuses invalid handles.
fn raw(shared: &SharedRuntime, device: u32, stream: *mut c_void) -> CallResult<RawStream> {
    // SAFETY: 1. The simulated driver checks handles, and refuses those that are no stream.
    Ok(unsafe { RawStream::from_raw(ordinal(shared, device)?, handle(stream)) })
}

/// Runs `work` with the simulated driver and a device's ordinal.
fn with<R>(
    runtime: aq_runtime,
    device: u32,
    work: impl FnOnce(&SharedRuntime, &Sim, aquifer::DeviceId) -> Result<R, DriverError>,
) -> CallResult<R> {
    thread_state::with(runtime, |shared| {
        let device = ordinal(shared, device)?;
        Ok(work(shared, sim(shared)?, device)
            .map_err(|error| MemoryError::driver(device, error))?)
    })
}

/// Creates a stream of the simulated driver, as another library would.
///
/// # Safety
/// 1. `stream` is null, or points to a `void *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_sim_stream_create(
    runtime: aq_runtime,
    device: u32,
    stream: *mut *mut c_void,
) -> aq_status {
    enter(|| {
        require(stream, "stream")?;
        let made = with(runtime, device, |_, sim, device| sim.driver().stream_create(device, 0))?;
        let made = std::ptr::without_provenance_mut(made.handle() as usize);
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(stream, made, "stream") }
    })
}

/// Destroys a stream of the simulated driver.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_stream_destroy(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        // SAFETY: 1. The simulated driver refuses handles that are no stream, and reports uses
        // after the destruction.
        with(runtime, device, |_, sim, _| unsafe { sim.driver().stream_destroy(raw) })
    })
}

/// Makes work queued on a stream from now on wait for all work queued on another by now.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_stream_wait(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
    other: *mut c_void,
) -> aq_status {
    enter(|| {
        let (stream, other) = thread_state::with(runtime, |shared| {
            Ok((raw(shared, device, stream)?, raw(shared, device, other)?))
        })?;
        with(runtime, device, |_, sim, device| {
            let driver = sim.driver();
            let event = driver.event_create(device)?;
            let waits = driver
                .event_record(event, other)
                .and_then(|()| driver.stream_wait_event(stream, event));
            // SAFETY: 1. The event was created above, and no other code has it.
            waits.and(unsafe { driver.event_destroy(event) })
        })
    })
}

/// Waits until all work queued on a stream is done.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_stream_synchronize(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, _| sim.driver().stream_synchronize(raw))
    })
}

/// Begins a capture on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_capture_begin(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, _| sim.driver().capture_begin(raw, CaptureMode::Global))
    })
}

/// Ends a capture, and instantiates its graph.
///
/// # Safety
/// 1. `graph` is null, or points to a `uint64_t` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_sim_capture_end(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
    graph: *mut u64,
) -> aq_status {
    enter(|| {
        require(graph, "graph")?;
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        let made = with(runtime, device, |_, sim, _| {
            let driver = sim.driver();
            let template = driver.capture_end(raw)?;
            let made = driver.graph_instantiate(template);
            // SAFETY: 1. The graph was created above, and no other code has it.
            unsafe { driver.graph_destroy(template) }?;
            made
        })?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(graph, made.handle(), "graph") }
    })
}

/// Launches a graph.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_graph_launch(
    runtime: aq_runtime,
    device: u32,
    graph: u64,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, device| {
            // SAFETY: 1. The simulated driver refuses handles that are no graph.
            let graph = unsafe { RawGraphExec::from_raw(device, graph) };
            // SAFETY: 1. 2. The simulated device accesses only its own memory, and reports
            // violations.
            unsafe { sim.driver().graph_launch(graph, raw) }
        })
    })
}

/// Destroys a graph.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_graph_destroy(runtime: aq_runtime, device: u32, graph: u64) -> aq_status {
    enter(|| {
        with(runtime, device, |_, sim, device| {
            // SAFETY: 1. The simulated driver refuses handles that are no graph.
            let graph = unsafe { RawGraphExec::from_raw(device, graph) };
            // SAFETY: 1. A later use of the handle is refused.
            unsafe { sim.driver().graph_exec_destroy(graph) }
        })
    })
}

/// Queues work that accesses a range.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_touch(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
    address: u64,
    bytes: u64,
    access: u32,
) -> aq_status {
    enter(|| {
        let access = self::access(access)?;
        let raw = thread_state::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |shared, sim, device| {
            let pool = shared.runtime.by_ordinal(device).ok();
            // For a live block the access carries its generation, so a late access is distinguished
            // from one to the next block.
            let generation =
                pool.and_then(|pool| pool.share_raw(address).ok()).map(|block| block.generation());
            sim.access(raw, DeviceRange { device, address, bytes }, access, generation)
        })
    })
}

/// Returns the violations that the simulated devices have found.
///
/// # Safety
/// 1. `count` is null, or points to a `uint64_t` that the caller may write. 2. `report` is null, or
///    points to a `char *` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_sim_violations(
    runtime: aq_runtime,
    count: *mut u64,
    report: *mut *mut c_char,
) -> aq_status {
    enter(|| {
        let found = thread_state::with(runtime, |shared| Ok(sim(shared)?.violations()))?;
        // SAFETY: 1. Guaranteed by the caller.
        unsafe { write_out(count, found.len() as u64, "count") }?;
        if !report.is_null() {
            let lines: Vec<String> = found.iter().map(ToString::to_string).collect();
            // SAFETY: 2. Guaranteed by the caller.
            unsafe { write_out(report, text(&lines.join("\n")), "report") }?;
        }
        Ok(())
    })
}

/// Loses a simulated device, as a sticky error would.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_lose(runtime: aq_runtime, device: u32) -> aq_status {
    enter(|| {
        with(runtime, device, |_, sim, device| {
            sim.lose_device(device);
            Ok(())
        })
    })
}

/// Panics inside of the library, to test that the panic is contained.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_panic(runtime: aq_runtime) -> aq_status {
    #[expect(clippy::panic, reason = "what it is for")]
    enter(|| {
        thread_state::with(runtime, |shared| sim(shared).map(|_| panic!("planted by aq_sim_panic")))
    })
}
