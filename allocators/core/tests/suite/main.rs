//! The tests of this crate that can share one process.

mod adapter;
mod budget;
mod budget_asking;
mod budget_lease;
mod budget_reclaim;
mod budget_shared;
mod budget_tree;
mod budget_wait;
mod events;
mod explain;
mod ids;
mod messages;
#[cfg(feature = "serde")]
mod serialized;
mod sinks;
