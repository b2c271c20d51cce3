//! Arenas and wrappers against what their users hold.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::arena::run(bytes));
