//! The functions for `cupy.cuda.CFunctionAllocator`. They use the runtime that serves PyTorch,
//! since a process may use both.
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
    // SAFETY: 1. Guaranteed by the caller. A size above `isize::MAX` becomes negative, and is
    // refused.
    unsafe { aq_torch_alloc(size as isize, device, stream) }
}

/// `free_func`.
#[unsafe(no_mangle)]
pub extern "C" fn aq_cupy_free(stream: *mut c_void, memory: *mut c_void, device: c_int) {
    aq_torch_free(memory, 0, device, stream);
}
