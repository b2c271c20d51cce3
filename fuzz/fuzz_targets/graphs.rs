//! Captures, launches and what they draw from, under the oracle.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::graphs::run(bytes));
