//! The driver's families over the simulated machine, a file for each.

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
