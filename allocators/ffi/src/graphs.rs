//! Memory of captured graphs and of PyTorch's memory pools, by PyTorch's names for them.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::{
    entry::{enter, put},
    status::{Failure, Status, aq_status},
};
use std::ffi::{c_int, c_void};

/// Whether work on a stream belongs.
pub type aq_torch_filter = Option<unsafe extern "C" fn(data: *mut c_void, stream: *mut c_void) -> c_int>;

fn unsupported() -> Failure {
    Failure::new(Status::Unsupported, "graphs cannot be captured over this memory yet")
}

/// Begins to serve a pool's streams out of it.
///
/// # Safety
/// 1. `filter` may be called with `data` by any thread, until `drop` is called with it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_begin(
    _device: c_int,
    _first: u64,
    _second: u64,
    _filter: aq_torch_filter,
    _data: *mut c_void,
    _drop: Option<unsafe extern "C" fn(data: *mut c_void)>,
) -> aq_status {
    enter(|| Err(unsupported()))
}

/// Ends it.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_end(_device: c_int, _first: u64, _second: u64) -> aq_status {
    enter(|| Err(unsupported()))
}

/// A user more.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_retain(_device: c_int, _first: u64, _second: u64) -> aq_status {
    enter(|| Err(unsupported()))
}

/// A user less.
#[unsafe(no_mangle)]
pub extern "C" fn aq_torch_pool_release(_device: c_int, _first: u64, _second: u64) -> aq_status {
    enter(|| Err(unsupported()))
}

/// How many users there are.
///
/// # Safety
/// 1. `uses` is null, or points to an `int` that the caller may write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_torch_pool_uses(
    _device: c_int,
    _first: u64,
    _second: u64,
    uses: *mut c_int,
) -> aq_status {
    // SAFETY: 1. the caller's.
    enter(|| unsafe { put(uses, 0, "uses") })
}
