//! A ledger whose file is overwritten, against its model.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| aquifer_programs::ledger::run(bytes));
