//! Queries the kernel for the location of pages.

use super::{BuiltRegion, RegionBuilder};
use crate::{
    region::report::{Cause, Placement},
    topology::NodeId,
};
use std::collections::BTreeMap;

/// How many pages of a region are queried, evenly spread. Querying all takes about as long as
/// populating, so only strict regions do that. This covers every page of 16 MiB.
const SAMPLE: usize = 4096;

impl RegionBuilder<'_> {
    /// Queries where the pages of a region are.
    pub(super) fn verify(&mut self, made: &BuiltRegion) -> Placement {
        let (start, page) = (made.span.start, self.page);
        let pages = made.span.len.div_ceil(page);
        // A huge page from the pool lies on one node, and counts as the base pages it contains.
        let weight = made.pages.page().map_or(1, |huge| huge / page);
        let step = if self.is_strict() { 1 } else { pages.div_ceil(SAMPLE) };
        let mut addresses =
            (0..pages).step_by(step.next_multiple_of(weight)).map(|n| start + n * page);
        let (mut counts, mut unknown) = (BTreeMap::<NodeId, u64>::new(), 0);
        loop {
            let batch: Vec<usize> = addresses.by_ref().take(SAMPLE).collect();
            if batch.is_empty() {
                break;
            }
            let nodes = self.host.kernel.nodes_of(&batch).unwrap_or_else(|e| {
                self.fell_short(Cause::System(e));
                vec![-1; batch.len()]
            });
            for node in nodes {
                match u32::try_from(node) {
                    Ok(node) => *counts.entry(NodeId(node)).or_default() += weight as u64,
                    Err(_) => unknown += weight as u64,
                }
            }
        }
        Placement { wanted: self.node, pages: counts.into_iter().collect(), unknown }
    }
}
