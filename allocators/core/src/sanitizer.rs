//! Poisoning of free memory for `AddressSanitizer`.
//!
//! Without it, the free memory that an allocator keeps mapped looks valid to the sanitizer. With
//! it, an access to free memory stops the program at that instruction, as for `malloc`. Builds
//! without the sanitizer contain none of this.
#![cfg_attr(asan, expect(unsafe_code, reason = "calls AddressSanitizer's runtime"))]

#[cfg(asan)]
use std::ffi::c_void;
use std::ptr::NonNull;

/// Whether this build has the sanitizer, so that an access to poisoned memory stops the program.
pub const IS_BUILT_IN: bool = cfg!(asan);

#[cfg(asan)]
unsafe extern "C" {
    fn __asan_poison_memory_region(start: *const c_void, bytes: usize);
    fn __asan_unpoison_memory_region(start: *const c_void, bytes: usize);
}

/// Marks bytes as not accessible. The end is exact if it is a multiple of eight, or if the bytes
/// behind it are poisoned too. Otherwise the last few bytes keep their state.
///
/// Memory must be unpoisoned before it is returned to its source.
///
/// ```
/// use aquifer_core::sanitizer;
/// use std::ptr::NonNull;
/// let mut block = vec![0u8; 64];
/// let start = NonNull::new(block.as_mut_ptr()).unwrap();
/// sanitizer::poison(start, 64); // now a read of `block[0]` stops a sanitized program
/// sanitizer::unpoison(start, 64);
/// assert_eq!(block[0], 0);
/// ```
#[inline(always)]
pub fn poison(start: NonNull<u8>, bytes: usize) {
    #[cfg(asan)]
    // SAFETY: 1. the call marks the bytes in its own shadow memory, and accesses none of them.
    unsafe {
        __asan_poison_memory_region(start.as_ptr().cast::<c_void>(), bytes);
    }
    #[cfg(not(asan))]
    let _ = (start, bytes);
}

/// Marks bytes as accessible, including those before the first one in the same group of eight.
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
