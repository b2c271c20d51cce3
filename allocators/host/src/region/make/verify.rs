//! Queries the kernel for the location of pages.

use super::{BuiltRegion, RegionBuilder};
use crate::{
    kernel::Span,
    region::report::{Cause, PageTier, PlacedBy, Placement, Step},
    topology::NodeId,
};
use std::collections::BTreeMap;

/// How many pages of a region are queried, evenly spread. Querying all takes about as long as
/// populating, so only strict regions do that. This covers every page of 16 MiB.
const SAMPLE: usize = 4096;

impl RegionBuilder<'_> {
    /// Queries where the pages of a region are.
    pub(super) fn verify(&mut self, made: &BuiltRegion) -> Placement {
        let pages = made.span.len.div_ceil(self.page);
        let step = if self.is_strict() { 1 } else { pages.div_ceil(SAMPLE) };
        let mut placement = self.query_placement(made.span, made.pages, step);
        placement.by = made.placed_by;
        placement
    }

    /// Queries every `step`th page of a part.
    pub(super) fn query_placement(&mut self, part: Span, tier: PageTier, step: usize) -> Placement {
        let mut placement =
            Placement { wanted: self.node, by: PlacedBy::Nobody, pages: Vec::new(), unknown: 0 };
        // A huge page from the pool lies on one node, and counts as the base pages it contains.
        let weight = tier.page().map_or(1, |huge| huge / self.page);
        let step = step.next_multiple_of(weight);
        let pages = part.len.div_ceil(self.page);
        let mut counts = BTreeMap::<NodeId, u64>::new();
        let (start, page) = (part.start, self.page);
        let mut addresses = (0..pages).step_by(step).map(|n| start + n * page);
        loop {
            let batch: Vec<usize> = addresses.by_ref().take(4096).collect();
            if batch.is_empty() {
                break;
            }
            let nodes = self.host.kernel.nodes_of(&batch).unwrap_or_else(|e| {
                self.fell_short(Step::Verify, Cause::System(e));
                vec![-1; batch.len()]
            });
            for node in nodes {
                match u32::try_from(node) {
                    Ok(node) => *counts.entry(NodeId(node)).or_default() += weight as u64,
                    Err(_) => placement.unknown += weight as u64,
                }
            }
        }
        placement.pages = counts.into_iter().collect();
        placement
    }
}
