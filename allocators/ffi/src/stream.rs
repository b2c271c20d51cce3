//! The lifetime of foreign streams.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{device::handle, entry::enter, runtime::aq_runtime, status::aq_status, thread_state};
use std::ffi::c_void;

/// Registers a stream whose owner will retire it.
///
/// # Safety
/// 1. `stream` is one of the driver's default streams or a stream of the device that is alive.
/// 2. It stays alive until `aq_stream_retire` has returned for it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_stream_register(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    enter(|| {
        // SAFETY: 1. 2. Guaranteed by the caller.
        thread_state::with(runtime, |shared| unsafe { shared.register(device, handle(stream)) })
    })
}

/// Retires a stream.
///
/// # Safety
/// 1. `stream` is one of the driver's default streams or a stream of the device that is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_stream_retire(
    runtime: aq_runtime,
    device: u32,
    stream: *mut c_void,
) -> aq_status {
    // SAFETY: 1. Guaranteed by the caller.
    enter(|| thread_state::with(runtime, |shared| unsafe { shared.retire(device, handle(stream)) }))
}
