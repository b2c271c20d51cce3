//! Pinned pools against their owners.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::pinned::run(bytes));
