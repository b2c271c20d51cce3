//! A program of `aquifer-programs`: the one with the name of this binary.
#![no_main]
#![expect(unsafe_code, reason = "defines a symbol that the sanitizer looks up")]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let target = aquifer_programs::targets::find(env!("CARGO_BIN_NAME"));
    (target.expect("a program for each target").run)(bytes);
});

/// Returns the suppressions that `LeakSanitizer` reads when it starts.
///
/// The C library registers destructors of thread-locals in nodes that only the thread itself
/// refers to, and the standard library keeps what `thread::current` returns in such a thread-local.
/// A check while a worker thread of the library starts or ends can miss that reference, and reports
/// the node or the 64 bytes of the other as a leak. Both are freed when the thread has ended.
// SAFETY: 1. LeakSanitizer declares this function with this signature. 2. no other definition is
// linked. 3. the string is static and ends with a zero.
#[unsafe(no_mangle)]
extern "C" fn __lsan_default_suppressions() -> *const core::ffi::c_char {
    c"leak:__cxa_thread_atexit_impl\nleak:std::thread::current::init_current".as_ptr()
}
