//! The messages by which processes share blocks, as strangers send them.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::share::run(bytes));
