//! The tests of this crate that can share one process.

mod adoption;
mod capture;
mod copies;
#[path = "../../../../tests/support/counting.rs"]
mod counting;
mod epochs;
mod heap;
mod leases;
mod leftovers;
mod support;
mod timeline;
mod uses;
