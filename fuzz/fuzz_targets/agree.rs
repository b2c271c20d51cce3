//! The same program on simulated devices that do work at different times.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::agree::run(bytes));
