//! Pools that take from each other against their budgets.
#![no_main]

mod leaks;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    aquifer_programs::pressure::run(bytes);
});
