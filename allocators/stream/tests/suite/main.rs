//! The tests of this crate that can share one process.

mod adoption;
mod capture;
mod copies;
mod epochs;
mod leases;
mod leftovers;
mod support;
mod timeline;
mod uses;
