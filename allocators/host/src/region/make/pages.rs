//! The choice of the kind of pages.

use super::RegionBuilder;
use crate::{
    region::report::{Cause, PageTier},
    topology::ThpMode,
};

impl PageTier {
    /// Returns the next lower tier.
    pub(super) fn below(self) -> Self {
        match self {
            Self::HugeTlb => Self::Transparent,
            Self::Transparent | Self::Base | Self::DriverChosen => Self::Base,
        }
    }
}

impl RegionBuilder<'_> {
    /// Returns the best available tier, up to `wanted`.
    pub(super) fn best_tier(&mut self, wanted: PageTier) -> PageTier {
        let mut tier = wanted;
        while let Some(page) = tier.page() {
            match self.pool_has(page) {
                Ok(()) => return tier,
                Err(cause) => self.fell_short(cause),
            }
            tier = tier.below();
        }
        // Shared memory has its own setting for huge pages, which only applies to `shmem`.
        if tier < PageTier::Transparent || self.request.share_on_fork {
            return PageTier::Base;
        }
        if matches!(self.host.topology.thp(), None | Some(ThpMode::Never)) {
            self.fell_short(Cause::NotOffered);
            return PageTier::Base;
        }
        PageTier::Transparent
    }

    /// Checks that the pool of huge pages of `page` bytes has enough free pages.
    fn pool_has(&self, page: usize) -> Result<(), Cause> {
        if !self.bytes.is_multiple_of(page) {
            return Err(Cause::NotHuge);
        }
        let needed = (self.bytes / page) as u64;
        // Queried now, since the number changes, and touching a page of an exhausted pool is a
        // fault.
        let found = self.host.topology.free_huge_pages(self.node, page as u64);
        let free = found.ok().flatten();
        match free {
            Some(free) if free >= needed => Ok(()),
            free => Err(Cause::HugePages { needed, free }),
        }
    }

    /// Returns whether a lower tier may help after a failure: the pool of huge pages had fewer
    /// pages than reported, or another process has used them.
    pub(super) fn may_lower_tier(tier: PageTier, cause: &Cause) -> bool {
        tier.page().is_some() && !matches!(cause, Cause::Driver(_))
    }
}
