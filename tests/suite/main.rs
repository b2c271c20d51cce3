//! The tests of the facade that can share one process and need no GPU.

mod adapters;
mod copies;
mod forgotten;
mod frames;
mod futures;
mod giving_way;
#[path = "../support/itself.rs"]
mod itself;
#[path = "../../allocators/host/tests/suite/machine/mod.rs"]
mod machine;
mod placement;
mod planes;
mod pressure;
mod runtime;
mod sharing;
mod sources;
#[path = "../support/mod.rs"]
mod support;
mod unwinding;
mod wrappers_over_device;
