//! Device memory through the wrappers, and frames of it.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::adapters::run(bytes));
