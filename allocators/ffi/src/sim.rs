//! The simulated device, for tests of those who use the library from C.
#![expect(
    unsafe_code,
    reason = "exports functions to C, and destroys streams of the simulated driver"
)]

use crate::{
    device::{access, handle},
    entry::{Answer, enter, put, text, wanted},
    here,
    runtime::{Shared, aq_runtime, ordinal},
    status::{Failure, Status, aq_status},
};
use aquifer::{
    DeviceRange, RawStream,
    base::MemoryError,
    driver::{CaptureMode, RawGraphExec},
    sim::Sim,
};
use std::ffi::{c_char, c_void};

fn sim(shared: &Shared) -> Answer<&Sim> {
    shared.sim.as_ref().ok_or_else(|| {
        Failure::new(Status::Unsupported, "the runtime's devices are not simulated: AQ_DRIVER_SIM")
    })
}

/// A stream of a simulated device, by its handle: any number is one, or is refused.
fn raw(shared: &Shared, device: u32, stream: *mut c_void) -> Answer<RawStream> {
    // SAFETY: 1. the simulated driver knows its streams, and refuses what is none.
    Ok(unsafe { RawStream::from_raw(ordinal(shared, device)?, handle(stream)) })
}

/// Runs `work` with the simulated driver and a device's own number.
fn with<R>(
    runtime: aq_runtime,
    device: u32,
    work: impl FnOnce(&Shared, &Sim, aquifer::DeviceId) -> Result<R, aquifer::DriverError>,
) -> Answer<R> {
    here::with(runtime, |shared| {
        let device = ordinal(shared, device)?;
        Ok(work(shared, sim(shared)?, device)
            .map_err(|error| MemoryError::driver(device, error))?)
    })
}

/// A stream of the simulated driver, as another library's.
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
        wanted(stream, "stream")?;
        let made = with(runtime, device, |_, sim, device| sim.driver().stream_create(device, 0))?;
        let made = std::ptr::without_provenance_mut(made.handle() as usize);
        // SAFETY: 1. the caller's.
        unsafe { put(stream, made, "stream") }
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
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        // SAFETY: 1. the simulated driver refuses what is none of its streams; whoever uses one
        // after its end is told.
        with(runtime, device, |_, sim, _| unsafe { sim.driver().stream_destroy(raw) })
    })
}

/// Makes work queued on a stream from now on wait for all that is queued on another now.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_stream_wait(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
    other: *mut c_void,
) -> aq_status {
    enter(|| {
        let (stream, other) = here::with(runtime, |shared| {
            Ok((raw(shared, device, stream)?, raw(shared, device, other)?))
        })?;
        with(runtime, device, |_, sim, device| {
            let driver = sim.driver();
            let event = driver.event_create(device)?;
            let waits = driver
                .event_record(event, other)
                .and_then(|()| driver.stream_wait_event(stream, event));
            // SAFETY: 1. made above, and nobody else knows it.
            waits.and(unsafe { driver.event_destroy(event) })
        })
    })
}

/// Waits until all that is queued on a stream is done.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_stream_synchronize(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, _| sim.driver().stream_synchronize(raw))
    })
}

/// Opens a capture on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_capture_begin(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, _| sim.driver().capture_begin(raw, CaptureMode::Global))
    })
}

/// Ends it, and makes a graph that can be launched.
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
        wanted(graph, "graph")?;
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        let made = with(runtime, device, |_, sim, _| {
            let driver = sim.driver();
            let template = driver.capture_end(raw)?;
            let made = driver.graph_instantiate(template);
            // SAFETY: 1. made above, and nobody else knows it.
            unsafe { driver.graph_destroy(template) }?;
            made
        })?;
        // SAFETY: 1. the caller's.
        unsafe { put(graph, made.handle(), "graph") }
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
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |_, sim, device| {
            // SAFETY: 1. the simulated driver refuses what is none of its graphs.
            let graph = unsafe { RawGraphExec::from_raw(device, graph) };
            // SAFETY: 1. 2. the simulated device has no memory of anybody's but its own, and
            // reports what is wrong.
            unsafe { sim.driver().graph_launch(graph, raw) }
        })
    })
}

/// Destroys a graph.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_graph_destroy(runtime: aq_runtime, device: u32, graph: u64) -> aq_status {
    enter(|| {
        with(runtime, device, |_, sim, device| {
            // SAFETY: 1. the simulated driver refuses what is none of its graphs.
            let graph = unsafe { RawGraphExec::from_raw(device, graph) };
            // SAFETY: 1. whoever uses it after its end is refused.
            unsafe { sim.driver().graph_exec_destroy(graph) }
        })
    })
}

/// Queues work that touches a range.
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
        let raw = here::with(runtime, |shared| raw(shared, device, stream))?;
        with(runtime, device, |shared, sim, device| {
            let pool = shared.runtime.by_ordinal(device).ok();
            // Of a block that is out it is known whose it is; what touches it later is told apart.
            let generation =
                pool.and_then(|pool| pool.share_raw(address).ok()).map(|block| block.generation());
            sim.access(raw, DeviceRange { device, address, bytes }, access, generation)
        })
    })
}

/// What the simulated devices have found wrong.
///
/// # Safety
/// 1. `count` is null, or points to a `uint64_t` that the caller may write. 2. `report` is null, or
///    points to a `char *` that he may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_sim_violations(
    runtime: aq_runtime,
    count: *mut u64,
    report: *mut *mut c_char,
) -> aq_status {
    enter(|| {
        let found = here::with(runtime, |shared| Ok(sim(shared)?.violations()))?;
        // SAFETY: 1. the caller's.
        unsafe { put(count, found.len() as u64, "count") }?;
        if !report.is_null() {
            let said: Vec<String> = found.iter().map(ToString::to_string).collect();
            // SAFETY: 2. the caller's.
            unsafe { put(report, text(&said.join("\n")), "report") }?;
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

/// Panics inside of the library, to see that it goes no further.
#[unsafe(no_mangle)]
pub extern "C" fn aq_sim_panic(runtime: aq_runtime) -> aq_status {
    #[expect(clippy::panic, reason = "what it is for")]
    enter(|| here::with(runtime, |shared| sim(shared).map(|_| panic!("planted by aq_sim_panic"))))
}
