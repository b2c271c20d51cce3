//! The tests of this crate.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a support function that fails is a failed test"
)]

mod logs;
mod plans;
mod recorded;
mod rmm;
mod snapshots;
mod wild;
