//! Small definitions that the rest of the crate stands on. They depend on neither caches nor pools.

pub(crate) mod address_directory;
pub(crate) mod address_map;
pub(crate) mod append_list;
pub(crate) mod dependencies;
pub(crate) mod driver;
pub(crate) mod errors;
pub(crate) mod extent;
pub(crate) mod freed_addresses;
pub(crate) mod lazy_box;
pub(crate) mod live_blocks;
pub(crate) mod live_bytes;
pub(crate) mod merged;
pub(crate) mod part_bounds;
pub(crate) mod pending;
pub(crate) mod policy_params;
pub(crate) mod reclaim_cost;
pub(crate) mod record;
pub(crate) mod released;
pub(crate) mod retained;
pub(crate) mod stranded;
pub(crate) mod usage;
pub(crate) mod waits;
pub(crate) mod weak_list;
