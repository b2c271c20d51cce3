//! Programs under a plan, with changes, against the oracle.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::plan::run(bytes));
