//! Small definitions that the rest of the crate stands on. They depend on neither caches nor pools.

pub(crate) mod addresses;
pub(crate) mod driver;
pub(crate) mod extent;
pub(crate) mod lists;
pub(crate) mod pending;
pub(crate) mod policy_params;
pub(crate) mod record;
pub(crate) mod released;
pub(crate) mod usage;
pub(crate) mod waits;
