//! One device whose blocks are checked, against its model.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::device::run_checked(bytes));
