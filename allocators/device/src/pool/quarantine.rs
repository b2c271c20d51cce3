//! The quarantine as a hook of its pool.

use crate::{base::waits::deadline, checked::CheckedPool, pool_core::PoolHook};
use std::sync::{Arc, Weak};

/// Lets the pool release the quarantine before it reclaims from others. It has no reference of its
/// own, since the quarantine has one to the pool.
pub(crate) struct QuarantineHook(Weak<CheckedPool>);

impl QuarantineHook {
    pub(crate) fn new(checked: &Arc<CheckedPool>) -> Self {
        Self(Arc::downgrade(checked))
    }
}

impl PoolHook for QuarantineHook {
    fn release_held_back(&self, bytes: u64) -> Option<u64> {
        let checked = self.0.upgrade()?;
        Some(checked.reclaim_quarantine(bytes, deadline(checked.wait)))
    }
}
