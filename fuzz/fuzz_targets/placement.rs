//! A placer over simulated devices against its model.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::placement::run(bytes));
