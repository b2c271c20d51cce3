//! The end of memory that graphs could use.

use crate::dedicated::DedicatedPool;
use aquifer_driver::DeviceRange;
use std::sync::Weak;

/// Reports to a validating driver, when dropped, that a range is no longer kept for graphs.
pub(super) struct GraphRangeRelease {
    pub(super) dedicated: Weak<DedicatedPool>,
    pub(super) range: DeviceRange,
}

impl Drop for GraphRangeRelease {
    fn drop(&mut self) {
        if let Some(observer) =
            self.dedicated.upgrade().as_ref().and_then(|dedicated| dedicated.driver.observer())
        {
            observer.let_go_by_graphs(self.range);
        }
    }
}
