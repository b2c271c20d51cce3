//! What `AddressSanitizer` is told: which memory is nobody's.
//!
//! An allocator that keeps its free memory mapped hides it from the sanitizer, unless it says so. A
//! program that touches what has been said to be nobody's is stopped at that instruction, as it is
//! for `malloc`. Builds without the sanitizer have none of this.
#![cfg_attr(asan, expect(unsafe_code, reason = "calls AddressSanitizer's runtime"))]

#[cfg(asan)]
use std::ffi::c_void;
use std::ptr::NonNull;

/// Whether this build has the sanitizer, and whoever touches poisoned memory is stopped.
pub const IS_BUILT_IN: bool = cfg!(asan);

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(start: *const c_void, bytes: usize);
    fn __asan_unpoison_memory_region(start: *const c_void, bytes: usize);
}

/// Nobody may touch these bytes from now on. They are told apart exactly where they end at a
/// multiple of eight, or what is behind them is poisoned too; otherwise the last few stay as they
/// were.
///
/// Whoever gives the memory back to where it came from unpoisons it before.
///
/// ```
/// use aquifer_core::sanitizer;
/// use std::ptr::NonNull;
/// let mut block = vec![0u8; 64];
/// let start = NonNull::new(block.as_mut_ptr()).unwrap();
/// sanitizer::poison(start, 64); // a read of `block[0]` would end a program that is built with the sanitizer
/// sanitizer::unpoison(start, 64);
/// assert_eq!(block[0], 0);
/// ```
#[inline(always)]
pub fn poison(start: NonNull<u8>, bytes: usize) {
    #[cfg(asan)]
    // SAFETY: 1. it notes in memory of its own that the bytes are not to be touched, and touches
    // none of them.
    unsafe {
        __asan_poison_memory_region(start.as_ptr().cast::<c_void>(), bytes);
    }
    #[cfg(not(asan))]
    let _ = (start, bytes);
}

/// These bytes are somebody's. So are those before the first in the same eight.
#[inline(always)]
pub fn unpoison(start: NonNull<u8>, bytes: usize) {
    #[cfg(asan)]
    // SAFETY: 1. as in `poison`.
    unsafe {
        __asan_unpoison_memory_region(start.as_ptr().cast::<c_void>(), bytes);
    }
    #[cfg(not(asan))]
    let _ = (start, bytes);
}
