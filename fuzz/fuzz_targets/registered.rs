//! Pools of registered memory and transfers between agents against their model.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::registered::run(bytes));
