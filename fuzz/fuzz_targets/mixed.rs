//! Everything at once, as a server does it.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::mixed::run(bytes));
