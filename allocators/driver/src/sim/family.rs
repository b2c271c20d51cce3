//! The driver's families implemented by the simulated machine, one file for each.

pub(super) mod copies;
mod devices;
mod events;
mod graphs;
mod host_memory;
mod ipc;
mod memory;
mod observe;
mod physical;
mod streams;
