//! Device memory for callers that name no stream, over the process's runtime.
//!
//! - Between `aq_fenced_alloc` and `aq_fenced_free` any stream may use a block.
//! - All blocks are allocated for one stream that no work is queued on. What its cache holds was
//!   freed after the device was idle. Memory of other streams joins by a wait on the device, which
//!   the host waits for before it hands out the block.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    device::free,
    entry::enter,
    process::{default_runtime, find_device, remember_device},
    status::aq_status,
    thread_state,
};
use aquifer::{MemoryError, Request};
use aquifer_driver::Relaxed;
use std::{
    ffi::{c_int, c_void},
    ptr::{null_mut, with_exposed_provenance_mut},
};

/// Allocates a block on the current device that work on any stream may use.
#[unsafe(no_mangle)]
pub extern "C" fn aq_fenced_alloc(bytes: usize) -> *mut c_void {
    let mut memory = null_mut();
    enter(|| {
        thread_state::with(default_runtime()?, |shared| {
            let pools = shared.runtime.devices();
            let current = pools.first().and_then(|pool| pool.driver().current_device());
            let found = pools.iter().position(|pool| Some(pool.device()) == current);
            let device = found.unwrap_or(0) as u32;
            let (pool, stream) = (shared.pool(device)?, shared.unused_stream(device)?);
            let address = pool.alloc_raw(stream, Request::bytes(bytes as u64))?;
            if let Err(error) = stream.timeline().synchronize() {
                let _ = pool.free_raw(address);
                return Err(error.into());
            }
            remember_device(address, device as c_int);
            memory = with_exposed_provenance_mut(address as usize);
            Ok(())
        })
    });
    memory
}

/// Waits for the device of a block, and frees the block.
#[unsafe(no_mangle)]
pub extern "C" fn aq_fenced_free(memory: *mut c_void) -> aq_status {
    enter(|| {
        let (runtime, address) = (default_runtime()?, memory.addr() as u64);
        if address == 0 {
            return Ok(());
        }
        let device = find_device(runtime, address)?;
        thread_state::with(runtime, |shared| {
            let pool = shared.pool(device)?;
            let (driver, device) = (pool.driver(), pool.device());
            // A capture of another thread goes on.
            let _relaxed = Relaxed::enter(&**driver);
            let waited = driver.device_synchronize(device);
            waited.map_err(|error| MemoryError::driver(device, error).into())
        })?;
        free(runtime, device, address)
    })
}
