//! The tests of this crate that can share one process.

mod adopted;
mod advice;
mod bounded;
#[path = "../../../../tests/support/counting.rs"]
mod counting;
mod debugging;
mod driver_backed;
mod foreign;
mod giving_way;
mod gone;
mod graph_launches;
mod graphs;
mod handles;
mod heap;
mod last;
mod launch;
mod leasing;
mod lifetime;
mod lines;
mod machines;
mod modes;
mod pages;
mod park;
mod parts;
mod peers;
mod pressure;
mod raw;
mod reserved;
mod retention;
mod shared;
mod shortage;
mod sinks;
mod stable;
mod streams;
mod support;
mod tenants;
