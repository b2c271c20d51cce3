//! Staged transfers under the oracle.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::stager::run(bytes));
