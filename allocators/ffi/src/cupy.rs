//! What `cupy.cuda.CFunctionAllocator` calls, over the runtime that serves PyTorch: a process may
//! have both.
#![expect(unsafe_code, reason = "exports functions to C")]

use crate::torch::{aq_torch_alloc, aq_torch_free};
use std::ffi::{c_int, c_void};

/// `malloc_func`. The parameter is the stream.
///
/// # Safety
/// 1. As [`aq_alloc_aligned`](crate::device::aq_alloc_aligned) for `stream`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aq_cupy_alloc(
    stream: *mut c_void,
    size: usize,
    device: c_int,
) -> *mut c_void {
    // What does not fit an `isize` is refused there as negative.
    // SAFETY: 1. the caller's.
    unsafe { aq_torch_alloc(size as isize, device, stream) }
}

/// `free_func`.
#[unsafe(no_mangle)]
pub extern "C" fn aq_cupy_free(stream: *mut c_void, memory: *mut c_void, device: c_int) {
    aq_torch_free(memory, 0, device, stream);
}
